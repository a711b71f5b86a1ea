"""FlexSP's cost model: seconds and memory of a team of devices that shares documents by Ulysses.

Time of a team of d devices that holds documents of s_k tokens:

    T = sum_k (a1 s_k^2 + a2 s_k) / d + b1 + sum_k 16 L h s_k / (2^20 d v_d)        milliseconds

L layers, hidden size h, v_d the measured all-to-all bandwidth of d devices in GB/s. The last term is the time of the
all-to-alls of forward and backward: 4 tensors a layer, twice, 2 bytes an element. Devices keep a token's activations
(M_act MB) and their share of the model's states (16 bytes a parameter over all devices, ZeRO-3), so d devices hold at
most d (E - M_states) / M_act tokens.

Constants are those of the released code, fitted by its authors on 64 A100-40GB; nothing is fitted here. Departures:
times are rounded to whole nanoseconds, so that plans are equal on every machine, and the paper's constant b2 is left
out, as in the released code. The released code's units are kept: 2^20 bytes over 10^9 bytes a second counts as a
millisecond.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

# All-to-all bandwidth in GB/s by the number of devices; 8 devices share a host.
ALL_TO_ALL_GB_S = {2: 119.54, 4: 104.07, 8: 96.5, 16: 10.33, 32: 5.94, 64: 4.87}
MEMORY_LIMIT_GB = 30.0
NS_PER_MS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class FlexspModel:
    """A model's constants in FlexSP's cost model.

    Args:
        name: the paper's name.
        hidden_size: h.
        num_layers: L.
        activation_mb: MB of activations a token (M_act).
        quadratic_ms: milliseconds a squared token (a1).
        linear_ms: milliseconds a token (a2).
        fixed_ms: milliseconds a microbatch (b1).
        billions_192k: billions (2^30) of parameters with positions up to 192K.
        billions_384k: billions (2^30) of parameters with positions up to 384K.
    """

    name: str
    hidden_size: int
    num_layers: int
    activation_mb: float
    quadratic_ms: float
    linear_ms: float
    fixed_ms: float
    billions_192k: float
    billions_384k: float

    def billions(self, max_kilotokens: int) -> float:
        """Returns billions of parameters for a longest document of `max_kilotokens` * 1000 tokens."""
        return self.billions_192k + (self.billions_384k - self.billions_192k) * (max_kilotokens - 192) / 192


MODELS = {
    "7b": FlexspModel(
        name="GPT-7B",
        hidden_size=4096,
        num_layers=32,
        activation_mb=4.480441895,
        quadratic_ms=5.128e-6,
        linear_ms=0.1839576,
        fixed_ms=629.3563,
        billions_192k=7.1174468994140625,
        billions_384k=7.8498687744140625,
    ),
    "13b": FlexspModel(
        name="GPT-13B",
        hidden_size=5120,
        num_layers=40,
        activation_mb=4.220439453,
        quadratic_ms=9.2852e-6,
        linear_ms=0.3060189,
        fixed_ms=1132.5632,
        billions_192k=13.11605453491211,
        billions_384k=14.03158187866211,
    ),
    "30b": FlexspModel(
        name="GPT-30B",
        hidden_size=6656,
        num_layers=60,
        activation_mb=3.417381836,
        quadratic_ms=1.54262e-5,
        linear_ms=0.8035742,
        fixed_ms=2789.3644,
        billions_192k=31.52513885498047,
        billions_384k=32.71532440185547,
    ),
}


@dataclass(frozen=True, kw_only=True)
class TeamCosts:
    """Times and limits of teams in one cluster.

    Args:
        num_devices: devices of the cluster.
        degrees: sizes that a team may have, increasing.
        device_tokens: most tokens of a device.
        quadratic_ms: milliseconds a squared token on one device.
        linear_ms: milliseconds a token on one device.
        fixed_ms: milliseconds of every team, however few documents it has.
        exchange_ms: milliseconds a token of the all-to-alls, for each of `degrees`.
    """

    num_devices: int
    degrees: tuple[int, ...]
    device_tokens: int
    quadratic_ms: float
    linear_ms: float
    fixed_ms: float
    exchange_ms: tuple[float, ...] = field(repr=False)

    @property
    def fixed_ns(self) -> int:
        """Nanoseconds of every team."""
        return round(self.fixed_ms * NS_PER_MS)

    @property
    def cluster_tokens(self) -> int:
        """Most tokens of a microbatch."""
        return self.num_devices * self.device_tokens

    def tokens_D(self) -> np.ndarray:
        """Returns the most tokens of a team, int64 [degrees]."""
        return np.array(self.degrees, np.int64) * self.device_tokens

    def times_KD(self, lengths_K: np.ndarray) -> np.ndarray:
        """Returns the nanoseconds that each document adds to a team of each degree.

        Args:
            lengths_K: tokens of each document, int64 [documents].

        Returns:
            int64 [documents, degrees].
        """
        s = lengths_K.astype(np.float64)[:, None]
        compute = (self.quadratic_ms * s * s + self.linear_ms * s) / np.array(self.degrees, np.float64)
        return np.rint((compute + s * np.array(self.exchange_ms)) * NS_PER_MS).astype(np.int64)


def flexsp_costs(
    model: FlexspModel,
    *,
    num_devices: int = 64,
    max_kilotokens: int = 192,
    memory_limit_gb: float = MEMORY_LIMIT_GB,
) -> TeamCosts:
    """Returns FlexSP's costs of a model on a cluster; degree 1 is excluded, as in the released code.

    Args:
        model: one of `MODELS`.
        num_devices: a power of two, 2 to 64, which the measured bandwidths cover.
        max_kilotokens: the longest document in thousands of tokens; its positions are parameters of the model.
        memory_limit_gb: memory of a device for model states and activations; 30 in the scripts that the authors
            released for their simulation, 28 in their training program.

    Raises:
        ValueError: if no bandwidth was measured for the number of devices, or the model's states alone do not fit.
    """
    if num_devices not in ALL_TO_ALL_GB_S:
        known = ", ".join(map(str, ALL_TO_ALL_GB_S))
        raise ValueError(f"num_devices must be one of {known}, got {num_devices}; choose one of these")
    states_mb = model.billions(max_kilotokens) * 16 * 1024 / num_devices
    device_tokens = int((memory_limit_gb * 1024 - states_mb) / model.activation_mb)
    if device_tokens < 1:
        raise ValueError(
            f"model states must take less than {memory_limit_gb:g} GB a device, got {states_mb / 1024:.1f} GB "
            f"for {model.name} on {num_devices} devices; use more devices"
        )
    degrees = tuple(degree for degree in ALL_TO_ALL_GB_S if degree <= num_devices)
    mb_a_token = 16 * model.num_layers * model.hidden_size / 2**20
    return TeamCosts(
        num_devices=num_devices,
        degrees=degrees,
        device_tokens=device_tokens,
        quadratic_ms=model.quadratic_ms,
        linear_ms=model.linear_ms,
        fixed_ms=model.fixed_ms,
        exchange_ms=tuple(mb_a_token / degree / ALL_TO_ALL_GB_S[degree] for degree in degrees),
    )
