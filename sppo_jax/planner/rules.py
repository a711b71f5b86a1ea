"""The rules that meshes break, in words, where no mesh suits the model and the sequence."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sppo_jax.plan.parts import MeshShape
from sppo_jax.planner.request import Request


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """A rule in words, and whether a mesh breaks it."""

    text: str
    broken: Callable[[MeshShape], bool]


def rules_of(request: Request, errors: Sequence[tuple[MeshShape, ValueError]]) -> str:
    """Returns the rules that meshes break, with what the config and the devices are, and what limits the meshes.

    Args:
        request: what was asked for, for which there is no mesh.
        errors: the meshes of the devices, each with the first error.
    """
    rules = _rules(request)
    named = [rule.text for rule in rules if any(rule.broken(mesh) for mesh, _ in errors)]
    # Of rules that have no words here, what was got by the first mesh that breaks one.
    others = {
        re.sub(r"\d+", "", text): text
        for text in (
            str(error).partition("; ")[0]
            for mesh, error in reversed(errors)
            if not any(rule.broken(mesh) for rule in rules)
        )
    }
    sequence, pinned = request.config.sequence, request.config.mesh.pinned
    limits = [f"mesh.data must divide sequence.per_step={sequence.per_step}"] if sequence.per_step else []
    if not sequence.per_step and "data" not in pinned:
        limits = ["mesh.data must be 1 where sequence.per_step is not given"]
    return ", ".join([*named, *others.values(), *limits, *(f"mesh.{axis}={size}" for axis, size in pinned.items())])


def _rules(request: Request) -> list[_Rule]:
    config, tile = request.config, request.cluster.device.tile
    sequence, interleave, length = config.sequence, config.schedule.interleave, config.sequence.length
    groups = 1 if interleave == "auto" else int(interleave)
    stages = "mesh.pipe" if groups == 1 else f"mesh.pipe * schedule.interleave={groups}"
    unit = "mesh.seq" if tile == 1 else f"mesh.seq * {tile} (the tile of a device)"
    rules = [
        _Rule(
            text=f"{stages} must divide model.num_layers={config.model.num_layers}",
            broken=lambda mesh: config.model.num_layers % (mesh.pipe * groups) != 0,
        )
    ]
    chunks = request.table[0].chunk_lengths if request.table is not None else sequence.chunks
    if isinstance(chunks, tuple):
        rules.append(
            _Rule(
                text="mesh.seq must divide the length of every chunk",
                broken=lambda mesh: any(tokens % mesh.seq for tokens in chunks),
            )
        )
    else:
        rules.append(
            _Rule(
                text=f"{unit} must divide sequence.length={length}",
                broken=lambda mesh: length % (mesh.seq * tile) != 0,
            )
        )
        count = 1 if chunks == "auto" else int(chunks)
        rules.append(
            _Rule(
                text=f"each of sequence.chunks={count} chunks must have at least {unit} tokens",
                broken=lambda mesh: length < count * mesh.seq * tile,
            )
        )
    return [*rules, *_rules_of_settings(request)]


def _rules_of_settings(request: Request) -> list[_Rule]:
    """Returns the rules of settings that need not be given."""
    config, tile = request.config, request.cluster.device.tile
    sequence, wave = config.sequence, config.schedule.wave
    rules = []
    if sequence.shapes != "auto":
        shapes = sequence.shapes
        rules.append(
            _Rule(
                text=f"mesh.seq * {tile} must divide each of sequence.shapes={list(shapes)}",
                broken=lambda mesh: any(tokens % (mesh.seq * tile) for tokens in shapes),
            )
        )
    if sequence.kind == "ulysses":
        rules.append(
            _Rule(
                text=f"mesh.seq must divide model.num_heads={config.model.num_heads}",
                broken=lambda mesh: config.model.num_heads % mesh.seq != 0,
            )
        )
    if sequence.ulysses:
        rules.append(
            _Rule(
                text=f"mesh.seq must suit sequence.kind={sequence.kind} with sequence.ulysses={sequence.ulysses}",
                broken=lambda mesh: (
                    mesh.seq % sequence.ulysses != 0
                    or (sequence.kind == "ulysses" and mesh.seq != sequence.ulysses)
                    or (sequence.kind == "ring" and sequence.ulysses != 1)
                ),
            )
        )
    if sequence.groups == "flex":
        rules.append(
            _Rule(
                text="mesh.seq must be a power of two of at least 2 for sequence.groups=flex",
                broken=lambda mesh: mesh.seq < 2 or mesh.seq & (mesh.seq - 1) != 0,
            )
        )
    if wave != "auto":
        rules.append(
            _Rule(
                text=f"schedule.wave={wave} must divide the sequences of a pipeline",
                broken=lambda mesh: (sequence.per_step // mesh.data or sequence.per_pipeline) % int(wave) != 0,
            )
        )
    return rules
