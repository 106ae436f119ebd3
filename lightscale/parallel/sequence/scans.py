"""The operators in the passes that sequence parallelism needs: before, during and after an exchange.

Inputs come in two parts. Written inputs (keys, values, decays) come first; their summary starts the exchange. Reading
inputs (queries) are computed during the exchange. In the backward pass the exchange overlaps the gradients that do not
need the cotangent of the outgoing state.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.kernels import delta_rule, gla, lightnet, lightning, lion, log_sum, tpe
from lightscale.kernels.common.angles import angles_of
from lightscale.kernels.common.once import once
from lightscale.kernels.lightnet import LightNetState, StateCotangent
from lightscale.kernels.lion import Gate, LionOutputs, LionState, vector
from lightscale.kernels.operators import StateAlgebra, StateScope, get_operator
from lightscale.parallel.sequence.algebra import (
    AFFINE,
    BOTH,
    DIAGONAL,
    LOG_SUM_EXP,
    WHOLE_LOG_SUM_EXP,
    Algebra,
    Tensors,
)
from lightscale.parallel.sequence.log_sums import LOG_SUM, WHOLE_LOG_SUM

Inputs = tuple[Any, ...]
"""Tensors, some of them optional; each scan lists its own."""

_ALGEBRAS = {
    (StateAlgebra.DIAGONAL, StateScope.PREFIX): DIAGONAL,
    (StateAlgebra.DIAGONAL, StateScope.BOTH): BOTH,
    (StateAlgebra.AFFINE, StateScope.PREFIX): AFFINE,
    (StateAlgebra.LOG_SUM_EXP, StateScope.PREFIX): LOG_SUM_EXP,
    (StateAlgebra.LOG_SUM_EXP, StateScope.ALL): WHOLE_LOG_SUM_EXP,
    (StateAlgebra.LOG_SUM, StateScope.PREFIX): LOG_SUM,
    (StateAlgebra.LOG_SUM, StateScope.ALL): WHOLE_LOG_SUM,
}


def algebra_of(operator: str) -> Algebra:
    """How the states of an operator are combined, by its description; UserError for states that cannot be passed."""
    state = get_operator(operator).state
    if state is None or (state.algebra, state.scope) not in _ALGEBRAS:
        algebra = "no state" if state is None else f"a {state.scope.value} state of {state.algebra.value!r}"
        known = ", ".join(f"{scope.value} states of {algebra.value!r}" for algebra, scope in _ALGEBRAS)
        raise UserError(f"operator {operator!r} has {algebra}; states are passed along sequence ranks for: {known}")
    return _ALGEBRAS[state.algebra, state.scope]


@dataclass(frozen=True, kw_only=True)
class Scan(ABC):
    """An operator on the tokens of this rank. ``inputs``: written, then reading tensors; each scan lists them.

    continues: (B,) bool, whether a row's first token continues the document of the rank before. cu_seqlens: (N + 1,)
    document boundaries over the flattened tokens of this rank, every row start included; None for none.
    """

    continues: Tensor
    cu_seqlens: Tensor | None

    algebra: ClassVar[Algebra]

    @abstractmethod
    def summarize(self, written: Inputs) -> Tensors:
        """The effect of this rank's segment on a state: a summary of the algebra."""

    @abstractmethod
    def entering(self, state: Tensors) -> Tensors:
        """The state before the row's first token, from the outgoing state of the ranks before."""

    @abstractmethod
    def outputs(self, inputs: Inputs, state: Tensors) -> Tensor | Tensors:
        """The outputs of this rank's tokens, from the state that enters.

        With others that ``reads`` and ``gradients`` take: then a tuple, outputs first, and those others they find in
        ``state`` behind what entered.
        """

    @abstractmethod
    def reads(self, inputs: Inputs, do: Tensor, state: Tensors) -> Tensors:
        """The cotangent of the incoming state that comes from this rank's own outputs."""

    @abstractmethod
    def gradients(
        self, inputs: Inputs, do: Tensor, state: Tensors, leaving: Callable[[], Tensors]
    ) -> Sequence[Tensor | None]:
        """The gradients of ``inputs``, in their order.

        ``leaving`` waits for the cotangent of the state that leaves the row. To be called once, when it is needed.
        """

    def where_continues(self, x: Tensor, otherwise: float = 0.0) -> Tensor:
        """``x`` (B, …) for the rows that continue a document, ``otherwise`` for those that begin one."""
        number = once(self.continues, (otherwise, x.dtype), lambda: x.new_full((), otherwise))
        return torch.where(self.continues.view(-1, *[1] * (x.dim() - 1)), x, number)


