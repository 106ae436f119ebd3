"""Labels of documents, on every axis and with every pooling, beside plain PyTorch; what is refused."""

import functools
import itertools
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.data_pipeline.loading.loader import LoaderLayout, TokenLoader
from lightscale.data_pipeline.store.token_store import StoreWriter, TokenStore
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer, load_tokenizer
from lightscale.errors import UserError
from lightscale.models.accounting import parameter_shapes, rank_parameters
from lightscale.models.language_model import language_model_chunks, transformer_config
from lightscale.parallel.engine import Engine
from lightscale.parallel.initialization import draw_weights, named_parameters
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.tasks.classify import Classify, ClassifyConfig
from lightscale.training.optimizer.adamw import AdamW

parity = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "parity.py")))
RunRanks = Callable[..., list[Any]]
EOT, LENGTH, LABELS = 256, 48, 5
POOLINGS = ("mean", "first", "last")
LAYOUTS = {
    2: ({"tensor": 2}, {"pipeline": 2}, {"sequence": 2}, {}),
    4: ({"sequence": 4}, {"sequence": 2, "tensor": 2}, {"pipeline": 2, "virtual_stages": 2, "sequence": 2}),
}


def model_of(pooling: str, mixer: str = "llama") -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "mixer": mixer,
            "mixer_options": {"llama": {"causal": False}} if mixer == "llama" else {},
            "num_layers": 4,
            "hidden_size": 32,
            "num_heads": 4,
            "intermediate_size": 48,
            "vocab_size": 260,
            "norm": "rmsnorm",
            "head": {"num_labels": LABELS, "pooling": pooling},
        }
    )


def label_of(ids: Any) -> int:
    return int(np.sum(ids)) % LABELS


def write_store(path: Path, *, lengths: tuple[int, ...] = (3, 70, 0, 11, 20, 30, 5), **documents: Any) -> TokenStore:
    """Documents within a rank's segment, over its edges, and longer than a sequence; a label is the sum of the ids."""
    tokenizer = TiktokenTokenizer(
        name="bytes",
        pat_str=r"(?s:.+)",
        mergeable_ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={"<|endoftext|>": EOT},
    )
    generator = np.random.default_rng(0)
    with StoreWriter(path, tokenizer, shard_tokens=256, chunk_tokens=64) as writer:
        source = writer.source("text", documents=documents or {"label": "int32"})
        for number in range(60):
            ids = generator.integers(0, 256, lengths[number % len(lengths)]).astype(np.uint32)
            values = {name: label_of(ids) if name == "label" else 0 for name in (documents or ["label"])}
            source.append(ids, num_bytes=len(ids), documents=values)
        writer.finish({})
    return TokenStore(path)


def loader(store: Path, packing: str = "concat", **layout: int) -> TokenLoader:
    return TokenLoader(
        TokenStore(store),
        sequence_length=LENGTH,
        global_batch_size=8,
        micro_batch_size=2,
        packing="whole" if packing == "whole" else "concat",
        layout=LoaderLayout(**layout),
        targets=Classify(ClassifyConfig()).targets(TokenStore(store), validation=False),
    )


@pytest.mark.parametrize("packing", ["concat", "whole"])
def test_a_label_stands_at_the_last_token_of_its_document(tmp_path: Path, packing: str) -> None:
    store = write_store(tmp_path / "store")
    source = store.source("text")
    text, ends = source.read(0, source.num_tokens), source.document_ends(0, source.num_documents)
    labels = {int(end): label_of(text[start + 1 : end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)}
    data, found = loader(store.path, packing), 0
    for number in range(3):
        samples = data.step_after(data.step_tokens.after(number))
        batches = data.batches_after(data.step_tokens.after(number))
        for row, ranges in enumerate(samples.ranges):
            batch = batches[row // 2]
            at = {
                int(end) - 1: labels[next(stop for stop in ends if stop > start)]
                for start, end in zip(ranges.starts, [*ranges.slots[1:], LENGTH], strict=True)
                if start >= 0
            }
            assert batch.loss_mask[row % 2].nonzero().flatten().tolist() == sorted(at)
            assert {slot: int(batch.labels[row % 2, slot]) for slot in at} == at
            found += len(at)
    assert found > 40


def engine_of(mesh: Mesh, model: ModelConfig) -> Engine:
    config = transformer_config(model, mesh, torch.float64)
    chunks = language_model_chunks(config, model, vocab_size=EOT + 1, mesh=mesh)
    for chunk in chunks:
        draw_weights(chunk, seed=0, tensor_rank=mesh.groups.tp.rank(), tensor_size=mesh.tensor)
    return Engine(chunks, config, mesh, optimizer=AdamW(), position_buckets=4)


def by_the_engine(
    rank: int, world_size: int, init_method: str, store: Path, layouts: list[dict[str, int]]
) -> list[tuple[Any, ...]]:
    """Loss, documents, what is right, and the gradients, of each layout and pooling."""
    found = []
    for number, axes in enumerate(layouts):
        for pooling in POOLINGS:
            place = f"{init_method}-{number}-{pooling}"
            with start_mesh(device="cpu", rank=rank, world_size=world_size, init_method=place, **axes) as mesh:
                engine = engine_of(mesh, model_of(pooling))
                layout = {"sequence_rank": mesh.sequence_rank, "sequence_size": mesh.sequence}
                data = loader(store, data_rank=mesh.data_rank, data_size=mesh.data, **layout)
                batches = [batch.to(mesh.device) for batch in data.next_step()]
                scores, sums = engine.forward_only(batches, top=(1,)), engine.forward_backward(batches)
                assert abs(scores.loss - sums.loss) < 1e-9
                found.append((sums.loss, sums.tokens, scores.correct, parity.gradients(engine), sums.by_bucket))
    return found


def plainly(rank: int, world_size: int, init_method: str, store: Path) -> list[tuple[Any, ...]]:
    """The states by a model of one rank, each document pooled by itself, the rest by PyTorch's autograd."""
    found = []
    for pooling in POOLINGS:
        with start_mesh(device="cpu", init_method=f"{init_method}-{pooling}") as mesh:
            model: Any = engine_of(mesh, model_of(pooling)).module
            data = loader(store)
            total, correct, count = torch.zeros((), dtype=torch.float64), 0, 0
            for batch in (batch.to(mesh.device) for batch in data.next_step()):
                hidden = model(batch.tokens, batch.positions, hidden_only=True).transpose(0, 1)
                for row, states in enumerate(hidden):
                    edges = [*(batch.positions[row] == 0).nonzero().flatten().tolist(), LENGTH]
                    for start, stop in itertools.pairwise(edges):
                        part: Tensor = states[start:stop]
                        pooled = {"mean": part.mean(0), "first": part[0], "last": part[-1]}[pooling]
                        logits, label = model.output_layer.weight @ pooled, batch.labels[row, stop - 1]
                        total = total + F.cross_entropy(logits, label)
                        correct += int(logits.argmax() == label)
                        count += 1
            model.zero_grad()
            names = dict(named_parameters(model))
            gradients = torch.autograd.grad(total / count, list(names.values()))
            found.append((total.item(), count, (correct,), dict(zip(names, gradients, strict=True))))
    return found


@pytest.fixture(scope="module")
def expected(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Any, ...]]]:
    store = tmp_path_factory.mktemp("classify") / "store"
    write_store(store)
    return store, run_ranks(plainly, 1, store)[0]


