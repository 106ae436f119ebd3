import itertools
import json
import multiprocessing
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightscale.config.files import load
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.records import sealed
from lightscale.runs.run_directory import LineWriter, RunDirectory, read_lines, read_metrics, write_atomically

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "runs" / "first")


def events(run: RunDirectory) -> list[tuple[int, str]]:
    return [(line["attempt"], line["event"]) for line in read_lines(run.events)]


def test_a_new_run_stores_its_resolved_configuration(run: RunDirectory, tiny_config: MakeConfig) -> None:
    config = tiny_config("optimizer.lr=2e-4")
    assert run.create_or_open(config)
    assert load(run.config) == config
    assert [path.name for path in run.path.parent.iterdir()] == ["first"], "nothing is left beside it"
    assert run.attempt == 0
    assert run.read_status() is None


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_leads_to_the_run(run: RunDirectory, tiny_config: MakeConfig, tmp_path: Path, exists: bool) -> None:
    """To an empty directory, as of another disk, or to nothing yet."""
    target = tmp_path / "disk" / "run"
    (target if exists else target.parent).mkdir(parents=True)
    run.path.parent.mkdir()
    run.path.symlink_to(target)
    assert run.create_or_open(tiny_config())
    assert not run.create_or_open(tiny_config())
    assert run.path.is_symlink() and load(target / "config.toml") == tiny_config()
    assert [path.name for path in target.parent.iterdir()] == ["run"]


def test_the_same_configuration_opens_the_run_again(run: RunDirectory, tiny_config: MakeConfig) -> None:
    assert run.create_or_open(tiny_config())
    stored = run.config.read_bytes()
    assert not run.create_or_open(tiny_config())
    assert run.config.read_bytes() == stored
    assert events(run) == []


def test_another_configuration_is_refused_with_both_values(run: RunDirectory, tiny_config: MakeConfig) -> None:
    run.create_or_open(tiny_config())
    stored = run.config.read_bytes()
    with pytest.raises(UserError) as caught:
        run.create_or_open(
            tiny_config("optimizer.lr=0.5", "model.hidden_size=128", "guard.max_loss_rise=none", "metrics.log_every=7")
        )
    message = str(caught.value)
    assert str(run.path) in message
    assert "optimizer.lr: 0.001 in the run, 0.5 now" in message
    assert "model.hidden_size: 64 in the run, 128 now" in message
    assert 'guard.max_loss_rise: 1.0 in the run, "none" now' in message
    assert "metrics" not in message, "that alone would do no harm"
    assert run.config.read_bytes() == stored
    assert events(run) == []


@pytest.mark.parametrize(
    "override",
    [
        "metrics.log_every=10",
        'metrics.sinks=["jsonl"]',
        "checkpoint.every=7",
        "checkpoint.keep=5",
        "parallel.tensor=2",
        "parallel.sequence=2",
        "train.cuda_graphs=auto",
        "train.device=cpu",
        "train.micro_batch_size=2",
        "train.profile_steps=[1,2]",
        "train.steps=8",
        "train.tokens=4096",
        "data.store=elsewhere",
        'data.validation.held.source="held"',
    ],
)
def test_harmless_changes_are_stored_and_recorded(run: RunDirectory, tiny_config: MakeConfig, override: str) -> None:
    run.create_or_open(tiny_config())
    run.begin_attempt()
    config = tiny_config(override)
    assert not run.create_or_open(config)
    assert load(run.config) == config
    start, changed = read_lines(run.events)
    assert (start["attempt"], changed["attempt"], changed["event"]) == (1, 2, "configuration_changed")
    key = override.partition("=")[0]
    assert key in changed["changes"]
    assert changed["changes"][key]["before"] != changed["changes"][key]["now"]


@pytest.mark.parametrize(
    ("first", "then", "key"),
    [
        ([], ["train.seed=1"], "train.seed"),
        ([], ["train.precision=bf16"], "train.precision"),
        ([], ["train.global_batch_size=8"], "train.global_batch_size"),
        ([], ["data.sources={text=1.0}"], "data.sources"),
    ],
)
def test_changes_that_make_another_run_are_refused(
    run: RunDirectory, tiny_config: MakeConfig, first: list[str], then: list[str], key: str
) -> None:
    run.create_or_open(tiny_config(*first))
    with pytest.raises(UserError, match=key):
        run.create_or_open(tiny_config(*then))


