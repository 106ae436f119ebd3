"""Needles: prompts read back as text, scores of made answers, and a model asked about each prompt by itself."""

import json
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightscale.cli import main
from lightscale.config.files import load
from lightscale.data_pipeline.tokenizers import Tokenizer, copy_tokenizer, train_sentencepiece
from lightscale.errors import UserError
from lightscale.evaluation.inference.packing import ScoredDocument, TreeNode, forest, order
from lightscale.evaluation.inference.requests import (
    Answer,
    Encoder,
    GenerateUntil,
    Generation,
    Likelihood,
    LogLikelihood,
    Request,
    digest,
)
from lightscale.evaluation.model import load_model
from lightscale.evaluation.registry import find_tasks
from lightscale.evaluation.tasks.needles import Needles
from lightscale.runs.run_directory import RunDirectory

tnl = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "generation" / "test_generate.py")))
RunRanks = Callable[..., list[Any]]
SENTENCES = [f"The {word} of day {number} was long, and so it went on." for number in range(40) for word in "abc"]
TEXT = " ".join(SENTENCES)
QUESTION = "\n\nQuestion: What are the secret words of"
TASK = 'kind = "needles"\npaths = ["hay.txt"]\n'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    words = "The secret words of London are bell, river lamp. Question: What Answer: \n"
    return train_sentencepiece([TEXT, words * 30], vocab_size=400)


def make_task(folder: Path, text: str, **hay: str) -> Needles:
    (folder / "hay.txt").write_text(hay.get("hay", TEXT), encoding="utf-8")
    (folder / "needles.toml").write_text(TASK + text, encoding="utf-8")
    (task,) = find_tasks([str(folder / "needles.toml")], folder)
    assert isinstance(task, Needles)
    return task


def prompts(requests: Sequence[Request]) -> list[np.ndarray]:
    """The prompt of each cell: what the first word of a value is asked behind."""
    asked = [request.context for request in requests if isinstance(request, LogLikelihood)]
    # With values of two words and one distractor: word, word, distractor.
    return asked[::3]


@pytest.mark.parametrize("mode", ["easy", "standard"])
def test_prompts_are_the_haystack_with_a_needle_and_a_question(tmp_path: Path, tokenizer: Tokenizer, mode: str) -> None:
    task = make_task(
        tmp_path, f'mode = "{mode}"\nlengths = [300, 600]\ndepths = 5\nanswer_words = 2\ndistractors = 1\n'
    )
    found = prompts(requests := task.requests(Encoder(tokenizer)))
    assert len(found) == 10
    assert len(requests) == 30
    starts = []
    for number, ids in enumerate(found):
        length = (300, 600)[number // 5]
        assert length - 80 < len(ids) < length
        assert ids[0] == tokenizer.eot_id
        text = tokenizer.decode(ids[1:])
        needle = task._cells[number].needle
        assert text.count(needle.text) == 1
        before, _, behind = text.partition(needle.text)
        # A whole number of sentences, and with what is behind the needle the beginning of the text.
        assert before == "" or before in {TEXT[: match + 1] for match in range(len(TEXT)) if TEXT[match] == "."}
        rest, _, question = behind.rpartition(QUESTION)
        assert TEXT.startswith(before + rest)
        key = question.partition("?")[0].strip()
        assert question == f" {key}?\nAnswer: The secret words of {key} are"
        assert f"The secret words of {key} are {' '.join(needle.words)}." in needle.text
        assert needle.text.startswith(QUESTION) == (mode == "easy")
        starts.append(len(tokenizer.encode(before)) / len(tokenizer.encode(before + rest)))
    # Moved back to the beginning of a sentence, of some twenty tokens.
    assert starts[:5] == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.12)
    assert starts[5:] == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.06)
    assert all(share <= wanted + 0.01 for share, wanted in zip(starts, [0, 0.25, 0.5, 0.75, 1] * 2, strict=True))


