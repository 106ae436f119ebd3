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
from lightscale.data_pipeline.loading.packing import WholeWindows
from lightscale.data_pipeline.store.token_store import StoreWriter, TokenStore
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer, load_tokenizer
from lightscale.errors import UserError
from lightscale.models.accounting import parameter_shapes, parameter_terms, rank_parameters
from lightscale.models.flops import forward_flops_per_token
from lightscale.models.language_model import language_model_chunks, transformer_config
from lightscale.parallel.engine import Engine
from lightscale.parallel.initialization import draw_weights, named_parameters
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.tasks.classify import Classify, ClassifyConfig
from lightscale.tasks.preference import Preference, PreferenceConfig
from lightscale.training.optimizer.adamw import AdamW

parity = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "parity.py")))
RunRanks = Callable[..., list[Any]]
EOT, LENGTH, LABELS = 256, 48, 5
# Pooling, and whether labels are of pairs.
HEADS = (("mean", False), ("first", False), ("last", False), ("mean", True), ("last", True))
LAYOUTS = {
    2: ({"tensor": 2}, {"pipeline": 2}, {"sequence": 2}, {}),
    4: ({"sequence": 4}, {"sequence": 2, "tensor": 2}, {"pipeline": 2, "virtual_stages": 2, "sequence": 2}),
}


def model_of(pooling: str, mixer: str = "llama", *, pairs: bool = False) -> ModelConfig:
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
            "head": {"num_labels": LABELS, "pooling": pooling, "pairs": pairs, "bias": pairs},
        }
    )


def label_of(ids: Any) -> int:
    return int(np.sum(ids)) % LABELS


def write_store(
    path: Path, *, lengths: tuple[int, ...] = (3, 70, 0, 11, 20, 30, 5), pairs: bool = False, **documents: Any
) -> TokenStore:
    """Documents within a rank's segment, over its edges, and longer than a sequence; a label is the sum of the ids."""
    tokenizer = TiktokenTokenizer(
        name="bytes",
        pat_str=r"(?s:.+)",
        mergeable_ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={"<|endoftext|>": EOT},
    )
    generator = np.random.default_rng(0)
    with StoreWriter(path, tokenizer, shard_tokens=256, chunk_tokens=64) as writer:
        source = writer.source("text", pairs=pairs, documents=documents or {"label": "int32"})
        for number in range(60):
            ids = generator.integers(0, 256, lengths[number % len(lengths)]).astype(np.uint32)
            values = {name: label_of(ids) if name == "label" else 0 for name in (documents or ["label"])}
            source.append(ids, num_bytes=len(ids), documents=values)
        writer.finish({})
    return TokenStore(path)


def write_pairs(path: Path) -> TokenStore:
    """Some fill a sequence, or have an empty document."""
    return write_store(path, lengths=(3, 20, 0, 11, 30, 16, 1, 40, 2, 0), pairs=True)


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


