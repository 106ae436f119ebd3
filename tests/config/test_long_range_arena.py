"""Every model that Long Range Arena compares with every of its tasks: parts that compose, as printed where it is."""

import itertools
from pathlib import Path

import pytest

from lightscale.config.files import load
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.preparation.corpus import load_corpus
from lightscale.models.accounting import parameter_terms
from lightscale.models.registry import check_model

MODELS = (
    *("lion-lit", "lion-retnet", "lion-s", "lion-s-vector"),
    *("lightnet-bidirectional", "hgrn2-bidirectional", "tnl-bidirectional", "llama-bidirectional"),
)
TASKS = {"listops": 2048, "text": 2048, "retrieval": 2 * 4000, "image": 1024, "pathfinder": 1024, "path-x": 16384}
"""With their input lengths (LION, Table 6); of retrieval, of two documents."""


def composed(folder: Path, model: str, task: str) -> RunConfig:
    path = folder / f"{model}-{task}.toml"
    path.write_text(f'extends = ["arch/{model}", "size/lra-{task}", "recipe/lra-{task}"]\n')
    return load(path)


@pytest.mark.parametrize(("model", "task"), list(itertools.product(MODELS, TASKS)))
def test_every_model_has_every_task(tmp_path: Path, model: str, task: str) -> None:
    config = composed(tmp_path, model, task)
    check_model(config.model, config.parallel)
    assert {config.model.direction(layer) for layer in range(config.model.num_layers)} == {"bidirectional"}
    # Room for the end-of-text token; a little more divides by sequence ranks.
    assert 0 <= config.data.sequence_length - TASKS[task] <= 16
    assert (config.optimizer.lr, config.optimizer.schedule, config.optimizer.name) == (5e-4, "cosine", "adamw")
    # A model of S5's dimensions, without the table of tokens.
    width, layers = config.model.hidden_size, config.model.num_layers
    assert 8 * width**2 * layers < sum(parameter_terms(config.model).values()) < 13 * width**2 * layers + 600 * width


@pytest.mark.parametrize("task", TASKS)
def test_the_shipped_runs_are_the_vector_form_of_lion(tmp_path: Path, task: str) -> None:
    assert load(f"lra-{task}") == composed(tmp_path, "lion-s-vector", task)


def test_the_corpus_of_texts_has_the_usual_folders(root: Path) -> None:
    corpus = load_corpus(root / "lightscale/configs/corpus/lra-text.toml")
    assert {name: source.label_field for name, source in corpus.sources.items()} == {
        "imdb": "folder",
        "imdb-test": "folder",
    }
    assert corpus.tokenizer == "bytes"


def test_rows_of_retrieval_hold_the_longest_pair(root: Path) -> None:
    corpus = load_corpus(root / "lightscale/configs/corpus/lra-retrieval.toml")
    assert corpus.tokenizer == "bytes"
    assert list(corpus.sources) == ["aan", "aan-eval", "aan-test"]
    config = load("lra-retrieval")
    assert config.model.head is not None and config.model.head.pairs
    for source in corpus.sources.values():
        assert source.columns == ["label", "id1", "id2", "text1", "text2"]
        assert (source.text_fields, source.label_field) == (("text1", "text2"), "label")
        assert source.max_tokens == 4000 + 1
        assert 2 * source.max_tokens <= config.data.sequence_length
