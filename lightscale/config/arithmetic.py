"""Nearest divisors and multiples, for the remedies in messages about divisibility."""

import math


def near_multiple(number: int, unit: int) -> int:
    """The multiple of `unit` nearest to `number`, at least one unit; of two equally near, the even one."""
    # In whole numbers: those of a command line can be too large for a float.
    whole, rest = divmod(number, unit)
    return max(1, whole + (2 * rest + whole % 2 > unit)) * unit


def near_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`; of two equally near, the smaller."""
    # In pairs up to the root: a search from `wanted` outwards would go through all numbers up to a prime.
    lower = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    divisors = (divisor for pair in ((one, number // one) for one in lower) for divisor in pair)
    return min(divisors, key=lambda divisor: (abs(divisor - wanted), divisor))
