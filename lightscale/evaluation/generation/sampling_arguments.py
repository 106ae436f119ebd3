"""Arguments of commands that choose tokens: the fields of ``Sampling``; without torch."""

import argparse

from lightscale.evaluation.inference.prompts import Sampling


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that ``sampling_of`` reads."""
    add = parser.add_argument
    temperature = "divisor of the logits; 0: always the most probable token (default: %(default)s)"
    add("--temperature", type=float, default=0.8, metavar="T", help=temperature)
    add("--top-k", type=int, metavar="K", help="sample from the K most probable tokens (default: all)")
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the most probable tokens with total probability P (default: all)",
    )
    penalty = "above 1: reduces the probability of tokens already in the text (default: 1, none)"
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help=penalty)
    add("--seed", type=int, default=0, help="seed of the random choices (default: %(default)s)")


def sampling_of(args: argparse.Namespace) -> Sampling:
    """How tokens are chosen. Raises ``UserError`` for a value that cannot be."""
    return Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
    )
