"""lm-eval's requests as ours and back, names of tasks out of files, CSR's columns: all that needs no lm-eval."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightscale.data_pipeline.tokenizers import Tokenizer, train_sentencepiece
from lightscale.errors import UserError
from lightscale.evaluation.harness import task
from lightscale.evaluation.harness.csr import BESIDE, COLUMNS, Csr, csr_scores, csr_table
from lightscale.evaluation.harness.local_data import LOCAL_TASKS, local_file
from lightscale.evaluation.harness.tasks import scores_of
from lightscale.evaluation.harness.translation import HarnessRequest, answered, generation_arguments, request_of
from lightscale.evaluation.harness_names import INSTALL, nearest, task_names
from lightscale.evaluation.inference.requests import (
    Encoder,
    GenerateUntil,
    Generation,
    Likelihood,
    LogLikelihood,
    RollingLogLikelihood,
    TokenLikelihoods,
)
from lightscale.evaluation.registry import find_tasks
from lightscale.evaluation.task import Score

TEXT = "Question: what is the end of the text? Answer: the start of the next"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_sentencepiece([TEXT] * 20, vocab_size=300)


def test_requests(tokenizer: Tokenizer) -> None:
    encoder = Encoder(tokenizer)
    likelihood = request_of("loglikelihood", ("what is ", "the end"), encoder)
    assert isinstance(likelihood, LogLikelihood)
    # The space goes to the continuation, and a document begins.
    assert tokenizer.decode(likelihood.continuation.tolist()) == " the end"
    assert likelihood.context.tolist() == [tokenizer.eot_id, *tokenizer.encode("what is")]
    empty = request_of("loglikelihood", ("", "the end"), encoder)
    assert isinstance(empty, LogLikelihood)
    assert empty.context.tolist() == [tokenizer.eot_id]
    rolling = request_of("loglikelihood_rolling", (TEXT,), encoder, window=8)
    assert isinstance(rolling, RollingLogLikelihood)
    assert (rolling.window, rolling.stride) == (8, None)
    assert tokenizer.decode(rolling.ids[1:].tolist()) == TEXT
    generated = request_of("generate_until", ("Answer:", {"until": "\n", "max_gen_toks": 7}), encoder)
    assert isinstance(generated, GenerateUntil)
    assert (generated.until, generated.max_tokens) == (("\n",), 7)


def test_answers() -> None:
    assert answered(Likelihood(log_probability=-2.5, is_greedy=True)) == (-2.5, True)
    assert answered(TokenLikelihoods(log_probability=np.array([-1.0, -0.5]))) == -1.5
    assert answered(Generation(text="yes", num_tokens=1)) == "yes"


def test_generation_arguments() -> None:
    assert generation_arguments({}) == ((), 256)
    assert generation_arguments({"until": ["a", "b"], "max_new_tokens": 3, "do_sample": False, "temperature": 0.7}) == (
        ("a", "b"),
        3,
    )
    assert generation_arguments({"max_gen_toks": 5, "max_tokens": 9, "temperature": 0.0}) == ((), 5)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"do_sample": True}, "at random"),
        ({"temperature": 0.7}, "at random"),
        ({"num_beams": 4}, "generates with num_beams"),
    ],
)
def test_what_is_not_greedy_is_refused(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generation_arguments(wanted)


def test_pictures_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="images or audio"):
        request_of("loglikelihood", ("a", "b", {"visual": []}), Encoder(tokenizer))


def test_requests_that_differ_have_other_keys() -> None:
    asked = [
        HarnessRequest("loglikelihood", ("a", "b")),
        HarnessRequest("loglikelihood", ("ab", "")),
        HarnessRequest("loglikelihood_rolling", ("a", "b")),
        HarnessRequest("generate_until", ("a", {"until": ["b"]})),
    ]
    assert len({one.key for one in asked}) == 4
    assert HarnessRequest("generate_until", ("a", {"until": ["b"]})).key == asked[3].key


DEFINITIONS = {
    "one.yaml": "task: one\ndataset_path: nowhere\ntag:\n  - first\n  - 'second'\n",
    "quoted/two.yaml": '"task": "two"\n"tag": third\n',
    "group.yaml": "group: all\ntask:\n  - one\n  - task: two\n    num_fewshot: 3\n",
    "quoted/_included_yaml": "tag: fourth\n",
    "code.py": "task: none\n",
    "deep/er/nothing.yaml": "task: null\ndoc_to_text: 'task: nine'\n",
}


def write_definitions(folder: Path) -> None:
    for name, text in DEFINITIONS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def test_names_are_read_from_definitions(tmp_path: Path) -> None:
    write_definitions(tmp_path)
    assert task_names(tmp_path) == {"one", "two", "all", "first", "second", "third", "fourth"}


def test_the_nearest_name() -> None:
    assert nearest("hellaswga", ["piqa", "hellaswag"]) == "; did you mean hellaswag?"
    assert nearest("zzz", ["piqa"]) == ""


def test_numbers_out_of_lm_evals_results() -> None:
    results = {
        "results": {"one": {"alias": "one", "acc,none": 0.5, "acc_stderr,none": 0.1, "f1,strict": 0.25,
                            "f1_stderr,strict": "N/A", "sample_len": 4}},
        "groups": {"all": {"alias": "all", "acc,none": 0.75, "acc_stderr,none": "N/A"}},
    }  # fmt: skip
    assert list(scores_of(results)) == [
        ("all", "acc", 0.75, None),
        ("one", "acc", 0.5, 0.1),
        ("one", "f1 (strict)", 0.25, None),
    ]


def found_columns() -> dict[tuple[str, str], Score]:
    """All that CSR takes, and beside it what must not count."""
    values = [0.6, 0.7, 0.4, 0.5, 0.55, 0.25, 0.35]
    found = {key: Score(value=value, standard_error=0.01) for key, value in zip(COLUMNS.values(), values, strict=True)}
    others = {("hellaswag", "acc"): 0.9, ("arc_challenge", "acc"): 0.9, ("openbookqa", "acc"): 0.9}
    found |= {key: Score(value=value, standard_error=0.01) for key, value in others.items()}
    return found | {("social_iqa", "acc"): Score(value=0.99, standard_error=0.01)}


def test_csr_is_the_plain_mean_of_seven_columns() -> None:
    scores = csr_scores(found_columns())
    assert list(scores) == ["CSR", "BoolQ", "PIQA", "HS", "WG", "ARC-e", "ARC-c", "OBQA", "SIQA"]
    assert scores["CSR"].value == pytest.approx(3.35 / 7)
    assert scores["CSR"].standard_error == pytest.approx(0.01 / math.sqrt(7))
    assert (scores["HS"].value, scores["ARC-c"].value, scores["OBQA"].value) == (0.4, 0.25, 0.35)
    assert scores["SIQA"].value == 0.99


def test_the_table_has_a_row_for_each_run() -> None:
    scores = {name: {"value": score.value} for name, score in csr_scores(found_columns()).items()}
    kind = f"{Csr.__module__}:{Csr.__qualname__}"
    results = [{"kind": kind, "run": f"runs/{name}", "step": 7, "scores": scores} for name in ("a", "b")]
    table = csr_table([*results, {"kind": "other:Task"}])
    assert table is not None
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["a@7", "b@7"]
    assert [cell[0] for cell in cells[1:]] == ["60.0", "70.0", "40.0", "50.0", "55.0", "25.0", "35.0", "47.9", "99.0"]
    assert csr_table([{"kind": "other:Task"}]) is None


def test_every_column_has_a_local_file(tmp_path: Path) -> None:
    assert {name for name, _ in (COLUMNS | BESIDE).values()} == LOCAL_TASKS.keys()
    assert local_file("piqa", tmp_path) is None
    (tmp_path / "csr").mkdir()
    (tmp_path / "csr" / "piqa.jsonl").touch()
    assert local_file("piqa", tmp_path) == tmp_path / "csr" / "piqa.jsonl"
    assert local_file("mmlu", tmp_path) is None
    config = LOCAL_TASKS["arc_easy"].config(tmp_path, tmp_path / "tasks")
    assert config["dataset_kwargs"] == {"data_files": {"test": str(tmp_path / "csr" / "arc_easy.jsonl")}}
    assert (config["test_split"], config["validation_split"], config["training_split"]) == ("test", None, None)
    # The whole path: lm-eval looks for any other beside the definition, which is written to a folder of its own.
    assert config["include"] == str(tmp_path / "tasks" / "arc" / "arc_easy.yaml")


@pytest.fixture
def some_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if an lm-eval that has the tasks of ``DEFINITIONS`` and CSR's were installed."""
    write_definitions(tmp_path / "tasks")
    (tmp_path / "tasks" / "csr.yaml").write_text("tag:\n" + "".join(f"- {name}\n" for name in LOCAL_TASKS))
    for module in ("lightscale.evaluation.registry", "lightscale.evaluation.harness_names"):
        monkeypatch.setattr(f"{module}.tasks_folder", lambda: tmp_path / "tasks")
    monkeypatch.setattr(task, "installed_version", lambda: "0.4.13")
    return tmp_path


