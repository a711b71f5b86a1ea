"""The version of this package, and those of jaxlib and libtpu without importing them."""

import re
from importlib.metadata import PackageNotFoundError, version

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


def _version_of(package: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", installed_version(package))[:3])
