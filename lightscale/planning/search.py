"""Finds the layouts of a model on nodes of GPUs that are predicted to be fastest."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from lightscale.config.layout import Layout, check_layout
from lightscale.config.mixers import mixer_entry
from lightscale.config.schema import Exchange, ParallelConfig, Recompute, RunConfig
from lightscale.errors import UserError
from lightscale.models.registry import check_model
from lightscale.planning.communication import EXCHANGES
from lightscale.planning.hardware import Hardware
from lightscale.planning.prediction import Prediction
from lightscale.planning.step_cost import CostModel
from lightscale.planning.workload import RECOMPUTE

# Sequences are whole and data ranks have equally many, so that a step's tokens cannot be kept exactly everywhere.
BATCH_TOLERANCE = 0.1
AXES = ("tensor", "pipeline", "sequence", "data")
_CHOICES = {"recompute": RECOMPUTE, "exchange": EXCHANGES}


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What is not searched."""

    axes: Mapping[str, int] = field(default_factory=dict)
    recompute: Recompute | None = None
    exchange: Exchange | None = None

    @staticmethod
    def parse(text: str) -> "Fixed":
        """Of text like `tensor=2,sequence=16,recompute=full`.

        Raises UserError for what is no axis or choice, and for a value that it cannot have.
        """
        axes: dict[str, int] = {}
        choices: dict[str, str] = {}
        for entry in filter(None, text.split(",")):
            name, _, value = entry.partition("=")
            if name in AXES and value.isdecimal() and int(value) > 0:
                axes[name] = int(value)
            elif name in AXES:
                raise UserError(f"--layout {entry}: {name} must be a number of ranks, like {name}=2")
            elif name not in _CHOICES:
                raise UserError(
                    f"--layout {entry}: expected {', '.join((*AXES, *_CHOICES))}, like tensor=2,sequence=16"
                )
            elif value not in _CHOICES[name]:
                raise UserError(f"--layout {entry}: {name} must be one of {', '.join(_CHOICES[name])}")
            else:
                choices[name] = value
        return Fixed(axes=axes, **choices)  # type: ignore[arg-type]


def best_layouts(
    config: RunConfig, *, nodes: int, sequence_length: int, hardware: Hardware, fixed: Fixed
) -> list[Prediction]:
    """All layouts that `fixed` leaves open, those that fit first, the fastest of them first; [] if there is none.

    The tokens of a step are the configuration's, within `BATCH_TOLERANCE`, or those of one sequence. Of the ways to
    recompute, a layout takes the first that fits.
    """
    gpus = nodes * hardware.gpus_per_node
    model = CostModel(config, sequence_length, hardware)
    found = [
        _with_least_recomputation(model, layout, exchange, fixed.recompute)
        for layout in _layouts(config, gpus, sequence_length, hardware, fixed)
        for exchange in _exchanges(model, layout, fixed)
    ]
    # What does not fit is kept, so that its memory can be shown.
    # Where none fits, the one that is nearest to fitting comes first.
    return sorted(found, key=lambda one: (not one.fits, -one.tokens_per_s if one.fits else one.memory.total_bytes))


def explain_none(config: RunConfig, *, nodes: int, sequence_length: int, hardware: Hardware, fixed: Fixed) -> UserError:
    """Why there is no layout at all."""
    gpus = nodes * hardware.gpus_per_node
    parallel = ParallelConfig.model_validate(fixed.axes)
    inner = parallel.tensor * parallel.pipeline * parallel.sequence
    batch = config.train.micro_batch_size * max(1, parallel.data or gpus // inner)
    asked = config.model_copy(
        update={
            "parallel": parallel,
            "data": config.data.model_copy(update={"sequence_length": sequence_length}),
            "train": config.train.model_copy(update={"global_batch_size": batch}),
        }
    )
    try:
        check_model(config.model, parallel)
        if fixed.axes:
            check_layout(asked, gpus)
    except UserError as error:
        return error
    if fixed.exchange == "two_level" and best_layouts(
        config, nodes=nodes, sequence_length=sequence_length, hardware=hardware, fixed=replace(fixed, exchange=None)
    ):
        return UserError(
            f"--layout exchange=two_level: no layout of {gpus} GPUs has the same number of ranks of a sequence on "
            f"every node of {hardware.gpus_per_node}; use exchange=gather"
        )
    return UserError(
        f"no layout of {gpus} GPUs trains on sequences of {sequence_length} tokens with the {config.tokens_per_step} "
        f"tokens a step of the configuration, {BATCH_TOLERANCE:.0%} more or less: heads, layers and sequences cannot "
        "be divided further; use fewer --nodes or a larger train.global_batch_size"
    )


def _layouts(config: RunConfig, gpus: int, sequence_length: int, hardware: Hardware, fixed: Fixed) -> Iterator[Layout]:
    shape, micro = config.model, config.train.micro_batch_size
    wanted_tokens = max(config.tokens_per_step, micro * sequence_length)
    # Tensor ranks exchange activations in every layer: they stay within a node, where NVLink connects them.
    for tensor in _degrees("tensor", config, fixed, gpus, most=hardware.gpus_per_node):
        if any(size % tensor for size in (shape.num_heads, shape.intermediate_size, shape.vocab_size)):
            continue
        for pipeline in _degrees("pipeline", config, fixed, gpus // tensor, most=shape.num_layers):
            rest = gpus // (tensor * pipeline)
            for sequence in _degrees("sequence", config, fixed, rest, most=sequence_length):
                data = rest // sequence
                round_tokens = data * micro * sequence_length
                rounds = max(1, round(wanted_tokens / round_tokens))
                if (
                    sequence_length % (sequence * tensor)
                    or abs(rounds * round_tokens - wanted_tokens) > BATCH_TOLERANCE * wanted_tokens
                    or data != fixed.axes.get("data", data)
                ):
                    continue
                yield Layout(
                    tensor=tensor,
                    pipeline=pipeline,
                    sequence=sequence,
                    data=data,
                    micro_batch_size=micro,
                    num_microbatches=rounds,
                    rank_sequence_tokens=sequence_length // sequence,
                )


def _degrees(axis: str, config: RunConfig, fixed: Fixed, ranks: int, *, most: int) -> list[int]:
    """Of `ranks`, how many can share the axis."""
    if axis in fixed.axes:
        wanted = [fixed.axes[axis]]
    elif all(axis in mixer_entry(name).axes for name in set(config.model.layers)):
        wanted = list(range(1, min(ranks, most) + 1))
    else:
        wanted = [1]
    return [degree for degree in wanted if degree <= most and ranks % degree == 0]


def _exchanges(model: CostModel, layout: Layout, fixed: Fixed) -> list[Exchange]:
    has_states = any(layer.has_state for layer in model.work.layers)
    if fixed.exchange is None and not (has_states and layout.sequence > 1):
        return ["gather"]
    # Every node must have as many of a sequence's ranks as the others.
    sequence_gpus, node = layout.sequence * layout.tensor, model.hardware.gpus_per_node
    even = sequence_gpus % node == 0 or node % sequence_gpus == 0
    wanted = (fixed.exchange,) if fixed.exchange else EXCHANGES
    return [exchange for exchange in wanted if even or exchange != "two_level"]


def _with_least_recomputation(
    model: CostModel, layout: Layout, exchange: Exchange, fixed: Recompute | None
) -> Prediction:
    for recompute in (fixed,) if fixed else RECOMPUTE:
        if model.fits(model.memory(layout, recompute=recompute, exchange=exchange)):
            break
    return model.predict(layout, recompute=recompute, exchange=exchange)
