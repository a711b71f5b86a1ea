"""What the processes run on: versions and flags that are known to fail, and those that differ between processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sppo_jax.check.row import FAILS, OK, SLOW, Figures, Row, Wanted, errors, worst
from sppo_jax.compat import FAILING_CUDNN, MIN_JAXLIB_FOR_GPU_OFFLOAD, PROVEN_CUDNN, another_cudnn
from sppo_jax.processes.gpu_start import REFUSED_FLAGS, refused_flags
from sppo_jax.processes.software import software

_SHOWN = 60


def measure() -> Figures:
    """Returns versions and flags of this process."""
    return {"facts": software()}


def judge(found: Sequence[Figures], wanted: Wanted) -> Row:
    """Returns the row of the software of all processes."""
    if problem := errors(found):
        return Row(value=problem, verdict=FAILS)
    first: Mapping[str, str] = found[0]["facts"]
    problems = [*_differing(found), *_failing(first, wanted)]
    verdict = worst([one.verdict for one in problems])
    if verdict != OK:
        return next(one for one in problems if one.verdict == verdict)
    return Row(value=", ".join(f"{name} {text[:_SHOWN]}" for name, text in first.items() if name != "XLA_FLAGS"))


def _differing(found: Sequence[Figures]) -> Iterator[Row]:
    first = found[0]["facts"]
    for process, one in enumerate(found):
        for name in sorted({*first, *one["facts"]}):
            ours, theirs = (facts.get(name, "none") for facts in (first, one["facts"]))
            if ours != theirs:
                yield Row(
                    value=f"{name}: {theirs} in process {process} on {one['host']}, {ours} in process 0",
                    expected="the same in all processes",
                    verdict=FAILS,
                    change="install the same packages and set the same flags on all hosts",
                )


def _failing(facts: Mapping[str, str], wanted: Wanted) -> Iterator[Row]:
    cudnn, jaxlib = (_numbers(facts.get(name, "")) for name in ("cuDNN", "jaxlib"))
    if cudnn and any(begin <= cudnn < end for begin, end in FAILING_CUDNN):
        yield Row(
            value=f"cuDNN {facts['cuDNN']}",
            expected="none of 9.10.0, 9.10.1, 9.13 and 9.14, whose attention fails",
            verdict=FAILS,
            change=another_cudnn(),
        )
    elif cudnn and cudnn < PROVEN_CUDNN:
        yield Row(value=f"cuDNN {facts['cuDNN']}", expected="9.18 or newer", verdict=SLOW, change=another_cudnn())
    if cudnn and wanted.uses_host and jaxlib < MIN_JAXLIB_FOR_GPU_OFFLOAD:
        yield Row(
            value=f"jaxlib {facts['jaxlib']}, which offloads wrongly on GPUs",
            expected="0.11.1 or newer",
            verdict=FAILS,
            change="install jax 0.11.1 or newer",
        )
    refused = refused_flags(facts.get("XLA_FLAGS", "").split()) if wanted.num_devices > 1 else ()
    for word in refused:
        bug = REFUSED_FLAGS[word.lstrip("-").partition("=")[0]]
        yield Row(
            value=f"{word} with {wanted.num_devices} devices",
            expected=f"no such flag, with which collectives fail or hang ({bug})",
            verdict=FAILS,
            change="remove the flag from XLA_FLAGS",
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(".")[:3] if word.isdecimal())
