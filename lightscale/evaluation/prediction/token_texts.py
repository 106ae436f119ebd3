"""The text of a single token."""

from collections.abc import Callable

from lightscale.data_pipeline.tokenizers import Tokenizer


def token_texts(tokenizer: Tokenizer) -> Callable[[int], str]:
    """The text of a single token, with its leading space."""
    # Behind another token: some tokenizers drop the space at the beginning of a text.
    anchor = tokenizer.encode("a")
    skip = len(tokenizer.decode(anchor))
    return lambda number: tokenizer.decode([*anchor, number])[skip:]
