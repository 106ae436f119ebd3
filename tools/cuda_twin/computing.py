"""A null device that computes: each operation of PyTorch runs twice, as CUDA would run it and by its CPU kernel.

First natively: CUDA's own dispatch, shapes, allocations and launches, refusing what it would refuse. Then the
operation's CPU kernel computes the same on the same memory, which is host memory, and the native outputs hold what it
finds.
"""

import ctypes
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from cuda_twin.installation import library

_CPU = torch.device("cpu")
# These move no numbers, or move them where the null device does it itself.
_NATIVE_ONLY = (
    "aten::record_stream", "aten::pin_memory", "aten::_pin_memory", "aten::is_pinned", "aten::set_", "aten::resize_",
)  # fmt: skip
_UNINITIALISED = (
    "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided",
)  # fmt: skip


def on_host(tensor: Tensor) -> Tensor:
    """The same memory as a CPU tensor; a tensor that is there already, as it is."""
    if tensor.device.type != "cuda":
        return tensor
    storage = tensor.untyped_storage()
    host = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), _CPU, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(host, tensor.storage_offset(), tensor.size(), tensor.stride())


_graphs: dict[int, list[Callable[[], object]]] = {}
"""What the operations of each graph compute, on the host's view of their memory, in order; by the graph's number."""


@cache
def _device() -> ctypes.CDLL:
    found = library()
    found.null_capture_of.argtypes = [ctypes.c_void_p]
    found.null_capture_of.restype = ctypes.c_uint64
    return found


def captured_here() -> list[Callable[[], object]] | None:
    """What the graph that is captured on the current stream computes until here; None: nothing is captured."""
    # The run beside it, on CPUs, has no device.
    if not torch.cuda.is_available():
        return None
    number = _device().null_capture_of(torch.cuda.current_stream().cuda_stream)
    return _graphs.setdefault(number, []) if number else None


_generators: dict[int, tuple[torch.Generator, torch.Generator]] = {}
"""By the id of the device's generator, which stays alive here: PyTorch 2.11 refuses weak references to generators, and
a later one must not get the same id."""


def _host_generator(generator: torch.Generator) -> torch.Generator:
    if id(generator) not in _generators:
        # Other numbers than CUDA's own would be, and for one seed the same ones each time.
        _generators[id(generator)] = generator, torch.Generator().manual_seed(generator.initial_seed())
    return _generators[id(generator)][1]


def _as_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return on_host(value)
    if isinstance(value, torch.Generator) and value.device.type == "cuda":
        return _host_generator(value)
    return _CPU if isinstance(value, torch.device) and value.type == "cuda" else value


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


