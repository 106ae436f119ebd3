"""LION with a decay per head, token and value channel, the vector gate of arXiv 2502.16249, C.7 (equation 136):

    Y_i,c = Σ_j M_ij,c (q_i · k_j) v_j,c        o_i,c = Y_i,c / (Σ_j M_ij,c (q_i · k_j) + ε)

M_ij,c is the product of the decays of channel c between the tokens i and j, as in ``lion``, 1 for i = j. Each channel
has its own divisor, as in the code beside the equation, which scales the tensor of scores along its keys.

The operator has no kernels of its own. Its scan, S_t = diag(a_t) S_{t-1} + v_t k_tᵀ, decays channels of values: it is
the scan of ``../gla`` with keys and values exchanged. But the read is along the keys, y_t = S_t q_t, as in the gradient
of ``../gla``'s queries. So each pass is one of ``gla``'s, along the row and along its mirror image;
docs/reference/operators/lion.md has the table.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.errors import UserError
from lightscale.kernels.common.backends import AUTO, choose_backend, implementation
from lightscale.kernels.common.checks import check_decay, check_documents, check_inputs
from lightscale.kernels.common.states import Arriving, arrived, in_state_dtype, state_dtype, without_autocast
from lightscale.kernels.lion.reference import lion_reference
from lightscale.kernels.lion.state import GATES, Gate, LionOutputs, LionState

_NAME = "lion_vector"


def lion_vector(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    gate: Gate = "leave",
    normalize: bool = True,
    eps: float = 1e-6,
    cu_seqlens: Tensor | None = None,
    backend: str = AUTO,
) -> Tensor:
    """Linear attention of every token to all tokens of its document: linear in T, differentiable in every input.

    Half precision is computed in fp32: both directions include the diagonal, which is subtracted once.

    Args:
        q: queries (B, T, H, K), fp16, bf16, fp32 or fp64, any strides; the caller applies feature maps.
        k: keys (B, T, H, K), of q's dtype.
        v: values (B, T, H, V), of q's dtype.
        log_decay: log of the decay per head, token and value channel (B, T, H, V), fp32 or fp64, at most 0.
        gate: as in ``lion``.
        normalize: divide each channel by the sum of its masked scores.
        eps: added once to the sum. Where the result is 0, the output is 0.
        cu_seqlens: (N+1,) document boundaries over the flattened B·T tokens, every row start included.
        backend: as in ``lion``.

    Returns:
        The outputs (B, T, H, V) in v's dtype.

    Raises:
        UserError: a shape, dtype, device, gate or backend does not fit; the message names the argument.
    """
    check_inputs(q, k, v)
    if log_decay.shape != v.shape:
        raise UserError(
            f"log_decay must be (B, T, H, V) = {tuple(v.shape)}, like v, got shape {tuple(log_decay.shape)}"
        )
    check_decay(log_decay, q)
    if gate not in GATES:
        raise UserError(f"gate must be one of {', '.join(GATES)}, got {gate!r}")
    if not eps >= 0:
        raise UserError(f"eps must be at least 0, got {eps}")
    check_documents(cu_seqlens, q)
    wide = torch.empty(0, dtype=state_dtype(q.dtype), device=q.device)
    name = choose_backend(_NAME, wide, backend)
    if name == "reference":
        form = {"gate": gate, "normalize": normalize, "eps": eps}
        return in_state_dtype(lion_reference, q, k, v, log_decay, **form, cu_seqlens=cu_seqlens)[0]
    o: Tensor = _LionVector.apply(q, k, v, log_decay, cu_seqlens, gate, normalize, eps, name)
    return o


@dataclass(frozen=True, kw_only=True)
class _Way:
    """Rows in the order of one of the two scans, from the left or the right; decays precede writes, as in ``gla``.

    For ``leave`` the decay of a token is the gate of the token before. One more token behind the row, without key and
    value, takes the gate of the last token: the states leave the row as the next token reads them.
    """

    reverse: bool
    leaves: bool
    cu_seqlens: Tensor | None

    def tokens(self, x: Tensor) -> Tensor:
        """x (B, T, H, width) in the order of the scan."""
        x = self.rows(x, 1)
        return F.pad(x, (0, 0, 0, 0, 0, 1)) if self.leaves else x

    def decays(self, x: Tensor) -> Tensor:
        """Log decays (B, T, H, width) in the order of the scan."""
        x = self.rows(x, 1)
        return F.pad(x, (0, 0, 0, 0, 1, 0)) if self.leaves else x

    def back(self, x: Tensor) -> Tensor:
        """The inverse of ``tokens``."""
        return self.rows(x[:, :-1] if self.leaves else x, 1)

    def decays_back(self, x: Tensor) -> Tensor:
        """The inverse of ``decays``."""
        return self.rows(x[:, 1:] if self.leaves else x, 1)

    def rows(self, x: Tensor, *dims: int) -> Tensor:
        """x with its rows and ``dims`` in the order of the scan: one flip mirrors all tokens flattened."""
        return x.flip(0, *dims) if self.reverse else x


def _ways(x: Tensor, gate: Gate, cu_seqlens: Tensor | None) -> Iterator[_Way]:
    """The scan from the left, for the prefix, and the scan from the right, of rows like x (B, T, …)."""
    num_rows, num_tokens = x.shape[:2]
    leaves = gate == "leave"
    for reverse in (False, True):
        cut = cu_seqlens if num_tokens else None
        if cut is not None and reverse:
            cut = (num_rows * num_tokens - cut).flip(0)
        if cut is not None and leaves:
            # A row is one token longer.
            cut = cut + cut // num_tokens
        yield _Way(reverse=reverse, leaves=leaves, cu_seqlens=cut)


def _passes(x: Tensor) -> ModuleType:
    """The module of ``gla``'s passes for tensors like x."""
    found: ModuleType = implementation(_NAME, choose_backend(_NAME, x))
    return found


