"""What mixes tokens, by matrix products in chunks: time is linear in the tokens, and autograd gives the gradients.

Names of shapes: b rows, n tokens, h heads, K and V widths of keys and values, G chunks of C tokens. Rows are one
document each. ``mask`` (b, n) bool says which tokens are real; padding may stand anywhere, writes to no state and is no
step of a decay. States and everything inside are fp32, or fp64 for fp64 inputs.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

EMPTY = -1e30
"""The logarithm of a weight that is none. Finite: differences of two of them, and their gradients, are numbers."""


def wide_dtype(x: Tensor) -> torch.dtype:
    """The number format of states: fp32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, gate: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) over the last dim, times ``weight`` and sigmoid(gate); rounded once, as in training."""
    wide = x.to(wide_dtype(x))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        wide = wide * weight.to(wide.dtype)
    return (wide if gate is None else wide * torch.sigmoid(gate.to(wide.dtype))).to(x.dtype)


def layer_norm(x: Tensor, eps: float) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) over the last dim."""
    return rms_norm(x - x.mean(-1, keepdim=True), None, eps)


def token_positions(n: int, mask: Tensor | None, start: Tensor) -> Tensor:
    """(b, n) int64: how many real tokens of its row come before each; ``start`` (b,): those before the first."""
    if mask is None:
        return start[:, None] + torch.arange(n, device=start.device)
    return start[:, None] + (mask.long().cumsum(1) - 1).clamp(min=0)