# Of runs of 4 steps: what decides the learning rates, the new length, and the last step at which it is accepted.
@pytest.mark.parametrize(
    ("schedule", "length", "last"),
    [
        (["optimizer.schedule=constant"], "train.steps=9", 4),
        (["optimizer.schedule=constant"], "train.steps=3", 3),
        (["optimizer.schedule=constant"], "train.tokens=700", 3),
        (["optimizer.schedule=cosine", "optimizer.warmup_steps=1"], "train.steps=8", 1),
        (["optimizer.schedule=inverse_sqrt", "optimizer.warmup_steps=1"], "train.steps=8", 4),
        (["optimizer.schedule=wsd", "optimizer.decay_steps=2"], "train.steps=9", 2),
        (["optimizer.schedule=wsd", "optimizer.decay_steps=2"], "train.steps=3", 1),
    ],
)
def test_another_length_is_accepted_while_the_rates_of_the_steps_done_are_the_same(
    run: RunDirectory, tiny_config: MakeConfig, schedule: list[str], length: str, last: int
) -> None:
    run.create_or_open(tiny_config(*schedule))
    other = tiny_config(*schedule, length)
    for step in range(1, last + 2):
        with LineWriter(run.metrics) as writer:
            writer.write({"step": step, "attempt": 1, "tokens": 256 * step})
        if step <= last:
            run.changes(other)
    name = schedule[0].partition("=")[2]
    with pytest.raises(
        UserError, match=rf'schedule = "{name}" of \d steps depend on .* after step {last}; {last + 1} are'
    ):
        run.changes(other)
    assert run.changes(other, {"train"})


def test_a_ramp_up_that_changes_the_length_is_refused_as_a_length_is(
    run: RunDirectory, tiny_config: MakeConfig
) -> None:
    """256 tokens a step: of train.tokens, another ramp-up makes other steps, and a cosine depends on their number."""
    words = ["optimizer.schedule=cosine", "optimizer.warmup_steps=1", "train.tokens=2560"]
    ramp = "train.rampup_batch_size=[{{global_batch_size=2,until_tokens={}}}]"
    run.create_or_open(tiny_config(*words, ramp.format(256)))
    other = tiny_config(*words, ramp.format(1024))
    allow = {"train.rampup_batch_size"}
    assert run.changes(other, allow)
    with LineWriter(run.metrics) as writer:
        writer.write({"step": 4, "attempt": 1, "tokens": 768})
    with pytest.raises(UserError, match=r"train.tokens = 2560 are \d+ steps .*, and were \d+; the learn"):
        run.changes(other, allow)
    assert run.changes(other, {*allow, "train.tokens"})


def test_a_stop_before_the_newest_checkpoint_is_refused(run: RunDirectory, tiny_config: MakeConfig) -> None:
    run.create_or_open(tiny_config("train.steps=8"))
    (run.checkpoints / "step-00000005").mkdir(parents=True)
    run.changes(tiny_config("train.steps=8", "train.stop_step=5"))
    with pytest.raises(UserError, match=r"train\.stop_step = 3, and the newest checkpoint is of step 5"):
        run.changes(tiny_config("train.steps=8", "train.stop_step=3"))


def test_another_length_is_refused_where_constants_of_the_optimizer_depend_on_it(
    run: RunDirectory, tiny_config: MakeConfig
) -> None:
    """Over the length of the run, by default, AdEMAMix's slow mean warms up."""
    ademamix = ("optimizer.name=ademamix", "optimizer.schedule=constant")
    run.create_or_open(tiny_config(*ademamix))
    run.changes(tiny_config(*ademamix, "train.steps=8"))
    with LineWriter(run.metrics) as writer:
        writer.write({"step": 1, "attempt": 1, "tokens": 256})
    with pytest.raises(UserError, match=r'constants of optimizer.name = "ademamix" depend on the length') as error:
        run.changes(tiny_config(*ademamix, "train.steps=8"))
    # The remedy of the message.
    ((key, value),) = re.findall(r"keep them by (\S+) = (\d+) --allow-change \1$", str(error.value), re.MULTILINE)
    kept = [*ademamix, "train.steps=8", f"{key}={value}"]
    assert {change[0] for change in run.changes(tiny_config(*kept), {key})} == {"train.steps", key}


def test_a_directory_of_other_files_is_refused(run: RunDirectory, tiny_config: MakeConfig) -> None:
    run.path.mkdir(parents=True)
    (run.path / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match=r"not a run directory.*--run"):
        run.create_or_open(tiny_config())
    assert [path.name for path in run.path.iterdir()] == ["thesis.txt"]


