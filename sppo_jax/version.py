"""The version of this package, those of jaxlib and libtpu without importing them, and what is not installed."""

import re
from importlib.metadata import PackageNotFoundError, requires, version

__version__ = "0.2.0"


def jaxlib_version() -> tuple[int, ...]:
    """Returns jaxlib's version as ints, without any suffix; () where jaxlib is not installed."""
    return _version_of("jaxlib")


def libtpu_version() -> tuple[int, ...]:
    """Returns libtpu's version as ints, without any suffix; () where libtpu is not installed."""
    return _version_of("libtpu")


def installed_version(package: str) -> str:
    """Returns the version of an installed package as it is written; "" where the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def missing_requirements() -> list[str]:
    """Returns what is not installed of what this package requires, extras apart, as "jax>=0.10.2"; [] if unknown."""
    try:
        required = [line for line in requires("sppo_jax") or [] if ";" not in line]
    except PackageNotFoundError:
        return []
    return [line for line in required if not installed_version(re.split(r"[^\w.-]", line)[0])]


def _version_of(package: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", installed_version(package))[:3])
