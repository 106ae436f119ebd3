import pytest

from lightscale.errors import UserError
from lightscale.launch.duration import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("23h30m", 84600), ("1d", 86400), ("1d2h3m4s", 93784), ("0h5s", 5)],
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration("--stop-after", text) == seconds


@pytest.mark.parametrize("text", ["", "90", "soon", "30m23h", "1.5h", "-1h", "0s", "1h 5m", "5 s", "1h\n"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_duration("--stop-after", text)
    assert str(caught.value).startswith(f"--stop-after {text}: must be a time")
    assert 'such as "23h30m" or "90s"' in str(caught.value)
