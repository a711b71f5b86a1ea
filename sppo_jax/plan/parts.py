"""The parts of a Plan: mesh, schedule, stash, predicted figures; and what its fields may be."""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from sppo_jax.rules import KERNEL_TILE

SEQUENCE_SPLITS = ("ulysses", "ring", "hybrid")
RING_PASSES = ("auto", "kv", "q")
WEIGHTS = ("resident", "gathered")
OPTIMIZERS = ("device", "host")
SAVES = ("async", "blocking")
GROUPS = ("static", "flex")
PLANNED_FOR = ("full", "known")
SEQUENCE_DOCUMENTS = ("many", "one")
KERNELS = ("blockwise", "cudnn", "pallas")


def cudnn_takes(itemsize: int, head_dim: int, most: int = 256) -> bool:
    """Returns whether cuDNN's attention takes elements of so many bytes and heads of so many, `most` at most.

    `most` differs by device: `hardware.Device.fused_head_dim`. No device has more than 256.
    """
    return itemsize == 2 and head_dim % 8 == 0 and head_dim <= most


def pallas_takes(itemsize: int, head_dim: int) -> bool:
    """Returns whether the kernel for TPUs takes elements of so many bytes and heads of so many.

    Fewer elements than 64 leave most of a matrix unit idle, and with more than 256 the kernel was not compiled.
    """
    return itemsize in (2, 4) and 64 <= head_dim <= 256


def cache_head_dim(kernel: str, head_dim: int) -> int:
    """Returns the elements that a head of keys or values takes in a cache, and on a ring.

    The kernel for TPUs reads keys where they lie. XLA gives arrays whose heads are no whole lanes another layout, and
    copies whole caches at each call. So its heads are filled up.
    """
    return -(-head_dim // KERNEL_TILE) * KERNEL_TILE if kernel == "pallas" else head_dim


# Fields of a model that a plan depends on; and those of the MLP, or of the experts in its place.
_MODEL_FIELDS = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
_DELTA_FIELDS = ("delta.value_heads", "delta.key_heads", "delta.key_size", "delta.value_size", "delta.taps")
_EXPERTS_FIELDS = ("experts.count", "experts.chosen", "experts.size", "experts.shared_size")


def model_shape(model: Any) -> dict[str, int | str | None]:
    """Returns what a plan depends on of a `config.ModelConfig`, by the names of the fields."""
    found = _shape(model, _MODEL_FIELDS)
    if not model.layers:
        return found
    layer_types = dict.fromkeys(model.type_names)
    of_types = {name: _shape(model.of_type(name), _MODEL_FIELDS[3:]) for name in layer_types}
    parts = {f"layer_types.{name}.{field}": size for name, shape in of_types.items() for field, size in shape.items()}
    return {**found, "layers": model.layers, **parts}


def _shape(model: Any, fields: tuple[str, ...]) -> dict[str, int | str | None]:
    of_mlp = _EXPERTS_FIELDS if model.experts.count else ("mlp_size",)
    of_window = ("sliding_window",) * bool(model.sliding_window)
    of_state = _DELTA_FIELDS if model.mixer == "delta" else ()
    return {name: attrgetter(name)(model) for name in (*fields, *of_mlp, *of_window, *of_state)}


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Devices along each mesh axis, outermost first."""

    data: int
    pipe: int
    seq: int

    @property
    def num_devices(self) -> int:
        """Devices of the whole mesh."""
        return self.data * self.pipe * self.seq


@dataclass(frozen=True, kw_only=True)
class SchedulePlan:
    """The schedule of a plan.

    Args:
        name: name of the schedule.
        interleave: virtual stages of a stage.
        csv: text of a table given by hand.
        wave: sequences of a pipeline that run as one.
        shapes: the tokens that a tick may have over all devices of a stage, rising; none: those of its longest chunk.
    """

    name: str
    interleave: int = 1
    csv: str | None = None
    wave: int = 1
    shapes: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """The schedule in a few words."""
        waves = f", waves of {self.wave} sequences" if self.wave > 1 else ""
        return f"{self.name}, interleave {self.interleave}{waves}"


def has_share(places: tuple[str, str, str]) -> bool:
    """Returns whether alpha says how much goes to the host, by the places of inputs, attention outputs and the rest."""
    return places[0] in ("host", "period") or places[1] == "host"


@dataclass(frozen=True, kw_only=True)
class StashPlan:
    """Where the activations of a chunk wait for its backward.

    Args:
        inputs: place of the layer inputs: "keep" (device memory), "host" or "recompute"; "period": those of the first
            layer of each group alone, of which alpha goes to the host. The group runs again in a backward.
        attention: place of the attention outputs and their LSE.
        attention_from: the first chunk whose attention outputs are stashed; backward computes attention again for the
            ticks whose chunks all come before. Attention of a late chunk takes longer, its outputs no more memory.
        rest: place of everything else.
        alpha: for each diagonal of the table, the share of a chunk's tokens of inputs and attention outputs
            that goes to the host, where their place is "host", or that of inputs "period".
        kv_grad_dtype: dtype in which dK and dV are accumulated.
        kv: how keys and values reach the backward: "keep" keeps those of every group of layers in device memory;
            "rebuild" makes those of one group at a time again from its layer inputs, while the group behind goes
            backward; "recompute" makes them again in the backward of the chunk itself, which is the only one of its
            sequence; "host" stashes those of every chunk on the host, where its stash may go there, and brings those
            of one group at a time back. Layers with a window have tails instead; see `rules.has_tails`.
        waiting: where chunks wait between two groups of layers, forward and backward: "keep" or "host". With "host"
            each head runs right before the backward of its chunk, and the chunk waits on the host for both.
    """

    inputs: str
    attention: str
    rest: str
    alpha: tuple[float, ...]
    kv_grad_dtype: str = "float32"
    kv: str = "keep"
    attention_from: int = 0
    waiting: str = "keep"

    @property
    def has_share(self) -> bool:
        """Whether alpha says how much of something goes to the host."""
        return has_share((self.inputs, self.attention, self.rest))

    @property
    def late_attention(self) -> str:
        """The place of the attention outputs, and of which chunks."""
        return f"{self.attention} from chunk {self.attention_from} on" if self.attention_from else self.attention


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What the planner expects.

    Args:
        step_s: seconds of a step of sequences of one document each.
        bubble_fraction: share of the stages' time of this step in which they compute no unit, 0..1.
        hbm_bytes: bytes of device memory of a device of each stage.
        host_bytes: bytes of host memory of a device of each stage.
        documents_step_s: seconds of a step, in the mean, of the documents that the plan was made for; None: for none.
    """

    step_s: float
    bubble_fraction: float
    hbm_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
    documents_step_s: float | None = None

    @property
    def chosen_by_s(self) -> float:
        """The seconds by which the plan was chosen."""
        return self.step_s if self.documents_step_s is None else self.documents_step_s


@dataclass(frozen=True, kw_only=True)
class PlannedFor:
    """The documents whose step a plan makes short.

    Args:
        documents: "full": each as long as a sequence; "known": those of `data.source`.
        mean_tokens: tokens of a known document, in the mean; 0 where documents are full.
        attended: pairs of a query and a key within one document, relative to a full one; 0..1.
    """

    documents: str = "full"
    mean_tokens: float = 0.0
    attended: float = 1.0
