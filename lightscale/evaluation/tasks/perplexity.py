"""Perplexity of texts: per word, token and byte, by position, and at several lengths of context."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.errors import UserError
from lightscale.evaluation.inference.requests import (
    Answer,
    Encoder,
    Ids,
    Request,
    RollingLogLikelihood,
    TokenLikelihoods,
    windows,
)
from lightscale.evaluation.task import Score, Scores, Task, TaskSettings
from lightscale.evaluation.texts import check_store, find_files, read_file

_Tokens = Annotated[int, Field(ge=1, le=2**31)]

DEFINITIONS = {
    "word_perplexity": "exp(nats / words); words are separated by white space in the original text",
    "token_perplexity": "exp(nats / tokens of the run's tokenizer): not comparable between tokenizers",
    "byte_perplexity": "exp(nats / bytes of the text in UTF-8)",
    "bits_per_byte": "nats / (bytes ln 2)",
    "nats_per_token": "mean of -log probability over all tokens: the training loss where every token counts",
}
"""Nats are -log probability, summed over the texts; the end-of-text token that begins each weighs nothing."""


class PerplexitySettings(TaskSettings):
    """A task file with `kind = "perplexity"`: either `paths`, or `store` and `source`."""

    paths: list[str] = Field(default=[])
    """Files and patterns, relative to the task file: text (one document each), .jsonl, .jsonl.gz, .parquet."""
    text_field: str = "text"
    """Text field of jsonl objects, text column of parquet files."""
    store: Path | None = Field(default=None, strict=False)
    """A token store, relative to the task file, prepared with the run's tokenizer."""
    source: str | None = None
    """Source of the store, such as "wiki-validation"."""
    window: _Tokens | None = None
    """Tokens per window, each evaluated separately; none: one pass over each document of any length (stateful)."""
    stride: _Tokens | None = None
    """Tokens between the starts of consecutive windows, and scored per window; none: the window."""
    lengths: list[_Tokens] = Field(default=[])
    """Also compute the perplexity in windows of these lengths, over documents that are long enough."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.paths) == (self.store is not None):
            raise ValueError("set either paths or store, not both")
        if (self.store is None) != (self.source is None):
            raise ValueError("set store and source together: source is the name of a source in the store")
        if self.stride is not None and (self.window is None or self.stride > self.window):
            raise ValueError(f"stride = {self.stride}: set window, and a stride of at most window")
        if sorted(set(self.lengths)) != self.lengths:
            raise ValueError(f"lengths = {self.lengths}: must rise")
        return self


class Text(NamedTuple):
    """A document of the task."""

    ids: Ids
    """With the end-of-text token in front."""
    num_words: int
    num_bytes: int


class Perplexity(Task):
    """See ``PerplexitySettings``."""

    Settings = PerplexitySettings
    settings: PerplexitySettings

    def __init__(self, settings: PerplexitySettings, folder: Path) -> None:
        super().__init__(settings, folder)
        self._texts: list[Text] = []
        self._hashes: dict[str, str] = {}
        self._asked: list[tuple[int | None, int]] = []
        """Of each request: its length of ``lengths``, None for the main pass; and the document."""

    def check(self, tokenizer: Tokenizer) -> None:
        """Files are there, or the store has the source and the run's tokenizer."""
        if self.settings.store is not None:
            assert self.settings.source is not None
            check_store(self.folder / self.settings.store, self.settings.source, tokenizer)
        else:
            find_files(self.settings.paths, self.folder)

    def requests(self, encoder: Encoder) -> Sequence[Request]:
        """The main pass over each document, then those of ``lengths``."""
        settings = self.settings
        texts = self._from_store(encoder) if settings.store is not None else self._from_files(encoder)
        self._texts = []
        for text in texts:
            if len(text.ids) > 1:
                self._texts.append(text)
            if settings.limit is not None and len(self._texts) == settings.limit:
                break
        if not self._texts:
            raise UserError(f"{self.name}: the texts have no token")
        self._asked = [(None, number) for number in range(len(self._texts))]
        requests: list[Request] = [
            RollingLogLikelihood(ids=text.ids, window=settings.window, stride=settings.stride) for text in self._texts
        ]
        longest = max(len(text.ids) - 1 for text in self._texts)
        for length in settings.lengths:
            if length > longest:
                raise UserError(f"{self.name}: lengths has {length}, but the longest document has {longest} tokens")
            for number, text in enumerate(self._texts):
                # Whole windows only: what is behind the last one has seen less.
                whole = (len(text.ids) - 1) // length * length
                if whole:
                    self._asked.append((length, number))
                    requests.append(RollingLogLikelihood(ids=text.ids[: whole + 1], window=length))
        return requests

    def data_hashes(self) -> dict[str, str]:
        """Of each file, or of the source."""
        return dict(self._hashes)

    def num_words(self, text: str) -> int:
        """Number of words that word perplexity divides by."""
        return len(text.split())

    def records(self, path: Path, documents: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
        """(text to be fed, text whose words and bytes are counted) of each document of a file."""
        column = self.settings.text_field if path.name.endswith((".jsonl", ".jsonl.gz", ".parquet")) else "text"
        for document in documents:
            yield document[column], document[column]

    def _from_files(self, encoder: Encoder) -> Iterator[Text]:
        self._hashes = {}
        for path in find_files(self.settings.paths, self.folder):
            file = read_file(path, columns=[self.settings.text_field])
            self._hashes[path.name] = f"xxh3-128:{file.xxh3_128}"
            for text, original in self.records(path, file.documents):
                yield Text(encoder.document(text), self.num_words(original), len(original.encode()))

    def _from_store(self, encoder: Encoder) -> Iterator[Text]:
        assert self.settings.store is not None and self.settings.source is not None
        store = TokenStore(self.folder / self.settings.store)
        source = store.source(self.settings.source)
        self._hashes = {f"{store.path.name}/{source.name}": source.content_hash}
        for index in range(source.num_documents):
            ids = source.read(*source.document(index))
            text = encoder.tokenizer.decode(ids[1:])
            yield Text(ids.astype(np.int32), self.num_words(text), len(text.encode()))

    def score(self, answers: Sequence[Answer]) -> Scores:
        """Of the main pass; in the details by position and at each length."""
        main: list[NDArray[np.float64]] = []
        at_length: dict[int, list[NDArray[np.float64]]] = {}
        for (length, _), answer in zip(self._asked, answers, strict=True):
            assert isinstance(answer, TokenLikelihoods)
            (main if length is None else at_length.setdefault(length, [])).append(-answer.log_probability)
        nats = np.array([values.sum() for values in main])
        counts = {
            "words": np.array([text.num_words for text in self._texts]),
            "tokens": np.array([len(text.ids) - 1 for text in self._texts]),
            "bytes": np.array([text.num_bytes for text in self._texts]),
        }
        scores = {
            "word_perplexity": _exp(ratio(nats, counts["words"])),
            "token_perplexity": _exp(ratio(nats, counts["tokens"])),
            "byte_perplexity": _exp(ratio(nats, counts["bytes"])),
            "bits_per_byte": _scaled(ratio(nats, counts["bytes"]), 1 / math.log(2)),
            "nats_per_token": ratio(nats, counts["tokens"]),
        }
        details = {
            "documents": len(self._texts),
            **{name: int(values.sum()) for name, values in counts.items()},
            "nats": float(nats.sum()),
            "by_position": self._by_position(main),
        }
        if at_length:
            details["by_length"] = [_of_length(length, values) for length, values in sorted(at_length.items())]
        return Scores(scores=scores, details=details)

    def _by_position(self, main: Sequence[NDArray[np.float64]]) -> list[dict[str, Any]]:
        """Mean nats of the tokens that have seen so many others in their document, or in their window."""
        settings, total, count = self.settings, np.zeros(40), np.zeros(40, dtype=np.int64)
        for values in main:
            for begin, scored, end in windows(len(values), settings.window, settings.stride):
                seen = np.arange(scored - begin, end - begin)
                # Powers of two: 1, 2 to 3, 4 to 7, …
                bucket = np.log2(seen).astype(int)
                total += np.bincount(bucket, weights=values[scored - 1 : end - 1], minlength=40)
                count += np.bincount(bucket, minlength=40)
        return [
            {"first": 2**power, "last": 2 ** (power + 1) - 1, "tokens": int(number), "nats_per_token": sum_ / number}
            for power, (sum_, number) in enumerate(zip(total.tolist(), count.tolist(), strict=True))
            if number
        ]

    def definitions(self) -> dict[str, str]:
        """Of the scores."""
        return DEFINITIONS

    def plot(self, scores: Scores, path: Path) -> bool:
        """The loss by position, and in windows of each length."""
        try:
            # Optional, and slow to import.
            from matplotlib.figure import Figure  # noqa: PLC0415
        except ImportError:
            return False
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        places = scores.details["by_position"]
        middle = [math.sqrt(place["first"] * place["last"]) for place in places]
        axes.plot(middle, [place["nats_per_token"] for place in places], marker="o", label="by position")
        if lengths := scores.details.get("by_length"):
            perplexities = [one["nats_per_token"] for one in lengths]
            axes.plot([one["length"] for one in lengths], perplexities, marker="s", label="mean of windows of a length")
        axes.set_xscale("log", base=2)
        axes.set(xlabel="tokens seen", ylabel="nats per token", title=self.name)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=120, format="png")
        return True


