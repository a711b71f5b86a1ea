"""What to change where no mesh suits the model and the sequence: the smallest changes, each of them tried."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from sppo_jax.config import Config, MeshConfig
from sppo_jax.hardware import Cluster
from sppo_jax.hardware.sizes import resized
from sppo_jax.plan.parts import MeshShape
from sppo_jax.rules import divisors
from sppo_jax.search.space.request import Request


class HasMesh(Protocol):
    """What is known of a layout here."""

    @property
    def mesh(self) -> MeshShape:
        """Devices along each axis."""


# The layouts of a changed request, of which their meshes matter here; none where it breaks a rule.
Find = Callable[[Request], Sequence[HasMesh]]
_MOST_NAMED = 4
# Numbers of devices are looked for up to this many times as many, or as few.
_DEVICE_FACTOR = 2
# Settings that are released, nearest first.
_RELEASED = (
    ("mesh", ("data",)),
    ("mesh", ("pipe",)),
    ("mesh", ("seq",)),
    ("schedule", ("interleave",)),
    ("schedule", ("wave",)),
    ("sequence", ("chunks",)),
    ("sequence", ("split",)),
    ("sequence", ("ulysses",)),
    ("sequence", ("split", "ulysses")),
    ("sequence", ("shapes",)),
    ("sequence", ("groups",)),
    ("schedule", ("name",)),
    ("schedule", ("name", "interleave")),
    ("mesh", ("weights",)),
    ("stash", ("waiting",)),
    ("stash", ("kv",)),
    ("optimizer", ("place",)),
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that leaves a mesh, and its size: the ratio of the new value to the old one, or its inverse."""

    text: str
    ratio: float


def nearest_changes(request: Request, find: Find) -> str:
    """Returns the smallest changes that leave a mesh, each enough by itself, smallest first.

    Where no single one is enough, they are those to make once the axes of the mesh are left to the planner. Empty if
    there are none either.

    Args:
        request: what was asked for, for which there is no mesh.
        find: tries a changed request.
    """
    changes = [*_pins(request, find), *_length(request, find), *_sequences(request, find), *_devices(request, find)]
    texts = [change.text for change in sorted(changes, key=lambda change: change.ratio)][:_MOST_NAMED]
    if texts:
        return ", or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
    if not request.config.mesh.pinned:
        return ""
    free = replace(request, config=replace(request.config, mesh=MeshConfig(weights=request.config.mesh.weights)))
    others = nearest_changes(free, find)
    return others and f"{' '.join(f'mesh.{axis}=auto' for axis in request.config.mesh.pinned)} together with {others}"


def released(
    config: Config, settings: tuple[tuple[str, tuple[str, ...]], ...]
) -> Iterator[tuple[dict[str, object], dict[str, object], Config]]:
    """Yields the config with some of its settings left to the planner.

    Args:
        config: the config.
        settings: a section and the names of settings of it that are released together.

    Yields:
        The values that were given and those that leave them to the planner, by `section.name`, and the config.
    """
    for section, names in settings:
        given, free = getattr(config, section), {}
        for field in dataclasses.fields(given):
            if field.name in names and getattr(given, field.name) != field.default:
                free[field.name] = field.default
        if free:
            before = {f"{section}.{name}": getattr(given, name) for name in free}
            after = {f"{section}.{name}": value for name, value in free.items()}
            yield before, after, replace(config, **{section: replace(given, **free)})


def _pins(request: Request, find: Find) -> Iterator[Change]:
    """Yields the settings without which there is a mesh; those released together only where none does alone."""
    alone: set[str] = set()
    for _, free, config in released(request.config, _RELEASED):
        if not alone & free.keys() and find(replace(request, config=config)):
            alone |= free.keys()
            text = " ".join(f"{name}={value}" for name, value in free.items())
            yield Change(text=text, ratio=_ratio(config.num_sequences, request.config.num_sequences))


def _length(request: Request, find: Find) -> list[Change]:
    """Returns the nearest length."""
    now = request.config.sequence.length
    for length in _nearest(_lengths(request, find), now):
        if _try(request, find, "sequence", length=length):
            return [Change(text=_text_of(length, now), ratio=_ratio(length, now))]
    return []