class Computing(TorchDispatchMode):
    """While this is entered, operations on CUDA tensors are computed.

    Memory that nothing has been written to is NaN, so that whoever reads it is found.

    ``whole_numbers_only``: those on integers and booleans alone, so that documents and positions are what they are, and
    the numbers of a model are not. Those that the host reads are 1, and whole ones that are made of them 0: what a step
    asks for must not depend on what happens to be in memory.
    """

    def __init__(self, *, whole_numbers_only: bool = False) -> None:
        super().__init__()
        self._whole_numbers_only = whole_numbers_only
        self._device = _device()
        self._device.null_note_wait.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
        self._failure: BaseException | None = None
        # Kept here: C calls it for as long as this process lives.
        self._hook = _LAUNCHED(self._launched)
        self._device.null_on_launch(self._hook)
        self.computed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Native, then on the host."""
        if self._failure is not None:
            raise RuntimeError("a graph that was launched could not be computed") from self._failure
        kwargs = kwargs or {}
        flat, _ = tree_flatten((args, kwargs))
        name = func._schema.name
        if name.startswith("lightscale::"):
            # An operator of ours, made of others: PyTorch would run these without this mode, and nothing be computed.
            with self:
                return OPDEFS[name]._init_fn(*args, **kwargs)
        if func._can_decompose() and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CUDA"):
            # One that only autograd takes apart: in an operator of ours it comes as it is. But where CUDA has a kernel
            # beside, as of SiLU's backward, taking it apart would be more launches than there are.
            with self:
                return func.decompose(*args, **kwargs)
        given = [value for value in flat if isinstance(value, Tensor) and value.is_cuda]
        on_device = given or any(isinstance(value, torch.device) and value.type == "cuda" for value in flat)
        if not on_device or name in _NATIVE_ONLY or not name.startswith("aten::") or func.is_view:
            return func(*args, **kwargs)
        captured = captured_here()
        if self._whole_numbers_only and (name in _UNINITIALISED or not all(map(_is_whole, given))):
            return _stated(func(*args, **kwargs), captured)
        if captured is None and _asks_for_numbers(func, flat):
            # CUDA's own would read a number that nothing has computed. It would launch something and wait for it.
            self.computed += 1
            self._device.null_note_wait(name.encode(), torch.cuda.current_stream().cuda_stream)
            found = func(*as_host_tree(args), **as_host_tree(kwargs))
            return tree_map(lambda one: _moved(one, given[0].device), found) if not _writes(func) else args[0]
        native = func(*args, **kwargs)
        made = [value for value in tree_flatten(native)[0] if isinstance(value, Tensor)]
        if name in _UNINITIALISED:
            _do(partial(_poison, as_host_tree(made)), captured)
            return native
        if self._whole_numbers_only and not all(map(_is_whole, made)):
            return native
        self.computed += 1
        host_kwargs = {key: as_host_tree(value) for key, value in kwargs.items() if key != "pin_memory"}
        compute = partial(_MEANINGS.get(str(func), func), *as_host_tree(args), **host_kwargs)
        if captured is None:
            return _written(native, compute(), given)
        # What is written in place is computed on the same memory; of the rest the graph's memory is written.
        targets = tree_map(lambda one: None if any(one is other for other in given) else _as_host(one), native)
        captured.append(lambda: _fill(targets, compute()))
        return native

    def _launched(self, number: int) -> None:
        try:
            with _disable_current_modes(), torch.no_grad():
                for compute in _graphs.get(number, ()):
                    compute()
        except Exception as error:  # noqa: BLE001 - nothing passes through C; the next operation raises it
            self._failure = error


_LAUNCHED = ctypes.CFUNCTYPE(None, ctypes.c_uint64)


def _do(compute: Callable[[], object], captured: list[Callable[[], object]] | None) -> None:
    """Now, or whenever the graph is launched."""
    if captured is None:
        compute()
    else:
        captured.append(compute)


def _stated(value: Any, captured: list[Callable[[], object]] | None) -> Any:
    """What nothing has computed: numbers that the host reads are 1, whole numbers 0, the device's stay as they are."""
    if isinstance(value, float):
        return 1.0
    if isinstance(value, (tuple, list)):
        return type(value)(_stated(one, captured) for one in value)
    if isinstance(value, Tensor):
        if _is_whole(value):
            _do(on_host(value).zero_, captured)
        elif not value.is_cuda:
            value.fill_(1)
    return value


def _poison(made: list[Tensor]) -> None:
    for tensor in made:
        if tensor.is_floating_point():
            tensor.fill_(math.nan)


def _asks_for_numbers(func: Any, flat: list[Any]) -> bool:
    """Whether the size of what comes out depends on numbers: CUDA's implementation waits for the device to know it."""
    if torch.Tag.dynamic_output_shape not in func.tags and "index_put" not in func._schema.name:
        return False
    tensors = [one for one in flat if isinstance(one, Tensor)]
    if "index_put" in func._schema.name and not tensors[-1].is_cuda and tensors[-1].numel() == 1:
        # One number of the host at each place of a mask: filled in, wherever these are.
        return False
    # An index by whole numbers has the size of the index.
    is_index = "index" in func._schema.name
    return not is_index or any(isinstance(one, Tensor) and one.dtype == torch.bool for one in flat[1:])


def _writes(func: Any) -> bool:
    return any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments)