@pytest.mark.long
@pytest.mark.parametrize("size", [1, *LAYOUTS])
def test_losses_and_gradients_are_those_of_plain_pooling(
    run_ranks: RunRanks, expected: tuple[Path, list[tuple[Any, ...]]], size: int
) -> None:
    """Where documents begin and end on other ranks, in fp64."""
    store, plain = expected
    layouts = list(LAYOUTS.get(size, [{}]))
    assert 10 < plain[0][1] < 40
    compared: dict[int, set[str]] = {}
    for results in run_ranks(by_the_engine, size, store, layouts, timeout_s=300):
        for number, (loss, count, correct, gradients, buckets) in enumerate(results):
            case = f"{layouts[number // 3]} {POOLINGS[number % 3]}"
            wanted = plain[number % 3]
            assert (count, correct) == wanted[1:3], case
            assert loss == pytest.approx(wanted[0], rel=1e-12), case
            compared.setdefault(number, set()).update(gradients)
            assert sum(bucket for _, bucket in buckets) == count
            for name, gradient in gradients.items():
                assert parity.error(gradient, wanted[3][name]) < 1e-10, f"{case}: {name}"
    # Pipeline ranks hold a part each.
    assert all(names == plain[0][3].keys() for names in compared.values())


def counted(rank: int, world_size: int, init_method: str) -> tuple[dict[str, tuple[int, ...]], list[int]]:
    with start_mesh(device="cpu", init_method=init_method, rank=rank, world_size=world_size, pipeline=2) as mesh:
        chunks = engine_of(mesh, model_of("mean", "tnl")).chunks
        return (
            {name: tuple(parameter.shape) for name, parameter in named_parameters(chunks[0])},
            [parameter.numel() for parameter in chunks[0].parameters()],
        )


def test_counts_are_those_of_the_built_model(run_ranks: RunRanks) -> None:
    ranks, model = run_ranks(counted, 2), model_of("mean", "tnl")
    assert functools.reduce(lambda one, two: one | two, (shapes for shapes, _ in ranks)) == parameter_shapes(model)
    assert [sum(numels) for _, numels in ranks] == rank_parameters(model, tensor=1, pipeline=2)
    assert parameter_shapes(model)["output_layer.weight"] == (LABELS, 32)


def test_labels_that_a_model_has_not_are_refused(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    task, model = Classify(ClassifyConfig()), model_of("mean")
    task.check_store(model, store, ["text"])
    small = ModelConfig.model_validate({**model.model_dump(), "head": {"num_labels": LABELS - 1}})
    with pytest.raises(UserError, match=r"document \d+ has the label 4, but model.head.num_labels = 4 allows 0 to 3"):
        task.check_store(small, store, ["text"])
    with StoreWriter(tmp_path / "named", load_tokenizer(store.path), classes={"label": ["a", "b", "c"]}) as writer:
        writer.source("text", documents={"label": "int32"}).append(
            np.ones(3, dtype=np.uint32), num_bytes=3, documents={"label": 2}
        )
        writer.finish({})
    two = ModelConfig.model_validate({**model.model_dump(), "head": {"num_labels": 2}})
    with pytest.raises(UserError, match=r"the label 2 \(c\), but .* allows 0 to 1; the store has 3 classes"):
        task.check_store(two, TokenStore(tmp_path / "named"), ["text"])
    with pytest.raises(UserError, match=r'task.label = "topic": .* has no such document array; it has label'):
        Classify(ClassifyConfig(label="topic")).check_store(model, store, ["text"])
    other = write_store(tmp_path / "other", score="float32")
    with pytest.raises(UserError, match=r"it is float32; it must hold one whole number per document"):
        Classify(ClassifyConfig(label="score")).check_store(model, other, ["text"])
