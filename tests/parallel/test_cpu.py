"""The redirection of Megatron to the CPU: what it changes, and that it stays away from GPUs.

It changes torch for the life of a process, so it acts only in processes of its own.
"""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightscale.parallel.cpu import redirect_megatron_to_cpu

RunRanks = Callable[..., list[Any]]


def test_it_refuses_where_a_gpu_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: getattr(torch, name) for name in ("zeros", "empty", "tensor")}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="hide it with CUDA_VISIBLE_DEVICES="):
        redirect_megatron_to_cpu()
    assert {name: getattr(torch, name) for name in before} == before


def redirected(rank: int, world_size: int, init_method: str) -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    host = torch.get_rng_state()
    redirect_megatron_to_cpu()
    redirect_megatron_to_cpu()
    cpu = torch.device("cpu")
    current: Any = torch.cuda.current_device()
    assert current == cpu
    for device in ("cuda", "cuda:3", torch.device("cuda"), torch.device("cuda", 1), cpu, "cpu", None):
        assert torch.zeros(2, device=device).device == cpu
        assert torch.tensor([1.0], device=device).device == cpu
        assert torch.empty_like(torch.ones(2), device=device).device == cpu
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.full((2,), 3, dtype=torch.int64, device="cuda").tolist() == [3, 3]
    assert torch.zeros(2, device="cuda", requires_grad=True).requires_grad

    x = torch.ones(2)
    assert x.cuda() is x
    assert x.cuda(non_blocking=True) is x
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert x.type(torch.float64).dtype == x.type("torch.DoubleTensor").dtype == torch.float64

    torch.cuda.synchronize()
    # The generator that stands for the device's is not the CPU's own.
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    assert torch.equal(torch.get_rng_state(), host)
    torch.cuda.manual_seed(6)
    assert not torch.equal(torch.cuda.get_rng_state(), state)
    megatron_random._set_cuda_rng_state(state)
    assert torch.equal(megatron_random._get_cuda_rng_state(), state)
    assert torch.equal(torch.get_rng_state(), host)


def test_what_is_redirected(run_ranks: RunRanks) -> None:
    run_ranks(redirected, 1)


def collected(rank: int, world_size: int, init_method: str) -> list[Any]:
    """What Megatron's collectives of weights and gradients make of two numbers: alone, by copies, and of both ranks."""
    import torch.distributed as dist

    from lightscale.parallel.megatron import megatron_buffers

    redirect_megatron_to_cpu()
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    groups = [dist.new_group([one], use_local_synchronization=True) for one in range(2)]
    found: list[Any] = []
    for group in (groups[rank], dist.group.WORLD):
        size = dist.get_world_size(group)
        x = torch.tensor([1.0 + rank, 3.0 + rank])
        part = x.chunk(size)[rank if size > 1 else 0]
        megatron_buffers.dist_all_gather_func(x, part, group=group)
        found.append(x.tolist())
        megatron_buffers.dist_reduce_scatter_func(part, x, group=group)
        found.append(part.tolist())
        # Elsewhere in memory: copied by one rank too.
        copy = torch.zeros(2)
        megatron_buffers.dist_all_gather_func(copy, x.chunk(size)[0].clone(), group=group)
        found.append(copy.tolist())
    dist.destroy_process_group()
    return found


def test_collectives_of_one_data_rank_leave_all_in_place(run_ranks: RunRanks) -> None:
    first, second = run_ranks(collected, 2)
    assert first[:3] == [[1.0, 3.0]] * 3
    assert second[:3] == [[2.0, 4.0]] * 3
    assert (first[3], second[3]) == ([1.0, 4.0], [1.0, 4.0])
    assert (first[4], second[4]) == ([2.0], [8.0])
    assert first[5] == second[5]


class Started(Exception):
    """The process group would now be started."""


def start_on_gpu(rank: int, world_size: int, init_method: str) -> tuple[list[Any], bool, bool]:
    """What ``start_mesh`` does, up to the process group, where torch sees a GPU."""
    import sys

    # The test module itself imports what is tested.
    del sys.modules["lightscale.parallel.cpu"]
    import lightscale.training.train  # noqa: F401 - with all that a run imports
    from lightscale.parallel import mesh

    def start(**options: Any) -> None:
        calls.append(options["backend"])
        raise Started

    calls: list[Any] = []
    device: Any = torch.cuda
    distributed: Any = mesh.dist
    device.is_available, device.device_count, device.set_device = lambda: True, lambda: 1, calls.append
    distributed.init_process_group = start
    factory, seen = torch.zeros, []
    for chosen in ("auto", "cuda"):
        try:
            with mesh.start_mesh(device=chosen):
                raise AssertionError("the process group was started")
        except Started:
            seen.append("lightscale.parallel.cpu" in sys.modules)
    return calls, any(seen), torch.zeros is factory


def test_on_a_gpu_it_is_not_even_imported(run_ranks: RunRanks) -> None:
    gpu = torch.device("cuda", 0)
    assert run_ranks(start_on_gpu, 1) == [([gpu, "nccl", gpu, "nccl"], False, True)]


WITH_A_DEVICE = """
import torch
from lightscale.parallel.cpu import redirect_megatron_to_cpu
redirect_megatron_to_cpu()
with torch.device("meta"):
    print(torch.empty(2).device, torch.ones(2).device, torch.zeros_like(torch.arange(2)).device)
"""


def test_a_device_that_is_entered_is_still_the_one() -> None:
    """In a process of its own: PyTorch keeps what it finds when it first enters one."""
    done = subprocess.run([sys.executable, "-c", WITH_A_DEVICE], capture_output=True, text=True, check=True)
    assert done.stdout == "meta meta meta\n"