def test_what_is_asked_is_the_value_word_by_word_and_others(tmp_path: Path, tokenizer: Tokenizer) -> None:
    task = make_task(tmp_path, "lengths = [300]\ndepths = 2\nanswer_words = 3\ndistractors = 4\n")
    requests = [one for one in task.requests(Encoder(tokenizer)) if isinstance(one, LogLikelihood)]
    of_first = requests[: len(requests) // 2]
    words = task._cells[0].needle.words
    assert [tokenizer.decode(one.continuation) for one in of_first[:3]] == [f" {word}" for word in words]
    for number, one in enumerate(of_first[:3]):
        assert tokenizer.decode(one.context[1:]).endswith("are" + "".join(f" {word}" for word in words[:number]))
    others = [tokenizer.decode(one.continuation) for one in of_first[3:]]
    assert len(set(others)) == 4
    assert " " + " ".join(words) not in others
    assert all(len(other.split()) == 3 for other in others)
    assert all(np.array_equal(one.context, of_first[0].context) for one in of_first[3:])


def test_needles_are_decided_by_the_seed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = "lengths = [300, 500]\ndepths = 3\nsamples = 2\n"
    first, again, other = (
        make_task(tmp_path, f"{text}seed = {seed}\n").requests(Encoder(tokenizer)) for seed in (1, 1, 2)
    )
    assert digest(first) == digest(again) != digest(other)
    task = make_task(tmp_path, text)
    task.requests(Encoder(tokenizer))
    assert len({cell.needle.text for cell in task._cells}) == 12


def test_a_short_text_is_begun_again(tmp_path: Path, tokenizer: Tokenizer) -> None:
    hay = "One day went by. 字 then?\n"
    settings = "lengths = [300]\ndepths = 2\nanswer_words = 2\ndistractors = 1\n"
    task = make_task(tmp_path, settings, hay=hay)
    text = tokenizer.decode(prompts(task.requests(Encoder(tokenizer)))[0][1:])
    assert text.count("One day went by. 字 then?\n\nOne") > 3
    assert task._details["haystack"]["begun"] > 3


def run_tokens(requests: Sequence[Request]) -> int:
    """Tokens of prefixes that are run once, and of what is behind them."""
    asked = [request for request in requests if isinstance(request, LogLikelihood)]
    documents = [ScoredDocument(np.concatenate([one.context, one.continuation]), len(one.context)) for one in asked]

    def total(node: TreeNode) -> int:
        return len(node.inputs) + sum(map(total, node.children))

    return sum(map(total, forest(documents, order(documents), least_shared=16)))


def test_at_35_depths_little_more_than_half_of_the_tokens_are_run(tmp_path: Path, tokenizer: Tokenizer) -> None:
    task = make_task(tmp_path, "lengths = [12000]\ndistractors = 3\n")
    found = run_tokens(task.requests(Encoder(tokenizer)))
    assert 0.5 < found / task._details["prompt_tokens"] < 0.55


def test_needles_at_absolute_places_are_run_once_for_all_lengths(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lengths = list(range(200, 3501, 100))
    text = f'lengths = {lengths}\ndepths = 35\ndistractors = 1\nanswer_words = 1\nplacement = "absolute"\n'
    task = make_task(tmp_path, text)
    requests = task.requests(Encoder(tokenizer))
    assert len(task._cells) < 35 * len(lengths)
    assert run_tokens(requests) <= 0.1 * task._details["prompt_tokens"]
    # Where a needle stands does not depend on the length, nor does it.
    of_depth = {(cell.position, cell.needle.text) for cell in task._cells if cell.depth == 7}
    assert len(of_depth) == 1
    scores = task.score([Likelihood(log_probability=-1.0, is_greedy=True) for _ in requests])
    heatmap = np.array(scores.details["heatmap"]["exact"], dtype=float)
    assert scores.scores["accuracy"].value == 1
    # All lengths that the needle fits in have it.
    missing, ((position, _),) = np.isnan(heatmap[7]), of_depth
    assert np.flatnonzero(missing).tolist() == list(range(missing.sum()))
    assert lengths[missing.sum() - 1] - 200 < position < lengths[missing.sum()] - 50


def answered(task: Needles, tokenizer: Tokenizer, right: Callable[[Any], list[bool]]) -> list[Answer]:
    """Answers as of a model that finds those words of a cell's value that ``right`` says."""
    task.requests(Encoder(tokenizer))
    answers: list[Answer] = []
    for cell in task._cells:
        answers += [Likelihood(log_probability=-float(not one), is_greedy=one) for one in right(cell)]
        answers += [Likelihood(log_probability=-0.5 - number, is_greedy=False) for number in range(2)]
    return answers


def test_scores_by_hand(tmp_path: Path, tokenizer: Tokenizer) -> None:
    task = make_task(
        tmp_path,
        "lengths = [300, 400]\ndepths = 3\nanswer_words = 2\ndistractors = 2\ndepth_ratio = 2.0\nlength_ratio = 3.0\n",
    )
    # At 300 all but half of the middle one; at 400 the deepest only.
    table = {(0, 0): [True] * 2, (1, 0): [True, False], (2, 0): [True] * 2, (2, 1): [True] * 2}
    answers = answered(task, tokenizer, lambda cell: table.get((cell.depth, cell.length), [False] * 2))
    scores = task.score(answers)
    values = {name: score.value for name, score in scores.scores.items()}
    assert values["accuracy"] == values["word_recall"] == pytest.approx(3.5 / 6)
    assert values["exact"] == pytest.approx(3 / 6)
    assert values["weighted_accuracy"] == pytest.approx((1 + 0.5 * 2 + 4 + 12) / (7 + 21))
    assert values["niah_score"] == pytest.approx((0.5 * (1 + 0.5 * 2 + 4) + 2**-0.5 * 12) / 28)
    # A wrong word costs a nat: then the first distractor is better, and with two of them the second too.
    assert scores.details["heatmap"]["rank"] == [[1, 3], [2, 3], [1, 1]]
    assert values["first"] == pytest.approx(3 / 6)
    assert [one["accuracy"] for one in scores.details["by_length"]] == pytest.approx([2.5 / 3, 1 / 3])
    assert [one["accuracy_up_to"] for one in scores.details["by_length"]] == pytest.approx([2.5 / 3, 3.5 / 6])
    assert values.keys() == task.definitions().keys()
    json.dumps(scores.details, allow_nan=False)
    graded = make_task(tmp_path, 'lengths = [300, 400]\ndepths = 3\nanswer_words = 2\ndistractors = 2\ngrade = "exact"')
    answered(graded, tokenizer, lambda cell: [False] * 2)
    assert graded.score(answers).scores["accuracy"].value == pytest.approx(3 / 6)


def test_texts_that_are_generated(tmp_path: Path, tokenizer: Tokenizer) -> None:
    task = make_task(tmp_path, "lengths = [300]\ndepths = 3\nanswer_words = 2\ndistractors = 2\ngenerate = true\n")
    requests = task.requests(Encoder(tokenizer))
    asked = [request for request in requests if isinstance(request, GenerateUntil)]
    assert len(asked) == 3
    assert all(len(one.context) + one.max_tokens <= 300 for one in asked)
    words = [cell.needle.words for cell in task._cells]
    texts = [f"{' '.join(words[0])}.", f"well, {words[1][1]}, {words[1][0]}", "a lamp"]
    answers: list[Answer] = []
    for text in texts:
        answers += [Likelihood(log_probability=-1.0, is_greedy=False)] * 4
        answers.append(Generation(text=text, num_tokens=5))
    heatmap = task.score(answers).details["heatmap"]
    assert heatmap["exact"] == [[1], [0], [0]]
    assert heatmap["word_recall"] == [[1], [1], [0]]


def test_a_limit_is_of_the_depths(tmp_path: Path, tokenizer: Tokenizer) -> None:
    task = make_task(tmp_path, "lengths = [300]\nlimit = 4\n")
    task.requests(Encoder(tokenizer))
    assert len(task._cells) == 4


def test_presets_have_the_lengths_and_depths_of_the_paper(tmp_path: Path) -> None:
    (tmp_path / "haystack").mkdir()
    (tmp_path / "haystack" / "essay.txt").write_text(TEXT, encoding="utf-8")
    easy, standard = find_tasks(["niah-easy", "niah-standard"], tmp_path)
    assert (easy.settings.mode, standard.settings.mode) == ("easy", "standard")
    assert (len(easy.settings.lengths), easy.settings.lengths[0], easy.settings.lengths[-1]) == (35, 1000, 16000)
    assert easy.settings.depths == 35
    with pytest.raises(UserError, match=r"haystack/\*\.txt"):
        find_tasks(["niah-easy"], tmp_path / "haystack")


BAD = {
    "lengths = [600, 300]": "use ascending lengths",
    "lengths = []": "lengths",
    'mode = "hard"': "mode",
    'answer = " It is {value}."': "must contain {key} and then {value}",
    'answer = " {value} of {key}."': "must contain {key} and then {value}",
    'keys = ["New York"]': "keys: use single words",
    'words = ["a", "a", "b"]': "words: use single words, each once",
    'words = ["a", "b", "c", "d"]': "4 words are too few",
    "depth_ratio = 0.5": "depth_ratio",
    "success = 1.5": "success",
    "sample = 2": "did you mean samples?",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_task_files(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError) as caught:
        make_task(tmp_path, text)
    assert BAD[text] in str(caught.value)
    assert "needles.toml" in str(caught.value)


def test_lengths_that_hold_no_needle(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"lengths has 40, but needle, question and answer alone take \d+ tokens"):
        make_task(tmp_path, "lengths = [40, 300]\n").requests(Encoder(tokenizer))


# A model that knows nothing, whose ranks are anything.
ASKED = 'lengths = [250, 400]\ndepths = 3\nsamples = 2\nanswer_words = 2\ndistractors = 5\ngrade = "first"\n'
COUNTED = 'lengths = [1800]\nanswer_words = 1\ndistractors = 1\nanswer = " {key}: {value}."\nquestion = "\\n?"\n'


def evaluate(rank: int, world_size: int, init_method: str, folder: Path) -> dict[str, Any]:
    tnl.save(folder / "run", 0, 1, init_method)
    tasks = ",".join(str(folder / f"{name}.toml") for name in ("asked", "counted"))
    assert main(["evaluate", str(folder / "run"), "--tasks", tasks, "--json"]) == 0
    results = folder / "run" / "evaluation" / f"step-{tnl.STEP:08d}"
    found = {name: json.loads((results / f"{name}.json").read_text(encoding="utf-8")) for name in ("asked", "counted")}
    found["picture"] = (results / "asked.png").read_bytes()
    with load_model(folder / "run", device="cpu") as loaded:
        (task,) = find_tasks([str(folder / "asked.toml")], folder)
        requests = task.requests(Encoder(loaded.tokenizer))
        # Each by itself: two words, five distractors.
        values = [log_probability(loaded.model, request) for request in requests]
        cells = np.array(values).reshape(-1, 7)
        found["rank"] = 1 + (cells[:, 2:] >= cells[:, :2].sum(axis=1, keepdims=True)).sum(axis=1)
    return found


def log_probability(model: Any, request: Any) -> float:
    ids = torch.from_numpy(np.concatenate([request.context, request.continuation]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(ids[:, :-1], torch.arange(ids.size(1) - 1)[None])[0, :, :420].double()
    of_labels = torch.log_softmax(logits, dim=-1).gather(-1, ids[0, 1:, None])[:, 0]
    return float(of_labels[len(request.context) - 1 :].sum())


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_model_is_asked(tmp_path: Path, run_ranks: RunRanks) -> None:
    tokenizer = train_sentencepiece([tnl.TEXT] * 20, vocab_size=420)
    tnl.write_store(tmp_path / "store", tokenizer)
    (tmp_path / "run.toml").write_text(tnl.CONFIG.format(root=tnl.ROOT, store=tmp_path / "store"), encoding="utf-8")
    run = RunDirectory(tmp_path / "run")
    run.create_or_open(load(tmp_path / "run.toml"))
    copy_tokenizer(tmp_path / "store" / "tokenizer", run.tokenizer, sha256=tokenizer.sha256)
    (tmp_path / "hay.txt").write_text("the end of the text. the start of the next. " * 9, encoding="utf-8")
    for name, text in {"asked": ASKED, "counted": COUNTED}.items():
        (tmp_path / f"{name}.toml").write_text(TASK + text, encoding="utf-8")
    (found,) = run_ranks(evaluate, 1, tmp_path, timeout_s=500)
    ranks = found["rank"].reshape(2, 3, 2).mean(axis=-1).T
    assert np.array(found["asked"]["details"]["heatmap"]["rank"]) == pytest.approx(ranks)
    assert len(np.unique(found["rank"])) > 2
    assert found["asked"]["scores"]["accuracy"]["value"] == pytest.approx((found["rank"] == 1).mean())
    assert found["picture"].startswith(b"\x89PNG")
    assert list(found["asked"]["data"]) == ["hay.txt"]
    counted = found["counted"]
    # Fillers included, words and distractors too.
    assert counted["took"]["run_tokens"] <= 0.55 * counted["details"]["prompt_tokens"]
