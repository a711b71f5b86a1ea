"""The whole numbers that divide a number."""

import math


def divisors(value: int) -> list[int]:
    """Returns the whole numbers that divide `value`, rising."""
    small = [count for count in range(1, math.isqrt(value) + 1) if value % count == 0]
    return small + [value // count for count in reversed(small) if count * count != value]
