"""Measured figures of a device as JSON; no jax, so that the planner can read them."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sppo_jax.files.whole import json_text, parse_json
from sppo_jax.hardware.attention_rates import WAYS, AttentionCall, AttentionRates, make_rates

# Files of the first version lack what has a default here.
SCHEMA_VERSION = 2
_READ = (1, 2)
# What `sppo check` stores beside the figures.
_BESIDE = ("sppo_check", "rows")
COPY_WAYS, COPY_DEVICES = ("out", "back", "both"), ("one", "all")
BLOCK = 512  # of the blockwise kernel (attention/blockwise.py)


@dataclass(frozen=True, kw_only=True)
class MatmulFigure:
    """The FLOP/s that a product of [rows, inner] and [inner, columns] reached."""

    rows: int
    inner: int
    columns: int
    flops_s: float


@dataclass(frozen=True, kw_only=True)
class AttentionFigure:
    """A chunk's attention to the tokens before it and to itself.

    Args:
        chunk_tokens: number of queries.
        prefix_tokens: tokens before the chunk.
        forward_s: seconds of one layer's forward.
        backward_s: seconds of its backward.
        flops_s: FLOP/s of both together, counting two matmuls forward and five backward over the pairs that exist.
    """

    chunk_tokens: int
    prefix_tokens: int
    forward_s: float
    backward_s: float
    flops_s: float


@dataclass(frozen=True, kw_only=True)
class CopyFigure:
    """The bytes a second, one way, of a device's copies to its host.

    Args:
        way: "out" to the host, "back", or "both" at once.
        devices: "one" device of a host copies, or "all"; then that of the slowest.
        bytes_s: bytes a second.
    """

    way: str
    devices: str
    bytes_s: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What `sppo profile` or `sppo check` measured, with all devices busy at once; figures of the slowest device.

    Args:
        schema_version: version of the JSON layout.
        device: this project's name of the device.
        jax: version of jax.
        date: day of the measurement, YYYY-MM-DD.
        dtype: dtype of activations and matmuls.
        kernel: the attention kernel.
        num_devices: devices that ran.
        matmul_flops_s: the best FLOP/s of a matmul.
        layer_flops_s: FLOP/s of a layer around its attention, forward and backward, counting its matmuls alone.
        matmul: each shape that was tried.
        attention: each chunk and prefix that was tried, with the shortest prefix first.
        host_link_bytes_s: bytes a second between device and host, the slower way; None if both share one memory.
        link_bytes_s: bytes a second to another device, one way; None if there is only one device.
        hbm_bytes_s: bytes a second between device memory and compute units.
        overhead_s: fixed seconds of each tick of a pipeline, whatever its length.
        overhead_tokens: number of tokens whose matmuls take as long as reading the weights.
        head_dim: elements of a head of the attention that was measured; older files do not say: 128.
        attention_calls: calls of attention, each way by itself, with heads of the same size, from which plans take
            their rates. Empty, as in older files: from the chunks of `attention`.
        driver: version of the GPUs' driver; "" if unknown.
        cudnn: version of cuDNN; "" without it.
        copies: copies to the host and back, of one device and of all at once.
        network_bytes_s: bytes a second to a device of another host, one way; None if there is one host.
        all_to_all_bytes_s: bytes a second that leave a device in an all-to-all within a host; None for one device.
        loop_wait_share: share of a copy to the host for which a loop of an unknown count waits; None: not measured.
        beside_copies_share: share of a ring's rate that is left beside host copies; None: not measured.
        pinning_bytes_s: bytes a second that the system pins for a device, while it does for all; None: not measured.
        slowest_share: products' rate of the slowest device over the median; None: not measured.
    """

    schema_version: int = SCHEMA_VERSION
    device: str
    jax: str
    date: str
    dtype: str
    kernel: str
    num_devices: int
    matmul_flops_s: float
    layer_flops_s: float
    matmul: tuple[MatmulFigure, ...]
    attention: tuple[AttentionFigure, ...]
    host_link_bytes_s: float | None
    link_bytes_s: float | None
    hbm_bytes_s: float
    overhead_s: float
    overhead_tokens: float
    head_dim: int = 128
    attention_calls: tuple[AttentionCall, ...] = ()
    driver: str = ""
    cudnn: str = ""
    copies: tuple[CopyFigure, ...] = ()
    network_bytes_s: float | None = None
    all_to_all_bytes_s: float | None = None
    loop_wait_share: float | None = None
    beside_copies_share: float | None = None
    pinning_bytes_s: float | None = None
    slowest_share: float | None = None

    @property
    def attention_flops_s(self) -> float:
        """FLOP/s of attention over the longest prefix, for the fastest chunk."""
        return self._long_attention.flops_s

    @property
    def attention_rates(self) -> AttentionRates:
        """Rates by way, queries and keys, counting whole blocks if the kernel computes whole blocks."""
        return make_rates(
            dataclasses.replace(call, flops_s=call.flops_s * self._counted(call))
            for call in self.attention_calls or [one for figure in self.attention for one in _calls_of(figure)]
        )

    def _counted(self, call: AttentionCall) -> float:
        """Returns the pairs of a query and a key that are counted of a call, by those that exist."""
        prefix, block = call.keys - call.queries, self.attention_block
        if not block:
            return 1.0
        return block_pairs(prefix, call.queries, block) / (call.queries * prefix + call.queries**2 / 2)

    @property
    def attention_block(self) -> int:
        """Queries and keys of a block of the blockwise kernel; 0 for a kernel that skips parts of a block."""
        return BLOCK if self.kernel == "blockwise" else 0

    @property
    def _long_attention(self) -> AttentionFigure:
        longest = max(figure.prefix_tokens for figure in self.attention)
        return max((f for f in self.attention if f.prefix_tokens == longest), key=lambda figure: figure.flops_s)


