"""How good a text is, by a linear classifier on hashed words and pairs of words, fitted on good and bad examples.

The file is safetensors: ``weights`` (2^bits,) float32 and ``bias`` (1,); the metadata name the form. Nothing in it is
executed. The score is the probability of "good": sigmoid(x · w + b), where x has 1 for every different word and pair of
a text, in the bucket of its hash, over the root of their number.
"""

import json
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import Field

from lightscale.data_pipeline.preparation.filters.judgement import FileSection, Judgement
from lightscale.errors import UserError

FORM = "lightscale linear classifier 1"
MOST_BITS = 24
_METADATA = "lightscale"
_CHINESE = "\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CHINESE}]|[^\W_{_CHINESE}]+|[^\w\s]")
_PAIR = np.uint64(0x9FB21C651E98DF25)
_SPREAD = np.uint64(0xD1342543DE82EF95)
# Of a long text the first words: a judgement does not need all, and examples of one length do not differ by it.
_MOST_WORDS = 10_000
_CACHED_WORDS = 2**16


class ClassifierFilter(FileSection):
    """Drops texts that a classifier of ``lightscale data train-classifier`` gives less than a limit."""

    path: str
    """The classifier's file."""
    min: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Drop documents with a lower probability of being good."""

    def files(self) -> list[str]:
        """See ``FileSection``."""
        _loaded(self.path)
        return [self.path]

    def with_base(self, base: Path) -> Self:
        """See ``FileSection``."""
        return self.model_copy(update={"path": str(base / Path(self.path))})

    def judge(self, text: str) -> Judgement:
        """See ``Step``."""
        weights, bias = _loaded(self.path)
        score = probability(features(text, bits=len(weights).bit_length() - 1), weights, bias)
        return Judgement(text, rule="low_score" if score < self.min else None, score=score)


def features(text: str, *, bits: int) -> NDArray[np.int64]:
    """(different,) buckets below 2^``bits`` of words and pairs in ``text``; Chinese characters and marks are words."""
    words = [_hash(word) for word in _WORD.findall(text.lower())[:_MOST_WORDS]]
    ids = np.array(words, dtype=np.uint64)
    pairs = (ids[:-1] * _PAIR + ids[1:]) * _SPREAD
    return np.unique(np.concatenate([ids, pairs]) >> np.uint64(64 - bits)).astype(np.int64)


def probability(buckets: NDArray[np.int64], weights: NDArray[np.floating[Any]], bias: float) -> float:
    """Of a text with ``features`` in ``buckets`` to be good."""
    product = float(weights[buckets].sum(dtype=np.float64)) / math.sqrt(len(buckets)) if len(buckets) else 0.0
    return 1 / (1 + math.exp(-max(min(product + bias, 500.0), -500.0)))


def fit(
    good: Sequence[NDArray[np.int64]], bad: Sequence[NDArray[np.int64]], *, bits: int, penalty: float
) -> tuple[NDArray[np.float64], float]:
    """(2^bits,) weights and the bias that minimise the loss, both classes counting the same whatever their sizes.

    The loss is the mean of the classes' mean cross entropies in nats, and penalty/2 · |w|². It is convex: L-BFGS from
    zero finds its one minimum, always the same.
    """
    from scipy.optimize import minimize  # noqa: PLC0415 - an optional package, and a second to import
    from scipy.sparse import csr_array  # noqa: PLC0415

    rows = [*good, *bad]
    starts = np.cumsum([0, *map(len, rows)])
    values = np.concatenate([np.full(len(row), 1 / math.sqrt(max(len(row), 1))) for row in rows])
    matrix = csr_array((values, np.concatenate(rows), starts), shape=(len(rows), 2**bits))
    signs = np.repeat([1.0, -1.0], [len(good), len(bad)])
    shares = np.repeat([0.5 / len(good), 0.5 / len(bad)], [len(good), len(bad)])

    def loss(parameters: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        weights = parameters[:-1]
        margins = signs * (matrix @ weights + parameters[-1])
        slopes = -shares * signs * np.exp(-np.logaddexp(0, margins))
        value = shares @ np.logaddexp(0, -margins) + penalty / 2 * weights @ weights
        return float(value), np.append(matrix.T @ slopes + penalty * weights, slopes.sum())

    found = minimize(loss, np.zeros(2**bits + 1), jac=True, method="L-BFGS-B", options={"maxiter": 1000, "gtol": 1e-7})
    return found.x[:-1], float(found.x[-1])


def save(path: Path, weights: NDArray[np.float64], bias: float, *, about: dict[str, Any]) -> None:
    """Write a classifier; ``about``: a description for people."""
    from safetensors.numpy import save_file  # noqa: PLC0415 - an optional package

    arrays = {"weights": weights.astype(np.float32), "bias": np.array([bias], dtype=np.float32)}
    # One key: safetensors may write several in any order.
    save_file(arrays, path, metadata={_METADATA: json.dumps({"form": FORM, "about": about}, sort_keys=True)})


@lru_cache(maxsize=16)
def _loaded(path: str) -> tuple[NDArray[np.float32], float]:
    try:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - an optional package
    except ImportError:
        raise UserError("filter classifier: safetensors is needed; pip install 'lightscale[corpus]'") from None
    try:
        with safe_open(path, framework="numpy") as file:
            form = _form(file.metadata() or {})
            if form != FORM:
                raise UserError(f"{path}: not a classifier of `lightscale data train-classifier` (form: {form})")
            weights, bias = file.get_tensor("weights"), file.get_tensor("bias")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot read the classifier: {error}") from error
    size = len(weights)
    if weights.ndim != 1 or bias.shape != (1,) or size & (size - 1) or not 2 <= size <= 2**MOST_BITS:
        raise UserError(f"{path}: weights of shape {weights.shape} do not fit a classifier; train it again")
    return weights, float(bias[0])


def _form(metadata: dict[str, str]) -> str | None:
    try:
        form = json.loads(metadata[_METADATA])["form"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return None
    return str(form)


@lru_cache(maxsize=_CACHED_WORDS)
def _hash(word: str) -> int:
    return xxhash.xxh3_64_intdigest(word.encode())
