"""A LLaMA becomes a hybrid by the commands: attention transfer, then logits, resumed; what is refused."""

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lightscale
from lightscale.cli import main
from lightscale.config.files import load
from lightscale.planning.hardware import H100
from lightscale.planning.search import Fixed, best_layouts
from lightscale.planning.step_cost import CostModel
from lightscale.runs.run_directory import RunDirectory, read_lines, read_metrics
from lightscale.training.checkpoints.directories import directory_name

commands = runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "rank_commands.py"))["commands"]
RunRanks = Callable[..., list[Any]]
STEPS = 8
SHAPE = [
    "run.toml",
    'model.norm="rmsnorm"',
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.intermediate_size=48",
    f"train.steps={STEPS}",
    f"train.validate_every={STEPS}",
    f"checkpoint.every={STEPS // 2}",
    "optimizer.warmup_steps=1",
]
TEACHER = [*SHAPE, "model.mixer=llama"]
HYBRID = [*SHAPE, 'model.mixer=["tnl", "llama"]']
DISTILL = [*HYBRID, "task.name=distill", f"task.teacher=runs/distill/softmax@{STEPS}"]
LAYERS = [*DISTILL, "task.stage=layers", f"train.init_from=runs/distill/softmax@{STEPS}"]
LOGITS = [*DISTILL, f"train.init_from=runs/distill/transferred@{STEPS}", "task.cross_entropy_weight=0.1"]


def all_runs(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[int, str]]:
    """Teacher, attention transfer, logits; the last once more as a crash leaves it, and with two changed records."""
    lines = [["train", *words, "--run", f"runs/distill/{name}"] for name, words in RUNS.items()]
    results = commands(rank, world_size, f"{init_method}-whole", folder, lines)
    for name in AGAIN:
        run = RunDirectory(f"runs/distill/{name}")
        shutil.copytree("runs/distill/distilled", run.path)
        shutil.rmtree(run.checkpoints / directory_name(STEPS))
        run.status.unlink()
        if name != "resumed":
            events = [json.loads(line) for line in run.events.read_text().splitlines()]
            of_teacher = [one | {"manifest": "0" * 32} if one["event"] == "teacher" else one for one in events]
            for one in of_teacher if name == "other" else ():
                # As earlier versions wrote it: else readers skip the line as a damaged one.
                del one["xxh3_64"]
            run.events.write_text("".join(json.dumps(one) + "\n" for one in of_teacher))
    again = [["train", *LOGITS, "--run", f"runs/distill/{name}"] for name in AGAIN]
    for name in AGAIN[1:]:
        branch = f"train.branch_from=runs/distill/{name}@{STEPS // 2}"
        again.append(["train", *LOGITS, branch, "train.init_from=none", "--run", f"runs/distill/{name}-branch"])
    return results + commands(rank, world_size, f"{init_method}-again", folder, again)


AGAIN = ("resumed", "other", "damaged")
RUNS = {"softmax": TEACHER, "transferred": LAYERS, "distilled": LOGITS}


@pytest.fixture(scope="module")
def results(workplace: Path, run_ranks: RunRanks) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = run_ranks(all_runs, 1, str(workplace), timeout_s=400)[0]
    return found


@pytest.mark.timeout(600)
def test_a_hybrid_learns_from_its_teacher_and_resumes_bitwise(
    workplace: Path, results: list[tuple[int, str]], steps_of: Callable[..., dict[int, tuple[Any, ...]]]
) -> None:
    assert [code for code, _ in results[:4]] == [0] * 4, results
    runs = {name: RunDirectory(workplace / "runs" / "distill" / name) for name in (*RUNS, "resumed")}
    metrics = {name: read_metrics(run.metrics) for name, run in runs.items()}
    for name in ("transferred", "distilled"):
        losses = [line["loss"] for line in metrics[name]]
        assert 0 < losses[-1] < losses[0], name
        assert [event["event"] for event in read_lines(runs[name].events)].count("teacher") == 1
    assert steps_of(metrics["resumed"]) == steps_of(metrics["distilled"])
    weights = {name: lightscale.load(runs[name].path).module.state_dict() for name in RUNS}
    # Attention transfer changes the mixer of the first layer, and nothing else.
    same = {key for key, weight in weights["transferred"].items() if weight.equal(weights["softmax"].get(key, -weight))}
    changed = weights["transferred"].keys() - same
    assert changed and all("layers.0" in key or ".0." in key for key in changed), changed
    # The measure of a layer: the teacher's loss with the student's mixer in it, which here is the student's whole loss.
    (event,) = (one for one in read_lines(runs["transferred"].events) if one.get("set") == "held")
    assert event["rises"].keys() == {"0"}
    of_student = metrics["transferred"][-1]["validation"]["held"]["loss"]
    # Frozen weights lie elsewhere in memory, which on some CPUs changes the last bit of a product in fp32.
    assert event["teacher_loss"] == pytest.approx(metrics["softmax"][-1]["validation"]["held"]["loss"], abs=1e-7)
    assert event["teacher_loss"] + event["rises"]["0"] == pytest.approx(of_student, abs=1e-7)
    # The task trains all weights, and what comes out is a causal model.
    assert not any(weight.equal(weights["transferred"][key]) for key, weight in weights["distilled"].items())


