"""The arrays in which the stash lies on the host: XLA pins each on its own, and a driver pins no 512 GiB at once."""

from collections.abc import Sequence

# The shares of a row on the host, in 1024ths, where all of it lies in one array.
ONE_PIECE = (1024,)
# Elements by whose multiples lines are cut: 512 bytes, so that the pieces of all lines begin where memory is read at
# once.
_STEP = 256


def check_host_pieces(host_pieces: Sequence[int]) -> None:
    """Checks the shares of a row on the host that lie in each array.

    Args:
        host_pieces: the shares, in 1024ths.

    Raises:
        ValueError: says the rule, what was found, and what to change.
    """
    whole = sum(ONE_PIECE)
    if not all(type(share) is int and share > 0 for share in host_pieces) or sum(host_pieces) != whole:
        raise ValueError(
            f"host_pieces of a plan must be whole numbers above 0 that add up to {whole}, got {list(host_pieces)}; "
            f"use {list(ONE_PIECE)} for one array"
        )


def describe_pieces(host_pieces: Sequence[int]) -> str:
    """Returns the number of arrays and their shares, to be put behind the bytes; empty for one array."""
    shares = " : ".join(map(str, host_pieces))
    return f"; the stash in {len(host_pieces)} arrays, {shares}" if len(host_pieces) > 1 else ""


def cut_line(num_elements: int, host_pieces: Sequence[int]) -> tuple[int, ...]:
    """Returns the elements of a line that lie in each array.

    Args:
        num_elements: elements of a line, all arrays together.
        host_pieces: the shares, in 1024ths.

    Raises:
        ValueError: the line has fewer elements than there are arrays.
    """
    count = len(host_pieces)
    if num_elements < count:
        raise ValueError(
            f"host_pieces of a plan must be at most {num_elements}, the elements of a line of the stash, got {count}; "
            "use fewer"
        )
    # Short lines are cut more finely, so that no share is off by more than half of a 1024th.
    step = min(_STEP, max(1, num_elements // sum(ONE_PIECE)))
    bounds, before = [0], 0
    for index, share in enumerate(host_pieces[:-1], 1):
        before += share
        bound = round(num_elements * before / sum(ONE_PIECE) / step) * step
        bounds.append(min(max(bound, bounds[-1] + 1), num_elements - count + index))
    return tuple(end - begin for begin, end in zip(bounds, [*bounds[1:], num_elements], strict=True))
