"""The process of one case: `python -m bench.gpu_parts.child FILE`, where the runner has described the case."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

PARTS = ("system", "exact", "train", "probe", "attention", "delta", "pool", "health", "step", "overlap", "peer", "flex")


def main(spec: Path) -> int:
    """Run or compile a case; each row goes to the file that the runner reads."""
    told = json.loads(spec.read_text(encoding="utf-8"))
    module = f"bench.{told['folder']}.{told['part']}"
    with Path(told["rows"]).open("a", encoding="utf-8") as file:

        def emit(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

        if told["mode"] == "compile":
            from bench.gpu_parts.compiling import compile_case

            compile_case(module, told["settings"], told["device"], emit)
        else:
            importlib.import_module(module).run(told["settings"], told["device"], emit)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
