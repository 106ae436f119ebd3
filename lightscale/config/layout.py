"""The layout of a configuration on a number of processes: pure arithmetic, without process groups."""

from collections import Counter
from dataclasses import dataclass

from lightscale.config.arithmetic import near_divisor, near_multiple
from lightscale.config.mixers import check_shape, mixer_entry, mixer_options_type
from lightscale.config.model import ModelConfig
from lightscale.config.schema import ParallelConfig, RunConfig
from lightscale.errors import UserError, counted


class LayoutError(UserError):
    """Axes that do not divide the model, the batch or the processes; the message holds `fault` and the remedy."""

    def __init__(self, fault: str, cure: str = "") -> None:
        super().__init__(f"{fault}; {cure}" if cure else fault)
        self.fault = fault
        """The message without its remedy."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks along each axis, and each rank's share of the batch. Created by `check_layout`."""

    tensor: int
    pipeline: int
    sequence: int
    data: int
    micro_batch_size: int
    """Sequences that a data rank holds at once."""
    num_microbatches: int
    """Micro-batches of a data rank per step."""
    rank_sequence_tokens: int
    """Tokens of each sequence that a sequence rank holds."""

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.tensor * self.pipeline * self.sequence * self.data


def check_layout(config: RunConfig, world_size: int) -> Layout:
    """The layout of `config` on `world_size` processes; pure arithmetic, without process groups.

    Raises LayoutError with both fields, their values, and the nearest valid value of one. `lightscale.planning.advice`
    suggests whole layouts.
    """
    parallel = config.parallel
    data = _data_ranks(parallel, world_size)
    tensor = parallel.tensor
    check_tensor(config.model, parallel)
    _check_stages(config)
    if parallel.exchange == "two_level" and parallel.ranks_per_node is not None:
        check_nodes(world_size, tensor=tensor, sequence=parallel.sequence, ranks_per_node=parallel.ranks_per_node)
    length = config.data.sequence_length
    _check_length("data.sequence_length", length, parallel)
    for number, stage in enumerate(config.data.curriculum):
        _check_length(f"data.curriculum[{number}].sequence_length", stage.sequence_length, parallel)
    for part in config.train.ramp:
        key = f"train.rampup_batch_size[{part.stage}].{'increment: ' * part.is_grown}global_batch_size"
        _check_batch(config, data, key, part.sequences)
    micro = config.train.micro_batch_size
    num_microbatches = _check_batch(config, data, "train.global_batch_size", config.train.global_batch_size)
    return Layout(
        tensor=tensor,
        pipeline=parallel.pipeline,
        sequence=parallel.sequence,
        data=data,
        micro_batch_size=micro,
        num_microbatches=num_microbatches,
        rank_sequence_tokens=length // parallel.sequence,
    )


def _check_batch(config: RunConfig, data: int, key: str, batch: int) -> int:
    """Micro-batches of each of `data` data ranks in a step of `batch` sequences, the value of `key`."""
    parallel, micro = config.parallel, config.train.micro_batch_size
    if batch % (micro * data):
        raise LayoutError(
            f"{key} = {batch} is not divisible by train.micro_batch_size = {micro} times "
            f"{counted(data, 'data rank')} (parallel.data)",
            f"use {near_multiple(batch, micro * data)} sequences",
        )
    num_microbatches = batch // (micro * data)
    # Megatron's interleaved schedule sends a group of as many micro-batches as there are pipeline ranks at a time.
    if parallel.virtual_stages > 1 and num_microbatches % parallel.pipeline:
        unit = micro * data * parallel.pipeline
        raise LayoutError(
            f"parallel.virtual_stages = {parallel.virtual_stages} needs micro-batches in groups of parallel.pipeline = "
            f"{parallel.pipeline}, but {key} = {batch} gives every data rank {num_microbatches}",
            f"use {near_multiple(batch, unit)} sequences",
        )
    # The gradient of a part of the step is compared with that of the step.
    if (every := config.metrics.gradient_noise_every) and num_microbatches < 2 * (
        group := _least_microbatches(parallel)
    ):
        raise LayoutError(
            f"metrics.gradient_noise_every = {every} compares {group} micro-batch of each data rank with all of them, "
            f"but {key} = {batch} and train.micro_batch_size = {micro} give each {num_microbatches}",
            f"use {key} = {2 * group * micro * data}, or metrics.gradient_noise_every = 0",
        )
    return num_microbatches


def _least_microbatches(parallel: ParallelConfig) -> int:
    """Those of the fewest that a pipeline takes: interleaved stages take groups."""
    return parallel.pipeline if parallel.virtual_stages > 1 else 1