def test_the_label_of_a_pair_stands_at_the_end_of_its_second_document(tmp_path: Path) -> None:
    store = write_pairs(tmp_path / "store")
    source, data, found = store.source("text"), loader(store.path, "whole"), 0
    text, edges = source.read(0, source.num_tokens), [0, *source.document_ends(0, source.num_documents).tolist()]
    second = {edges[n]: label_of(text[edges[n] + 1 : edges[n + 1]]) for n in range(1, source.num_documents, 2)}
    for number in range(3):
        samples = data.step_after(data.step_tokens.after(number))
        batches = data.batches_after(data.step_tokens.after(number))
        for row, ranges in enumerate(samples.ranges):
            batch, stops = batches[row // 2], [*ranges.slots[1:], LENGTH]
            at = {
                int(stop) - 1: second[start]
                for start, stop in zip(ranges.starts, stops, strict=True)
                if start in second
            }
            documents = int((ranges.starts >= 0).sum())
            assert len(at) == documents / 2, "both documents of each pair"
            assert batch.loss_mask[row % 2].nonzero().flatten().tolist() == sorted(at)
            assert {slot: int(batch.labels[row % 2, slot]) for slot in at} == at
            found += len(at)
    assert found > 30


def test_pairs_and_single_documents_are_not_taken_for_each_other(tmp_path: Path) -> None:
    singles, pairs, task = write_store(tmp_path / "one"), write_pairs(tmp_path / "two"), Classify(ClassifyConfig())
    task.check_store(model_of("mean", pairs=True), pairs, ["text"])
    with pytest.raises(
        UserError, match=r"model.head.pairs = true: source text of .*one holds single documents, no pairs"
    ):
        task.check_store(model_of("mean", pairs=True), singles, ["text"])
    with pytest.raises(
        UserError, match=r"model.head.pairs = false: source text of .*two holds pairs of documents; use"
    ):
        task.check_store(model_of("mean"), pairs, ["text"])
    with pytest.raises(UserError, match=r"source text of .*two holds no pairs of answers"):
        Preference(PreferenceConfig()).check_store(model_of("mean"), pairs, ["text"])
    assert (
        pairs.fingerprint() != write_store(tmp_path / "same", lengths=(3, 20, 0, 11, 30, 16, 1, 40, 2, 0)).fingerprint()
    )
    with pytest.raises(
        UserError, match=r"source text: a pair of documents has 48 tokens, and a sequence 40; use longer"
    ):
        WholeWindows(pairs.source("text"), 40)
    with StoreWriter(tmp_path / "half", load_tokenizer(pairs.path)) as writer:
        writer.source("text", pairs=True).append([1], num_bytes=1)
        with pytest.raises(ValueError, match="pairs: 1 documents; append two of each pair"):
            writer.finish({})


def engine_of(mesh: Mesh, model: ModelConfig) -> Engine:
    config = transformer_config(model, mesh, torch.float64)
    chunks = language_model_chunks(config, model, vocab_size=EOT + 1, mesh=mesh)
    for chunk in chunks:
        draw_weights(chunk, seed=0, tensor_rank=mesh.groups.tp.rank(), tensor_size=mesh.tensor)
    return Engine(chunks, config, mesh, optimizer=AdamW(), position_buckets=4)


def of_head(stores: Path, pairs: bool) -> tuple[Path, str]:
    """The store, and how it is packed."""
    return (stores / "pairs", "whole") if pairs else (stores / "single", "concat")


def by_the_engine(
    rank: int, world_size: int, init_method: str, stores: Path, layouts: list[dict[str, int]]
) -> list[tuple[Any, ...]]:
    """Loss, documents, what is right, and the gradients, of each layout and head."""
    found = []
    for number, axes in enumerate(layouts):
        for pooling, pairs in HEADS:
            place = f"{init_method}-{number}-{pooling}-{pairs}"
            with start_mesh(device="cpu", rank=rank, world_size=world_size, init_method=place, **axes) as mesh:
                engine = engine_of(mesh, model_of(pooling, pairs=pairs))
                layout = {"sequence_rank": mesh.sequence_rank, "sequence_size": mesh.sequence}
                data = loader(*of_head(stores, pairs), data_rank=mesh.data_rank, data_size=mesh.data, **layout)
                batches = [batch.to(mesh.device) for batch in data.next_step()]
                scores, sums = engine.forward_only(batches, top=(1,)), engine.forward_backward(batches)
                assert abs(scores.loss - sums.loss) < 1e-9
                found.append((sums.loss, sums.tokens, scores.correct, parity.gradients(engine), sums.by_bucket))
    return found


def plain_logits(head: Any, pooled: list[Tensor]) -> Tensor:
    """Of the last of the ``pooled`` vectors of a row, or of the last two."""
    if head.hidden_weight is None:
        logits: Tensor = head.weight @ pooled[-1]
        return logits
    one, two = pooled[-2:]
    inner = head.hidden_weight @ torch.cat([one, two, one * two, one - two]) + head.hidden_bias
    paired: Tensor = head.weight @ F.gelu(inner) + head.bias
    return paired


def plainly(rank: int, world_size: int, init_method: str, stores: Path) -> list[tuple[Any, ...]]:
    """The states by a model of one rank, each document pooled by itself, the rest by PyTorch's autograd."""
    found = []
    for pooling, pairs in HEADS:
        with start_mesh(device="cpu", init_method=f"{init_method}-{pooling}-{pairs}") as mesh:
            model: Any = engine_of(mesh, model_of(pooling, pairs=pairs)).module
            data = loader(*of_head(stores, pairs))
            total, correct, count = torch.zeros((), dtype=torch.float64), 0, 0
            for batch in (batch.to(mesh.device) for batch in data.next_step()):
                hidden = model(batch.tokens, batch.positions, hidden_only=True).transpose(0, 1)
                for row, states in enumerate(hidden):
                    edges, pooled = [*(batch.positions[row] == 0).nonzero().flatten().tolist(), LENGTH], list[Tensor]()
                    for number, (start, stop) in enumerate(itertools.pairwise(edges)):
                        part: Tensor = states[start:stop]
                        pooled.append({"mean": part.mean(0), "first": part[0], "last": part[-1]}[pooling])
                        # Behind an even number of documents comes padding.
                        if pairs and number % 2 == 0:
                            continue
                        logits, label = plain_logits(model.output_layer, pooled), batch.labels[row, stop - 1]
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
    stores = tmp_path_factory.mktemp("classify")
    write_store(stores / "single")
    write_pairs(stores / "pairs")
    return stores, run_ranks(plainly, 1, stores)[0]


@pytest.mark.long
@pytest.mark.parametrize("size", [1, *LAYOUTS])
def test_losses_and_gradients_are_those_of_plain_pooling(
    run_ranks: RunRanks, expected: tuple[Path, list[tuple[Any, ...]]], size: int
) -> None:
    """Where documents begin and end on other ranks, in fp64."""
    stores, plain = expected
    layouts = list(LAYOUTS.get(size, [{}]))
    assert all(8 < count < 40 for _, count, *_ in plain)
    compared: dict[int, set[str]] = {}
    for results in run_ranks(by_the_engine, size, stores, layouts, timeout_s=300):
        for number, (loss, count, correct, gradients, buckets) in enumerate(results):
            case = f"{layouts[number // len(HEADS)]} {HEADS[number % len(HEADS)]}"
            wanted = plain[number % len(HEADS)]
            assert (count, correct) == wanted[1:3], case
            assert loss == pytest.approx(wanted[0], rel=1e-12), case
            compared.setdefault(number, set()).update(gradients)
            assert sum(bucket for _, bucket in buckets) == count
            for name, gradient in gradients.items():
                assert parity.error(gradient, wanted[3][name]) < 1e-10, f"{case}: {name}"
    # Pipeline ranks hold a part each.
    assert all(names == plain[number % len(HEADS)][3].keys() for number, names in compared.items())


def counted(rank: int, world_size: int, init_method: str) -> tuple[dict[str, tuple[int, ...]], list[int]]:
    with start_mesh(device="cpu", init_method=init_method, rank=rank, world_size=world_size, pipeline=2) as mesh:
        chunks = engine_of(mesh, model_of("mean", "tnl", pairs=True)).chunks
        return (
            {name: tuple(parameter.shape) for name, parameter in named_parameters(chunks[0])},
            [parameter.numel() for parameter in chunks[0].parameters()],
        )


def test_counts_are_those_of_the_built_model(run_ranks: RunRanks) -> None:
    ranks, model = run_ranks(counted, 2), model_of("mean", "tnl", pairs=True)
    assert functools.reduce(lambda one, two: one | two, (shapes for shapes, _ in ranks)) == parameter_shapes(model)
    assert [sum(numels) for _, numels in ranks] == rank_parameters(model, tensor=1, pipeline=2)
    assert parameter_terms(model)["label head"] == 4 * 32 * 32 + 32 + LABELS * 32 + LABELS
    singles = model_of("mean", "tnl")
    assert parameter_shapes(singles)["output_layer.weight"] == (LABELS, 32)
    assert parameter_terms(singles)["label head"] == LABELS * 32
    # A pair of one sequence: the hidden layer and the labels.
    more = forward_flops_per_token(model, 100) - forward_flops_per_token(singles, 100)
    assert more == pytest.approx(2 * 4 * 32 * 32 / 100)


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
