"""Linear layers: Megatron's, with their initial weights, the gated linear unit and the output layer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.kernels.cross_entropy.divergence import SoftTargets
from lightscale.kernels.glu import glu
from lightscale.parallel.cross_entropy import vocab_parallel_linear_cross_entropy, vocab_parallel_linear_divergence
from lightscale.parallel.initialization import normal, set_initializer, zeros
from lightscale.parallel.linear.fp8 import fp8_linear
from lightscale.parallel.megatron import (
    MLP,
    ColumnParallelLinear,
    MLPSubmodules,
    RowParallelLinear,
    TransformerConfig,
    all_to_all_hp2sp,
    gather_from_tensor_model_parallel_region,
    tensor_parallel_layers,
)


def leave_unset(weight: Tensor) -> Tensor:
    """An initializer for Megatron that does nothing: its own depend on the layout; weights are drawn by name."""
    return weight


class _Fp8Products:
    """Of Megatron's parallel layers: the product, which may take its inputs in 8 bits while the model is trained."""

    training: bool
    casts_to_fp8 = False

    @property
    def computes_in_fp8(self) -> bool:
        """Whether the next product does; what reads a model computes as it is stored."""
        return self.casts_to_fp8 and self.training

    def _forward_impl(self, *args: Any, **how: Any) -> Tensor:
        """Called by Megatron's forward."""
        out: Tensor = fp8_linear(*args, **how) if self.computes_in_fp8 else super()._forward_impl(*args, **how)  # type: ignore[misc]
        return out