def _moved(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    on_host(made).copy_(value)
    return made


def as_host_tree(value: Any) -> Any:
    """A tree of values whose tensors on the device are the host's views of their memory."""
    return tree_map(_as_host, value)


def _written(native: Any, found: Any, given: list[Tensor]) -> Any:
    """The native outputs, holding what was found."""
    if isinstance(native, Tensor):
        if any(native is one for one in given):
            # Written in place: the host's kernel has written the same memory.
            return native
        _fill(on_host(native), found)
        return native
    if isinstance(native, (tuple, list)):
        return type(native)(_written(one, other, given) for one, other in zip(native, found, strict=True))
    return found


def _fill(target: Any, found: Any) -> None:
    """Write what was found into the host's view of the native outputs; None: it is there already."""
    if isinstance(target, Tensor):
        # CUDA pads what only it reads again, like the normalisers of attention.
        target = target[tuple(slice(size) for size in found.shape)]
        if target.data_ptr() != found.data_ptr() or target.stride() != found.stride():
            target.copy_(found)
    elif isinstance(target, (tuple, list)):
        for one, other in zip(target, found, strict=True):
            _fill(one, other)


# What has no CPU kernel, by its meaning. Products of bf16 with an fp32 result are exact products, summed in fp32.
def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return (a.float() @ b.float()).to(out_dtype)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return torch.addmm(bias.float(), a.float(), b.float(), beta=beta, alpha=alpha).to(out_dtype)


def _into(meaning: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def write(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        return out.copy_(meaning(*args, **kwargs))

    return write


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> tuple[Tensor, float]:
    """q and k: (b, h, n, k), of as many heads; and the scale that was taken."""
    taken = 1 / math.sqrt(q.size(-1)) if scale is None else scale
    scores = q @ k.transpose(-2, -1) * taken
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return (scores if bias is None else scores + bias.to(scores.dtype)), taken


def _wide(*tensors: Tensor) -> list[Tensor]:
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def _spread(x: Tensor, heads: int) -> Tensor:
    """Keys or values for every head of the queries."""
    return x if x.size(1) == heads else x.repeat_interleave(heads // x.size(1), dim=1)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Any:
    """Attention and the logarithms of its normalisers, in fp32."""
    q, k, v = _wide(q, _spread(k, q.size(1)), _spread(v, q.size(1)))
    scores, _ = _scores(q, k, bias, causal, scale)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0) @ v, lse


def _flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0, causal: bool = False, *_: Any, scale: Any = None
) -> Any:
    o, lse = _attend(q, k, v, None, causal, scale)
    zero = torch.zeros((), dtype=torch.uint64)
    return o.to(q.dtype), lse.float(), None, None, q.size(2), k.size(2), zero, zero, torch.empty(0, dtype=q.dtype)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cum_q: Any, cum_k: Any, max_q: int,
    max_k: int, dropout: float, causal: bool, *_: Any, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _gradients(grad, (q, k, v), None, causal, scale)[:3]


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, with_lse: bool, dropout: float = 0, causal: bool = False, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    o, lse = _attend(q, k, v, bias, causal, scale)
    zero = torch.zeros((), dtype=torch.int64)
    return o.to(q.dtype), lse.float(), zero, zero


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, o: Tensor, lse: Tensor, seed: Any, offset: Any,
    dropout: float, needed: Any, causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return (*_gradients(grad, (q, k, v), bias, causal, scale), None)


def _gradients(
    grad: Tensor,
    inputs: tuple[Tensor, ...],
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    whole: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Of q, k and v; by hand, because beneath a dispatch mode nothing is differentiated.

    ``whole``: outputs (b, h, n, k) and logarithms of the normalisers (b, h, n), where they are of more keys.
    """
    heads = inputs[0].size(1)
    do, q, k, v = _wide(grad, inputs[0], *(_spread(x, heads) for x in inputs[1:]))
    scores, taken = _scores(q, k, bias, causal, scale)
    inner = do @ v.transpose(-2, -1)
    if whole is None:
        weights = scores.softmax(-1).nan_to_num(0.0)
        means = (weights * inner).sum(-1, keepdim=True)
    else:
        o, lse = _wide(*whole)
        weights = torch.exp(scores - lse[..., None])
        means = (do * o).sum(-1, keepdim=True)
    slopes = weights * (inner - means) * taken
    found = (slopes @ k, slopes.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ do)
    return tuple(x.unflatten(1, (y.size(1), -1)).sum(2).to(y.dtype) for x, y in zip(found, inputs, strict=True))


def _documents(
    tensors: tuple[Tensor, Tensor, Tensor], cuts: tuple[Tensor, Tensor], causal: bool, window: int | None
) -> Iterator[tuple[slice, slice, tuple[Tensor, Tensor, Tensor], Tensor]]:
    """Of each document its queries, its keys, q, k and v as (1, h, n, k), and what is added to the scores."""
    q, k, v = tensors
    for i in range(len(cuts[0]) - 1):
        own, keys = (slice(int(cut[i]), int(cut[i + 1])) for cut in cuts)
        queries, of_keys, of_values = (x.transpose(0, 1)[None] for x in (q[own], k[keys], v[keys]))
        num_queries, num_keys = queries.size(2), of_keys.size(2)
        hidden = torch.full((num_queries, num_keys), -math.inf if causal else 0.0)
        # The last query sees the last key, and ``window`` keys before it.
        hidden = hidden.triu(1 + num_keys - num_queries)
        if window is not None and window >= 0:
            hidden += torch.full_like(hidden, -math.inf).tril(num_keys - num_queries - window - 1)
        yield own, keys, (queries, of_keys, of_values), hidden


def _flash_documents(
    q: Tensor, k: Tensor, v: Tensor, cut_q: Tensor, cut_k: Tensor, max_q: int, max_k: int, dropout: float, causal: bool,
    *_: Any, scale: float | None = None, window_size_left: int | None = None, **__: Any,
) -> Any:  # fmt: skip
    o, lse = torch.empty_like(q), torch.empty(q.size(1), len(q), dtype=torch.float32)
    for own, _keys, parts, hidden in _documents((q, k, v), (cut_q, cut_k), causal, window_size_left):
        found, sums = _attend(*parts, hidden, False, scale)
        o[own], lse[:, own] = found[0].transpose(0, 1).to(q.dtype), sums[0]
    return o, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), q.new_empty(0)


def _flash_documents_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cut_q: Tensor, cut_k: Tensor, max_q: int,
    max_k: int, dropout: float, causal: bool, *_: Any, scale: float | None = None,
    window_size_left: int | None = None, **__: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    made = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for own, keys, parts, hidden in _documents((q, k, v), (cut_q, cut_k), causal, window_size_left):
        do, of_run = (x[own].transpose(0, 1)[None] for x in (grad, o))
        # Of the keys of all parts, of which these may be one.
        found = _gradients(do, parts, hidden, False, scale, whole=(of_run, lse[None, :, own]))
        for tensor, rows, gradient in zip(made, (own, keys, keys), found, strict=True):
            tensor[rows] = gradient[0].transpose(0, 1)
    return made


def _log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    # CUDA's keeps nothing for the backward pass.
    return torch.ops.aten.log_sigmoid_forward(x)[0], x.new_empty(0)


def _log_sigmoid_backward(grad: Tensor, x: Tensor, _: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.log_sigmoid_backward(grad, x, torch.ops.aten.log_sigmoid_forward(x)[1])
    return found


_MEANINGS: dict[str, Callable[..., Any]] = {
    "aten.mm.dtype": _mm,
    "aten.bmm.dtype": _mm,
    "aten.addmm.dtype": _addmm,
    "aten.mm.dtype_out": _into(_mm),
    "aten.bmm.dtype_out": _into(_mm),
    "aten.addmm.dtype_out": _into(_addmm),
    "aten.log_sigmoid_forward.default": _log_sigmoid,
    "aten.log_sigmoid_backward.default": _log_sigmoid_backward,
    "aten._flash_attention_forward.default": _flash_documents,
    "aten._flash_attention_backward.default": _flash_documents_backward,
    "aten._scaled_dot_product_flash_attention.default": _flash,
    "aten._scaled_dot_product_flash_attention_backward.default": _flash_backward,
    "aten._scaled_dot_product_efficient_attention.default": _efficient,
    "aten._scaled_dot_product_efficient_attention_backward.default": _efficient_backward,
}
