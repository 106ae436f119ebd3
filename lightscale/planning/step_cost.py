"""Predicts the time of a training step on a layout of GPUs: rooflines for compute, closed forms for communication.

    step = (work of the slowest stage) * micro-batches + bubble + messages between stages
           + exposed communication of gradients and weights + optimizer

Work is compute plus the exposed tensor and sequence communication. Nothing here is measured: `Hardware` and
`assumptions` list the inputs.
"""

import math
from collections import Counter
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from lightscale.config.layout import Layout
from lightscale.config.model import ModelConfig
from lightscale.config.optimizers import DEFAULT as DEFAULT_OPTIMIZER
from lightscale.config.optimizers import optimizer_class
from lightscale.config.schema import AdapterConfig, Attention, Exchange, Recompute, RunConfig, TaskConfig
from lightscale.kernels.operators import CostClass
from lightscale.models.accounting import padded_vocab_size
from lightscale.models.flops import training_flops_per_token
from lightscale.parallel.matrices.sharing import whole_state_bytes
from lightscale.parallel.optimizer_spec import MatrixSpec
from lightscale.planning.attention_ways import attention_way
from lightscale.planning.communication import RankGroup, all_gather_s, all_reduce_s, exchange_s
from lightscale.planning.exchange_sizes import Summary
from lightscale.planning.hardware import Hardware
from lightscale.planning.memory import RankMemory, stage_memory, weight_bytes
from lightscale.planning.prediction import Prediction, Times
from lightscale.planning.workload import LayerWork, StageWork, Workload
from lightscale.runs.teacher import asked_model, teacher_model
from lightscale.training.optimizer.registry import optimizer_spec

_FP32_BYTES = 4
# In bf16, beside the matrix products: the softmax reads the logits; backward their gradient is put in their place.
_LOGIT_BYTES = 6
# Megatron's buckets of gradients and weights: parameters, at least, and per rank.
_BUCKET, _BUCKET_PER_RANK = 40e6, 1e6


def assumptions() -> list[str]:
    """Assumptions of the prediction in addition to the numbers of `Hardware`, in sentences."""
    return [
        "all ranks and links run at the same constant speed; sequences are full; nothing is read from disk",
        "tensor: gathers and reduce-scatters of activations block, except in the backward pass of layers that split "
        "their output, where they overlap matrix products",
        "sequence: gather and two_level block in every layer, minus the overlapped work: queries and gates, and a "
        "share of the operator; ring delays each rank behind the one before, once per pass (nothing else synchronizes "
        "the ranks), or in every bidirectional layer",
        "softmax attention masks by position, without a mask matrix; gather: all keys and values, beside the "
        "projection of queries; if causal, as slow as the last rank, which sees almost twice the mean number of tokens",
        "ring: each message beside the operator's work on the block before, at the speed of the slowest link; if "
        "causal, ranks trade half of their queries and outputs and are equally busy; all_to_all: of queries, keys, "
        "values and outputs, keys and values beside the projection of queries",
        "pipeline: 1F1B without virtual stages; messages between stages are not overlapped",
        "data: gradients (fp32) and weights travel in buckets, overlapping the last backward and the first forward "
        "pass of a step; one bucket of each is exposed",
        "full recomputation repeats a block's forward pass, selective recomputation its GLU's; gathers of keys and "
        "values are repeated, exchanges of states are not",
    ]


