"""Every operator with random inputs, and its results beside exact ones; loaded by path.

Nothing here knows of a GPU: `test_comparing.py` runs it on CPUs at small sizes, so that it works when there is one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightscale.errors import UserError
from lightscale.kernels.common.angles import angles_of
from lightscale.kernels.common.backends import implementation
from lightscale.kernels.cross_entropy import linear_cross_entropy
from lightscale.kernels.delta_rule import delta_rule
from lightscale.kernels.forget_gate import forget_gate
from lightscale.kernels.gla import gla
from lightscale.kernels.glu import glu
from lightscale.kernels.heads import Heads, split_heads
from lightscale.kernels.lightnet import LightNetState, StateCotangent, lightnet_attention, lightnet_noncausal
from lightscale.kernels.lightning import lightning_attention, token_decays
from lightscale.kernels.lion import LionState, lion, lion_vector
from lightscale.kernels.log_sum import log_sum
from lightscale.kernels.norm import norm, sum_and_norm
from lightscale.kernels.operators import get_operator
from lightscale.kernels.relation import relation
from lightscale.kernels.tpe import tpe_scan
from lightscale.models.layers.positions import lrpe_angles

# RMSE of the difference to fp64 by RMSE; half of bf16's is the rounding of the results themselves.
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}
# Not rounded results, but differences or sums over all tokens of rounded ones.
DIFFERENCES = {"dz": 4.0, "dangles": 4.0}
# Inputs without a gradient.
FIXED = ("theta", "positions", "labels")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of q, k (rows, tokens, heads, K) and v; what has no heads has K channels."""

    rows: int
    tokens: int
    heads: int = 1
    K: int
    V: int = 0


