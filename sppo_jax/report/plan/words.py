"""The words for plans, the same in text and on pages."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sppo_jax.config import ModelConfig
from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.models.counts import num_active_params, num_params
from sppo_jax.plan.plan import Plan
from sppo_jax.predict.seconds.costs import WINDOW_RATE
from sppo_jax.predict.states import STATE_RATE, STATE_STEP_S, STATE_STEP_TOKENS
from sppo_jax.report.plan.figures import Figures
from sppo_jax.search.no_fit import HOLDERS

PART_NAMES = {
    "attention": "attention",
    "linear": "linear layers",
    "states": "mixers with a state",
    "head": "head and loss",
    "communication": "communication",
    "sums": "gradient sums",
    "overhead": "tick overhead",
    "padding": "padding",
    "copies": "host copies, exposed",
    "waits": "waits for host copies",
    "bubble": "waiting (bubble)",
    "update": "gradient sum and optimizer",
}
_HOW_SAVED = {"async": "asynchronous, overlapped with the next steps", "blocking": "blocking, array by array"}
# Reasons that are shown beside other figures, or that say nothing if there is no choice.
TOLD_ELSEWHERE = ("hbm", "host", "sequence_kind", "alpha")
# Rows that the planner decides, and so explains.
DECIDED = (
    *("mesh", "weights", "optimizer", "seq split", "chunks", "schedule"),
    *("stash", "host share", "waiting", "dK/dV", "tie"),
)
COLUMN_NAMES = {"params": "params", "kv": "K/V", "kv_grad": "dK/dV", "stash": "stash", "working": "other"}
COLUMN_HELP = (
    "params: parameters, gradients, optimizer; K/V, dK/dV: keys and values of all tokens so far, and their gradients; "
    "stash: activations kept for the backward; other: temporaries of a tick; peak: peak HBM, the sum of these; "
    "chunks: the most stashes held at once"
)


def seconds(value: float, largest: float = 0.0) -> str:
    """Returns seconds with as many decimals as the largest of the figures beside it needs."""
    largest = max(abs(value), largest)
    decimals = next((n for n, least in ((1, 100), (2, 10), (3, 1), (4, 0.1)) if largest >= least), 6)
    return f"{value:.{decimals}f}"


def mesh_of(plan: Plan) -> str:
    """Returns the mesh as data x pipe x seq."""
    return f"{plan.mesh.data} x {plan.mesh.pipe} x {plan.mesh.seq}"


def stash_of(plan: Plan) -> str:
    """Returns the places of layer inputs, attention outputs and the rest."""
    stash = plan.stash
    return "/".join((stash.inputs, stash.late_attention, stash.rest))


def most_alpha(plan: Plan) -> str:
    """Returns the largest alpha; "-" if nothing goes to the host."""
    return f"{max(plan.stash.alpha):g}" if plan.stash.has_share else "-"


def holder_of(name: str) -> str:
    """Returns the name of a holder of device memory."""
    return HOLDERS.get(name, name.replace("_", " "))


def schedule_of(plan: Plan) -> str:
    """Returns the schedule's name, with the number of groups of layers of a stage and the wave where above 1."""
    name, interleave, wave = plan.schedule.name, plan.schedule.interleave, plan.schedule.wave
    grouped = name if interleave == 1 else f"{name.removeprefix('interleaved-')} v={interleave}"
    return grouped if wave == 1 else f"{grouped} k={wave}"


def chunks_of(plan: Plan) -> str:
    """Returns the chunk lengths as runs, count x length; with tick shapes, the least and the most and the shapes."""
    lengths, shapes = plan.chunk_lengths, plan.schedule.shapes
    if shapes:
        ticks = ", ".join(f"{tokens:,}" for tokens in shapes)
        return f"{len(lengths)} of {min(lengths):,} to {max(lengths):,} tokens, in ticks of {ticks}"
    if len(set(lengths)) == 1:
        return f"{len(lengths)} of {lengths[0]:,} tokens"
    runs = ", ".join(f"{last - first + 1} x {value:,}" for first, last, value in runs_of(lengths))
    return f"{len(lengths)}: {runs} tokens"


def runs_of(values: Iterable[Any]) -> list[tuple[int, int, Any]]:
    """Returns runs of equal values as (first index, last index, value)."""
    found: list[tuple[int, int, Any]] = []
    for index, value in enumerate(values):
        if found and found[-1][2] == value:
            found[-1] = (found[-1][0], index, value)
        else:
            found.append((index, index, value))
    return found


def span(first: int, last: int) -> str:
    """Returns the numbers from first to last as a short text."""
    return f"{first}" if first == last else f"{first}-{last}"