class CostModel:
    """Predictions for one configuration's model on sequences of one length.

    Args:
        config: source of model and precision; its layout and length are ignored.
        sequence_length: in tokens.
        hardware: the machines.
    """

    def __init__(self, config: RunConfig, sequence_length: int, hardware: Hardware) -> None:
        self.config, self.hardware = config, hardware
        self.work = Workload(config.model, sequence_length, config.adapters, fp8=config.train.fp8 != "none")
        self.size = weight_bytes(config)
        # Whether a layout fits is asked before what it costs.
        self._memory: dict[tuple[Layout, Recompute, int | None, Exchange, Attention], RankMemory] = {}

    @cached_property
    def _flops_per_token(self) -> float:
        return training_flops_per_token(
            self.config.model, self.work.sequence_length, teacher=asked_model(self.config), adapter=self.config.adapters
        )

    @cached_property
    def _teacher(self) -> ModelConfig | None:
        return teacher_model(self.config)

    @cached_property
    def attends(self) -> bool:
        """Whether a layer is softmax attention, of the teacher too: then sequence ranks meet in one of several ways."""
        works = [self.work] if self._teacher is None else [self.work, self._frozen.work]
        return any(layer.queries for work in works for layer in work.layers)

    def _teacher_times(self, layout: Layout, attention: Attention) -> Times:
        """Forward pass of the frozen teacher on a micro-batch; its output layer counts as that of a loss."""
        if self._teacher is None:
            return Times()
        (stage,) = self._frozen.work.stages(tensor=layout.tensor, pipeline=1)
        return _MicroBatchCost(self._frozen, layout, "none", None, "gather", attention).forward(stage)

    @cached_property
    def _frozen(self) -> "CostModel":
        """Of the teacher's run, without a teacher of its own."""
        # Groups, clipping and adapters are of the student's parameters.
        optimizer = optimizer_class(DEFAULT_OPTIMIZER).options(lr=1.0)
        update = {"model": self._teacher, "task": TaskConfig(), "optimizer": optimizer, "adapter": AdapterConfig()}
        update["train"] = self.config.train.model_copy(update={"fp8": "none"})
        alone = self.config.model_copy(update=update)
        return CostModel(alone, self.work.sequence_length, self.hardware)

    def memory(
        self,
        layout: Layout,
        *,
        recompute: Recompute,
        recompute_layers: int | None = None,
        exchange: Exchange,
        attention: Attention = "gather",
    ) -> RankMemory:
        """Memory of the ranks that hold most."""
        key = layout, recompute, recompute_layers, exchange, attention
        if key not in self._memory:
            stages = self.work.stages(tensor=layout.tensor, pipeline=layout.pipeline)
            # Of stages that are alike the first one has most micro-batches in flight.
            fullest = {(stage.kind, stage.parameters): number for number, stage in reversed(list(enumerate(stages)))}
            held = [
                stage_memory(
                    self.config,
                    layout,
                    self.work,
                    stage,
                    recompute=recompute,
                    recompute_layers=recompute_layers,
                    exchange=exchange,
                    attention=attention,
                    hardware=self.hardware,
                )
                for stage in fullest.values()
            ]
            self._memory[key] = max(held, key=lambda memory: memory.total_bytes)
        return self._memory[key]

    def fits(self, memory: RankMemory) -> bool:
        """Whether a GPU has enough memory."""
        return memory.total_bytes <= self.hardware.usable_bytes

    def predict(
        self,
        layout: Layout,
        *,
        recompute: Recompute = "none",
        recompute_layers: int | None = None,
        exchange: Exchange = "gather",
        attention: Attention = "gather",
    ) -> Prediction:
        """Predict a step on `layout`."""
        cost = _MicroBatchCost(self, layout, recompute, recompute_layers, exchange, attention)
        stages = self.work.stages(tensor=layout.tensor, pipeline=layout.pipeline)
        distinct = {stage.kind: stage for stage in stages}
        by_kind = {kind: (cost.forward(stage), cost.backward(stage)) for kind, stage in distinct.items()}
        passes = [by_kind[stage.kind] for stage in stages]
        busy = [(forward + backward).busy_s for forward, backward in passes]
        # 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2): the pipeline goes at the speed of the slowest
        # stage, which waits besides while the first micro-batch comes through the others and the last gradient goes
        # back through them.
        slowest = busy.index(max(busy))
        asked = passes[slowest][0] if self.config.has_reference else self._teacher_times(layout, attention)
        work = (passes[slowest][0] + passes[slowest][1] + asked) * layout.num_microbatches
        data = [
            cost.data(stage, forward.busy_s, backward.busy_s)
            for stage, (forward, backward) in zip(stages, passes, strict=True)
        ]
        how = {"recompute": recompute, "recompute_layers": recompute_layers, "exchange": exchange}
        memory = self.memory(layout, **how, attention=attention)  # type: ignore[arg-type]
        tokens = layout.data * layout.micro_batch_size * layout.num_microbatches * self.work.sequence_length
        return Prediction(
            layout=layout,
            recompute=recompute,
            recompute_layers=recompute_layers,
            exchange=exchange,
            attention=attention,
            sequence_length=self.work.sequence_length,
            work=work,
            bubble_s=sum(busy) - max(busy),
            messages_s=cost.messages_s(),
            data_s=max(exposed_s for exposed_s, _ in data),
            data_total_s=max(total_s for _, total_s in data),
            optimizer_s=max(cost.optimizer_s(stage) for stage in stages),
            memory=memory,
            fits=self.fits(memory),
            flops=tokens * self._flops_per_token,
            peak_flops=self.hardware.peak_flops,
        )


