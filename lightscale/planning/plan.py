"""Predictions from a run's configuration alone: parameters, FLOPs, memory, exchanges between ranks."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightscale.config.layout import Layout, LayoutError, check_layout
from lightscale.config.model import ModelConfig
from lightscale.config.schema import RunConfig
from lightscale.models.accounting import EMBEDDING, parameter_terms
from lightscale.models.flops import training_flops_per_token
from lightscale.models.registry import check_model
from lightscale.planning.advice import with_advice
from lightscale.planning.communication import RankGroup
from lightscale.planning.exchange_sizes import Summary, contribution
from lightscale.planning.hardware import H100
from lightscale.planning.memory import RankMemory, fullest_rank, weight_bytes
from lightscale.planning.published import exact_only, study_parameters, study_training_flops
from lightscale.planning.workload import Workload
from lightscale.runs.teacher import asked_model

_STATE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Number of parameters."""

    terms: dict[str, int]
    """Parameters outside the embedding, by kind."""
    embedding: int
    study: int | None
    """Parameters outside the embedding, as counted in the study; None for hybrids and mixers outside the study."""
    only_exact: dict[str, int]
    """Terms that the study does not count."""

    @property
    def rest(self) -> int:
        """Parameters outside the embedding, all terms: exactly those of the built model."""
        return sum(self.terms.values())

    @property
    def total(self) -> int:
        """All parameters, including the embedding."""
        return self.embedding + self.rest


@dataclass(frozen=True, kw_only=True)
class StateExchangeSize:
    """A rank's contribution to an exchange of states along `sequence`, per layer and micro-batch.

    It depends on `parallel.exchange`; the first and the last rank of a ring send in one direction only. It includes the
    last tokens of a segment that a short convolution on the next one reads; these are always gathered.
    """

    mixer: str
    """Name of the mixer, "tpe", or another part after the embedding."""
    layers: tuple[int, int] | None
    """First and last of consecutive layers with the same sizes, from 0; None: not a layer."""
    forward_bytes: int | None
    """None: the mixer has no state of constant size, and its exchange grows with the sequence."""
    backward_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The predictions for a run."""

    layout: Layout
    parameters: Parameters
    study_flops: float | None
    """Training FLOPs per step without logits, as counted in the study; None for models outside the study."""
    mfu_flops: float
    """Training FLOPs per step for MFU: the matrix products of projections, mixers, GLUs and logits."""
    tokens_per_step: int
    steps: int
    tokens: int
    """Of the whole run, in whole steps."""
    equal_steps: tuple[tuple[int, int], ...]
    """(number of steps, tokens of each), in the order of the run: one for each batch."""
    memory: RankMemory
    """Memory of the ranks that hold most."""
    exchanges: tuple[StateExchangeSize, ...]


def plan(config: RunConfig, processes: int | None = None) -> RunPlan:
    """Plan a run on `processes` ranks; None: as few as the layout allows.

    Raises UserError for an unknown mixer, and for an impossible layout, with a possible one.
    """
    check_model(config.model, config.parallel)
    layout = _layout(config, processes or _fewest_processes(config))
    model, data, train = config.model, config.data, config.train
    return RunPlan(
        layout=layout,
        parameters=count_parameters(model),
        study_flops=study_training_flops(
            model, sequence_length=data.sequence_length, batch_size=train.global_batch_size
        ),
        mfu_flops=training_flops_per_token(
            model, data.sequence_length, teacher=asked_model(config), adapter=config.adapters
        )
        * config.tokens_per_step,
        tokens_per_step=config.tokens_per_step,
        steps=config.own_steps,
        tokens=config.own_tokens,
        equal_steps=tuple(
            config.step_tokens.equal_steps(config.own_steps, config.step_tokens.after(config.parent_steps))
        ),
        memory=fullest_rank(config, layout),
        exchanges=tuple(_exchanges(config, layout)),
    )


def count_parameters(model: ModelConfig) -> Parameters:
    """Count a model's parameters, exactly and as in the study."""
    terms = parameter_terms(model)
    embedding = terms.pop(EMBEDDING)
    return Parameters(terms=terms, embedding=embedding, study=study_parameters(model), only_exact=exact_only(terms))


def _layout(config: RunConfig, processes: int) -> Layout:
    try:
        return check_layout(config, processes)
    except LayoutError as error:
        raise with_advice(error, config, processes) from None


def _fewest_processes(config: RunConfig) -> int:
    parallel = config.parallel
    return parallel.tensor * parallel.pipeline * parallel.sequence * (parallel.data or 1)


def _exchanges(config: RunConfig, layout: Layout) -> Iterator[StateExchangeSize]:
    model, parallel = config.model, config.parallel
    work = Workload(model, config.data.sequence_length)
    # Unless the configuration gives the ranks of a node, as many as there are GPUs in one.
    hardware = replace(H100, gpus_per_node=parallel.ranks_per_node or H100.gpus_per_node)
    per_node = RankGroup(ranks=layout.sequence, stride=layout.tensor, hardware=hardware).per_node
    row_bytes = _STATE_BYTES * layout.micro_batch_size

    def exchange(mixer: str, layers: tuple[int, int] | None, summary: Summary) -> StateExchangeSize:
        sent = contribution(parallel.exchange, summary, per_node)
        sizes = row_bytes * sent.forward, row_bytes * sent.backward
        return StateExchangeSize(mixer=mixer, layers=layers, forward_bytes=sizes[0], backward_bytes=sizes[1])

    for part, summary in work.embedding_part_summaries(layout.tensor).items():
        yield exchange(part, None, summary)
    alike = itertools.groupby(range(model.num_layers), key=lambda layer: (model.layers[layer], work.layers[layer]))
    for (name, layer), group in alike:
        numbers = list(group)
        first_and_last = numbers[0], numbers[-1]
        if layer.has_state:
            states = exchange(name, first_and_last, work.summary(layer, layout.tensor))
            tail = weight_bytes(config) * layout.micro_batch_size * layer.tail // layout.tensor
            yield replace(states, **{way: getattr(states, way) + tail for way in ("forward_bytes", "backward_bytes")})
        else:
            yield StateExchangeSize(mixer=name, layers=first_and_last, forward_bytes=None, backward_bytes=None)
