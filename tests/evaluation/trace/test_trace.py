"""A run on two stores, one of which has a document of garbage: the spike is found, and its document first."""

import gzip
import json
import math
import random
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lightscale
from lightscale.cli import main
from lightscale.config.files import load, to_toml
from lightscale.config.schema import GuardConfig
from lightscale.data_pipeline.loading.samples import run_loader, step_content
from lightscale.data_pipeline.store.origins import Origin
from lightscale.evaluation.trace.lines import find_lines
from lightscale.evaluation.trace.spikes import find_spikes
from lightscale.runs.run_directory import RunDirectory

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.long
warm_commands = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "helpers" / "warm_commands.py")))
STEPS, GARBAGE_LINE = 24, 31
RUN = f"""
extends = ["{ROOT}/configs/arch/tnl.toml", "{ROOT}/configs/size/tiny.toml"]
[model]
vocab_size = 136
num_layers = 2
[data]
sequence_length = 64
[data.stores]
one = {{path = "one", weight = 0.7}}
two = {{path = "two", weight = 0.3}}
[data.validation.held]
source = "one/a-validation"
sequences = 2
[optimizer]
lr = 1e-2
[train]
steps = {STEPS}
global_batch_size = 4
micro_batch_size = 2
validate_every = 12
[guard]
window = 8
max_loss_rise = 0.4
max_grad_norm_ratio = "none"
max_skips = 100
[checkpoint]
every = 4
keep_every = 4
"""


def words_of(generator: random.Random, count: int) -> str:
    return " ".join(["abc", "abd", "bcd"][generator.randrange(3)] for _ in range(count))


def write_store(folder: Path, name: str, texts: list[str]) -> None:
    lines = [json.dumps({"text": text, "id": f"{name}-{number}"}) + "\n" for number, text in enumerate(texts, 1)]
    (folder / "texts").mkdir(exist_ok=True)
    with gzip.open(folder / "texts" / f"{name}.jsonl.gz", "wt") as file:
        file.write("".join(lines))
    (folder / f"{name}.toml").write_text(
        'tokenizer = "ascii"\nvalidation = 0.1\nduplicates = {exact = false, near = false}\n[sources.a]\n'
        f'paths = ["texts"]\nsuffixes = ["{name}.jsonl.gz"]\nid_field = "id"\n'
    )
    assert main(["data", "prepare", str(folder / f"{name}.toml"), "--out", str(folder / name), "--json"]) == 0