class Draw:
    """Random tensors of a dtype on a device, each from its own seed."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self._seed = 0

    def __call__(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        self._seed += 1
        generator = torch.Generator(self.device).manual_seed(self._seed)
        return torch.randn(sizes, dtype=dtype or self.dtype, device=self.device, generator=generator)

    def wide(self, *sizes: int) -> Tensor:
        """fp32 whatever the dtype: states and parameters."""
        return self(*sizes, dtype=torch.float32)

    def qkv(self) -> dict[str, Tensor]:
        x = self.shape
        return {name: self(x.rows, x.tokens, x.heads, width) for name, width in (("q", x.K), ("k", x.K), ("v", x.V))}


@dataclass(frozen=True, kw_only=True)
class Case:
    operator: str
    """As ``lightscale.kernels.operators`` describes it; another is refused."""
    draw: Callable[[Draw], dict[str, Tensor]]
    """Inputs by name, but for states."""
    form: Callable[..., dict[str, Tensor]]
    """(backend, cu_seqlens, **inputs) -> outputs by name."""
    state: Callable[[Draw], dict[str, Tensor]] = lambda draw: {}
    """The state that enters, as inputs."""
    by_token: tuple[str, ...]
    """Inputs and outputs whose dim 1 are tokens."""
    passes: Callable[["Passes"], dict[str, Any]] | None = None
    """What the passes of state passing give, where it has any."""
    chunked: ModuleType | None = None
    """The passes that are compared with, where the chunked back-end's are not those of these inputs."""

    def __post_init__(self) -> None:
        get_operator(self.operator)


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Passes of an operator and what they are called with."""

    forms: Any
    """Has state_fwd, out_fwd, state_bwd and grad_bwd: a module."""
    inputs: dict[str, Tensor]
    cu_seqlens: Tensor
    cotangent: Callable[[Tensor], Tensor]
    """A random one, like a tensor."""


def _gla_draw(draw: Draw) -> dict[str, Tensor]:
    inputs = draw.qkv()
    log_decay = F.logsigmoid(draw.wide(*inputs["q"].shape) + 1)
    return inputs | {"k": (-torch.expm1(log_decay)).to(draw.dtype), "log_decay": log_decay}


def _gla(backend: str, cu_seqlens: Tensor | None, state: Tensor | None = None, **inputs: Tensor) -> dict[str, Tensor]:
    options: dict[str, Any] = {"backend": backend, "cu_seqlens": cu_seqlens, "initial_state": state}
    o, final = gla(**inputs, **options, output_final_state=True)
    assert final is not None
    return {"o": o, "final": final}


def _delta_rule_draw(draw: Draw) -> dict[str, Tensor]:
    """Keys of length 1, as layers give them: states grow with longer ones."""
    inputs = draw.qkv()
    unit = {name: F.normalize(inputs[name].float(), dim=-1).to(draw.dtype) for name in ("q", "k")}
    return inputs | unit | {"beta": torch.sigmoid(draw.wide(*inputs["v"].shape[:3]))}


def _delta_rule(
    backend: str,
    cu_seqlens: Tensor | None,
    state: Tensor | None = None,
    log_decay: Tensor | None = None,
    **inputs: Tensor,
) -> dict[str, Tensor]:
    options: dict[str, Any] = {"backend": backend, "cu_seqlens": cu_seqlens, "initial_state": state}
    o, final = delta_rule(**inputs, log_decay=log_decay, **options, output_final_state=True)
    assert final is not None
    return {"o": o, "final": final}


def _token_decay_draw(draw: Draw) -> dict[str, Tensor]:
    """Decays from near 1 to far below it."""
    inputs = draw.qkv()
    return inputs | {"log_decay": F.logsigmoid(4 * draw.wide(*inputs["q"].shape[:3]) + 4)}


def _token_decay(
    backend: str, cu_seqlens: Tensor | None, state: Tensor | None = None, **inputs: Tensor
) -> dict[str, Tensor]:
    options: dict[str, Any] = {"backend": backend, "cu_seqlens": cu_seqlens, "initial_state": state}
    o, final = lightning_attention(**inputs, **options, output_final_state=True)
    assert final is not None
    return {"o": o, "final": final}


def _lion_draw(draw: Draw) -> dict[str, Tensor]:
    """Features as positive as those of its mixers, or normalisers would be near 0."""
    inputs = _token_decay_draw(draw)
    return inputs | {name: inputs[name].abs() for name in ("q", "k")}


def _lion(
    backend: str,
    cu_seqlens: Tensor | None,
    prefix: Tensor | None = None,
    suffix: Tensor | None = None,
    **inputs: Tensor,
) -> dict[str, Tensor]:
    state = None if prefix is None or suffix is None else LionState(prefix, suffix)
    options: dict[str, Any] = {"backend": backend, "cu_seqlens": cu_seqlens, "initial_state": state}
    o, final = lion(**inputs, **options, output_final_state=True)
    assert final is not None
    # The suffix leaves the row's first document: without states only what its last one gives too.
    return {"o": o} if state is None else {"o": o, "final prefix": final.prefix, "final suffix": final.suffix}


def _lion_vector_draw(draw: Draw) -> dict[str, Tensor]:
    inputs = _lion_draw(draw)
    return inputs | {"log_decay": F.logsigmoid(4 * draw.wide(*inputs["v"].shape) + 4)}


def _lion_vector(backend: str, cu_seqlens: Tensor | None, **inputs: Tensor) -> dict[str, Tensor]:
    return {"o": lion_vector(**inputs, cu_seqlens=cu_seqlens, backend=backend)}


def _lion_state(draw: Draw) -> dict[str, Tensor]:
    x = draw.shape
    return {name: draw.wide(x.rows, x.heads, x.K, x.V + 1).abs() for name in ("prefix", "suffix")}


def _lightnet(
    backend: str,
    cu_seqlens: Tensor | None,
    theta: Tensor | None = None,
    positions: Tensor | None = None,
    z: Tensor | None = None,
    S: Tensor | None = None,
    **inputs: Tensor,
) -> dict[str, Tensor]:
    state = None if z is None or S is None else LightNetState(z, S)
    angles = angles_of(theta, positions)
    options: dict[str, Any] = {"backend": backend, "cu_seqlens": cu_seqlens, "initial_state": state, "angles": angles}
    o, final = lightnet_attention(**inputs, **options, output_final_state=True)
    assert final is not None
    return {"o": o, "final_z": final.z, "final_S": final.S}


def _whole_lightnet(
    backend: str, cu_seqlens: Tensor | None, theta: Tensor, positions: Tensor, **inputs: Tensor
) -> dict[str, Tensor]:
    angles = angles_of(theta, positions)
    return {"o": lightnet_noncausal(**inputs, angles=angles, cu_seqlens=cu_seqlens, backend=backend)}


def _angles(draw: Draw) -> dict[str, Tensor]:
    """Those of a model, from the second million of tokens on."""
    x = draw.shape
    positions = 2**20 + torch.arange(x.tokens, device=draw.device)
    return {
        "theta": lrpe_angles(x.heads, x.K).float().to(draw.device),
        "positions": positions.repeat(x.rows, 1),
    }


def _learned_angles(draw: Draw) -> dict[str, Tensor]:
    """From the first token on: of the gradient at far positions nearly all cancels, where nothing came before."""
    found = _angles(draw)
    return {"angles": found["theta"], "positions": found["positions"] - 2**20}


def _turned_lightning_draw(draw: Draw) -> dict[str, Tensor]:
    """A decay for each head."""
    rates = 0.05 * (1 + torch.arange(draw.shape.heads, device=draw.device))
    return draw.qkv() | {"log_decay": -rates.float()} | _learned_angles(draw)


def _turned_lightning(
    backend: str,
    cu_seqlens: Tensor | None,
    angles: Tensor,
    positions: Tensor,
    state: Tensor | None = None,
    **inputs: Tensor,
) -> dict[str, Tensor]:
    options: dict[str, Any] = {"backend": backend, "cu_seqlens": cu_seqlens, "initial_state": state}
    o, final = lightning_attention(**inputs, **options, angles=angles_of(angles, positions), output_final_state=True)
    assert final is not None
    return {"o": o, "final": final}


def _lightnet_state(draw: Draw, halves: int) -> dict[str, Tensor]:
    x = draw.shape
    return {"z": draw.wide(x.rows, x.heads, x.K), "S": draw.wide(x.rows, x.heads, halves * x.K, x.V)}


def _tpe_draw(draw: Draw) -> dict[str, Tensor]:
    """K channels, V modes with time scales from 1 to 4096 tokens."""
    x = draw.shape
    log_decay = -torch.logspace(0, -12, x.V, base=2, device=draw.device)
    return {"x": draw(x.rows, x.tokens, x.K), "log_decay": log_decay, "gamma": draw.wide(x.K, x.V)}


def _tpe(backend: str, cu_seqlens: Tensor | None, state: Tensor | None = None, **inputs: Tensor) -> dict[str, Tensor]:
    options: dict[str, Any] = {"backend": backend, "cu_seqlens": cu_seqlens, "initial_state": state}
    y, final = tpe_scan(**inputs, **options, output_final_state=True)
    assert final is not None
    return {"y": y, "final": final}


def _log_sum(backend: str, cu_seqlens: Tensor | None, b: Tensor, state: Tensor | None = None) -> dict[str, Tensor]:
    return {"z": log_sum(b, initial_state=state, cu_seqlens=cu_seqlens, backend=backend)}


def _relation(backend: str, cu_seqlens: Tensor | None, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """Causal within documents, or where there are none."""
    rows, tokens, _ = a.shape
    number = torch.arange(rows * tokens)
    edges = number[::tokens] if cu_seqlens is None else cu_seqlens.cpu().long()[:-1]
    first = edges[torch.searchsorted(edges, number, right=True) - 1].view(rows, tokens)
    end = (number + 1).view(rows, tokens)
    starts = number[::tokens, None]
    return {"o": relation(a, b, first - starts, end - starts, eps=1e-6, backend=backend)}


def _norm_draw(draw: Draw) -> dict[str, Tensor]:
    x = draw.shape
    sizes = (x.rows, x.tokens, x.K)
    return {"x": draw(*sizes), "gate": draw(*sizes), "weight": draw(x.K)}


def _gated_norm(backend: str, cu_seqlens: None, x: Tensor, gate: Tensor, weight: Tensor) -> dict[str, Tensor]:
    return {"y": norm(x, weight, gate=gate, gate_activation="sigmoid", backend=backend)}


def _glu(activation: str) -> Case:
    return Case(
        operator="glu",
        draw=lambda draw: {"x": draw(draw.shape.rows, draw.shape.tokens, 2 * draw.shape.K)},
        form=lambda backend, cu_seqlens, x: {"out": glu(x, activation, backend=backend)},
        by_token=("x", "out"),
    )


def _head_groups(columns: int) -> tuple[Heads, ...]:
    """A gate, queries, keys and values of ``columns`` channels each."""
    width = 128 if columns % 128 == 0 else columns
    heads = columns // width
    return Heads(1, columns, ("copy",)), Heads(heads, width, ("silu",)), Heads(heads, width, ("silu", "none"))


def _heads(backend: str, cu_seqlens: None, x: Tensor) -> dict[str, Tensor]:
    parts = split_heads(x.transpose(0, 1), _head_groups(x.shape[2] // 4), backend=backend)
    return dict(zip(("gate", "q", "k", "v"), (part.transpose(0, 1) for part in parts), strict=True))


def _rotated_heads(backend: str, cu_seqlens: None, x: Tensor) -> dict[str, Tensor]:
    """Of the first half of each head's channels."""
    rows, tokens, columns = x.shape
    _, queries, keys = _head_groups(columns // 3)
    turned = 2 * (queries.width // 4)
    # From the last token, so that it turns alike by itself.
    steps = torch.arange(1 - tokens, 1, device=x.device)[:, None, None]
    angle = steps / (1 + torch.arange(turned // 2, device=x.device))
    cos, sin = (one.to(x.dtype).expand(rows, -1, -1, -1) for one in (angle.cos(), angle.sin()))
    groups = [queries._replace(activations=("rotate",)), keys._replace(activations=("rotate", "none"))]
    parts = split_heads(x.transpose(0, 1), groups, (torch.cat([cos, cos], dim=-1), sin), backend=backend)
    return dict(zip("qkv", (part.transpose(0, 1) for part in parts), strict=True))


def _forget_gate_draw(draw: Draw) -> dict[str, Tensor]:
    """Gates at both ends, with bounds and, in every second channel, none."""
    x = draw.shape
    bound = torch.sigmoid(draw.wide(x.heads, x.K)) * (torch.arange(x.K, device=draw.device) % 2)
    return {"logits": 4 * draw(x.rows, x.tokens, x.heads, x.K), "bound": bound}


def _forget_gate(backend: str, cu_seqlens: None, logits: Tensor, bound: Tensor) -> dict[str, Tensor]:
    log_decay, k = forget_gate(logits, bound, logits.dtype, backend=backend)
    return {"log_decay": log_decay, "k": k}


def _cross_entropy_draw(draw: Draw) -> dict[str, Tensor]:
    """K channels, V ids of which three are padding; weights as a model has them at first."""
    x = draw.shape
    labels = torch.arange(x.rows * x.tokens, device=draw.device).view(x.rows, x.tokens) * 7919 % (x.V - 3)
    return {"hidden": draw(x.rows, x.tokens, x.K), "weight": 0.02 * draw(x.V, x.K), "labels": labels}


def _cross_entropy(backend: str, cu_seqlens: None, hidden: Tensor, weight: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"loss": linear_cross_entropy(hidden, weight, labels, num_ids=weight.size(0) - 3, backend=backend)}


def _state(draw: Draw) -> dict[str, Tensor]:
    x = draw.shape
    return {"state": draw.wide(x.rows, x.heads, x.K, x.V)}


def _decayed_passes(given: Passes) -> dict[str, Any]:
    """Of lightning attention and gated linear attention, whose arguments are the same."""
    x, forms, cut = given.inputs, given.forms, given.cu_seqlens
    learned = {"with_decay": True} if x["log_decay"].dim() == 3 else {}
    row = (x["q"], x["k"], x["v"], x["log_decay"])
    do, dend = given.cotangent(x["v"]), given.cotangent(x["state"])
    return {
        "local": forms.state_fwd(*row[1:], cut)[0],
        "out": forms.out_fwd(*row, x["state"], cut),
        "own": forms.state_bwd(x["q"], do, x["log_decay"], cut),
        "gradient": forms.grad_bwd(*row, do, x["state"], dend, cut, **learned),
    }


def _delta_rule_passes(given: Passes) -> dict[str, Any]:
    x, forms, cut = given.inputs, given.forms, given.cu_seqlens
    written = (x["k"], x["v"], x.get("log_decay"), x["beta"])
    do, dend = given.cotangent(x["v"]), given.cotangent(x["state"])
    return {
        "local": forms.state_fwd(*written, cut),
        "out": forms.out_fwd(x["q"], *written, x["state"], cut),
        "own": forms.state_bwd(x["q"], x["k"], do, *written[2:], cut),
        "gradient": forms.grad_bwd(x["q"], *written, do, x["state"], dend, cut),
    }


def _lightnet_passes(given: Passes) -> dict[str, Any]:
    x, forms, cut = given.inputs, given.forms, given.cu_seqlens
    row = (x["q"], x["k"], x["v"], angles_of(x.get("theta"), x.get("positions")))
    state = LightNetState(x["z"], x["S"])
    do, dend = given.cotangent(x["v"]), StateCotangent(given.cotangent(x["S"]), given.cotangent(x["z"]))
    return {
        "local": forms.state_fwd(*row[1:], cut)[0],
        "out": forms.out_fwd(*row, state, cut),
        "own": forms.state_bwd(*row, do, state, cut),
        "gradient": forms.grad_bwd(*row, do, state, dend, cut),
    }


def _lion_passes(given: Passes) -> dict[str, Any]:
    x, forms, cut = given.inputs, given.forms, given.cu_seqlens
    row, state = (x["q"], x["k"], x["v"], x["log_decay"]), LionState(x["prefix"], x["suffix"])
    do, dend = given.cotangent(x["v"]), LionState(given.cotangent(x["prefix"]), given.cotangent(x["suffix"]))
    outputs, leaving = forms.out_fwd(*row, state, cut)
    return {
        "local": forms.state_fwd(*row[1:], cut)[0],
        "out": (*outputs, *leaving),
        "own": forms.state_bwd(x["q"], do, outputs, x["log_decay"], cut),
        "gradient": forms.grad_bwd(*row, do, outputs, state, dend, cut, with_decay=True),
    }


def _tpe_passes(given: Passes) -> dict[str, Any]:
    x, forms, cut = given.inputs, given.forms, given.cu_seqlens
    row = (x["x"], x["log_decay"], x["gamma"])
    dy, dend = given.cotangent(x["x"]), given.cotangent(x["state"])
    return {
        "local": forms.state_fwd(*row[:2], cut)[0],
        "out": forms.out_fwd(*row, x["state"], cut),
        "own": forms.state_bwd(dy, *row[1:], cut),
        "gradient": forms.grad_bwd(*row, dy, x["state"], dend, cut),
    }


def _log_sum_passes(given: Passes) -> dict[str, Any]:
    b, state, forms, cut = given.inputs["b"], given.inputs["state"], given.forms, given.cu_seqlens
    z = forms.out_fwd(b, state, cut)
    dz, dend = given.cotangent(z), given.cotangent(state)
    return {
        "local": forms.state_fwd(b, cut)[0],
        "out": z,
        "own": forms.state_bwd(z, dz, state, cut),
        "gradient": forms.grad_bwd(b, z, dz, dend, cut),
    }


MIXERS = {
    "lightning by token": Case(
        operator="lightning",
        draw=_token_decay_draw,
        form=_token_decay,
        state=_state,
        by_token=("q", "k", "v", "log_decay", "o"),
        passes=_decayed_passes,
        chunked=token_decays,
    ),
    "gla": Case(
        operator="gla",
        draw=_gla_draw,
        form=_gla,
        state=_state,
        by_token=("q", "k", "v", "log_decay", "o"),
        passes=_decayed_passes,
    ),
    "delta rule": Case(
        operator="delta_rule",
        draw=lambda draw: _delta_rule_draw(draw) | {"log_decay": _token_decay_draw(draw)["log_decay"]},
        form=_delta_rule,
        state=_state,
        by_token=("q", "k", "v", "log_decay", "beta", "o"),
        passes=_delta_rule_passes,
    ),
    "delta rule by channel": Case(
        operator="delta_rule",
        draw=lambda draw: _delta_rule_draw(draw) | {"log_decay": _gla_draw(draw)["log_decay"]},
        form=_delta_rule,
        state=_state,
        by_token=("q", "k", "v", "log_decay", "beta", "o"),
        passes=_delta_rule_passes,
    ),
    "delta rule undecayed": Case(
        operator="delta_rule",
        draw=_delta_rule_draw,
        form=_delta_rule,
        state=_state,
        by_token=("q", "k", "v", "beta", "o"),
        passes=_delta_rule_passes,
    ),
    "lion": Case(
        operator="lion",
        draw=_lion_draw,
        form=_lion,
        state=_lion_state,
        by_token=("q", "k", "v", "log_decay", "o"),
        passes=_lion_passes,
    ),
    "lightnet": Case(
        operator="lightnet",
        draw=Draw.qkv,
        form=_lightnet,
        state=lambda draw: _lightnet_state(draw, 1),
        by_token=("q", "k", "v", "o"),
        passes=_lightnet_passes,
    ),
    "lightnet with LRPE": Case(
        operator="lightnet",
        draw=lambda draw: draw.qkv() | _angles(draw),
        form=_lightnet,
        state=lambda draw: _lightnet_state(draw, 2),
        by_token=("q", "k", "v", "positions", "o"),
        passes=_lightnet_passes,
    ),
}
LEARNED_ANGLES = {
    "lightning, learned angles": Case(
        operator="lightning",
        draw=_turned_lightning_draw,
        form=_turned_lightning,
        state=lambda draw: {"state": draw.wide(draw.shape.rows, draw.shape.heads, 2 * draw.shape.K, draw.shape.V)},
        by_token=("q", "k", "v", "positions", "o"),
    ),
    "lightnet, learned angles": Case(
        operator="lightnet",
        draw=lambda draw: draw.qkv() | _learned_angles(draw),
        form=lambda backend, cu_seqlens, angles, **inputs: _lightnet(backend, cu_seqlens, theta=angles, **inputs),
        state=lambda draw: _lightnet_state(draw, 2),
        by_token=("q", "k", "v", "positions", "o"),
    ),
    "whole lightnet, learned angles": Case(
        operator="lightnet_noncausal",
        draw=lambda draw: draw.qkv() | _learned_angles(draw),
        form=lambda backend, cu_seqlens, angles, **inputs: _whole_lightnet(backend, cu_seqlens, theta=angles, **inputs),
        by_token=("q", "k", "v", "positions", "o"),
    ),
}
OPERATORS = MIXERS | {
    **LEARNED_ANGLES,
    "lion by channel": Case(
        operator="lion_vector",
        draw=_lion_vector_draw,
        form=_lion_vector,
        by_token=("q", "k", "v", "log_decay", "o"),
    ),
    "whole lightnet with LRPE": Case(
        operator="lightnet_noncausal",
        draw=lambda draw: draw.qkv() | _angles(draw),
        form=_whole_lightnet,
        by_token=("q", "k", "v", "positions", "o"),
    ),
    "tpe": Case(
        operator="tpe",
        passes=_tpe_passes,
        draw=_tpe_draw,
        form=_tpe,
        state=lambda draw: {"state": draw.wide(draw.shape.rows, draw.shape.K, draw.shape.V)},
        by_token=("x", "y"),
    ),
    "log sum": Case(
        operator="log_sum",
        passes=_log_sum_passes,
        draw=lambda draw: {"b": draw(draw.shape.rows, draw.shape.tokens, draw.shape.K)},
        form=_log_sum,
        state=lambda draw: {"state": draw.wide(draw.shape.rows, draw.shape.K)},
        by_token=("b", "z"),
    ),
    "relation": Case(
        operator="relation",
        draw=lambda draw: {name: draw(draw.shape.rows, draw.shape.tokens, draw.shape.K) for name in "ab"},
        form=_relation,
        by_token=("a", "b", "o"),
    ),
    "norm": Case(
        operator="norm",
        draw=lambda draw: {"x": draw(draw.shape.rows, draw.shape.tokens, draw.shape.K)},
        form=lambda backend, cu_seqlens, x: {"y": norm(x, backend=backend)},
        by_token=("x", "y"),
    ),
    "gated norm": Case(operator="norm", draw=_norm_draw, form=_gated_norm, by_token=("x", "gate", "y")),
    "glu": _glu("none"),
    "glu silu": _glu("silu"),
    "glu sigmoid": _glu("sigmoid"),
    "glu gelu": _glu("gelu"),
    "glu gelu_tanh": _glu("gelu_tanh"),
    "summed norm": Case(
        operator="norm",
        draw=lambda draw: {name: draw(draw.shape.rows, draw.shape.tokens, draw.shape.K) for name in ("x", "added")},
        form=lambda backend, cu_seqlens, x, added: dict(
            zip(("total", "y"), sum_and_norm(x, added, backend=backend), strict=True)
        ),
        by_token=("x", "added", "total", "y"),
    ),
    "heads": Case(
        operator="heads",
        draw=lambda draw: {"x": draw(draw.shape.rows, draw.shape.tokens, 4 * draw.shape.K)},
        form=_heads,
        by_token=("x", "gate", "q", "k", "v"),
    ),
    "heads rotated": Case(
        operator="heads",
        draw=lambda draw: {"x": draw(draw.shape.rows, draw.shape.tokens, 3 * draw.shape.K)},
        form=_rotated_heads,
        by_token=("x", "q", "k", "v"),
    ),
    "forget gate": Case(
        operator="forget_gate",
        draw=_forget_gate_draw,
        form=_forget_gate,
        by_token=("logits", "log_decay", "k"),
    ),
    "cross entropy": Case(
        operator="cross_entropy",
        draw=_cross_entropy_draw,
        form=_cross_entropy,
        by_token=("hidden", "labels", "loss"),
    ),
}


def case_of(name: str) -> Case:
    """The case called ``name``; UserError with the known ones otherwise."""
    if name not in OPERATORS:
        raise UserError(f"no case {name!r} of an operator; known: {', '.join(OPERATORS)}")
    return OPERATORS[name]


def draw(name: str, shape: Shape, dtype: torch.dtype, device: str, *, with_state: bool) -> dict[str, Tensor]:
    """Inputs of an operator."""
    source, case = Draw(shape, dtype, device), case_of(name)
    return case.draw(source) | (case.state(source) if with_state else {})


def results(
    name: str,
    inputs: dict[str, Tensor],
    backend: str,
    cu_seqlens: Tensor | None = None,
    *,
    exact: bool = False,
    last: int | None = None,
) -> dict[str, Tensor]:
    """Outputs and every gradient; all in fp64 where ``exact``.

    Cotangents are random numbers that bf16 holds, of the ``last`` tokens only where that is given.
    """
    leaves = {}
    for key, x in inputs.items():
        x = x.detach().double() if exact and x.is_floating_point() else x.detach()
        leaves[key] = x if key in FIXED else x.requires_grad_()
    outputs = case_of(name).form(backend, cu_seqlens, **leaves)
    learned = {key: x for key, x in leaves.items() if x.requires_grad}
    cotangents = []
    for number, (key, y) in enumerate(outputs.items()):
        counted = y[:, -last:] if last and key in case_of(name).by_token else y
        generator = torch.Generator(y.device).manual_seed(100 + number)
        drawn = torch.randn(counted.shape, dtype=torch.bfloat16, device=y.device, generator=generator).to(y.dtype)
        cotangents.append(drawn if counted is y else torch.zeros_like(y))
        if counted is not y:
            cotangents[-1][:, -counted.size(1) :] = drawn
    gradients = torch.autograd.grad(list(outputs.values()), list(learned.values()), cotangents)
    found = {key: y.detach() for key, y in outputs.items()}
    return found | {f"d{key}": x for key, x in zip(learned, gradients, strict=True)}


def last_tokens(name: str, tensors: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """Inputs or results of the row's last tokens; what has no tokens stays as it is."""
    named = case_of(name).by_token
    by_token = {*named, *(f"d{key}" for key in named)}
    return {key: x[:, -count:] if key in by_token else x for key, x in tensors.items()}


def passes(
    name: str, forms: Any, inputs: dict[str, Tensor], cu_seqlens: Tensor, *, exact: bool = False
) -> dict[str, Tensor]:
    """What a sequence rank computes by ``forms``: its own state, its outputs, and the gradients both ways."""
    compute = case_of(name).passes
    assert compute is not None, f"{name} has no passes"
    generator = torch.Generator(cu_seqlens.device).manual_seed(7)

    def cotangent(like: Tensor) -> Tensor:
        drawn = torch.randn(like.shape, dtype=torch.bfloat16, device=like.device, generator=generator)
        return drawn.to(like.dtype)

    x = {key: y.double() if exact and y.is_floating_point() else y for key, y in inputs.items()}
    found = compute(Passes(forms=forms, inputs=x, cu_seqlens=cu_seqlens, cotangent=cotangent))
    return {key: y for group, parts in found.items() for key, y in _flat(group, parts)}


def chunked_passes(name: str) -> Any:
    """The passes in PyTorch that a case is compared with."""
    case = case_of(name)
    return case.chunked or implementation(case.operator, "chunked")


def _flat(name: str, found: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested tuples."""
    if isinstance(found, Tensor):
        yield name, found
    elif found is not None:
        for number, part in enumerate(found):
            yield from _flat(f"{name} {number}", part)


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """RMSE of the difference by RMSE of what is expected."""
    assert found.keys() == expected.keys()
    ratios = {}
    for key, right in expected.items():
        assert found[key].shape == right.shape, key
        difference = (found[key].double() - right.double()).norm()
        ratios[key] = float(difference / (right.double().norm() or 1.0))
    return ratios


def wrong(ratios: dict[str, float], dtype: torch.dtype) -> dict[str, float]:
    """Those above the limit of the dtype, or not a number."""
    return {key: e for key, e in ratios.items() if not e < LIMITS[dtype] * DIFFERENCES.get(key, 1.0)}