class _Exchange(NamedTuple):
    """Of states, along the sequence."""

    time_s: float
    beside_s: float
    """Work that overlaps."""
    both_ways: bool


class _MicroBatchCost:
    """One micro-batch on a rank of one layout."""

    def __init__(
        self,
        model: CostModel,
        layout: Layout,
        recompute: Recompute,
        recompute_layers: int | None,
        exchange: Exchange,
        attention: Attention,
    ) -> None:
        self.work, self.hw, self.size = model.work, model.hardware, model.size
        self.optimizer = optimizer_spec(model.config)
        self.layout, self.exchange, self.attention = layout, exchange, attention
        self.recompute, self.recompute_layers = recompute, recompute_layers
        self.tokens = layout.micro_batch_size * layout.rank_sequence_tokens
        self.hidden_size = self.work.model.hidden_size
        # Labels of documents take next to nothing beside tokens.
        vocab_size = padded_vocab_size(self.work.model.vocab_size, layout.tensor)
        self.vocab_size = vocab_size if self.work.model.head is None else 0
        self.tensor = RankGroup(ranks=layout.tensor, stride=1, hardware=self.hw)
        self.sequence = RankGroup(ranks=layout.sequence, stride=layout.tensor, hardware=self.hw)
        self.replicas = RankGroup(ranks=layout.sequence * layout.data, stride=layout.tensor, hardware=self.hw)

    def forward(self, stage: StageWork) -> Times:
        """Times of a forward pass of `stage`."""
        times = self._states(stage, backward=False)
        for layer, count in Counter(stage.layers).items():
            compute = self._compute(layer)
            launch_s = max(0.0, self.hw.layer_launch_us * 1e-6 - compute.busy_s)
            tensor_s = self._tensor_forward_s(layer)
            waits = Times(launch_s=launch_s, tensor_s=tensor_s, tensor_total_s=tensor_s) + self._keys(layer)
            times += (compute + waits + self._casts(layer, backward=False)) * count
            if self.optimizer.qk_clip is not None and layer.cost is CostClass.SOFTMAX:
                # One of the two products of attention once more.
                times += Times(operators_s=compute.operators_s / 2) * count
        return times + self._ends(stage, backward=False)

    def backward(self, stage: StageWork) -> Times:
        """Times of a backward pass of `stage`, including recomputation."""
        times = self._states(stage, backward=True)
        for layer, count in Counter(stage.layers).items():
            once = self._compute(layer)
            compute = Times(
                # Of inputs, and of weights that are trained.
                products_s=(2 if self.work.adapter is None else 1) * once.products_s,
                operators_s=2 * once.operators_s,
                elementwise_s=once.elementwise_s * self.hw.backward_passes / self.hw.forward_passes,
            )
            casts = self._casts(layer, backward=True)
            times += (compute + casts + self._backward_waits(layer, compute)) * count
        for layer, count in Counter(stage.recomputed(self.recompute, self.recompute_layers)).items():
            times += self._replay(layer, self._compute(layer)) * count
        return times + self._ends(stage, backward=True)

    def _compute(self, layer: LayerWork) -> Times:
        hw, share = self.hw, self.tokens / self.layout.tensor
        way = attention_way(self.attention, layer, self.layout, self.size)
        speed = {
            CostClass.SCAN: hw.scan_share,
            CostClass.GATED_SCAN: hw.scan_share / hw.gated_slowdown,
            CostClass.SOFTMAX: hw.softmax_share / (1.0 if way is None else way.busiest),
        }[layer.cost]
        return Times(
            products_s=share
            * self._products(layer.product_flops, layer.fp8.flops)
            / (hw.peak_flops * hw.product_share),
            operators_s=share * layer.operator_flops / (hw.peak_flops * speed),
            elementwise_s=share * layer.values[0] * self.size * hw.forward_passes / hw.memory_bytes_s,
        )

    def _products(self, flops: float, in_fp8: float) -> float:
        """FLOPs of products in bf16 that take as long as `flops`, of which `in_fp8` are products of 8 bits."""
        return flops - in_fp8 + in_fp8 / self.hw.fp8_speedup

    def _casts(self, layer: LayerWork, *, backward: bool) -> Times:
        """Casts to 8 bits, each of which reads twice; backward gradients, and transposes of all that is cast."""
        fp8, share = layer.fp8, self.tokens / self.layout.tensor
        weights = fp8.weights / self.layout.tensor
        cast = share * (fp8.outputs if backward else fp8.inputs) + weights
        moved = 2 * (share * (fp8.inputs + fp8.outputs) + weights) if backward else 0.0
        return Times(elementwise_s=((2 * self.size + 1) * cast + moved) / self.hw.memory_bytes_s)

    def _replay(self, layer: LayerWork, once: Times) -> Times:
        if self.recompute == "selective":
            of_glu = self._products(layer.glu_flops, layer.fp8.glu_flops)
            products_s = once.products_s * of_glu / self._products(layer.product_flops, layer.fp8.flops)
            elementwise_s = once.elementwise_s * (1 - layer.values[1] / layer.values[0])
            tensor_s = 2 * self._activations_s()
            return Times(replay_s=products_s + elementwise_s, tensor_s=tensor_s, tensor_total_s=tensor_s)
        tensor_s = self._tensor_forward_s(layer)
        replay_s = max(once.busy_s, self.hw.layer_launch_us * 1e-6) + self._casts(layer, backward=False).elementwise_s
        return Times(replay_s=replay_s, tensor_s=tensor_s, tensor_total_s=tensor_s) + self._keys(layer)

    def _backward_waits(self, layer: LayerWork, compute: Times) -> Times:
        one_s, small_s = self._activations_s(), self._small_collectives_s(layer)
        # Gathers of inputs, and reduce-scatters of their gradients, run beside products.
        beside_s = 2 * layer.num_column_parallel * one_s
        way = attention_way(self.attention, layer, self.layout, self.size)
        keys_s, all_keys_s = (0.0, 0.0) if way is None else way.backward(self.sequence, compute.operators_s)
        return Times(
            launch_s=max(0.0, 2 * self.hw.layer_launch_us * 1e-6 - compute.busy_s),
            tensor_s=2 * one_s + max(0.0, beside_s - compute.products_s) + small_s,
            tensor_total_s=2 * one_s + beside_s + small_s,
            sequence_s=keys_s,
            sequence_total_s=all_keys_s,
        )

    def _ends(self, stage: StageWork, *, backward: bool) -> Times:
        """Embedding with its positional encoding, and output layer with the loss."""
        hw, one_s = self.hw, self._activations_s()
        double = 2 if backward else 1
        times = Times()
        if stage.first:
            # Parts behind the embedding want all tokens of some channels: twice the traffic.
            embedded_s = (2 if self.work.embedding_parts else 1) * one_s
            times += Times(
                operators_s=double * self._embedding_parts_s(), tensor_s=embedded_s, tensor_total_s=embedded_s
            )
        if stage.last:
            share = self.tokens * self.vocab_size / self.layout.tensor
            # Gradients are made beside the losses; backward they are scaled, and that of hidden is shared out.
            products = 3 if self.work.adapter is None else 2
            products_s = (
                0.0 if backward else products * 2 * self.hidden_size * share / (hw.peak_flops * hw.product_share)
            )
            weight = self.vocab_size * self.hidden_size / self.layout.tensor
            scaled = 2 * self.size * (weight + self.tokens * self.hidden_size)
            times += Times(
                products_s=products_s,
                elementwise_s=(scaled if backward else share * _LOGIT_BYTES) / hw.memory_bytes_s,
                tensor_s=one_s,
                tensor_total_s=one_s,
            )
        return times

    def _embedding_parts_s(self) -> float:
        flops_s = self.hw.peak_flops * self.hw.scan_share
        return self.tokens / self.layout.tensor * self.work.embedding_part_flops / flops_s

    def _activations_s(self) -> float:
        """A gather or a reduce-scatter of one layer's activations over the tensor ranks."""
        shard = self.tokens * self.hidden_size * self.size / self.layout.tensor
        return all_gather_s(self.layout.tensor, shard, self.tensor.collective(bulk=True))

    def _tensor_forward_s(self, layer: LayerWork) -> float:
        return (layer.num_column_parallel + 2) * self._activations_s() + self._small_collectives_s(layer)

    def _small_collectives_s(self, layer: LayerWork) -> float:
        """The norm over all heads of a mixer, a number per token, and its low-rank gate, where it has them."""
        link, ranks = self.tensor.collective(bulk=True), self.layout.tensor
        norm_s = all_reduce_s(ranks, _FP32_BYTES * self.tokens, link) if layer.norms_output else 0.0
        gate = self.tokens * layer.gate_rank * self.size / ranks
        return norm_s + (all_gather_s(ranks, gate, link) if layer.gate_rank else 0.0)

    def _keys(self, layer: LayerWork) -> Times:
        """What queries wait for until they have met the keys of other ranks."""
        way = attention_way(self.attention, layer, self.layout, self.size)
        if way is None:
            return Times()
        waits = way.forward(self.sequence, self._compute(layer).operators_s, self._queries_s(layer))
        return Times(sequence_s=waits.exposed_s, sequence_total_s=waits.total_s)

    def _queries_s(self, layer: LayerWork) -> float:
        flops_s = self.hw.peak_flops * self.hw.product_share
        return self.tokens / self.layout.tensor * layer.query_flops / flops_s

    def _states(self, stage: StageWork, *, backward: bool) -> Times:
        """All exchanges of states in one pass of `stage`."""
        # Of each layer, those of the embedding's parts first.
        exchanges: list[_Exchange | None] = []
        of_parts = self.work.embedding_part_summaries(self.layout.tensor).values() if stage.first else ()
        for summary in of_parts:
            beside_s = self._beside_s(self._embedding_parts_s() / len(of_parts), backward=backward)
            exchanges.append(_Exchange(self._exchange_s(summary, backward=backward), beside_s, both_ways=False))
        by_layer = {layer: self._layer_exchanges(layer, backward=backward) for layer in set(stage.layers)}
        exchanges += [exchange for layer in stage.layers for exchange in by_layer[layer]]
        waited_s = total_s = 0.0
        for both_ways, run in groupby(exchanges, key=lambda exchange: exchange and exchange.both_ways):
            found = [exchange for exchange in run if exchange is not None]
            if self.exchange == "ring" and found and not both_ways:
                # A rank that is late stays late, and waits no more: until a gather of keys makes all wait for the last,
                # or a state comes from behind.
                time_s, beside_s = max(one.time_s for one in found), min(one.beside_s for one in found)
                found = [_Exchange(time_s, beside_s, both_ways=False)]
            waited_s += sum(max(0.0, one.time_s - one.beside_s) for one in found)
            total_s += sum(one.time_s for one in found)
        return Times(sequence_s=waited_s, sequence_total_s=total_s)

    def _layer_exchanges(self, layer: LayerWork, *, backward: bool) -> list[_Exchange | None]:
        """None for a mixer that gathers keys instead."""
        if not layer.has_state:
            return [None]
        beside_s = self._beside_s(self._compute(layer).operators_s, backward=backward)
        if not backward:
            beside_s += self._queries_s(layer)
        summary = self.work.summary(layer, self.layout.tensor)
        time_s = self._exchange_s(summary, backward=backward) + self._tail_s(layer)
        both_ways = not layer.is_causal
        own = _Exchange(time_s, beside_s, both_ways=both_ways)
        # Numbers of all a layer's exchanges are in one; the others add their latencies. They are waited for at once:
        # what comes next is made of them. In a ring a rank that is late for one is late for the next, see `_states`.
        latency_s = exchange_s(self.exchange, self.sequence, 0.0, summary.heads)
        others = 0 if self.exchange == "ring" else layer.num_exchanges - 1
        return [own, *[_Exchange(latency_s, 0.0, both_ways=both_ways)] * others]

    def _tail_s(self, layer: LayerWork) -> float:
        """The gather of the tokens that a short convolution looks back, or of their cotangents."""
        own = self.layout.micro_batch_size * layer.tail * self.size / self.layout.tensor
        return all_gather_s(self.layout.sequence, own, self.sequence.collective(bulk=False)) if layer.tail else 0.0

    def _exchange_s(self, summary: Summary, *, backward: bool) -> float:
        row_bytes = _FP32_BYTES * self.layout.micro_batch_size
        if self.exchange == "ring":
            # It hands on states, without the decays that combine them; the second direction when the first is through.
            handed_on = (summary.state + (0 if backward else summary.carried)) / summary.directions
            one_way_s = exchange_s(self.exchange, self.sequence, row_bytes * handed_on, summary.heads)
            return summary.directions * one_way_s
        numbers = summary.state if backward else summary.numbers
        return exchange_s(self.exchange, self.sequence, row_bytes * numbers, summary.heads)

    def _beside_s(self, operator_s: float, *, backward: bool) -> float:
        return self.hw.exchange_overlap * operator_s * (2 if backward else 1)

    def messages_s(self) -> float:
        """Time of messages between stages (activations and gradients) of all micro-batches."""
        stages = self.layout.pipeline
        if stages == 1:
            return 0.0
        # Stages are as far apart as can be: on one node only if all ranks are.
        link = self.replicas.pair(within=self.layout.world_size <= self.hw.gpus_per_node)
        message_s = link.message_s(self.tokens * self.hidden_size * self.size / self.layout.tensor)
        # Forward and back: through all stages once, then one more for each micro-batch that follows.
        return 2 * message_s * (stages - 1 + self.layout.num_microbatches - 1)

    def data(self, stage: StageWork, forward_s: float, backward_s: float) -> tuple[float, float]:
        """(exposed, total) time to reduce gradients beside `backward_s` and to gather weights beside `forward_s`."""
        ranks, parameters = self.replicas.ranks, stage.trained_parameters
        if ranks == 1 or not parameters:
            return 0.0, 0.0
        link = self.replicas.collective(bulk=True)
        bucket = min(parameters, max(_BUCKET, _BUCKET_PER_RANK * ranks))
        waited_s = total_s = 0.0
        for value_bytes, work_s in ((_FP32_BYTES, backward_s), (self.size, forward_s)):
            # One bucket has no work beside it: the last gradients are reduced when the backward pass is over, and the
            # first weights are gathered before the forward pass begins.
            one_s = all_gather_s(ranks, bucket * value_bytes / ranks, link)
            all_s = one_s + link.latency_s * (math.ceil(parameters / bucket) - 1)
            all_s += (ranks - 1) / ranks * (parameters - bucket) * value_bytes / link.bytes_s
            waited_s += max(one_s, all_s - work_s)
            total_s += all_s
        return waited_s, total_s

    def optimizer_s(self, stage: StageWork) -> float:
        """Time of the optimizer on this rank's share, and of the global gradient norm."""
        spec = self.optimizer
        traffic = sum(count * spec.step_traffic_bytes(name) for name, count in stage.trained.items())
        norm_s = self.hw.collective_us * 1e-6 if self.layout.world_size > 1 else 0.0
        matrices_s = self._matrices_s(stage, spec) if isinstance(spec, MatrixSpec) else 0.0
        return traffic / self.replicas.ranks / self.hw.memory_bytes_s + norm_s + matrices_s

    def _matrices_s(self, stage: StageWork, spec: MatrixSpec) -> float:
        """Time of the directions of whole matrices, which the ranks of a stage share out, and of their exchange."""
        held = {name: count for name, count in stage.trained.items() if name in spec.matrices}
        flops = [spec.step_flops(name) for name in held]
        ranks = self.replicas.ranks * self.layout.tensor
        busiest = max([sum(flops) / ranks, *flops])
        peak_tflops = self.hw.peak_tflops if spec.product_precision == "bf16" else self.hw.fp32_tflops
        compute_s = busiest / (peak_tflops * 1e12 * self.hw.product_share)
        # State of whole matrices is read and written.
        compute_s += 2 * max(whole_state_bytes(spec, held, ranks)) / self.hw.memory_bytes_s
        if ranks == 1:
            return compute_s
        link = self.replicas.collective(bulk=True)
        sent_bytes = spec.product_bytes * sum(held.values()) / self.replicas.ranks
        return compute_s + 2 * (link.latency_s + sent_bytes / link.bytes_s)