def garbage_step(run: Path) -> int:
    """The first step that reads most of the document of garbage; 0: none."""
    _, loader = run_loader(run)
    for step in range(1, STEPS + 1):
        for sample in step_content(loader, step).samples:
            for part in sample.documents:
                if part.origin and part.origin.id == f"one-{GARBAGE_LINE}" and part.stop - part.start > 40:
                    return step
    return 0


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A trained run's directory and the step that read the garbage, on two data ranks; its files in ``texts``."""
    folder = tmp_path_factory.mktemp("traced")
    generator = random.Random(1)
    texts = [words_of(generator, generator.randint(10, 25)) for _ in range(60)]
    texts[GARBAGE_LINE - 1] = "".join(generator.choices("QRSTUVWXYZ0123456789%$#@", k=150))
    write_store(folder, "one", texts)
    write_store(folder, "two", [words_of(generator, 15) for _ in range(40)])
    (folder / "run.toml").write_text(RUN)
    # In the second half of the run, and neither on a checkpoint's first step nor in the last epoch of its beginning.
    for seed in range(200):
        trial = folder / f"trial-{seed}"
        trial.mkdir()
        stores = [f"data.stores.{name}.path={folder / name}" for name in ("one", "two")]
        config = load(folder / "run.toml", [*stores, f"data.seed={seed}"])
        (trial / "config.toml").write_text(to_toml(config))
        step = garbage_step(trial)
        if step in (15, 18, 19, 22, 23):
            break
    else:
        pytest.fail("no seed puts the garbage where the model has learned")
    words = ["train", "run.toml", *stores, f"data.seed={seed}", "--run", "run", "--processes", "2"]
    done = warm_commands.run(words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run", step


def test_the_document_of_garbage_comes_first(traced: tuple[Path, int], capfd: pytest.CaptureFixture[str]) -> None:
    run, step = traced
    capfd.readouterr()
    assert main(["data", "trace", str(run), "--json"]) == 0
    spikes = {spike["step"]: spike for spike in json.loads(capfd.readouterr().out)["spikes"]}
    assert step in spikes and "above the median" in spikes[step]["skipped"]
    arguments = ["data", "trace", str(run), "--spike", str(step), "--files", str(run.parent)]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    first, *others = found["documents"]
    assert (first["file"], first["line"], first["id"]) == (
        "texts/one.jsonl.gz",
        GARBAGE_LINE,
        f"one-{GARBAGE_LINE}",
    )
    assert first["source"] == "one/a" and first["loss"] > max(other["loss"] for other in others) + 1
    assert found["checkpoint_step"] == (step - 1) // 4 * 4 < step
    assert found["recorded"]["loss"] == pytest.approx(found["loss"], abs=0.7)
    # All tokens of the step, and the loss of one document by the plain PyTorch form of the same checkpoint.
    assert sum(one["stop"] - one["start"] for one in found["documents"]) == 4 * 64
    model = lightscale.load(f"{run}@{found['checkpoint_step']}", device="cpu")
    from_store = {one["document"]: one for one in found["documents"] if one["start"] == 0 and one["source"] == "one/a"}
    for number, one in list(from_store.items())[:3]:
        source = run_loader(run)[1].store.source("one/a")
        start, _ = source.document(number)
        ids = source.read(start, start + one["stop"]).tolist()
        stop = source.document(number)[1]
        following = source.read(start + one["stop"], start + one["stop"] + 1).tolist() if one["stop"] else []
        labels = [*ids[1:], *following]
        if start + one["stop"] >= stop and not following:
            continue
        log_p = model.logits(ids).double().log_softmax(-1)
        loss = -sum(float(log_p[at, label]) for at, label in enumerate(labels)) / len(labels)
        assert loss == pytest.approx(one["loss"], abs=1e-3)
    assert main([*arguments, "--top", "2"]) == 0
    out = capfd.readouterr().out
    assert f"with the weights after step {found['checkpoint_step']}" in out
    assert out.index("texts/one.jsonl.gz") and f"(one-{GARBAGE_LINE})" in out
    assert main(["data", "trace", str(run), "--spike", "99"]) != 0
    assert f"has steps 1 to {STEPS}" in capfd.readouterr().err


def test_spikes_of_records(tmp_path: Path) -> None:
    losses: list[Any] = [5.0 - 0.1 * step for step in range(12)] + [9.0, 3.9, None, 3.8, 4.2]
    run = RunDirectory(tmp_path)
    lines = [{"step": n, "attempt": 1, "loss": loss} for n, loss in enumerate(losses, 1)]
    lines[3] |= {"skipped": "the gradient norm is 7"}
    lines += [{"step": 13, "attempt": 2, "loss": 8.5}]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = {spike.step: spike for spike in find_spikes(run, GuardConfig(max_loss_rise=None))}
    assert set(found) == {4, 13, 15}
    assert found[4].skipped == "the gradient norm is 7" and found[4].usual is None
    assert found[13].loss == 8.5 and found[15].loss is None
    good = sorted(loss for n, loss in enumerate(losses[:12], 1) if n != 4)
    assert found[13].usual == pytest.approx(good[len(good) // 2]) and not math.isnan(found[13].usual or 0)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_lines_are_counted_in_files(tmp_path: Path, suffix: str) -> None:
    texts = ["x" * (number * 977 % 5000) for number in range(900)]
    content = "".join(f"{text}\n" for text in texts).encode()
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    begins = [sum(len(text) + 1 for text in texts[:number]) for number in range(len(texts))]
    origins = [Origin(file=path.name, first_byte=begins[n], num_bytes=1, row=None, id=None) for n in (899, 0, 450)]
    origins.append(Origin(file="gone.jsonl", first_byte=4, num_bytes=1, row=None, id=None))
    found = find_lines(origins, tmp_path)
    assert found == {(path.name, begins[n]): n + 1 for n in (0, 450, 899)}
