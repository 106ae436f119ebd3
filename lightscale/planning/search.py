"""Search for the layouts of a model on nodes of GPUs with the fastest prediction."""

import functools
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import gcd
from typing import NamedTuple

from lightscale.config.arithmetic import near_multiple
from lightscale.config.layout import Layout, LayoutError, check_layout, check_mixers, check_tensor
from lightscale.config.mixers import mixer_entry
from lightscale.config.schema import Attention, Exchange, ParallelConfig, Recompute, RunConfig
from lightscale.errors import UserError, shortened
from lightscale.models.registry import check_model
from lightscale.planning.attention_ways import ATTENTIONS
from lightscale.planning.communication import EXCHANGES
from lightscale.planning.hardware import Hardware
from lightscale.planning.prediction import Prediction
from lightscale.planning.step_cost import CostModel
from lightscale.planning.workload import RECOMPUTE
from lightscale.runs.teacher import teacher_model

# Of the tokens of a step, more or less, where the batch cannot be kept.
BATCH_TOLERANCE = 0.1
AXES = ("tensor", "pipeline", "sequence", "data")
_COUNTS = (*AXES, "micro_batch_size")
_MOST_DIGITS = 6
_CHOICES = {"recompute": RECOMPUTE, "exchange": EXCHANGES, "attention": ATTENTIONS}
# A larger micro-batch must be predicted to be faster by this share: predictions know no smaller differences.
_LEAST_GAIN = 0.01
MOST_NODES = 1024
"""Upper limit of `least_nodes`."""


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Choices that are fixed, not searched."""

    axes: Mapping[str, int] = field(default_factory=dict)
    micro_batch_size: int | None = None
    recompute: Recompute | None = None
    exchange: Exchange | None = None
    attention: Attention | None = None

    @staticmethod
    def parse(text: str) -> "Fixed":
        """Parse text such as `tensor=2,sequence=16,recompute=full`.

        Raises UserError for an unknown name and for an invalid value.
        """
        counts: dict[str, int] = {}
        choices: dict[str, str] = {}
        for entry in filter(None, text.split(",")):
            name, _, value = entry.partition("=")
            if name in _COUNTS and value.isdecimal() and len(value) <= _MOST_DIGITS and int(value) > 0:
                counts[name] = int(value)
            elif name in _COUNTS:
                what = "sequences" if name == "micro_batch_size" else "ranks"
                raise UserError(f"--layout {shortened(entry)}: {name} must be a number of {what}, such as {name}=2")
            elif name not in _CHOICES:
                raise UserError(
                    f"--layout {entry}: use {', '.join((*_COUNTS, *_CHOICES))}, such as tensor=2,sequence=16"
                )
            elif value not in _CHOICES[name]:
                raise UserError(f"--layout {entry}: {name} must be one of {', '.join(_CHOICES[name])}")
            else:
                choices[name] = value
        micro = counts.pop("micro_batch_size", None)
        return Fixed(axes=counts, micro_batch_size=micro, **choices)  # type: ignore[arg-type]


def best_layouts(
    config: RunConfig, *, nodes: int, sequence_length: int, hardware: Hardware, fixed: Fixed
) -> list[Prediction]:
    """All layouts allowed by `fixed`: those that fit first, in order of speed; [] if there is none.

    At the configuration's own length its batch stays exact. If no such layout fits, the batch may change within
    `BATCH_TOLERANCE`, smallest change first. At another length the tokens per step stay within `BATCH_TOLERANCE`, or
    are those of one sequence. `check_layout` accepts all layouts. The micro-batch is the smallest without a clearly
    faster alternative. Each layout uses the fastest recomputation that fits: none, the GLUs, or as few whole layers as
    possible.
    """
    search = _Search(config, nodes * hardware.gpus_per_node, sequence_length, hardware, fixed)
    own_length = sequence_length == config.data.sequence_length
    found = search.predictions(exact=True)
    if not (own_length and any(one.fits for one in found)):
        found += search.predictions(exact=False)

    def order(one: Prediction) -> tuple[bool, int, float]:
        # What does not fit is kept, so that its memory can be shown.
        # Where none fits, the one that is nearest to fitting comes first.
        change = abs(one.tokens_per_step - config.tokens_per_step) if own_length else 0
        return (False, change, -one.tokens_per_s) if one.fits else (True, 0, one.memory.total_bytes)

    return sorted(found, key=order)


def run_seconds(config: RunConfig, best: Prediction, hardware: Hardware) -> float:
    """Predicted seconds of the run's own steps on the layout of `best`; in a ramp-up they have fewer micro-batches."""
    model, layout = CostModel(config, best.sequence_length, hardware), best.layout
    how = {key: getattr(best, key) for key in ("recompute", "recompute_layers", "exchange", "attention")}
    seconds = 0.0
    for steps, tokens in config.step_tokens.equal_steps(
        config.own_steps, config.step_tokens.after(config.parent_steps)
    ):
        num_microbatches = max(1, round(layout.num_microbatches * tokens / config.tokens_per_step))
        one = model.predict(replace(layout, num_microbatches=num_microbatches), **how)
        seconds += steps * tokens / one.tokens_per_s
    return seconds