def test_a_name_of_lm_eval_is_a_task(some_tasks: Path) -> None:
    (found,) = find_tasks(["first"], some_tasks, limit=3)
    assert isinstance(found, task.HarnessTask)
    assert (found.name, found.settings.limit) == ("first", 3)
    (some_tasks / "mine.toml").write_text('kind = "lm-eval"\ntasks = ["one", "tow"]\nlm_eval = "0.4.13"\n')
    (found,) = find_tasks([str(some_tasks / "mine.toml")], some_tasks)
    with pytest.raises(UserError, match=r"mine: lm-eval 0\.4\.13 has no task 'tow'; did you mean two\?"):
        found.check(None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"secnd: unknown task; did you mean second\?"):
        find_tasks(["secnd"], some_tasks)


def test_another_version_is_refused(some_tasks: Path) -> None:
    (some_tasks / "mine.toml").write_text('kind = "lm-eval"\ntasks = ["one"]\nlm_eval = "0.3"\n')
    (found,) = find_tasks([str(some_tasks / "mine.toml")], some_tasks)
    with pytest.raises(UserError, match=r"lm_eval = '0\.3', but 0\.4\.13 is installed"):
        found.check(None)  # type: ignore[arg-type]


def test_a_missing_file_is_named_with_what_makes_it(some_tasks: Path) -> None:
    (some_tasks / "mine.toml").write_text('kind = "csr"\nlm_eval = "0.4.13"\n')
    (found,) = find_tasks([str(some_tasks / "mine.toml")], some_tasks)
    with pytest.raises(UserError, match=r"csr/boolq\.jsonl is missing.*tools/texts/benchmark_data\.py"):
        found.check(None)  # type: ignore[arg-type]


def test_without_lm_eval_it_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("lightscale.evaluation.registry", "lightscale.evaluation.harness_names"):
        monkeypatch.setattr(f"{module}.tasks_folder", lambda: None)
    (found,) = find_tasks(["csr"], tmp_path)
    with pytest.raises(UserError, match=r"pip install 'lightscale\[eval\]'"):
        found.check(None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"unknown task.*pip install 'lightscale\[eval\]'"):
        find_tasks(["hellaswag"], tmp_path)
    assert INSTALL == "pip install 'lightscale[eval]'"
