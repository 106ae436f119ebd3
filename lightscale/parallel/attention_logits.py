"""The largest attention logits of a step, of all ranks together, and QK-clip, which bounds them (arXiv 2507.20534)."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightscale.kernels.attention import HeadMaxima
from lightscale.parallel.mesh import Mesh
from lightscale.parallel.model_shards import OwnedBox
from lightscale.parallel.optimizer_spec import OptimizerSpec


class AttentionLogits:
    """Of the softmax attention in ``chunks``, by layer and head, over the micro-batches of a step.

    The chunks' layers have a ``HeadMaxima`` each, as ``maxima`` of their mixer. Every method is called by all ranks.
    """

    def __init__(self, chunks: Sequence[nn.Module], mesh: Mesh) -> None:
        self._mesh = mesh
        found = [getattr(module, "maxima", None) for chunk in chunks for module in chunk.modules()]
        self._maxima = [one for one in found if isinstance(one, HeadMaxima)]
        # Stages have layers of their own, and tensor ranks heads.
        ends = [(one.layer + 1, one.first + len(one.values)) for one in self._maxima]
        shape = torch.tensor([max(of_all) for of_all in zip(*ends, strict=True)] if ends else [0, 0])
        dist.all_reduce(shape, op=dist.ReduceOp.MAX, group=mesh.control)
        self._shape: list[int] = shape.tolist()
        self._largest: Tensor | None = None

    def begin(self, *, measure: bool) -> None:
        """Before the passes of a step."""
        self._largest = None
        for one in self._maxima:
            one.begin(measure=measure)

    def largest(self) -> Tensor:
        """(layers, heads) fp32 on the host, the same on every rank; -inf of other layers, and where none was measured.

        Layers behind the last one with softmax attention are missing.
        """
        if self._largest is None:
            self._largest = torch.full(self._shape, -torch.inf)
            for one in self._maxima:
                self._largest[one.layer, one.first : one.first + len(one.values)] = one.values.cpu()
            # Data ranks saw other sequences, sequence ranks other tokens or heads.
            dist.all_reduce(self._largest, op=dist.ReduceOp.MAX, group=self._mesh.control)
        return self._largest


def clip_shares(largest: Tensor, threshold: float) -> Tensor:
    """γ = min(1, ``threshold`` / largest logit), fp64, in the shape of ``largest``; 1 where that is not finite."""
    largest = largest.double()
    return torch.where((largest > threshold) & largest.isfinite(), threshold / largest, 1.0)


class QKClip:
    """Scales rows of this rank's fp32 weights.

    ``boxes``: of the parameters that ``spec.clipped_rows`` has heads of.
    """

    def __init__(self, spec: OptimizerSpec, boxes: Sequence[OwnedBox]) -> None:
        self._rows, self._scaled_state, self._boxes = spec.clipped_rows, spec.scaled_state, boxes

    @torch.no_grad()
    def scale(self, shares: Tensor, among: Mapping[nn.Parameter, object]) -> None:
        """Multiply the rows of each head by its γ in ``shares`` (layers, heads), to the power of ``HeadRows``.

        ``among``: parameters; others stay.
        """
        factors: dict[str, Tensor] = {}
        for one in self._boxes:
            if one.parameter not in among:
                continue
            if (name := one.box.key) not in factors:
                factors[name] = self._factors(name, one.box.shape[0], shares)
            own = factors[name][one.box.offset[0] :][: one.box.sizes[0]]
            if (own == 1).all():
                continue
            for weights in (one.owned.weights, *(one.owned.state[name] for name in self._scaled_state)):
                rows = weights[one.own].view(one.box.sizes[0], -1)
                rows.mul_(own[:, None].to(rows))

    def _factors(self, name: str, rows: int, shares: Tensor) -> Tensor:
        """(rows,) fp64."""
        found = torch.ones(rows, dtype=torch.float64)
        for one in self._rows[name]:
            found[one.first : one.last] = shares[one.layer, one.head] ** one.power
        return found
