"""Process groups: the only place that starts torch.distributed and Megatron's parallel state.

The axes are ``tensor``, ``pipeline``, ``sequence`` and ``data``. ``sequence`` splits every sequence over ranks that
pass states to each other (LASP, arXiv 2404.02882). Megatron calls that axis context parallelism; its ranks and its
gradient reductions are used unchanged. States travel through a separate communicator: every rank must issue the
collectives of one communicator in the same order.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from lightscale.config.layout import check_nodes
from lightscale.config.schema import Attention, Exchange
from lightscale.errors import UserError
from lightscale.parallel.device.products import use_onednn_products
from lightscale.parallel.megatron import ProcessGroupCollection, parallel_state, tensor_parallel
from lightscale.parallel.rendezvous.sockets import on_loopback
from lightscale.parallel.sequence import (
    AttentionExchange,
    Gather,
    HeadExchange,
    KeyGather,
    KeyRing,
    Ring,
    StateExchange,
    TwoLevel,
)

# Writing a checkpoint waits for the slowest rank's disk, without a limit that would fit every file system.
_SAVING_TIMEOUT = timedelta(hours=6)
_ATTENTION: dict[Attention, type[AttentionExchange]] = {
    "gather": KeyGather,
    "ring": KeyRing,
    "all_to_all": HeadExchange,
}
# By their ids: groups of meshes whose end something outlives.
_alive: weakref.WeakValueDictionary[int, ProcessGroupCollection] = weakref.WeakValueDictionary()


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The place of this process on the four axes, and its process groups.

    - ``groups``: Megatron's own collection (``tp``, ``pp``, ``cp``, ``dp_cp``, …).
    - ``exchange``: passes the states of mixers along ``sequence``; None: every rank holds whole sequences.
    - ``attention``: the same for queries, keys and values of softmax attention, over the ranks of ``exchange``.
    - ``control``: a gloo group of all processes, for small host-side agreements of the main thread.
    - ``saving``: the same for the thread that writes checkpoints; two threads on one group would mix their messages.
    - ``ends``: callbacks that run before the groups are left.
    """

    device: torch.device
    rank: int
    world_size: int
    tensor: int
    pipeline: int
    sequence: int
    data: int
    virtual_stages: int
    sequence_rank: int
    data_rank: int
    groups: ProcessGroupCollection
    exchange: StateExchange | None
    attention: AttentionExchange | None
    control: dist.ProcessGroup
    saving: dist.ProcessGroup
    ends: ExitStack

    @property
    def axes(self) -> dict[str, int]:
        """Ranks along each axis, by name."""
        return {"tensor": self.tensor, "pipeline": self.pipeline, "sequence": self.sequence, "data": self.data}

    @property
    def is_last_stage(self) -> bool:
        """Whether this process holds the output layer."""
        return bool(self.groups.pp.rank() == self.pipeline - 1)


def _choose_device(device: str, local_rank: int) -> torch.device:
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"train.device = {device!r}: use auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("train.device = 'cuda', but PyTorch finds no GPU; use 'auto' or 'cpu'")
    if device == "cpu" and torch.cuda.is_available():
        raise UserError(
            "train.device = 'cpu', but this machine has a GPU, which Megatron would use; hide it with "
            "CUDA_VISIBLE_DEVICES="
        )
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"process {local_rank} of this machine has no GPU: {torch.cuda.device_count()} are visible; start at most "
            "one process per GPU"
        )
    return torch.device("cuda", local_rank)


