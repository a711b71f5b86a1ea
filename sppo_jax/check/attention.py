"""Attention of every layer type of the model: right on every device, and at which rates by queries and keys."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sppo_jax.arrays.dtypes import compute_dtype
from sppo_jax.attention import check
from sppo_jax.attention.check import FUSED, PLAIN, Extent, Pattern
from sppo_jax.check.row import FAILS, NOT_JUDGED, SLOW, Figures, Row, Wanted, by_device, errors, rate
from sppo_jax.config.model import ModelConfig
from sppo_jax.hardware.attention_rates import WAYS
from sppo_jax.models.counts import ATTENTION_BACKWARD, chunk_pairs, layer_costs
from sppo_jax.plan.plan import Plan
from sppo_jax.profile.measure import attention_work
from sppo_jax.profile.timing import Timer
from sppo_jax.train.kernel_check import calls_of, kernel_for_tpus

# On CPUs plain attention in the compute dtype is compared with plain attention in float32: a few rows of each.
_FEW = Extent(24, 40, {"ragged lengths": Pattern((17, 33), (17, 16), 0.0)}, (5,))
# Share of the planner's rate below which attention is slow.
_LEAST_RATE = 0.85
# Queries and keys of the calls that are timed: triangles, and chunks behind a prefix.
CALLS = ((8192, 8192), (32768, 32768), (8192, 32768), (32768, 131072))
QUICK_CALLS = ((8192, 8192), (8192, 32768))


def measure(model: ModelConfig, plan: Plan, devices: Sequence[jax.Device]) -> Figures:
    """Returns what differs from plain attention on a device of this process; "" where nothing does.

    Args:
        model: its layer types give the calls.
        plan: gives the kernel, and how heads are spread.
        devices: of this process.
    """
    dtype, calls = compute_dtype(model.compute_dtype), calls_of(model, plan)
    kernel = PLAIN._replace(extent=_FEW)
    if plan.kernel == "cudnn" and devices[0].platform in ("gpu", "cuda"):
        kernel = FUSED
    elif plan.kernel == "pallas" and devices[0].platform == "tpu":
        kernel, _ = kernel_for_tpus(plan, devices[0], calls, dtype.itemsize)
    found = [
        check.find_difference(heads, dtype, has_window=has_window, kernel=kernel, devices=devices)
        for heads, has_window in calls
    ]
    is_plain = kernel.forward is PLAIN.forward
    return {
        "differs": next(filter(None, found), ""),
        "calls": len(calls),
        "kernel": "plain" if is_plain else plan.kernel,
    }


def judge(found: Sequence[Figures], wanted: Wanted) -> Row:
    """Returns the row of attention's values in all processes."""
    change = "install another cuDNN or libtpu, or set model.kernel=blockwise"
    if problem := errors(found):
        return Row(value=problem, verdict=FAILS, change=change)
    expected = "plain attention in float32, but for rounding"
    for process, one in enumerate(found):
        if one["differs"]:
            where = f"{one['differs']}, in process {process} on {one['host']}"
            return Row(value=where, expected=expected, verdict=FAILS, change=change)
    return Row(value=f"{found[0]['kernel']} attention, {found[0]['calls']} kinds of calls", expected=expected)


def measure_rates(timer: Timer, model: ModelConfig, plan: Plan, calls: Sequence[tuple[int, int]]) -> Figures:
    """Returns the FLOP/s of calls of attention, each way.

    Args:
        timer: of the devices of this process.
        model: gives heads, all those of a layer.
        plan: gives the kernel, and how heads are spread.
        calls: queries and keys.
    """
    heads = calls_of(model, plan)[0][0]
    shape = {"num_heads": heads.num_heads, "num_kv_heads": heads.num_kv_heads, "head_dim": heads.head_dim}
    one = ModelConfig(vocab_size=1, hidden_size=heads.num_heads * heads.head_dim, num_layers=1, mlp_size=1, **shape)
    dtype, figures = jnp.dtype(compute_dtype(model.compute_dtype)), []
    for queries, keys in calls:
        flops = layer_costs(one).pair_flops * chunk_pairs(keys - queries, queries)
        work = attention_work(one, plan.kernel, queries, keys - queries, dtype)
        for way, times, (make, turn) in zip(WAYS, (1.0, ATTENTION_BACKWARD), work, strict=True):
            flops_s = [times * flops / seconds for seconds in timer.device_seconds(make, turn)]
            figures.append({"way": way, "queries": queries, "keys": keys, "flops_s": flops_s})
    return {"attention": figures, "head_dim": heads.head_dim}


def judge_rates(found: Sequence[Figures], wanted: Wanted) -> Row:
    """Returns the row of attention's rates in all processes: the slowest device of each call counts."""
    if problem := errors(found):
        return Row(value=problem, verdict=FAILS)
    shown, slow = [], []
    for number, call in enumerate(found[0]["attention"]):
        values = [(name, x) for name, x in by_device([_call(one, number) for one in found], "flops_s")]
        name, least = min(values, key=lambda value: value[1])
        text = f"{call['way']} {call['queries']} x {call['keys']} {rate(least, 'FLOP')}"
        shown.append(text)
        if least < _LEAST_RATE * wanted.attention_flops_s[WAYS.index(call["way"])]:
            slow.append(f"{text} on {name}")
    if not wanted.is_timed:
        return Row(value=", ".join(shown), verdict=NOT_JUDGED)
    forward, backward = (rate(_LEAST_RATE * one, "FLOP") for one in wanted.attention_flops_s)
    expected = f"at least {forward} forward, {backward} backward"
    if slow:
        return Row(
            value=", ".join(slow), expected=expected, verdict=SLOW, change="give check.json to hardware.measured"
        )
    return Row(value=", ".join(shown), expected=expected)


def _call(one: Figures, number: int) -> Figures:
    return {"host": one["host"], **one["attention"][number]}
