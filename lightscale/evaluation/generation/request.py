"""The request of ``lightscale generate``, found and checked without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import ChosenRun
from lightscale.evaluation.generation.prompt_file import PromptText


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Texts of one run."""

    chosen: ChosenRun
    prompts: Sequence[PromptText]
    """One of "lines": how the lines are continued."""
    kind: Literal["one", "file", "lines"]
    """One text, those of a file, or a text for each line of stdin."""
    context: int | None
    """Longest prompt in tokens; None: any."""
    batch: int
    as_json: bool

    def check(self, prompt: PromptText) -> None:
        """Raises UserError for a prompt that cannot be encoded, or is longer than the model accepts."""
        length = self._num_tokens(prompt)
        if self.context is not None and length > self.context:
            raise UserError(
                f"{prompt.origin}: {length:,} tokens exceed the context of {self.chosen.directory.path}, "
                f"{self.context:,} tokens; use a shorter prompt, a run trained on longer sequences, or "
                f"--context {length} to generate anyway"
            )

    @property
    def goes_beyond(self) -> bool:
        """Whether a text may become longer than the context."""
        if self.context is None:
            return False
        return any(self._num_tokens(prompt) + prompt.max_tokens > self.context for prompt in self.prompts)

    def _num_tokens(self, prompt: PromptText) -> int:
        return len(prompt.encoded(self.chosen.tokenizer).ids)
