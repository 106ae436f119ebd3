"""The configuration of a run: one frozen type per section, with all checks that need nothing but the values.

[model] has a file of its own, `lightscale.config.model`. `lightscale.config.files` reads a run from TOML files and
overrides. Everything may import this module, so it imports neither torch nor any part of lightscale outside `config`
but the errors.
"""

import math
import re
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticKnownError

from lightscale.config.arithmetic import near_divisor
from lightscale.config.mixers import Direction, mixer_entry, reading
from lightscale.config.model import ModelConfig
from lightscale.config.section import (
    MOST_ENTRIES,
    MOST_LAYERS,
    Count,
    CountOrZero,
    Fraction,
    PathText,
    Positive,
    PositiveOrZero,
    Ranks,
    Seconds,
    Section,
    Seed,
    SequenceLength,
    Small,
    Steps,
    StepsOrZero,
    TokenCount,
    error_inside,
)
from lightscale.config.sinks import RECORD, sink_entry
from lightscale.config.tasks import DEFAULT as DEFAULT_TASK
from lightscale.config.tasks import task_class
from lightscale.errors import UserError, shortened

Exchange = Literal["gather", "two_level", "ring"]
Recompute = Literal["none", "selective", "full"]

_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_RUN_AT_STEP = re.compile(r".+@[0-9]{1,10}")


class TaskConfig(Section):
    """[task]: what the model is trained to predict. Every task has a type of its own, with more keys."""

    name: str = DEFAULT_TASK
    """What is predicted: causal, the next token; masked, tokens that are hidden; classify, labels of documents."""


class MixedStore(Section):
    """[data.stores.NAME]: one of several token stores that are read as one; its sources are called NAME/SOURCE."""

    path: PathText
    """Path of the token store, relative to the current directory."""
    weight: Positive | None = None
    """Share of the samples (only ratios count); all stores have one, or none: then every token counts the same."""


class ValidationSet(Section):
    """[data.validation.NAME]: text on which the loss is measured, never trained on."""

    source: str
    """Name of the source in its store; NAME/SOURCE in data.stores."""
    store: PathText | None = None
    """Path of the token store; none: the training store, or data.stores."""
    sequences: Count = 64
    """Number of sequences measured, the first ones of the source."""


class CurriculumStage(Section):
    """An entry of data.curriculum: shorter sequences at the beginning of a run."""

    sequence_length: SequenceLength
    """Length of a sequence, in tokens; divides data.sequence_length."""
    until_tokens: TokenCount
    """Tokens of the run after which it ends; rounded up to whole steps, may be written like 10e9."""


class DataConfig(Section):
    """[data]: what is read, and in which order."""

    store: PathText | None = None
    """Path of the token store, relative to the current directory; exactly one of store and stores is given."""
    stores: dict[str, MixedStore] = Field(default={}, max_length=MOST_ENTRIES)
    """Several token stores in place of one, by name: {path, weight} each."""
    sources: dict[str, Positive] = Field(default={}, max_length=MOST_ENTRIES)
    """Weight of each source (only ratios count); empty: as the corpus gave them, else by tokens, but for validation."""
    sequence_length: SequenceLength
    """Length of a training sequence, in tokens; with a curriculum, that of its last stage."""
    packing: Literal["concat", "joined", "whole"] = "concat"
    """concat: windows over the stream of documents; joined: states run on between them; whole: few are cut."""
    curriculum: list[CurriculumStage] = Field(default=[], max_length=MOST_ENTRIES)
    """Curriculum stages of shorter sequences, {sequence_length, until_tokens} each; steps keep their tokens."""
    seed: Seed = 0
    """Decides the order of the samples."""
    validation: dict[str, ValidationSet] = Field(default={}, max_length=MOST_ENTRIES)
    """Validation sets by name."""

    @property
    def store_paths(self) -> dict[str, Path]:
        """The training stores by the key that names each: data.store, or those of data.stores."""
        if self.store is not None:
            return {"data.store": self.store}
        return {f"data.stores.{name}": store.path for name, store in self.stores.items()}

    def _check_stores(self) -> None:
        if (self.store is None) == (not self.stores):
            found = "both are given" if self.stores else "neither is given"
            raise ValueError(f"exactly one of data.store and data.stores names what is trained on; {found}")
        for name in self.stores:
            if not _SET_NAME.fullmatch(name):
                raise ValueError(
                    f"data.stores: the name {name!r} becomes part of the names of sources; use letters, digits, "
                    "'_' and '-'"
                )
        weighted = [name for name, store in self.stores.items() if store.weight is not None]
        if weighted and self.sources:
            raise ValueError(
                f"data.sources and data.stores.{weighted[0]}.weight both give weights; use data.sources for those of "
                "sources, or a weight of each store"
            )
        if missing := [name for name in self.stores if weighted and name not in weighted]:
            raise ValueError(
                f"data.stores: {', '.join(weighted)} {'has' if len(weighted) == 1 else 'have'} a weight and "
                f"{', '.join(missing)} not; set it for all stores, or for none (then every token counts the same)"
            )

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_stores()
        for name, validation in self.validation.items():
            if not _SET_NAME.fullmatch(name):
                raise ValueError(
                    f"data.validation: the name {name!r} becomes part of metric names; use letters, digits, '_' and '-'"
                )
            if validation.source in self.sources and validation.store in (None, self.store):
                raise ValueError(
                    f"data.sources and data.validation.{name} both name the source {validation.source!r}; "
                    "a validation source is never trained on"
                )
        for before, stage in zip([None, *self.curriculum], self.curriculum, strict=False):
            if self.sequence_length % stage.sequence_length:
                raise ValueError(
                    f"data.curriculum: sequence_length = {stage.sequence_length} does not divide "
                    f"data.sequence_length = {self.sequence_length}, so that steps could not keep their tokens; "
                    f"use {near_divisor(self.sequence_length, stage.sequence_length)}"
                )
            if before is not None and stage.until_tokens <= before.until_tokens:
                raise ValueError(
                    f"data.curriculum: until_tokens = {stage.until_tokens} comes after {before.until_tokens}; "
                    "list the curriculum stages in the order of the run"
                )
        return self