def check_tensor(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise LayoutError for widths that the tensor ranks do not divide, or heads that `all_to_all` does not."""
    tensor = parallel.tensor
    # hidden_size needs no check: where it is split it is a multiple of num_heads.
    # Nor vocab_size: its rows are padded (`models.accounting.padded_vocab_size`).
    for name in ("num_heads", "intermediate_size"):
        _require_divisible(f"model.{name}", getattr(model, name), "parallel.tensor", tensor)
    for name, options in model.mixer_options.items():
        # A tensor rank holds whole heads of keys and values, and no head is held twice.
        if (heads := getattr(options, "num_key_value_heads", None)) is not None:
            key = f"model.mixer_options.{name}.num_key_value_heads"
            _require_divisible(key, heads, "parallel.tensor", tensor)
    if parallel.attention == "all_to_all":
        _check_heads(model, parallel)


def check_mixers(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuse shapes that a mixer does not support, and axes it cannot be split along; imports no mixer's class."""
    for layer, name in enumerate(model.layers):
        check_shape(name, model)
        able = mixer_entry(name).axes
        for axis in ("tensor", "pipeline", "sequence"):
            degree = getattr(parallel, axis)
            if degree > 1 and axis not in able:
                others = ", ".join(sorted(able - {"data"})) or "none"
                raise UserError(
                    f"parallel.{axis} = {degree}: layer {layer} ({name}) cannot be split along {axis} yet; "
                    f"use parallel.{axis} = 1, with more data ranks or another axis of: {others}"
                )


def _check_length(name: str, length: int, parallel: ParallelConfig) -> None:
    _require_divisible(name, length, "parallel.sequence", parallel.sequence)
    if length % (parallel.sequence * parallel.tensor):
        raise LayoutError(
            f"{name} = {length} is not divisible by parallel.sequence = {parallel.sequence} times parallel.tensor = "
            f"{parallel.tensor} (tensor ranks hold shards of the activations too)",
            f"use {near_multiple(length, parallel.sequence * parallel.tensor)} tokens",
        )


def _check_heads(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Every sequence rank computes as many heads of queries, and a rank's heads share whole heads of keys."""
    for name in sorted(set(model.layers)):
        kind = mixer_options_type(name)
        if kind is None or "num_key_value_heads" not in kind.model_fields:
            # No softmax attention.
            continue
        tensor, sequence = parallel.tensor, parallel.sequence
        shared = getattr(model.mixer_options.get(name), "num_key_value_heads", None)
        cure = 'use parallel.attention = "ring"'
        if model.num_heads % (tensor * sequence):
            raise LayoutError(
                f'parallel.attention = "all_to_all": model.num_heads = {model.num_heads} is not divisible by '
                f"parallel.tensor = {tensor} times parallel.sequence = {sequence}",
                cure,
            )
        if shared is not None and (shared // tensor) % sequence and sequence % (shared // tensor):
            raise LayoutError(
                f'parallel.attention = "all_to_all": of model.mixer_options.{name}.num_key_value_heads = {shared} each '
                f"of parallel.tensor = {tensor} ranks has {shared // tensor}, which parallel.sequence = {sequence} "
                "neither divides nor is a multiple of",
                cure,
            )


def _check_stages(config: RunConfig) -> None:
    parallel, num_layers = config.parallel, config.model.num_layers
    if parallel.virtual_stages > 1 and parallel.pipeline == 1:
        raise LayoutError(
            f"parallel.virtual_stages = {parallel.virtual_stages} needs parallel.pipeline >= 2",
            "use parallel.virtual_stages = 1",
        )
    stages = parallel.pipeline * parallel.virtual_stages
    if stages > num_layers:
        raise LayoutError(
            f"model.num_layers = {num_layers} is fewer than the {stages} stages of parallel.pipeline = "
            f"{parallel.pipeline} times parallel.virtual_stages = {parallel.virtual_stages}; every stage needs a layer",
            f"use parallel.pipeline = {max(1, num_layers // parallel.virtual_stages)}",
        )


def check_nodes(world_size: int, *, tensor: int, sequence: int, ranks_per_node: int) -> None:
    """Raise LayoutError when nodes hold unequal numbers of any sequence's ranks, which `two_level` does not support.

    Checks all sequences, so that every rank gets the same answer.
    """
    # Tensor ranks are neighbours, then sequence ranks; both of one sequence.
    for first in range(0, world_size, tensor * sequence):
        for rank in range(first, first + tensor):
            nodes = Counter(one // ranks_per_node for one in range(rank, first + tensor * sequence, tensor))
            if len(set(nodes.values())) > 1:
                raise LayoutError(
                    'parallel.exchange = "two_level" needs equal numbers of sequence ranks on all nodes; with '
                    f"{ranks_per_node} ranks per node (parallel.ranks_per_node) they are {list(nodes.values())}",
                    'use parallel.exchange = "gather"',
                )


def _data_ranks(parallel: ParallelConfig, world_size: int) -> int:
    """Ranks along the data axis; the product of all axes is then the world size."""
    assert world_size >= 1, world_size
    inner = parallel.tensor * parallel.pipeline * parallel.sequence
    axes = ", ".join(f"parallel.{axis} = {getattr(parallel, axis)}" for axis in ("tensor", "pipeline", "sequence"))
    if parallel.data is None:
        if world_size % inner:
            raise LayoutError(
                f"{world_size} processes cannot be divided among {axes} (together {inner})",
                f"use {near_multiple(world_size, inner)} processes",
            )
        return world_size // inner
    if inner * parallel.data != world_size:
        rest = f", or parallel.data = {world_size // inner}" if world_size % inner == 0 else ""
        raise LayoutError(
            f"{world_size} processes are not the product of {axes}, parallel.data = {parallel.data}",
            f"use {inner * parallel.data} processes{rest}",
        )
    return parallel.data


def _require_divisible(name: str, size: int, axis: str, ranks: int) -> None:
    if size % ranks:
        raise LayoutError(
            f"{name} = {size} is not divisible by {axis} = {ranks}",
            f"use {axis} = {near_divisor(size, ranks)} or {name} = {near_multiple(size, ranks)}",
        )