@dataclass(frozen=True, kw_only=True)
class DiagonalScan(Scan):
    """A scan whose state only decays: a tensor S, zero where a document begins."""

    of_heads: ClassVar[frozenset[int]] = frozenset()
    """Places of the inputs that all tokens share, beside decays (H,)."""

    def entering(self, state: Tensors) -> Tensors:
        # A document that begins with the row's first token is cut off twice: here for this rank's own tokens, in
        # ``_summary`` for the ranks behind, to which nothing from before the document may go on.
        return (self.where_continues(state[0]),)

    def _summary(self, state: Tensor, decay: Tensor) -> Tensors:
        # ``cu_seqlens`` names every row's start and cannot tell whether a document begins there, so that D is not 0
        # yet. Others could not derive even a fixed decay: it depends on where documents begin here.
        return state, self.where_continues(decay).to(state.dtype)


@dataclass(frozen=True, kw_only=True)
class LightningScan(DiagonalScan):
    """Lightning attention. Written: k (B, T, H, K), v (B, T, H, V), log_decay (H,), (B, T, H) or None, and the angles
    of LRPE or two None: theta (H, K), positions (B, T) in the whole document. Reads: q.
    """

    algebra: ClassVar[Algebra] = algebra_of("lightning")
    of_heads: ClassVar[frozenset[int]] = frozenset({3})

    def summarize(self, written: Inputs) -> Tensors:
        k, v, log_decay, *angles = written
        state, decay = lightning.state_fwd(k, v, log_decay, self.cu_seqlens, angles=angles_of(*angles))
        return self._summary(state, decay[..., None, None])

    def outputs(self, inputs: Inputs, state: Tensors) -> Tensor:
        k, v, log_decay, *angles, q = inputs
        return lightning.out_fwd(q, k, v, log_decay, state[0], self.cu_seqlens, angles=angles_of(*angles))[0]

    def reads(self, inputs: Inputs, do: Tensor, state: Tensors) -> Tensors:
        _, _, log_decay, *angles, q = inputs
        own = lightning.state_bwd(q, do, log_decay, self.cu_seqlens, angles=angles_of(*angles))
        # With one decay per head, U = Σ_t λ^t q_t do_tᵀ, t from 1. The pass takes the row's first document for one that
        # has come in; where it begins here, its tokens read nothing of the incoming state.
        return (self.where_continues(own),)

    def gradients(
        self, inputs: Inputs, do: Tensor, state: Tensors, leaving: Callable[[], Tensors]
    ) -> Sequence[Tensor | None]:
        k, v, log_decay, theta, positions, q = inputs
        found = lightning.grad_bwd(
            q,
            k,
            v,
            log_decay,
            do,
            state[0],
            lambda: leaving()[0],
            self.cu_seqlens,
            angles=angles_of(theta, positions),
            with_decay=_learned(log_decay),
            with_theta=_learned(theta),
        )
        return found.k, found.v, found.log_decay, found.theta, None, found.q


