"""Generation with every mixer in the registry, and with a hybrid: from a checkpoint, by recurrence."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightscale.config.files import load
from lightscale.config.mixers import reading
from lightscale.evaluation.model import LoadedModel, load_model
from lightscale.kernels.operators import state_grows
from lightscale.models.registry import mixer_spec
from lightscale.runs.run_directory import RunDirectory

drawing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "drawing.py")))
tnl = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("test_generate.py"))))

STACKS: dict[str, str | list[str]] = {**{name: name for name in reading("causal")}, "hybrid": ["tnl*3", "llama"]}
STACKS["quadratic"] = "causal-rn"
DRAWN: list[str] = drawing.some("stacks that generate", list(STACKS), 4)
OPTIONS = {
    "quadratic": ["model.mixer_options.causal-rn.form=quadratic"],
    # Where a head's output nearly vanishes, its norm magnifies what fp32 has rounded.
    "gated-delta-net": ["model.mixer_options.gated-delta-net.output_norm_eps=0.01"],
}
GROWING = {"hybrid", "quadratic", *(name for name in reading("causal") if state_grows(mixer_spec(name).operator))}
POSITIONS = (100, 700)
# Whole, in chunks and beside them; steps of one token are compared by tests/models/mixers.
CUTS = tnl.CUTS[1:4]
# One process measures all models.
pytestmark = pytest.mark.timeout(600)
RunRanks = Callable[..., list[Any]]


def cost(loaded: LoadedModel, position: int) -> tuple[int, list[Any]]:
    """Bytes of the states behind ``position`` tokens, and the operations of the next token."""
    document = tnl.Document(loaded.model)
    document.feed([5] * position)
    with tnl.Operations() as operations:
        document.feed([6])
    return document.state_bytes, operations.seen


def measure(rank: int, world_size: int, init_method: str, folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for name in names:
        tnl.save(folder / name, 0, 1, f"{init_method}-{name}")
        with load_model(folder / name, device="cpu") as loaded:
            found[name] = {
                "deviations": tnl.deviations(loaded, CUTS),
                "texts": tnl.texts(loaded),
                "costs": [cost(loaded, position) for position in POSITIONS],
            }
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, run_ranks: RunRanks) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs")
    tnl.write_store(folder / "store", tnl.train_sentencepiece([tnl.TEXT] * 20, vocab_size=420))
    (folder / "run.toml").write_text(tnl.CONFIG.format(root=tnl.ROOT, store=folder / "store"), encoding="utf-8")
    for name in DRAWN:
        RunDirectory(folder / name).create_or_open(
            load(folder / "run.toml", [f"model.mixer={STACKS[name]!r}", *OPTIONS.get(name, [])])
        )
    (found,) = run_ranks(measure, 1, folder, DRAWN, timeout_s=400)
    return dict(found)


EACH = pytest.mark.parametrize("name", DRAWN)


@EACH
def test_the_recurrent_form_is_the_parallel_form(measured: dict[str, dict[str, Any]], name: str) -> None:
    deviations = measured[name]["deviations"]
    assert [len(of_parts) for of_parts in deviations] == [1, *map(len, CUTS)]
    assert max(map(max, deviations)) < 1e-5


@EACH
def test_the_same_seed_gives_the_same_text(measured: dict[str, dict[str, Any]], name: str) -> None:
    texts = measured[name]["texts"]
    assert all(first == second for first, second in texts.values())
    # An untrained model may begin with the end of the text.
    assert any(first for first, _ in texts.values())
    assert texts["seed 0"][0] != texts["seed 1"][0]


@EACH
def test_the_cost_of_a_token(measured: dict[str, dict[str, Any]], name: str) -> None:
    (early_bytes, early), (late_bytes, late) = measured[name]["costs"]
    assert [operation for operation, _ in early] == [operation for operation, _ in late]
    if name in GROWING:
        assert late_bytes > early_bytes
    else:
        assert late_bytes == early_bytes > 0
        assert early == late
