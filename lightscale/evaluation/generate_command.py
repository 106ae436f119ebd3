"""``lightscale generate``: let a trained model continue a text."""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightscale.config.arguments import path_argument, run_path
from lightscale.errors import UserError
from lightscale.files import read_regular
from lightscale.runs.run_directory import split_step

if TYPE_CHECKING:
    from lightscale.evaluation.model import LoadedModel

_MOST_PROMPT_BYTES = 2**28


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale generate``."""
    add = parser.add_argument
    add("run", metavar="RUN[@STEP]", help="the run's directory, or NAME for runs/NAME; a step (default: the newest)")
    add("--prompt", metavar="TEXT", help="text to continue (default: none, the model begins a document)")
    add("--prompt-file", type=path_argument, metavar="FILE", help="file with the text to continue, UTF-8")
    add("--step", type=int, metavar="N", help="the same as RUN@N")
    add("--tokens", type=int, default=200, metavar="N", help="tokens at most (default: %(default)s)")
    temperature = "divides the logits; 0 takes the most probable token (default: %(default)s)"
    add("--temperature", type=float, default=0.8, metavar="T", help=temperature)
    add("--top-k", type=int, metavar="K", help="only the K most probable tokens (default: all)")
    add("--top-p", type=float, metavar="P", help="only the most probable tokens that together have P (default: all)")
    add("--seed", type=int, default=0, help="seed of the random choices (default: %(default)s)")
    add("--store", type=path_argument, metavar="PATH", help="token store with the tokenizer (default: the run's own)")
    add("--json", action="store_true", help="print the text and its timings as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation on stdout, token by token, and what it took on stderr."""
    prompt = _read_prompt(args)
    if args.tokens < 1:
        raise UserError(f"--tokens {args.tokens}: must be at least 1")
    run, step = _chosen(args)
    print("loading PyTorch and Megatron …", file=sys.stderr, flush=True)
    # Behind the arguments, as they import torch and Megatron.
    from lightscale.evaluation.generate import Sampling, decode_stream, encode_prompt, generate  # noqa: PLC0415
    from lightscale.evaluation.model import load_model  # noqa: PLC0415

    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    with load_model(run, step=step, store=args.store) as loaded:
        for reason in loaded.refused:
            print(f"skipped a damaged checkpoint: {reason}", file=sys.stderr)
        tokenizer = loaded.tokenizer
        prompt_ids = encode_prompt(tokenizer, prompt)
        timed = _Timed(generate(loaded.model, tokenizer, prompt_ids, max_tokens=args.tokens, sampling=sampling))
        parts = decode_stream(tokenizer, timed)
        if args.json:
            print(json.dumps(_record(args, loaded, prompt, "".join(parts), timed), ensure_ascii=False))
        else:
            _show(prompt, parts)
            print(f"{timed.summary()}, from {loaded.checkpoint}", file=sys.stderr)
    return 0


class _Timed:
    """Tokens as they pass, and when each came, in seconds since the first was asked for."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = tokens
        self.ids: list[int] = []
        self.times_s: list[float] = []

    def __iter__(self) -> Iterator[int]:
        started = time.perf_counter()
        for token in self._tokens:
            self.times_s.append(time.perf_counter() - started)
            self.ids.append(token)
            yield token

    @property
    def tokens_per_s(self) -> float | None:
        """Of the recurrent form alone, without the prompt; None below two tokens."""
        if len(self.ids) < 2:
            return None
        return (len(self.ids) - 1) / (self.times_s[-1] - self.times_s[0])

    def summary(self) -> str:
        """For people."""
        if not self.ids:
            return "the model ended the text at once"
        count = f"{len(self.ids)} token{'' if len(self.ids) == 1 else 's'} in {self.times_s[-1]:.2f} s"
        return count if self.tokens_per_s is None else f"{count} ({self.tokens_per_s:.0f} tokens/s after the prompt)"


def _chosen(args: argparse.Namespace) -> tuple[Path, int | None]:
    """The run's directory, and the step; none: of the newest checkpoint."""
    run, step = split_step(args.run)
    if step is not None and args.step not in (None, step):
        raise UserError(f"{args.run} and --step {args.step} both name the step; use only one of them")
    return run_path(run), args.step if step is None else step


def _read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None and args.prompt_file is not None:
        raise UserError("--prompt and --prompt-file both name the text to continue; use only one of them")
    if args.prompt_file is None:
        text, origin = args.prompt, "--prompt"
    else:
        text, origin = _read_text(args.prompt_file), f"--prompt-file {args.prompt_file}"
    if text is None:
        return ""
    if not text:
        raise UserError(f"{origin}: empty; omit the option to let the model begin a document")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{origin}: not valid UTF-8 at character {error.start}") from error
    return str(text)


def _read_text(path: Path) -> str:
    try:
        return read_regular(path, what="a prompt", most_bytes=_MOST_PROMPT_BYTES, follow_links=True).decode()
    except OSError as error:
        raise UserError(f"--prompt-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt-file {path}: not valid UTF-8 at byte {error.start}") from error


def _show(prompt: str, parts: Iterable[str]) -> None:
    sys.stdout.write(prompt)
    for part in parts:
        sys.stdout.write(part)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


def _record(args: argparse.Namespace, loaded: "LoadedModel", prompt: str, text: str, timed: _Timed) -> dict[str, Any]:
    return {
        "checkpoint": str(loaded.checkpoint),
        "step": loaded.step,
        "prompt": prompt,
        "text": text,
        "tokens": timed.ids,
        "end_of_text": len(timed.ids) < args.tokens,
        "first_token_s": timed.times_s[0] if timed.ids else None,
        "tokens_per_s": timed.tokens_per_s,
    }