def ratio(sums: NDArray[np.float64], counts: NDArray[np.int64]) -> Score:
    """Σ sums / Σ counts over documents, and its standard error with the documents as clusters."""
    total = counts.sum()
    if not total:
        return Score(value=None)
    value = float(sums.sum() / total)
    if len(sums) < 2:
        return Score(value=value)
    residuals = sums - value * counts
    variance = len(sums) / (len(sums) - 1) * float((residuals**2).sum()) / float(total) ** 2
    return Score(value=value, standard_error=math.sqrt(variance))


def _exp(score: Score) -> Score:
    if score.value is None:
        return score
    value = math.exp(score.value) if score.value < 700 else math.inf
    # By the derivative of exp.
    return Score(value=value, standard_error=None if score.standard_error is None else value * score.standard_error)


def _scaled(score: Score, factor: float) -> Score:
    return Score(
        value=None if score.value is None else score.value * factor,
        standard_error=None if score.standard_error is None else score.standard_error * factor,
    )


def _of_length(length: int, values: Iterable[NDArray[np.float64]]) -> dict[str, Any]:
    """The loss in windows of ``length``, and of the last half of each, which have seen the most."""
    every = np.concatenate([one.reshape(-1, length) for one in values])
    mean = float(every.mean())
    return {
        "length": length,
        "windows": len(every),
        "nats_per_token": mean,
        "token_perplexity": math.exp(min(mean, 700)),
        "nats_per_token_last_half": float(every[:, length // 2 :].mean()),
    }
