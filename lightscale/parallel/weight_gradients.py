"""Gradients of linear layers' weights, added to their sums by the product that computes them.

Megatron calls this ``gradient_accumulation_fusion`` and takes the product from an extension of apex. PyTorch's own
products do the same: without them every weight's gradient is written in half precision, read again and added in fp32,
an extra launch and twice the bytes.
"""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from lightscale.parallel.megatron import tensor_parallel_layers


def accumulate(x: Tensor, gradient: Tensor, total: Tensor) -> None:
    """total += gradientᵀ x, summed in fp32.

    Args:
        x: (n, width_in), the layer's input.
        gradient: (n, width_out), of the layer's output, of the same dtype.
        total: (width_out, width_in), fp32.
    """
    if x.dtype == total.dtype:
        total.addmm_(gradient.t(), x)
    elif x.is_cuda:
        torch.addmm(total, gradient.t(), x, out_dtype=total.dtype, out=total)
    else:
        # CPUs have no product of half precision into fp32. Products of two halves are exact in fp32.
        total.addmm_(gradient.t().to(total.dtype), x.to(total.dtype))


PRODUCTS = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
"""In the place of apex's extension, under its names."""


def accumulate_in_products(model: nn.Module) -> None:
    """Let the linear layers of ``model`` add their gradients to ``main_grad``, which its wrapper has."""
    tensor_parallel_layers.fused_weight_gradient_mlp_cuda = PRODUCTS
    for module in model.modules():
        if hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = True  # type: ignore[assignment]
