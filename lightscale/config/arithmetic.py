"""The numbers that messages about divisibility suggest."""


def near_multiple(number: int, unit: int) -> int:
    """The multiple of `unit` nearest to `number`, at least one unit."""
    return max(1, round(number / unit)) * unit


def near_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`."""
    divisors = (divisor for divisor in range(1, number + 1) if number % divisor == 0)
    return min(divisors, key=lambda divisor: abs(divisor - wanted))
