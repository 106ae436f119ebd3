"""Random models on random layouts, a few with another seed each time; and that the fuzzer would find a fault."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(autouse=True)
def tools(tools_path: Path) -> None:
    """So that the tool can be imported."""


@pytest.fixture
def fuzz(root: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def fuzz(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(root / "tools/fuzz_layouts.py"), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=1180)

    return fuzz


def test_every_option_is_drawn_or_says_why_not() -> None:
    from layout_fuzzing.options import NOT_DRAWN, tables, undrawn

    assert undrawn() == [], "name values in NUMBERS, or a reason in NOT_DRAWN (tools/layout_fuzzing/options.py)"
    known = {f"{table.partition(':')[0]}.{name}" for table, kind in tables().items() for name in kind.model_fields}
    assert NOT_DRAWN.keys() <= known, "reasons for what is no option"
    assert {"model.patches", "model.grid", "model.mixer_options.llama.rope_scaling"} <= tables().keys()


def test_what_is_drawn_covers_every_mixer_task_and_axis() -> None:
    from layout_fuzzing.configuration import draw_valid
    from layout_fuzzing.covering import pairs
    from layout_fuzzing.drawing import Drawer
    from layout_fuzzing.options import DRAWN_TASKS
    from lightscale.config.mixers import MIXERS

    drawer = Drawer(random.Random(1))
    found = pairs(draw_valid(drawer, "stores") for _ in range(900))
    axes = ("tensor", "pipeline", "sequence", "data")
    missing = [(name, axis) for name in MIXERS for axis in axes if not found[f"model.mixer = {name}", axis]]
    missing += [(name, axis) for name in DRAWN_TASKS for axis in axes if not found[f"task.name = {name}", axis]]
    assert not missing


# ----- pairs --------------------------------------------------------------------------------------------------------


def test_a_new_option_is_in_the_table_before_any_case_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from layout_fuzzing import options
    from layout_fuzzing.covering import Coverage
    from lightscale.config.section import Section

    class Table(Section):
        depth: int = 3
        way: Literal["up", "down"] = "up"

    class More(Section):
        brand_new: bool = False
        how_many: int = 1
        inner: Table | None = None

    found = options.mixer_options_type
    monkeypatch.setattr(options, "mixer_options_type", lambda name: More if name == "tnl" else found(name))
    prefix = "model.mixer_options.tnl"
    assert options.undrawn() == [f"{prefix}.how_many", f"{prefix}.inner.depth"]
    new = {"brand_new = False", "brand_new = True", "inner = None", "inner.way = up", "inner.way = down"}
    coverage = Coverage([])
    assert {row.removeprefix(f"{prefix}.") for row in coverage.rows if row.startswith(prefix)} == new
    assert (f"{prefix}.brand_new = True", "tensor") in coverage.uncovered()
    assert f"| {prefix}.brand_new = True |  |" in coverage.table()


PAIRS = [
    ("model.mixer_options.llama-local.rope_scaling.truncate = False", "virtual stages"),
    ("model.mixer_options.bi-rn.positions = 48", "uneven"),
    ("model.mixer = lion-s", "attention all_to_all"),
    ("model.patches.learned_positions = True", "two_level"),
    ("model.grid = {'shape': [2, 2, 6], 'leading_tokens': 0}", "recompute full"),
    ("model.head.pooling = first", "packing concat"),
    ("model.tpe = None", "ring"),
    ("optimizer.slow_warmup_steps = 2", "pipeline"),
    ("task.name = sft", "tensor"),
    ("train.cuda_graphs = auto", "data"),
]


def test_draws_from_a_pair_have_it() -> None:
    from layout_fuzzing.configuration import refusal
    from layout_fuzzing.covering import Coverage, pairs_of
    from layout_fuzzing.drawing import Drawer

    coverage = Coverage([])
    drawer, seen = Drawer(random.Random(5), share=0.1), set()
    for pair in PAIRS:
        drawn = [case for _, case in zip(range(3), coverage.valid_draws(drawer, pair), strict=False)]
        assert drawn, pair
        assert all(pair in pairs_of(case) and refusal(case, "stores") is None for case in drawn)
        seen |= {case.keys["model.hidden_size"] for case in drawn}
    assert not coverage.refused
    assert len(seen) > 1, "the rest is drawn"


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        (("task.name = classify", "packing joined"), "merges the documents of a sequence"),
        (("model.num_layers = 2", "virtual stages"), "model.num_layers = 2 is fewer than the 4 stages"),
        (("task.name = classify-image", "packing whole"), "a sequence is one image"),
        (("train.recompute_layers = 1", "recompute none"), 'needs train.recompute = "full"'),
    ],
)
def test_pairs_that_validation_refuses_have_its_reason(pair: tuple[str, str], reason: str) -> None:
    from layout_fuzzing.covering import Coverage
    from layout_fuzzing.drawing import Drawer

    coverage = Coverage([])
    assert pair in coverage.uncovered()
    assert list(coverage.valid_draws(Drawer(random.Random(3), share=0.05), pair)) == []
    assert reason in coverage.refused[pair]
    assert pair not in coverage.uncovered()
    row, column = pair
    (line,) = [line for line in coverage.table().splitlines() if line.startswith(f"| {row} |")]
    assert line.split("|")[2 + [*coverage.columns].index(column)] == " a "
    assert reason in coverage.table().splitlines()[-1]


def test_cases_towards_uncovered_pairs_cover_all_that_are_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    from layout_fuzzing import covering
    from layout_fuzzing.drawing import Drawer

    some = [("task.name", name) for name in ("causal", "classify-image")]
    monkeypatch.setattr(covering, "options", lambda: iter(some))
    coverage = covering.Coverage([])
    cases = list(coverage.towards_uncovered(Drawer(random.Random(5))))
    assert coverage.uncovered() == [] and coverage.num_cases == len(cases)
    assert coverage.refused.keys() == {
        ("task.name = classify-image", f"packing {name}") for name in ("joined", "whole")
    }
    assert all(coverage.found[pair] for pair in {(f"task.name = {name}", "uneven") for _, name in some})
    assert len(cases) < len(coverage.columns), "a case covers many pairs"


def test_the_kept_table_is_that_of_the_kept_cases(root: Path) -> None:
    """A cell is a count, the letter of a reason, or empty where no case has the pair yet."""
    from layout_fuzzing.covering import pairs
    from layout_fuzzing.kept import read_cases

    folder = root / "benchmarks/fuzz-layouts"
    found, seen = pairs(read_cases([folder])), set()
    head, _, *lines = (folder / "pairs.md").read_text(encoding="utf-8").splitlines()
    columns = [cell.strip() for cell in head.split("|")[2:-1]]
    for line in lines:
        if not line.startswith("| "):
            continue
        row, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        for column, cell in zip(columns, cells, strict=True):
            count = found[row, column]
            assert cell == str(count) if count else not cell or cell.isalpha(), (row, column)
            seen.add((row, column))
    assert found.keys() <= seen


# ----- runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cases", [3, pytest.param(57, marks=pytest.mark.long)])
def test_random_models_on_random_layouts_are_those_of_one_process(
    fuzz: Callable[..., subprocess.CompletedProcess[str]], cases: int
) -> None:
    """Sixty in both suites together."""
    done = fuzz("--cases", str(cases))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


DELTA = ("delta-net", "gated-delta-net", "kimi-delta")


@pytest.mark.soak
def test_random_models_with_the_delta_rule_are_those_of_one_process(
    fuzz: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """All mixers of it, alone and with older ones in a stack, on all axes and with all exchanges."""
    from layout_fuzzing.kept import read_cases

    out = tmp_path / "cases.jsonl"
    done = fuzz("--cases", "24", "--seed", "3", "--mixer", *DELTA, "--out", str(out))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = read_cases([out])
    assert len(cases) == 24 and all(case.mixers & {*DELTA} for case in cases)
    assert {*DELTA} <= set.union(*(case.mixers for case in cases))
    assert sum(bool(case.mixers - {*DELTA}) for case in cases) >= 6, "stacks with older mixers"
    assert {axis for case in cases for axis, ranks in case.axes().items() if ranks > 1} == {
        "tensor", "pipeline", "sequence", "data",
    }  # fmt: skip
    exchanges = {case.keys["parallel.exchange"] for case in cases if case.axes()["sequence"] > 1}
    assert exchanges == {"gather", "ring", "two_level"}
    assert any(case.cuts is not None for case in cases), "uneven segments"


@pytest.mark.long
def test_a_fault_is_found_and_shrunk(
    fuzz: Callable[..., subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the kind that was missed for long: the last stage's copy of a tied embedding is drawn otherwise."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('DRAW_APART'):\n"
        "    import lightscale.models.language_model as model\n"
        "    draw = model.LanguageModel._name_initializers\n"
        "    def apart(self):\n"
        "        draw(self)\n"
        "        if self.post_process and not self.pre_process and self.share_embeddings_and_output_weights:\n"
        "            model.set_initializer(self.output_layer.weight, model.normal(0.3), rows=self.model.vocab_size)\n"
        "    model.LanguageModel._name_initializers = apart\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("DRAW_APART", "1")
    keys = {
        "task.name": "causal", "model.mixer": ["tnl", "llama"], "model.num_layers": 4, "model.hidden_size": 32,
        "model.num_heads": 4, "model.intermediate_size": 24, "model.vocab_size": 160, "data.packing": "joined",
        "model.norm": "rmsnorm", "parallel.tensor": 2, "parallel.pipeline": 2, "parallel.sequence": 1,
    }  # fmt: skip
    done = fuzz("--case", json.dumps({"world_size": 4, "keys": keys, "cuts": None}), "--shrink")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the copies of embedding.word_embeddings.weight" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("shrunk: ")]
    small = json.loads(line.partition("--case '")[2].rstrip("'"))
    assert (small["world_size"], small["keys"]["parallel.pipeline"]) == (2, 2)
    assert "model.norm" not in small["keys"] and isinstance(small["keys"]["model.mixer"], str)


CASE = {
    "task.name": "causal", "model.mixer": "tnl", "model.num_layers": 2, "model.hidden_size": 32, "model.num_heads": 4,
    "model.intermediate_size": 24, "model.vocab_size": 160, "data.packing": "joined", "parallel.tensor": 2,
    "parallel.pipeline": 1, "parallel.sequence": 1,
}  # fmt: skip
LATER_FAULTS = {
    "optimizer bytes that plan counts": (
        "import lightscale.parallel.optimizer_spec as specs\n"
        "specs.OptimizerSpec.state_bytes = lambda self, parameter: 4 * len(self.state) + 4\n"
    ),
    # The checkpoint's moments are read by another layout.
    "move: loss behind a checkpoint": (
        "import lightscale.training.checkpoints.restore as restore\n"
        "read = restore.Checkpoints.restore\n"
        "def wrong(self, engine):\n"
        "    found = read(self, engine)\n"
        "    for _, parameter in engine.chunks[0].named_parameters():\n"
        "        parameter.data.mul_(1.5 if engine.mesh.world_size > 1 else 1)\n"
        "    return found\n"
        "restore.Checkpoints.restore = wrong\n"
    ),
    "of the import": (
        "import lightscale.exchange.files.weights as weights\n"
        "parts = weights.stored_parts\n"
        "def shifted(model, *, vocab_size):\n"
        "    found = parts(model, vocab_size=vocab_size)\n"
        "    first = lambda one: weights.Part(rows=one.rows, name=one.name, first=0)\n"
        "    return {key: [first(one) for one in held] for key, held in found.items()}\n"
        "weights.stored_parts = shifted\n"
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("words", LATER_FAULTS)
def test_faults_of_what_follows_training_are_found(
    fuzz: Callable[..., subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('WITH_FAULT'):\n"
        + "".join(f"    {line}\n" for line in LATER_FAULTS[words].splitlines())
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("WITH_FAULT", "1")
    done = fuzz("--case", json.dumps({"world_size": 2, "keys": CASE, "cuts": None}))
    assert done.returncode == 1, done.stdout + done.stderr
    assert words in done.stdout
