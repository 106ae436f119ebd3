"""Trials of searches: their values and names; and files that are refused before anything is written."""

import json
import math
from pathlib import Path

import pytest

from lightscale.cli import main
from lightscale.errors import UserError
from lightscale.study.cells import Cell, make_cells
from lightscale.study.definition import read_definition
from lightscale.study.search.section import SearchSection
from lightscale.study.search.trials import make_trials
from tests.study.studies import SMALL, write_store, write_study

LR = '"optimizer.lr" = { min = 1e-4, max = 1e-1, log = true }\n'
HALVING = f"""
[search]
method = "successive_halving"
trials = 8
reduction_factor = 2
min_steps = 5
[search.parameters]
{LR}
"""
DRAWN = [0.01905, 0.04491, 0.0008426, 0.0003455, 0.05561]
MIXERS = '[axes.architecture]\ntnl = { extends = "arch/tnl" }\nllama = { extends = "arch/llama" }\n'


def cells(folder: Path, text: str, base: str = SMALL) -> dict[str, Cell]:
    found = make_cells(read_definition(write_study(folder, text, base=base)))
    return {cell.name: cell for cell in found}


def section(**more: object) -> SearchSection:
    given = {"method": "random", "trials": 200, "parameters": {"optimizer.lr": {"min": 1e-4, "max": 1e-1, "log": True}}}
    return SearchSection.model_validate(given | more)


def test_drawn_logarithms_are_uniform_and_have_four_digits() -> None:
    drawn = [float(trial.values["optimizer.lr"]) for trial in make_trials(section())]
    assert len(set(drawn)) == 200 and all(1e-4 <= one <= 1e-1 and one == float(f"{one:.4g}") for one in drawn)
    shares = sorted((math.log10(one) + 4) / 3 for one in drawn)
    # Kolmogorov-Smirnov: 1.63 / sqrt(n) at 1 %.
    assert max(abs(share - (place + 0.5) / 200) for place, share in enumerate(shares)) < 1.63 / math.sqrt(200)


def test_more_trials_and_more_keys_change_no_value_that_exists() -> None:
    few, more = make_trials(section(trials=5)), make_trials(section(trials=50))
    assert more[:5] == few
    # The draws themselves are part of studies that exist.
    assert [trial.values["optimizer.lr"] for trial in few] == DRAWN
    beside = {"optimizer.weight_decay": {"values": [0.0, 0.1]}, "optimizer.lr": {"min": 1e-4, "max": 1e-1, "log": True}}
    assert [trial.values["optimizer.lr"] for trial in make_trials(section(parameters=beside, trials=5))] == DRAWN
    assert [trial.values for trial in make_trials(section(seed=1, trials=5))] != [trial.values for trial in few]


def test_whole_numbers_reach_both_ends_equally() -> None:
    layers = {"model.num_layers": {"min": 1, "max": 3}, "optimizer.lr": {"min": 1e-4, "max": 1e-1}}
    drawn = [trial.values["model.num_layers"] for trial in make_trials(section(parameters=layers, trials=600))]
    assert {type(one) for one in drawn} == {int}
    assert all(150 < drawn.count(one) < 250 for one in (1, 2, 3))


def test_no_two_trials_are_alike_until_the_values_run_out() -> None:
    parameters = {"model.num_layers": {"min": 1, "max": 4}}
    drawn = [trial.values["model.num_layers"] for trial in make_trials(section(parameters=parameters, trials=4))]
    assert sorted(map(int, drawn)) == [1, 2, 3, 4]
    with pytest.raises(UserError, match=r"search.trials = 5: the parameters have about 4 different values"):
        make_trials(section(parameters=parameters, trials=5))


def test_a_trial_is_a_cell_for_each_combination_of_the_axes(tmp_path: Path) -> None:
    found = cells(tmp_path, '[axes]\n"train.seed" = [0, 1]\n' + MIXERS + HALVING)
    assert len(found) == 2 * 2 * 8
    same = [found[f"seed{seed}-{mixer}-trial003"] for seed in (0, 1) for mixer in ("tnl", "llama")]
    assert len({cell.config.optimizer.lr for cell in same}) == 1
    assert same[0].trial is not None and same[0].config.optimizer.lr == same[0].trial.values["optimizer.lr"]


