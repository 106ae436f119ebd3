"""Common beginnings of prompts: run once, and kept until the last prompt with this beginning."""

from collections.abc import Iterator, Sequence
from itertools import takewhile

from lightscale.evaluation.inference.documents import Documents
from lightscale.evaluation.inference.packing import ScoredDocument, TreeNode, forest, order
from lightscale.evaluation.inference.requests import Ids
from lightscale.models.language_model import LanguageModel


class SharedPrefixes:
    """The prefixes that ``prompts`` share, as a tree; the states of one path through it are kept.

    Args:
        model: in evaluation mode, with all layers on this rank.
        prompts: token ids of each; at least the last of them is left to be read behind a prefix.
        least_shared: tokens that prompts must have in common for them to be run once; None: nothing is shared.
    """

    def __init__(self, model: LanguageModel, prompts: Sequence[Ids], *, least_shared: int | None) -> None:
        self._model = model
        documents = [ScoredDocument(ids, len(ids)) for ids in prompts]
        # (its number, the prefixes behind one another that it begins with), of each prompt.
        found: list[tuple[int, list[TreeNode]]] = []
        for root in forest(documents, order(documents), least_shared=least_shared):
            found += _paths(root, [])
        # Those that share nothing stay in their order; those that begin alike follow one another.
        self.order = [number for number, _ in sorted(found, key=lambda one: -1 if one[1] else one[0])]
        self._paths = dict(found)
        self._kept: list[tuple[TreeNode, Documents]] = []
        self.run_tokens = 0
        """Tokens of prefixes that have passed through the model."""

    def behind(self, number: int) -> Documents | None:
        """One document: the shared beginning of prompt ``number``; None: it shares no tokens.

        In the order ``self.order`` every prefix is run once.
        """
        path = self._paths[number]
        together = takewhile(lambda pair: pair[0][0] is pair[1], zip(self._kept, path, strict=False))
        del self._kept[len(list(together)) :]
        for node in path[len(self._kept) :]:
            documents, ids = Documents(self._model), node.inputs.tolist()
            if self._kept:
                documents.begin_behind(self._kept[-1][1], [ids], room=0)
            else:
                documents.begin([ids], room=0)
            self._kept.append((node, documents))
            self.run_tokens += documents.run_tokens
        return self._kept[-1][1] if path else None


def _paths(node: TreeNode, above: list[TreeNode]) -> Iterator[tuple[int, list[TreeNode]]]:
    if not node.children:
        yield node.number, above
    for child in node.children:
        yield from _paths(child, [*above, node])
