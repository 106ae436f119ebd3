"""Log-sums in Triton: the passes of ``chunked.py``.

Two launches per direction. The first computes the sum that leaves every split of a row (forward), or the cotangent of
its first token (backward); a fold follows. The second computes the outputs or gradients of all splits side by side.
Inputs and outputs are saved.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lightscale.kernels.common.states import Arriving, arrived
from lightscale.kernels.common.triton.launch import LAUNCH, dense_last, on_device_of
from lightscale.kernels.log_sum.chunked import DEFAULT_CHUNK_SIZE, document_begins, recurrent_step, weight
from lightscale.kernels.log_sum.segments import entering_sums
from lightscale.kernels.log_sum.triton import tiling
from lightscale.kernels.log_sum.triton.cases import COMPILE_CASES
from lightscale.kernels.log_sum.triton.kernels import scan, scan_back

__all__ = ["COMPILE_CASES", "grad_bwd", "out_fwd", "recurrent_step", "state_bwd", "state_fwd", "triton_log_sum"]


class _Rows(NamedTuple):
    """Splits of rows (B, T, D), T > 0."""

    B: int
    T: int
    D: int
    split_tokens: int
    num_splits: int
    starts: Tensor | None  # (B, T) int8

    @staticmethod
    def of(x: Tensor, cu_seqlens: Tensor | None) -> "_Rows":
        B, T, D = x.shape
        tokens = max(tiling.LEAST_SPLIT_TOKENS, triton.cdiv(T, max(1, tiling.MOST_SPLITS // B)))
        tokens = triton.cdiv(tokens, tiling.CHUNK) * tiling.CHUNK
        starts = document_begins(x, cu_seqlens)
        return _Rows(B, T, D, tokens, triton.cdiv(T, tokens), None if starts is None else starts.to(torch.int8))

    @property
    def launch(self) -> tuple[tuple[int, int, int], dict[str, Any]]:
        """The grid of a launch, and its options."""
        grid = self.B, triton.cdiv(self.D, tiling.CHANNELS), self.num_splits
        return grid, {"CHUNK": tiling.CHUNK, "BLOCK_D": tiling.CHANNELS, **LAUNCH}

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.T, self.D, self.split_tokens, self.num_splits

    def new_states(self, like: Tensor) -> Tensor:
        """Uninitialised memory for a number per split and channel, (B, S, D)."""
        return like.new_empty(self.B, self.num_splits, self.D, dtype=torch.float32)

    def through(self) -> Tensor | None:
        """(S, B), 0 where a document begins in a split; None without boundaries."""
        if self.starts is None:
            return None
        split = torch.arange(self.T, device=self.starts.device) // self.split_tokens
        begun = self.starts.new_zeros(self.B, self.num_splits, dtype=torch.float32)
        return (begun.index_add(1, split, self.starts.float()) == 0).float().mT


def _entering(rows: _Rows, b: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sums that enter the splits and leave the row, (S + 1, B, D); (B,) 0 where a document begins in the row."""
    last = rows.new_states(b)
    grid, options = rows.launch
    scan[grid](b, rows.starts, None, None, last, *rows.sizes, *b.stride()[:2], **options)
    through = rows.through()
    if through is None:
        through = last.new_ones(rows.num_splits, rows.B)
    return entering_sums(last.transpose(0, 1), through, state), through.amin(0)


def _reaching(rows: _Rows, z: Tensor, dz: Tensor, dstate: Tensor | None) -> tuple[Tensor, Tensor]:
    """The cotangents (B, S, D) of each split's last sum by the tokens behind it, and (B, D) of the row's first sum."""
    first = rows.new_states(z)
    grid, options = rows.launch
    strides = (0, 0, *z.stride()[:2], *dz.stride()[:2])
    scan_back[grid](None, z, dz, rows.starts, None, None, first, *rows.sizes, *strides, **options)
    edges = torch.arange(rows.num_splits, device=z.device) * rows.split_tokens
    z_first = z[:, edges]
    z_last = torch.cat([z[:, edges[1:] - 1], z[:, -1:]], dim=1)
    # All pairs at once, as in ``entering_sums``: S² B D numbers and a fixed number of launches. A pair is the share of
    # split i's last token in the first sum of split j > i, or in the last sum of the row.
    onwards = weight(z_last[:, :, None], z_first[:, None])
    through = weight(z_last, z_last[:, -1:])
    within = weight(z_first[:, 0], z_last[:, 0])
    later = edges[None, :] > edges[:, None]
    kept = later.expand(rows.B, -1, -1)
    if rows.starts is not None:
        # Two tokens have a sum in common unless a document begins between them.
        begun = rows.starts.cumsum(1)
        at_first, at_last = begun[:, edges], torch.cat([begun[:, edges[1:] - 1], begun[:, -1:]], dim=1)
        kept = later & (at_last[:, :, None] == at_first[:, None])
        through = through.masked_fill((at_last != at_last[:, -1:])[..., None], 0.0)
        within = within.masked_fill((at_first[:, 0] != at_last[:, 0])[:, None], 0.0)
    behind = (onwards.masked_fill(~kept[..., None], 0.0) * first[:, None]).sum(2)
    if dstate is not None:
        behind = behind + through * dstate.float()[:, None]
    return behind, first[:, 0] + within * behind[:, 0]


