"""``lightscale generate`` behind its checks: the model on its ranks, and texts as they are shown."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from lightscale.errors import UserError, counted
from lightscale.evaluation.generation.prompt_file import PromptText
from lightscale.evaluation.generation.request import GenerationRequest
from lightscale.evaluation.inference.generate import Continuation, TextGenerator, in_order
from lightscale.evaluation.inference.prompts import seed_of
from lightscale.evaluation.model import LoadedModel, mesh_of, restore
from lightscale.evaluation.model_at_work import ModelAtWork
from lightscale.output.stdin_lines import stdin_lines
from lightscale.parallel.mesh import Mesh

Record = dict[str, Any]


def write(asked: GenerationRequest) -> None:
    """Generate and print the texts that ``asked`` describes on stdout of rank 0, and their costs on its stderr.

    Called by every rank with torchrun's variables in the environment, or without them by one process.
    """
    with mesh_of(asked.chosen.config) as mesh:
        Writer(asked, restore(asked.chosen, mesh), mesh).write()


class Writer(ModelAtWork):
    """A model and its request; collective over the ranks of ``mesh``."""

    def __init__(self, asked: GenerationRequest, loaded: LoadedModel, mesh: Mesh) -> None:
        super().__init__(asked.chosen, loaded, mesh)
        self.asked = asked
        self._generator = TextGenerator(loaded.model, loaded.tokenizer, batch=asked.batch, advance=self.advance)

    def write(self) -> None:
        """See the function."""
        match self.asked.kind:
            case "one":
                self._one(self.asked.prompts[0])
            case "file":
                self._file()
            case "lines":
                self._lines()

    def _one(self, prompt: PromptText) -> None:
        """Continue one text, and show it as it comes."""
        started_s = time.perf_counter()
        if not self.asked.as_json:
            self._show(prompt.text)
        for written, part in self._generator.write([prompt.encoded(self.loaded.tokenizer)]):
            one = written
            if not self.asked.as_json:
                self._show(part)
        if self.asked.as_json:
            self._show_record(self._record(prompt, one) | _timings(one, started_s))
        else:
            self._show("\n")
            self._say(f"{_summary(one, started_s)}, from {self.loaded.checkpoint}")

    def _file(self) -> None:
        """Continue the texts of a file, and show each when it and those before it are complete."""
        started_s, num_tokens = time.perf_counter(), 0
        total = len(self.asked.prompts)
        for number, record in enumerate(self._records(), start=1):
            num_tokens += len(record["tokens"])
            if self.asked.as_json:
                self._show_record(record)
            else:
                self._show(f"--- {number} of {total} ---\n{record['prompt']}{record['text']}\n")
        took_s = time.perf_counter() - started_s
        speed = f"{num_tokens / took_s:.0f} tokens/s"
        tokens = f"{num_tokens:,} tokens in {took_s:.2f} s ({speed})"
        self._say(f"{counted(total, 'text')}, {tokens}, from {self.loaded.checkpoint}")

    def _records(self) -> Iterator[Record]:
        """Of the prompts in their order, on every rank; as they are found where no data ranks share them."""
        mesh, prompts = self.mesh, self.asked.prompts
        own = prompts[mesh.data_rank :: mesh.data]
        written = in_order(self._generator, [prompt.encoded(self.loaded.tokenizer) for prompt in own])
        found = (self._record(prompt, one) for prompt, one in zip(own, written, strict=True))
        if mesh.data == 1:
            yield from found
            return
        every: list[Any] = [None] * mesh.world_size
        dist.all_gather_object(every, (mesh.data_rank, list(found)), group=mesh.control)
        # Tensor ranks have equal ones.
        of_data_rank = dict(every)
        yield from (of_data_rank[number % mesh.data][number // mesh.data] for number in range(len(prompts)))

    def _lines(self) -> None:
        """Continue each line of stdin; in a terminal Ctrl-C ends an answer, and Ctrl-D all."""
        (default,) = self.asked.prompts
        is_terminal = sys.stdin.isatty()
        for number, line in enumerate(stdin_lines(is_terminal=is_terminal)):
            sampling = replace(default.sampling, seed=seed_of(default.sampling.seed, number))
            prompt = replace(default, text=line, sampling=sampling, origin=f"line {number + 1}")
            try:
                self.asked.check(prompt)
                self._one(prompt)
            except UserError as error:
                if not is_terminal:
                    raise
                self._say(f"error: {error}")
            except KeyboardInterrupt:
                if not is_terminal:
                    raise
                self._show("\n")

    def _record(self, prompt: PromptText, one: Continuation) -> Record:
        """What is said of a text: all that is needed to write it again."""
        return {
            **({} if prompt.id is None else {"id": prompt.id}),
            "prompt": prompt.text,
            "text": one.text,
            "tokens": one.ids,
            "end_of_text": one.ended == "end_of_text",
            "stop": one.stopped_by,
            "seed": prompt.sampling.seed,
            "checkpoint": str(self.loaded.checkpoint),
            "step": self.loaded.step,
        }

    def _show(self, text: str) -> None:
        if self._is_main:
            sys.stdout.write(text)
            sys.stdout.flush()

    def _show_record(self, record: Record) -> None:
        self._show(json.dumps(record) + "\n")


def _tokens_per_s(times_s: Sequence[float]) -> float | None:
    """Of the recurrent form alone, without the prompt; None below two tokens."""
    return (len(times_s) - 1) / (times_s[-1] - times_s[0]) if len(times_s) > 1 else None


def _timings(one: Continuation, started_s: float) -> Record:
    first_s = one.times_s[0] - started_s if one.times_s else None
    return {"first_token_s": first_s, "tokens_per_s": _tokens_per_s(one.times_s)}


def _summary(one: Continuation, started_s: float) -> str:
    """For people."""
    if not one.ids:
        return "the model ended the text immediately"
    count = f"{counted(len(one.ids), 'token')} in {one.times_s[-1] - started_s:.2f} s"
    speed = _tokens_per_s(one.times_s)
    return count if speed is None else f"{count} ({speed:.0f} tokens/s after the prompt)"