def host_share_of(alpha: Sequence[float]) -> str:
    """Returns how much of the stash goes to the host, in words.

    Args:
        alpha: the share of each forward tick of a wave, 0..1.
    """
    runs = runs_of(alpha)
    (_, _, most), (first, last, least) = runs[0], runs[-1]
    if len(runs) == 1:
        return f"{_share(most)} of every forward tick"
    if len(runs) == 2 and least == 0:
        ticks = "tick" if first == last else f"{last - first + 1} ticks"
        return f"{_share(most)} of every forward tick but the last {ticks}, whose stash stays on the device"
    return ", ".join(f"{_share(value)} of forward ticks {span(first, last)}" for first, last, value in runs)


def _share(value: float) -> str:
    """Returns a share of the stash in words."""
    return {0: "nothing", 1: "all"}.get(value, f"{100 * value:g}%")


def _host_share(plan: Plan) -> list[tuple[str, str, tuple[str, ...]]]:
    """Returns the row of alpha, if anything goes to the host."""
    if not plan.stash.has_share:
        return []
    return [("host share", host_share_of(plan.stash.alpha), ("alpha",))]


def duration(seconds_: float) -> str:
    """Returns seconds in the largest of seconds, minutes, hours and days of which there are at least two."""
    for name, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds_ >= 2 * size:
            return f"{seconds_ / size:.1f} {name}"
    return f"{seconds_:.3g} seconds"


def verdict(figures: Figures) -> list[tuple[str, str]]:
    """Returns the answer as rows of a label and a text: whether it fits, step, speed, hours of the run, memory."""
    found, plan, cluster = figures.found, figures.plan, figures.cluster
    hbm = f"HBM {format_bytes(found.memory.hbm_bytes)} of {format_bytes(cluster.device.hbm_bytes)}"
    host = f"host {format_bytes(found.memory.host)} of {format_bytes(cluster.device_host_bytes)}"
    memory = ("memory", f"{hbm}, {host}, per device")
    if not found.fits:
        smallest = ("verdict", "DOES NOT FIT; the figures below are those of the smallest plan")
        return [smallest, *_parameters(figures.model), memory]
    mfu = "" if figures.mfu is None else f", causal MFU {figures.mfu:.1%}"
    step_s, each = plan.predicted.step_s, figures.tokens_s / figures.num_devices
    run = [("run", f"{duration(step_s * figures.num_steps)} for {figures.num_steps:,} steps")]
    return [
        ("verdict", "fits"),
        (
            "step",
            f"{seconds(step_s)} s (simulated){mfu}, bubble {plan.predicted.bubble_fraction:.1%}",
        ),
        (
            "speed",
            f"{figures.tokens_s:,.0f} tokens/s, {each:,.0f} per device, for documents as long as a sequence",
        ),
        *_documents(figures),
        *(run if figures.num_steps > 1 else []),
        *_parameters(figures.model),
        memory,
    ]


def _documents(figures: Figures) -> list[tuple[str, str]]:
    """Returns the row of the documents of the data, if their lengths are known or that they are not is to be said."""
    if figures.documents is None:
        return [("documents", figures.planned_for)] if figures.planned_for else []
    mean, attended = figures.documents.mean_tokens, figures.documents.attended
    attends = any(layer_type.mixer == "attention" for layer_type, _ in figures.model.counts(figures.model.num_layers))
    of_pairs = f"; attention {attended:.1%} of that of a full document, counted in pairs of tokens" if attends else ""
    step_s = seconds(figures.documents_step_s)
    text = f"about {step_s} s a step for the documents of data.source (mean {mean:,.0f} tokens{of_pairs})"
    is_for = {"known": ", for which this plan is", "full": "; the plan is for full documents"}
    return [("documents", text + is_for[figures.plan.planned_for.documents] + _teams(figures))]


def _teams(figures: Figures) -> str:
    """Says what teams gain on the documents, if that was worked out."""
    if figures.teams_gain is None:
        return ""
    return f"; teams make it {figures.teams_gain:.2f}x as fast as packed rows, simulated on the first step"


def _parameters(model: ModelConfig) -> list[tuple[str, str]]:
    """Returns the row of a model with experts that counts its parameters; of other models none."""
    if not model.experts.count:
        return []
    total, active = num_params(model) / 1e9, num_active_params(model) / 1e9
    return [("parameters", f"{total:.3g} billion, {active:.3g} billion of them active for a token")]


def name_of(model: ModelConfig) -> str:
    """Returns a model's preset, the folder that it was imported from, or its shape."""
    origin = Path(model.hf).name if model.hf else ""
    return model.preset or origin or f"{model.num_layers} layers, {model.hidden_size} wide"


