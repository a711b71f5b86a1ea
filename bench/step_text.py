"""The lowered text of drawn training steps as digits, by which a change of the code shows that it changes no program.

    python -m bench.step_text            compares all programs with tests/step_text.json, for the jax at hand
    python -m bench.step_text --write    writes the file again: only for a change that means to change programs
    options: names of programs, such as period-39

The programs are drawn as in the tests of combinations. A text has no locations, and is the same in every process. The
digits depend on jax's version, and the file has those of several.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
FILE = TESTS / "step_text.json"
# How each program is drawn, and its seed. CI compares the first two, which take the least time.
PROGRAMS = {
    "period-39": ("draw_period", 39),
    "by_groups-2": ("draw_by_groups", 2),
    "by_groups-5": ("draw_by_groups", 5),
    "period-45": ("draw_period", 45),
    "dense-3": ("draw", 3),
    "experts-4": ("draw_experts", 4),
    "kinds-2": ("draw_kinds", 2),
    "window-3": ("draw_window", 3),
    "period-22": ("draw_period", 22),
    "states-2": ("draw_states", 2),
    "states-5": ("draw_states", 5),
    "states-8": ("draw_states", 8),
}
NUM_QUICK = 2


def digits_of(name: str) -> str:
    """Lowers the training step of a program on simulated devices, and returns the digits of its text."""
    import combinations  # of tests/
    import jax
    import numpy as np
    import state_cases
    from flax import nnx
    from programs import batches

    from sppo_jax.fit.fingerprint import text_digits
    from sppo_jax.pipeline.api import value_and_grad

    draw, seed = PROGRAMS[name]
    has_state = draw == "draw_states"
    case = getattr(state_cases if has_state else combinations, draw)(seed)
    with _float64(case.dtype == "float64"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that a drawn program leaves without effect
        plan, model = case.make_plan(), case.make_model()
        make_batches = state_cases.packed_batches if has_state else batches
        batch = next(iter(make_batches(np.random.default_rng(seed), plan, model.config.vocab_size, 1)))
        return text_digits(jax.jit(value_and_grad(plan, model)).lower(nnx.state(model, nnx.Param), batch).as_text())


def known() -> dict[str, dict[str, str]]:
    """Returns the digits that are written down, by jax's version and program."""
    return json.loads(FILE.read_text(encoding="utf-8"))


@contextmanager
def _float64(enabled: bool) -> Iterator[None]:
    import jax

    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", enabled)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def main(words: Sequence[str] | None = None) -> int:
    """Compares or writes digits; returns 1 where a program differs."""
    parser = argparse.ArgumentParser(prog="python -m bench.step_text")
    parser.add_argument("names", nargs="*", choices=[[], *PROGRAMS], default=[], metavar="PROGRAM")
    parser.add_argument("--write", action="store_true", help="write the digits instead of comparing them")
    args = parser.parse_args(words)
    sys.path.insert(0, str(TESTS))
    import conftest  # noqa: F401  simulates the devices of tests, and sets how they trace
    import jax

    digits, differ = known(), 0
    of_version = digits.setdefault(jax.__version__, {})
    for name in args.names or PROGRAMS:
        begin_s = time.perf_counter()
        found = digits_of(name)
        verdict = "new" if name not in of_version else "the same" if of_version[name] == found else "DIFFERS"
        differ += verdict == "DIFFERS"
        print(f"{name:12} {found} {verdict:8} {time.perf_counter() - begin_s:.1f} s", flush=True)
        if args.write:
            of_version[name] = found
            FILE.write_text(json.dumps(digits, indent=2) + "\n", encoding="utf-8")
    return int(differ > 0 and not args.write)


if __name__ == "__main__":
    sys.exit(main())