@dataclass(frozen=True, kw_only=True)
class GatedScan(DiagonalScan):
    """Gated linear attention. Written: k (B, T, H, K), v (B, T, H, V), log_decay (B, T, H, K). Reads: q."""

    algebra: ClassVar[Algebra] = algebra_of("gla")

    def summarize(self, written: Inputs) -> Tensors:
        k, v, log_decay = written
        state, decay = gla.state_fwd(k, v, log_decay, self.cu_seqlens)
        return self._summary(state, decay[..., None])

    def outputs(self, inputs: Inputs, state: Tensors) -> Tensor:
        k, v, log_decay, q = inputs
        return gla.out_fwd(q, k, v, log_decay, state[0], self.cu_seqlens)[0]

    def reads(self, inputs: Inputs, do: Tensor, state: Tensors) -> Tensors:
        return (self.where_continues(gla.state_bwd(inputs[3], do, inputs[2], self.cu_seqlens)),)

    def gradients(
        self, inputs: Inputs, do: Tensor, state: Tensors, leaving: Callable[[], Tensors]
    ) -> Sequence[Tensor | None]:
        # No second exchange for the decays: those of this segment act on the state that came in and on what was written
        # here, and the cotangent of the state that leaves says how much that counts later.
        k, v, log_decay, q = inputs
        dq, *written = gla.grad_bwd(q, k, v, log_decay, do, state[0], lambda: leaving()[0], self.cu_seqlens)
        return *written, dq


@dataclass(frozen=True, kw_only=True)
class DeltaRuleScan(Scan):
    """The gated delta rule. Written: k (B, T, H, K), v (B, T, N, V), log_decay (B, T, N), (B, T, N, K) or None, beta
    (B, T, N). Reads: q.
    """

    algebra: ClassVar[Algebra] = algebra_of("delta_rule")

    def summarize(self, written: Inputs) -> Tensors:
        k, v, log_decay, beta = written
        state, through = delta_rule.state_fwd(k, v, log_decay, beta, self.cu_seqlens)
        # As of ``DiagonalScan``: over the border to a document that begins with this row nothing passes.
        return state, self.where_continues(through)

    def entering(self, state: Tensors) -> Tensors:
        return (self.where_continues(state[0]),)

    def outputs(self, inputs: Inputs, state: Tensors) -> Tensor:
        k, v, log_decay, beta, q = inputs
        return delta_rule.out_fwd(q, k, v, log_decay, beta, state[0], self.cu_seqlens)[0]

    def reads(self, inputs: Inputs, do: Tensor, state: Tensors) -> Tensors:
        k, _, log_decay, beta, q = inputs
        return (self.where_continues(delta_rule.state_bwd(q, k, do, log_decay, beta, self.cu_seqlens)),)

    def gradients(
        self, inputs: Inputs, do: Tensor, state: Tensors, leaving: Callable[[], Tensors]
    ) -> Sequence[Tensor | None]:
        # What a token writes depends on the state: its decays and β act on what came in, which the local backward has.
        k, v, log_decay, beta, q = inputs
        dq, *found = delta_rule.grad_bwd(q, k, v, log_decay, beta, do, state[0], lambda: leaving()[0], self.cu_seqlens)
        return *found, dq


@dataclass(frozen=True, kw_only=True)
class TPEScan(DiagonalScan):
    """Toeplitz positional encoding. Written: x (B, T, D), log_decay (E,). Reads: gamma (D, E)."""

    algebra: ClassVar[Algebra] = algebra_of("tpe")

    def summarize(self, written: Inputs) -> Tensors:
        x, log_decay = written
        state, decay = tpe.state_fwd(x, log_decay, self.cu_seqlens)
        return self._summary(state, decay[:, None])

    def outputs(self, inputs: Inputs, state: Tensors) -> Tensor:
        x, log_decay, gamma = inputs
        return tpe.out_fwd(x, log_decay, gamma, state[0], self.cu_seqlens)[0]

    def reads(self, inputs: Inputs, do: Tensor, state: Tensors) -> Tensors:
        _, log_decay, gamma = inputs
        return (self.where_continues(tpe.state_bwd(do, log_decay, gamma, self.cu_seqlens)),)

    def gradients(
        self, inputs: Inputs, do: Tensor, state: Tensors, leaving: Callable[[], Tensors]
    ) -> Sequence[Tensor | None]:
        x, log_decay, gamma = inputs
        # Of this segment only: the engine's reduction of parameters' gradients also sums over sequence ranks.
        return tpe.grad_bwd(x, log_decay, gamma, do, state[0], lambda: leaving()[0], self.cu_seqlens)


