"""Durations on the command line."""

import re

from lightscale.errors import UserError, shortened

_UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile(r"(?:([0-9]{1,9})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9})s)?")


def parse_duration(name: str, text: str) -> int:
    """Seconds in `text`, such as "90s", "30m", "23h30m" or "1d"; the UserError of others uses `name`."""
    match = _DURATION.fullmatch(text)
    seconds = (
        sum(int(count or 0) * unit for count, unit in zip(match.groups(), _UNITS_S.values(), strict=True))
        if match
        else 0
    )
    if not seconds:
        raise UserError(
            f'{name} {shortened(text)}: must be a time in days, hours, minutes and seconds, such as "23h30m" or "90s"'
        )
    return seconds
