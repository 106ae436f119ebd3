"""Several token stores read as one: `[data] stores`.

A source of the store NAME has the name NAME/SOURCE, which no source of a single store can have. All other readers work
as with one store: order, resuming, checks and names of documents do not depend on the number of directories.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightscale.config.schema import DataConfig
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError


class SeveralStores(TokenStore):
    """The stores of ``paths``, by name, as one store; ``path`` is that of the first, for its tokenizer."""

    def __init__(self, paths: Mapping[str, Path], *, weights: Mapping[str, float] | None = None) -> None:
        """``weights``: share of each store in the samples, in any unit; none: every token counts the same.

        In its store each source keeps the share that it has there alone. ``UserError`` where a store is missing or
        damaged, and where two have other tokenizers, other names for the classes of an array, or the same content.
        """
        stores = {name: TokenStore(path) for name, path in paths.items()}
        self.parts = tuple(stores.values())
        first = self.parts[0]
        self.path, self.tokenizer, self.image_shape = first.path, first.tokenizer, first.image_shape
        self.title = ", ".join(f"{name} ({store.path})" for name, store in stores.items())
        self.classes = {}
        for name, store in stores.items():
            self._check_alike(name, store, next(iter(stores)))
            self.classes |= store.classes
        self.format_version = min(store.format_version for store in self.parts)
        self.is_checked = all(store.is_checked for store in self.parts)
        self.sources = {}
        for name, store in stores.items():
            for source in store.sources.values():
                # What a source is called decides the order of its windows: two stores may have sources of one name.
                source.name = f"{name}/{source.name}"
                self.sources[source.name] = source
        self.weights = _weights(stores, weights)
        _check_different(stores)

    def report(self) -> dict[str, Any]:
        """Raises ``UserError``: counts of several preparations, such as entropies, do not add up."""
        raise UserError(f"{self.title}: each store has its own report; use one store")

    def _check_alike(self, name: str, store: TokenStore, first_name: str) -> None:
        if store.tokenizer.sha256 != self.tokenizer.sha256:
            one, other = self.tokenizer, store.tokenizer
            raise UserError(
                f"data.stores.{name} = {store.path} was written with another tokenizer ({other.name}, "
                f"{other.vocab_size} tokens, {other.sha256[:8]}) than data.stores.{first_name} = {self.path} "
                f"({one.name}, {one.vocab_size} tokens, {one.sha256[:8]}); prepare all with the same tokenizer"
            )
        if (store.image_shape, store.has_latents) != (self.image_shape, self.has_latents):
            raise UserError(
                f"data.stores.{name} = {store.path} has {_content(store)}, and data.stores.{first_name} = {self.path} "
                f"has {_content(self)}; prepare all with the same --images or --latents"
            )
        for array, names in store.classes.items():
            if (before := self.classes.get(array, names)) != names:
                raise UserError(
                    f"data.stores.{name} = {store.path}: number {_first_other(before, names)} of {array} is a "
                    f"different class than in the stores before; {same_classes(store)}"
                )


def same_classes(store: TokenStore) -> str:
    """The remedy for stores like ``store`` whose classes have other numbers."""
    if store.image_shape is not None:
        return "prepare all images as one store"
    return "prepare all with the same `classes` in their corpus files"


def _content(store: TokenStore) -> str:
    shape = store.image_shape
    kind = "latents" if store.has_latents else "images"
    return "texts" if shape is None else f"{kind} of {' x '.join(map(str, shape))} (height x width x channels)"


def open_stores(data: DataConfig) -> TokenStore:
    """The training data of a run: its store, or its stores as one."""
    if data.store is not None:
        return TokenStore(data.store)
    weights = {name: store.weight for name, store in data.stores.items() if store.weight is not None}
    return SeveralStores({name: store.path for name, store in data.stores.items()}, weights=weights or None)


def _check_different(stores: Mapping[str, TokenStore]) -> None:
    """One store twice would have its documents twice before all were read."""
    seen: dict[str, str] = {}
    for name, store in stores.items():
        same = seen.setdefault(store.fingerprint(), name)
        if same != name:
            raise UserError(
                f"data.stores.{name} = {store.path} has the same content as data.stores.{same} = {stores[same].path}; "
                f"list it once, with a larger weight"
            )


def _weights(stores: Mapping[str, TokenStore], weights: Mapping[str, float] | None) -> dict[str, float]:
    """Of every training source of all stores, by its full name."""
    found: dict[str, float] = {}
    for store_name, store in stores.items():
        own = store.training_weights()
        total = math.fsum(own.values())
        num_tokens = sum(source.num_tokens for source in store.sources.values() if source.split == "train")
        whole = float(num_tokens) if weights is None else weights[store_name]
        found |= {f"{store_name}/{name}": whole * (weight / total) for name, weight in own.items()}
    return found


def _first_other(before: list[str], names: list[str]) -> int:
    pairs = enumerate(zip(before, names, strict=False))
    return next((number for number, (one, other) in pairs if one != other), min(len(before), len(names)))
