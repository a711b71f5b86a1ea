"""What it costs that a packed sequence's documents may lie in any row: the sums of experts by packed row, on this CPU.

    python -m bench.experts_sums     under a minute; writes results/experts_sums_cpu.json

Both sides add up the shares of a layer's tokens and spread the gradient of the sums: of one row, and by packed row. The
difference is given as a share of forward and backward of the layer's experts alone, in CPU seconds; attention and all
else would make the share smaller. A share is the median of the rounds.
"""

import json
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from bench.experts import CASES, compiled_forms
from bench.gpu_parts.machine import cpu_name
from sppo_jax.config.experts import ExpertsConfig
from sppo_jax.models.moe import router
from sppo_jax.models.moe.balance import Balance
from sppo_jax.pipeline.layers.token_sums import SharesLayout, Sharing

RESULTS = Path(__file__).parent / "results" / "experts_sums_cpu.json"
NUM_ROWS, ROUNDS, REPEATS = 8, 5, 1


def compiled_sums(case: tuple[int, ...], groups: str) -> tuple[jax.stages.Compiled, tuple]:
    """Compile the sums of a case without teams ("static") or with ("flex"); return the program and its arguments."""
    tokens, top_k, _, count, _ = case
    config = ExpertsConfig(count=count, chosen=top_k)
    rng = np.random.default_rng(0)
    logits_TE = jnp.asarray(rng.normal(size=(tokens, count)), jnp.float32)
    shares = router.shares_of(logits_TE, router.choose(logits_TE, None, config), config)
    plan = SimpleNamespace(groups=groups, num_sequences=NUM_ROWS, schedule=SimpleNamespace(interleave=1))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shares)
    layout = SharesLayout(like, Balance.of(config), plan, jnp.dtype("float32"), Sharing((1,), None))
    rows_T = jnp.asarray(rng.integers(0, NUM_ROWS, tokens), jnp.int32) if layout.is_moved else None
    is_real_T = jnp.asarray(rng.uniform(size=tokens) < 0.95)

    def run(shares, is_real_T, rows_T):
        sums_W = layout.of_tokens(shares, is_real_T, rows_T)
        return layout.cotangents(sums_W[None], 0, is_real_T, rows_T)

    args = shares, is_real_T, rows_T
    return jax.jit(run).lower(*args).compile(), args


def cpu_seconds(program: jax.stages.Compiled, args: tuple, repeats: int) -> float:
    """Return CPU seconds of one call, the mean of several."""
    begin_s = time.process_time()
    for _ in range(repeats):
        jax.block_until_ready(program(*args))
    return (time.process_time() - begin_s) / repeats


def measure(case: tuple[int, ...]) -> dict:
    """Time the two sums and the experts of a case in turn."""
    sums = {groups: compiled_sums(case, groups) for groups in ("static", "flex")}
    programs, args = compiled_forms(case)
    shares = []
    for _ in range(ROUNDS + 1):
        of_sums = {groups: cpu_seconds(*one, repeats=4 * REPEATS) for groups, one in sums.items()}
        experts_s = cpu_seconds(programs["tiles"], args, repeats=REPEATS)
        shares.append((of_sums["flex"] - of_sums["static"]) / experts_s)
    shares = sorted(shares[1:])  # the first fills caches
    names = ("tokens", "chosen", "hidden", "experts", "size")
    return {
        **dict(zip(names, case, strict=True)),
        "share": round(statistics.median(shares), 5),
        "range": [round(shares[0], 5), round(shares[-1], 5)],
    }


def main() -> int:
    """Measure all cases and store them."""
    rows = [measure(case) for case in CASES]
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    found = {"date": today, "cpu": cpu_name(), "jax": jax.__version__, "packed_rows": NUM_ROWS, "rows": rows}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(map(str, rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
