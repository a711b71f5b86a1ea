"""The Plan: everything static about a training step, decided before anything is compiled."""

import dataclasses
import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from sppo_jax import rules
from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.plan.check_stash import check_places, check_stash
from sppo_jax.plan.host_arrays import HostArrays
from sppo_jax.plan.host_pieces import ONE_PIECE, check_host_pieces, describe_pieces
from sppo_jax.plan.json_format import SCHEMA_VERSION, read_object, read_plan
from sppo_jax.plan.parts import (
    GROUPS,
    KERNELS,
    OPTIMIZERS,
    PLANNED_FOR,
    RING_PASSES,
    SAVES,
    SEQUENCE_DOCUMENTS,
    SEQUENCE_SPLITS,
    WEIGHTS,
    MeshShape,
    PlannedFor,
    Predicted,
    SchedulePlan,
    StashPlan,
)
from sppo_jax.schedule.check import check
from sppo_jax.schedule.csv_format import from_csv
from sppo_jax.schedule.generators import make_table
from sppo_jax.schedule.outline import make_outline
from sppo_jax.schedule.table import MIN_HOST_GAP, Table
from sppo_jax.schedule.waiting import with_late_heads


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything static of a training step: mesh, chunks, schedule, stash; and why.

    Args:
        schema_version: version of the JSON layout.
        version: version of sppo_jax that made the plan.
        mesh: devices along each axis.
        ulysses: inner factor of the seq axis, over which heads are spread.
        ring: outer factor of the seq axis, over which tokens stay spread.
        sequence_kind: "ulysses", "ring" or "hybrid".
        sequence_length: tokens of a sequence.
        sequences_per_pipeline: sequences each pipeline runs in a step.
        chunk_lengths: tokens of each chunk over all devices of a stage; they sum to sequence_length.
        schedule: the schedule.
        stash: the places of activations.
        kv_slots: sequences that a stage has in flight at once.
        predicted: predicted figures.
        ring_pass: what travels on the ring: "kv", "q", or "auto" for the fewer bytes, tick by tick.
        kernel: the attention kernel, "blockwise", "cudnn" or "pallas".
        backward_queries: queries that a call of the kernel "cudnn" gets at most in a backward, in layers without a
            window; 0: all of a chunk.
        groups: the members of a document: "static": all of them; "flex": each document of a batch has its own.
        sequence_documents: "one": a sequence holds one document at most, and batches with more are refused; "many": a
            sequence may hold any number.
        weights: "resident": a device holds the weights and the gradient sums of all layers of its stage during a step;
            "gathered": those of one group of layers at a time, and its share of all others.
        optimizer: where a device's share of the float32 parameters and moments waits: "device" or "host".
        saves: "async": a checkpoint is a copy in host memory, which is written while training goes on; "blocking":
            training waits while the state is written array by array, because the host has no memory for a copy.
        host_pieces: the arrays in which the stash lies on the host: the share of every row, in 1024ths, in each.
        host_arrays: bytes of a device's arrays on the host, from which the limit of XLA's pool follows.
        planned_for: the documents whose step the plan makes short.
        cluster: the devices that the plan was made for, as `hardware.cluster` names them; empty where it is not known.
        model: the fields of the model that the plan was made for; empty where a plan is written by hand.
        reasons: for each choice, why it was made.

    Raises:
        ValueError: the fields do not fit together.
    """

    schema_version: int = SCHEMA_VERSION
    version: str
    mesh: MeshShape
    ulysses: int
    ring: int
    sequence_kind: str
    sequence_length: int
    sequences_per_pipeline: int
    chunk_lengths: tuple[int, ...]
    schedule: SchedulePlan
    stash: StashPlan
    kv_slots: int
    predicted: Predicted
    ring_pass: str = "auto"
    kernel: str = "blockwise"
    backward_queries: int = 0
    groups: str = "static"
    sequence_documents: str = "many"
    weights: str = "resident"
    optimizer: str = "device"
    saves: str = "async"
    host_pieces: tuple[int, ...] = ONE_PIECE
    host_arrays: HostArrays = HostArrays()
    planned_for: PlannedFor = PlannedFor()
    cluster: str = ""
    model: dict[str, int | str | None] = field(default_factory=dict, hash=False)
    reasons: dict[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_versions(self)
        _check_sequence(self)
        check_places(self.stash)
        check_host_pieces(self.host_pieces)
        facts = _facts(self)
        rules.check(facts)
        # A table given by hand has to be checked first; one that is generated is where it runs.
        outline = self.outline() if self.schedule.csv is None else self.table()
        _check_table(self, outline)
        in_turn = self.schedule.csv is None and outline.passes_groups_in_turn
        rules.check(dataclasses.replace(facts, one_group_at_a_time=in_turn))
        check_stash(self.stash, self.schedule, outline, flexible=self.groups == "flex")
        _check_alpha(self.stash.alpha, outline)

    @property
    def num_sequences(self) -> int:
        """Sequences of a step, over all pipelines."""
        return self.mesh.data * self.sequences_per_pipeline

    @property
    def has_one_document(self) -> bool:
        """Whether a sequence holds one document at most."""
        return self.sequence_documents == "one"

    @property
    def _gathered(self) -> str:
        gathered = "; weights gathered group by group" if self.weights == "gathered" else ""
        return f"{gathered}; optimizer on the host" if self.optimizer == "host" else gathered

    @property
    def _of_documents(self) -> list[tuple[str, str]]:
        """The row of the documents that the plan is for; none where they are full."""
        planned_for, step_s = self.planned_for, self.predicted.documents_step_s
        if step_s is None:
            return []
        mean, attended = f"mean {planned_for.mean_tokens:,.0f} tokens", f"{planned_for.attended:.1%} of the pairs"
        return [("documents", f"{step_s:.4g} s a step for those of data.source ({mean}, {attended})")]

    def table(self) -> Table:
        """Returns the schedule table, checked."""
        sizes = self.mesh.pipe, self.sequences_per_pipeline, self.chunk_lengths
        return _checked_table(self.schedule, *sizes, late_heads=self.has_late_heads)

    def outline(self) -> Table:
        """Returns the schedule table, what it repeats written once; not checked."""
        sizes = self.mesh.pipe, self.sequences_per_pipeline, self.chunk_lengths
        return schedule_table(self.schedule, *sizes, outline=True, late_heads=self.has_late_heads)

    @property
    def has_late_heads(self) -> bool:
        """Whether each head runs right before the backward of its chunk; see `waiting.with_late_heads`."""
        return self.stash.waiting == "host"

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as dicts, lists, strings and numbers."""
        return json.loads(self.to_json())

    def to_json(self) -> str:
        """Returns the plan as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Plan":
        """Reads what `to_dict` wrote, or a report with more keys (see `json_format.read_plan`).

        Raises:
            ValueError: a key is unknown or missing, the schema is another one, or the plan does not hold together.
        """
        nested = {
            "mesh": MeshShape,
            "schedule": SchedulePlan,
            "stash": StashPlan,
            "predicted": Predicted,
            "host_arrays": HostArrays,
            "planned_for": PlannedFor,
        }
        return read_plan(cls, nested, values)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads what `to_json` wrote; see `from_dict`."""
        return cls.from_dict(read_object(text))

    def describe(self) -> str:
        """Returns the plan in a few lines of text, with the reason of each choice."""
        mesh, stash, predicted = self.mesh, self.stash, self.predicted
        rows = [
            ("mesh", f"data {mesh.data} x pipe {mesh.pipe} x seq {mesh.seq}{self._gathered}"),
            ("sequence", f"{self.sequence_length} tokens, {self.sequences_per_pipeline} per pipeline"),
            ("sequence_kind", f"{self.sequence_kind} (ulysses {self.ulysses} x ring {self.ring})"),
            ("chunks", f"{len(self.chunk_lengths)}: {_abridge(self.chunk_lengths)}{_shapes(self.schedule.shapes)}"),
            ("schedule", f"{self.schedule.label}, kv slots {self.kv_slots}"),
            ("stash", f"inputs {stash.inputs}, attention {stash.late_attention}, rest {stash.rest}, kv {stash.kv}"),
            ("waiting", stash.waiting),
            ("alpha", _abridge(stash.alpha)),
            ("kv_grad_dtype", stash.kv_grad_dtype),
            ("step", f"{predicted.step_s:.4g} s, bubble {predicted.bubble_fraction:.1%}"),
            *self._of_documents,
            ("hbm", _by_stage(predicted.hbm_bytes)),
            ("host", f"{_by_stage(predicted.host_bytes)}{describe_pieces(self.host_pieces)}"),
            ("saves", self.saves),
        ]
        lines = []
        for key, text in rows:
            lines.append(f"{key:14} {text}")
            if key in self.reasons:
                lines.append(f"{'':14}   {self.reasons[key]}")
        shown = {key for key, _ in rows}
        lines += [f"{key:14} {reason}" for key, reason in self.reasons.items() if key not in shown]
        return "\n".join(lines)


