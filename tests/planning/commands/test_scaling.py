"""The commands that `lightscale plan --nodes` prints: they run as they stand, for every shipped configuration."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightscale import cli
from lightscale.config.files import load
from lightscale.config.layout import check_layout
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.launch.scheduler import default_scheduler
from lightscale.planning.advice import layout_overrides
from lightscale.planning.hardware import H100
from lightscale.planning.memory import fullest_rank
from lightscale.planning.search import Fixed, best_layouts

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SHIPPED = sorted(CONFIGS.glob("*.toml"))
PROGRAMS = {"train": ["--processes", "8"], "submit": ["--gpus-per-node", "8"]}


def plan(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert cli.main(["plan", *words]) == code
    return capsys.readouterr().out


def pasted(out: str, program: str) -> tuple[Path, list[str], list[str]]:
    """(configuration, overrides, options) of the one line of `out` that begins with that command."""
    (line,) = [line for line in out.splitlines() if line.startswith(f"lightscale {program} ")]
    words = shlex.split(line)[2:]
    options = next(number for number, word in enumerate(words) if word.startswith("--"))
    return Path(words[0]), words[1:options], words[options:]


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_every_shipped_configuration_has_commands(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On 1, 8 and 64 nodes: they keep the recipe, divide, and fit."""
    shipped = load(path)
    for nodes in (1, 8, 64):
        out = plan(capsys, str(path), "--nodes", str(nodes))
        for program, options in PROGRAMS.items():
            where, overrides, rest = pasted(out, program)
            assert where == path and set(options) <= set(rest), rest
            run = load(path, overrides)
            layout = check_layout(run, 8 * nodes)
            # By the configuration alone, as `lightscale plan` without --nodes has it.
            assert fullest_rank(run, layout).total_bytes <= H100.usable_bytes < 80e9
            assert {key.partition("=")[0].partition(".")[0] for key in overrides} == {"parallel", "train"}
            changed = {"micro_batch_size", "recompute"}
            assert run.train.model_dump(exclude=changed) == shipped.train.model_dump(exclude=changed)
        assert "Another batch" not in out
