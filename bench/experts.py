"""The two forms of experts' products, tiles of rows and ragged products, in turn on this machine's CPU.

    python -m bench.experts     under a minute; writes results/experts_cpu.json

A case is forward and backward of one layer's experts. A ratio is the median of the rounds' ratios of CPU seconds.
"""

import json
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu_parts.machine import cpu_name
from sppo_jax.models.moe import grouped
from sppo_jax.models.moe.experts import ACTIVATIONS

RESULTS = Path(__file__).parent / "results" / "experts_cpu.json"
# Tokens, experts of a token, hidden size, experts of a layer, size of an expert.
CASES = ((2048, 2, 96, 8, 96), (2048, 2, 96, 32, 96), (4096, 4, 256, 16, 128))
FORMS = {"tiles": (), "ragged": ("cpu",)}  # the platforms on which products are ragged
ROUNDS = 5


def compiled_forms(case: tuple[int, ...]) -> tuple[dict, tuple]:
    """Compile a case in each form; return the programs by name, and their arguments."""
    tokens, top_k, hidden, count, size = case
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    chosen_Tk = jnp.asarray(rng.permuted(np.tile(np.arange(count), (tokens, 1)), axis=1)[:, :top_k], jnp.int16)
    experts = grouped.Experts(normal(count, hidden, size), normal(count, hidden, size), normal(count, size, hidden))
    args = normal(tokens, hidden), jnp.full((tokens, top_k), 1 / top_k), experts

    def total(x, weights, experts):
        return grouped.mix(ACTIVATIONS["swiglu"], x, weights, chosen_Tk, experts).sum()

    programs = {}
    for name, platforms in FORMS.items():
        with patch.object(grouped, "RAGGED", platforms):
            programs[name] = jax.jit(lambda *args: jax.value_and_grad(total, (0, 1, 2))(*args)).lower(*args).compile()
    return programs, args


def measure(case: tuple[int, ...]) -> dict:
    """Time the forms of a case in turn."""
    programs, args = compiled_forms(case)
    seconds = {name: [] for name in programs}
    for _ in range(ROUNDS + 1):
        for name, program in programs.items():
            begin = time.perf_counter(), time.process_time()
            jax.block_until_ready(program(*args))
            seconds[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    rounds = {name: of_form[1:] for name, of_form in seconds.items()}  # the first fills caches
    ratios = [ragged[1] / tiles[1] for ragged, tiles in zip(rounds["ragged"], rounds["tiles"], strict=True)]
    return {
        **dict(zip(("tokens", "chosen", "hidden", "experts", "size"), case, strict=True)),
        **{f"{name}_s": round(statistics.median(wall for wall, _ in rounds[name]), 4) for name in rounds},
        "ragged_over_tiles": round(statistics.median(ratios), 2),
        "range": [round(min(ratios), 2), round(max(ratios), 2)],
    }


def main() -> int:
    """Measure all cases and store them."""
    rows = [measure(case) for case in CASES]
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    RESULTS.write_text(
        json.dumps({"date": today, "cpu": cpu_name(), "jax": jax.__version__, "rows": rows}, indent=1) + "\n"
    )
    print("\n".join(map(str, rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