@lru_cache(maxsize=32)
def schedule_table(
    schedule: SchedulePlan,
    num_stages: int,
    num_sequences: int,
    chunk_lengths: tuple[int, ...],
    *,
    outline: bool = False,
    late_heads: bool = False,
) -> Table:
    """Returns the table of a schedule, not checked; equal arguments give the same object, with its cached properties.

    Args:
        schedule: the schedule.
        num_stages: stages.
        num_sequences: sequences of a pipeline.
        chunk_lengths: tokens of each chunk.
        outline: whether to write once what repeats; a table given by hand is the same either way.
        late_heads: whether heads run late, see `waiting.with_late_heads`; nothing for a table given by hand.
    """
    if schedule.csv is not None:
        table = _csv_table(schedule.csv)
        return table.with_chunks(table.chunk_lengths, schedule.shapes) if schedule.shapes else table
    counts = num_stages, num_sequences, len(chunk_lengths), schedule.interleave, schedule.wave
    table = _counted_table(schedule.name, *counts, outline=outline, late_heads=late_heads)
    return table.with_chunks(chunk_lengths, schedule.shapes)


@lru_cache(maxsize=64)
def _counted_table(
    name: str,
    num_stages: int,
    num_sequences: int,
    num_chunks: int,
    interleave: int,
    wave: int,
    *,
    outline: bool,
    late_heads: bool,
) -> Table:
    """Returns the table of a schedule with chunks of one token."""
    make = make_outline if outline else make_table
    table = make(name, num_stages, num_sequences, (1,) * num_chunks, interleave, wave)
    return with_late_heads(table) if late_heads else table


