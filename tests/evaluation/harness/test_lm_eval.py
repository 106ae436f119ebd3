"""With lm-eval (`make test-eval`): its tasks by us, and our models in it beside its own `hf` class on the export."""

import contextlib
import io
import json
import os
import random
import runpy
import shutil
import string
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightscale.cli import main
from lightscale.config.files import load
from lightscale.data_pipeline.store.token_store import StoreWriter
from lightscale.data_pipeline.tokenizers import copy_tokenizer, train_sentencepiece
from lightscale.evaluation.harness.local_data import LOCAL_TASKS
from lightscale.evaluation.harness.tasks import Tasks, seeds
from lightscale.evaluation.harness_names import task_names, tasks_folder
from lightscale.evaluation.tasks.wikitext import WikiText, detokenized
from lightscale.runs.run_directory import RunDirectory

pytest.importorskip("lm_eval", reason="lm-eval is not installed; `make test-eval` installs it and runs this")
pytestmark = pytest.mark.timeout(900)

TESTS = Path(__file__).parents[2]
tnl = SimpleNamespace(**runpy.run_path(str(TESTS / "evaluation" / "generation" / "test_generate.py")))
ranks = SimpleNamespace(**runpy.run_path(str(TESTS / "helpers" / "rank_commands.py")))
RunRanks = Callable[..., list[Any]]

TEXT = "the start of a text is where it begins and its end is where nothing more follows"
WORDS = TEXT.split()
NUM_QUESTIONS = 5


def sentence(draw: random.Random, most: int = 8) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(2, most)))