@dataclass(frozen=True, kw_only=True)
class LightNetScan(Scan):
    """Additive decay. Written: k (B, T, H, K), v (B, T, H, V), and the angles of LRPE or two None: theta (H, K),
    positions (B, T) in the whole document. Reads: q.

    One exchange forward: z and S travel together. Outputs cannot be begun before it ends, because z of all tokens
    before scales each channel of the queries.
    """

    algebra: ClassVar[Algebra] = algebra_of("lightnet")

    def summarize(self, written: Inputs) -> Tensors:
        k, v, *angles = written
        state, through = lightnet.state_fwd(k, v, angles_of(*angles), self.cu_seqlens)
        return state.z, state.S, self.where_continues(through)[:, None]

    def entering(self, state: Tensors) -> Tensors:
        z, S = state
        return self.where_continues(z, -torch.inf), self.where_continues(S)

    def outputs(self, inputs: Inputs, state: Tensors) -> Tensor:
        k, v, *angles, q = inputs
        return lightnet.out_fwd(q, k, v, angles_of(*angles), LightNetState(*state), self.cu_seqlens)[0]

    def reads(self, inputs: Inputs, do: Tensor, state: Tensors) -> Tensors:
        k, v, *angles, q = inputs
        # Keys, values and state too: R = Σ_t e^(z_in - z_t) (q_t ⊙ dq_t) needs the gradients of the queries. It has to
        # travel, because it does not follow from S and dS at the segment's end.
        own = lightnet.state_bwd(q, k, v, angles_of(*angles), do, LightNetState(*state), self.cu_seqlens)
        return self.where_continues(own.U), self.where_continues(own.R)

    def gradients(
        self, inputs: Inputs, do: Tensor, state: Tensors, leaving: Callable[[], Tensors]
    ) -> Sequence[Tensor | None]:
        k, v, theta, positions, q = inputs
        found = lightnet.grad_bwd(
            q,
            k,
            v,
            angles_of(theta, positions),
            do,
            LightNetState(*state),
            lambda: StateCotangent(*leaving()),
            self.cu_seqlens,
            with_theta=_learned(theta),
        )
        return found.k, found.v, found.theta, None, found.q


@dataclass(frozen=True, kw_only=True)
class LightNetWholeScan(Scan):
    """Additive decay over whole documents. Inputs are those of ``LightNetScan``.

    States come from before to each row's first document, and from behind to its last one: z and S of each. If no
    document begins in a segment, these are the same document.

    bounds: document boundaries as ``cu_seqlens``, on the host.
    """

    bounds: tuple[int, ...] | None = None

    algebra: ClassVar[Algebra] = algebra_of("lightnet_noncausal")

    def summarize(self, written: Inputs) -> Tensors:
        k, v, *angles = written
        (first, last), through = lightnet.noncausal.state_fwd(k, v, angles_of(*angles), self.bounds)
        of_first = self.where_continues(first.z, -torch.inf), self.where_continues(first.S)
        return *last, *of_first, self.where_continues(through)[:, None]

    def entering(self, state: Tensors) -> Tensors:
        z, S, *behind = state
        return self.where_continues(z, -torch.inf), self.where_continues(S), *behind

    def outputs(self, inputs: Inputs, state: Tensors) -> Tensors:
        k, v, *angles, q = inputs
        own = lightnet.noncausal.document_states(k, v, angles_of(*angles), self.bounds)
        sides = lightnet.noncausal.Sides(LightNetState(*state[:2]), LightNetState(*state[2:]))
        states = lightnet.noncausal.total_states(own, sides, self.bounds, q)
        return lightnet.noncausal.out_fwd(q, v, angles_of(*angles), states, self.bounds), *states

    def reads(self, inputs: Inputs, do: Tensor, state: Tensors) -> Tensors:
        _, _, *angles, q = inputs
        first, last = lightnet.noncausal.state_bwd(q, do, angles_of(*angles), self.bounds)
        return self.where_continues(first), last

    def gradients(
        self, inputs: Inputs, do: Tensor, state: Tensors, leaving: Callable[[], Tensors]
    ) -> Sequence[Tensor | None]:
        k, v, theta, positions, q = inputs

        def from_sides() -> tuple[Tensor, Tensor]:
            # What goes on to the right is read by the tokens behind, and the other way round.
            of_last, of_first = leaving()
            return self.where_continues(of_first), of_last

        states = LightNetState(*state[4:])
        angles, with_theta = angles_of(theta, positions), _learned(theta)
        found = lightnet.noncausal.grad_bwd(q, k, v, angles, do, states, from_sides, self.bounds, with_theta=with_theta)
        return found.k, found.v, found.theta, None, found.q


