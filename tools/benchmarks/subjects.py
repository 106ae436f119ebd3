"""The operators that ``bench.py kernels`` times: inputs, whom they are compared with, and what their passes cost.

fla-core is an optional package; its kernels are called with its published arguments, so that they compute the same
function as ours (``gpu_kernels.py`` measures by how much they differ).

Counts are those of the pages ``docs/reference/operators/NAME.md``.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import logsigmoid, normalize, scaled_dot_product_attention

from lightscale.kernels.common.angles import Angles, features, phases_of
from lightscale.kernels.delta_rule import delta_rule, delta_rule_reference
from lightscale.kernels.gla import gla, gla_reference
from lightscale.kernels.lightnet import lightnet_attention, lightnet_attention_reference
from lightscale.kernels.lightning import lightning_attention, lightning_attention_reference
from lightscale.models.layers.positions import lrpe_angles

FORWARD, BOTH = PASSES = ("forward", "forward + backward")
OURS, FLA, RECURRENCE, SOFTMAX = "lightscale", "fla-core", "recurrence", "softmax attention"

# ns per token-head in bf16 at width 128 on an H200, by pass; and how many times that the others may take.
CONSTANT_DECAY_NS = {FORWARD: 1.2, BOTH: 3.5}
CHANNEL_DECAY, LIGHTNET, LIGHTNET_LRPE = 2.5, 1.3, 2.2

Form = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes to and from memory and FLOPs of a pass, per token and head."""

    bytes: float
    flops: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(bytes=self.bytes + other.bytes, flops=self.flops + other.flops)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and on what all operators run."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    width: int
    """Of keys and values."""

    def leaf(self, rows: int, tokens: int, width: int, seed: int) -> Tensor:
        """(rows, tokens, heads, width), normal, that takes a gradient."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (rows, tokens, self.num_heads, width)
        x = torch.randn(shape, dtype=self.dtype, device=self.device, generator=generator)
        return x.requires_grad_()


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An operator, and the ways to compute it."""

    name: str
    inputs: Callable[[int, int], tuple[Tensor, ...]]
    """Of so many rows and tokens; gradients are taken of those that require one."""
    ways: dict[str, Form]
    """Ours first, where there is one."""
    costs: dict[str, Cost] = field(default_factory=dict)
    """Of our kernels, by pass; empty where ours is not computed by them."""
    target_ns: dict[str, float] = field(default_factory=dict)
    """The most per token-head on an H200, by pass; empty: none is set."""


def subjects(setting: Setting, *, with_fla: bool) -> list[Subject]:
    """All operators, and softmax attention.

    ``with_fla``: beside fla-core's kernels; else beside the recurrence, one token at a time, for a CPU.
    """
    widths = (setting.width, 2 * setting.width)
    return [
        *(_constant_decay(setting, key_width, with_fla=with_fla) for key_width in widths),
        _constant_decay_with_lrpe(setting, with_fla=with_fla),
        _token_decay(setting, with_fla=with_fla),
        _channel_decay(setting, with_fla=with_fla),
        *(_lightnet(setting, with_lrpe=with_lrpe, with_fla=with_fla) for with_lrpe in (False, True)),
        *(_delta_rule(setting, by_channel=by_channel, with_fla=with_fla) for by_channel in (False, True)),
        _softmax(setting),
    ]


def fla_kernel(module: str, name: str) -> Callable[..., Any] | None:
    """A function of fla-core, or None when this machine has none of that name."""
    if find_spec("fla") is None:
        return None
    try:
        return getattr(import_module(f"fla.ops.{module}"), name, None)
    except ImportError as error:  # an older release, or one whose own needs are not met
        print(f"fla-core, {name}: {error}", file=sys.stderr)
        return None


def _beside(ours: Form, reference: Form, fla: Form | None, *, with_fla: bool) -> dict[str, Form]:
    if not with_fla:
        return {OURS: ours, RECURRENCE: reference}
    return {OURS: ours} | ({} if fla is None else {FLA: fla})


def _scaled(target: dict[str, float], factor: float) -> dict[str, float]:
    return {name: ns * factor for name, ns in target.items()}