def least_nodes(
    config: RunConfig, *, more_than: int, sequence_length: int, hardware: Hardware, fixed: Fixed
) -> int | None:
    """Smallest number of nodes above `more_than` on which a layout fits; None: none up to `MOST_NODES`."""
    for nodes in range(more_than + 1, MOST_NODES + 1):
        search = _Search(config, nodes * hardware.gpus_per_node, sequence_length, hardware, fixed)
        if search.any_fits():
            return nodes
    return None


def explain_none(config: RunConfig, *, nodes: int, sequence_length: int, hardware: Hardware, fixed: Fixed) -> UserError:
    """The error that explains why there is no layout."""
    gpus = nodes * hardware.gpus_per_node
    parallel = ParallelConfig.model_validate(fixed.axes)
    inner = parallel.tensor * parallel.pipeline * parallel.sequence
    batch = config.train.micro_batch_size * max(1, parallel.data or gpus // inner)
    asked = config.model_copy(
        update={
            "parallel": parallel,
            "data": config.data.model_copy(update={"sequence_length": sequence_length}),
            "train": config.train.model_copy(update={"global_batch_size": batch, "rampup_batch_size": []}),
            # The batch is the least that these ranks share, not that of a step.
            "metrics": config.metrics.model_copy(update={"gradient_noise_every": 0}),
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
            f"--layout exchange=two_level: no layout of {gpus} GPUs has equal numbers of sequence ranks on all nodes "
            f"of {hardware.gpus_per_node}; use exchange=gather"
        )
    return UserError(
        f"no layout of {gpus} GPUs trains on sequences of {sequence_length} tokens with the configuration's "
        f"{config.tokens_per_step} tokens per step (±{BATCH_TOLERANCE:.0%}): heads, layers and sequences do not divide "
        "further; use fewer --nodes or a larger train.global_batch_size"
    )


@functools.cache
def _micro_batch_sizes(share: int) -> tuple[int, ...]:
    """Sizes to try of a data rank's share of the batch: its divisors, each at least twice the one before."""
    sizes = [1]
    for size in range(2, share + 1):
        if share % size == 0 and size >= 2 * sizes[-1]:
            sizes.append(size)
    return tuple(sizes)


class _Ways(NamedTuple):
    """What sequence ranks do for each other."""

    exchange: Exchange
    attention: Attention


class _Search:
    """The layouts of one configuration on so many GPUs."""

    def __init__(self, config: RunConfig, gpus: int, sequence_length: int, hardware: Hardware, fixed: Fixed) -> None:
        self.config, self.gpus, self.hardware, self.fixed = config, gpus, hardware, fixed
        self.model = CostModel(config, sequence_length, hardware)
        data = config.data.model_copy(update={"sequence_length": sequence_length})
        self.on_length = config.model_copy(update={"data": data})
        own_length = sequence_length == config.data.sequence_length
        # On other lengths a step has other numbers of sequences.
        self.rampup = config.train.rampup_batch_size if own_length else []
        self.ramp = [part.sequences for part in config.train.ramp] if own_length else []

    def predictions(self, *, exact: bool) -> list[Prediction]:
        """Predictions per layout and exchange; `exact`: with the configuration's tokens per step, else with others."""
        found = []
        for sizes in self._layouts(exact=exact):
            layout: Layout | None = None
            for ways in self._ways(sizes[0]):
                # They differ too little to want micro-batches of their own.
                one = self._with_micro_batch([layout] if layout else sizes, ways)
                layout = one.layout
                found.append(one)
        return found

    def any_fits(self) -> bool:
        """Whether any layout fits, with full recomputation if necessary."""
        how = RECOMPUTE[-1] if self.fixed.recompute is None else self.fixed.recompute
        return any(
            self.model.fits(self.model.memory(sizes[0], recompute=how, **ways._asdict()))
            for exact in (True, False)
            for sizes in self._layouts(exact=exact)
            for ways in self._ways(sizes[0])
        )

    def _layouts(self, *, exact: bool) -> Iterator[list[Layout]]:
        """Of each choice of axes and batch, one layout for every size of the micro-batch, the smallest first."""
        # Tensor ranks exchange activations in every layer: they stay within a node, where NVLink connects them.
        for tensor in self._degrees("tensor", self.gpus, most=self.hardware.gpus_per_node):
            for pipeline in self._degrees(
                "pipeline",
                self.gpus // tensor,
                most=1 if self.config.teacher is not None else self.config.model.num_layers,
            ):
                rest = self.gpus // (tensor * pipeline)
                for sequence in self._degrees("sequence", rest, most=self.model.work.sequence_length):
                    data = rest // sequence
                    if data != self.fixed.axes.get("data", data):
                        continue
                    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline, sequence=sequence)
                    batch = self._batch(data, exact=exact)
                    if batch is None:
                        continue
                    given = self.fixed.micro_batch_size
                    share = gcd(batch, *self.ramp) // data
                    sizes = _micro_batch_sizes(share) if given is None else (given,)
                    layouts = [self._checked(parallel, batch, size) for size in sizes]
                    # A measurement of the gradient noise asks for several micro-batches, which large ones leave not.
                    if possible := [layout for layout in layouts if layout is not None]:
                        yield possible

    def _degrees(self, axis: str, ranks: int, *, most: int) -> list[int]:
        """Of `ranks`, how many can share the axis."""
        if axis in self.fixed.axes:
            wanted = [self.fixed.axes[axis]]
        elif all(axis in mixer_entry(name).axes for name in set(self.config.model.layers)):
            wanted = list(range(1, min(ranks, most) + 1))
        else:
            wanted = [1]
        return [degree for degree in wanted if degree <= most and ranks % degree == 0]

    def _batch(self, data: int, *, exact: bool) -> int | None:
        """Sequences of a step that so many data ranks can share."""
        length = self.model.work.sequence_length
        tokens = self.config.tokens_per_step
        unit = data * (self.fixed.micro_batch_size or 1)
        if exact:
            return None if tokens % (length * unit) else tokens // length
        wanted = max(tokens, length)
        batch_tokens = near_multiple(wanted, length * unit)
        is_near = abs(batch_tokens - wanted) <= BATCH_TOLERANCE * wanted
        return batch_tokens // length if is_near and batch_tokens != tokens else None

    def _checked(self, parallel: ParallelConfig, batch: int, micro_batch_size: int) -> Layout | None:
        if batch <= max(self.ramp, default=0):
            return None
        sizes = {"global_batch_size": batch, "micro_batch_size": micro_batch_size, "rampup_batch_size": self.rampup}
        train = self.config.train.model_copy(update=sizes)
        try:
            if (teacher := teacher_model(self.config)) is not None:
                check_mixers(teacher, parallel)
                check_tensor(teacher, parallel)
            return check_layout(self.on_length.model_copy(update={"parallel": parallel, "train": train}), self.gpus)
        except LayoutError:
            return None

    def _ways(self, layout: Layout) -> Iterator[_Ways]:
        attentions = self._attentions(layout)
        return (_Ways(exchange, attention) for exchange in self._exchanges(layout) for attention in attentions)

    def _attentions(self, layout: Layout) -> list[Attention]:
        if self.fixed.attention is None and not (self.model.attends and layout.sequence > 1):
            return ["gather"]
        wanted = ATTENTIONS if self.fixed.attention is None else (self.fixed.attention,)
        return [attention for attention in wanted if self._divides(layout, attention)]

    def _divides(self, layout: Layout, attention: Attention) -> bool:
        axes = {axis: getattr(layout, axis) for axis in ("tensor", "pipeline", "sequence")}
        parallel = ParallelConfig.model_validate({**axes, "attention": attention})
        batch = layout.data * layout.micro_batch_size * layout.num_microbatches
        return self._checked(parallel, batch, layout.micro_batch_size) is not None

    def _exchanges(self, layout: Layout) -> list[Exchange]:
        has_states = any(layer.has_state for layer in self.model.work.layers)
        if self.fixed.exchange is None and not (has_states and layout.sequence > 1):
            return ["gather"]
        # Every node must have as many of a sequence's ranks as the others.
        sequence_gpus, node = layout.sequence * layout.tensor, self.hardware.gpus_per_node
        even = sequence_gpus % node == 0 or node % sequence_gpus == 0
        if self.fixed.exchange is not None:
            return [self.fixed.exchange] if even or self.fixed.exchange != "two_level" else []
        # Within a node, or with one rank in each, two_level is a gather.
        has_levels = even and layout.tensor < node < sequence_gpus
        return [exchange for exchange in EXCHANGES if has_levels or exchange != "two_level"]

    def _with_micro_batch(self, layouts: list[Layout], ways: _Ways) -> Prediction:
        """The smallest micro-batch than which the next one is not clearly faster, or does not fit."""
        best = self._with_least_recomputation(layouts[0], ways)
        for layout in layouts[1:]:
            # Where next to nothing is waited for, there is nothing to gain.
            if best.work.launch_s + best.exposed_s < _LEAST_GAIN * best.step_s:
                break
            larger = self._with_least_recomputation(layout, ways)
            if not larger.fits or larger.tokens_per_s < (1 + _LEAST_GAIN) * best.tokens_per_s:
                break
            best = larger
        return best

    def _with_least_recomputation(self, layout: Layout, ways: _Ways) -> Prediction:
        if self.fixed.recompute is not None:
            return self.model.predict(layout, recompute=self.fixed.recompute, **ways._asdict())
        if self._fits(layout, ways, "none"):
            return self.model.predict(layout, **ways._asdict())
        layers = self._least_layers(layout, ways)
        best = self.model.predict(layout, recompute="full", recompute_layers=layers, **ways._asdict())
        if self._fits(layout, ways, "selective"):
            selective = self.model.predict(layout, recompute="selective", **ways._asdict())
            best = min(selective, best, key=lambda one: one.step_s)
        return best

    def _fits(self, layout: Layout, ways: _Ways, recompute: Recompute, layers: int | None = None) -> bool:
        held = self.model.memory(layout, recompute=recompute, recompute_layers=layers, **ways._asdict())
        return self.model.fits(held)

    def _least_layers(self, layout: Layout, ways: _Ways) -> int | None:
        """Of each stage, the fewest that must be recomputed to fit; None: all, whether they fit or not."""
        stages = self.model.work.stages(tensor=layout.tensor, pipeline=layout.pipeline)
        some = range(1, max(len(stage.layers) for stage in stages))
        found = bisect_left(some, True, key=lambda layers: self._fits(layout, ways, "full", layers))
        return some[found] if found < len(some) else None
