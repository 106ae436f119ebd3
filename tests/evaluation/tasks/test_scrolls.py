"""SCROLLS by texts made up here: what is asked, what is cut, how answers are judged, and what is refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightscale.data_pipeline.tokenizers import TiktokenTokenizer, Tokenizer
from lightscale.errors import UserError
from lightscale.evaluation.inference.requests import Encoder, GenerateUntil, Generation
from lightscale.evaluation.registry import find_tasks
from lightscale.evaluation.tasks.answer_metrics import exact_match, f1
from lightscale.evaluation.tasks.scrolls import DATA_SETS, MEAN, NLI

WITHOUT_ROUGE = ("qasper", "narrative_qa", "quality", "contract_nli")
CHOICES = " (A) red\n (B) the blue one\n (C) green\n (D) none"
INPUTS = {
    "qasper": ("What is it?\n\nA text.\n\nMore of it.", "A text.\n\nMore of it.", "What is it?"),
    "narrative_qa": ("Who?\n\nA story.", "A story.", "Who?"),
    "quality": (f"Which?\n\n{CHOICES}\n\n\nAn article.", "An article.", f"Which?\n\n{CHOICES}"),
    "contract_nli": ("It ends.\n\nA contract.", "A contract.", f"It ends. {NLI}"),
    "gov_report": ("A report.\n\nIts end.", "A report.\n\nIts end.", "Summarize the report above."),
    "summ_screen_fd": ("An episode.", "An episode.", "Summarize the episode above."),
    "qmsum": ("What was said?\n\nA meeting.", "A meeting.", "What was said?"),
}
OUTPUTS = {
    "qasper": ["a thing", "the text"],
    "narrative_qa": ["Ann and Bob"],
    "quality": ["the blue one"],
    "contract_nli": ["Entailment"],
    "gov_report": ["it reports much"],
    "summ_screen_fd": ["it ends well"],
    "qmsum": ["much was said"],
}


@pytest.fixture
def tokenizer() -> Tokenizer:
    ranks = {bytes([byte]): byte for byte in range(256)}
    return TiktokenTokenizer(
        name="bytes", pat_str=r"(?s:.+)", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, (text, _, _) in INPUTS.items():
        records = [{"id": "1", "pid": f"1_{n}", "input": text, "output": one} for n, one in enumerate(OUTPUTS[name])]
        path = tmp_path / "scrolls" / name / "validation.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(f"{json.dumps(one)}\n" for one in records))
    return tmp_path


def task_of(folder: Path, names: Sequence[str] = WITHOUT_ROUGE, **more: Any) -> Any:
    lines = [f"data_sets = {json.dumps(list(names))}", *(f"{key} = {json.dumps(value)}" for key, value in more.items())]
    (folder / "mine.toml").write_text("\n".join(['kind = "scrolls"', *lines]))
    (task,) = find_tasks([str(folder / "mine.toml")], folder)
    return task


def test_what_is_asked(folder: Path, tokenizer: Tokenizer) -> None:
    task = task_of(folder, list(INPUTS))
    requests = task.requests(Encoder(tokenizer))
    assert len(requests) == 7
    for name, request in zip(INPUTS, requests, strict=True):
        assert isinstance(request, GenerateUntil)
        _, text, ask = INPUTS[name]
        assert tokenizer.decode(request.context[1:].tolist()) == f"{text}\n\nQuestion: {ask}\nAnswer:"
        assert request.context[0] == tokenizer.eot_id
        assert request.max_tokens == DATA_SETS[name].max_tokens
        assert request.until == (() if "rouge1" in DATA_SETS[name].names else ("\n",))
    assert set(task.data_hashes()) == {f"{name}/validation.jsonl" for name in INPUTS}


def test_a_long_text_is_cut_at_its_end(folder: Path, tokenizer: Tokenizer) -> None:
    ask = "\n\nQuestion: Who?\nAnswer:"
    task = task_of(folder, ["narrative_qa"], context=64 + 1 + len(ask) + 3)
    (request,) = task.requests(Encoder(tokenizer))
    assert tokenizer.decode(request.context[1:].tolist()) == f"A s{ask}"
    assert len(request.context) + request.max_tokens == task.settings.context
    assert task.score([Generation(text="", num_tokens=0)]).details == {"questions": 1, "cut": 1}


def test_answers_are_judged_by_the_best_reference(folder: Path, tokenizer: Tokenizer) -> None:
    task = task_of(folder)
    task.requests(Encoder(tokenizer))
    written = ["Text!", "Ann or Bob", " (B) The Blue one", "Not mentioned"]
    scores = task.score([Generation(text=text, num_tokens=1) for text in written]).scores
    values = {name: score.value for name, score in scores.items()}
    assert values == {
        MEAN: pytest.approx((1 + 2 / 3 + 1 + 0) / 4),
        "qasper_f1": 1.0,
        "narrative_qa_f1": pytest.approx(2 / 3),
        "quality_exact_match": 1.0,
        "contract_nli_exact_match": 0.0,
    }


def test_the_mean_is_that_of_thirteen_numbers(folder: Path, tokenizer: Tokenizer) -> None:
    pytest.importorskip("rouge_score", reason="the extra `eval` is not installed")
    task = task_of(folder, list(INPUTS))
    task.check(tokenizer)
    task.requests(Encoder(tokenizer))
    right = task.score([Generation(text=OUTPUTS[name][-1], num_tokens=1) for name in INPUTS]).scores
    assert len(right) == 1 + 13
    assert {score.value for score in right.values()} == {1.0}
    wrong = task.score([Generation(text="xyz", num_tokens=1) for name in INPUTS]).scores
    assert {score.value for score in wrong.values()} == {0.0}


@pytest.mark.parametrize(
    ("answer", "references", "expected"),
    [
        ("the cat sat", ["a cat sat down"], 2 * 2 / (2 + 3)),
        ("cat cat", ["cat"], 2 * 1 / (2 + 1)),
        ("", ["cat"], 0.0),
        ("dog", ["cat", "Dog."], 1.0),
        ("the", ["an"], 1.0),
    ],
)
def test_f1(answer: str, references: list[str], expected: float) -> None:
    assert f1(answer, references) == pytest.approx(expected)
    assert exact_match(answer, references) == (1.0 if expected == 1.0 else 0.0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"names": ["qasper", "squad"]}, r"data_sets: 'squad' is not one of gov_report, .*contract_nli"),
        ({"names": ["qasper", "qasper"]}, "lists a data set twice"),
        ({"context": 0}, "context = 0: must be"),
        ({"context": 100}, r"context = 100: an answer of qasper alone can have 128 tokens"),
        ({"path": "nowhere"}, r"nowhere/qasper/validation.jsonl: no such file; lightscale downloads nothing: "),
    ],
)
def test_what_is_refused(folder: Path, tokenizer: Tokenizer, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        task_of(folder, **settings).check(tokenizer)


def test_an_input_without_a_question_is_refused(folder: Path, tokenizer: Tokenizer) -> None:
    path = folder / "scrolls" / "quality" / "validation.jsonl"
    path.write_text(json.dumps({"id": "7", "input": "Which?\n\n (A) red\n\n\nText", "output": "red"}) + "\n")
    with pytest.raises(UserError, match=r"validation.jsonl: the input of '7' must be a question with answers \(A\) to"):
        task_of(folder, ["quality"]).requests(Encoder(tokenizer))


def test_without_rouge_it_says_how_to_install_it(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"gov_report needs the package rouge-score.*lightscale\[eval\]"):
        task_of(folder, ["gov_report"]).check(tokenizer)
