"""Every Triton kernel of a model beside its chunked form, on the device at hand, at the run's shapes.

A kernel that a compiler or a driver breaks gives wrong numbers and no error (kernels have: fla issue 640). So each
operator is computed twice before a run, forward and backward, from the same random inputs: by Triton, and in fp32 by
PyTorch's operators, which are not compiled on this machine.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.errors import UserError
from lightscale.kernels.common.angles import Angles
from lightscale.kernels.common.backends import choose_backend
from lightscale.kernels.cross_entropy import linear_cross_entropy
from lightscale.kernels.delta_rule import delta_rule
from lightscale.kernels.forget_gate import forget_gate
from lightscale.kernels.gla import gla
from lightscale.kernels.glu import glu
from lightscale.kernels.heads import Heads, split_heads
from lightscale.kernels.lightnet import lightnet_attention, lightnet_noncausal
from lightscale.kernels.lightning import lightning_attention
from lightscale.kernels.lion import lion, lion_vector
from lightscale.kernels.log_sum import log_sum
from lightscale.kernels.norm import norm
from lightscale.kernels.relation import relation
from lightscale.kernels.tpe import tpe_scan
from lightscale.models.accounting import padded_vocab_size
from lightscale.models.operators import operators_of
from lightscale.models.registry import mixer_spec
from lightscale.models.specs.delta_net import DeltaNetSpec, delta_sizes
from lightscale.models.specs.options import RelationOptions
from lightscale.models.specs.relation import hidden_width, pre_norm

MOST_TOKENS = 2048
"""Many chunks and splits of every kernel, and still seconds for all of them."""
_LOSS_TOKENS = 256
_TPE_MODES = 16

# RMSE of the difference by RMSE. Twice what right kernels have been seen to differ from fp64 (tests/gpu/operators.py);
# a wrong tile of one head among 16 is 20 times as much. Gradients of angles, sums over positions, are off by at most
# 1.7 times as much as the others where positions begin with their document (fp16, 1024 tokens, interpreted).
_LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 1e-2}

_Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A kernel whose results differ from its chunked form."""

    operator: str
    result: str
    """The output, or the input whose gradient differs; "-" where the kernel did not run."""
    found: str
    """How far it is off, or the error."""

    def __str__(self) -> str:
        return (
            f"{self.operator}: {self.found}" if self.result == "-" else f"{self.operator}: {self.result} {self.found}"
        )


@dataclass(frozen=True, kw_only=True)
class _Case:
    inputs: _Tensors
    compute: Callable[..., Tensor]
    """(backend, **inputs) -> output."""


def check_kernels(
    model: ModelConfig, dtype: torch.dtype, device: torch.device, *, tokens: int, tensor: int = 1, backend: str = "auto"
) -> Iterator[Mismatch]:
    """The faults, operator by operator; empty if all kernels are correct.

    Operators that are not Triton's here are not looked at.

    Args:
        model: the run's.
        dtype: of its weights.
        device: of the training.
        tokens: of a rank's segment of a sequence; at most ``MOST_TOKENS`` are taken.
        tensor: the tensor ranks that share out heads and widths.
        backend: as ``train.kernels``.
    """
    draw = _Draw(model, dtype, device, max(2, min(tokens, MOST_TOKENS)), tensor)
    for operator, case in _cases(draw, backend):
        yield from _compared(operator, case)


def launch_checked(
    model: ModelConfig, dtype: torch.dtype, device: torch.device, *, tokens: int, tensor: int = 1, backend: str = "auto"
) -> None:
    """Launch what ``check_kernels`` compares, and compare nothing: on the device "meta" launches alone are of use."""
    for _, case in _cases(_Draw(model, dtype, device, max(2, min(tokens, MOST_TOKENS)), tensor), backend):
        _results(case, "triton", case.inputs)


def _cases(draw: "_Draw", backend: str) -> Iterator[tuple[str, _Case]]:
    """Of the model's operators that Triton computes; each draws from the start."""
    like = torch.empty(0, dtype=draw.dtype, device=draw.device)
    for operator in operators_of(draw.model):
        if operator in _CASES and choose_backend(operator, like, backend) == "triton":
            yield operator, _CASES[operator](draw.again())