def phases(positions: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (b, n, h, k) of positions · theta, for theta (h, k), in theta's dtype.

    positions: (b, n), or (b, n, axes): the channels belong to the axes in even shares. Whole turns are taken away in
    fp64: in fp32 the product is off by 0.03 rad at one million tokens.
    """
    if positions.dim() == 2:
        positions = positions[..., None]
    of_channels = positions.double().repeat_interleave(theta.size(-1) // positions.size(-1), dim=-1)
    angle = of_channels[:, :, None] * theta.double()
    if theta.dtype != torch.float64:
        angle = (angle - 2 * math.pi * (angle.detach() / (2 * math.pi)).round()).to(theta.dtype)
    return angle.cos(), angle.sin()


def rotated_features(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """[x cos, x sin] (b, n, h, 2K) of x (b, n, h, K): linearized relative positions (LRPE)."""
    cos, sin = turns
    return torch.cat([x * cos, x * sin], dim=-1)


def rotate_pairs(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (x_i, x_{i + K/2}) of x (b, n, h, K) by angles (b, n, 1, K/2): rotary positions (RoPE)."""
    cos, sin = (turn.to(x.dtype) for turn in turns)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def _in_chunks(x: Tensor, chunk: int) -> Tensor:
    """(b, n, h, K) to (b, h, G, C, K), zeros behind the last token."""
    b, n, h, width = x.shape
    padded = F.pad(x.transpose(1, 2), (0, 0, 0, -n % chunk))
    return padded.reshape(b, h, -1, chunk, width)


def _in_rows(x: Tensor, n: int) -> Tensor:
    """The inverse of ``_in_chunks``: (b, n, h, V) of (b, h, G, C, V)."""
    return x.flatten(2, 3)[:, :, :n].transpose(1, 2)


def _scan(writes: Tensor, through: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The states (b, h, G, …) that enter the chunks, and the one that leaves.

    writes (b, h, G, …): what each chunk adds; through, of as many dims: what is left of the state behind each chunk.
    """
    entering = []
    for write, left in zip(writes.unbind(2), through.unbind(2), strict=True):
        entering.append(state)
        state = left * state + write
    return torch.stack(entering, dim=2), state


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, mask: Tensor | None = None, *, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """S_t = exp(log_decay) S_{t-1} + k_t v_tᵀ and o_t = S_tᵀ q_t, with one decay per head.

    Args:
        q, k: (b, n, h, K).
        v: (b, n, h, V).
        log_decay: (h,), at most 0.
        state: S (b, h, K, V) before the first token.
        mask: (b, n) bool, or None: all tokens are real.
        chunk: tokens whose pairs are computed at once.

    Returns:
        o (b, n, h, V) in v's dtype, and S behind the last token.
    """
    n, wide = q.size(1), state.dtype
    chunk = min(chunk, n)
    real = q.new_ones(1, n, dtype=torch.bool) if mask is None else mask
    if mask is not None:
        k = torch.where(mask[..., None, None], k, 0)
        v = torch.where(mask[..., None, None], v, 0)
    q_c, k_c, v_c = (_in_chunks(x.to(wide), chunk) for x in (q, k, v))
    # Decays go by real tokens: (b, 1, G, C), counted from the chunk's start, and their logarithms (b, h, G, C).
    counts = F.pad(real, (0, -n % chunk)).view(real.size(0), 1, -1, chunk).cumsum(-1)
    upto = log_decay.to(wide)[:, None, None] * counts
    whole = upto[..., -1:]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    between = (upto[..., :, None] - upto[..., None, :]).masked_fill(later, -math.inf).exp()
    o = (q_c @ k_c.mT * between) @ v_c
    writes = (k_c * (whole - upto).exp()[..., None]).mT @ v_c
    states, state = _scan(writes, whole.exp()[..., None], state)
    o = o + (q_c * upto.exp()[..., None]) @ states
    return _in_rows(o, n).to(v.dtype), state


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, *, chunk: int = 32
) -> tuple[Tensor, Tensor]:
    """S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_tᵀ and o_t = S_tᵀ q_t, with a decay per token and channel.

    Stable for any decays: every factor of a product is at most 1 (``_decayed_scores``). A token whose key is zero and
    whose log decay is 0 changes nothing: that is padding.

    Args:
        q, k, log_decay: (b, n, h, K); log_decay at most 0.
        v: (b, n, h, V).
        state: S (b, h, K, V) before the first token.
        chunk: tokens whose pairs are computed at once; a power of two.

    Returns:
        o (b, n, h, V) in v's dtype, and S behind the last token.
    """
    n, wide = q.size(1), state.dtype
    chunk = min(chunk, 1 << (n - 1).bit_length())
    q_c, k_c, v_c, log_c = (_in_chunks(x.to(wide), chunk) for x in (q, k, v, log_decay))
    scores = _decayed_scores(*(x.flatten(0, 2) for x in (q_c, k_c, log_c))).view(*q_c.shape[:3], chunk, chunk)
    writes = (k_c * _sum_behind(log_c).exp()).mT @ v_c
    states, state = _scan(writes, log_c.sum(-2)[..., None].exp(), state)
    o = scores @ v_c + (q_c * log_c.cumsum(-2).exp()) @ states
    return _in_rows(o, n).to(v.dtype), state


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, *, chunk: int = 16
) -> tuple[Tensor, Tensor]:
    """S_t = (I - β_t k_t k_tᵀ) diag(exp(log_decay_t)) S_{t-1} + β_t k_t v_tᵀ and o_t = S_tᵀ q_t.

    A token whose β and log decay are 0 changes nothing: that is padding.

    Args:
        q, k, log_decay: (b, n, h, K); log_decay at most 0.
        v: (b, n, h, V).
        beta: (b, n, h).
        state: S (b, h, K, V) before the first token.
        chunk: tokens whose pairs are computed at once; a power of two.

    Returns:
        o (b, n, h, V) in v's dtype, and S behind the last token.
    """
    n, wide = q.size(1), state.dtype
    chunk = min(chunk, 1 << (n - 1).bit_length())
    q_c, k_c, v_c, log_c, beta_c = (_in_chunks(x.to(wide), chunk) for x in (q, k, v, log_decay, beta[..., None]))
    products, scores = (
        _decayed_scores(*(x.flatten(0, 2) for x in (y, k_c, log_c))).view(*q_c.shape[:3], chunk, chunk)
        for y in (k_c, q_c)
    )
    unit = torch.eye(chunk, dtype=wide, device=q.device)
    # What is written, u = inverse β (v - k_in S): what the state returns for a key is taken away first.
    inverse = torch.linalg.solve_triangular(
        unit + beta_c * products.tril(-1), unit.expand_as(products), upper=False, unitriangular=True
    )
    reach = log_c.cumsum(-2).exp()
    of_values, of_state = inverse @ (beta_c * v_c), inverse @ (beta_c * k_c * reach)
    k_out, through = k_c * _sum_behind(log_c).exp(), log_c.sum(-2)[..., None].exp()
    outputs = []
    for number in range(q_c.size(2)):
        at = (slice(None), slice(None), number)
        written = of_values[at] - of_state[at] @ state
        outputs.append(scores[at] @ written + (q_c[at] * reach[at]) @ state)
        state = through[at] * state + k_out[at].mT @ written
    o = torch.stack(outputs, dim=2)
    return _in_rows(o, n).to(v.dtype), state


def _sum_behind(x: Tensor) -> Tensor:
    """Σ of x (…, C, K) over the tokens behind each; never a difference, which would lose what is small."""
    return F.pad(x[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def _decayed_scores(q: Tensor, k: Tensor, log_decay: Tensor) -> Tensor:
    """Σ_K q_t k_s exp(Σ_{s < i ≤ t} log_decay_i) at [t, s] for s ≤ t, else 0: (B, C, C) of (B, C, K).

    Pairs across the middle are one product, of queries that decay from there and keys that decay up to there; the
    pairs within each half are those of a shorter sequence.
    """
    size = q.size(1)
    if size == 1:
        return q @ k.mT
    half = size // 2
    halves = (x.reshape(-1, half, x.size(-1)) for x in (q, k, log_decay))
    within = _decayed_scores(*halves).view(-1, 2, half, half)
    queries = q[:, half:] * log_decay[:, half:].cumsum(1).exp()
    keys = k[:, :half] * _sum_behind(log_decay[:, :half]).exp()
    first = F.pad(within[:, 0], (0, half))
    return torch.cat([first, torch.cat([queries @ keys.mT, within[:, 1]], dim=2)], dim=1)


def softmax_scan(log_weights: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A running softmax as a recurrence with decays: of log-weights (b, n, h, K), behind a log-sum z (b, h, K).

    Returns:
        exp(log_weights_t - z_t), log of what is left of everything before, z_{t-1} - z_t, and the last z.
    """
    # In fp64: summed token by token in fp32, the logarithm is off by 1e-3 after 100,000 of them.
    z_all = torch.cat([z.double()[:, None], log_weights.double()], dim=1).logcumsumexp(dim=1)
    shares = (log_weights.double() - z_all[:, 1:]).exp()
    left = z_all[:, :-1] - z_all[:, 1:]
    return shares.to(z.dtype), left.to(z.dtype), z_all[:, -1].to(z.dtype)


def two_way_attention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, gate: str, *, chunk: int = 64) -> Tensor:
    """Y_i = Σ_j (q_i · k_j) M_ij v_j over a whole row, M_ij the product of the decays between i and j, 1 at i = j.

    Args:
        q, k: (b, n, h, K), and v (b, n, h, V), as wide as all that is inside.
        log_decay: (b, n, h), at most 0. A token with k = 0 and a log decay of 0 changes nothing: that is padding.
        gate: which of two tokens' decay counts between them, "leave" or "enter".
        chunk: tokens whose pairs are computed at once.
    """
    n = q.size(1)
    q_c, k_c, v_c = (_in_chunks(x, min(chunk, n)) for x in (q, k, v))
    # In fp64: behind strong decays a difference of fp32 sums is off by 1e-4.
    log_c = _in_chunks(log_decay.double()[..., None], min(chunk, n))
    upto = log_c.cumsum(-2)
    before, whole = upto - log_c, upto[..., -1:, :]
    falls, rises = (before, upto) if gate == "leave" else (upto, before)
    size = upto.size(-2)
    is_later = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    between = torch.where(is_later, falls - falls.mT, rises.mT - rises)
    o = (q_c @ k_c.mT * between.exp().to(q.dtype)) @ v_c
    left, zero = whole.exp().to(q.dtype), q.new_zeros(q.size(0), q.size(2), q.size(3), v.size(3))
    prefix = (k_c * (whole - falls).exp().to(q.dtype)).mT @ v_c
    suffix = (k_c * rises.exp().to(q.dtype)).mT @ v_c
    from_left, _ = _scan(prefix, left, zero)
    from_right, _ = _scan(suffix.flip(2), left.flip(2), zero)
    o = o + (q_c * falls.exp().to(q.dtype)) @ from_left
    o = o + (q_c * (whole - rises).exp().to(q.dtype)) @ from_right.flip(2)
    return _in_rows(o, n)


def log_sum(terms: Tensor, z: Tensor) -> Tensor:
    """z_t = log(e^z + Σ_{s ≤ t} e^{terms_s}), (b, n, D) of terms (b, n, D) behind a log-sum z (b, D)."""
    # In fp64: as ``softmax_scan``.
    together = torch.cat([z.double()[:, None], terms.double()], dim=1)
    return together.logcumsumexp(dim=1)[:, 1:].to(z.dtype)


def pairs_sum(a: Tensor, b: Tensor, seen: Tensor, of_pair: Callable[[Tensor], Tensor], *, chunk: int = 16) -> Tensor:
    """Σ_j of_pair(a_i + b_j) over the tokens j that i sees: (B, n, D) of a (B, n, D) and b (B, N, D), fp32 at least.

    seen: (B, n, N) bool. Some tokens i at a time, whose pairs are made again in the backward pass: memory does not grow
    with the square of the length, as time does.
    """
    wide = wide_dtype(a)

    def some(rows: Tensor, read: Tensor, those: Tensor) -> Tensor:
        pairs = of_pair(rows.to(wide)[:, :, None] + read.to(wide)[:, None])
        return torch.where(those[..., None], pairs, 0).sum(2)

    parts = []
    for rows, those in zip(a.split(chunk, 1), seen.split(chunk, 1), strict=True):
        again = torch.is_grad_enabled()
        parts.append(checkpoint(some, rows, b, those, use_reentrant=False) if again else some(rows, b, those))
    return torch.cat(parts, dim=1)


def softmax_average(k: Tensor, v: Tensor, turned: Callable[[Tensor], Tensor], mask: Tensor | None) -> Tensor:
    """S = Σ_i LRPE(e^{k_i} / Σ_j e^{k_j}) v_iᵀ over a whole row, (b, h, 2K, V): a softmax over its tokens, per channel.

    k (b, n, h, K), as wide as the state; v (b, n, h, V); ``turned`` is LRPE, or nothing, and S then (b, h, K, V).
    """
    if mask is not None:
        k = torch.where(mask[..., None, None], k, EMPTY)
        v = torch.where(mask[..., None, None], v, 0)
    return torch.einsum("bnhk, bnhv -> bhkv", turned(k.softmax(dim=1)), v.to(k.dtype))


def toeplitz_scan(
    x: Tensor, log_decay: Tensor, gamma: Tensor, state: Tensor, mask: Tensor | None = None, *, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """u_t[c, r] = exp(log_decay_r) u_{t-1}[c, r] + x_t[c] and y_t[c] = Σ_r gamma[c, r] u_t[c, r].

    Args:
        x: (b, n, d).
        log_decay: (e,), below 0.
        gamma: (d, e).
        state: u (b, d, e) before the first token.
        mask: (b, n) bool, or None: all tokens are real.
        chunk: tokens whose pairs are computed at once.

    Returns:
        y (b, n, d) in x's dtype, and u behind the last token.
    """
    b, n, d = x.shape
    wide, chunk = state.dtype, min(chunk, n)
    gamma, log_decay, values = gamma.to(wide), log_decay.to(wide), x.to(wide)
    back = lengths = None
    if mask is not None:
        # The real tokens of each row first: then distances are differences of places, the same in all rows.
        order = (~mask).long().argsort(dim=1, stable=True)
        back, lengths = order.argsort(dim=1), mask.sum(1)
        values = torch.where(mask[..., None], values, 0).gather(1, order[..., None].expand(-1, -1, d))
    values = F.pad(values, (0, 0, 0, -n % chunk)).view(b, -1, chunk, d)
    slot = torch.arange(chunk, device=x.device)
    starts = torch.arange(values.size(1), device=x.device) * chunk
    # Real tokens of each chunk, (b, G) or (1, G).
    held = ((starts.new_full((1,), n) if lengths is None else lengths)[:, None] - starts).clamp(0, chunk)

    kernel = gamma @ (log_decay[:, None] * slot).exp()
    distance = slot[:, None] - slot
    pairs = torch.where(distance >= 0, kernel[:, distance.clamp(min=0)], 0)
    y = torch.einsum("bgsc,cts->bgtc", values, pairs)
    # Behind a chunk's last token nothing was written: those weights stay at most 1, whatever multiplies the zeros.
    behind = (held[..., None] - 1 - slot).clamp(min=0)
    writes = values.mT @ (log_decay * behind[..., None]).exp()
    through = (log_decay * held[..., None]).exp()
    states, state = _scan(writes[:, None], through[:, None, :, None], state[:, None])
    reads = (states[:, 0] * gamma) @ (log_decay[:, None] * (slot + 1)).exp()
    y = (y + reads.mT).flatten(1, 2)[:, :n]
    if back is not None:
        y = y.gather(1, back[..., None].expand(-1, -1, d))
    return y.to(x.dtype), state[:, 0]


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    *,
    causal: bool = True,
    near: Tensor | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention of the last n of N tokens, q (b, n, h, K), to k, v (b, N, g, K): (b, n, h, K).

    ``causal``: to those up to each; otherwise to all N.

    With fewer heads g of keys and values than of queries, h / g neighbours among these share one. ``seen`` (b, N) bool:
    the real tokens; None: all. A padded token attends to itself, so that it is a number. ``near`` (b, n, N) bool: the
    tokens of a window. ``cap``: most of a score, by tanh. ``sinks`` (h,): logits that join the sums.
    """
    n, total = q.size(1), k.size(1)
    place = torch.arange(total, device=q.device)
    own = place[total - n :, None]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    shared = q.size(1) != k.size(1)
    if cap is None and sinks is None and near is None and seen is None and n == total:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared).transpose(1, 2)
    allowed = (place <= (own if causal else total)).expand(n, total)[None]
    if near is not None:
        allowed = allowed & near
    if seen is not None:
        allowed = (allowed & seen[:, None]) | (place == own)
    allowed = allowed[:, None]
    if cap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=shared).transpose(1, 2)
    wide, heads = wide_dtype(q), q.size(1) // k.size(1)
    k, v = (y.to(wide).repeat_interleave(heads, dim=1) for y in (k, v))
    scores = q.to(wide) @ k.mT / math.sqrt(q.size(-1))
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(wide).view(-1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    return (scores.softmax(-1)[..., :total] @ v).to(q.dtype).transpose(1, 2)