def test_training_is_refused_where_weights_were_written_whole(run: RunDirectory, tiny_config: MakeConfig) -> None:
    run.create(tiny_config())
    weights = run.checkpoints / "step-00000012-weights"
    weights.mkdir(parents=True)
    run.write_status("finished", reason="mean of a@8 and a@12", step=12, tokens=6144)
    for config in (tiny_config(), tiny_config("train.steps=20")):
        with pytest.raises(UserError, match=rf'has only weights: .* train.init_from = "{run.path}@12"'):
            run.create_or_open(config)
    # Weights that the run saved itself, before its first full checkpoint, stop nothing.
    run.begin_attempt()
    assert not run.create_or_open(tiny_config())


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, tiny_config: MakeConfig) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run directory .*file/run: .*file: File exists"):
        RunDirectory(tmp_path / "file" / "run").create_or_open(tiny_config())


def test_of_two_that_create_at_once_one_does(tmp_path: Path, tiny_config: MakeConfig, tiny_run: Path) -> None:
    code = f"""
import sys, time
from lightscale.config.files import load
from lightscale.runs.run_directory import RunDirectory
config = load({str(tiny_run)!r}, ["train.seed=" + sys.argv[2]])
run = RunDirectory(sys.argv[1])
time.sleep(max(0.0, float(sys.argv[3]) - time.time()))
try:
    print("created" if run.create_or_open(config) else "opened")
except ValueError as error:
    print("refused" if "train.seed" in str(error) else error)
"""
    moment = str(time.time() + 2.5)
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    racers = [subprocess.Popen([*command, str(seed), moment], stdout=subprocess.PIPE, text=True) for seed in range(4)]
    said = [racer.communicate(timeout=60)[0].strip() for racer in racers]
    assert sorted(said) == ["created", "refused", "refused", "refused"]
    assert load(tmp_path / "run" / "config.toml").train.seed == said.index("created")


def test_attempts_are_counted_and_the_old_status_goes(run: RunDirectory, tiny_config: MakeConfig) -> None:
    run.create_or_open(tiny_config())
    assert run.begin_attempt(world_size=2) == 1
    run.event("checkpoint", step=3)
    run.write_status("resumable", reason="SIGTERM", step=3, tokens=768)
    assert run.begin_attempt() == 2
    assert run.read_status() is None
    run.event("checkpoint", step=6)
    assert run.begin_attempt("rollback", step=3) == 3
    assert run.attempt == 3
    assert events(run) == [(1, "start"), (1, "checkpoint"), (2, "start"), (2, "checkpoint"), (3, "rollback")]
    first = read_lines(run.events)[0]
    assert first["world_size"] == 2
    assert first["time"].endswith("+00:00")


def test_a_finished_run_may_be_made_longer(run: RunDirectory, tiny_config: MakeConfig) -> None:
    config = tiny_config()
    run.create_or_open(config)
    assert not run.is_finished(config)
    run.write_status("resumable", reason="SIGINT", step=2, tokens=512)
    assert not run.is_finished(config)
    run.write_status("finished", reason="all steps are done", step=4, tokens=1024)
    assert run.is_finished(config)
    assert not run.is_finished(tiny_config("train.steps=5"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"status": "finished"}',
        '{"status": "done", "reason": "", "step": 1, "tokens": 1, "time": ""}',
        '{"status": "finished", "reason": "", "step": "4", "tokens": 1, "time": ""}',
        '{"status": "finished", "reason": null, "step": 4, "tokens": 1, "time": ""}',
        '{"status": ["finished"], "reason": "", "step": 4, "tokens": 1, "time": ""}',
        "[" * 100_000,
    ],
)
def test_a_damaged_status_counts_as_none_and_is_named(run: RunDirectory, tiny_config: MakeConfig, text: str) -> None:
    run.create_or_open(tiny_config())
    run.status.write_text(text)
    assert run.read_status() is None
    assert not run.is_finished(tiny_config())
    assert list(run.damage()) == ["status.json"]
    assert "status" in run.damage()["status.json"]


def test_replacing_a_file_never_shows_a_part(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    texts = ["a" * 100_000, "b" * 50_000]
    write_atomically(path, texts[0])
    context = multiprocessing.get_context("fork")
    enough = context.Event()
    writer = context.Process(target=_replace, args=(path, texts, enough), daemon=True)
    writer.start()
    seen = set()
    while writer.is_alive():
        seen.add(path.read_text())
        if seen >= set(texts):
            enough.set()
    writer.join()
    assert writer.exitcode == 0
    assert seen == set(texts)
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]


