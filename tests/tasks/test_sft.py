"""Fine-tuning on conversations: loss and gradients against a plain model on each conversation; what is refused."""

import itertools
import json
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.data_pipeline.loading.loader import LoaderLayout, TokenLoader, validation_batches
from lightscale.data_pipeline.preparation.corpus import make_corpus
from lightscale.data_pipeline.preparation.prepare import prepare
from lightscale.data_pipeline.store.token_store import StoreWriter, TokenStore
from lightscale.data_pipeline.tokenizers import AsciiTokenizer
from lightscale.errors import UserError
from lightscale.models.language_model import language_model_chunks, transformer_config
from lightscale.parallel.engine import Engine
from lightscale.parallel.initialization import draw_weights, named_parameters
from lightscale.parallel.mesh import start_mesh
from lightscale.tasks.sft import SFT, SFTConfig
from lightscale.training.optimizer.adamw import AdamW

HELPERS = Path(__file__).parents[1] / "helpers"
plain, plain_mixers, parity = (
    SimpleNamespace(**runpy.run_path(str(HELPERS / f"{name}.py")))
    for name in ("plain_models", "plain_mixers", "parity")
)
RunRanks = Callable[..., list[Any]]
LENGTH, NUM_IDS = 128, 128
MODEL = ModelConfig(
    mixer="tnl",
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    intermediate_size=48,
    vocab_size=NUM_IDS + plain.PADDING_ROWS,
)
LAYOUTS: dict[int, tuple[dict[str, int], ...]] = {1: ({},), 2: ({"sequence": 2}, {"tensor": 2}, {"pipeline": 2}, {})}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of 30 to 120 tokens, half of them of two turns, and some that are held out."""
    folder = tmp_path_factory.mktemp("sft")
    lines = []
    for number in range(24):
        turns = [
            {"role": role, "content": f"{number * turn:{3 + 4 * (number % 3)}}"}
            for turn in range(1 + number % 2)
            for role in ("user", "assistant")
        ]
        lines.append(json.dumps({"messages": turns}))
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "t.jinja").write_text(
        "{% for m in messages %}<{{ m.role[0] }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }};"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    source = {"paths": [str(folder / "a.jsonl")], "format": "chat", "chat": {"template": str(folder / "t.jinja")}}
    corpus = {
        "tokenizer": "ascii",
        "validation": 0.3,
        "shard_tokens": 256,
        "chunk_tokens": 64,
        "sources": {"a": source},
    }
    prepare(make_corpus(corpus, origin="test"), folder / "store")
    return folder / "store"


def loader_of(store: Path, layout: LoaderLayout, folder: Path) -> TokenLoader:
    return TokenLoader(
        TokenStore(store),
        sequence_length=LENGTH,
        global_batch_size=4,
        micro_batch_size=2,
        packing="whole",
        layout=layout,
        index_dir=folder,
        targets=SFT(SFTConfig()).targets(TokenStore(store), validation=False),
    )


def by_the_engine(
    rank: int, world_size: int, init_method: str, store: Path, folder: Path
) -> list[tuple[float, int, dict[str, Tensor]]]:
    """Loss, counted tokens and gradients of the first step on each layout."""
    found = []
    for number, axes in enumerate(LAYOUTS[world_size]):
        place = f"{init_method}-{number}"
        with start_mesh(device="cpu", rank=rank, world_size=world_size, init_method=place, **axes) as mesh:
            config = transformer_config(MODEL, mesh, torch.float64)
            chunks = language_model_chunks(config, MODEL, vocab_size=NUM_IDS, mesh=mesh)
            for chunk in chunks:
                draw_weights(chunk, seed=0, tensor_rank=mesh.groups.tp.rank(), tensor_size=mesh.tensor)
            engine = Engine(chunks, config, mesh, optimizer=AdamW())
            sequence = {"sequence_rank": mesh.sequence_rank, "sequence_size": mesh.sequence}
            layout = LoaderLayout(data_rank=mesh.data_rank, data_size=mesh.data, **sequence)
            batches = [batch.to(mesh.device) for batch in loader_of(store, layout, folder).next_step()]
            sums = engine.forward_backward(batches)
            found.append((sums.loss, sums.tokens, parity.gradients(engine)))
    return found


def initial_weights(rank: int, world_size: int, init_method: str) -> dict[str, Tensor]:
    with plain.built_model(MODEL, init_method) as module:
        return {name: weight.detach().clone() for name, weight in named_parameters(module)}


def directly(store: Path, weights: dict[str, Tensor], folder: Path) -> tuple[float, int, dict[str, Tensor]]:
    """The conversations of the first step, each by itself: what follows a token, where the mask counts it."""
    samples, source = loader_of(store, LoaderLayout(), folder).step_after(0), TokenStore(store).source("a")
    leaves = {name: weight.double().clone().requires_grad_() for name, weight in weights.items()}
    total, count, padding = torch.zeros((), dtype=torch.float64), 0, 0
    for ranges in samples.ranges:
        for start in ranges.starts.tolist():
            if start < 0:
                padding += 1
                continue
            begin, end = source.document(source.document_at(start))
            assert begin == start, "a whole conversation"
            ids = torch.from_numpy(source.read(begin, end).astype(np.int64))
            counts = torch.from_numpy(source.loss_mask(begin, end)[1:].astype(np.float64))
            logits = plain.document_logits(MODEL, leaves, ids, partial(plain_mixers.tnl, MODEL))[:-1, :NUM_IDS]
            losses = logits.exp().sum(dim=1).log() - logits[torch.arange(len(ids) - 1), ids[1:]]
            total, count = total + (losses * counts).sum(), count + int(counts.sum())
    assert padding, "the batch has padding"
    found = torch.autograd.grad(total / count, list(leaves.values()), materialize_grads=True)
    return total.item(), count, dict(zip(leaves, found, strict=True))


def test_losses_and_gradients_are_those_of_a_plain_model_on_each_conversation(
    store: Path, tmp_path: Path, run_ranks: RunRanks
) -> None:
    (weights,) = run_ranks(initial_weights, 1)
    loss, count, gradients = directly(store, weights, tmp_path)
    assert count > 10
    for world_size, layouts in LAYOUTS.items():
        compared: dict[int, set[str]] = {}
        for results in run_ranks(by_the_engine, world_size, store, tmp_path):
            for number, (found_loss, found_count, found) in enumerate(results):
                assert found_count == count, layouts[number]
                assert found_loss == pytest.approx(loss, rel=1e-12), layouts[number]
                compared.setdefault(number, set()).update(found)
                for name, gradient in found.items():
                    assert parity.error(gradient, gradients[name]) < 1e-10, (layouts[number], name)
        # Pipeline ranks hold a part each.
        assert all(names == gradients.keys() for names in compared.values())


def test_validation_reads_every_held_out_conversation_whole(store: Path) -> None:
    source = TokenStore(store).source("a-validation")
    batches = list(
        validation_batches(
            source,
            sequence_length=LENGTH,
            num_sequences=1000,
            micro_batch_size=3,
            layout=LoaderLayout(),
            whole_documents=True,
            padding_id=TokenStore(store).tokenizer.eot_id,
        )
    )
    counted = [
        batch.labels[row][batch.loss_mask[row] == 1].tolist() for batch in batches for row in range(len(batch.labels))
    ]
    mask = source.loss_mask(0, source.num_tokens) == 1
    assert sorted(itertools.chain.from_iterable(counted)) == sorted(source.read(0, source.num_tokens)[mask].tolist())
    assert sum(len(one) for one in counted) == mask.sum() > 0


def test_stores_without_a_token_that_counts_are_refused(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", AsciiTokenizer()) as writer:
        for name, options in (("text", {}), ("none", {"has_loss_mask": True}), ("some", {"has_loss_mask": True})):
            source = writer.source(name, **options)
            mask = None if name == "text" else [0, int(name == "some")]
            source.append([65, 66], num_bytes=2, loss_mask=mask)
        writer.finish({})
    store, task = TokenStore(tmp_path / "store"), SFT(SFTConfig())
    task.check_store(MODEL, store, ["some"])
    with pytest.raises(
        UserError, match=r"source text of .* has no loss mask; prepare it with format = \"chat\" in the"
    ):
        task.check_store(MODEL, store, ["some", "text"])
    with pytest.raises(
        UserError, match=r"source none of .* has a loss mask without a single token that counts; prepare"
    ):
        task.check_store(MODEL, store, ["none"])