def _wide(*tensors: Tensor) -> list[Tensor]:
    """The tensors in the states' dtype."""
    return [x.to(state_dtype(tensors[0].dtype)) for x in tensors]


def _values(v: Tensor, log_decay: Tensor, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """The scanned channels (B, T, H, U) and their log decays: values, and with a normaliser ones behind them."""
    log_decay = log_decay.detach().to(v.dtype)
    if not normalize:
        return v, log_decay
    return torch.cat([v, torch.ones_like(v)], -1), torch.cat([log_decay, log_decay], -1)


def _cotangents(do: Tensor, outputs: LionOutputs) -> Tensor:
    """The cotangents (B, T, H, U) of the sums, from the outputs' cotangents."""
    if outputs.normalizer is None:
        return do
    empty = outputs.normalizer == 0
    scaled = torch.where(empty, 0.0, do / torch.where(empty, 1.0, outputs.normalizer))
    return torch.cat([scaled, -scaled * outputs.o.to(do.dtype)], -1)


@torch.no_grad()
@without_autocast
def state_fwd(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    gate: Gate = "leave",
    normalize: bool = True,
) -> tuple[LionState, Tensor]:
    """The summary of a row for the ranks on both sides; see ``state_fwd`` of ``chunked.py``.

    Returns:
        S_loc, (B, H, U, K) each, with U channels: values and, with a normaliser, as many ones; and D (B, H, U).
    """
    k, v = _wide(k, v)
    values, decays = _values(v, log_decay, normalize=normalize)
    states, through = [], decays
    for way in reversed(list(_ways(k, gate, cu_seqlens))):
        state, through = _passes(k).state_fwd(way.tokens(values), way.tokens(k), way.decays(decays), way.cu_seqlens)
        states.append(way.rows(state))
    # The last D is the prefix'; the suffix has the same decays.
    return LionState(*reversed(states)), through


@torch.no_grad()
@without_autocast
def out_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: LionState | None,
    cu_seqlens: Tensor | None = None,
    *,
    gate: Gate = "leave",
    normalize: bool = True,
    eps: float = 0.0,
    passes: ModuleType | None = None,
) -> tuple[LionOutputs, None]:
    """The outputs of a row that ``state`` enters, (B, H, U, K) each; ``state_fwd`` returns the states that leave.

    The normaliser is (B, T, H, V). See ``out_fwd`` of ``chunked.py``.
    """
    dtype = v.dtype
    q, k, v = _wide(q, k, v)
    values, decays = _values(v, log_decay, normalize=normalize)
    gla = passes or _passes(q)
    # Subtracted, so that each token reads itself once.
    Y = -(q * k).sum(-1, keepdim=True) * values
    for way, entering in zip(_ways(q, gate, cu_seqlens), state or (None, None), strict=True):
        written = way.tokens(values), way.tokens(k), way.decays(decays)
        before = None if entering is None else way.rows(entering)
        Y += way.back(gla.query_grad(*written, way.tokens(q), before, way.cu_seqlens))
    if not normalize:
        return LionOutputs(Y.to(dtype), None), None
    sums, normalizer = Y.chunk(2, -1)
    normalizer = normalizer + eps
    empty = normalizer == 0
    o = torch.where(empty, 0.0, sums / torch.where(empty, 1.0, normalizer))
    return LionOutputs(o.to(dtype), normalizer), None


