"""``lightscale plan CONFIG --failures``."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightscale import cli
from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.planning.failures import DAY_S, Regime, daly_interval_s, expected_shares
from lightscale.planning.hardware import H100
from lightscale.planning.search import Fixed, best_layouts
from lightscale.runs.save_interval import best_interval_s

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
TINY, LARGE = str(CONFIGS / "tnl-tiny.toml"), str(CONFIGS / "tnl-7b.toml")
FEW = ["--simulations", "3"]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["plan", *arguments, "--failures", "--json", *FEW]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


def test_the_defaults_are_a_large_run_at_the_rate_of_llama_3(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, LARGE)
    mtbf_s = DAY_S / (64 * 4.7e-4)
    assert found["gpus"] == 64
    assert found["regime"]["mtbf_s"] == pytest.approx(mtbf_s)
    assert found["young_interval_s"] == best_interval_s(1.0, mtbf_s)
    assert found["daly_interval_s"] == found["best"]["interval_s"] == daly_interval_s(1.0, mtbf_s)
    assert 39 < found["best"]["interval_s"] / 60 < 41, "about 40 min, as known"
    config = load(Path(LARGE))
    (fastest, *_) = best_layouts(config, nodes=8, sequence_length=8192, hardware=H100, fixed=Fixed())
    tokens = config.total_tokens
    assert found["work_is_predicted"] is True
    assert found["work_s"] == pytest.approx(tokens / fastest.tokens_per_s)
    assert found["expected_wall_s"] == pytest.approx(found["work_s"] / found["best"]["expected"]["progress"])
    # Saved by time: by the interval that the run would find with the configured expectation of failures.
    assert found["configured"]["interval_s"] == best_interval_s(1.0, 24 * 3600)


def test_every_number_is_the_users(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--gpus 3 --failures-per-gpu-day 2 --stall-s 4 --save-s 20 --restart-s 50 --hours 100 --stop-every 12:30"
    found = planned(capsys, TINY, "checkpoint.every=none", *words.split())
    regime = Regime(failures_per_s=6 / DAY_S, stall_s=4, save_s=20, restart_s=50, stop_every_s=45_000)
    assert found["work_s"] == 360_000
    assert found["work_is_predicted"] is False
    assert found["regime"]["mtbf_s"] == 4 * 3600
    intervals = [row["interval_s"] for row in found["rows"]]
    assert intervals == sorted(intervals)
    assert len(intervals) == 14
    for row in found["rows"]:
        expected = expected_shares(regime, row["interval_s"])
        assert row["expected"]["progress"] == expected.progress
        assert row["expected"]["stops"] == pytest.approx(70 / 45_000)
        assert row["simulated"]["progress"] == pytest.approx(expected.progress, abs=0.05)
        assert row["simulated"]["runs"] == 3
    least, most = found["as_good_as_best"].values()
    assert {least, most} < set(intervals)


def test_stops_without_warning_are_failures(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--hours", "48", "--stop-every", "6:00", "--failures-per-gpu-day", "0"]
    found = planned(capsys, TINY, *words, "--unannounced")
    assert found["regime"]["mtbf_s"] == 6 * 3600
    assert found["best"]["interval_s"] == pytest.approx(3.5 * 60, rel=0.05), "as known"
    assert found["best"]["expected"]["stops"] == 0


def test_the_configured_interval_may_be_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    steps = load(Path(TINY)).total_steps
    found = planned(capsys, TINY, "checkpoint.every=50", "--hours", "10")
    assert found["configured"]["interval_s"] == pytest.approx(50 * 36_000 / steps)


def test_slow_storage_sets_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["checkpoint.every=none", "--hours", "1000", "--failures-per-gpu-day", "1", "--save-s", "900"]
    found = planned(capsys, TINY, *words)
    assert found["daly_interval_s"] < 899
    assert found["best"]["interval_s"] == 899
    # What is configured is shown all the same: its first save after a start comes earlier.
    assert found["rows"][0] == found["configured"]
    assert [row["interval_s"] for row in found["rows"][1:]] == pytest.approx([899 * 2 ** (n / 2) for n in range(7)])
    for row in found["rows"]:
        assert row["simulated"]["progress"] == pytest.approx(row["expected"]["progress"], abs=0.05)


def test_the_seed_decides(capsys: pytest.CaptureFixture[str]) -> None:
    words = [TINY, "--hours", "500"]
    assert planned(capsys, *words) == planned(capsys, *words, "--seed", "0")
    assert planned(capsys, *words) != planned(capsys, *words, "--seed", "1")


def test_a_run_of_many_failures_is_not_played_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, TINY, "--hours", "10000", "--failures-per-gpu-day", "2.25")
    assert found["simulated_s"] == pytest.approx(1000 * 600)


def test_people_see_a_table_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--failures", "--stop-every", "24:00", "--simulations", "50"]
    assert cli.main(["plan", LARGE, *words]) == 0
    out = capsys.readouterr().out
    assert "on 64 GPUs: 300,000,215,040 tokens are 4 d 8 h of work, at the speed predicted for H100" in out
    assert "failures: every 33 d 5 h, 0.13 in that time" in out
    assert "stops: every 1 d announced, 4.4 in that time" in out
    assert "best interval: 39 min 56 s (Daly 39 min 56 s, Young 39 min 57 s); simulated: " in out
    assert "checkpoint.mtbf_hours=798" in out
    (best,) = [line for line in out.splitlines() if line.rstrip().endswith(" best")]
    assert best.split()[:2] == ["39", "min"] and "99.49%" in best and "0.42%" in best
    assert "(50 simulated runs of 4 d 8 h)" in out
    assert cli.main(["plan", LARGE, "checkpoint.every=100", *words]) == 0
    assert "mtbf_hours" not in capsys.readouterr().out, "it would have no effect"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--failures", "--nodes", "1"], ["--nodes and --failures: use only one of them"]),
        (["--failures", "--processes", "2"], ["--processes 2", "--gpus"]),
        (["--failures", "--gpus", "0"], ["--gpus 0", "greater than 0"]),
        (["--failures", "--gpus", "12"], ["--gpus 12", "use --gpus 16", "--hours"]),
        (["--failures", "--gpus", "32768"], ["no layout of 32768 GPUs"]),
        (["--failures"], ["best interval 39 min 56 s", "it needs only the", "--hours"]),
        (["--failures", "--failures-per-gpu-day", "-1"], ["--failures-per-gpu-day -1", "at least 0"]),
        (["--failures", "--failures-per-gpu-day", "nan"], ["--failures-per-gpu-day nan"]),
        (["--failures", "--failures-per-gpu-day", "0"], ["--failures-per-gpu-day 0", "no work is ever lost"]),
        (["--failures", "--stall-s", "0"], ["--stall-s 0", "greater than 0"]),
        (["--failures", "--stall-s", "70"], ["--save-s 60", "--stall-s 70"]),
        (["--failures", "--stop-every", "24"], ["--stop-every 24", "H:MM"]),
        (["--failures", "--stop-every", "1:60"], ["--stop-every 1:60", "H:MM"]),
        (["--failures", "--stop-every", "0:06"], ["--stop-every 0:06", "no time to train"]),
        (["--failures", "--unannounced"], ["--unannounced", "--stop-every"]),
        (
            ["--failures", "--hours", "9", "--failures-per-gpu-day", "50"],
            ["work is lost every 27 s", "no interval gives much progress"],
        ),
        (["--gpus", "8"], ["--gpus requires --failures"]),
        (["--stop-every", "8:00"], ["--stop-every requires --failures"]),
        (["--unannounced"], ["--unannounced requires --failures"]),
        (["--nodes", "1", "--seed", "1"], ["--seed requires --failures"]),
        (["--failures", "--hardware", "a100"], ["--hardware requires --nodes"]),
    ],
)
def test_mistakes_are_named(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", TINY, *arguments]) == UserError.EXIT_CODE
    printed = capsys.readouterr()
    assert printed.out == ""
    for word in words:
        assert word in printed.err


def test_a_model_that_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", LARGE, "--failures", "--gpus", "1"]) == UserError.EXIT_CODE
    assert "--gpus 1: no layout is predicted to fit" in capsys.readouterr().err


def test_without_a_configuration_it_asks_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--failures"]) == UserError.EXIT_CODE
    assert "no CONFIG given" in capsys.readouterr().err
