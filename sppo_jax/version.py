"""The version of this package, and that of jaxlib without importing it."""

import re
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"


def jaxlib_version() -> tuple[int, ...]:
    """Returns jaxlib's version as ints, without any suffix; () where jaxlib is not installed."""
    try:
        text = version("jaxlib")
    except PackageNotFoundError:
        return ()
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])
