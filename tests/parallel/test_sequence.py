"""Sequence parallelism of an operator by itself; whole models are in test_parity.py."""

from collections.abc import Callable
from typing import Any

import torch

from lightscale.kernels.lightning import lightning_attention_reference
from lightscale.parallel.mesh import start_mesh
from lightscale.parallel.sequence import LightningScan, StateExchange, sequence_parallel


def learned_decay(rank: int, world_size: int, init_method: str) -> tuple[float, int]:
    """Error of the gradient of a learned decay, summed over two ranks, and the bytes sent forward and backward."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(2, 40, 3, 8, dtype=torch.float64, generator=generator) for _ in range(4))
    exact = torch.tensor([-0.1, -0.01, -1.0], dtype=torch.float64, requires_grad=True)
    lightning_attention_reference(q, k, v, exact)[0].backward(do)
    with start_mesh(sequence=world_size, rank=rank, world_size=world_size, init_method=init_method) as mesh:
        own = slice(0, 13) if rank == 0 else slice(13, 40)
        log_decay = exact.detach().clone().requires_grad_()
        exchange = StateExchange(mesh.states)
        continues = torch.full((2,), rank > 0)
        scan = LightningScan(continues=continues, cu_seqlens=None)
        sequence_parallel(scan, exchange, q[:, own], k[:, own], v[:, own], log_decay).backward(do[:, own])
        assert log_decay.grad is not None and exact.grad is not None
        torch.distributed.all_reduce(log_decay.grad)
        return float((log_decay.grad - exact.grad).norm() / exact.grad.norm()), exchange.payload_bytes


def test_a_learned_decay_gets_its_gradient_over_uneven_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    state = 2 * 3 * 8 * 8
    for error, payload_bytes in run_ranks(learned_decay, 2):
        assert error < 1e-10
        assert payload_bytes == 8 * ((state + 2 * 3) + state)  # fp64: states and decays forward, cotangents backward