def _constant_decay(setting: Setting, key_width: int, *, with_fla: bool) -> Subject:
    """A fixed decay per head, TNL's; keys of twice the width are LRPE's features, written to memory before."""
    width, log_decay = setting.width, _log_decay(setting)
    simple_gla = fla_kernel("simple_gla", "chunk_simple_gla")

    def inputs(rows: int, tokens: int) -> tuple[Tensor, ...]:
        widths = (key_width, key_width, width)
        return tuple(setting.leaf(rows, tokens, wide, seed) for seed, wide in enumerate(widths))

    on_gpu = setting.device.type == "cuda"
    return Subject(
        name="constant decay" if key_width == width else f"constant decay {key_width} x {width}",
        inputs=inputs,
        ways=_beside(
            lambda q, k, v: lightning_attention(q, k, v, log_decay)[0],
            lambda q, k, v: lightning_attention_reference(q, k, v, log_decay)[0],
            simple_gla and (lambda q, k, v: simple_gla(q, k, v, g_gamma=log_decay, scale=1.0)[0]),
            with_fla=with_fla,
        ),
        costs=lightning_costs(key_width, width) if on_gpu else {},
        target_ns=CONSTANT_DECAY_NS if key_width == width else {},
    )


def _constant_decay_with_lrpe(setting: Setting, *, with_fla: bool) -> Subject:
    """LRPE applied where queries and keys are read; fla-core's kernel is given features, made before."""
    width, log_decay, theta = setting.width, _log_decay(setting), _theta(setting)
    simple_gla = fla_kernel("simple_gla", "chunk_simple_gla")

    def inputs(rows: int, tokens: int) -> tuple[Tensor, ...]:
        positions = torch.arange(tokens, device=setting.device).repeat(rows, 1)
        return *(setting.leaf(rows, tokens, width, seed) for seed in range(3)), positions

    def beside(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        assert simple_gla is not None
        phases = phases_of(Angles(theta, positions), q.dtype)
        o: Tensor = simple_gla(features(q, phases), features(k, phases), v, g_gamma=log_decay, scale=1.0)[0]
        return o

    return Subject(
        name="constant decay with LRPE",
        inputs=inputs,
        ways=_beside(
            lambda q, k, v, positions: lightning_attention(q, k, v, log_decay, angles=Angles(theta, positions))[0],
            lambda q, k, v, positions: lightning_attention_reference(
                q, k, v, log_decay, angles=Angles(theta, positions)
            )[0],
            simple_gla and beside,
            with_fla=with_fla,
        ),
        costs=lightning_lrpe_costs(width, width) if setting.device.type == "cuda" else {},
    )


def _log_decay(setting: Setting) -> Tensor:
    heads = setting.num_heads
    return -(2.0 ** (-8 * torch.arange(1, heads + 1, device=setting.device) / heads))


def _theta(setting: Setting) -> Tensor:
    """The angles that a model begins with."""
    return lrpe_angles(setting.num_heads, setting.width).float().to(setting.device)


def _token_decay(setting: Setting, *, with_fla: bool) -> Subject:
    """A learned decay per head and token, as in Mamba-2."""
    simple_gla = fla_kernel("simple_gla", "chunk_simple_gla")

    def inputs(rows: int, tokens: int) -> tuple[Tensor, ...]:
        q, k, v = (setting.leaf(rows, tokens, setting.width, seed) for seed in range(3))
        log_decay = logsigmoid(setting.leaf(rows, tokens, 1, 3).detach().float()[..., 0] + 3)
        return q, k, v, log_decay.requires_grad_()

    return Subject(
        name="decay per token",
        inputs=inputs,
        ways=_beside(
            lambda *x: lightning_attention(*x)[0],
            lambda *x: lightning_attention_reference(*x)[0],
            simple_gla and (lambda q, k, v, log_decay: simple_gla(q, k, v, g=log_decay, scale=1.0)[0]),
            with_fla=with_fla,
        ),
        costs=lightning_token_costs(setting.width, setting.width) if setting.device.type == "cuda" else {},
    )


def _channel_decay(setting: Setting, *, with_fla: bool) -> Subject:
    """HGRN2's decay f per token and channel, and k = 1 - f."""
    chunk_gla = fla_kernel("gla", "chunk_gla")

    def inputs(rows: int, tokens: int) -> tuple[Tensor, ...]:
        q, decay, v = (setting.leaf(rows, tokens, setting.width, seed) for seed in range(3))
        log_decay = logsigmoid(decay.detach().float() + 1)
        k = (-torch.expm1(log_decay)).to(setting.dtype)
        return q, k.requires_grad_(), v, log_decay.requires_grad_()

    return Subject(
        name="decay per channel",
        inputs=inputs,
        ways=_beside(
            lambda *x: gla(*x)[0],
            lambda *x: gla_reference(*x)[0],
            chunk_gla and (lambda q, k, v, log_decay: chunk_gla(q, k, v, log_decay, scale=1.0)[0]),
            with_fla=with_fla,
        ),
        costs=gla_costs(setting.width, setting.width) if setting.device.type == "cuda" else {},
        target_ns=_scaled(CONSTANT_DECAY_NS, CHANNEL_DECAY),
    )


def _lightnet(setting: Setting, *, with_lrpe: bool, with_fla: bool) -> Subject:
    """LightNet's additive decay; with LRPE its angles are those of a model, and fla-core's path is given features."""

    def inputs(rows: int, tokens: int) -> tuple[Tensor, ...]:
        leaves = tuple(setting.leaf(rows, tokens, setting.width, seed) for seed in range(3))
        if not with_lrpe:
            return leaves
        positions = torch.arange(tokens, device=setting.device).repeat(rows, 1)
        return *leaves, positions

    def angles(*positions: Tensor) -> Angles | None:
        return Angles(_theta(setting), *positions) if positions else None

    width = setting.width
    return Subject(
        name="LightNet with LRPE" if with_lrpe else "LightNet",
        inputs=inputs,
        ways=_beside(
            lambda q, k, v, *positions: lightnet_attention(q, k, v, angles=angles(*positions))[0],
            lambda q, k, v, *positions: lightnet_attention_reference(q, k, v, angles=angles(*positions))[0],
            _fla_lightnet(angles),
            with_fla=with_fla,
        ),
        costs=lightnet_costs(width, width, with_lrpe=with_lrpe) if setting.device.type == "cuda" else {},
        target_ns=_scaled(CONSTANT_DECAY_NS, LIGHTNET_LRPE if with_lrpe else LIGHTNET),
    )


def _fla_lightnet(angles: Callable[..., Angles | None]) -> Form | None:
    """fla-core's path: weights and decays of a kernel of its own, then its GLA. LRPE doubles what GLA is given."""
    additive_gate, chunk_gla = fla_kernel("gsa.gate", "fused_additive_gate"), fla_kernel("gla", "chunk_gla")
    if additive_gate is None or chunk_gla is None:
        return None

    def path(q: Tensor, k: Tensor, v: Tensor, *positions: Tensor) -> Tensor:
        weights, log_decay, _ = additive_gate(k)
        if (given := angles(*positions)) is not None:
            phases = phases_of(given, q.dtype)
            q, weights = features(q, phases), features(weights, phases)
            log_decay = torch.cat([log_decay, log_decay], -1)
        o: Tensor = chunk_gla(q, weights, v, log_decay, scale=1.0)[0]
        return o

    return path


def _delta_rule(setting: Setting, *, by_channel: bool, with_fla: bool) -> Subject:
    """Keys and queries of length 1; decays of gated DeltaNet, per head, or of Kimi Delta Attention, per channel."""
    beside = fla_kernel("kda", "chunk_kda") if by_channel else fla_kernel("gated_delta_rule", "chunk_gated_delta_rule")

    def inputs(rows: int, tokens: int) -> tuple[Tensor, ...]:
        q, k, v = (setting.leaf(rows, tokens, setting.width, seed) for seed in range(3))
        q, k = (normalize(x.detach(), dim=-1).requires_grad_() for x in (q, k))
        decay, beta = (setting.leaf(rows, tokens, setting.width if n else 1, 3 + n).detach() for n in (by_channel, 0))
        log_decay = logsigmoid((decay if by_channel else decay[..., 0]).float() + 3)
        return q, k, v, log_decay.requires_grad_(), torch.sigmoid(beta[..., 0]).requires_grad_()

    width = setting.width
    return Subject(
        name=f"delta rule, decay per {'channel' if by_channel else 'head'}",
        inputs=inputs,
        ways=_beside(
            lambda *x: delta_rule(*x)[0],
            lambda *x: delta_rule_reference(*x)[0],
            beside and (lambda q, k, v, log_decay, beta: beside(q, k, v, log_decay, beta, scale=1.0)[0]),
            with_fla=with_fla,
        ),
        costs=delta_rule_costs(width, width, by_channel=by_channel) if setting.device.type == "cuda" else {},
    )


def _softmax(setting: Setting) -> Subject:
    """PyTorch's flash attention (on CPUs what PyTorch takes there), on views with heads before tokens."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            o = scaled_dot_product_attention(q, k, v, is_causal=True)
        return o.transpose(1, 2)

    def inputs(rows: int, tokens: int) -> tuple[Tensor, ...]:
        return tuple(setting.leaf(rows, tokens, setting.width, seed) for seed in range(3))

    return Subject(name=SOFTMAX, inputs=inputs, ways={"flash": attend})


def lightning_costs(K: int, V: int, *, chunk: int = 128, block: int = 64) -> dict[str, Cost]:
    """What operators/lightning.md counts, in half precision: each pass over memory is written out there."""
    state = 2 * K * V / chunk
    # Partners per token: whole blocks up to its own.
    partners = (chunk + block) / 2
    scan = Cost(bytes=2 * (K + V) + state, flops=2 * K * V)

    def products(X: int, Z: int) -> Cost:
        tiles = -(-Z // 64)
        return Cost(bytes=2 * (2 * X + 2 * Z) + state, flops=2 * partners * (X * tiles + Z) + 2 * K * V)

    forward = scan + products(K, V)
    backward = scan + products(V, K) + scan + products(V, K) + products(K, V)
    return {FORWARD: forward, BOTH: forward + backward}


def lightning_token_costs(K: int, V: int, *, chunk: int = 128, block: int = 64) -> dict[str, Cost]:
    """What operators/lightning.md counts with a decay per head and token: its sums, and its gradient."""
    usual, sums, tiles = lightning_costs(K, V, chunk=chunk, block=block), 8, -(-K // 64)
    made = Cost(bytes=4 + sums, flops=0)
    parts = 2 * 4 * tiles * chunk / block  # written, and read by the gather
    # q or k and the other states again; pairs of q and k, and those that cross each token.
    pairs = 2 * (chunk + block) / 2 * (K + 64 * tiles)
    learned = Cost(bytes=2 * 2 * K + 2 * K * V / chunk + 2 * parts + 4, flops=pairs)
    forward = usual[FORWARD] + made + Cost(bytes=2 * sums, flops=0)
    return {FORWARD: forward, BOTH: usual[BOTH] + made + made + Cost(bytes=7 * sums, flops=0) + learned}


def lightning_lrpe_costs(K: int, V: int, *, chunk: int = 128, block: int = 64) -> dict[str, Cost]:
    """What operators/lightning.md counts with angles: features are made where they are used, 128 columns at a time."""
    R = 2 * K
    key, value, state, dtheta = 2 * K, 2 * V, 2 * R * V / chunk, 8 * K / block
    partners = (chunk + block) / 2
    through = 2 * R * V
    scan = Cost(bytes=key + value + state, flops=through)
    values = Cost(bytes=2 * key + 2 * value + state, flops=2 * partners * (R + V) + through)  # o, dv
    keys = Cost(bytes=3 * key + 2 * value + state + dtheta, flops=2 * partners * (2 * V + 2 * R) + through)  # dq, dk
    forward = scan + values
    backward = scan + keys + scan + keys + values
    return {FORWARD: forward, BOTH: forward + backward}


def gla_costs(K: int, V: int, *, chunk: int = 64) -> dict[str, Cost]:
    """What operators/gla.md counts, in half precision with fp32 log decays."""
    key, value, decay = 2 * K, 2 * V, 4 * K
    scores, state, through = 2 * chunk, 2 * K * V / chunk, 4 * K / chunk
    levels, product, tiles = (chunk - 1).bit_length(), 2 * chunk * K, -(-K // 32)
    prepare = Cost(bytes=4 * key + decay + scores + through, flops=(5 * levels + 4) * product)
    scan = Cost(bytes=key + value + state, flops=2 * K * V)
    attend = Cost(bytes=scores + key + 2 * value + state, flops=2 * chunk * V + 2 * K * V)
    gradients = Cost(bytes=4 * key + 2 * value + 2 * decay + 2 * state, flops=(4 * levels + 10 + 2 * tiles) * product)
    forward = prepare + scan + attend
    return {FORWARD: forward, BOTH: forward + prepare + scan + scan + attend + gradients}


def lightnet_costs(K: int, V: int, *, with_lrpe: bool, chunk: int = 128) -> dict[str, Cost]:
    """What operators/lightnet.md counts, in half precision with fp32 z; angles are applied where they are used."""
    R = 2 * K if with_lrpe else K
    key, value, z, state = 2 * K, 2 * V, 4 * K, 2 * R * V / chunk
    states = key + value + state
    weigh = key + z
    outputs = 2 * key + 2 * value + z + state  # also of dq and, with the roles changed, dv
    cotangents = 2 * key + value + z + state
    dk = 4 * key + 2 * value + z + state
    forward = Cost(bytes=states + weigh + outputs, flops=2 * chunk * (R + V) + 4 * R * V)
    backward = Cost(
        bytes=states + weigh + outputs + cotangents + dk + outputs,
        flops=6 * chunk * R + 4 * chunk * V + 10 * R * V,
    )
    return {FORWARD: forward, BOTH: forward + backward}


def delta_rule_costs(K: int, V: int, *, by_channel: bool, chunk: int = 32) -> dict[str, Cost]:
    """What operators/delta-rule.md counts, in half precision with fp32 decays; FLOPs of keys, values and states."""
    key, value, pairs, state = 2 * K, 2 * V, 2 * chunk, 2 * K * V / chunk
    scan_tiles, key_tiles, levels = -(-V // 32), -(-K // 64), (chunk - 1).bit_length() if by_channel else 1
    # log α; the decays that scans read with β; and keys beside those that are read, from the chunk's edges.
    decay = 4 * K if by_channel else 4
    edges = 4 + (4 * K / chunk if by_channel else 8)
    written = key if by_channel else 0
    of_keys, of_values, through = 2 * chunk * K, 2 * chunk * V, 2 * K * V

    prepare = Cost(
        bytes=2 * key + decay + 2 * pairs + edges + (3 * key if by_channel else 0), flops=2 * levels * of_keys
    )
    outputs = Cost(bytes=2 * key + written + 2 * value + 2 * pairs + edges, flops=2 * of_values + 3 * through)
    states = Cost(bytes=key + written + 2 * value + pairs + edges + state, flops=of_values + 2 * through)
    # Parts of dβ by tile of values, written, read and added up.
    parts = 4 * (2 * scan_tiles + 1)
    cotangents = Cost(
        bytes=2 * key + written + 3 * value + 2 * pairs + edges + parts + state, flops=2 * of_values + 3 * through
    )
    # The gradient of log α: of each channel, or in parts by tile of keys.
    dlog_decay = 4 * K if by_channel else 4 * (2 * key_tiles + 1)
    gradients = Cost(
        bytes=4 * key + 3 * value + 2 * state + decay + edges + dlog_decay,
        flops=2 * of_values + 4 * levels * of_keys + 3 * through,
    )
    forward = prepare + outputs
    return {FORWARD: forward, BOTH: forward + prepare + states + cotangents + gradients}