def _replace(path: Path, texts: list[str], enough: Any) -> None:
    """200 times, and until both were seen: who reads may wait for a core."""
    for turn in itertools.count():
        write_atomically(path, texts[turn % 2])
        if turn >= 200 and enough.is_set():
            break


def lines(*values: dict[str, Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def test_the_last_attempt_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        lines(
            {"step": 1, "attempt": 1, "loss": 5.0},
            {"step": 2, "attempt": 1, "loss": 4.0},
            {"step": 2, "attempt": 1, "validation": {"a": {"loss": 1}}},
            {"step": 3, "attempt": 1, "loss": 3.0, "validation": {"a": {"loss": 2}}},
            {"step": 2, "attempt": 2, "loss": 4.5},
            {"step": 2, "attempt": 2, "validation": {"a": {"loss": 3}}},
        )
    )
    assert read_metrics(path) == [
        {"step": 1, "attempt": 1, "loss": 5.0},
        {"step": 2, "attempt": 2, "loss": 4.5, "validation": {"a": {"loss": 3}}},
        {"step": 3, "attempt": 1, "loss": 3.0, "validation": {"a": {"loss": 2}}},
    ]


def test_a_torn_last_line_is_not_read_and_goes_when_writing_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = lines({"step": 1, "attempt": 1}, {"step": 2, "attempt": 1})
    for torn in ("{", '{"step": 3, "att', lines({"step": 3, "attempt": 1}).rstrip("\n"), "x" * 200_000):
        path.write_text(whole + torn)
        assert [line["step"] for line in read_metrics(path)] == [1, 2]
        with LineWriter(path) as writer:
            writer.write({"step": 3, "attempt": 2})
        assert path.read_text() == whole + sealed(lines({"step": 3, "attempt": 2}).rstrip("\n")) + "\n"
    path.write_text("{torn")
    with LineWriter(path) as writer:
        writer.write({"step": 1, "attempt": 1})
    assert path.read_text() == sealed(lines({"step": 1, "attempt": 1}).rstrip("\n")) + "\n"


def test_numbers_survive_exactly_and_what_json_lacks_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    loss = 2.0**-1074 + 0.1
    with LineWriter(path) as writer:
        writer.write({"step": 1, "attempt": 1, "loss": loss, "nan": float("nan"), "list": [float("inf"), 1.5]})
    (line,) = read_metrics(path)
    assert line == {"step": 1, "attempt": 1, "loss": loss, "nan": None, "list": [None, 1.5]}


def test_progress_is_that_of_the_newest_line(run: RunDirectory, tiny_config: MakeConfig) -> None:
    run.create_or_open(tiny_config())
    assert run.progress() == (0, 0)
    run.metrics.write_text("")
    assert run.progress() == (0, 0)
    long = {"step": 7, "attempt": 1, "tokens": 70, "note": "x" * 200_000}
    run.metrics.write_text(lines({"step": 6, "attempt": 1, "tokens": 60}, long) + '{"step": 8')
    assert run.progress() == (7, 70)


def test_reading_while_another_process_writes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    context = multiprocessing.get_context("fork")
    enough, ended = context.Event(), context.Value("i")
    writer = context.Process(target=_write_lines, args=(path, enough, ended), daemon=True)
    writer.start()
    lengths = []
    while writer.is_alive():
        steps = [line["step"] for line in read_metrics(path)]
        assert steps == list(range(1, len(steps) + 1))
        lengths.append(len(steps))
        if len(set(lengths)) > 10:
            enough.set()
    writer.join()
    assert writer.exitcode == 0
    assert lengths == sorted(lengths)
    assert len(read_metrics(path)) == ended.value


def _write_lines(path: Path, enough: Any, ended: Any) -> None:
    """3000, and until several lengths were seen: who reads may wait for a core."""
    with LineWriter(path) as writer:
        for step in itertools.count(1):
            writer.write({"step": step, "attempt": 1, "text": "x" * (step % 977)})
            time.sleep(1e-5)
            if step >= 3000 and enough.is_set():
                ended.value = step
                break


def test_log_directories_are_numbered(run: RunDirectory, tiny_config: MakeConfig) -> None:
    run.create_or_open(tiny_config())
    assert [run.new_log_directory().name for _ in range(2)] == ["launch-0001", "launch-0002"]