def _calls_of(figure: AttentionFigure) -> tuple[AttentionCall, AttentionCall]:
    """Returns the two calls of a chunk; of its FLOPs the forward has two sevenths."""
    flops = figure.flops_s * (figure.forward_s + figure.backward_s) / 7
    lengths = {"queries": figure.chunk_tokens, "keys": figure.prefix_tokens + figure.chunk_tokens}
    return (
        AttentionCall(way="forward", flops_s=2 * flops / figure.forward_s, **lengths),
        AttentionCall(way="backward", flops_s=5 * flops / figure.backward_s, **lengths),
    )


def block_pairs(start: float, tokens: float, block: float, window: float = 0) -> float:
    """Returns the (query, key) pairs in the whole blocks that a causal chunk touches.

    Args:
        start: tokens of the sequence before the chunk.
        tokens: tokens of the chunk.
        block: tokens of a block of queries (or of the chunk, if it is shorter) and of a block of keys.
        window: tokens that a token attends to; 0: all before it.
    """
    if not tokens:
        return 0.0
    rows = min(block, tokens)
    begins = [start + row * rows for row in range(math.ceil(tokens / rows))]
    pairs = rows * sum(math.ceil(min(begin + rows, start + tokens) / block) * block for begin in begins)
    if not window:
        return pairs
    return pairs - rows * sum(max(0, begin - window + 1) // block * block for begin in begins)


def write_profile(profile: Profile, path: Path) -> None:
    """Writes figures as JSON, for `read_profile`."""
    path.write_text(json_text(dataclasses.asdict(profile), indent=1) + "\n", encoding="utf-8")


def read_profile(path: Path) -> Profile:
    """Reads what `write_profile` wrote.

    Raises:
        ValueError: the file cannot be read, is not a profile, or lacks figures; one line says what to change.
    """
    rule = "a file of measured figures must be what sppo profile or sppo check wrote"
    change = "make the file again with sppo profile"
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{rule}, got {path}, which cannot be read ({type(error).__name__}); {change}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{rule}, got {path}, which is not JSON ({error}); {change}") from None
    try:
        return profile_from_dict(values)
    except ValueError as error:
        raise ValueError(f"{rule}, got {path}: {error}; {change}") from None


def profile_from_dict(values: Any) -> Profile:
    """Returns a profile from the dict that `dataclasses.asdict` made of it.

    Raises:
        ValueError: figures are missing, unknown, or not positive numbers.
    """
    if not isinstance(values, dict):
        raise ValueError(f"the file must hold an object, got {type(values).__name__}")
    if "rows" in values and "matmul_flops_s" not in values:
        raise ValueError("sppo check stored no rates: it ran on CPUs, or a row failed")
    if values.get("schema_version") not in _READ:
        raise ValueError(f"schema_version must be {' or '.join(map(str, _READ))}, got {values.get('schema_version')!r}")
    # Older files do not say what has a default.
    values = _DEFAULTS | {key: value for key, value in values.items() if key not in _BESIDE}
    values["schema_version"] = SCHEMA_VERSION
    _check_keys(values, Profile, "")
    rows: dict[str, Any] = {}
    for key, row_type in _LISTS.items():
        if not isinstance(values[key], list) or not (values[key] or key in _DEFAULTS):
            raise ValueError(f"{key} must be a list of figures, got {values[key]!r}")
        for index, row in enumerate(values[key]):
            if not isinstance(row, dict):
                raise ValueError(f"{key}[{index}] must be an object, got {row!r}")
            _check_keys(row, row_type, f"{key}[{index}].")
            _check_numbers(row, row_type, f"{key}[{index}].", zero=("prefix_tokens",))
        rows[key] = tuple(row_type(**row) for row in values[key])
    _check_calls(rows["attention_calls"])
    _check_copies(rows["copies"])
    none = tuple(key for key, value in _DEFAULTS.items() if value is None)
    zero = ("overhead_s", "overhead_tokens", "loop_wait_share", "beside_copies_share")
    _check_numbers(values, Profile, "", none=("host_link_bytes_s", "link_bytes_s", *none), zero=zero)
    return Profile(**{**values, **rows})


_LISTS = {
    "matmul": MatmulFigure,
    "attention": AttentionFigure,
    "attention_calls": AttentionCall,
    "copies": CopyFigure,
}
_DEFAULTS: dict[str, Any] = {
    one.name: [] if one.default == () else one.default
    for one in dataclasses.fields(Profile)
    if one.default is not dataclasses.MISSING and one.name != "schema_version"
}


def _check_copies(copies: tuple[CopyFigure, ...]) -> None:
    for index, copy in enumerate(copies):
        for name, known in (("way", COPY_WAYS), ("devices", COPY_DEVICES)):
            if getattr(copy, name) not in known:
                raise ValueError(f"copies[{index}].{name} must be one of {known}, got {getattr(copy, name)!r}")


def _check_calls(calls: tuple[AttentionCall, ...]) -> None:
    for index, call in enumerate(calls):
        if call.way not in WAYS:
            raise ValueError(f"attention_calls[{index}].way must be forward or backward, got {call.way!r}")
        if call.keys < call.queries:
            raise ValueError(
                f"attention_calls[{index}] must have at least as many keys as queries, which are among them, got "
                f"{call.keys} keys and {call.queries} queries"
            )
    if missing := set(WAYS) - {call.way for call in calls} if calls else ():
        raise ValueError(f"attention_calls must have calls of both ways, got none {min(missing)}")


def _check_keys(values: dict, row_type: type, where: str) -> None:
    names = {field.name for field in dataclasses.fields(row_type)}
    for what, keys in (("lacks", names - set(values)), ("has an unknown", set(values) - names)):
        if keys:
            raise ValueError(f"the file {what} {where}{sorted(keys)[0]}")


def _check_numbers(
    values: dict, row_type: type, where: str, *, none: tuple[str, ...] = (), zero: tuple[str, ...] = ()
) -> None:
    for field in dataclasses.fields(row_type):
        value, name = values[field.name], field.name
        if field.type is str:
            if not isinstance(value, str):
                raise ValueError(f"{where}{name} must be text, got {value!r}")
            continue
        if name in _LISTS or (value is None and name in none):
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (value == 0 and name not in zero):
            raise ValueError(f"{where}{name} must be a positive number, got {value!r}")