@torch.no_grad()
@without_autocast
def state_bwd(
    q: Tensor,
    do: Tensor,
    outputs: LionOutputs,
    log_decay: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    gate: Gate = "leave",
) -> LionState:
    """The cotangents of a row's incoming states by its own outputs, (B, H, U, K) each; see ``chunked.py``."""
    q, do = _wide(q, do)
    dY = _cotangents(do, outputs)
    _, decays = _values(do, log_decay, normalize=outputs.normalizer is not None)
    found = []
    for way in _ways(q, gate, cu_seqlens):
        own = _passes(q).state_bwd(way.tokens(dY), way.tokens(q), way.decays(decays), way.cu_seqlens)
        found.append(way.rows(own))
    return LionState(*found)


class VectorGradients(NamedTuple):
    """Gradients of a row's inputs, each of its input's shape and dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor


@torch.no_grad()
@without_autocast
def grad_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    do: Tensor,
    outputs: LionOutputs,
    state: LionState | None,
    dstate: Arriving[LionState | None],
    cu_seqlens: Tensor | None = None,
    *,
    gate: Gate = "leave",
    with_decay: bool = True,
    passes: ModuleType | None = None,
) -> VectorGradients:
    """The gradients of a row's inputs, always with dlog_decay; arguments as in ``grad_bwd`` of ``chunked.py``."""
    dtypes = [x.dtype for x in (q, k, v, log_decay)]
    q, k, v, do = _wide(q, k, v, do)
    values, decays = _values(v, log_decay, normalize=outputs.normalizer is not None)
    dY = _cotangents(do, outputs)
    gla = passes or _passes(q)
    own, read = (q * k).sum(-1, keepdim=True), (dY * values).sum(-1, keepdim=True)
    dq, dk, dvalues, ddecays = -read * k, -read * q, -own * dY, torch.zeros_like(decays)
    ways = [
        (way, (way.tokens(dY), way.tokens(values), way.tokens(k), way.decays(decays)), _rows(way, entering))
        for way, entering in zip(_ways(q, gate, cu_seqlens), state or (None, None), strict=True)
    ]
    # Before the part that waits for the cotangents of the leaving states.
    for way, inputs, entering in ways:
        dq += way.back(gla.out_fwd(*inputs, entering, way.cu_seqlens)[0])
    for (way, inputs, entering), leaving in zip(ways, arrived(dstate) or (None, None), strict=True):
        of_leaving = _rows(way, leaving)
        _, *found = gla.grad_bwd(*inputs, way.tokens(q), entering, of_leaving, way.cu_seqlens)
        dvalues += way.back(found[0])
        dk += way.back(found[1])
        ddecays += way.decays_back(found[2])
    if outputs.normalizer is not None:
        dvalues, ddecays = dvalues[..., : v.shape[3]], ddecays[..., : v.shape[3]] + ddecays[..., v.shape[3] :]
    return VectorGradients(*(x.to(dtype) for x, dtype in zip((dq, dk, dvalues, ddecays), dtypes, strict=True)))


def _rows(way: _Way, state: Tensor | None) -> Tensor | None:
    return None if state is None else way.rows(state)


class _LionVector(torch.autograd.Function):
    """``out_fwd`` and ``grad_bwd`` as one differentiable call; inputs, outputs and normalisers are saved."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """The outputs of q, k, v, log_decay, cu_seqlens, gate, normalize, eps, backend."""
        *tensors, ctx.gate, normalize, eps, backend = inputs
        q, k, v, log_decay, cu_seqlens = tensors
        ctx.gla = gla = implementation(_NAME, backend)
        options = {"gate": ctx.gate, "normalize": normalize, "eps": eps, "passes": gla}
        outputs, _ = out_fwd(q, k, v, log_decay, None, cu_seqlens, **options)
        ctx.save_for_backward(*tensors, *outputs)
        return outputs.o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of ``forward``'s arguments."""
        q, k, v, log_decay, cu_seqlens, *outputs = ctx.saved_tensors
        gradients = grad_bwd(
            q, k, v, log_decay, do, LionOutputs(*outputs), None, None, cu_seqlens, gate=ctx.gate, passes=ctx.gla
        )
        return *gradients, *[None] * 5