@dataclass(frozen=True, kw_only=True)
class LogSumScan(Scan):
    """Running log-sums. Written: b (B, T, D). Nothing reads: the outputs are the sums.

    before: the outputs are the sums before each token; the caller handles beginnings of documents.
    """

    before: bool = False

    algebra: ClassVar[Algebra] = algebra_of("log_sum")

    def summarize(self, written: Inputs) -> Tensors:
        z, through = log_sum.state_fwd(written[0], self.cu_seqlens)
        return z, self.where_continues(through)[:, None]

    def entering(self, state: Tensors) -> Tensors:
        return (self.where_continues(state[0], -torch.inf),)

    def outputs(self, inputs: Inputs, state: Tensors) -> Tensors:
        z = log_sum.out_fwd(inputs[0], state[0], self.cu_seqlens)
        return torch.cat([state[0][:, None], z], dim=1)[:, : z.size(1)] if self.before else z, z

    def reads(self, inputs: Inputs, do: Tensor, state: Tensors) -> Tensors:
        entered, z = state
        own = log_sum.state_bwd(z, self._of_sums(do), entered, self.cu_seqlens)
        return (own + do[:, :1].sum(1) if self.before else own,)

    def gradients(
        self, inputs: Inputs, do: Tensor, state: Tensors, leaving: Callable[[], Tensors]
    ) -> Sequence[Tensor | None]:
        dz = self._of_sums(do)
        return (log_sum.grad_bwd(inputs[0], state[1], dz, lambda: leaving()[0], self.cu_seqlens),)

    def _of_sums(self, do: Tensor) -> Tensor:
        """The cotangents of the sums behind the tokens, within this rank."""
        return torch.cat([do[:, 1:], torch.zeros_like(do[:, :1])], dim=1) if self.before else do


@dataclass(frozen=True, kw_only=True)
class LogSumWholeScan(Scan):
    """Log-sums over whole documents. Inputs are those of ``LogSumScan``, ``bounds`` those of ``LightNetWholeScan``.

    States come from before to each row's first document, and from behind to its last one.
    """

    bounds: tuple[int, ...] | None = None

    algebra: ClassVar[Algebra] = algebra_of("log_sum_whole")

    def summarize(self, written: Inputs) -> Tensors:
        first, last, through = log_sum.whole.state_fwd(written[0], self.bounds)
        return last, self.where_continues(first, -torch.inf), self.where_continues(through)[:, None]

    def entering(self, state: Tensors) -> Tensors:
        before, behind = state
        return self.where_continues(before, -torch.inf), behind

    def outputs(self, inputs: Inputs, state: Tensors) -> Tensors:
        before, behind = state
        z = log_sum.whole.total_sums(inputs[0], (before, behind), self.bounds)
        return log_sum.whole.out_fwd(inputs[0], z, self.bounds), z

    def reads(self, inputs: Inputs, do: Tensor, state: Tensors) -> Tensors:
        first, last = log_sum.whole.state_bwd(do, self.bounds)
        return self.where_continues(first), last

    def gradients(
        self, inputs: Inputs, do: Tensor, state: Tensors, leaving: Callable[[], Tensors]
    ) -> Sequence[Tensor | None]:
        def from_sides() -> tuple[Tensor, Tensor]:
            # What goes on to the right is read by the tokens behind, and the other way round.
            of_last, of_first = leaving()
            return self.where_continues(of_first), of_last

        return (log_sum.whole.grad_bwd(inputs[0], do, state[2], from_sides, self.bounds),)