def test_another_checkpoint_of_the_teacher_is_refused(results: list[tuple[int, str]]) -> None:
    for name, (code, stderr) in (("other", results[4]), ("other-branch", results[6])):
        assert code == 78
        assert f"is not the checkpoint that runs/distill/{name} began to learn from, runs/distill/softmax/" in stderr
        assert "restore that one, or start a new run" in stderr


def test_a_run_that_has_lost_the_record_of_its_teacher_is_refused(results: list[tuple[int, str]]) -> None:
    for code, stderr in (results[5], results[7]):
        assert code == 78
        assert "no readable record of the checkpoint that runs/distill/damaged began to learn from; restore" in stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["task.teacher=runs/distill/none@8"],
            'task.teacher = "runs/distill/none@8": runs/distill/none/config.toml is missing; use a run',
        ),
        (
            ["task.teacher=runs/distill/softmax"],
            'task.teacher = "runs/distill/softmax": must be RUN@STEP, like "runs/first@1000"',
        ),
        (["parallel.pipeline=2"], 'parallel.pipeline = 2: the teacher of task.name = "distill" has no pipeline stages'),
        (["model.vocab_size=321"], "its model.vocab_size is 320 and that of this run 321; use model.vocab_size=320"),
        (["task.stage=layers", "model.mixer=llama"], "all mixers are the teacher's; change model.mixer"),
        (["task.stage=layers", "model.norm_placement=post"], "its layer 0 has norms placed 'pre' and that of this run"),
        (["task.stage=layers", "train.recompute=full"], 'train.recompute = "full": task.stage = "layers" keeps'),
        (["task.stage=layers", "model.hidden_size=64"], "its model.hidden_size is 32 and that of this run 64"),
    ],
)
def test_what_a_run_cannot_learn_from(
    workplace: Path,
    results: list[tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(workplace)
    assert main(["train", *DISTILL, *words, "--run", "runs/distill/refused"]) == 78
    assert message in capsys.readouterr().err
    assert not Path("runs/distill/refused").exists()


def test_a_plan_counts_the_teacher(
    workplace: Path, results: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    plans = {}
    for name, words in (("alone", HYBRID), ("taught", DISTILL), ("teacher", TEACHER)):
        assert main(["plan", *words, "train.device=cpu", "--json"]) == 0
        plans[name] = json.loads(capsys.readouterr().out)
    # Three passes of the student, and one of the teacher, of which its own plan counts three.
    flops = {name: plan["training_flops_per_step"]["mfu"] for name, plan in plans.items()}
    assert flops["taught"] == pytest.approx(flops["alone"] + flops["teacher"] / 3)
    memory = {name: plan["memory"] for name, plan in plans.items()}
    added = memory["taught"]["total_bytes"] - memory["alone"]["total_bytes"]
    assert added == memory["taught"]["teacher_bytes"] > memory["teacher"]["weights_bytes"]


def test_a_plan_searches_the_ways_of_the_teachers_attention(
    workplace: Path, results: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a student without softmax attention, on the axes that divide the teacher too."""
    monkeypatch.chdir(workplace)
    config_file, *words = DISTILL
    taught = load(Path(config_file), [*words, "model.mixer=tnl", "model.num_heads=4", "parallel.attention=ring"])
    alone = load(Path(config_file), [*words[: len(HYBRID) - 1], "model.mixer=tnl"])
    assert CostModel(taught, 64, H100).attends and not CostModel(alone, 64, H100).attends
    found = best_layouts(taught, nodes=1, sequence_length=64, hardware=H100, fixed=Fixed())
    # The teacher has two heads.
    assert {one.layout.tensor for one in found} <= {1, 2}
    assert any(one.attention != "gather" for one in found)
