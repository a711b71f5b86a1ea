"""Part `delta`: seconds of the gated delta rule with its convolution, forward and backward, by spans side by side.

Beside each: FLOP/s of the recurrence's FLOPs and seconds of a step, as measured and as the planner guesses them.

Letters: T tokens, G key heads, N value heads, K key size, V value size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp

from bench.gpu_parts.case import Case, Emit
from bench.gpu_parts.program import Program, Target, target_here, timer_of
from sppo_jax.mixers import delta
from sppo_jax.mixers.delta import GatedDelta, Heads, Taps
from sppo_jax.mixers.delta_work import BLOCK, Cut, cut_of
from sppo_jax.mixers.mixer import Operands, TokenRun
from sppo_jax.predict.states import STATE_STEP_TOKENS, StateWork
from sppo_jax.profile.measure import Work, normal

_K = 1024
# FLOPs of a step's backward, in those of its forward.
_WAYS = {"forward": ("F", 1.0), "backward": ("B", 2.0)}
_SIZES = {"value_heads": 4, "key_heads": 2, "size": 128, "taps": 4}


def cases(*, tiny: bool) -> list[Case]:
    """List the cases: the heads of one of eight devices, in one span and in as many as a run takes."""
    if tiny:
        sizes = _SIZES | {"value_heads": 2, "key_heads": 1, "size": 8}
        return [_case("4K tokens, 2 heads, 8 spans", {"tokens": 4 * _K, "spans": 8, "run_s": 0.001} | sizes, 10)]
    return [
        _case(f"256K tokens, 4 heads, {name}", {"tokens": 256 * _K, "spans": spans, "run_s": 0.1} | _SIZES, 40)
        for name, spans in (("8 spans", 8), ("1 span", 1))
    ]


def _case(name: str, settings: dict, expected_s: float) -> Case:
    needs = {"hbm_gib": 16.0} if expected_s > 10 else {}
    return Case(part="delta", name=name, settings=settings, expected_s=expected_s, limit_s=12 * expected_s, **needs)


def programs(settings: dict, target: Target) -> Iterator[Program]:
    """List the programs of a case."""
    timer, name = timer_of(settings, target), f"{settings['tokens']} tokens, {settings['spans']} spans"
    for way, work in _works(settings, target).items():
        context = functools.partial(_spans, settings["spans"])
        yield Program(f"{name}, {way}", *timer.program(*work), context=context)


def run(settings: dict, device: str, emit: Emit) -> None:
    """Measure; a row for each way."""
    target = target_here(device)
    mixer, heads = GatedDelta(settings["taps"] - 1), _operands(settings, target)
    flops = mixer.flops_per_token(jax.eval_shape(heads))
    steps = settings["tokens"] / (BLOCK * settings["spans"])
    for way, (make, turn) in _works(settings, target).items():
        kind, times = _WAYS[way]
        with _spans(settings["spans"]):
            seconds = timer_of(settings, target).seconds(make, turn)
        emit(
            {
                "what": f"{settings['tokens']} tokens, {settings['value_heads']} heads, {settings['spans']} spans",
                "way": way,
                "seconds": seconds,
                "flops_s": times * flops * settings["tokens"] / seconds,
                "step_s": seconds / steps,
                **_guess(kind, times, flops, settings["tokens"], target.device.matmul_flops_s),
            }
        )


def _guess(kind: str, times: float, flops: float, tokens: int, matmul_flops_s: float) -> dict[str, float]:
    """Return the planner's seconds, and the FLOP/s and the seconds of a step that they come from."""

    def token_s(share: float, flops: float) -> float:
        return StateWork(share=share, flops=flops, sent=0.0, sent_sums=0.0).token_s(kind, 1, matmul_flops_s)

    return {
        "guessed_s": token_s(1.0, flops) * tokens,
        "guessed_flops_s": times * flops / token_s(0.0, flops),
        "guessed_step_s": token_s(1.0, 0.0) * STATE_STEP_TOKENS,
    }


def _spans(count: int) -> mock._patch:
    """Make runs go in so many spans side by side."""

    def cut(length: int, elements: int) -> Cut:
        found = cut_of(length, elements)
        blocks = -(-found.tokens // (BLOCK * count)) * count
        return found._replace(spans=count, tokens=blocks * BLOCK)

    return mock.patch.object(delta, "cut_of", cut)


def _operands(settings: dict, target: Target) -> Callable[[], Operands]:
    dtype = jnp.bfloat16 if target.platform == "gpu" else jnp.float32
    tokens, size, taps = (settings[name] for name in ("tokens", "size", "taps"))

    def make() -> Operands:
        key, value = (tokens, settings["key_heads"], size), (tokens, settings["value_heads"], size)
        q, k, v = (normal(seed, dims, dtype) for seed, dims in enumerate((key, key, value)))
        g = -jnp.exp(normal(3, value[:2], jnp.float32) - 3)
        b = jax.nn.sigmoid(normal(4, value[:2], jnp.float32))
        constants = Taps(*(normal(5, (*dims[1:], taps), dtype) for dims in (key, key, value)))
        return Operands(Heads(q, k, v, g, b), constants)

    return make


def _works(settings: dict, target: Target) -> dict[str, Work]:
    """Return what is timed forward and backward; a backward makes the run again, as in a step."""
    mixer, make = GatedDelta(settings["taps"] - 1), _operands(settings, target)
    tokens = settings["tokens"]
    place = TokenRun(jnp.zeros(tokens, jnp.int32), jnp.zeros(mixer.reach, jnp.int32), jnp.int32(tokens))

    def begin():
        operands = make()
        return operands, mixer.empty_state(operands)

    def forward(state):
        operands, past = state
        out, past = mixer.mix(operands, past, place)
        return operands._replace(heads=operands.heads._replace(v=out)), past

    def begin_backward():
        operands, past = begin()
        return operands, past, operands.heads.v, past

    def backward(state):
        operands, past, dout, dpast = state
        _, pull = jax.vjp(lambda operands, past: mixer.mix(operands, past, place), operands, past)
        down, dpast = pull((dout, dpast))
        # Every gradient is used, and decays stay below one.
        heads = jax.tree.map(jnp.add, operands.heads, down.heads)
        heads = heads._replace(g=jnp.minimum(heads.g, 0), v=operands.heads.v)
        constants = jax.tree.map(jnp.add, operands.constants, down.constants)
        return Operands(heads, constants), past, down.heads.v, dpast

    return {"forward": (begin, forward), "backward": (begin_backward, backward)}
