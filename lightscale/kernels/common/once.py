"""Results that every layer of a pass would compute anew from the same tensor, kept with the tensor."""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

from lightscale.kernels.common.captures import is_capturing

_KEPT = "_lightscale_once"


def once(of: Tensor, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
    """The result of ``make``, a function of the numbers in ``of`` and of ``key``; kept while ``of`` stays as it is.

    Not kept: results of parameters, whose numbers the optimizer replaces behind autograd's back; results of a CUDA
    graph, which every launch of the graph computes anew; and results of another stream, which this one would have to
    wait for.
    """
    is_fixed = not (of.requires_grad or isinstance(of, nn.Parameter) or of.is_inference())
    if not is_fixed or is_capturing(of.device):
        return make()
    stream = torch.cuda.current_stream(of.device).cuda_stream if of.is_cuda else 0
    kept: dict[Hashable, tuple[int, Tensor]] = of.__dict__.setdefault(_KEPT, {})
    version, made = kept.get((key, stream), (-1, of))
    if version != of._version:
        made = make()
        kept[key, stream] = of._version, made
    return made
