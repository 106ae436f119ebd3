"""`lightscale evaluate`: results against logits of each document by itself, what is kept, and what is refused."""

import contextlib
import io
import json
import math
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightscale.cli import main
from lightscale.config.files import load
from lightscale.data_pipeline.tokenizers import copy_tokenizer, train_sentencepiece
from lightscale.evaluation.inference.scoring import Scorer
from lightscale.evaluation.model import load_model
from lightscale.evaluation.results import read_result
from lightscale.evaluation.tasks.perplexity import ratio
from lightscale.runs.run_directory import RunDirectory

tnl = SimpleNamespace(**runpy.run_path(str(Path(__file__).parent / "generation" / "test_generate.py")))
ranks = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "rank_commands.py")))
pytestmark = pytest.mark.timeout(600)
RunRanks = Callable[..., list[Any]]

DOCUMENTS = [
    "the end of the text, the start",
    "the next: the end  of",
    "e\u0301 and 字, the text of the start of the next " * 4,
]
PASSAGES = ["the end of the text", "the start of the next"]
TASKS = {
    "whole": 'kind = "perplexity"\npaths = ["documents.jsonl"]\ntext_field = "body"\nlengths = [8, 16]\n',
    "windows": 'kind = "perplexity"\npaths = ["documents.jsonl"]\ntext_field = "body"\nwindow = 16\nstride = 4\n',
    "stored": 'kind = "perplexity"\nstore = "store"\nsource = "text"\n',
    "words": 'kind = "lambada"\npaths = ["passages.jsonl"]\n',
}
NAMES = ",".join(f"{name}.toml" for name in TASKS)