@dataclass(frozen=True, kw_only=True)
class LionScan(Scan):
    """LION, in both directions. Written: k (B, T, H, K), v (B, T, H, V), log_decay (H,), (B, T, H) or None. Reads: q.

    States are the prefix and the suffix, (B, H, K, W) each. The rest is as of ``lion``.
    """

    gate: Gate = "leave"
    normalize: bool = True
    eps: float = 1e-6

    algebra: ClassVar[Algebra] = algebra_of("lion")
    passes: ClassVar[ModuleType] = lion

    def summarize(self, written: Inputs) -> Tensors:
        k, v, log_decay = written
        local, decay = self.passes.state_fwd(k, v, log_decay, self.cu_seqlens, gate=self.gate, normalize=self.normalize)
        # Over the border to a document that begins with this row nothing passes, in neither direction.
        decay = self.where_continues(decay).to(local.prefix.dtype)
        return local.prefix, self.where_continues(local.suffix), decay[(..., *[None] * (4 - decay.dim()))]

    def entering(self, state: Tensors) -> Tensors:
        prefix, suffix = state
        return self.where_continues(prefix), suffix

    def outputs(self, inputs: Inputs, state: Tensors) -> Tensor | Tensors:
        k, v, log_decay, q = inputs
        found, _ = self.passes.out_fwd(
            q,
            k,
            v,
            log_decay,
            LionState(*state),
            self.cu_seqlens,
            gate=self.gate,
            normalize=self.normalize,
            eps=self.eps,
        )
        return found.o if found.normalizer is None else (found.o, found.o, found.normalizer)

    def reads(self, inputs: Inputs, do: Tensor, state: Tensors) -> Tensors:
        _, _, log_decay, q = inputs
        own = self.passes.state_bwd(q, do, _lion_outputs(do, state), log_decay, self.cu_seqlens, gate=self.gate)
        return self.where_continues(own.prefix), own.suffix

    def gradients(
        self, inputs: Inputs, do: Tensor, state: Tensors, leaving: Callable[[], Tensors]
    ) -> Sequence[Tensor | None]:
        k, v, log_decay, q = inputs

        def cotangents() -> LionState:
            of_prefix, of_suffix = leaving()
            return LionState(of_prefix, self.where_continues(of_suffix))

        found = self.passes.grad_bwd(
            q,
            k,
            v,
            log_decay,
            do,
            _lion_outputs(do, state),
            LionState(*state[:2]),
            cotangents,
            self.cu_seqlens,
            gate=self.gate,
            with_decay=_learned(log_decay),
        )
        return found.k, found.v, found.log_decay, found.q


@dataclass(frozen=True, kw_only=True)
class LionVectorScan(LionScan):
    """The same with decays of value channels: log_decay (B, T, H, V), states (B, H, U, K) each; see ``lion_vector``."""

    algebra: ClassVar[Algebra] = algebra_of("lion_vector")
    passes: ClassVar[ModuleType] = vector


def _lion_outputs(do: Tensor, state: Tensors) -> LionOutputs:
    # Without a normaliser the gradients need no outputs.
    return LionOutputs(*state[2:]) if len(state) > 2 else LionOutputs(do, None)


def _learned(x: Tensor | None) -> bool:
    return x is not None and x.requires_grad
