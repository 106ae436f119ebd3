"""The commands that `lightscale plan --nodes` prints: they run as they stand, for every shipped configuration."""

import json
import re
import runpy
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightscale import cli
from lightscale.config.files import load
from lightscale.config.layout import check_layout
from lightscale.config.schedulers import default_scheduler
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.planning.advice import layout_overrides
from lightscale.planning.hardware import H100
from lightscale.planning.memory import fullest_rank
from lightscale.planning.search import Fixed, best_layouts

drawing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "drawing.py")))
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


@pytest.mark.parametrize(
    ("path", "nodes"),
    drawing.some("commands", drawing.covering("commands", SHIPPED, (1, 8, 64), strength=1), 24),
    ids=lambda value: value.stem if isinstance(value, Path) else str(value),
)
def test_every_shipped_configuration_has_commands(path: Path, nodes: int, capsys: pytest.CaptureFixture[str]) -> None:
    """They keep the recipe, divide, and fit."""
    shipped = load(path)
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
    assert "The batch changes" not in out


def test_the_commands_in_json_and_beside_given_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(CONFIGS / "tnl-7b.toml")
    given = ["train.seed=3", "parallel.tensor=4", "parallel.data=16", "model.mixer_options.tnl.gate_rank=64"]
    record: dict[str, Any] = json.loads(plan(capsys, path, *given, "--nodes", "8", "--json"))
    (point,) = record["points"]
    commands, best = point["commands"], point["layouts"][0]
    assert (point["fits"], point["least_nodes"], commands["changed_batch"]) == (True, None, None)
    where, overrides, options = pasted(commands["train"], "train")
    assert (str(where), overrides) == (path, commands["overrides"])
    # On several nodes in a job of the scheduler that `submit` takes.
    assert options == ["--processes", "8", "--scheduler", default_scheduler()]
    assert overrides[:2] == ["train.seed=3", "model.mixer_options.tnl.gate_rank=64"]
    assert f"parallel.tensor={best['layout']['tensor']}" in overrides
    run = load(path, overrides)
    layout = check_layout(run, 64)
    assert {axis: getattr(layout, axis) for axis in best["layout"]} == best["layout"]
    assert (run.train.seed, run.train.recompute, layout.num_microbatches) == (
        3,
        best["recompute"],
        best["num_microbatches"],
    )
    assert fullest_rank(run, layout).total_bytes == best["memory"]["total_bytes"]


def test_a_changed_batch_is_said_and_stands_in_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    """37 nodes: no axis but data can be split 37 ways, and 480 sequences cannot."""
    path = str(CONFIGS / "tnl-1b.toml")
    out = plan(capsys, path, "--nodes", "37")
    (said,) = [line for line in out.splitlines() if line.startswith("The batch changes: ")]
    assert "train.global_batch_size=481 gives 3,940,352, +0.2%" in said
    _, overrides, _ = pasted(out, "submit")
    assert "train.global_batch_size=481" in overrides
    assert check_layout(load(path, overrides), 8 * 37).world_size == 296


def test_where_nothing_fits_the_least_nodes_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(CONFIGS / "llama-7b.toml"), "--nodes", "1", "--length", "4M"]
    out = plan(capsys, *words, code=1)
    assert "1 node, sequences of 4M tokens: no layout fits; use at least 4 nodes\n" in out
    assert "lightscale train" not in out
    (point,) = json.loads(plan(capsys, *words, "--json", code=1))["points"]
    assert (point["least_nodes"], point["commands"]) == (4, None)