def write_files(folder: Path) -> None:
    tokenizer = train_sentencepiece([tnl.TEXT] * 20, vocab_size=420)
    tnl.write_store(folder / "store", tokenizer)
    tnl.write_store(folder / "other-store", train_sentencepiece([tnl.TEXT] * 20, vocab_size=400))
    (folder / "run.toml").write_text(tnl.CONFIG.format(root=tnl.ROOT, store=folder / "store"), encoding="utf-8")
    for name, mixer in (("tnl", "tnl"), ("llama", "llama")):
        run = RunDirectory(folder / name)
        run.create_or_open(load(folder / "run.toml", [f"model.mixer={mixer}"]))
        copy_tokenizer(folder / "store" / "tokenizer", run.tokenizer, sha256=tokenizer.sha256)
    for name, text in TASKS.items():
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    lines = [json.dumps({"body": document}) for document in DOCUMENTS]
    (folder / "documents.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "passages.jsonl").write_text("\n".join(json.dumps({"text": one}) for one in PASSAGES), encoding="utf-8")


def evaluate(folder: Path, *words: str) -> list[dict[str, Any]]:
    """The results that a command leaves in the run `tnl`, by task."""
    assert main(["evaluate", str(folder / "tnl"), *words, "--csv"]) == 0
    paths = [tnl_results(folder) / f"{name}.json" for name in TASKS]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def tnl_results(folder: Path) -> Path:
    return folder / "tnl" / "evaluation" / f"step-{tnl.STEP:08d}"


def evaluate_all(rank: int, world_size: int, init_method: str, folder: Path) -> dict[str, Any]:
    """Everything that needs a model, in one process."""
    for name in ("tnl", "llama"):
        tnl.save(folder / name, 0, 1, f"{init_method}-{name}")
    found: dict[str, Any] = {}
    tasks = ",".join(str(folder / f"{name}.toml") for name in TASKS)
    found["first"] = evaluate(folder, "--tasks", tasks)
    with load_model(folder / "tnl", device="cpu") as loaded:
        tokenizer = loaded.tokenizer

        def nats(ids: Any) -> np.ndarray:
            tokens = torch.tensor([[int(token) for token in ids]])
            logits = loaded.model(tokens[:, :-1], torch.arange(tokens.size(1) - 1)[None])[0, :, :420]
            return -torch.log_softmax(logits.double(), -1).gather(-1, tokens[0, 1:, None])[:, 0].detach().numpy()

        encoded = [[tokenizer.eot_id, *tokenizer.encode(document)] for document in DOCUMENTS]
        found["nats"] = [nats(ids) for ids in encoded]
        found["windows"] = []
        for ids in encoded:
            # Each token by itself, behind as many as its window has before it.
            num_ends = max(0, -(-(len(ids) - 1 - 16) // 4))
            for index in range(1, len(ids)):
                end = 17 if index < 17 else 17 + 4 * -(-(index - 16) // 4)
                end = min(end, len(ids)) if num_ends else len(ids)
                begin = max(0, end - 17)
                found["windows"].append(float(nats(ids[begin : index + 1])[-1]))
        found["lengths"] = {
            length: np.stack([
                nats(ids[first : first + length + 1])
                for ids in encoded
                for first in range(0, len(ids) - length, length)
            ])
            for length in (8, 16)
        }  # fmt: skip
        pairs = [(f"{tnl_passage.rpartition(' ')[0]}", tnl_passage) for tnl_passage in PASSAGES]
        found["words"] = []
        for context, passage in pairs:
            before, ids = ([tokenizer.eot_id, *tokenizer.encode(text)] for text in (context, passage))
            found["words"].append(float(nats(ids)[len(before) - 1 :].sum()))

    # Interrupted behind the first block, then continued.
    shutil.rmtree(folder / "tnl" / "evaluation")
    asked: list[int] = []
    answer = Scorer.answer

    def interrupted(scorer: Scorer, requests: Any) -> Any:
        asked.append(len(requests))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return answer(scorer, requests)

    patch = pytest.MonkeyPatch()
    patch.setattr("lightscale.evaluation.evaluate.BLOCK_TOKENS", 1)
    patch.setattr(Scorer, "answer", interrupted)
    found["interrupted"] = main(["evaluate", str(folder / "tnl"), "--tasks", str(folder / "whole.toml")])
    found["left"] = sorted(path.name for path in tnl_results(folder).iterdir())
    asked.clear()
    asked += [0, 0]
    (found["continued"],) = evaluate(folder, "--tasks", str(folder / "whole.toml"))
    found["asked"] = sum(asked)
    patch.undo()
    path = tnl_results(folder) / "whole.json"
    stamp = path.stat().st_mtime_ns
    evaluate(folder, "--tasks", str(folder / "whole.toml"))
    found["done before"] = path.stat().st_mtime_ns == stamp
    evaluate(folder, "--tasks", str(folder / "whole.toml"), "--again")
    found["again"] = path.stat().st_mtime_ns != stamp
    found["kept"] = sorted(path.name for path in tnl_results(folder).iterdir())
    found["removed"] = without_its_checkpoint(folder)
    (folder / "llama-task.toml").write_text('kind = "lambada"\npaths = ["long.jsonl"]\n', encoding="utf-8")
    (folder / "long.jsonl").write_text(json.dumps({"text": "the end of " * 60 + "it"}), encoding="utf-8")
    found["too long"] = main_error(["evaluate", str(folder / "llama"), "--tasks", str(folder / "llama-task.toml")])
    found["made fit"] = main(
        ["evaluate", str(folder / "llama"), "--tasks", str(folder / "llama-task.toml"), "--context", "1000"]
    )
    return found


def without_its_checkpoint(folder: Path) -> int:
    """The exit code where a run in training removes the checkpoint as soon as it is read."""
    module = sys.modules["lightscale.evaluation.evaluate"]
    checkpoints, away, restore = folder / "tnl" / "checkpoints", folder / "away", module.restore

    def removing(*args: Any) -> Any:
        loaded = restore(*args)
        checkpoints.rename(away)
        return loaded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "restore", removing)
        code = main(["evaluate", str(folder / "tnl"), "--tasks", str(folder / "whole.toml"), "--again"])
    away.rename(checkpoints)
    return code


def main_error(words: list[str]) -> tuple[int, str]:
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream):
        code = main(words)
    return code, stream.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    write_files(folder)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path, run_ranks: RunRanks) -> dict[str, Any]:
    (found,) = run_ranks(evaluate_all, 1, folder, timeout_s=300)
    return dict(found)


@pytest.fixture
def results(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {result["task"]: result for result in found["first"]}


def value(result: dict[str, Any], name: str) -> float:
    return float(result["scores"][name]["value"])


def test_perplexity_is_that_of_each_document_by_itself(found: dict[str, Any], results: dict[str, Any]) -> None:
    nats, result = sum(values.sum() for values in found["nats"]), results["whole"]
    tokens = sum(map(len, found["nats"]))
    words = sum(len(document.split()) for document in DOCUMENTS)
    num_bytes = sum(len(document.encode()) for document in DOCUMENTS)
    assert [result["details"][name] for name in ("documents", "tokens", "words", "bytes")] == [
        3,
        tokens,
        words,
        num_bytes,
    ]
    assert value(result, "nats_per_token") == pytest.approx(nats / tokens, rel=1e-5)
    assert math.log(value(result, "token_perplexity")) == pytest.approx(nats / tokens, rel=1e-5)
    assert math.log(value(result, "word_perplexity")) == pytest.approx(nats / words, rel=1e-5)
    assert math.log(value(result, "byte_perplexity")) == pytest.approx(nats / num_bytes, rel=1e-5)
    assert value(result, "bits_per_byte") == pytest.approx(nats / num_bytes / math.log(2), rel=1e-5)


def test_the_standard_error_is_that_of_documents(found: dict[str, Any], results: dict[str, Any]) -> None:
    """Of the three by the formula for a ratio of clusters; of many as leaving out one at a time gives it."""
    sums, counts = np.array([one.sum() for one in found["nats"]]), np.array([len(one) for one in found["nats"]])
    residuals = sums - sums.sum() / counts.sum() * counts
    expected = math.sqrt(3 / 2 * (residuals**2).sum()) / counts.sum()
    assert results["whole"]["scores"]["nats_per_token"]["standard_error"] == pytest.approx(expected, rel=1e-4)
    generator = np.random.default_rng(0)
    counts = generator.integers(1, 1000, 400)
    sums = counts * generator.normal(3, 0.5, 400)
    without = (sums.sum() - sums) / (counts.sum() - counts)
    of_many = math.sqrt(399 / 400 * ((without - without.mean()) ** 2).sum())
    assert ratio(sums, counts).standard_error == pytest.approx(of_many, rel=0.01)


def test_the_loss_by_position(found: dict[str, Any], results: dict[str, Any]) -> None:
    for place in results["whole"]["details"]["by_position"]:
        seen = [values[place["first"] - 1 : place["last"]] for values in found["nats"]]
        expected = np.concatenate(seen)
        assert place["tokens"] == len(expected)
        assert place["nats_per_token"] == pytest.approx(expected.mean(), rel=1e-5)
    assert results["whole"]["details"]["by_position"][0]["tokens"] == len(DOCUMENTS)


def test_windows_with_a_stride(found: dict[str, Any], results: dict[str, Any]) -> None:
    assert results["windows"]["details"]["tokens"] == len(found["windows"])
    assert results["windows"]["details"]["nats"] == pytest.approx(sum(found["windows"]), rel=1e-5)
    assert results["windows"]["details"]["nats"] != pytest.approx(results["whole"]["details"]["nats"], rel=1e-4)


def test_windows_of_each_length_are_read_by_themselves(found: dict[str, Any], results: dict[str, Any]) -> None:
    of_lengths = results["whole"]["details"]["by_length"]
    assert [one["length"] for one in of_lengths] == [8, 16]
    for one in of_lengths:
        expected = found["lengths"][one["length"]]
        assert one["windows"] == len(expected) >= 3
        assert one["nats_per_token"] == pytest.approx(expected.mean(), rel=1e-5)
        assert one["token_perplexity"] == pytest.approx(math.exp(expected.mean()), rel=1e-4)
        last_half = expected[:, one["length"] // 2 :].mean()
        assert one["nats_per_token_last_half"] == pytest.approx(last_half, rel=1e-5)


def test_a_source_of_a_store(results: dict[str, Any]) -> None:
    details = results["stored"]["details"]
    assert (details["documents"], details["bytes"]) == (1, len(tnl.TEXT.encode()))
    assert results["stored"]["scores"]["nats_per_token"]["standard_error"] is None
    assert list(results["stored"]["data"]) == ["store/text"]


def test_last_words(found: dict[str, Any], results: dict[str, Any]) -> None:
    assert math.log(value(results["words"], "perplexity")) == pytest.approx(np.mean(found["words"]), rel=1e-5)
    assert results["words"]["requests"] == len(PASSAGES)


def test_an_interrupted_evaluation_goes_on_with_what_is_left(found: dict[str, Any], results: dict[str, Any]) -> None:
    assert found["interrupted"] == 130
    (left,) = found["left"]
    assert re.fullmatch(r"whole\.[0-9a-f]{8}\.partial\.jsonl", left)
    assert found["asked"] == results["whole"]["requests"] - 1
    for name, score in results["whole"]["scores"].items():
        assert found["continued"]["scores"][name] == pytest.approx(score, rel=1e-5)
    assert found["continued"]["identity"] == results["whole"]["identity"]
    assert found["kept"] == ["whole.json", "whole.png"]


def test_a_checkpoint_that_is_removed_behind_its_reading(found: dict[str, Any]) -> None:
    assert found["removed"] == 0


def test_what_has_a_result_is_not_done_again(found: dict[str, Any]) -> None:
    assert (found["done before"], found["again"]) == (True, True)


def test_prompts_beyond_the_context_of_softmax_attention(found: dict[str, Any]) -> None:
    code, message = found["too long"]
    assert code == 2
    assert "longer than the 64 tokens of the context of " in message
    assert "--context" in message
    assert found["made fit"] == 0


def test_two_ranks_give_the_scores_of_one(found: dict[str, Any], folder: Path, run_ranks: RunRanks) -> None:
    copy = folder / "copies"
    shutil.copytree(folder / "tnl", copy / "data" / "tnl", ignore=shutil.ignore_patterns("evaluation"))
    shutil.copytree(folder / "tnl", copy / "tensor" / "tnl", ignore=shutil.ignore_patterns("evaluation"))
    tasks = ",".join(str(folder / f"{name}.toml") for name in TASKS)
    lines = [
        ["evaluate", str(copy / "data" / "tnl"), "--tasks", tasks, "--json"],
        ["evaluate", str(copy / "tensor" / "tnl"), "parallel.tensor=2", "--tasks", tasks, "--json"],
    ]
    outcomes = run_ranks(ranks.commands, 2, str(folder), lines, timeout_s=300)
    assert [code for code, _ in outcomes[0]] == [0, 0], outcomes
    for layout in ("data", "tensor"):
        for result in found["first"]:
            path = copy / layout / "tnl" / "evaluation" / f"step-{tnl.STEP:08d}" / f"{result['task']}.json"
            other = read_result(path)
            assert other is not None
            for name, score in result["scores"].items():
                assert other["scores"][name]["value"] == pytest.approx(score["value"], rel=1e-4), (layout, name)
            assert other["identity"] == result["identity"]


BAD = {
    "an unknown task": ("tnl --tasks perplexiti", "did you mean perplexity?"),
    "a kind alone": ("tnl --tasks perplexity", "FILE.toml"),
    "no task": ("tnl --tasks ,", "names no task; known: wikitext-2, wikitext-103, lambada, niah-easy, niah-standard, "),
    "no such run": ("tml --tasks whole.toml", "no run tml"),
    "no such step": ("tnl@7 --tasks whole.toml", "has no checkpoint of step 7; it has: 2"),
    "no such file": ("tnl --tasks nowhere.toml", "nowhere.toml: cannot read the task file"),
    "missing data": ("tnl --tasks wikitext-2", "data/evaluation/wikitext-2/wiki.test.raw"),
    "a layout that does not fit": ("tnl parallel.tensor=3 --tasks whole.toml", "parallel.tensor = 3"),
    "another model": ("tnl model.num_layers=3 --tasks whole.toml", "not allowed for a trained model"),
    "two of one name": ("tnl --tasks whole.toml,whole.toml", "two tasks have the name 'whole'"),
    "limit": ("tnl --tasks whole.toml --limit 0", "--limit 0: must be at least 1"),
}
BAD_FILES = {
    'kind = "perplexity"\npaths = ["documents.jsonl"]\nwidnow = 3\n': (
        "bad.toml: widnow: no such key; did you mean window?"
    ),
    'kind = "perplexity"\npaths = ["nowhere.txt"]\n': "nowhere.txt: no such file",
    'kind = "perplexity"\n': "bad.toml: set either paths or store",
    'kind = "perplexity"\npaths = ["documents.jsonl"]\nwindow = 0\n': "bad.toml: window = 0: must be",
    'kind = "perplexity"\npaths = ["documents.jsonl"]\nstride = 4\n': "bad.toml: stride = 4: set window",
    'kind = "perplexity"\nstore = "store"\nsource = "txet"\n': "store: no source 'txet'",
    'kind = "perplexity"\nstore = "other-store"\nsource = "text"\n': "other-store: written with the tokenizer",
    'kind = "perplexiti"\n': "bad.toml: kind = 'perplexiti': unknown task; did you mean perplexity?",
    'name = "x"\n': 'bad.toml: kind = "none": must be one of perplexity, ',
    'kind = "lambada"\nname = "../up"\npaths = ["a"]\n': 'bad.toml: name = "../up": use only letters',
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(found: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str) -> None:
    monkeypatch.chdir(folder)
    words, message = BAD[name]
    assert main(["evaluate", *words.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", BAD_FILES)
def test_bad_task_files(found: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, text: str) -> None:
    monkeypatch.chdir(folder)
    Path("bad.toml").write_text(text, encoding="utf-8")
    assert main(["evaluate", "tnl", "--tasks", "bad.toml"]) == 2
    error = capsys.readouterr().err
    assert f"error: {BAD_FILES[text]}" in error
    assert not (tnl_results(folder) / "bad.json").exists()
