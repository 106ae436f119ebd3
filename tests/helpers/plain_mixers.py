"""Every mixer written out plainly, for one document: full matrices, or the recurrence token by token.

Each is (model, normalised input (n, d), weights of the mixer and of the model, layer from 0) -> output (n, d); see
``plain_models.py``, of which these take heads, norms and gates. Loaded by path (runpy).
"""

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightscale.config.model import ModelConfig

plain = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("plain_models.py"))))

Weights = dict[str, Tensor]
LOWER_BOUNDS = "lower_bounds.table"


def tnl(model: ModelConfig, x: Tensor, weights: Weights, layer: int) -> Tensor:
    """Decays by head (ALiBi slopes, heads a power of two) and layer; LRPE in the first layer."""
    q, k, v = plain.heads(model, x, weights)
    q, k = plain.silu(q), plain.silu(k)
    distance = _distance(x)
    slopes = torch.tensor([2.0 ** (-8 * (head + 1) / model.num_heads) for head in range(model.num_heads)])
    factor = 1.0 if model.num_layers == 1 else 1 - layer / (model.num_layers - 1) + 1e-5
    decay = torch.where(distance >= 0, (-slopes.double()[:, None, None] * factor * distance).exp(), 0.0)
    if layer == 0:
        scores = torch.einsum("htc, hsc, htsc -> hts", q, k, _cosines(model, x, weights["lrpe.theta"]))
    else:
        scores = q @ k.mT
    return gated(model, (scores * decay) @ v, x, weights)


def cosformer2(model: ModelConfig, x: Tensor, weights: Weights, layer: int) -> Tensor:
    """Of channel c: q_t k_s cos((t - s) θ), for all s up to t."""
    q, k, v = plain.heads(model, x, weights)
    cosines = _cosines(model, x, weights["lrpe.theta"])
    scores = torch.einsum("htc, hsc, htsc -> hts", plain.silu(q), plain.silu(k), cosines).tril()
    return gated(model, scores @ v, x, weights)


def lightnet(model: ModelConfig, x: Tensor, weights: Weights, layer: int) -> Tensor:
    """After token t the weight of token s in channel c is the softmax of k over the tokens up to t."""
    q, k, v = plain.heads(model, x, weights)
    distance = _distance(x)
    weight = torch.where(distance[None, :, :, None] >= 0, k.exp()[:, None], 0.0)
    weight = weight / weight.sum(dim=2, keepdim=True)
    cosines = _cosines(model, x, weights.get("lrpe.theta", _wavelengths(model)))
    scores = torch.einsum("htc, htsc, htsc -> hts", plain.silu(q), weight, cosines)
    return gated(model, scores @ v, x, weights)


def hgrn2(model: ModelConfig, x: Tensor, weights: Weights, layer: int) -> Tensor:
    """The recurrence, one token at a time."""
    q, f, v = plain.heads(model, x, weights)
    bound = lower_bounds(weights[LOWER_BOUNDS])[layer].view(model.num_heads, 1, model.head_dim)
    forget = bound + (1 - bound) * torch.sigmoid(f)
    S, outputs = torch.zeros(model.num_heads, model.head_dim, model.head_dim, dtype=x.dtype), []
    for t in range(len(x)):
        S = forget[:, t, :, None] * S + (1 - forget[:, t, :, None]) * v[:, t, None, :]
        outputs.append(torch.einsum("hkv, hk -> hv", S, plain.silu(q[:, t])))
    o = plain.concatenated(torch.stack(outputs, dim=1))
    return plain.norm(model, o) @ weights["out_proj.weight"].T


def lower_bounds(table: Tensor) -> Tensor:
    """β (l, d): softmax over the layers, summed up, minus the first row."""
    share = table.exp() / table.exp().sum(dim=0)
    return torch.stack([share[: layer + 1].sum(dim=0) - share[0] for layer in range(len(table))])