class _Draw:
    """Random inputs in the shapes of a model; on the device "meta" without numbers."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, device: torch.device, tokens: int, tensor: int) -> None:
        self.model, self.tokens, self.tensor = model, tokens, tensor
        self.heads = model.num_heads // tensor
        self.dtype, self.device = dtype, device
        self._generator = _generator(device, 0)

    def again(self) -> "_Draw":
        """The same numbers."""
        return _Draw(self.model, self.dtype, self.device, self.tokens, self.tensor)

    def __call__(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self._generator, dtype=self.dtype, device=self.device)

    def wide(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self._generator, device=self.device)

    def qkv(self) -> _Tensors:
        return {name: self(1, self.tokens, self.heads, self.model.head_dim) for name in "qkv"}

    def documents(self) -> Tensor:
        """Boundaries: three documents, none of which ends with a chunk."""
        edges = [0, self.tokens // 3, self.tokens // 2, self.tokens]
        return torch.tensor(sorted(set(edges)), device=self.device)

    def positions(self) -> Tensor:
        """(1, n): of each token in its document."""
        edges, places = self.documents(), torch.arange(self.tokens, device=self.device)
        return (places - edges[torch.searchsorted(edges, places, right=True) - 1])[None]

    def theta(self) -> Tensor:
        """(heads, channels) fp32: a head has waves of nearly all lengths, and no two channels the same."""
        theta = torch.logspace(0, -4, self.heads * self.model.head_dim, device=self.device)
        return theta.view(-1, self.heads).T.contiguous()

    def learned_angles(self) -> _Tensors:
        """``theta`` as an input with a gradient, where a layer of the model learns it; else nothing."""
        model = self.model
        layers = enumerate(model.layers)
        learned = any("lrpe.theta" in mixer_spec(name).parameter_shapes(model, layer) for layer, name in layers)
        return {"theta": self.theta()} if learned else {}


def _lightning(draw: _Draw) -> _Case:
    # As different as a model's heads: from half a token to thousands.
    log_decay = -torch.logspace(0, -4, draw.heads, device=draw.device)
    cut, positions, fixed = draw.documents(), draw.positions(), draw.theta()
    if "decay-attention" in draw.model.layers:
        return _decays_of_tokens(draw, cut)

    def compute(backend: str, q: Tensor, k: Tensor, v: Tensor, theta: Tensor = fixed) -> Tensor:
        # With and without the positions that some layers apply.
        plain, _ = lightning_attention(q, k, v, log_decay, cu_seqlens=cut, backend=backend)
        angles = Angles(theta, positions)
        turned, _ = lightning_attention(q, k, v, log_decay, angles=angles, cu_seqlens=cut, backend=backend)
        return torch.cat([plain, turned])

    return _Case(inputs=draw.qkv() | draw.learned_angles(), compute=compute)


def _decays_of_tokens(draw: _Draw, cut: Tensor) -> _Case:
    """With a column of ones behind the values, as where outputs are divided by the sums of their scores."""
    inputs = draw.qkv()
    inputs["log_decay"] = F.logsigmoid(draw.wide(*inputs["q"].shape[:3]) + 1)

    def compute(backend: str, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        values = torch.cat([v, v.new_ones(*v.shape[:3], 1)], dim=-1)
        return lightning_attention(q, k, values, log_decay, cu_seqlens=cut, backend=backend)[0]

    return _Case(inputs=inputs, compute=compute)


def _gla(draw: _Draw) -> _Case:
    inputs, cut = draw.qkv(), draw.documents()
    inputs["log_decay"] = F.logsigmoid(draw.wide(*inputs["q"].shape) + 1)
    return _Case(inputs=inputs, compute=lambda backend, **x: gla(**x, cu_seqlens=cut, backend=backend)[0])


def _delta_rule(draw: _Draw) -> _Case:
    """As the first layer that has it; with each form of decay that a layer has."""
    model, cut = draw.model, draw.documents()
    specs = [(layer, mixer_spec(name)) for layer, name in enumerate(model.layers)]
    of_layers = [(layer, spec.decay) for layer, spec in specs if issubclass(spec, DeltaNetSpec)]
    s = delta_sizes(model, of_layers[0][0])
    keys = (1, draw.tokens, s.heads // draw.tensor, s.key_width)
    of_values = (1, draw.tokens, s.value_heads // draw.tensor)
    inputs = {
        # As the layers make them: of length 1, for which states do not grow.
        **{name: F.normalize(draw.wide(*keys), dim=-1).to(draw.dtype) for name in "qk"},
        "v": draw(*of_values, s.value_width),
        "beta": torch.sigmoid(draw.wide(*of_values)),
    }
    decays = {decay for _, decay in of_layers}
    if "head" in decays:
        inputs["of_heads"] = F.logsigmoid(draw.wide(*of_values) + 1)
    if "channel" in decays:
        inputs["of_channels"] = F.logsigmoid(draw.wide(*of_values, s.key_width) + 1)

    def compute(backend: str, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **logs: Tensor) -> Tensor:
        forms = [*logs.values(), *[None] * ("none" in decays)]
        outputs = [delta_rule(q, k, v, form, beta, cu_seqlens=cut, backend=backend)[0] for form in forms]
        return torch.cat(outputs)

    return _Case(inputs=inputs, compute=compute)


def _lightnet(draw: _Draw) -> _Case:
    cut, positions, fixed = draw.documents(), draw.positions(), draw.theta()

    def compute(backend: str, q: Tensor, k: Tensor, v: Tensor, theta: Tensor = fixed) -> Tensor:
        return lightnet_attention(q, k, v, angles=Angles(theta, positions), cu_seqlens=cut, backend=backend)[0]

    return _Case(inputs=draw.qkv() | draw.learned_angles(), compute=compute)


def _lightnet_noncausal(draw: _Draw) -> _Case:
    cut, positions, fixed = draw.documents(), draw.positions(), draw.theta()

    def compute(backend: str, q: Tensor, k: Tensor, v: Tensor, theta: Tensor = fixed) -> Tensor:
        return lightnet_noncausal(q, k, v, angles=Angles(theta, positions), cu_seqlens=cut, backend=backend)

    return _Case(inputs=draw.qkv() | draw.learned_angles(), compute=compute)


def _lion(draw: _Draw) -> _Case:
    inputs, cut = draw.qkv(), draw.documents()
    # As behind a feature map: of either sign, the sums that outputs are divided by could be anything.
    inputs |= {name: inputs[name].abs() for name in "qk"}
    inputs["log_decay"] = F.logsigmoid(draw.wide(*inputs["q"].shape[:3]) + 1)
    return _Case(inputs=inputs, compute=lambda backend, **x: lion(**x, cu_seqlens=cut, backend=backend)[0])


def _lion_vector(draw: _Draw) -> _Case:
    inputs, cut = draw.qkv(), draw.documents()
    inputs |= {name: inputs[name].abs() for name in "qk"}
    inputs["log_decay"] = F.logsigmoid(draw.wide(*inputs["v"].shape) + 1)
    return _Case(inputs=inputs, compute=lambda backend, **x: lion_vector(**x, cu_seqlens=cut, backend=backend))


def _tpe(draw: _Draw) -> _Case:
    width, cut = draw.model.hidden_size // draw.tensor, draw.documents()
    log_decay = -torch.logspace(0, -12, _TPE_MODES, base=2, device=draw.device)
    inputs = {"x": draw(1, draw.tokens, width), "log_decay": log_decay, "gamma": draw.wide(width, _TPE_MODES)}
    return _Case(inputs=inputs, compute=lambda backend, **x: tpe_scan(**x, cu_seqlens=cut, backend=backend)[0])


def _log_sum(draw: _Draw) -> _Case:
    width, cut = draw.model.hidden_size // draw.tensor, draw.documents()
    return _Case(
        inputs={"b": draw(1, draw.tokens, width)},
        compute=lambda backend, b: log_sum(b, cu_seqlens=cut, backend=backend),
    )


def _relation(draw: _Draw) -> _Case:
    """As the first layer that has it; a token reads its document up to itself, or all of it."""
    model = draw.model
    of_layers = ((layer, model.layer_options(layer)) for layer in range(len(model.layers)))
    layer, own = next(
        (layer, own) for layer, own in of_layers if isinstance(own, RelationOptions) and own.form == "quadratic"
    )
    positions, edges = draw.positions().cpu(), draw.documents().cpu()
    number = torch.arange(draw.tokens)[None]
    end = number + 1
    if model.direction(layer) != "causal":
        end = edges[torch.searchsorted(edges, number, right=True)]
    ranges = number - positions, end
    form: dict[str, Any] = {"activation": own.activation, "norm": pre_norm(own) == "exact", "eps": own.eps}
    sizes = (1, draw.tokens, hidden_width(model, layer))
    return _Case(
        inputs={"a": draw(*sizes), "b": draw(*sizes)},
        compute=lambda backend, a, b: relation(a, b, *ranges, **form, backend=backend),
    )


def _norm(draw: _Draw) -> _Case:
    sizes = (1, draw.tokens, draw.model.hidden_size)
    return _Case(
        inputs={"x": draw(*sizes), "gate": draw(*sizes)},
        compute=lambda backend, x, gate: norm(x, gate=gate, gate_activation="sigmoid", backend=backend),
    )


def _glu(draw: _Draw) -> _Case:
    activation = draw.model.glu_activation
    return _Case(
        inputs={"x": draw(1, draw.tokens, 2 * draw.model.intermediate_size // draw.tensor)},
        compute=lambda backend, x: glu(x, activation, backend=backend),
    )


def _heads(draw: _Draw) -> _Case:
    """Queries with an activation, keys that turn with their positions in the first channels, and values."""
    width = draw.model.head_dim
    groups = Heads(draw.heads, width, ("silu",)), Heads(draw.heads, width, ("rotate", "none"))
    angle = draw.positions()[..., None, None] / (1 + torch.arange(width // 2, device=draw.device))
    cos, sin = angle.cos().to(draw.dtype), angle.sin().to(draw.dtype)
    phases = torch.cat([cos, cos], dim=-1), sin

    def compute(backend: str, x: Tensor) -> Tensor:
        of_dtype = phases[0].to(x.dtype), phases[1].to(x.dtype)
        return torch.stack(split_heads(x, groups, of_dtype, backend=backend))

    return _Case(inputs={"x": draw(draw.tokens, 1, sum(group.columns for group in groups))}, compute=compute)


def _forget_gate(draw: _Draw) -> _Case:
    """With the bounds of a first layer, 0, in the first half of the channels."""
    width = draw.model.head_dim
    bound = torch.sigmoid(draw.wide(draw.heads, width)) * (torch.arange(width, device=draw.device) >= width // 2)
    inputs = {"logits": 3 * draw(1, draw.tokens, draw.heads, width), "bound": bound}

    def compute(backend: str, logits: Tensor, bound: Tensor) -> Tensor:
        return torch.cat(forget_gate(logits, bound, logits.dtype, backend=backend))

    return _Case(inputs=inputs, compute=compute)


def _cross_entropy(draw: _Draw) -> _Case:
    rows, width = padded_vocab_size(draw.model.vocab_size, draw.tensor) // draw.tensor, draw.model.hidden_size
    labels = torch.arange(_LOSS_TOKENS, device=draw.device) * 7919 % rows
    options: dict[str, Any] = {"labels": labels, "num_ids": rows, "cap": draw.model.final_logit_cap}
    return _Case(
        inputs={"hidden": draw(_LOSS_TOKENS, width), "weight": 0.02 * draw(rows, width)},
        compute=lambda backend, **x: linear_cross_entropy(**x, **options, backend=backend),
    )


_CASES: dict[str, Callable[[_Draw], _Case]] = {
    "lightning": _lightning,
    "gla": _gla,
    "delta_rule": _delta_rule,
    "lightnet": _lightnet,
    "lightnet_noncausal": _lightnet_noncausal,
    "lion": _lion,
    "lion_vector": _lion_vector,
    "tpe": _tpe,
    "log_sum": _log_sum,
    "relation": _relation,
    "norm": _norm,
    "glu": _glu,
    "heads": _heads,
    "forget_gate": _forget_gate,
    "cross_entropy": _cross_entropy,
}


def _compared(operator: str, case: _Case) -> Iterator[Mismatch]:
    dtype = next(iter(case.inputs.values())).dtype
    try:
        found = _results(case, "triton", case.inputs)
    except UserError:
        # A cache that cannot be written, for one: PyTorch's operators are no remedy.
        raise
    except Exception as error:  # noqa: BLE001 - a kernel that a compiler or driver refuses is a wrong one too
        reason = str(error).strip().splitlines() or [""]
        yield Mismatch(operator=operator, result="-", found=f"does not run: {type(error).__name__}: {reason[0]}")
        return
    # In fp32, from the same rounded numbers.
    expected = _results(case, "chunked", {name: tensor.float() for name, tensor in case.inputs.items()})
    limit = _LIMITS[dtype]
    for name, exact in expected.items():
        off = _norm_of(found[name].float() - exact) / max(_norm_of(exact), 1e-30)
        # Not "off > limit", which NaN is not.
        if not off <= limit:
            yield Mismatch(operator=operator, result=name, found=f"is off by {off:.2g}, limit {limit:.2g}")


def _generator(device: torch.device, seed: int) -> torch.Generator | None:
    """None on the device "meta", which has no numbers."""
    return None if device.type == "meta" else torch.Generator(device).manual_seed(seed)


def _norm_of(x: Tensor) -> float:
    # Summed in fp64 and not copied to it: of a vocabulary's gradient the copy would be gigabytes.
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def _results(case: _Case, backend: str, inputs: _Tensors) -> _Tensors:
    """The output, and the gradient of every input."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.items()}
    output = case.compute(backend, **leaves)
    # The same in every dtype, and no two elements alike.
    generator = _generator(output.device, 1)
    cotangent: Any = torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype)
    gradients = torch.autograd.grad(output, list(leaves.values()), cotangent)
    named = {f"gradient of {name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {"output": output.detach(), **named}