def test_a_grid_is_named_by_its_values_and_needs_no_axes(tmp_path: Path) -> None:
    grid = """
[search]
method = "grid"
[search.parameters]
"optimizer.lr" = { values = [1e-5, 1e-3] }
"optimizer.weight_decay" = { values = [0.0, 0.1] }
"""
    found = cells(tmp_path, grid)
    assert list(found) == [f"lr{lr}-weight_decay{decay}" for lr in ("1e-05", "0.001") for decay in ("0", "0.1")]
    assert found["lr1e-05-weight_decay0.1"].config.optimizer.weight_decay == 0.1


def test_values_that_are_close_have_names_of_their_own(tmp_path: Path) -> None:
    grid = '[search]\nmethod = "grid"\n[search.parameters]\n"optimizer.lr" = {{ values = {} }}\n'
    assert list(cells(tmp_path, grid.format("[0.001, 0.0010000001]"))) == ["lr0.001", "lr0.0010000001"]
    with pytest.raises(UserError, match=r"optimizer.lr.values = \[1, 1.0\]: must be different values"):
        cells(tmp_path, grid.format("[1, 1.0]"))


def test_texts_become_names_of_folders_in_a_grid_alone(tmp_path: Path) -> None:
    stores = '"data.store" = { values = ["a/b", "a/c"] }\n'
    found = cells(tmp_path, f'[search]\nmethod = "random"\ntrials = 4\n[search.parameters]\n{LR}{stores}')
    assert {str(cell.config.data.store) for cell in found.values()} == {"a/b", "a/c"}
    with pytest.raises(UserError, match=r'data.store: the value "a/b" becomes part of a folder\'s name'):
        cells(tmp_path, f'[search]\nmethod = "grid"\n[search.parameters]\n{stores}')


