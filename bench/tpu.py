"""What decides most about a first TPU, measured by one command.

    python -m bench.tpu                         all cases, about 20 minutes on four chips
    python -m bench.tpu --within 575 --resume   in 575 s; repeat to go on
    python -m bench.tpu --parts kernel,hop      some parts
    python -m bench.tpu --tiny                  every part on the CPU, in about a minute, to see that the parts work
    python -m bench.tpu --compile v5p:2x2x1     compile every program for TPUs that are not here; nothing runs

Parts: system (libraries, limits), kernel (attention on four shapes, with one core and two, beside what the planner
charges), hop (keys round a ring of four, alone and beside the kernel), copies (to the host and back), step (the check
of the kernel, then whole train steps beside their plans). Options, files, cases that fail and exit codes are those of
`bench/gpu.py`. No process but this one may use the TPUs. bench/README.md says what
each part decides.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package is not installed

from bench import gpu
from bench.gpu_parts.machine import absent_tpus, tpu_machine
from bench.tpu_parts.report import TPU_SECTIONS

PARTS = {"system": "gpu_parts"} | dict.fromkeys(("kernel", "hop", "copies", "step"), "tpu_parts")
TPUS = gpu.Stopwatch(
    name="tpu",
    help=__doc__,
    parts=PARTS,
    here=tpu_machine,
    absent=absent_tpus,
    order=list,
    sections=TPU_SECTIONS,
)


def main(words: list[str] | None = None) -> int:
    """Run the cases that were asked for; return the exit code."""
    return gpu.main(words, TPUS)


if __name__ == "__main__":
    sys.exit(main())
