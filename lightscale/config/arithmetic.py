"""The numbers that messages about divisibility suggest."""


def near_multiple(number: int, unit: int) -> int:
    """The multiple of `unit` nearest to `number`, at least one unit."""
    return max(1, round(number / unit)) * unit


def near_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`, the smaller of two."""
    # Outwards: a vocabulary has 100,000 numbers to try, and the search of layouts asks often.
    start = min(wanted, number)
    near = (candidate for distance in range(number) for candidate in (start - distance, start + distance))
    return next(candidate for candidate in near if candidate > 0 and number % candidate == 0)