def changed(old: str, new: str) -> str:
    assert old in HALVING
    return HALVING.replace(old, new)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed('"successive_halving"', '"halving"'), "search.method = \"halving\": input should be 'grid', 'random'"),
        (
            HALVING.replace("[search]", "[search]\nwidth = 3"),
            "search.width; the keys are method, parameters",
        ),
        (
            changed("log = true", "logarithmic = true"),
            ".lr.logarithmic; the keys are values, min, max",
        ),
        (changed("min = 1e-4, max = 1e-1", "min = 1e-1, max = 1e-4"), "min = 0.1: must be less than max = 0.0001"),
        (changed("min = 1e-4", "min = 0.0"), "optimizer.lr.min = 0: a logarithm needs a value above 0"),
        (
            changed("min = 1e-4, max = 1e-1", "min = 1e-4"),
            "optimizer.lr: must have values = [...], or both",
        ),
        (changed("min = 1e-4", "min = nan"), "search.parameters.optimizer.lr.min"),
        (changed("log = true", "values = [1e-3, 2e-3]"), "values excludes min, max and log; remove either"),
        (changed("trials = 8", "trials = 8\nrungs = [5]"), "either min_steps, the first rung, or rungs"),
        (changed("min_steps = 5", "rungs = [20, 10]"), "search.rungs = [20, 10]: must be different steps in ascending"),
        (changed("min_steps = 5", "rungs = [10, 40]"), "tiny: search.rungs: step 40 is not before the last one, 40"),
        (changed("min_steps = 5", "min_steps = 50"), "tiny: search.min_steps: step 50 is not before the last one, 40"),
        (
            changed("min_steps = 5", "min_steps = 1"),
            "is within the warm-up (optimizer.warmup_steps = 2)",
        ),
        (changed("trials = 8", "trials = 3").replace("factor = 2", "factor = 4"), "search.trials = 3: fewer than"),
        (
            changed("trials = 8\n", ""),
            "search.trials is missing: set the number of draws",
        ),
        (
            changed("trials = 8", "trials = 8\nmetric = 'loss'"),
            'search.metric = "loss": use "training", or',
        ),
        (
            changed("trials = 8", "trials = 8\nmetric = 'validation.held'"),
            "search.metric = validation.held: no validation measures it (sets of data.validation: none; "
            "train.validate_every = 0); set both",
        ),
        (changed("optimizer.lr", "optimizer.rate"), "trial000 and 7 more: "),
        (changed("optimizer.lr", "optimizer.rate"), "unknown key optimizer.rate"),
        (changed("optimizer.lr", "train.seed"), 'train.seed: no parameter of a search: make it an axis, "train.seed"'),
        (changed('"optimizer.lr"', "optimizer.lr"), 'write a key of the configuration in quotes, "optimizer.lr"'),
        (HALVING + '[axes]\n"optimizer.lr" = [1e-3]\n', "search.parameters.optimizer.lr: an axis sets it too"),
        (HALVING + "[sweep]\nkey = 'optimizer.lr'\nvalues = [1, 2]\n", "[search] and [sweep] exclude each other"),
        (changed("max = 1e-1", "max = 1e30"), "search.parameters.optimizer.lr.max = 1e+30"),
        (changed("1e-4, max = 1e-1", "-2.0, max = -1.0").replace(", log = true", ""), "[search.parameters]"),
        (
            changed("factor = 2\nmin_steps = 5", "factor = 2").replace("successive_halving", "random"),
            'search.reduction_factor = 2: only for method = "successive_halving"; remove it',
        ),
        (
            HALVING.replace('"optimizer.lr"', '"train.steps" = { min = 30, max = 50 }\n"optimizer.lr"'),
            "which cannot be compared; make the key that changes the length an axis, or set train.steps",
        ),
        (
            HALVING.replace('"optimizer.lr"', '"train.global_batch_size" = { values = [4, 8] }\n"optimizer.lr"'),
            "tiny: search.parameters: trials have 640 to 1,280 tokens after step 5, which cannot be compared; make",
        ),
        (
            '[search]\nmethod = "grid"\n[search.parameters]\n"data.sequence_length" = { values = [16, 32] }',
            "tiny: search.parameters: trials have 2,560 to 5,120 tokens after step 40, which cannot be compared",
        ),
        (
            '[search]\nmethod = "grid"\ntrials = 4\n[search.parameters]\n"optimizer.lr" = { values = [1, 2] }',
            "remove it",
        ),
        (f'[search]\nmethod = "grid"\n[search.parameters]\n{LR}', 'search.method = "grid" needs values of'),
        (
            '[search]\nmethod = "random"\ntrials = 4\n[search.parameters]\n"optimizer.lr" = { values = [1e-3, 2e-3] }',
            "needs a range, min and max, of a parameter",
        ),
    ],
)
def test_files_that_are_refused(
    tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path, text, base=SMALL)
    assert main(["study", "run", "tiny.toml"]) == 78
    shown = " ".join(capsys.readouterr().err.split())
    assert "tiny.toml" in shown
    assert message in shown, shown
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.toml"]


def test_a_base_that_stops_its_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train.stop_step = 10: a cell trains to its end; remove it"):
        cells(tmp_path, HALVING, base=SMALL.replace("steps = 40", "steps = 40, stop_step = 10"))


def test_plan_counts_the_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_study(tmp_path, HALVING, base=SMALL)
    write_store(tmp_path / "store")
    assert main(["study", "plan", str(path), "--json"]) == 0
    total = json.loads(capsys.readouterr().out)["total"]
    # 8 trials to step 5, 4 to 10, 2 to 20, 1 to 40, of 4 x 32 tokens.
    assert total["tokens_with_stops"] == (8 * 5 + 4 * 5 + 2 * 10 + 20) * 128
    assert total["flops_with_stops"] == pytest.approx(total["flops"] * total["tokens_with_stops"] / total["tokens"])
    assert main(["study", "plan", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "With the stops of successive halving: 1.28e+04 tokens" in shown
    assert "FLOPs; kept bytes are those of all trials at their end" in shown