@lru_cache(maxsize=16)
def _checked_table(
    schedule: SchedulePlan,
    num_stages: int,
    num_sequences: int,
    chunk_lengths: tuple[int, ...],
    *,
    late_heads: bool = False,
) -> Table:
    table = schedule_table(schedule, num_stages, num_sequences, chunk_lengths, late_heads=late_heads)
    check(table)
    return table


_csv_table = lru_cache(maxsize=16)(from_csv)


_CHOICES = {
    "sequence_kind": SEQUENCE_SPLITS,
    "ring_pass": RING_PASSES,
    "kernel": KERNELS,
    "groups": GROUPS,
    "sequence_documents": SEQUENCE_DOCUMENTS,
    "weights": WEIGHTS,
    "optimizer": OPTIMIZERS,
    "saves": SAVES,
}


def _check_versions(plan: Plan) -> None:
    if plan.schema_version != SCHEMA_VERSION:
        raise ValueError(f"schema_version of a plan must be {SCHEMA_VERSION}, got {plan.schema_version!r}; plan again")


def _check_sequence(plan: Plan) -> None:
    for name, choices in _CHOICES.items():
        got = getattr(plan, name)
        if got not in choices:
            raise ValueError(f"{name} of a plan must be one of {', '.join(choices)}, got {got!r}; choose one")
    if plan.planned_for.documents not in PLANNED_FOR:
        raise ValueError(
            f"planned_for.documents of a plan must be one of {', '.join(PLANNED_FOR)}, got "
            f"{plan.planned_for.documents!r}; choose one"
        )
    if plan.has_one_document and plan.groups == "flex":
        raise ValueError(
            "sequence_documents of a plan with teams must be many, as documents move between sequences, got one with "
            "groups=flex; change one of the two"
        )
    if plan.backward_queries < 0 or (plan.backward_queries and (plan.kernel != "cudnn" or plan.groups == "flex")):
        raise ValueError(
            "backward_queries of a plan must be 0, or more with the kernel cudnn and without teams, got "
            f"{plan.backward_queries} with kernel={plan.kernel}, groups={plan.groups}; plan again"
        )
    for axis in ("data", "pipe", "seq"):
        if getattr(plan.mesh, axis) < 1:
            raise ValueError(f"mesh.{axis} of a plan must be at least 1, got {getattr(plan.mesh, axis)}; plan again")
    if plan.ulysses * plan.ring != plan.mesh.seq:
        raise ValueError(
            f"ulysses * ring of a plan must be mesh.seq = {plan.mesh.seq}, got {plan.ulysses} * {plan.ring}; plan again"
        )


