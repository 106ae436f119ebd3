"""Predictions of the cost model: the seconds of a step, part by part, and the memory of a GPU."""

from dataclasses import dataclass

from lightscale.config.layout import Layout
from lightscale.config.schema import Attention, Exchange, Recompute
from lightscale.planning.memory import RankMemory


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one rank for a micro-batch or a step."""

    products_s: float = 0.0
    """Matrix products with weights, including the output layer."""
    operators_s: float = 0.0
    """Operators of mixers, between their projections."""
    elementwise_s: float = 0.0
    """Norms, activations, gates, residual sums and cross entropy, bound by memory traffic."""
    replay_s: float = 0.0
    """Recomputation of activations."""
    launch_s: float = 0.0
    """Waiting for kernel launches."""
    tensor_s: float = 0.0
    """Exposed communication along `tensor`."""
    sequence_s: float = 0.0
    """Exposed communication along `sequence`."""
    tensor_total_s: float = 0.0
    """Total communication along `tensor`, including the overlapped part."""
    sequence_total_s: float = 0.0

    def __add__(self, other: "Times") -> "Times":
        return Times(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __mul__(self, times: int) -> "Times":
        return Times(**{name: value * times for name, value in vars(self).items()})

    @property
    def compute_s(self) -> float:
        """Without communication."""
        return self.products_s + self.operators_s + self.elementwise_s + self.replay_s + self.launch_s

    @property
    def busy_s(self) -> float:
        """Compute plus exposed communication."""
        return self.compute_s + self.tensor_s + self.sequence_s


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A layout and the prediction of a step on it."""

    layout: Layout
    recompute: Recompute
    recompute_layers: int | None
    """Recomputed layers per stage, as `train.recompute_layers`."""
    exchange: Exchange
    attention: Attention
    sequence_length: int
    work: Times
    """Times of a rank of the slowest stage, per step."""
    bubble_s: float
    """Wait of a stage for its first and last micro-batch."""
    messages_s: float
    """Exposed messages between stages."""
    data_s: float
    """Exposed time to reduce gradients and to gather weights."""
    data_total_s: float
    optimizer_s: float
    memory: RankMemory
    """Memory of the ranks that hold most."""
    fits: bool
    flops: float
    """Training FLOPs per step, as for MFU."""
    peak_flops: float
    """Peak FLOP/s of a GPU."""

    @property
    def step_s(self) -> float:
        """Time of a step."""
        return self.work.busy_s + self.bubble_s + self.messages_s + self.data_s + self.optimizer_s

    @property
    def exposed_s(self) -> float:
        """Exposed communication, and waits for other stages."""
        return self.work.tensor_s + self.work.sequence_s + self.bubble_s + self.messages_s + self.data_s

    @property
    def global_batch_size(self) -> int:
        """Sequences per step."""
        return self.layout.data * self.layout.micro_batch_size * self.layout.num_microbatches

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step, over all ranks."""
        return self.global_batch_size * self.sequence_length

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, over all GPUs."""
        return self.tokens_per_step / self.step_s

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the model's FLOPs as a share of the peak."""
        return self.flops / (self.step_s * self.layout.world_size * self.peak_flops)