def questions(draw: random.Random) -> dict[str, list[dict[str, Any]]]:
    """In the fields of each data set."""

    def choices(key: str) -> dict[str, Any]:
        texts = [sentence(draw) for _ in range(4)]
        return {
            "id": "x",
            key: sentence(draw),
            "choices": {"text": texts, "label": list("ABCD")},
            "answerKey": draw.choice("ABCD"),
        }

    def text() -> str:
        return sentence(draw)

    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "boolq": lambda: {"question": text(), "passage": text(), "idx": 0, "label": draw.randint(0, 1)},
        "piqa": lambda: {"goal": text(), "sol1": text(), "sol2": text(), "label": draw.randint(0, 1)},
        "social_iqa": lambda: {
            **{key: text() for key in ("context", "question", "answerA", "answerB", "answerC")},
            "label": draw.choice("123"),
        },
        "hellaswag": lambda: {
            **{key: text() for key in ("activity_label", "ctx_a", "ctx_b")},
            "endings": [text() for _ in range(4)],
            "label": draw.choice("0123"),
        },
        "winogrande": lambda: {
            "sentence": f"{text()} _ {text()}",
            "option1": "text",
            "option2": "start",
            "answer": draw.choice("12"),
        },
        "arc_easy": lambda: choices("question"),
        "arc_challenge": lambda: choices("question"),
        "openbookqa": lambda: choices("question_stem"),
    }
    return {name: [make() for _ in range(NUM_QUESTIONS)] for name, make in makers.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a TNL and a LLaMA, and five questions of each task."""
    folder = tmp_path_factory.mktemp("harness")
    data = folder / "data" / "csr"
    data.mkdir(parents=True)
    for name, found in questions(random.Random(0)).items():
        (data / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found), encoding="utf-8")
    tokenizer = train_sentencepiece([tnl.TEXT, TEXT, "Question: yes\nAnswer: no"] * 20, vocab_size=420)
    with StoreWriter(folder / "store", tokenizer) as store:
        # One sequence of training at least.
        store.source("text").append(tokenizer.encode(tnl.TEXT * 6), num_bytes=len(tnl.TEXT.encode()) * 6)
        store.finish({})
    for name in ("tnl", "llama"):
        run = RunDirectory(folder / name)
        text = tnl.CONFIG.format(root=tnl.ROOT, store=folder / "store").replace("arch/tnl", f"arch/{name}")
        (folder / "run.toml").write_text(text, encoding="utf-8")
        overrides = ["data.sequence_length=256", "train.precision=fp32", "train.device=cpu"]
        run.create_or_open(load(folder / "run.toml", overrides))
        copy_tokenizer(folder / "store" / "tokenizer", run.tokenizer, sha256=tokenizer.sha256)
    return folder


def answers(model: Any, kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    instances = [Instance(kind, {}, one, 0) for one in arguments]  # type: ignore[arg-type]
    return list(getattr(model, kind)(instances, disable_tqdm=True))


ROLLING = [("the start of a text is where it begins and nothing more follows",), ("is where the end follows " * 90,)]
GENERATED = [
    ("the start of", {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}),
]


def ask_all(rank: int, world_size: int, init_method: str, folder: Path) -> dict[str, Any]:
    """Everything that needs a model, in one process without a network."""
    os.environ.update(HF_HOME=str(folder / "hf"), HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    os.chdir(folder)
    for name in ("tnl", "llama"):
        tnl.save(folder / name, 0, 1, f"{init_method}-{name}")
    shutil.copytree(folder / "llama", folder / "two" / "llama")
    shutil.copytree(folder / "llama", folder / "tensor" / "llama")
    found: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["evaluate", "llama", "tnl", "--tasks", "csr,piqa", "--data", "data"]) == 0
    found["printed"] = printed.getvalue()
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["export", "llama", "--to", "exported", "--dtype", "fp32"]) == 0
    found["csr"], found["piqa"] = (read(folder / "llama", name) for name in ("csr", "piqa"))

    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    from lightscale.evaluation.harness.model import LightscaleLM
    from lightscale.evaluation.harness.tasks import Tasks

    tasks = Tasks(list(LOCAL_TASKS), Path("data"))
    arguments = [one.arguments for one in tasks.asked(None)]
    # The device is what lm-eval's command gives where none is named, on a machine without a GPU too.
    ours = LightscaleLM.create_from_arg_string("run=llama,row_tokens=300", {"batch_size": 1, "device": "cuda:0"})
    # Behind one of ours: transformers must still find all devices where they were.
    theirs = HFLM(pretrained="exported", device="cpu", dtype="float32", batch_size=4)
    for name, model in (("ours", ours), ("theirs", theirs)):
        found[name] = {
            "loglikelihood": answers(model, "loglikelihood", arguments),
            "generated": answers(model, "generate_until", GENERATED),
            "results": simple_evaluate(
                model, tasks=list(tasks._loaded["tasks"].values()), bootstrap_iters=1, log_samples=False
            )["results"],
        }
    # There it begins texts itself: with the tokenizer's token too they would begin twice.
    theirs.add_bos_token = False
    for name, model in (("ours", ours), ("theirs", theirs)):
        found[name]["rolling"] = answers(model, "loglikelihood_rolling", ROLLING)
    tokens = [(("a", "b"), *ours._encode_pair(*one)) for one in arguments]
    found["by tokens"] = ours._loglikelihood_tokens(tokens)
    return found


def read(run: Path, task: str) -> dict[str, Any]:
    path = run / "evaluation" / f"step-{tnl.STEP:08d}" / f"{task}.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def found(folder: Path, run_ranks: RunRanks) -> dict[str, Any]:
    (found,) = run_ranks(ask_all, 1, folder, timeout_s=600)
    return dict(found)


def test_log_likelihoods_are_those_of_the_hf_class(found: dict[str, Any]) -> None:
    ours, theirs = found["ours"]["loglikelihood"], found["theirs"]["loglikelihood"]
    assert len(ours) > 100
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-4)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert [value for value, _ in found["by tokens"]] == pytest.approx([value for value, _ in ours], abs=1e-4)


def test_rolling_log_likelihoods_are_those_of_the_hf_class(found: dict[str, Any]) -> None:
    """Also of a text that is longer than the context, in windows."""
    assert found["ours"]["rolling"] == pytest.approx(found["theirs"]["rolling"], rel=1e-5)


def test_texts_are_those_of_the_hf_class(found: dict[str, Any]) -> None:
    assert found["ours"]["generated"] == found["theirs"]["generated"]


def test_results_are_those_of_the_hf_class(found: dict[str, Any]) -> None:
    assert found["theirs"]["results"].keys() == LOCAL_TASKS.keys()
    for task, theirs in found["theirs"]["results"].items():
        metrics = [name for name in theirs if name.startswith("acc") and "stderr" not in name]
        assert metrics
        for name in metrics:
            assert found["ours"]["results"][task][name] == theirs[name], (task, name)


def test_the_command_finds_what_lm_eval_finds(found: dict[str, Any]) -> None:
    expected = found["ours"]["results"]
    columns = {"PIQA": ("piqa", "acc"), "HS": ("hellaswag", "acc_norm"), "ARC-c": ("arc_challenge", "acc_norm")}
    for column, (task, metric) in columns.items():
        score = found["csr"]["scores"][column]
        assert score["value"] == expected[task][f"{metric},none"]
        assert score["standard_error"] == pytest.approx(expected[task][f"{metric}_stderr,none"])
    assert found["piqa"]["scores"]["acc"]["value"] == expected["piqa"]["acc,none"]
    values = [found["csr"]["scores"][name]["value"] for name in ("BoolQ", "PIQA", "HS", "WG", "ARC-e", "ARC-c", "OBQA")]
    assert found["csr"]["scores"]["CSR"]["value"] == pytest.approx(sum(values) / 7)
    assert found["csr"]["details"]["questions"]["piqa"] == {"original": NUM_QUESTIONS, "effective": NUM_QUESTIONS}
    assert found["csr"]["data"].keys() == {"boolq", "piqa", "social_iqa", "hellaswag", "winogrande", "arc_easy",
                                           "arc_challenge", "openbookqa"}  # fmt: skip


def test_the_table_is_printed(found: dict[str, Any]) -> None:
    rows = [line.split() for line in found["printed"].splitlines()]
    assert ["run", "BoolQ", "PIQA", "HS", "WG", "ARC-e", "ARC-c", "OBQA", "CSR", "SIQA"] in rows
    assert {row[0] for row in rows if len(row) == 10} == {"run", f"llama@{tnl.STEP}", f"tnl@{tnl.STEP}"}


def test_two_ranks_find_the_same(folder: Path, found: dict[str, Any], run_ranks: RunRanks) -> None:
    lines = [
        ["evaluate", "two/llama", "--tasks", "csr", "--data", "data", "--csv"],
        ["evaluate", "tensor/llama", "parallel.tensor=2", "--tasks", "csr", "--data", "data", "--csv"],
    ]
    outcomes = run_ranks(ranks.commands, 2, str(folder), lines, timeout_s=600)
    assert [[code for code, _ in outcome] for outcome in outcomes] == [[0, 0], [0, 0]], outcomes
    for name in ("two", "tensor"):
        other = read(folder / name / "llama", "csr")
        assert other["scores"] == found["csr"]["scores"]
        assert other["identity"] == found["csr"]["identity"]


def test_names_are_those_of_lm_eval() -> None:
    from lm_eval.tasks import TaskManager

    folder = tasks_folder()
    assert folder is not None
    known = set(TaskManager().all_tasks)
    assert len(known) > 1000
    assert known <= task_names(folder)


def test_examples_are_drawn_alike_each_time_and_nothing_else_is(folder: Path) -> None:
    tasks = Tasks(["piqa", "arc_easy"], folder / "data")
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    with seeds():
        random.random()
        np.random.random()
    first = tasks.asked(2)
    assert (random.random(), np.random.random()) == expected
    assert [one.key for one in first] == [one.key for one in tasks.asked(2)]
    assert len(first) == 2 * 2 + 2 * 4


def test_wikitext_is_fed_and_counted_as_in_lm_eval() -> None:
    from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer

    draw = random.Random(0)
    signs = [
        " @-@ ",
        " @,@ ",
        " @.@ ",
        *(f" {sign} " for sign in ":;.!?,'\"()[]{}°N"),
        " 's",
        "s '",
        "= = ",
        "/' 5/",
        "\n",
    ]
    task = WikiText(WikiText.Settings(name="wikitext-2", paths=["a"]), Path())
    for _ in range(3000):
        page = "".join(draw.choices([*signs, " ", *string.ascii_letters[:4]], k=draw.randint(1, 30)))
        doc = {"page": page}
        assert detokenized(page) == wikitext_detokenizer(doc)
        assert task.num_words(page) == process_results(doc, [-1.0])["word_perplexity"][1]
