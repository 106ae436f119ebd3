"""The configuration of a run: one frozen type per section, with all checks that need nothing but the values.

`lightscale.config.files` reads it from TOML files and overrides. Everything may import this module, so it imports
neither torch nor any part of lightscale outside `config` but the errors.
"""

import difflib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticKnownError

from lightscale.config.arithmetic import near_divisor, near_multiple
from lightscale.config.mixers import MIXERS, Direction, known_mixers, mixer_entry, mixer_options_type
from lightscale.config.sinks import RECORD, sink_entry
from lightscale.config.tasks import DEFAULT as DEFAULT_TASK
from lightscale.config.tasks import task_class
from lightscale.config.text import path_fault, text_fault
from lightscale.errors import UserError, shortened

# Bounds lie far beyond what has been trained, and keep arithmetic, messages and allocations small whatever is written.
MOST_LAYERS = 10_000
MOST_RANKS = 1_000_000
MOST_IDS = 2**24
"""Of a vocabulary."""
MOST_ENTRIES = 10_000
"""Of a list or of a table whose keys the user chooses."""
MOST_SEQUENCE_TOKENS = 2**30
_MOST_STEPS, _MOST_TOKENS = 10**9, 10**15

# Of little things: failures, skips, checkpoints.
Count = Annotated[int, Field(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Field(ge=0, le=1_000_000)]
Width = Annotated[int, Field(ge=1, le=2**20)]
Steps = Annotated[int, Field(ge=1, le=_MOST_STEPS)]
StepsOrZero = Annotated[int, Field(ge=0, le=_MOST_STEPS)]
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Ids = Annotated[int, Field(ge=1, le=MOST_IDS)]
# Positions are written as floats of 32 bits at places.
SequenceLength = Annotated[int, Field(ge=1, le=MOST_SEQUENCE_TOKENS)]
# What generators of random numbers take.
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(gt=0, le=604_800, allow_inf_nan=False)]
Small = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]
PositiveOrZero = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
ZeroToOne = Annotated[float, Field(ge=0, le=1)]


def _path(value: object) -> object:
    """`value` as it is. ValueError where it is a text that can be no path."""
    if isinstance(value, str) and (fault := path_fault(value)):
        raise ValueError(fault)
    return value


# TOML has neither paths nor tuples: they are read from text and from lists, everything else as it is.
PathText = Annotated[Path, Field(strict=False), BeforeValidator(_path)]
Exchange = Literal["gather", "two_level", "ring"]
Recompute = Literal["none", "selective", "full"]

_MIXER_ENTRY = re.compile(r"(?P<name>[a-z][a-z0-9_]*)(\*(?P<count>[1-9][0-9]*))?")
_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_RUN_AT_STEP = re.compile(r".+@[0-9]{1,10}")