@torch.library.custom_op("lightscale::log_sum_out_fwd", mutates_args=())
def _out_fwd(b: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    z = b.new_empty(b.shape, dtype=torch.float32)
    if not z.numel():
        return z
    with on_device_of(b):
        b, rows = dense_last(b), _Rows.of(b, cu_seqlens)
        entering = None if state is None else state.float()[:, None].contiguous()
        if rows.num_splits > 1:
            entering = _entering(rows, b, state)[0][:-1].transpose(0, 1).contiguous()
        grid, options = rows.launch
        scan[grid](b, rows.starts, entering, z, None, *rows.sizes, *b.stride()[:2], **options)
    return z


@_out_fwd.register_fake
def _(b: Tensor, *_: Any) -> Tensor:
    return b.new_empty(b.shape, dtype=torch.float32)


@torch.library.custom_op("lightscale::log_sum_grad", mutates_args=())
def _grad(b: Tensor, z: Tensor, dz: Tensor, dstate: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    db = b.new_empty(b.shape)
    if not db.numel():
        return db
    with on_device_of(b):
        b, z, dz, rows = dense_last(b), dense_last(z), dense_last(dz), _Rows.of(b, cu_seqlens)
        behind = None if dstate is None else dstate.float()[:, None].contiguous()
        if rows.num_splits > 1:
            behind = _reaching(rows, z, dz, dstate)[0]
        grid, options = rows.launch
        strides = (*b.stride()[:2], *z.stride()[:2], *dz.stride()[:2])
        scan_back[grid](b, z, dz, rows.starts, behind, db, None, *rows.sizes, *strides, **options)
    return db


@_grad.register_fake
def _(b: Tensor, *_: Any) -> Tensor:
    return b.new_empty(b.shape)


@torch.library.custom_op("lightscale::log_sum_state_bwd", mutates_args=())
def _state_bwd(z: Tensor, dz: Tensor, state: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if not z.numel():
        return torch.zeros_like(state)
    with on_device_of(z):
        z, dz = dense_last(z), dense_last(dz)
        reaching = _reaching(_Rows.of(z, cu_seqlens), z, dz, None)[1]
    return weight(state, z[:, 0]) * reaching


@_state_bwd.register_fake
def _(z: Tensor, dz: Tensor, state: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(state)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    b, state, cu_seqlens = inputs
    ctx.save_for_backward(b, output, state, cu_seqlens)


def _backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
    b, z, state, cu_seqlens = ctx.saved_tensors
    db = _grad(b, z, dz, None, cu_seqlens)
    return db, None if state is None else _state_bwd(z, dz, state, cu_seqlens), None


_out_fwd.register_autograd(_backward, setup_context=_save)


def triton_log_sum(b: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """The operator z (B, T, D), differentiable in b and the state; see ``log_sum``."""
    z: Tensor = _out_fwd(b, state, cu_seqlens)
    return z


def out_fwd(
    b: Tensor, state: Tensor | None, cu_seqlens: Tensor | None = None, chunk_size: int = DEFAULT_CHUNK_SIZE
) -> Tensor:
    """See ``chunked.out_fwd``; the kernel sets the size of chunks."""
    return triton_log_sum(b, state, cu_seqlens)


def state_fwd(b: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See ``chunked.state_fwd``."""
    if not b.numel():
        nothing = b.new_full((b.shape[0], b.shape[2]), -torch.inf, dtype=torch.float32)
        return nothing, b.new_ones(b.shape[0], dtype=torch.float32)
    with on_device_of(b):
        b = dense_last(b)
        entering, through = _entering(_Rows.of(b, cu_seqlens), b, None)
    return entering[-1], through


def state_bwd(z: Tensor, dz: Tensor, state: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """See ``chunked.state_bwd``."""
    found: Tensor = _state_bwd(z, dz, state, cu_seqlens)
    return found


def grad_bwd(
    b: Tensor,
    z: Tensor,
    dz: Tensor,
    dstate: Arriving[Tensor | None] = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> Tensor:
    """See ``chunked.grad_bwd``."""
    found: Tensor = _grad(b, z, dz, arrived(dstate), cu_seqlens)
    return found