class ParallelConfig(Section):
    """[parallel]: how many ranks share the work along each axis; their product is the number of processes."""

    tensor: Ranks = 1
    """Ranks that share every layer's heads and widths."""
    pipeline: Ranks = 1
    """Ranks that share the layers."""
    sequence: Ranks = 1
    """Ranks that share every sequence."""
    data: Ranks | None = None
    """Ranks that share the batch; none: the rest of the processes."""
    virtual_stages: Annotated[int, Field(ge=1, le=MOST_LAYERS)] = 1
    """Pipeline stages on every pipeline rank, interleaved for a smaller bubble; 1: one stage each (1F1B)."""
    exchange: Exchange = "gather"
    """How states pass along the sequence: gathered by all ranks, in nodes and then between them, or rank to rank."""
    ranks_per_node: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Processes that share a node, for two_level; none: as they were started."""


class OptimizerConfig(Section):
    """[optimizer]: Adam and its learning rate schedule."""

    name: Literal["adamw", "adam"] = "adamw"
    """adamw: weight decay apart from the gradient; adam: as a part of it, where the moments rescale it."""
    lr: Small
    """Peak learning rate."""
    schedule: Literal["constant", "cosine", "linear", "inverse_sqrt", "wsd"] = "constant"
    """After the warm-up: to the end, as 1/sqrt(step), or wsd: constant, then linear over decay_steps."""
    warmup_steps: StepsOrZero = 0
    """Length of the linear warm-up from 0, in steps."""
    decay_steps: Steps | None = None
    """Length of the final decay of wsd, in steps."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end of cosine, linear and wsd, as a share of lr."""
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    """Decay of the two running means of Adam, per step."""
    eps: Small = 1e-8
    """Added to the root of Adam's second moment."""
    weight_decay: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.1
    """Weight decay per step: of adamw times lr, of adam added to the gradient; not on norms, biases, decays."""
    grad_clip: PositiveOrZero = 1.0
    """Largest global gradient norm, gradients are scaled down to it; 0: off."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schedule == "wsd" and self.decay_steps is None:
            raise ValueError('optimizer.schedule = "wsd" needs optimizer.decay_steps, a number of steps')
        if self.schedule != "wsd" and self.decay_steps is not None:
            raise ValueError(
                f"optimizer.decay_steps = {self.decay_steps} has no effect with optimizer.schedule = "
                f'"{self.schedule}"; remove it or set the schedule to "wsd"'
            )
        if self.schedule == "inverse_sqrt" and not self.warmup_steps:
            raise ValueError(
                'optimizer.schedule = "inverse_sqrt" falls from lr at the end of the warm-up: it needs '
                "optimizer.warmup_steps, a number of steps"
            )
        return self


class TrainConfig(Section):
    """[train]: length of the run, batch, numbers and device."""

    steps: Steps | None = None
    """Length of the run, in optimizer steps; exactly one of steps and tokens is given."""
    tokens: TokenCount | None = None
    """Length of the run, in tokens; rounded up to whole steps, and may be written like 300e9."""
    global_batch_size: Count
    """Sequences per step, over all ranks."""
    micro_batch_size: Count = 1
    """Sequences that a data rank holds at once; the rest of its share is accumulated."""
    seed: Seed = 0
    """Decides the initial weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto: on GPUs where there are any."""
    recompute: Recompute = "none"
    """Activations computed again in the backward pass, to save memory: of the linear units, or of whole layers."""
    recompute_layers: Count | None = None
    """Of each pipeline stage, how many layers `recompute = "full"` concerns; none: all. The others keep everything."""
    kernels: Literal["auto", "triton", "chunked", "reference"] = "auto"
    """What computes the operators; auto: Triton on GPUs, chunked PyTorch elsewhere. reference: token by token."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of weights and activations; auto: fp32 on CPUs, bf16 with fp32 main weights on GPUs."""
    validate_every: StepsOrZero = 0
    """Steps between validations; 0: never."""
    init_from: str | None = None
    """RUN@STEP: start from the weights of that checkpoint; optimizer and data start afresh."""
    profile_steps: Annotated[tuple[Steps, Steps], Field(strict=False)] | None = None
    """[first, last]: steps recorded by the profiler, counted from 1."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.steps is None) == (self.tokens is None):
            found = "both are given" if self.steps else "neither is given"
            raise ValueError(f"exactly one of train.steps and train.tokens sets the run's length; {found}")
        if self.recompute_layers is not None and self.recompute != "full":
            raise ValueError(
                f'train.recompute_layers = {self.recompute_layers} goes with train.recompute = "full", not '
                f'"{self.recompute}"; use "none" to unset it'
            )
        if self.profile_steps and self.profile_steps[0] > self.profile_steps[1]:
            first, last = self.profile_steps
            raise ValueError(f"train.profile_steps = [{first}, {last}] runs backwards; use [{last}, {first}]")
        if self.init_from is not None and not _RUN_AT_STEP.fullmatch(self.init_from):
            raise ValueError(
                f'train.init_from = "{shortened(self.init_from)}" must be RUN@STEP, like "runs/first@1000"'
            )
        return self


class CheckpointConfig(Section):
    """[checkpoint]: how often the run is saved, and how long that is kept."""

    every: Steps | None = None
    """Steps between checkpoints; none: by time, tuned to what saves cost. The last step is always saved."""
    mtbf_hours: Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)] = 24.0
    """Expected hours between failures of the whole run, preemptions included; for the interval that is by time."""
    keep: Annotated[int, Field(ge=2, le=1_000_000)] = 2
    """Number of newest checkpoints that are kept."""
    keep_every: Steps | None = None
    """Checkpoints at multiples of this many steps are never removed; none: all but the newest are."""
    keep_weights_every: Steps | None = None
    """Steps between checkpoints of the weights alone, 4 bytes a parameter, that are never removed; none: no such."""
    export_every: Steps | None = None
    """Steps between checkpoints that are also exported for transformers, in bf16, to RUN/exports; none: no such."""
    asynchronous: bool = True
    """Write in the background: training waits only until its state is copied."""
    max_failures: Count = 3
    """Saves that fail in a row before the run is stopped."""


class GuardConfig(Section):
    """[guard]: steps that are skipped because their numbers are bad, and rollbacks when that does not help."""

    enabled: bool = True
    """False: no step is skipped, checkpoints are written whatever they hold, and the run never goes back: a step with
    NaN is taken as a plain optimizer takes it."""
    window: Annotated[int, Field(ge=8, le=100_000)] = 100
    """Steps whose medians are the usual loss and gradient norm; before there are as many, only NaN and Inf are bad."""
    max_loss_rise: Positive | None = 1.0
    """Nats above the median loss from which a step is skipped; none: any finite loss is good."""
    max_grad_norm_ratio: Positive | None = 20.0
    """Multiple of the median gradient norm from which a step is skipped; none: any finite norm is good."""
    max_skips: Count = 3
    """Steps skipped in a row, after which the run goes back to a checkpoint and jumps over that data."""
    max_rollbacks: CountOrZero = 3
    """Rollbacks of a run; at the next one it stops and needs attention."""
    compare_replicas_every: StepsOrZero = 0
    """Steps between comparisons of weights that several ranks hold, to find silent corruption; 0: never."""


class EvaluationConfig(Section):
    """[evaluation]: tasks that measure the model between steps, on the ranks that train it."""

    every_steps: StepsOrZero = 0
    """Steps between evaluations, and once after the last step; 0: never."""
    tasks: list[str] = Field(default=[], max_length=1000)
    """As after `lightscale evaluate --tasks`: names of tasks, and files that describe one."""
    limit: Count | None = None
    """Only so many of the first documents or questions of each task; none: as the task says."""
    data: PathText = Path("data/evaluation")
    """Folder with the data of tasks that are named."""


class RestartConfig(Section):
    """[restart]: how failures are noticed, and how often the ranks are started again."""

    max_cycles: Count = 3
    """Starts in a row that end without a new checkpoint, after which the run is stopped."""
    hang_timeout_s: Seconds = 60.0
    """Least time without any progress after which a rank counts as hanging; slow steps extend it."""
    collective_timeout_s: Seconds = 600.0
    """Longest wait for the other ranks in one exchange; at most a week."""


class WandbConfig(Section):
    """[metrics.wandb]: for the sink wandb; what is none comes from wandb's environment variables."""

    project: str | None = None
    """Project of the run; none: WANDB_PROJECT, or lightscale."""
    entity: str | None = None
    """User or team that the project belongs to; none: WANDB_ENTITY, or the user's own default."""
    name: str | None = None
    """Name of the run; none: WANDB_NAME, or that of the run's directory."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """offline: to be uploaded later by `wandb sync`; none: WANDB_MODE, or online."""


class MetricsConfig(Section):
    """[metrics]: what is recorded while training, and where it goes."""

    log_every: Steps = 1
    """Steps between lines of metrics."""
    sinks: list[str] = Field(default=["tensorboard", "jsonl"], max_length=100)
    """Where metrics go: tensorboard, wandb, and always jsonl, the record that other commands read."""
    position_buckets: Annotated[int, Field(ge=1, le=1024)] = 8
    """Equal parts of the sequence for which the validation loss is reported separately."""
    parameter_norms_every: StepsOrZero = 10
    """Steps between norms of gradients and updates by group of parameters, on logged steps only; 0: never."""
    wandb: WandbConfig = WandbConfig()

    @field_validator("sinks")
    @classmethod
    def _known_sinks(cls, sinks: list[str]) -> list[str]:
        for name in sinks:
            sink_entry(name)
        if twice := {name for name, times in Counter(sinks).items() if times > 1}:
            raise ValueError(f"names {' and '.join(sorted(twice))} twice; name each sink once")
        if RECORD not in sinks:
            raise ValueError(
                f"without {RECORD} nothing records the run: resume, runs and goodput read metrics.jsonl; "
                f"use {[*sinks, RECORD]}"
            )
        return sinks


class RunConfig(Section):
    """A whole run."""

    model: ModelConfig
    task: Annotated[SerializeAsAny[TaskConfig], Field(validate_default=True)] = TaskConfig()
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig
    train: TrainConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    guard: GuardConfig = GuardConfig()
    restart: RestartConfig = RestartConfig()
    metrics: MetricsConfig = MetricsConfig()

    @cached_property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks together train on in one step."""
        return self.train.global_batch_size * self.data.sequence_length

    @cached_property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.train.steps is not None:
            return self.train.steps
        assert self.train.tokens is not None
        return math.ceil(self.train.tokens / self.tokens_per_step)

    @field_validator("task", mode="before")
    @classmethod
    def _typed_task(cls, table: Any) -> TaskConfig:
        """In the type of the task that is named."""
        if isinstance(table, TaskConfig):
            table = table.model_dump()
        if not isinstance(table, dict):
            raise PydanticKnownError("dict_type")
        name = table.get("name", DEFAULT_TASK)
        try:
            found = task_class(name).options.model_validate(table)
        except UserError as error:
            wrong = PydanticCustomError("value_error", "{error}", {"error": str(error)})
            location = (DEFAULT_TASK, "name")
            details = [InitErrorDetails(type=wrong, loc=location, input=name)]
            raise ValidationError.from_exception_data("task", details) from None
        except ValidationError as error:
            # Under the task's name, so that messages find the type.
            inside = [error_inside(name, dict(item)) for item in error.errors(include_url=False)]
            raise ValidationError.from_exception_data("task", inside) from None
        assert isinstance(found, TaskConfig), f"{type(found)} of task {name} is no TaskConfig"
        return found

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_task()
        optimizer, steps = self.optimizer, self.total_steps
        if optimizer.schedule in ("cosine", "linear") and optimizer.warmup_steps >= steps:
            raise ValueError(
                f"optimizer.warmup_steps = {optimizer.warmup_steps} leaves no step of the run's {steps} "
                f"steps (train.steps or train.tokens) for the {optimizer.schedule} schedule; use {steps // 10}"
            )
        decay_steps = optimizer.decay_steps or 0
        if optimizer.schedule == "wsd" and optimizer.warmup_steps + decay_steps > steps:
            raise ValueError(
                f"optimizer.warmup_steps = {optimizer.warmup_steps} and optimizer.decay_steps = "
                f"{decay_steps} are together longer than the run's {steps} steps (train.steps or "
                f"train.tokens); use {steps // 10} and {max(1, steps // 5)}"
            )
        if self.train.profile_steps and self.train.profile_steps[1] > steps:
            raise ValueError(
                f"train.profile_steps = {list(self.train.profile_steps)} lies beyond the run's {steps} steps "
                "(train.steps or train.tokens)"
            )
        if self.train.validate_every and not self.data.validation:
            raise ValueError(
                f"train.validate_every = {self.train.validate_every} but data.validation names no set; "
                "add [data.validation.NAME] with its source, or set train.validate_every to 0"
            )
        if self.evaluation.every_steps and not self.evaluation.tasks:
            raise ValueError(
                f"evaluation.every_steps = {self.evaluation.every_steps} but evaluation.tasks names no task; add "
                'tasks, like ["lambada", "text.toml"], or set evaluation.every_steps to 0'
            )
        if self.evaluation.every_steps and self.parallel.virtual_stages > 1:
            raise ValueError(
                f"evaluation.every_steps = {self.evaluation.every_steps}: a model in parallel.virtual_stages = "
                f"{self.parallel.virtual_stages} is not evaluated between steps; use 1, or set evaluation.every_steps "
                "to 0 and evaluate from another job (lightscale evaluate RUN --follow)"
            )
        if self.metrics.position_buckets > self.data.sequence_length:
            raise ValueError(
                f"metrics.position_buckets = {self.metrics.position_buckets} is more than "
                f"data.sequence_length = {self.data.sequence_length} tokens"
            )
        return self

    def _check_task(self) -> None:
        """ValueError for layers that read what the task hides, or not all that it shows, and for uses of its models."""
        name, task = self.task.name, task_class(self.task.name)
        if self.data.packing == "joined" and name != DEFAULT_TASK:
            raise ValueError(
                f'data.packing = "joined" makes one document of each sequence, and task.name = "{name}" goes by '
                'documents; use "concat" or "whole"'
            )
        if task.predicts_labels and self.model.head is None:
            raise ValueError(
                f'task.name = "{name}" needs the table model.head, with num_labels, the number of classes; use '
                "model.head.num_labels = 2 or more"
            )
        if self.model.head is not None and not task.predicts_labels:
            raise ValueError(
                f'model.head gives labels of documents, but task.name = "{name}" predicts tokens; remove the table, or '
                'use task.name = "classify"'
            )
        directions = {self.model.direction(layer) for layer in range(len(self.model.layers))}
        if self.model.head is not None and self.model.head.pooling == "first" and directions == {"causal"}:
            raise ValueError(
                'model.head.pooling = "first": at a document\'s first token, causal layers have '
                'seen nothing of it; use "mean" or "last", or layers with causal = false'
            )
        for layer, mixer in enumerate(self.model.layers):
            direction = self.model.direction(layer)
            if direction not in task.directions:
                raise ValueError(_wrong_direction(name, f"layer {layer} ({mixer})", mixer, direction))
        if (every := self.evaluation.every_steps) and not task.writes_text:
            raise ValueError(
                f"evaluation.every_steps = {every} needs a model that predicts the next token, but "
                f'task.name = "{name}"; set evaluation.every_steps to 0'
            )


def _wrong_direction(task: str, layer: str, mixer: str, direction: Direction) -> str:
    can_do_both = len(mixer_entry(mixer).directions) == 2
    option = f"model.mixer_options.{mixer}.causal"
    if direction == "causal":
        fits = ", ".join(reading("bidirectional"))
        cure = f"set {option} = false" if can_do_both else f"use a mixer that can read both: {fits}"
        return f'task.name = "{task}" reads tokens before and behind, but {layer} only those before; {cure}'
    cure = f"remove {option} = false" if can_do_both else f"use a causal mixer: {', '.join(reading('causal'))}"
    return f'task.name = "{task}" predicts the next token, but {layer} reads it; {cure}, or use task.name = "masked"'