class ColumnParallel(_Fp8Products, ColumnParallelLinear):
    """Megatron's layer, which without an input gives its weight: for one product with others (``projections.py``)."""

    def forward(self, input_: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """See Megatron's; None: no input."""
        return self.weight if input_ is None else super().forward(input_, *args, **kwargs)


class RowParallel(_Fp8Products, RowParallelLinear):
    """Megatron's layer."""


def column_parallel(
    config: TransformerConfig,
    width_in: int,
    width_out: int,
    *,
    std: float,
    group: dist.ProcessGroup,
    bias: bool = False,
) -> ColumnParallelLinear:
    """(n / tensor, b, width_in) -> (n, b, width_out / tensor): rows of the weight are split, and the bias with them."""
    layer = ColumnParallel(
        width_in, width_out, config=config, init_method=leave_unset, bias=bias, gather_output=False, tp_group=group
    )
    set_initializer(layer.weight, normal(std))
    if bias:
        set_initializer(layer.bias, zeros)
    return layer


def row_parallel(
    config: TransformerConfig,
    width_in: int,
    width_out: int,
    *,
    std: float,
    group: dist.ProcessGroup,
    bias: bool = False,
) -> RowParallelLinear:
    """(n, b, width_in / tensor) -> (n / tensor, b, width_out): columns of the weight are split, the bias is whole."""
    layer = RowParallel(
        width_in,
        width_out,
        config=config,
        init_method=leave_unset,
        bias=bias,
        input_is_parallel=True,
        skip_bias_add=not bias,
        tp_group=group,
    )
    set_initializer(layer.weight, normal(std))
    if bias:
        set_initializer(layer.bias, zeros)
    return layer


def tokens_of_channels(x: Tensor, group: dist.ProcessGroup, *, share: bool) -> Tensor:
    """(n, b, d / tensor), all tokens of some channels -> (n / tensor, b, d), some tokens of all.

    share: whether each tensor rank gets a share of the tokens; false: each gets all of them.
    """
    if group.size() == 1:
        return x
    if not share:
        whole: Tensor = gather_from_tensor_model_parallel_region(x, group=group)
        return whole
    n, b, _ = x.shape
    some: Tensor = all_to_all_hp2sp(x.flatten(0, 1), group=group)
    return some.view(n // group.size(), b, -1)


class ReplicatedLinear(nn.Module):
    """A linear layer that every tensor rank holds whole and applies to its own tokens."""

    def __init__(self, config: TransformerConfig, width_in: int, width_out: int, *, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(width_out, width_in, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        # Each rank's gradient is that of its own tokens: the engine sums it over the tensor ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        # Set by the engine where it sums gradients in their products (parallel/weight_gradients.py).
        self.gradient_accumulation_fusion = False
        set_initializer(self.weight, normal(std))

    def forward(self, x: Tensor | None) -> Tensor:
        """x: (..., width_in) -> (..., width_out); without an input the weight, as of ``column_parallel``."""
        if x is None:
            return self.weight
        if not self.weight.requires_grad:
            return F.linear(x, self.weight)
        out: Tensor = tensor_parallel_layers.linear_with_grad_accumulation_and_async_allreduce(
            x,
            self.weight,
            None,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
            allreduce_dgrad=False,
            sequence_parallel=False,
        )
        return out


def _identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": _identity,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""Those of linear units, by name, for Megatron's configuration."""


class LinearUnit(MLP):
    """Megatron's feed-forward layer, x -> W_2 activation(W_1 x), by an option with biases.

    (n / tensor, b, d) -> (n / tensor, b, d).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config, MLPSubmodules(linear_fc1=ColumnParallel, linear_fc2=RowParallel))
        (self.activation,) = (name for name, one in ACTIVATIONS.items() if one is config.activation_func)
        # Megatron would hand biases on, to be added elsewhere.
        self.linear_fc1.skip_bias_add = self.linear_fc2.skip_bias_add = not config.add_bias_linear

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Megatron's calling convention: the second result is a bias to be added, None here."""
        projected, _bias = self.linear_fc1(hidden_states)
        out, bias = self.linear_fc2(self.activated(projected))
        return out, bias

    def activated(self, projected: Tensor) -> Tensor:
        """(n, b, F / tensor) -> the same."""
        return ACTIVATIONS[self.activation](projected)


class GatedLinearUnit(LinearUnit):
    """x -> W_2 (activation(gate) * up), its product in one pass; gate and up come from one projection."""

    def activated(self, projected: Tensor) -> Tensor:
        """(n, b, 2 F / tensor) -> (n, b, F / tensor)."""
        return glu(projected, self.activation)


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap tanh(logits / cap), in fp32 for half precision and rounded once; None: the logits."""
    if cap is None:
        return logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (cap * torch.tanh(wide / cap)).to(logits.dtype)


class OutputLayer(ColumnParallelLinear):
    """Megatron's output layer, which with labels returns losses and never holds the logits.

    The losses are computed inside the module: Megatron waits for the gathered weights of a module, and starts to gather
    the next ones, in its forward.

    ``cap``: logits s are cap tanh(s / cap); None: they are s.
    """

    def __init__(self, *args: Any, cap: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cap = cap

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        targets: SoftTargets | None = None,
        z_loss: float = 0.0,
        vocab_size: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden: (n / tensor, b, d) -> logits (n, b, V / tensor), or with labels (n, b) their losses (n, b).

        The second result is None, or with z_loss its term in the losses, (n, b).

        loss_mask: (n, b), factor of each loss; None for 1.
        z_loss: factor of log² Z in the losses; see ``linear_cross_entropy``.
        targets: of another model, (n / tensor, b, d') and (V / tensor, d'): losses are the divergence from them.
        """
        if labels is None:
            logits, bias = super().forward(hidden, weight=weight)
            return soft_capped(logits, self.cap), bias
        # The embedding's weight where tied and one stage holds both ends of the model, else this layer's.
        rows = self.weight if weight is None else weight
        how: dict[str, Any] = {
            "vocab_size": vocab_size,
            "group": self.tp_group,
            "loss_mask": loss_mask,
            "cap": self.cap,
        }
        if targets is not None:
            return vocab_parallel_linear_divergence(hidden, rows, labels, targets, **how), None
        losses, terms = vocab_parallel_linear_cross_entropy(hidden, rows, labels, z_loss=z_loss, **how)
        return losses, terms if z_loss else None
