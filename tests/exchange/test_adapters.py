"""Adapters out of a run: merged, and as PEFT's files beside the exported base; generation reads the same weights."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightscale
from lightscale.evaluation.model import load_model

commands = runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "rank_commands.py"))["commands"]
RunRanks = Callable[..., list[Any]]
pytestmark = pytest.mark.timeout(600)
MODELS = {
    "own": 'mixer = ["tnl", "hgrn2", "kimi-delta", "causal-rn"]\nnorm = "layernorm"\nnum_layers = 4',
    "llama": 'mixer = "llama"\nnorm = "rmsnorm"\nglu_activation = "silu"\nnum_layers = 2',
    # One matrix of transformers' class holds queries, keys and values, another one a gate.
    "qwen": 'mixer = ["gated-delta-net*3", "llama"]\nnorm = "rmsnorm"\nglu_activation = "silu"\nnum_layers = 4\n'
    "zero_centered_norm = true\ntie_word_embeddings = false\n"
    'mixer_options = {llama = {qk_norm = "head", output_gate = true, zero_centered_norm = true}}',
}
RUN = """\
[model]
{model}
vocab_size = 128
hidden_size = 32
num_heads = 4
intermediate_size = 48
[data]
store = "store"
sequence_length = 32
[optimizer]
lr = 2e-2
[train]
steps = 2
global_batch_size = 4
"""
KINDS = {
    "lora": ["adapter.name=lora", "adapter.r=3"],
    # Of some rows of a matrix alone.
    "dora": ["adapter.name=dora", "adapter.r=2", "adapter.target_modules=['*.q', '*.v', '*.mlp.up', '*.down']"],
}
TEXT = "the sum of 3 and 4 is 7."


def made(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[int, str]]:
    lines = [["data", "prepare", "corpus.toml", "--out", "store"]]
    for model in MODELS:
        lines.append(["train", f"{model}.toml", "--run", f"runs/{model}"])
        lines.append(["export", f"runs/{model}", "--to", f"out/{model}", "--dtype", "fp32"])
        for kind, options in KINDS.items():
            run = f"runs/{model}-{kind}"
            lines.append(["train", f"{model}.toml", f"train.init_from=runs/{model}@2", *options, "--run", run])
            how = ["export", run, "--dtype", "fp32", "--to"]
            lines.append([*how, f"out/{model}-{kind}", "--merge"])
            lines.append([*how, f"out/{model}-{kind}-peft", "--adapter", "--base", f"out/{model}"])
    return commands(rank, world_size, init_method, folder, lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_ranks: RunRanks) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    texts = [{"text": f"the sum of {one} and {two} is {one + two}. " * 8} for one in range(9) for two in range(9)]
    (folder / "text.jsonl").write_text("\n".join(map(json.dumps, texts)))
    (folder / "corpus.toml").write_text('tokenizer = "ascii"\n[sources.text]\npaths = ["text.jsonl"]\n')
    for name, model in MODELS.items():
        (folder / f"{name}.toml").write_text(RUN.format(model=model))
    (results,) = run_ranks(made, 1, str(folder), timeout_s=500)
    assert not [one for one in results if one[0]], results
    return folder


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_peft_and_the_merged_model_compute_the_runs_logits(
    folder: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    monkeypatch.chdir(folder)
    run = f"{name}-{kind}"
    loaded = lightscale.load(f"runs/{run}")
    ids = loaded.ids(TEXT)[None]
    expected = loaded.logits(ids)
    base = transformers.AutoModelForCausalLM.from_pretrained(f"out/{name}", trust_remote_code=True).eval()
    assert error(base(ids).logits, expected) > 1e-3, "the adapters change the model"
    merged = transformers.AutoModelForCausalLM.from_pretrained(f"out/{run}", trust_remote_code=True).eval()
    assert error(merged(ids).logits, expected) < 1e-5
    adapted = peft.PeftModel.from_pretrained(base, f"out/{run}-peft").eval()
    assert error(adapted(ids).logits, expected) < 1e-5
    config = json.loads(Path(f"out/{run}-peft/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == f"out/{name}"
    # What generates and evaluates, on the training model.
    with load_model(f"runs/{run}", device="cpu") as on_rank:
        logits = on_rank.model(ids, torch.arange(ids.size(1))[None])[..., : loaded.tokenizer.vocab_size]
    assert error(logits, expected) < 1e-5