def _whole(value: object) -> object:
    """300e9 -> 300_000_000_000, as people write token counts; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


TokenCount = Annotated[int, Field(ge=1, le=_MOST_TOKENS), BeforeValidator(_whole)]


def _check_texts(value: Any) -> None:
    """ValueError where a text in `value`, also in its lists and tables, can be no value."""
    if isinstance(value, str):
        if fault := text_fault(value):
            raise ValueError(fault)
    elif isinstance(value, (dict, list, tuple)):
        # What is read from a file has no more than some levels.
        for one in itertools.chain(value, value.values() if isinstance(value, dict) else ()):
            _check_texts(one)


def _holds_section(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return True
    return any(map(_holds_section, get_args(annotation)))


class Section(BaseModel):
    """What all sections share: frozen, no unknown keys, no silent conversions, documented fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _unset(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        # Sections check their own, and name the whole key.
        if not _holds_section(annotation):
            _check_texts(value)
        # TOML has no null: "none" unsets an optional field that an earlier file, or its default, set.
        return None if value == "none" and type(None) in get_args(annotation) else value


class HeadConfig(Section):
    """[model.head]: an output layer that gives one label for each document, in place of the vocabulary's."""

    num_labels: Annotated[int, Field(ge=2, le=1_000_000)]
    """Classes; labels are 0 to one less."""
    pooling: Literal["mean", "first", "last"] = "mean"
    """What of a document the layer sees: the mean of its tokens' states, or that of the first or last token."""


class ModelConfig(Section):
    """[model]: the shape of the network."""

    mixer: str | Annotated[list[str], Field(max_length=MOST_LAYERS)] = "tnl"
    """Token mixer of the layers: a name, or a pattern like ["tnl*7", "llama"], repeated up to num_layers."""
    num_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    """Number of blocks."""
    hidden_size: Width
    """Width of the residual stream (d_model), in channels."""
    num_heads: Width
    """Number of heads; divides hidden_size, unless all mixers have an option head_dim."""
    intermediate_size: Width
    """Inner width of the gated linear unit, in channels."""
    vocab_size: Ids
    """Rows of the embedding, in tokens; padding included. The largest published have 262,144."""
    tie_word_embeddings: bool = True
    """Whether the output layer's weight is the embedding; false: it has a weight of its own."""
    head: HeadConfig | None = None
    """Output layer for labels of documents, a table, for task.name = "classify"; none: it gives tokens."""
    glu_activation: Literal["none", "silu"] = "none"
    """Activation of the gate in the gated linear unit."""
    norm: Literal["srmsnorm", "rmsnorm"] = "srmsnorm"
    """Norm before each mixer and each gated linear unit, and at the end; srmsnorm has no weight."""
    norm_eps: Small = 1e-6
    """Added to the mean square in the norms."""
    init_std: Small = 0.02
    """Standard deviation of the initial weights; output projections take it divided by sqrt(2 num_layers)."""
    mixer_options: Annotated[dict[str, SerializeAsAny[Section]], Field(validate_default=True)] = {}
    """Options of the mixers in use: a table [model.mixer_options.NAME] for each that has options."""

    @cached_property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.hidden_size // self.num_heads

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The mixer's name for each layer, first to last; length num_layers."""
        period = _mixer_period(self.mixer)
        return tuple(period * (self.num_layers // len(period)))

    def layer_options(self, layer: int) -> Section:
        """The options of the mixer of layer ``layer`` (from 0), in the type that the mixer names."""
        return self.mixer_options.get(self.layers[layer], Section())

    def direction(self, layer: int) -> Direction:
        """What layer ``layer`` (from 0) reads of a token's document."""
        directions = mixer_entry(self.layers[layer]).directions
        if len(directions) == 1:
            (only,) = directions
            return only
        causal: bool = getattr(self.layer_options(layer), "causal")  # noqa: B009 - of the mixer's own type
        return "causal" if causal else "bidirectional"

    @field_validator("mixer")
    @classmethod
    def _known(cls, mixer: str | list[str]) -> str | list[str]:
        for name in dict.fromkeys(_mixer_period(mixer)):
            mixer_entry(name)
        return mixer

    @field_validator("mixer_options", mode="plain")
    @classmethod
    def _typed_options(cls, tables: Any, info: ValidationInfo) -> dict[str, Section]:
        """Of every mixer in use its options, complete with defaults, in its own type."""
        # Fields are checked in their order: `mixer` is there, unless it is wrong, and then that is the error to show.
        if "mixer" not in info.data:
            return {}
        if not isinstance(tables, dict):
            raise PydanticKnownError("dict_type")
        used = dict.fromkeys(_mixer_period(info.data["mixer"]))
        errors = [_unused_options(name, tables[name], list(used)) for name in tables if name not in used]
        typed = {}
        for name in used:
            try:
                options = (mixer_options_type(name) or Section).model_validate(tables.get(name, {}))
            except ValidationError as error:
                # Under the mixer's name, so that messages name the whole key.
                errors += [_inside(name, dict(item)) for item in error.errors(include_url=False)]
                continue
            assert isinstance(options, Section), f"{type(options)} of mixer {name} is no Section"
            if type(options).model_fields:
                typed[name] = options
        if errors:
            raise ValidationError.from_exception_data("mixer_options", errors)
        return typed

    @model_validator(mode="after")
    def _check(self) -> Self:
        has_width = (getattr(self.mixer_options.get(name), "head_dim", None) for name in {*self.layers})
        if self.hidden_size % self.num_heads and not all(has_width):
            raise ValueError(
                f"model.hidden_size = {self.hidden_size} is not divisible by model.num_heads = {self.num_heads}; "
                f"use {near_divisor(self.hidden_size, self.num_heads)} heads"
            )
        period = len(_mixer_period(self.mixer))
        if self.num_layers % period:
            raise ValueError(
                f"model.num_layers = {self.num_layers} is not divisible by the {period} layers of the "
                f"pattern model.mixer = {self.mixer}; use {near_multiple(self.num_layers, period)}"
            )
        return self


class TaskConfig(Section):
    """[task]: what the model is trained to predict. Every task has a type of its own, with more keys."""

    name: str = DEFAULT_TASK
    """What is predicted: causal, the next token; masked, tokens that are hidden; classify, labels of documents."""


class ValidationSet(Section):
    """[data.validation.NAME]: text on which the loss is measured, never trained on."""

    source: str
    """Name of the source in its store."""
    store: PathText | None = None
    """Path of the token store; none: the training store."""
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

    store: PathText
    """Path of the token store, relative to the current directory."""
    sources: Annotated[dict[str, Positive], Field(max_length=MOST_ENTRIES)] = {}
    """Weight of each source (only ratios count); empty: as the corpus gave them, else by tokens, but for validation."""
    sequence_length: SequenceLength
    """Length of a training sequence, in tokens; with a curriculum, that of its last stage."""
    packing: Literal["concat", "whole"] = "concat"
    """concat: windows over the stream of documents; whole: only documents longer than a sequence are cut."""
    curriculum: Annotated[list[CurriculumStage], Field(max_length=MOST_ENTRIES)] = []
    """Curriculum stages of shorter sequences, {sequence_length, until_tokens} each; steps keep their tokens."""
    seed: Seed = 0
    """Decides the order of the samples."""
    validation: Annotated[dict[str, ValidationSet], Field(max_length=MOST_ENTRIES)] = {}
    """Validation sets by name."""

    @model_validator(mode="after")
    def _check(self) -> Self:
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
    tasks: Annotated[list[str], Field(max_length=1000)] = []
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
    sinks: Annotated[list[str], Field(max_length=100)] = ["tensorboard", "jsonl"]
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
            inside = [_inside(name, dict(item)) for item in error.errors(include_url=False)]
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
        uses = (
            ("evaluation.every_steps", self.evaluation.every_steps, 0),
            ("checkpoint.export_every", self.checkpoint.export_every, "none"),
        )
        for key, value, off in uses:
            if value and not task.writes_text:
                raise ValueError(
                    f'{key} = {value} needs a model that predicts the next token, but task.name = "{name}"; '
                    f"set {key} to {off}"
                )


def _wrong_direction(task: str, layer: str, mixer: str, direction: Direction) -> str:
    can_do_both = len(mixer_entry(mixer).directions) == 2
    option = f"model.mixer_options.{mixer}.causal"
    if direction == "causal":
        fits = [name for name, entry in MIXERS.items() if "bidirectional" in entry.directions]
        cure = f"set {option} = false" if can_do_both else f"use a mixer that can read both: {', '.join(fits)}"
        return f'task.name = "{task}" reads tokens before and behind, but {layer} only those before; {cure}'
    fits = [name for name, entry in MIXERS.items() if "causal" in entry.directions]
    cure = f"remove {option} = false" if can_do_both else f"use a causal mixer: {', '.join(fits)}"
    return f'task.name = "{task}" predicts the next token, but {layer} reads it; {cure}, or use task.name = "masked"'


def _unused_options(name: str, table: object, used: list[str]) -> InitErrorDetails:
    """The error of options for a mixer that no layer has."""
    if not isinstance(table, dict):
        text = f"options stand in a table [model.mixer_options.NAME], NAME a mixer of the model: {', '.join(used)}"
    else:
        what = "no layer uses this mixer" if name in known_mixers() else "no mixer has this name"
        near = difflib.get_close_matches(name, used, n=1)
        text = f"{what}; did you mean {near[0]}?" if near else f"{what}; the model has {', '.join(used)}"
    error = PydanticCustomError("value_error", "{error}", {"error": text})
    return InitErrorDetails(type=error, loc=(name,), input=table)


def _inside(name: str, error: dict[str, Any]) -> InitErrorDetails:
    """One of pydantic's errors in a table, as an error in the table of tables."""
    return InitErrorDetails(
        type=error["type"], loc=(name, *error["loc"]), input=error["input"], ctx=error.get("ctx", {})
    )


def _mixer_period(mixer: str | Iterable[str]) -> list[str]:
    """["tnl*2", "llama"] -> ["tnl", "tnl", "llama"]."""
    entries = [mixer] if isinstance(mixer, str) else list(mixer)
    period: list[str] = []
    for entry in entries:
        match = _MIXER_ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(f'"{shortened(entry)}" must be NAME or NAME*COUNT, like "tnl" or "tnl*7"')
        # By its digits first: it may have thousands.
        digits = match["count"] or "1"
        if len(digits) > len(str(MOST_LAYERS)) or len(period) + int(digits) > MOST_LAYERS:
            raise ValueError(f'"{shortened(entry)}" makes a pattern of more than {MOST_LAYERS:_} layers')
        period += [match["name"]] * int(digits)
    if not period:
        raise ValueError('names no mixer; use a name or a list of names, like "tnl"')
    return period
