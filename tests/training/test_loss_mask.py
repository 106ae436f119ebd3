"""The loss where a store's loss mask says which labels count: losses and gradients against a direct computation."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zarr
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.data_pipeline.loading.loader import LoaderLayout, TokenLoader
from lightscale.data_pipeline.store.token_store import StoreWriter, TokenStore
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer
from lightscale.models.language_model import LanguageModel, transformer_config
from lightscale.parallel.engine import Engine
from lightscale.parallel.initialization import draw_weights
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.training.optimizer.adamw import AdamW

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "tiny_engine.py")))

RunRanks = Callable[..., list[Any]]
Found = tuple[float, int, dict[str, Tensor]]
MODEL = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, intermediate_size=48, vocab_size=264, norm="rmsnorm")
VOCAB_SIZE, LENGTH = 257, 24


def write_copies(path: Path) -> None:
    """A copying task: the loss is of the second half of each document."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    tokenizer = TiktokenTokenizer(
        name="bytes", pat_str=r"(?s:.+)", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256}
    )
    generator = np.random.default_rng(0)
    with StoreWriter(path, tokenizer, shard_tokens=256, chunk_tokens=64) as writer:
        source = writer.source("copy", has_loss_mask=True)
        for _ in range(20):
            half = generator.integers(0, 256, generator.integers(1, 12), dtype=np.uint32)
            source.append(np.tile(half, 2), num_bytes=0, loss_mask=np.repeat([0, 1], len(half)))
        writer.finish({})


def build(mesh: Mesh, optimizer: AdamW | None) -> Engine:
    config = transformer_config(MODEL, mesh, torch.float64)
    model = LanguageModel(config, MODEL, vocab_size=VOCAB_SIZE, mesh=mesh)
    draw_weights(model, seed=0, tensor_rank=0, tensor_size=1)
    return Engine(model, config, mesh, optimizer=optimizer)


def make_loader(store: Path, mesh: Mesh) -> TokenLoader:
    layout = LoaderLayout(sequence_rank=mesh.sequence_rank, sequence_size=mesh.sequence)
    return TokenLoader(
        TokenStore(store), sequence_length=LENGTH, global_batch_size=4, micro_batch_size=2, layout=layout
    )


def by_the_engine(rank: int, world_size: int, init_method: str, store: Path) -> Found:
    with start_mesh(
        sequence=world_size, device="cpu", rank=rank, world_size=world_size, init_method=init_method
    ) as mesh:
        engine = build(mesh, AdamW())
        batches = [batch.to(mesh.device) for batch in make_loader(store, mesh).next_step()]
        sums = engine.forward_backward(batches)
        names = {id(parameter): name for name, parameter in tiny.named(engine)}
        gradients = {names[id(p)]: (p, gradient) for _, p, gradient in engine.gradients()}
        return sums.loss, sums.tokens, tiny.gather(engine, gradients)


def directly(rank: int, world_size: int, init_method: str, store: Path) -> Found:
    """The windows cut out of what zarr reads, documents apart; logits by the model, all else by PyTorch."""
    tokens, mask = (
        torch.from_numpy(np.asarray(zarr.open_array(store / "copy" / name, mode="r")[:]).astype(np.int64))
        for name in ("tokens", "loss_mask")
    )
    with start_mesh(device="cpu", init_method=init_method) as mesh:
        model = build(mesh, None).module
        total, count = torch.zeros((), dtype=torch.float64), 0
        for location in make_loader(store, mesh).step_after(0).locations:
            start = location.window * LENGTH
            text, counts = tokens[start : start + LENGTH + 1], mask[start + 1 : start + LENGTH + 1].double()
            positions = [0]
            for token in text[1:-1].tolist():
                positions.append(0 if token == 256 else positions[-1] + 1)
            logits = model(text[None, :-1], torch.tensor([positions]))[0, :, :VOCAB_SIZE]
            total = total + (F.cross_entropy(logits, text[1:], reduction="none") * counts).sum()
            count += int(counts.sum())
        (total / float(count)).backward()
        return total.item(), count, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("sequence_ranks", [1, 2])
def test_losses_and_gradients_are_those_of_the_labels_that_count(
    tmp_path: Path, run_ranks: RunRanks, sequence_ranks: int
) -> None:
    write_copies(tmp_path / "store")
    ((loss, count, gradients),) = run_ranks(directly, 1, tmp_path / "store")
    assert 20 < count < 4 * LENGTH - 20
    for found_loss, found_count, found in run_ranks(by_the_engine, sequence_ranks, tmp_path / "store"):
        assert found_count == count
        assert found_loss == pytest.approx(loss, rel=1e-12)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert tiny.error(found[name], gradient) < 1e-10, name