def subject(figures: Figures) -> str:
    """Returns the model, the sequences and the devices of the plan."""
    plan, name = figures.plan, name_of(figures.model)
    sequences = plan.mesh.data * plan.sequences_per_pipeline
    several = "" if sequences == 1 else f"{sequences} sequences of "
    devices = figures.cluster.num_devices
    count = "1 device" if devices == 1 else f"{devices} devices"
    return f"{name}, {several}{plan.sequence_length:,} tokens per step, on {figures.cluster.name} ({count})"


def _experts(plan: Plan) -> list[tuple[str, str, tuple[str, ...]]]:
    """Returns the row that says how experts are held, where the model of a plan has some."""
    count = plan.model.get("experts.count", 0)
    if not count:
        return []
    held = {"gathered": "gathered with their group of layers", "resident": "held by each device of a stage"}
    return [("experts", f"all {count} of a layer are {held[plan.weights]}; no token moves to another device", ())]


def _window(plan: Plan) -> list[tuple[str, str, tuple[str, ...]]]:
    """Returns the row that says how a window is charged, where the model of a plan has one within a sequence."""
    given = {size for name, size in plan.model.items() if name.endswith("sliding_window") and isinstance(size, int)}
    windows = sorted(size for size in given if 0 < size < plan.sequence_length)
    if not windows:
        return []
    guess = f"{WINDOW_RATE:.0%} of the rate of kernel {plan.kernel}, which is a guess: it was not measured"
    sizes = " or ".join(f"{size:,}" for size in windows)
    return [("window", f"{sizes} tokens; attention is charged at {guess}", ())]


def _state(plan: Plan) -> list[tuple[str, str, tuple[str, ...]]]:
    """Returns the row that says how layers with a state are charged, where the model of a plan has some."""
    if not any("delta." in name for name in plan.model):
        return []
    rate = f"{STATE_RATE:.0%} of the rate of matmuls and {STATE_STEP_S * 1e6:.0f} us per {STATE_STEP_TOKENS} tokens"
    return [("state", f"layers with a state are charged at {rate}, which are guesses: they were not measured", ())]


def settings_of(plan: Plan) -> list[tuple[str, str, tuple[str, ...]]]:
    """Returns the plan's choices as (name, value, names of the reasons that belong to it)."""
    stash = plan.stash
    split = plan.sequence_kind
    if plan.mesh.seq == 1:
        split = "none (one device per stage)"
    elif plan.ulysses > 1 and plan.ring > 1:
        split = f"{split} (ulysses {plan.ulysses} x ring {plan.ring})"
    inputs = "of the first layer of each group alone" if stash.inputs == "period" else stash.inputs
    places = f"layer inputs {inputs}, attention outputs {stash.late_attention}, the rest {stash.rest}"
    groups = plan.schedule.interleave
    schedule = f"{plan.schedule.name}, {groups} groups of layers per stage" if groups > 1 else plan.schedule.name
    if plan.schedule.wave > 1:
        schedule += f", waves of {plan.schedule.wave} sequences"
    of_groups = {"keep": "", "recompute": " in one group of layers"}.get(stash.kv, " in two groups of layers")
    sequences = f"{plan.kv_slots} {'sequence' if plan.kv_slots == 1 else 'sequences'}"
    schedule += f", K/V of {sequences} at once{of_groups}"
    optimizer = "parameters and moments on the host, updated slice by slice at the end of a step"
    weights = {
        "gathered": "gathered: whole weights and gradient sums of one group of layers at a time",
        "resident": "resident: whole weights and gradient sums of all layers of a stage",
    }[plan.weights]
    says_weights = plan.weights == "gathered" or "weights" in plan.reasons
    return [
        ("mesh", f"data {plan.mesh.data} x pipe {plan.mesh.pipe} x seq {plan.mesh.seq}", ("mesh",)),
        *([("weights", weights, ("weights",))] if says_weights else []),
        *_experts(plan),
        *([("optimizer", optimizer, ("optimizer",))] if plan.optimizer == "host" else []),
        ("seq split", split, ("sequence_kind",) if plan.mesh.seq > 1 else ()),
        ("chunks", chunks_of(plan), ("chunks",)),
        (
            "schedule",
            schedule,
            ("schedule", "wave", "kv"),
        ),
        ("stash", places, ("stash",)),
        *_host_share(plan),
        *([("waiting", "on the host, between two groups of layers", ("waiting",))] if stash.waiting == "host" else []),
        ("dK/dV", stash.kv_grad_dtype, ("kv_grad_dtype",)),
        ("kernel", plan.kernel, ("kernel", "sequence_documents")),
        *_window(plan),
        *_state(plan),
        ("saves", _HOW_SAVED[plan.saves], ("saves",)),
    ]
