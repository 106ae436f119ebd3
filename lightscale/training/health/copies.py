"""Weights that several ranks hold copies of: compared at every start, parameter by parameter.

Data and sequence ranks hold the same weights. Tensor ranks hold copies of weights that are not split, such as norms.
Pipeline stages hold copies of shared weights, such as a tied embedding. Each rank draws or reads its own copy, and each
optimizer adds the same steps to it. Copies that begin apart therefore stay apart without an error.
"""

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.parallel.agreement import Agreement
from lightscale.parallel.engine import Engine
from lightscale.parallel.initialization import named_parameters

# Bytes of a word. Sums of long words are many times faster on CPUs, where shorter ones are converted first.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_TIED = "embedding.word_embeddings.weight"


@dataclass(frozen=True, kw_only=True)
class HeldWeight:
    """A parameter of this rank, or its part of one."""

    name: str
    """The same for all copies: the global name, and the tensor rank of a split parameter."""
    weight: Tensor
    is_whole: bool
    """Whether tensor ranks do not split it."""
    is_on_stages: bool
    """Whether several pipeline stages hold it."""


@dataclass(frozen=True, kw_only=True)
class DifferingCopies:
    """Copies of one weight that are not the same."""

    name: str
    ranks: tuple[tuple[int, ...], ...]
    """Ranks in groups that agree, the largest group first."""

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks that differ from the most; all of them where no group is the largest."""
        first, second, *_ = map(len, self.ranks)
        which = self.ranks[1:] if first > second else self.ranks
        return tuple(sorted({rank for ranks in which for rank in ranks}))


def held_weights(engine: Engine) -> Iterator[HeldWeight]:
    """All that this rank holds."""
    tensor_rank = engine.mesh.groups.tp.rank()
    for chunk in engine.chunks:
        for name, parameter in named_parameters(chunk):
            # Megatron's marks: of parameters that tensor ranks split, and of those that several stages hold.
            is_whole = engine.mesh.tensor == 1 or not getattr(parameter, "tensor_model_parallel", False)
            yield HeldWeight(
                name=name if is_whole else f"{name} of tensor rank {tensor_rank}",
                weight=parameter.detach(),
                is_whole=is_whole,
                is_on_stages=getattr(parameter, "shared_embedding", False),
            )


def check_copies(engine: Engine) -> None:
    """Refuse weights that differ between ranks after drawing or reading. Collective.

    Raises:
        UserError: on all ranks, with the parameter, the ranks and their hosts.
    """
    differing = differing_copies(engine)
    if not differing:
        return
    hosts = Agreement(engine.mesh.control).on_all(socket.gethostname)
    first = differing[0]
    held = " and ".join(places(ranks, hosts) for ranks in first.ranks)
    others = f", and those of {len(differing) - 1} other parameters" if len(differing) > 1 else ""
    if first.name.startswith(_TIED) and engine.mesh.pipeline > 1 and len(differing) <= engine.mesh.tensor:
        what = (
            "The first and the last stage would train two different models, and a checkpoint stores only one. Start "
            "with parallel.pipeline=1, or start a new run; an old checkpoint written on several stages with "
            "model.embedding_std can have different copies"
        )
    else:
        what = (
            "All ranks initialize or read the same numbers, so one of these hosts computes or stores wrong values: "
            "compare the hosts with lightscale doctor (processors, versions of torch), and exclude the host that "
            "differs"
        )
    raise UserError(f"the copies of {first.name} differ{others}: {held} hold different numbers. {what}")


def differing_copies(engine: Engine) -> list[DifferingCopies]:
    """Of all weights of all ranks; the same on all. Collective."""

    def own() -> list[tuple[str, int]]:
        return [(held.name, int(checksums(held.weight.reshape(1, -1)))) for held in held_weights(engine)]

    holders: dict[str, dict[int, list[int]]] = {}
    for rank, weights in enumerate(Agreement(engine.mesh.control).on_all(own)):
        for name, checksum in weights:
            ranks = holders.setdefault(name, {}).setdefault(checksum, [])
            # Virtual stages of one rank may hold two.
            if ranks[-1:] != [rank]:
                ranks.append(rank)
    return [
        DifferingCopies(name=name, ranks=tuple(map(tuple, sorted(found.values(), key=len, reverse=True))))
        for name, found in holders.items()
        if len(found) > 1
    ]


def places(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """The ranks with their hosts, for messages."""
    return " and ".join(f"rank {rank} ({hosts[rank]})" for rank in ranks)


def flat_checksum(flat: Tensor) -> Tensor:
    """() sum of the elements of a (n,) tensor as integers of their size, modulo 2^64; it may begin at any address."""
    return flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)


def checksums(rows: Tensor) -> Tensor:
    """(rows,) sums of the words in each row of a (rows, n) tensor; words of 8 bytes where they fit."""
    num_bytes = rows.size(1) * rows.element_size()
    word = _INTEGERS[rows.element_size() if num_bytes % 8 else 8]
    return rows.view(word).sum(dim=1, dtype=torch.int64)