def _facts(plan: Plan) -> rules.Facts:
    """Returns what rules may know of a plan without its table."""
    schedule, stash = plan.schedule, plan.stash
    return rules.Facts(
        data=plan.mesh.data,
        pipe=plan.mesh.pipe,
        seq=plan.mesh.seq,
        sequences=plan.sequences_per_pipeline,
        length=plan.sequence_length,
        chunks=plan.chunk_lengths,
        shapes=schedule.shapes,
        split=plan.sequence_kind,
        ulysses=plan.ulysses,
        groups=plan.groups,
        kernel=plan.kernel,
        schedule="table" if schedule.csv is not None else schedule.name,
        interleave=schedule.interleave,
        wave=schedule.wave,
        weights=plan.weights,
        optimizer=plan.optimizer,
        kv=stash.kv,
        waiting=stash.waiting,
    )


def _check_table(plan: Plan, table: Table) -> None:
    for what, got, wanted in (
        ("stages", table.num_stages, plan.mesh.pipe),
        ("virtual stages a stage", table.num_groups, plan.schedule.interleave),
        ("sequences", table.num_sequences, plan.sequences_per_pipeline),
        ("sequences of a wave", table.wave, plan.schedule.wave),
        ("chunk lengths", table.chunk_lengths, plan.chunk_lengths),
    ):
        if got != wanted:
            raise ValueError(f"the plan's {what} must be those of the schedule table, {got}, got {wanted}; plan again")
    needed = table.kv_peak
    if plan.kv_slots != needed:
        raise ValueError(f"kv_slots of a plan must be {needed} for the schedule, got {plan.kv_slots}; plan again")


def _check_alpha(alpha: tuple[float, ...], table: Table) -> None:
    bundles, hides = table.diagonal_bundles, table.overlaps_copies
    if len(alpha) != len(bundles):
        raise ValueError(
            f"stash.alpha must have one value for each of the {len(bundles)} diagonals of the schedule, got "
            f"{len(alpha)}; give {len(bundles)} values"
        )
    of_bundle: dict[int, float] = {}
    for diagonal, (value, bundle) in enumerate(zip(alpha, bundles, strict=True)):
        if not 0 <= value <= 1:
            raise ValueError(f"stash.alpha must be in [0, 1], got {value} at diagonal {diagonal}; give a share")
        if value != of_bundle.setdefault(bundle, value):
            raise ValueError(
                f"stash.alpha must be the same on diagonals that share ticks, got {value} at diagonal {diagonal} "
                f"and {of_bundle[bundle]} at diagonal {bundles.index(bundle)}; use one value for both"
            )
        if value > 0 and not hides[bundle]:
            raise ValueError(
                f"stash.alpha must be 0 on diagonals that are read back less than {MIN_HOST_GAP} compute ticks "
                f"after they are written, got {value} at diagonal {diagonal}, which is read back after "
                f"{table.bundle_gaps[bundle]}; set 0 there"
            )


def _shapes(shapes: tuple[int, ...]) -> str:
    return f"; ticks of {', '.join(map(str, shapes))}" if shapes else ""


def _by_stage(values: tuple[int, ...]) -> str:
    if len(set(values)) == 1:
        return f"{format_bytes(values[0])} per device"
    return ", ".join(format_bytes(value) for value in values) + " per device, by stage"


def _abridge(values: tuple) -> str:
    """Returns runs of equal values as `count x value`."""
    runs: list[list] = []
    for value in values:
        if runs and runs[-1][1] == value:
            runs[-1][0] += 1
        else:
            runs.append([1, value])
    return ", ".join(str(value) if count == 1 else f"{count} x {value}" for count, value in runs)