def test_the_way_of_softmax_attention_is_chosen_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """Four ranks share the heads of an all-to-all, of which 32 have too few; nothing is said of linear mixers."""
    words = [
        str(CONFIGS / "llama-1b.toml"),
        "--nodes",
        "4",
        "--length",
        "128K",
        "--layout",
        "tensor=1,pipeline=1,sequence=",
    ]
    for ranks, alone in (("4", False), ("32", True)):
        out = plan(capsys, *words[:-1], words[-1] + ranks)
        (reason,) = [line for line in out.splitlines() if line.startswith("128K on nodes: 4: parallel.attention=")]
        assert ("heads do not divide for all_to_all" in reason) == alone
        assert "gather " in reason and "ring " in reason and f" on {ranks} sequence ranks" in reason
        chosen = reason.partition("parallel.attention=")[2].split()[0]
        _, overrides, _ = pasted(out, "submit")
        assert load(CONFIGS / "llama-1b.toml", overrides).parallel.attention == chosen
        times = {name: float(s) for name, s in re.findall(r"(\w+) ([0-9.]+) s a step and", reason)}
        assert chosen == min(times, key=lambda name: times[name])
    linear = plan(capsys, str(CONFIGS / "tnl-1b.toml"), "--nodes", "4", "--layout", "tensor=1,pipeline=1,sequence=4")
    assert "parallel.attention=" not in linear


def test_a_layout_overrides_whatever_the_configuration_says() -> None:
    """Axes, a fixed number of data ranks, interleaved stages, and the ranks of a node."""
    run = load(CONFIGS / "tnl-7b.toml", ["parallel.tensor=2", "parallel.pipeline=2", "parallel.virtual_stages=2",
        "parallel.data=5", "parallel.ranks_per_node=2", "parallel.exchange=ring"])  # fmt: skip
    for node in (8, 4):
        hardware = replace(H100, gpus_per_node=node)
        found = best_layouts(run, nodes=4, sequence_length=8192, hardware=hardware, fixed=Fixed())
        for one in found[:5]:
            changed = override(run, layout_overrides(run, one, hardware))
            assert check_layout(changed, 4 * node) == one.layout
            assert (changed.parallel.ranks_per_node, changed.train.recompute) == (node, one.recompute)


def override(run: RunConfig, overrides: list[str]) -> RunConfig:
    """`run` with them, by its values alone."""
    values = run.model_dump(mode="json")
    for text in overrides:
        (section, key), value = text.partition("=")[0].split("."), text.partition("=")[2]
        values[section][key] = int(value) if value.isdecimal() else value
    return RunConfig.model_validate(values)


@pytest.mark.parametrize(
    ("name", "overrides", "ranks", "fault"),
    [
        ("tnl-7b", [], 64, "train.global_batch_size = 480 is not divisible by train.micro_batch_size = 1 times 64"),
        ("tnl-7b", ["parallel.tensor=3"], 24, "model.num_heads = 32 is not divisible by parallel.tensor = 3"),
        ("lightnet-7b", ["parallel.data=64"], 1024, "1024 processes are not the product of"),
        ("llama-1b", ["parallel.sequence=5"], 10, "data.sequence_length = 8192 is not divisible"),
        ("hybrid-tiny", [], 64, "train.global_batch_size = 8"),
    ],
)
def test_what_does_not_divide_names_the_layout_that_does(
    name: str, overrides: list[str], ranks: int, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = CONFIGS / f"{name}.toml"
    assert cli.main(["plan", str(path), *overrides, "--processes", str(ranks)]) == UserError.EXIT_CODE
    (message,) = capsys.readouterr().err.splitlines()
    said, _, advice = message.partition(f"; on {ranks:,} ranks use ")
    assert fault in said
    advised = advice.split()
    # The recipe stays, and what `plan --nodes` finds best is what is advised.
    assert not any(key.startswith(("train.global_batch_size", "data.")) for key in advised)
    run = load(path, [*overrides, *advised])
    node = 8 if ranks % 8 == 0 else 5
    hardware = replace(H100, gpus_per_node=node)
    length = run.data.sequence_length
    best = best_layouts(load(path), nodes=ranks // node, sequence_length=length, hardware=hardware, fixed=Fixed())[0]
    assert check_layout(run, ranks) == best.layout


def test_where_no_layout_divides_the_nearest_value_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(CONFIGS / "tnl-tiny.toml")
    assert cli.main(["plan", path, "--processes", "7"]) == UserError.EXIT_CODE
    assert "7 data ranks (parallel.data); use 56 sequences" in capsys.readouterr().err