def llama(model: ModelConfig, x: Tensor, weights: Weights, layer: int) -> Tensor:
    """Full matrices of attention, with rotations as products of complex numbers; every option."""
    own, heads = model.layer_options(layer), model.num_heads
    groups, width = own.num_key_value_heads or heads, own.head_dim or model.head_dim
    both = x @ weights["kv_proj.weight"].T + weights.get("kv_proj.bias", 0.0)
    k, v = both.view(len(x), groups, 2, width).permute(2, 1, 0, 3)
    q = (x @ weights["q_proj.weight"].T + weights.get("q_proj.bias", 0.0)).view(len(x), heads, -1).transpose(0, 1)
    q, gate = q[..., :width], q[..., width:]
    q, k = (_head_norm(model, own, y, weights.get(name)) for y, name in ((q, "q_norm.weight"), (k, "k_norm.weight")))
    # Neighbours among the heads of queries share one of keys and values.
    k, v = (y[[head * groups // heads for head in range(heads)]] for y in (k, v))
    scores = _turned(q, own) @ _turned(k, own).mT * (own.softmax_scale or 1 / math.sqrt(width))
    if own.attention_logit_cap is not None:
        scores = own.attention_logit_cap * torch.tanh(scores / own.attention_logit_cap)
    distance = _distance(x)
    seen = (distance >= 0 if own.causal else distance > -len(x)) & (distance < (own.window or len(x)))
    weight = torch.where(seen, scores.exp(), 0.0)
    total = weight.sum(dim=-1, keepdim=True)
    if own.attention_sinks:
        total = total + weights["sinks.logit"].exp()[:, None, None]
    o = weight / total @ v
    if own.output_gate:
        o = o / (1 + torch.exp(-gate))
    o = plain.concatenated(o)
    return o @ weights["out_proj.weight"].T + weights.get("out_proj.bias", 0.0)


def _turned(x: Tensor, own: Any) -> Tensor:
    """(h, n, k) at positions 0 … n - 1, by complex numbers on the first channels."""
    if own.positions == "none":
        return x
    width = int(x.size(-1) * own.rope_fraction)
    angles, factor = rotary_angles(width, own)
    phases = torch.arange(x.size(-2), dtype=torch.float64)[:, None] * angles
    turned = torch.complex(*x[..., :width].chunk(2, dim=-1)) * torch.polar(torch.full_like(phases, factor), phases)
    return torch.cat([turned.real, turned.imag, x[..., width:]], dim=-1)


def rotary_angles(width: int, own: Any) -> tuple[Tensor, float]:
    """Angles of a token, one by one, and the factor of what is rotated."""
    angles = [own.rope_theta ** (-2 * i / width) for i in range(width // 2)]
    scaling = own.rope_scaling
    if scaling is None:
        return torch.tensor(angles, dtype=torch.float64), 1.0
    first = scaling.original_max_position_embeddings
    for i, angle in enumerate(angles):
        if scaling.rope_type == "llama3":
            wave = 2 * math.pi / angle
            kept = (first / wave - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        elif scaling.rope_type == "yarn":
            # Channels (not pairs of them) over the number of turns: NTK by parts, section 3.2, as in transformers.
            ends = [
                width * math.log(first / turns / 2 / math.pi) / math.log(own.rope_theta) / 2
                for turns in (scaling.beta_fast or 32, scaling.beta_slow or 1)
            ]
            low, high = (math.floor(ends[0]), math.ceil(ends[1])) if scaling.truncate else ends
            low, high = max(low, 0), min(high, width - 1)
            kept = 1 - (i - low) / (high - low)
        else:
            kept = 0.0
        kept = min(max(kept, 0.0), 1.0)
        angles[i] = kept * angle + (1 - kept) * angle / scaling.factor
    grown = scaling.attention_factor or 1 + 0.1 * math.log(scaling.factor)
    return torch.tensor(angles, dtype=torch.float64), grown if scaling.rope_type == "yarn" else 1.0


def _head_norm(model: ModelConfig, own: Any, x: Tensor, weight: Tensor | None) -> Tensor:
    """(h, n, k): each head, or all heads of a token together, over the root of its mean square."""
    if weight is None:
        return x
    weight = 1 + weight if own.zero_centered_norm else weight
    square = x.square().mean(dim=-1, keepdim=True)
    if own.qk_norm == "all":
        square, weight = square.mean(dim=0), weight.view(len(x), 1, -1)
    return x / (square + model.norm_eps).sqrt() * weight


def lion(model: ModelConfig, x: Tensor, weights: Weights, layer: int) -> Tensor:
    """The masked full matrix, or one a channel, whose rows are divided by their sums, or whose outputs are normed."""
    options = model.layer_options(layer)
    q, k, v = plain.heads(model, x, weights)
    q, k = _lion_features(q, options.feature_map), _lion_features(k, options.feature_map)
    decay = torch.ones(model.num_heads, 1, len(x), dtype=x.dtype)
    if model.layers[layer] == "lion-retnet":
        decay = (1 - 2.0 ** (-5 - torch.arange(model.num_heads, dtype=x.dtype)))[:, None, None].expand_as(decay)
    elif model.layers[layer] == "lion-s":
        decay = torch.sigmoid(x @ weights["forget_proj.weight"].T + weights["forget_proj.bias"]).T
        decay = decay.unflatten(0, (model.num_heads, -1))
        k = k * (1 - decay[:, 0])[..., None] if options.input_gate else k
    gate = getattr(options, "gate", "leave")
    masks = []
    for order in _orders(model, len(x), options.patch_order):
        masks.append(torch.zeros(*decay.shape, len(x), dtype=x.dtype))
        # Row and column of a pair in the order, at the places of its two tokens.
        masks[-1][..., order[:, None], order] = _between(decay[..., order].flatten(0, 1), gate).unflatten(
            0, decay.shape[:2]
        )
    between = sum(masks) / len(masks)
    scores = ((q @ k.mT)[:, None] * between).expand(-1, v.size(-1), -1, -1)
    if options.scale:
        scores = scores / (scores.sum(dim=-1, keepdim=True) + options.eps)
    o = plain.concatenated(torch.einsum("hcij, hjc -> hic", scores, v))
    o = o if options.scale else plain.norm(model, o)
    return o @ weights["out_proj.weight"].T + weights.get("out_proj.bias", 0.0)


def _orders(model: ModelConfig, n: int, kind: str) -> list[Tensor]:
    """The orders in which LION reads the tokens of a document."""
    if kind == "raster":
        return [torch.arange(n)]
    assert model.grid is not None
    (rows, columns), lead = model.grid.shape, model.grid.leading_tokens
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    along_rows = sorted(cells, key=lambda cell: (cell[0], -cell[1] if cell[0] % 2 else cell[1]))
    along_columns = sorted(cells, key=lambda cell: (cell[1], -cell[0] if cell[1] % 2 else cell[0]))
    place = {cell: lead + number for number, cell in enumerate(cells)}
    return [torch.tensor([*range(lead), *(place[cell] for cell in order)]) for order in (along_rows, along_columns)]


def _lion_features(x: Tensor, kind: str) -> Tensor:
    if kind == "elu":
        return torch.nn.functional.elu(x) + 1
    shifted = plain.silu(x) + 0.5
    return shifted / shifted.square().sum(dim=-1, keepdim=True).sqrt() if kind == "silu" else x


def _between(decay: Tensor, gate: str) -> Tensor:
    """(h, n) -> (h, n, n): products of the decays between any two tokens, multiplied up one by one."""
    leave, enter = _products(decay[:, :-1]), _products(decay[:, 1:])
    lower, upper = (leave, enter) if gate == "leave" else (enter, leave)
    return lower.tril() + upper.mT.triu(1)


def _products(steps: Tensor) -> Tensor:
    """(h, n - 1) -> (h, n, n): at [i, j <= i] the product of steps j … i - 1, 1 on the diagonal."""
    n = steps.size(1) + 1
    rows = [torch.ones(len(steps), 1, dtype=steps.dtype)]
    for i in range(1, n):
        rows.append(torch.cat([rows[-1] * steps[:, i - 1, None], rows[0]], dim=1))
    return torch.stack([torch.nn.functional.pad(row, (0, n - row.size(1))) for row in rows], dim=1)


def lightnet_whole(model: ModelConfig, x: Tensor, weights: Weights, layer: int) -> Tensor:
    """The weight of token s in channel c is the softmax of k over the document."""
    q, k, v = plain.heads(model, x, weights)
    cosines = _cosines(model, x, weights.get("lrpe.theta", _wavelengths(model)))
    weight = k.exp() / k.exp().sum(dim=1, keepdim=True)
    scores = torch.einsum("htc, hsc, htsc -> hts", plain.silu(q), weight, cosines)
    return gated(model, scores @ v, x, weights)


def decay_attention(model: ModelConfig, x: Tensor, weights: Weights, layer: int) -> Tensor:
    """LION-S as a masked matrix whose rows are divided by their sums, others as recurrences, token by token."""
    own, heads = model.layer_options(layer), model.num_heads
    both = _convolved(x @ weights["kv_proj.weight"].T, weights.get("kv_conv.weight"))
    k, v = both.view(len(x), heads, 2, -1).permute(2, 1, 0, 3)
    q = _convolved(x @ weights["q_proj.weight"].T, weights.get("q_conv.weight")).view(len(x), heads, -1).transpose(0, 1)
    if own.feature_map == "silu":
        q, k = plain.silu(q), plain.silu(k)
    else:
        q, k = (_lion_features(y, own.feature_map.removeprefix("shifted_")) for y in (q, k))
    decay, step = _scalar_decays(own.decay, x, weights, heads)
    if own.decay == "sigmoid":
        # Gates of the tokens that are entered, as a causal recurrence has them.
        scores = (q @ (k * step[..., None] if own.input_gate else k).mT) * _products(decay[:, 1:])
        if own.scale:
            scores = scores / (scores.sum(dim=-1, keepdim=True) + own.eps)
        o = scores @ v
    else:
        S, outputs = torch.zeros(heads, 1, 1, dtype=torch.complex128), []
        place = torch.arange(model.head_dim // 2, dtype=torch.float64)
        theta = 10000.0 ** (-2 * place / model.head_dim)
        if own.positions == "lrpe":
            theta = weights["lrpe.theta"]
        places = plain.places(model, len(x)).repeat_interleave(model.head_dim // model.axes, dim=-1)
        for t in range(len(x)):
            key, query = k[:, t].to(torch.complex128), q[:, t].to(torch.complex128)
            if own.positions == "rope":
                key, query = (torch.complex(*y[:, t].chunk(2, dim=-1)) for y in (k, q))
            if own.positions != "none":
                angle = t * theta if own.positions == "rope" else places[t] * theta
                turn = torch.polar(torch.ones_like(theta), angle)
                key, query = key * turn, query * turn
            written = step[:, t, None] * key if own.input_gate else key
            values = torch.cat([v[:, t], torch.ones(heads, 1, dtype=torch.float64)], dim=-1)
            S = decay[:, t, None, None] * S + written[..., None] * values[:, None]
            outputs.append(torch.einsum("hkv, hk -> hv", S, query.conj()).real)
        o = torch.stack(outputs, dim=1)
        o = o[..., :-1] / (o[..., -1:] + own.eps) if own.scale else o[..., :-1]
    if own.output == "gated":
        return plain.gated_output(model, o, x, weights)
    o = plain.concatenated(o)
    return (plain.norm(model, o) if own.output == "norm" else o) @ weights["out_proj.weight"].T


def delta_net(model: ModelConfig, x: Tensor, weights: Weights, layer: int) -> Tensor:
    """The delta rule token by token: first the decay, then what the state returns for the key is replaced."""
    own, heads, n = model.layer_options(layer), model.num_heads, len(x)
    K, V = own.key_head_dim or model.head_dim, own.value_head_dim or model.head_dim
    N = own.num_value_heads or heads
    groups = N // heads
    written = (x @ weights["kv_proj.weight"].T).view(n, heads, -1)
    k, v, beta, a = written.split([K, groups * V, groups, written.size(2) - K - groups * (V + 1)], dim=2)
    read = (x @ weights["q_proj.weight"].T).view(n, heads, -1)
    q, gate = read.split([K, read.size(2) - K], dim=2)
    kv = _convolved(torch.cat([k, v], dim=2).flatten(1), weights.get("kv_conv.weight"))
    q = _convolved(q.flatten(1), weights.get("q_conv.weight"))
    if not own.short_convolution:
        kv, q = plain.silu(kv), plain.silu(q)
    k, v = kv.view(n, heads, -1).split([K, groups * V], dim=2)
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q.view(n, heads, K), k))
    # Heads of values in their order; those that share a head of keys are neighbours.
    q, k = (y[:, [head // groups for head in range(N)]] for y in (q, k))
    v, gate = v.reshape(n, N, V), gate.reshape(n, N, -1)
    beta = (1 + own.negative_eigenvalues) / (1 + torch.exp(-beta.reshape(n, N)))
    decay = torch.ones(n, N, 1, dtype=x.dtype)
    if "decay.A_log" in weights:
        if "forget_up.weight" in weights:
            a = (x @ weights["forget_down.weight"].T @ weights["forget_up.weight"].T).view(n, N, K)
            gate = (x @ weights["gate_down.weight"].T @ weights["gate_up.weight"].T).view(n, N, V)
        step = torch.log(1 + torch.exp(a.reshape(n, N, -1) + weights["step.dt_bias"].view(N, -1)))
        decay = torch.exp(-weights["decay.A_log"].exp()[:, None] * step)
    S, outputs = torch.zeros(N, K, V, dtype=x.dtype), []
    for t in range(n):
        S = decay[t][..., None] * S
        removed = torch.einsum("hk, hkv -> hv", k[t], S)
        S = S + beta[t][:, None, None] * torch.einsum("hk, hv -> hkv", k[t], v[t] - removed)
        outputs.append(torch.einsum("hk, hkv -> hv", q[t] / K**0.5, S))
    o = torch.stack(outputs)
    o = o / (o.square().mean(-1, keepdim=True) + own.output_norm_eps).sqrt() * weights["output_norm.weight"]
    if "forget_up.weight" in weights:
        o = o / (1 + torch.exp(-gate))
    elif "decay.A_log" in weights:
        o = o * plain.silu(gate)
    return o.flatten(1) @ weights["out_proj.weight"].T


def _convolved(x: Tensor, kernel: Tensor | None) -> Tensor:
    """(n, c): the sums of the last tokens, weighted, and silu."""
    if kernel is None:
        return x
    width, rows = kernel.size(1), []
    for t in range(len(x)):
        seen = range(max(0, t - width + 1), t + 1)
        rows.append(sum((x[s] * kernel[:, width - 1 - (t - s)] for s in seen), torch.zeros_like(x[0])))
    return plain.silu(torch.stack(rows))


def _scalar_decays(kind: str, x: Tensor, weights: Weights, heads: int) -> tuple[Tensor, Tensor]:
    """(h, n) each: what is left of the state, and what the input gate lets in."""
    ones = torch.ones(heads, len(x), dtype=x.dtype)
    if kind in ("sigmoid", "softplus"):
        logits = (x @ weights["forget_proj.weight"].T + weights["forget_proj.bias"]).T
        if kind == "sigmoid":
            return 1 / (1 + torch.exp(-logits)), 1 / (1 + torch.exp(logits))
        step = torch.log(1 + torch.exp(logits))
        return torch.exp(step * -torch.exp(weights["decay.log_rate"])[:, None]), step
    if kind == "learned":
        return torch.sigmoid(weights["decay.logit"])[:, None] * ones, ones
    exponents = -5 - torch.arange(heads, dtype=x.dtype)
    return ((1 - 2.0**exponents) if kind == "fixed" else ones[:, 0])[:, None] * ones, ones


gated: Callable[..., Tensor] = plain.gated_output
MIX: dict[str, Callable[..., Tensor]] = {
    "tnl": tnl,
    "hgrn2": hgrn2,
    "cosformer2": cosformer2,
    "lightnet": lightnet,
    "llama": llama,
    "llama-local": llama,
    "noncausal": lightnet_whole,
    "lion-s": lion,
    "lion-fixed": lion,
    "lion-vector": lion,
    "decay-attention": decay_attention,
    "mamba2": decay_attention,
    "delta-net": delta_net,
    "gated-delta-net": delta_net,
    "kimi-delta": delta_net,
}
ENCODE: dict[str, Any] = {"cosformer2": plain.toeplitz, "lightnet": plain.toeplitz, "noncausal": plain.toeplitz}
"""What the model does before its first layer, for those where it does something."""


def _distance(x: Tensor) -> Tensor:
    """t - s, (n, n)."""
    position = torch.arange(len(x), dtype=torch.float64)
    return position[:, None] - position


def _wavelengths(model: ModelConfig) -> Tensor:
    """(h, c): 10000^(-2j/d), j counted over the heads' channels of an axis, d their number."""
    width = model.hidden_size // model.axes
    of_axis = 10000.0 ** (-2 * torch.arange(width, dtype=torch.float64) / width)
    return of_axis.view(model.num_heads, -1).repeat(1, model.axes)


def _cosines(model: ModelConfig, x: Tensor, theta: Tensor) -> Tensor:
    """(h, c) -> (h, n, n, c): channel c of a head turns along axis c A / k."""
    places = plain.places(model, len(x))
    distance = (places[:, None] - places).repeat_interleave(theta.size(1) // places.size(1), dim=-1)
    return torch.cos(distance * theta[:, None, None, :])


def _rotated(x: Tensor) -> Tensor:
    """(h, n, k) at positions 0 … n - 1: channel i is the real part and i + k/2 the imaginary part of a number."""
    half = x.size(-1) // 2
    angles = 10000.0 ** (-2 * torch.arange(half, dtype=torch.float64) / (2 * half))
    phases = torch.arange(x.size(-2), dtype=torch.float64)[:, None] * angles
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(phases), phases)
    return torch.cat([turned.real, turned.imag], dim=-1)
