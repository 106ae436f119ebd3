"""Masks: what is chosen and put in, on any layout and after any resumption; against plain counting."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightscale.config.files import load
from lightscale.config.model import ModelConfig
from lightscale.data_pipeline.loading.loader import LoaderLayout, TokenLoader, validation_batches
from lightscale.data_pipeline.loading.targets import Predicted, WholeRows
from lightscale.data_pipeline.loading.windows import Batch
from lightscale.data_pipeline.store.token_store import StoreWriter, TokenStore
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer, load_tokenizer
from lightscale.data_pipeline.tokenizers.words import word_edges
from lightscale.errors import UserError
from lightscale.tasks.masked import Masked, MaskedConfig, Masks

EOT, LENGTH = 256, 32
TEXTS = ("The naïve cat_2, sat on 北京 the mat.", "don't  stop!", "a" * 90, "", "x = [f(y) for y in zeros]\n" * 9)


def write_store(path: Path, *, loss_mask: bool = False) -> TokenStore:
    """A token is a byte."""
    tokenizer = TiktokenTokenizer(
        name="bytes",
        pat_str=r"(?s:.+)",
        mergeable_ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={"<|endoftext|>": EOT},
    )
    with StoreWriter(path, tokenizer, shard_tokens=256, chunk_tokens=64) as writer:
        for name in ("text", "text-validation"):
            source = writer.source(name, "validation" if name.endswith("n") else "train", has_loss_mask=loss_mask)
            for number in range(40):
                ids = np.frombuffer(TEXTS[number % len(TEXTS)].encode(), dtype=np.uint8).astype(np.uint32)
                mask = np.arange(len(ids)) % 3 > 0
                source.append(ids, num_bytes=len(ids), loss_mask=mask if loss_mask else None)
        writer.finish({})
    return TokenStore(path)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return write_store(tmp_path_factory.mktemp("masked") / "store", loss_mask=True)


def masks(share: float = 0.15, *, stream: int = 1, edges: Any = None, by_mask: float = 0.8) -> Masks:
    return Masks(
        share=share,
        mask_replace_prob=by_mask,
        random_replace_prob=(1 - by_mask) / 2,
        stream=stream,
        num_ids=EOT + 1,
        eot_id=EOT,
        edges=edges,
    )


def applied(made: Masks, tokens: Any, counted: Any, places: Any) -> Predicted:
    """Masks hang on no document."""
    found = made(WholeRows(tokens, counted, places, list))
    assert found.labels is tokens
    return found


def test_shares_are_those_that_were_asked_for() -> None:
    tokens = np.random.default_rng(0).integers(0, EOT + 1, (200, 1000)).astype(np.int32)
    counted = (np.random.default_rng(1).random(tokens.shape) < 0.9).astype(np.float32)
    inputs, _, chosen = applied(masks(), tokens, counted, 1000 * np.arange(200))
    candidates = (counted > 0) & (tokens != EOT)
    assert not chosen[~candidates].any()
    assert inputs[chosen == 0].tolist() == tokens[chosen == 0].tolist()
    is_chosen = chosen > 0
    # Of 180,000 candidates and 27,000 chosen ones: five standard deviations.
    assert is_chosen[candidates].mean() == pytest.approx(0.15, abs=5 * (0.15 * 0.85 / 180_000) ** 0.5)
    now, then = inputs[is_chosen], tokens[is_chosen]
    assert (now == EOT + 1).mean() == pytest.approx(0.8, abs=0.013)
    # A random token is the right one once in 256 times.
    other = (now != EOT + 1) & (now != then)
    assert other.mean() == pytest.approx(0.1 * 255 / 256, abs=0.01)
    assert set(now[other].tolist()) == set(range(EOT)), "any token but the end of a text"


def test_masks_are_a_function_of_the_place_and_the_stream() -> None:
    tokens = np.random.default_rng(0).integers(0, EOT, (1, 400)).astype(np.int32).repeat(3, axis=0)
    counted = np.ones(tokens.shape, dtype=np.float32)
    places = np.array([0, 400, 800])
    inputs, _, chosen = applied(masks(), tokens, counted, places)
    for row in range(3):
        alone = applied(masks(), tokens[row : row + 1], counted[:1], places[row : row + 1])
        assert (alone.inputs[0] == inputs[row]).all()
        assert (alone.counted[0] == chosen[row]).all()
    assert (chosen[0] != chosen[1]).any(), "the same text in another epoch has other masks"
    assert (chosen[1] != chosen[2]).any()
    assert (applied(masks(stream=2), tokens, counted, places).counted != chosen).any()
    # Independent choices agree on 0.15² + 0.85² of the tokens.
    assert (chosen[0] == chosen[1]).mean() == pytest.approx(0.745, abs=0.11)


def words_of(text: str) -> list[str]:
    """By scanning its characters; ideographs and whatever is no letter or digit stand alone."""
    found: list[str] = []
    for character in text:
        of_word = (character.isalnum() or character == "_") and not "\u4e00" <= character <= "\u9fff"
        if of_word and found and found[-1][-1] != "\0":
            found[-1] += character
        else:
            found.append(character if of_word else f"{character}\0")
    return [word.removesuffix("\0") for word in found]


def test_words_are_masked_whole(store: TokenStore) -> None:
    edges = word_edges(load_tokenizer(store.path))
    text = "The cat_2, sat on  a mat. don't (x1=y22)"
    ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)[None].repeat(300, axis=0)
    chosen = applied(masks(0.3, edges=edges), ids, np.ones(ids.shape, dtype=np.float32), 100 * np.arange(300)).counted
    first, shares = 0, []
    for word in words_of(text):
        part = chosen[:, first : first + len(word)]
        assert (part == part[:, :1]).all(), word
        shares.append(part[:, 0].mean())
        first += len(word)
    assert first == len(text)
    assert len(shares) == 24
    assert np.mean(shares) == pytest.approx(0.3, abs=0.04)
    single = applied(masks(0.3), ids, np.ones(ids.shape, dtype=np.float32), 100 * np.arange(300)).counted
    assert (single[:, 0] != single[:, 1]).any(), "without words each token is chosen by itself"


def test_tokens_of_several_characters_and_parts_of_characters_are_of_words() -> None:
    """A vocabulary as of byte pairs: pieces with a space before them begin a word, others go on with one."""
    pieces = [b" the", b"the", b"se", b", ", b"\xe5", b"\x8c", b"\x97", b" ", b"1a", b"!", "北".encode(), b"a"]
    singles = [bytes([byte]) for byte in range(256) if bytes([byte]) not in pieces]
    tokenizer = TiktokenTokenizer(
        name="pieces",
        pat_str=r"(?s:.+)",
        mergeable_ranks={piece: number for number, piece in enumerate([*pieces, *singles])},
        special_tokens={"<|endoftext|>": 999},
    )
    edges = word_edges(tokenizer)
    #      the se  ,   the se  1a  !  e5 8c 97  北  se EOT se
    row = [0, 2, 3, 1, 2, 8, 9, 4, 5, 6, 10, 2, 999, 2]
    starts = edges.word_starts(np.array([row], dtype=np.int32))
    assert starts.tolist() == [[0, 0, 2, 3, 3, 3, 6, 7, 7, 7, 10, 11, 12, 13]]


def loader(store: TokenStore, targets: Masks | None, **changes: Any) -> TokenLoader:
    arguments: dict[str, Any] = {"sequence_length": LENGTH, "global_batch_size": 8, "micro_batch_size": 2, "seed": 3}
    return TokenLoader(store, targets=targets, **(arguments | changes))


def joined(parts: list[list[Batch]], name: str, sequence: int) -> torch.Tensor:
    """Of the batches of data ranks × sequence ranks, in that order, the whole step's rows."""
    rows = [
        torch.cat([getattr(batch, name) for batch in of_row], dim=1)
        for first in range(0, len(parts), sequence)
        for of_row in zip(*parts[first : first + sequence], strict=True)
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("packing", ["concat", "whole"])
def test_every_layout_and_a_loader_that_resumes_has_the_same_masks(store: TokenStore, packing: str) -> None:
    targets = Masked(MaskedConfig(whole_word_mask=True, mlm_probability=0.3)).targets(store, validation=False)
    alone = loader(store, targets, packing=packing)
    steps = [alone.next_step() for _ in range(5)]
    tokens = alone.step_tokens.after(3)
    state = {**alone.state_dict(), "tokens": tokens, "position": tokens}
    plain = loader(store, None, packing=packing)
    for data, sequence in ((1, 2), (2, 1), (4, 2)):
        ranks = [
            loader(
                store,
                targets,
                packing=packing,
                layout=LoaderLayout(data_rank=d, data_size=data, sequence_rank=s, sequence_size=sequence),
            )
            for d in range(data)
            for s in range(sequence)
        ]
        for rank in ranks:
            rank.load_state_dict(state)
        found = [rank.next_step() for rank in ranks]
        # Micro-batches go round the data ranks.
        order = [m * data + d for d in range(data) for m in range(4 // data)]
        for name in ("tokens", "labels", "loss_mask", "positions"):
            expected = torch.cat([getattr(steps[3][number], name) for number in order])
            assert torch.equal(joined(found, name, sequence), expected), (name, data, sequence)
        for number, rank in enumerate(found):
            whole = found[number - number % sequence : number - number % sequence + sequence]
            for place, batch in enumerate(rank):
                behind = [torch.empty(2, 0), *(one[place].positions for one in whole[number % sequence + 1 :])]
                # Up to the first token behind that begins a document: its position is 0.
                in_document = (torch.cat(behind, dim=1) > 0).long().cumprod(dim=1)
                assert torch.equal(batch.tokens_after, in_document.sum(dim=1)), (number, place)
    counts = []
    for made, batch in zip(steps[0], plain.next_step(), strict=True):
        # Labels are the text, and what the source's loss mask excludes is never predicted.
        assert torch.equal(made.labels, batch.tokens)
        assert torch.equal(made.positions, batch.positions)
        allowed = torch.zeros_like(batch.loss_mask)
        # The mask of a token is that of the label before it.
        allowed[:, 1:] = batch.loss_mask[:, :-1]
        allowed[:, 0] = 1
        assert not made.loss_mask[(allowed == 0) | (batch.tokens == EOT)].any()
        assert torch.equal(made.tokens[made.loss_mask == 0], batch.tokens[made.loss_mask == 0])
        counts.append(made.loss_mask.sum())
    assert sum(counts) > 5


def test_masks_of_validation_are_always_the_same(store: TokenStore) -> None:
    def batches(share: float | None, seed: int, **layout: int) -> list[Batch]:
        task = Masked(MaskedConfig(mlm_probability=0.5, validation_mlm_probability=share, seed=seed))
        return list(
            validation_batches(
                store.source("text-validation"),
                sequence_length=LENGTH,
                num_sequences=9,
                micro_batch_size=2,
                layout=LoaderLayout(**layout),
                targets=task.targets(store, validation=True),
            )
        )

    first, other = batches(0.2, 0), batches(0.2, 7)
    assert len(first) == 5
    for one, two in zip(first, other, strict=True):
        assert torch.equal(one.tokens, two.tokens)
        assert torch.equal(one.loss_mask, two.loss_mask)
    halves = [batches(0.2, 0, sequence_rank=rank, sequence_size=2) for rank in range(2)]
    assert torch.equal(joined(halves, "tokens", 2), torch.cat([batch.tokens for batch in first]))
    counted = [sum(float(batch.loss_mask.sum()) for batch in batches(share, 0)) for share in (0.2, None)]
    assert 1.5 * counted[0] < counted[1], "the share of training, unless there is one for validation"
    # The last batch has a row beyond the ninth sequence: it counts for nothing.
    assert not first[-1].loss_mask[1].any()


def test_a_resumed_run_has_the_masks_of_before(store: TokenStore) -> None:
    before = loader(store, masks(0.3))
    with pytest.raises(UserError, match=r"task: masked tokens 0\.3 .* before, masked tokens 0\.2 .* now"):
        loader(store, masks(0.2)).load_state_dict(before.state_dict())
    with pytest.raises(UserError, match=r"task: masked tokens .* before, None now"):
        loader(store, None).load_state_dict(before.state_dict())
    assert "task" not in loader(store, None).fingerprint(), "earlier causal runs have none"


def test_what_a_store_must_have(tmp_path: Path, store: TokenStore, tiny_run: Path) -> None:
    model = load(tiny_run).model
    Masked(MaskedConfig(whole_word_mask=True)).check_store(model, store, ["text"])
    small = ModelConfig.model_validate({**model.model_dump(), "vocab_size": EOT + 1})
    with pytest.raises(UserError, match=r"model.vocab_size = 257 leaves no id for the mask .* use at least 258"):
        Masked(MaskedConfig()).check_store(small, store, ["text"])
    with StoreWriter(tmp_path / "empty", load_tokenizer(store.path)) as writer:
        for name, length in (("text", 3), ("nothing", 0)):
            writer.source(name).append(np.zeros(length, dtype=np.uint32), num_bytes=length)
        writer.finish({})
    with pytest.raises(UserError, match=r"empty: the documents of source nothing have no text to mask"):
        Masked(MaskedConfig()).check_store(model, TokenStore(tmp_path / "empty"), ["text", "nothing"])