def suited_length(request: Request, find: Find) -> int | None:
    """Returns the longest length up to the request's for which there is a mesh, else the next longer one.

    Args:
        request: what was asked for.
        find: tries a changed request.

    Returns:
        The length in tokens; None: lengths do not decide.
    """
    now = request.config.sequence.length
    lengths = _lengths(request, find) | {now}
    for length in sorted(lengths, key=lambda length: (length > now, abs(length - now))):
        if length > 0 and _try(request, find, "sequence", length=length):
            return length
    return None


def _lengths(request: Request, find: Find) -> set[int]:
    """Returns lengths near the request's, found from the `seq` axes of a length that suits them all."""
    sequence, tile = request.config.sequence, request.tile
    if request.table is not None or isinstance(sequence.chunks, tuple):
        return set()
    total = max(request.cluster.num_devices, math.prod(request.config.mesh.pinned.values()))
    suiting = _try(request, find, "sequence", length=total * tile, chunks="auto")
    multiples = {layout.mesh.seq * tile for layout in suiting}
    lengths = {sequence.length // multiple * multiple + more for multiple in multiples for more in (0, multiple)}
    if sequence.chunks != "auto":
        lengths |= {sequence.chunks * multiple for multiple in multiples}
    return lengths


def _sequences(request: Request, find: Find) -> list[Change]:
    """Returns the nearest number of sequences of a step, where more or fewer pipelines leave a mesh."""
    config, now = request.config, request.config.num_sequences
    sequence, pinned = config.sequence, config.mesh.pinned.get("data")
    if request.table is not None or (pinned and sequence.given_per_step):
        return []
    sizes = divisors(request.cluster.num_devices)
    if pinned:
        section, name, values, now = "mesh", "data", set(sizes), pinned
    elif sequence.per_pipeline > 1:
        section, name, values = "sequence", "per_step", {size * sequence.per_pipeline for size in sizes}
    else:
        section, name = "sequence", "per_step"
        values = {now // size * size + more for size in sizes for more in (0, size)}
    for value in _nearest(values, now):
        if _try(request, find, section, **{name: value}):
            return [Change(text=f"{section}.{name}={value}", ratio=_ratio(value, now))]
    return []


def _devices(request: Request, find: Find) -> Iterator[Change]:
    """Yields the nearest numbers of devices, one below and one above."""
    found = [cluster.num_devices for cluster in suited_clusters(request, find)]
    if found:
        ratio = min(_ratio(size, request.cluster.num_devices) for size in found)
        counts = " or ".join(map(str, found))
        yield Change(text=f"a cluster of {counts} device{'s' if found != [1] else ''}", ratio=ratio)


def suited_clusters(request: Request, find: Find) -> list[Cluster]:
    """Returns the nearest clusters with a mesh, one smaller and one larger; of several hosts, whole hosts.

    Args:
        request: what was asked for.
        find: tries a changed request.
    """
    config, cluster = request.config, request.cluster
    count, step = cluster.num_devices, cluster.devices_per_host if cluster.num_hosts > 1 else 1
    # Each axis divides one of the factors, whatever the mesh.
    whole = config.model.num_layers * config.sequence.length * config.num_sequences
    found = []
    for counts in (
        range(count - step, (count - step) // _DEVICE_FACTOR, -step),
        range(count + step, count * _DEVICE_FACTOR + 1, step),
    ):
        sizes = (resized(cluster, size) for size in counts if whole % size == 0)
        changed = (one for one in sizes if one is not None and find(replace(request, cluster=one)))
        found += list(islice(changed, 1))
    return found


def _try(request: Request, find: Find, section: str, **values: object) -> Sequence[HasMesh]:
    """Returns the layouts of a request with other settings of a section; none where the config refuses them."""
    given = getattr(request.config, section)
    try:
        config = replace(request.config, **{section: replace(given, **values)})
    except ValueError:
        return []
    return find(replace(request, config=config))


def _nearest(values: set[int], now: int) -> list[int]:
    return sorted((value for value in values if value > 0 and value != now), key=lambda value: _ratio(value, now))


def _ratio(value: int, now: int) -> float:
    return max(value, now) / min(value, now)


def _text_of(length: int, now: int) -> str:
    share = length / now - 1
    return f"sequence.length={length} ({share:+.1%})" if abs(share) >= 0.0005 else f"sequence.length={length}"
