"""Random models on random layouts, a few with another seed each time; and that the fuzzer would find a fault."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def tools(tools_path: Path) -> None:
    """So that the tool can be imported."""


@pytest.fixture
def fuzz(root: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def fuzz(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(root / "tools/fuzz_layouts.py"), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=580)

    return fuzz


def test_every_option_is_drawn_or_says_why_not() -> None:
    from layout_fuzzing.drawing import NOT_DRAWN, tables, undrawn

    assert undrawn() == [], "name values in NUMBERS, or a reason in NOT_DRAWN (tools/layout_fuzzing/drawing.py)"
    known = {f"{table.partition(':')[0]}.{name}" for table, kind in tables().items() for name in kind.model_fields}
    assert NOT_DRAWN.keys() <= known, "reasons for what is no option"


def test_what_is_drawn_covers_every_mixer_task_and_axis(tmp_path: Path) -> None:
    from fuzz_layouts import draw_valid, pairs
    from layout_fuzzing.drawing import Drawer
    from layout_fuzzing.stores import write_stores
    from lightscale.config.mixers import MIXERS
    from lightscale.config.tasks import TASKS

    write_stores(tmp_path)
    drawer = Drawer(random.Random(1))
    found = pairs([draw_valid(drawer, str(tmp_path))[0] for _ in range(400)])
    axes = ("tensor", "pipeline", "sequence", "data")
    missing = [(name, axis) for name in MIXERS for axis in axes if not found[f"model.mixer = {name}", axis]]
    missing += [(name, axis) for name in TASKS for axis in axes if not found[f"task.name = {name}", axis]]
    assert not missing


@pytest.mark.parametrize("cases", [12, pytest.param(48, marks=pytest.mark.long)])
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
    from fuzz_layouts import mixers_of, read_case

    out = tmp_path / "cases.jsonl"
    done = fuzz("--cases", "24", "--seed", "3", "--mixer", *DELTA, "--out", str(out))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = [read_case(json.dumps(json.loads(line)["case"])) for line in out.read_text().splitlines()]
    assert len(cases) == 24 and all(mixers_of(case) & {*DELTA} for case in cases)
    assert {*DELTA} <= set.union(*map(mixers_of, cases))
    assert sum(bool(mixers_of(case) - {*DELTA}) for case in cases) >= 6, "stacks with older mixers"
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
        "specs.OptimizerSpec.state_bytes = property(lambda self: 4 * len(self.state) + 4)\n"
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
