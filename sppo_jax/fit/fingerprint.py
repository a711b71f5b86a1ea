"""Which program a compiled figure is of: 16 digits, equal where XLA is asked to compile the same program the same way.

The digits follow from the lowered text without locations, so a comment, a line that moved or a local variable with
another name does not change them. The workspace that cuDNN's backward gets by formula stands in the text
(`fit/workspace.py`). What XLA learns beside the text is in `Asked`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sppo_jax.fit.targets import topology_of
from sppo_jax.hardware import Cluster
from sppo_jax.version import installed_version

NUM_DIGITS = 16
# The compilers of a platform, by the packages that hold them.
_PLUGINS = {"gpu": ("jax-cuda13-pjrt", "jax-cuda12-pjrt"), "tpu": ("libtpu",)}
# Flags that change no program for a device that is not here: simulated devices, and where XLA writes what.
_NO_PART = ("--xla_force_host_platform_device_count", "--xla_dump")
_KERNELS = ("@__cudnn$fmha", "@tpu_custom_call")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What decides a compiled program beside its text.

    Args:
        options: the compiler's options in the jit, by name.
        flags: XLA's flags in the environment, those for devices that are not here included.
        target: the devices, as jax makes them.
        versions: of jaxlib and of the compiler's package.
    """

    options: Mapping[str, Any]
    flags: tuple[str, ...]
    target: Mapping[str, str]
    versions: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """What a lowered step says of itself, without a compiler.

    Args:
        fingerprint: 16 digits, see `fingerprint`.
        num_bodies: bodies of ticks in the program.
        kernel_calls: calls of a fused attention kernel in the lowered text.
        host_stash_bytes: of the stash on the host, of one device.
        versions: of jaxlib and of the compiler's package.
        sources: digits of the files that made the program, see `fit/sources.py`.
    """

    fingerprint: str
    num_bodies: int
    kernel_calls: int
    host_stash_bytes: int
    versions: Mapping[str, str]
    sources: str

    def to_dict(self) -> dict[str, Any]:
        """Returns what `sppo fit --json` prints."""
        return asdict(self)


def fingerprint(text: str, asked: Asked) -> str:
    """Returns the digits of a program.

    Args:
        text: `Lowered.as_text()`: StableHLO without locations.
        asked: what else decides the compiled program.
    """
    digest = hashlib.sha256(json.dumps(asdict(asked), sort_keys=True, default=str).encode())
    digest.update(b"\0")
    digest.update(text.encode())
    return digest.hexdigest()[:NUM_DIGITS]


def asked_of(options: Mapping[str, Any] | None, cluster: Cluster) -> Asked:
    """Returns what decides a program that this process compiles for a cluster."""
    words = os.environ.get("XLA_FLAGS", "").split()
    return Asked(
        options=dict(options or {}),
        flags=tuple(sorted(word for word in words if not word.startswith(_NO_PART))),
        target=topology_of(cluster),
        versions=compiler_versions(cluster.device.platform),
    )


def compiler_versions(platform: str) -> dict[str, str]:
    """Returns the versions of jaxlib and of the package that compiles for a platform, which may be missing."""
    found = {name: installed_version(name) for name in ("jaxlib", *_PLUGINS.get(platform, ()))}
    return {name: version for name, version in found.items() if version}


def kernel_calls(text: str) -> int:
    """Returns the calls of a fused attention kernel in a lowered text."""
    return sum(text.count(name) for name in _KERNELS)


def text_digits(text: str) -> str:
    """Returns the digits of a lowered text alone, whatever flags and compiler it is for."""
    return hashlib.sha256(text.encode()).hexdigest()[:NUM_DIGITS]
