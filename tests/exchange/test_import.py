"""``lightscale import``: what was exported comes back bit by bit, and is a run like any other."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lightscale
from lightscale.cli import main
from lightscale.config.files import load
from lightscale.data_pipeline.tokenizers import AsciiTokenizer, load_tokenizer
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import choose_run
from lightscale.exchange.export import export
from lightscale.exchange.files.weights import shape_of
from lightscale.exchange.imported import import_model
from lightscale.training.checkpoints.reader import verify

safetensors = pytest.importorskip("safetensors.torch")

NAMES = ("tnl", "hgrn2", "cosformer2", "lightnet", "llama", "grouped", "hybrid", "decay", "printed", "pairs")


def stored(run: Path) -> dict[str, torch.Tensor]:
    """The weights in the one file of a run's checkpoint; halves of a linear unit joined, padding rows cut."""
    found: dict[str, torch.Tensor] = {}
    tensors = safetensors.load_file(next(run.glob("checkpoints/*/*.safetensors")))
    for name in sorted(tensors, key=lambda name: (name.rpartition("@")[0], int(name.rpartition("@")[2].split(",")[0]))):
        key = name.rpartition("@")[0]
        found[key] = torch.cat([found[key], tensors[name]]) if key in found else tensors[name]
    for key in found.keys() & {"model.embedding.word_embeddings.weight", "model.output_layer.weight"}:
        found[key] = found[key][:264]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_what_was_exported_comes_back_bit_by_bit(saved_runs: Path, tmp_path: Path, name: str) -> None:
    export(choose_run(saved_runs / name), tmp_path / "to", dtype="fp32", shard_bytes=60_000)
    checkpoint = import_model(tmp_path / "to", tmp_path / "back")
    verify(checkpoint, 0)
    before, after = stored(saved_runs / name), stored(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(before[key].equal(after[key]) for key in before)
    assert load(tmp_path / "back" / "config.toml") == load(saved_runs / name / "config.toml")
    assert load_tokenizer(tmp_path / "back").sha256 == load_tokenizer(saved_runs / name).sha256
    model, run = lightscale.load(tmp_path / "back"), lightscale.load(saved_runs / name)
    assert model.logits("the other").equal(run.logits("the other"))


WAYS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "repetition_penalty": 1.2, "seed": 3}]


def evaluated(rank: int, world_size: int, init_method: str, run: str) -> list[str]:
    """What the training model generates in each way."""
    from lightscale.evaluation.inference.generate import generate
    from lightscale.evaluation.inference.prompts import Sampling
    from lightscale.evaluation.inference.written_text import encode_prompt
    from lightscale.evaluation.model import load_model

    with load_model(run) as loaded:
        prompt = encode_prompt(loaded.tokenizer, "the")
        texts = [
            generate(loaded.model, loaded.tokenizer, prompt, max_tokens=8, sampling=Sampling(**way)) for way in WAYS
        ]
        return [loaded.tokenizer.decode(list(ids)) for ids in texts]


@pytest.mark.parametrize("name", ["hybrid", "printed"])
def test_without_the_runs_own_files_the_model_is_the_same(
    saved_runs: Path, tmp_path: Path, run_ranks: Callable[..., list[Any]], name: str
) -> None:
    """As transformers leaves a directory, in half precision; the training model loads it as any run."""
    export(choose_run(saved_runs / name), tmp_path / "to")
    (tmp_path / "to" / "run.toml").unlink()
    shutil.rmtree(tmp_path / "to" / "tokenizer")
    (tmp_path / "to" / "XXH128SUMS").unlink()
    import_model(tmp_path / "to", tmp_path / "back")
    model, half = lightscale.load(tmp_path / "back"), lightscale.load(tmp_path / "to", dtype=torch.float32)
    assert model.logits("the other").equal(half.logits("the other"))
    config = load(tmp_path / "back" / "config.toml")
    assert (config.model.vocab_size, config.data.sequence_length) == (264, 96)
    own = load(saved_runs / name / "config.toml").model
    assert shape_of(config.model, vocab_size=264) == shape_of(own, vocab_size=264)
    expected = [model.generate("the", tokens=8, **way) for way in WAYS]
    assert run_ranks(evaluated, 1, str(tmp_path / "back"))[0] == expected


def test_the_command(saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(choose_run(saved_runs / "llama"), tmp_path / "to", dtype="fp32")
    assert main(["import", str(tmp_path / "to"), "--run", str(tmp_path / "back")]) == 0
    assert f'train.init_from = "{tmp_path / "back"}@0"' in capsys.readouterr().err
    assert main(["import", str(tmp_path / "to"), "--run", str(tmp_path / "back")]) == 78
    assert "it exists; use a new run" in capsys.readouterr().err
    assert main(["import", str(tmp_path), "--run", str(tmp_path / "other")]) == 78
    assert "no model; expected" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_the_tokenizer_of_another_model_is_refused(saved_runs: Path, tmp_path: Path) -> None:
    export(choose_run(saved_runs / "tnl"), tmp_path / "to", dtype="fp32")
    shutil.rmtree(tmp_path / "to" / "tokenizer")
    (tmp_path / "to" / "tokenizer").mkdir()
    AsciiTokenizer().save(tmp_path / "to" / "tokenizer")
    with pytest.raises(UserError, match="has 128 ids, and the model an embedding of 264; they belong to different"):
        import_model(tmp_path / "to", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_configuration_of_another_model_is_refused(saved_runs: Path, tmp_path: Path) -> None:
    export(choose_run(saved_runs / "tnl"), tmp_path / "to", dtype="fp32")
    shutil.copy(saved_runs / "hgrn2" / "config.toml", tmp_path / "to" / "run.toml")
    (tmp_path / "to" / "XXH128SUMS").unlink()
    with pytest.raises(UserError, match=r"run\.toml: its model differs"):
        import_model(tmp_path / "to", tmp_path / "back")
    config = tmp_path / "to" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "gpt_neox"}))
    with pytest.raises(UserError, match=r"'gpt_neox'; use lightscale, vit, llama, mistral, .* or olmo_hybrid"):
        import_model(tmp_path / "to", tmp_path / "back")
    assert not (tmp_path / "back").exists()
