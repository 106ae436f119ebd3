"""Personal data by its form: addresses and numbers in a text become fixed tokens.

A form is a pattern, some with a check of the match (a checksum, a public address). Names and places have no form, and
stay.
"""

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import Field

from lightscale.config.section import Section
from lightscale.data_pipeline.preparation.filters.judgement import Judgement

_PHONE_DIGITS = range(8, 16)  # of an international number, E.164
_LUHN_DIGITS = range(13, 20)
_ID_WEIGHTS, _ID_CHECKS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2), "10X98765432"  # GB 11643-1999


def _digits(found: str) -> str:
    return "".join(filter(str.isdigit, found))


def _is_public(found: str) -> bool:
    try:
        return ipaddress.ip_address(found).is_global
    except ValueError:
        return False


def _is_international(found: str) -> bool:
    return not found.startswith("+") or len(_digits(found)) in _PHONE_DIGITS


def _has_luhn_sum(found: str) -> bool:
    digits = [int(digit) for digit in reversed(_digits(found))]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[1::2]]
    return len(digits) in _LUHN_DIGITS and (sum(digits[::2]) + sum(doubled)) % 10 == 0


def _is_resident_id(found: str) -> bool:
    total = sum(int(digit) * weight for digit, weight in zip(found[:17], _ID_WEIGHTS, strict=True))
    return found[17].upper() == _ID_CHECKS[total % 11]


@dataclass(frozen=True, kw_only=True)
class _Form:
    token: str
    hint: str
    """What a text of the form has, looked for first; "" for none."""
    pattern: re.Pattern[str]
    check: Callable[[str], bool] = bool


Kind = Literal["email", "ipv6", "ipv4", "card", "resident_id", "phone"]
# Letters that bound a number are ASCII's: in Chinese a number stands between characters, without spaces.
_FORMS: Final[dict[Kind, _Form]] = {
    "email": _Form(
        token="<EMAIL>",
        hint="@",
        pattern=re.compile(
            r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![A-Za-z0-9-])"
        ),
    ),
    "ipv6": _Form(
        token="<IPV6>",
        hint=":",
        pattern=re.compile(r"(?<![A-Za-z0-9:.])[23][0-9A-Fa-f]{3}:(?:[0-9A-Fa-f]{0,4}:){1,6}[0-9A-Fa-f]{0,4}(?![\w:])"),
        check=_is_public,
    ),
    "ipv4": _Form(
        token="<IPV4>",
        hint=".",
        pattern=re.compile(r"(?<![A-Za-z0-9.])\d{1,3}(?:\.\d{1,3}){3}(?![A-Za-z0-9]|\.\d)"),
        check=_is_public,
    ),
    "card": _Form(
        token="<CARD>",
        hint="",
        pattern=re.compile(r"(?<![A-Za-z0-9.-])[3-6]\d{3}(?:[ -]?\d{2,6}){2,4}(?![A-Za-z0-9]|[.-]\d)"),
        check=_has_luhn_sum,
    ),
    "resident_id": _Form(
        token="<RESIDENT_ID>",
        hint="",
        pattern=re.compile(
            r"(?<![A-Za-z0-9.])[1-8]\d{5}(?:19|20)\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])\d{3}[0-9Xx]"
            r"(?![A-Za-z0-9])"
        ),
        check=_is_resident_id,
    ),
    "phone": _Form(
        token="<PHONE>",
        hint="",
        pattern=re.compile(
            r"(?<![A-Za-z0-9_.+-])(?:\+[1-9]\d{0,2}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{1,4}(?:[ .-]?\d{2,4}){1,4}"
            r"|(?:\(\d{3}\) ?|\d{3}[.-])\d{3}[.-]\d{4}|1[3-9]\d{9})(?![A-Za-z0-9_]|[.-]\d)"
        ),
        check=_is_international,
    ),
}


class MaskFilter(Section):
    """Replaces text in the form of personal data. Drops no document."""

    kinds: list[Kind] = Field(default_factory=lambda: list(_FORMS), min_length=1)
    """email; public ipv4 and ipv6 addresses; card: payment cards, by their checksum; resident_id: Chinese identity
    numbers, by theirs; phone: international, North American and Chinese mobile numbers."""

    def judge(self, text: str) -> Judgement:
        """See ``Step``."""
        changes: dict[str, int] = {}
        for kind, form in _FORMS.items():
            if kind in self.kinds and form.hint in text:
                text, times = _masked(text, form)
                if times:
                    changes[f"mask: {kind}"] = times
        return Judgement(text, changes=changes)


def _masked(text: str, form: _Form) -> tuple[str, int]:
    times = 0

    def replace(found: re.Match[str]) -> str:
        nonlocal times
        if not form.check(found.group()):
            return found.group()
        times += 1
        return form.token

    return form.pattern.sub(replace, text), times