@contextmanager
def start_mesh(
    *,
    tensor: int = 1,
    pipeline: int = 1,
    sequence: int = 1,
    device: str = "auto",
    rank: int = 0,
    world_size: int = 1,
    local_rank: int = 0,
    init_method: str | None = None,
    store: dist.Store | None = None,
    timeout_s: float = 600.0,
    exchange: Exchange = "gather",
    attention: Attention = "gather",
    ranks_per_node: int | None = None,
    virtual_stages: int = 1,
) -> Iterator[Mesh]:
    """Join the process group, split it into the four axes (``data`` is the rest), and leave it at the end.

    Ranks are laid out as Megatron does by default: tensor fastest, then sequence, data and pipeline.

    Args:
        init_method: torch's address of the other ranks.
        store: store shared with the other ranks, instead of an address. A single rank needs neither.
        exchange: how states pass along the sequence.
        attention: how queries and keys of softmax attention meet along the sequence.
        ranks_per_node: neighbouring ranks that share a node, for ``two_level``; None: all.
        virtual_stages: parts of the layers that each pipeline rank holds, not neighbours in the model.

    Raises:
        UserError: ``world_size`` is not a multiple of ``tensor * pipeline * sequence``, nodes cut a sequence into
            unequal parts, or the device is not there.
    """
    inner = tensor * pipeline * sequence
    if world_size % inner:
        raise UserError(
            f"{world_size} processes cannot be split into parallel.tensor = {tensor} x parallel.pipeline = {pipeline} "
            f"x parallel.sequence = {sequence}: their number must be a multiple of {inner}"
        )
    if exchange == "two_level":
        check_nodes(world_size, tensor=tensor, sequence=sequence, ranks_per_node=ranks_per_node or world_size)
    chosen = _choose_device(device, local_rank)
    if _alive:
        # An engine refers to itself, and its mesh's groups live with it: each of gloo's has threads, of which one wakes
        # 100 times a second.
        gc.collect()
    if chosen.type == "cpu":
        # Imported only here: on a GPU the redirection must not even be loaded.
        from lightscale.parallel.cpu import redirect_megatron_to_cpu  # noqa: PLC0415

        redirect_megatron_to_cpu()
        use_onednn_products()
    else:
        # Before any group is made: NCCL takes the current device.
        torch.cuda.set_device(chosen)
    timeout = timedelta(seconds=timeout_s)
    if world_size == 1 and init_method is None:
        store = store or dist.HashStore()
    with ExitStack() as begun:
        if world_size == 1:
            begun.enter_context(on_loopback())
        dist.init_process_group(
            backend="nccl" if chosen.type == "cuda" else "gloo",
            init_method=init_method,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        # Later groups listen too; where this one fails, the variables of the loopback end here.
        ends = begun.pop_all()
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            context_parallel_size=sequence,
            virtual_pipeline_model_parallel_size=virtual_stages if virtual_stages > 1 else None,
            # Becomes a timedelta: parts of a minute are welcome.
            distributed_timeout_minutes=timeout_s / 60,
            # Megatron wants gloo beside NCCL, for what it does on the host; on CPUs its groups are gloo's already.
            create_gloo_process_groups=chosen.type == "cuda",
        )
        # Megatron's layers fork named random streams; weights are drawn elsewhere (parallel/initialization.py).
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        _alive[id(groups)] = groups
        states = _state_exchange(exchange, ranks_per_node or world_size, timeout) if sequence > 1 else None
        yield Mesh(
            device=chosen,
            rank=rank,
            world_size=world_size,
            tensor=tensor,
            pipeline=pipeline,
            sequence=sequence,
            data=world_size // inner,
            virtual_stages=virtual_stages,
            sequence_rank=parallel_state.get_context_parallel_rank(),
            # Without the sequence ranks, which read parts of the same rows.
            data_rank=parallel_state.get_data_parallel_rank(with_context_parallel=False),
            groups=groups,
            exchange=states,
            attention=None if states is None else _ATTENTION[attention](states),
            control=dist.new_group(backend="gloo", timeout=timeout),
            # gloo notices a rank that is gone at once, whatever the limit; it is for one that is slow.
            saving=dist.new_group(backend="gloo", timeout=_SAVING_TIMEOUT),
            ends=ends,
        )
    finally:
        ends.close()
        # Megatron's groups are global variables: tests start several meshes in one process.
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@contextmanager
def shape_mesh(
    *, tensor: int, sequence: int, sequence_rank: int, exchange: Exchange, ranks_per_node: int | None
) -> Iterator[Mesh]:
    """A rank of ``tensor`` x ``sequence`` ranks without the other ranks, on PyTorch's device "meta".

    Models on it have shapes and no numbers, and compute the shapes of the rank in a run of any number of data and
    pipeline ranks. Collectives transfer nothing. The process must have no process group.
    """
    # Registers the backend.
    from torch.testing._internal.distributed import fake_pg  # noqa: F401, PLC0415

    if not torch.cuda.is_available():
        from lightscale.parallel.cpu import redirect_megatron_to_cpu  # noqa: PLC0415

        redirect_megatron_to_cpu()
    world_size, rank = tensor * sequence, tensor * sequence_rank
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
    current_device = torch.cuda.current_device
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor, context_parallel_size=sequence, create_gloo_process_groups=False
        )
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        host, groups = dist.new_group([rank]), ProcessGroupCollection.use_mpu_process_groups()
        states = _shape_exchange(exchange, ranks_per_node or world_size) if sequence > 1 else None
        # Megatron creates weights and buffers there.
        torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment, return-value]
        yield Mesh(
            device=torch.device("meta"),
            rank=rank,
            world_size=world_size,
            tensor=tensor,
            pipeline=1,
            sequence=sequence,
            data=1,
            virtual_stages=1,
            sequence_rank=sequence_rank,
            data_rank=0,
            groups=groups,
            exchange=states,
            # The others decide by numbers; around attention, which is PyTorch's, shapes are the same.
            attention=None if states is None else _ATTENTION["gather"](states),
            control=host,
            saving=host,
            ends=ExitStack(),
        )
    finally:
        torch.cuda.current_device = current_device
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _shape_exchange(kind: Exchange, ranks_per_node: int) -> StateExchange:
    ranks = dist.get_process_group_ranks(parallel_state.get_context_parallel_group())
    return _exchange_of(kind, ranks, ranks_per_node, dist.new_group)


def _state_exchange(kind: Exchange, ranks_per_node: int, timeout: timedelta) -> StateExchange:
    # Not Megatron's group, though the ranks are the same: exchanges run on a thread or stream of their own, and what
    # Megatron sends over its group meanwhile would meet them in another order on each rank, which hangs.
    ranks = dist.get_process_group_ranks(parallel_state.get_context_parallel_group())
    return _exchange_of(kind, ranks, ranks_per_node, partial(_new_group, timeout=timeout))


def _exchange_of(
    kind: Exchange, ranks: list[int], ranks_per_node: int, new_group: Callable[[list[int]], dist.ProcessGroup]
) -> StateExchange:
    states = new_group(ranks)
    if kind == "ring":
        return Ring(states)
    if kind == "gather":
        return Gather(states)
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    own = nodes[dist.get_rank() // ranks_per_node]
    across = [node[own.index(dist.get_rank())] for node in nodes.values()]
    return TwoLevel(states, node=new_group(own), across=new_group(across))


def _new_group(mine: list[int], timeout: timedelta) -> dist.ProcessGroup:
    """A new communicator over the ranks ``mine``; called by all processes together."""
    # PyTorch makes a group only with all processes of the world, all groups in one order: so each learns what the
    # others want, and makes theirs too.
    every: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    made = {ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in sorted({tuple(ranks) for ranks in every})}
    return made[tuple(mine)]
