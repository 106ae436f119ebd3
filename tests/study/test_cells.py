"""Cells from axes, rules and sweeps; and studies that are refused."""

from pathlib import Path

import pytest

from lightscale.config.files import flat, load
from lightscale.errors import UserError
from lightscale.study.cells import make_cells
from lightscale.study.definition import read_definition
from tests.study.studies import TINY, write_study

SEEDS = '[axes]\n"train.seed" = [0, 1]\n'
SWEEP = """
[sweep]
key = "optimizer.lr"
values = [1e-3, 3e-3, 1e-2]
per = ["architecture"]
at = { size = "medium" }
set.train.steps = 10
"""


def names(path: Path) -> list[str]:
    return [cell.name for cell in make_cells(read_definition(path))]


def test_all_combinations_are_named_by_what_varies(tmp_path: Path) -> None:
    found = make_cells(read_definition(write_study(tmp_path, SEEDS + '"optimizer.lr" = [1e-3]\n' + TINY)))
    assert len(found) == 2 * 2 * 3
    assert {cell.name for cell in found} == {
        f"seed{seed}-{architecture}-{size}"
        for seed in (0, 1)
        for architecture in ("tnl", "llama")
        for size in ("small", "medium", "large")
    }
    by_name = {cell.name: cell.config for cell in found}
    chosen = by_name["seed1-llama-large"]
    assert (chosen.train.seed, chosen.model.mixer, chosen.model.hidden_size) == (1, "llama", 64)
    assert chosen.optimizer.lr == 1e-3


def test_a_cell_is_what_a_runs_file_would_be(tmp_path: Path) -> None:
    cell = make_cells(read_definition(write_study(tmp_path)))[0]
    own = tmp_path / "own.toml"
    own.write_text(
        'extends = "arch/tnl"\n'
        "model = {num_layers=1, hidden_size=16, num_heads=2, intermediate_size=32, vocab_size=64}\n"
        'data = {store="store", sequence_length=32}\n'
        'optimizer = {lr=3e-3, schedule="constant", warmup_steps=2}\n'
        "train = {steps=40, global_batch_size=4, micro_batch_size=4}\n"
    )
    assert cell.name == "tnl-small"
    assert flat(cell.config) == flat(load(own))


def test_rules_skip_and_set(tmp_path: Path) -> None:
    rules = """
[[rules]]
when = { architecture = "llama", size = ["small", "large"] }
skip = "only one size of the baseline"
[[rules]]
when = { architecture = "tnl", size = "large" }
set.model.num_layers = 3
"""
    found = make_cells(read_definition(write_study(tmp_path, TINY + rules)))
    assert [cell.name for cell in found] == ["tnl-small", "tnl-medium", "tnl-large", "llama-medium"]
    assert [cell.config.model.num_layers for cell in found] == [1, 2, 3, 2]


def test_a_sweep_comes_first_and_chooses(tmp_path: Path) -> None:
    definition = read_definition(write_study(tmp_path, TINY + SWEEP))
    found = make_cells(definition)
    sweep = [cell for cell in found if cell.part == "sweep"]
    assert found[:6] == sweep
    assert [cell.name for cell in sweep[:3]] == ["sweep-tnl-lr0.001", "sweep-tnl-lr0.003", "sweep-tnl-lr0.01"]
    assert {(cell.config.model.hidden_size, cell.config.total_steps) for cell in sweep} == {(32, 10)}
    assert all(cell.is_pending for cell in found[6:])
    chosen = make_cells(definition, {("tnl",): 1e-2})
    lr = {cell.name: cell.config.optimizer.lr for cell in chosen if cell.part == "main" and not cell.is_pending}
    assert lr == {"tnl-small": 1e-2, "tnl-medium": 1e-2, "tnl-large": 1e-2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "axes is missing"),
        ("[axes]\nseed = [0, 1]\n", 'a list needs a key of the configuration, such as "optimizer.lr"'),
        ('[axes]\n"train.seed" = []\n', "must be a list of 1 to 1000 numbers or texts"),
        ('[axes]\n"train.seed" = 3\n', "axes.train.seed = 3: must be a list of values, or tables"),
        ("[axes.size]\nsmall = 3\n", "axes.size.small: must be a table"),
        ('[axes.size."a/b"]\nmodel.num_layers = 2\n', 'axes.size: the value "a/b" becomes part of a folder\'s name'),
        (TINY + "[cells]\n", "unknown key cells; the keys are study, base, axes"),
        (TINY + '[[rules]]\nwhen.size = "huge"\nskip = "no"\n', 'the axis size has no value "huge"; it has small'),
        (TINY + '[[rules]]\nwhen.width = 3\nskip = "no"\n', "no axis width; the axes are architecture, size"),
        (TINY + '[[rules]]\nwhen.size = "small"\n', "rules, number 1: must have either set (a table) or skip"),
        (TINY + SWEEP.replace('"medium"', '"huge"'), 'sweep.at: the axis size has no value "huge"'),
        (TINY + SWEEP.replace('at = { size = "medium" }', ""), "sweep: the axis size must be in per, or have one"),
        (TINY + SWEEP.replace("1e-3, 3e-3", "3e-3, 1e-3"), "sweep.values = [0.003, 0.001, 0.01]: must be different"),
        (TINY + '[[rules]]\nwhen.size = ["small", "medium", "large"]\nskip = "no"\n', "the rules skip all 6 cells"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        names(write_study(tmp_path, text))
    assert message in str(error.value)


def test_all_cells_that_cannot_run_are_named_with_their_reasons(tmp_path: Path) -> None:
    axes = TINY.replace("hidden_size = 64, num_heads = 2", "hidden_size = 64, num_heads = 3").replace(
        'extends = "arch/llama"', 'extends = "arch/llama"\nmodel.hidden_width = 3'
    )
    with pytest.raises(UserError) as error:
        names(write_study(tmp_path, axes))
    lines = str(error.value).splitlines()[1:]
    assert {line.split(":")[0] for line in lines} == {"tnl-large", "llama-small", "llama-medium", "llama-large"}
    assert "model.num_heads = 3" in next(line for line in lines if line.startswith("tnl-large"))
    assert "unknown key model.hidden_width" in next(line for line in lines if line.startswith("llama-small"))


def test_two_cells_of_one_name_or_of_one_run(tmp_path: Path) -> None:
    axes = '[axes]\n"optimizer.lr" = [0.001, {}]\n[axes.size.a]\nextends = "size/1M"\n'
    assert names(write_study(tmp_path, axes.format("0.0010000000001"))) == ["lr0.001", "lr0.0010000000001"]
    with pytest.raises(UserError, match=r"lr0.001: two cells have this name"):
        names(write_study(tmp_path, axes.format("1e-3")))
    same = '[axes.size.a]\nextends = "size/1M"\n[axes.size.b]\nextends = "size/1M"\n'
    with pytest.raises(UserError, match="b: the same run as a"):
        names(write_study(tmp_path, same))
    stores = "".join(f'[axes.corpus.{x}]\nextends = "size/1M"\ndata.store = "data/{x}"\n' for x in "ab")
    assert names(write_study(tmp_path, stores)) == ["a", "b"]
