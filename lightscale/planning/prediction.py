"""What the cost model predicts: the seconds of a step, part by part, and the memory of a GPU."""

from dataclasses import dataclass

from lightscale.config.layout import Layout
from lightscale.config.schema import Exchange, Recompute
from lightscale.planning.memory import RankMemory


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds that one rank spends on a micro-batch, or on a step."""

    products_s: float = 0.0
    """Matrix products with weights, the output layer's too."""
    operators_s: float = 0.0
    """What mixers do between their projections."""
    elementwise_s: float = 0.0
    """Norms, activations, gates, residual sums and the cross entropy: traffic of memory."""
    replay_s: float = 0.0
    """Recomputation of activations."""
    launch_s: float = 0.0
    """Waiting for kernels to be launched."""
    tensor_s: float = 0.0
    """Waiting for communication along `tensor`."""
    sequence_s: float = 0.0
    """Waiting for communication along `sequence`."""
    tensor_total_s: float = 0.0
    """All communication along `tensor`, also what hides behind work."""
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
        """Compute, and communication that is waited for."""
        return self.compute_s + self.tensor_s + self.sequence_s


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One layout, and what a step on it would take."""

    layout: Layout
    recompute: Recompute
    recompute_layers: int | None
    """Of each stage, as `train.recompute_layers`."""
    exchange: Exchange
    sequence_length: int
    work: Times
    """Of a rank of the slowest stage, in a step."""
    bubble_s: float
    """Waiting of a stage for its first and last micro-batch."""
    messages_s: float
    """Messages between stages that are waited for."""
    data_s: float
    """Reducing gradients and gathering weights, as far as it is waited for."""
    data_total_s: float
    optimizer_s: float
    memory: RankMemory
    """Of the ranks that hold most."""
    fits: bool
    flops: float
    """Training FLOPs of a step, as for MFU."""
    peak_flops: float
    """Of a GPU, per second."""

    @property
    def step_s(self) -> float:
        """Time of a step."""
        return self.work.busy_s + self.bubble_s + self.messages_s + self.data_s + self.optimizer_s

    @property
    def exposed_s(self) -> float:
        """Communication, and waiting for other stages, that nothing hides."""
        return self.work.tensor_s + self.work.sequence_s + self.bubble_s + self.messages_s + self.data_s

    @property
    def global_batch_size(self) -> int:
        """Sequences of a step."""
        return self.layout.data * self.layout.micro_batch_size * self.layout.num_microbatches

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.global_batch_size * self.sequence_length

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs."""
        return self.tokens_per_step / self.step_s

    @property
    def mfu(self) -> float:
        """Share of the peak that the model's own FLOPs take."""
        return self.flops / (self.step_s * self.layout.world_size * self.peak_flops)
