"""Which memory each operation and each Triton kernel reads and writes, noted among the null device's records."""

import ast
import ctypes
import functools
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import triton
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from cuda_twin.installation import library
from cuda_twin.recorded.kinds import Kind
from cuda_twin.recorded.ordering import HOST

# Copies and collectives are noted by the device itself, which knows their stream better; views touch nothing.
_SKIPPED = ("aten::record_stream", "aten::is_pinned", "aten::set_")
# These take sizes and types of what they are given, and none of its numbers.
_BY_SHAPE = ("empty", "new_", "zeros", "ones", "full", "rand")


class AccessNotes:
    """Notes accesses, each with the line of lightscale that made it."""

    def __init__(self) -> None:
        self.places: list[str] = []
        """By the number in the records."""
        self._numbers: dict[tuple[str, str, int], int] = {}
        self._library = library()
        self._library.null_note_access.argtypes = [ctypes.c_uint32, *[ctypes.c_uint64] * 5]
        self._library.null_count.restype = ctypes.c_size_t

    def now(self) -> int:
        """The number of the next record."""
        count: int = self._library.null_count()
        return count

    def note(
        self,
        kind: Kind,
        tensor: Tensor,
        what: str,
        *,
        stream: int | None = None,
        whole: bool = False,
        before: int = 0,
    ) -> None:
        """One access of a tensor by the current stream or, of a CPU tensor, by the host.

        Args:
            kind: of the access.
            tensor: what is accessed.
            what: the operation or kernel.
            stream: another one than the current.
            whole: the tensor's whole storage is.
            before: of fresh memory, the record before which it was handed out.
        """
        if not tensor.numel() or tensor.device.type not in ("cuda", "cpu"):
            return
        if stream is None:
            stream = torch.cuda.current_stream().cuda_stream if tensor.is_cuda else HOST
        if whole:
            storage = tensor.untyped_storage()
            start, num_bytes = storage.data_ptr(), storage.nbytes()
        else:
            reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
            start, num_bytes = tensor.data_ptr(), reach * tensor.element_size()
        self._library.null_note_access(kind, stream, start, num_bytes, self._number(what), before)

    def _number(self, what: str) -> int:
        file, line = _place()
        key = (what, file, line)
        if key not in self._numbers:
            self._numbers[key] = len(self.places)
            self.places.append(f"{what} ({file}:{line})" if file else what)
        return self._numbers[key]


def _place() -> tuple[str, int]:
    frame = sys._getframe(3)
    other = "", 0
    while frame is not None:
        name = frame.f_code.co_filename
        if "/lightscale/" in name:
            return f"lightscale/{name.rpartition('/lightscale/')[2]}", frame.f_lineno
        if "/megatron/" in name and not other[0]:
            other = f"megatron/{name.rpartition('/megatron/')[2]}", frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return other


class Accesses(TorchDispatchMode):
    """While this is entered, in each thread for itself, what operations read and write is noted.

    By their schemas: what is declared as written is, all other tensors are read. Outputs whose storage is none of the
    inputs' are memory that the allocator has just handed out.
    """

    def __init__(self, notes: AccessNotes) -> None:
        super().__init__()
        self._notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note, run, note."""
        kwargs = kwargs or {}
        name = func._schema.name
        if name.startswith("lightscale::"):
            # An operator of ours, made of others, which are noted.
            with self:
                return OPDEFS[name]._init_fn(*args, **kwargs)
        if name == "aten::record_stream":
            stream = torch.cuda.Stream(stream_id=args[1].stream_id, device_index=args[1].device_index, device_type=1)
            self._notes.note(Kind.SHARED, args[0], name, stream=stream.cuda_stream, whole=True)
        if not name.startswith("aten::") or name in _SKIPPED or func.is_view:
            return func(*args, **kwargs)
        given = list(_given(func, args, kwargs))
        storages = {tensor.untyped_storage()._cdata for tensor, _ in given}
        by_shape = name.removeprefix("aten::").startswith(_BY_SHAPE) or name.endswith(("_like", "resize_"))
        on_device = any(tensor.is_cuda for tensor, _ in given)
        before = self._notes.now()
        # Before it runs: where the host waits for it, it has been launched by then.
        for tensor, is_written in given:
            # What goes between the host and a device is copied, which the device notes.
            if not by_shape and tensor.is_cuda == on_device:
                self._notes.note(Kind.WRITE if is_written else Kind.READ, tensor, name)
        made = func(*args, **kwargs)
        for value in tree_flatten(made)[0]:
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in storages:
                self._notes.note(Kind.FRESH, value, name, whole=True, before=before)
        return made


def _given(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """The tensors of a call, and whether each is written."""
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, Tensor):
                yield one, is_written


def note_triton(notes: AccessNotes, kernel: Any, bound: Mapping[str, Any]) -> None:
    """What a launch of a kernel reads and writes."""
    written = written_by(kernel)
    for name, value in bound.items():
        if isinstance(value, Tensor):
            notes.note(Kind.WRITE if name in written else Kind.READ, value, kernel.__name__)


@functools.cache
def written_by(kernel: Any) -> frozenset[str]:
    """The parameters of a Triton kernel through which it stores, by its source and that of the kernels it calls."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                _assign(target, node.value, values)
        elif isinstance(node, ast.AugAssign):
            _assign(node.target, node.value, values)
    roots = functools.partial(_roots, parameters=frozenset(kernel.arg_names), values=values)
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for pointer in _stored(node, kernel.fn.__globals__):
                found |= roots(pointer, seen=frozenset())
    return frozenset(found)


def _assign(target: ast.expr, value: ast.expr, values: dict[str, list[ast.expr]]) -> None:
    if isinstance(target, ast.Name):
        values.setdefault(target.id, []).append(value)
    elif isinstance(target, ast.Tuple):
        parts = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
        for one, part in zip(target.elts, parts, strict=True):
            _assign(one, part, values)


def _stored(call: ast.Call, known: Mapping[str, Any]) -> Iterable[ast.expr]:
    """The pointers through which a call stores."""
    if isinstance(call.func, ast.Attribute):
        return call.args[:1] if call.func.attr == "store" or call.func.attr.startswith("atomic_") else ()
    called = known.get(call.func.id) if isinstance(call.func, ast.Name) else None
    if not isinstance(called, triton.KernelInterface):
        return ()
    given = {**dict(zip(called.arg_names, call.args, strict=False)), **{one.arg: one.value for one in call.keywords}}
    return [given[name] for name in written_by(called) if name in given]


def _roots(
    pointer: ast.expr, *, parameters: frozenset[str], values: Mapping[str, list[ast.expr]], seen: frozenset[str]
) -> set[str]:
    """The parameters that a pointer is made of: pointers stand on the left of what is added to them."""
    again = functools.partial(_roots, parameters=parameters, values=values)
    if isinstance(pointer, ast.Name):
        if pointer.id in seen:
            return set()
        found = {pointer.id} & parameters
        return found.union(*(again(value, seen=seen | {pointer.id}) for value in values.get(pointer.id, ())))
    if isinstance(pointer, ast.BinOp):
        return again(pointer.left, seen=seen) or again(pointer.right, seen=seen)
    if isinstance(pointer, ast.IfExp):
        return again(pointer.body, seen=seen) | again(pointer.orelse, seen=seen)
    if isinstance(pointer, ast.Call) and not isinstance(pointer.func, ast.Attribute):
        # A helper that moves a pointer.
        return set().union(*(again(value, seen=seen) for value in pointer.args))
    return set()
