"""LAMBADA: the last word of a passage that only the whole passage tells."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import Field

from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.errors import UserError, shortened
from lightscale.evaluation.inference.requests import Answer, Encoder, Likelihood, Request
from lightscale.evaluation.task import Score, Scores, Task, TaskSettings
from lightscale.evaluation.texts import find_files, read_file


class LambadaSettings(TaskSettings):
    """Where the passages are."""

    paths: list[str] = Field(min_length=1)
    """jsonl or parquet files, relative to the task file."""
    text_field: str = "text"
    """Of the passages."""


class Lambada(Task):
    """Perplexity and accuracy of the whole last word, as lm-eval's `lambada_openai` has them."""

    Settings = LambadaSettings
    settings: LambadaSettings

    def __init__(self, settings: LambadaSettings, folder: Path) -> None:
        super().__init__(settings, folder)
        self._hashes: dict[str, str] = {}

    def check(self, tokenizer: Tokenizer) -> None:
        """The files are there."""
        find_files(self.settings.paths, self.folder)

    def requests(self, encoder: Encoder) -> Sequence[Request]:
        """One for each passage."""
        requests: list[Request] = []
        for path in find_files(self.settings.paths, self.folder):
            file = read_file(path, columns=[self.settings.text_field])
            self._hashes[path.name] = f"xxh3-128:{file.xxh3_128}"
            for record in file.documents:
                passage = record[self.settings.text_field].rstrip()
                context, space, word = passage.rpartition(" ")
                if not space or not context.strip():
                    raise UserError(f"{path}: a passage must have several words, not {shortened(repr(passage), 60)}")
                requests.append(encoder.log_likelihood(context, f" {word}"))
        return requests[: self.settings.limit]

    def data_hashes(self) -> dict[str, str]:
        """Of each file."""
        return dict(self._hashes)

    def score(self, answers: Sequence[Answer]) -> Scores:
        """Over the passages."""
        likelihoods = [answer for answer in answers if isinstance(answer, Likelihood)]
        nats = np.array([-answer.log_probability for answer in likelihoods])
        right = np.array([answer.is_greedy for answer in likelihoods], dtype=float)
        perplexity = math.exp(min(float(nats.mean()), 700))
        error = _mean_error(nats)
        return Scores(
            scores={
                "perplexity": Score(value=perplexity, standard_error=None if error is None else perplexity * error),
                "accuracy": Score(value=float(right.mean()), standard_error=_mean_error(right)),
            },
            details={"passages": len(likelihoods)},
        )

    def definitions(self) -> dict[str, str]:
        """Of the scores."""
        return {
            "perplexity": "exp of the mean over passages of -log probability of the whole last word",
            "accuracy": "share of passages whose last word is the most probable one, token by token",
        }


def _mean_error(values: np.ndarray) -> float | None:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
