"""The configuration of a run: one frozen type per section, with all checks that need only the values.

[model] is in `lightscale.config.model`. `lightscale.config.files` reads a run from TOML files and overrides. Any module
may import this one, so it imports neither torch nor any part of lightscale outside `config` except the errors.
"""

import heapq
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, SerializeAsAny, TypeAdapter, ValidationError, field_validator, model_validator

from lightscale.config.arithmetic import near_divisor, near_multiple
from lightscale.config.kinds import typed_table
from lightscale.config.mixers import Direction, mixer_entry, reading
from lightscale.config.model import ModelConfig
from lightscale.config.optimizers import DEFAULT as DEFAULT_OPTIMIZER
from lightscale.config.optimizers import OPTIMIZERS
from lightscale.config.schedules.registry import SCHEDULES, schedule_of
from lightscale.config.schedules.step_tokens import StepTokens
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
    RunAtStep,
    Seconds,
    Section,
    Seed,
    SequenceLength,
    Small,
    Steps,
    StepsOrZero,
    TokenCount,
    Width,
)
from lightscale.config.sinks import RECORD, sink_entry
from lightscale.config.tasks import DEFAULT as DEFAULT_TASK
from lightscale.config.tasks import TASKS, task_class

Exchange = Literal["gather", "two_level", "ring"]
Attention = Literal["gather", "ring", "all_to_all"]
Recompute = Literal["none", "selective", "full"]

_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class TaskConfig(Section):
    """[task]: the training objective. Every task has its own type, with more keys."""

    name: str = DEFAULT_TASK
    """Target of the prediction; causal: next token; masked: hidden tokens; classify, classify-image: labels; distill: a
    teacher's; sft: counted tokens of conversations; preference: chosen answers.
    """


class MixedStore(Section):
    """[data.stores.NAME]: one of several token stores that are read as one; its sources are named NAME/SOURCE."""

    path: PathText
    """Path of the token store, relative to the current directory."""
    weight: Positive | None = None
    """Share of the samples (only ratios matter). Set it for all stores or for none; none: by number of tokens."""


class ValidationSet(Section):
    """[data.validation.NAME]: text to measure the loss on, never trained on."""

    source: str
    """Name of the source in its store; NAME/SOURCE in data.stores."""
    store: PathText | None = None
    """Path of the token store; none: the training store, or data.stores."""
    sequences: Count = 64
    """Number of sequences to measure, from the start of the source."""


class CurriculumStage(Section):
    """An entry of data.curriculum: a stage of shorter sequences at the start of a run."""

    sequence_length: SequenceLength
    """Length of a sequence, in tokens; a divisor of data.sequence_length."""
    until_tokens: TokenCount
    """End of the stage, in tokens from the start of the run, such as 10e9; rounded up to whole steps."""


class DataConfig(Section):
    """[data]: the training data and its order."""

    store: PathText | None = None
    """Path of the token store, relative to the current directory; set either store or stores."""
    stores: dict[str, MixedStore] = Field(default={}, max_length=MOST_ENTRIES)
    """Several token stores by name, {path, weight} each; replaces store."""
    sources: dict[str, Positive] = Field(default={}, max_length=MOST_ENTRIES)
    """Weight of each source (only ratios matter); empty: the corpus's weights, else tokens; no validation sources."""
    sequence_length: SequenceLength
    """Length of a training sequence, in tokens; with a curriculum, the final length."""
    packing: Literal["concat", "joined", "whole"] = "concat"
    """concat: windows over the stream of documents; joined: states pass between documents; whole: few are cut."""
    curriculum: list[CurriculumStage] = Field(default=[], max_length=MOST_ENTRIES)
    """Curriculum stages of shorter sequences, {sequence_length, until_tokens} each; tokens per step stay the same."""
    seed: Seed = 0
    """Seed of the order of samples."""
    validation: dict[str, ValidationSet] = Field(default={}, max_length=MOST_ENTRIES)
    """Validation sets by name."""

    @property
    def store_paths(self) -> dict[str, Path]:
        """Paths of the training stores by configuration key: data.store, or the keys of data.stores."""
        if self.store is not None:
            return {"data.store": self.store}
        return {f"data.stores.{name}": store.path for name, store in self.stores.items()}

    def _check_stores(self) -> None:
        if (self.store is None) == (not self.stores):
            found = "both are given" if self.stores else "neither is given"
            raise ValueError(f"set exactly one of data.store and data.stores; {found}")
        for name in self.stores:
            if not _SET_NAME.fullmatch(name):
                raise ValueError(
                    f"data.stores: the name {name!r} becomes part of the names of sources; use letters, digits, "
                    "'_' and '-'"
                )
        weighted = [name for name, store in self.stores.items() if store.weight is not None]
        if weighted and self.sources:
            raise ValueError(
                f"data.sources and data.stores.{weighted[0]}.weight both set weights; use data.sources to weight "
                "sources, or a weight for each store"
            )
        if missing := [name for name in self.stores if weighted and name not in weighted]:
            raise ValueError(
                f"data.stores: {', '.join(weighted)} {'has' if len(weighted) == 1 else 'have'} a weight and "
                f"{', '.join(missing)} not; set it for all stores, or for none (weights then follow the tokens)"
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
                    f"data.sequence_length = {self.sequence_length}, which keeps the tokens per step equal; "
                    f"use {near_divisor(self.sequence_length, stage.sequence_length)}"
                )
            if before is not None and stage.until_tokens <= before.until_tokens:
                raise ValueError(
                    f"data.curriculum: until_tokens = {stage.until_tokens} comes after {before.until_tokens}; "
                    "list the curriculum stages in the order of the run"
                )
        return self


class ParallelConfig(Section):
    """[parallel]: number of ranks along each axis; the product is the number of processes."""

    tensor: Ranks = 1
    """Tensor parallelism: ranks that share the heads and widths of every layer."""
    pipeline: Ranks = 1
    """Pipeline parallelism: ranks that share the layers."""
    sequence: Ranks = 1
    """Sequence parallelism: ranks that share every sequence and pass states."""
    data: Ranks | None = None
    """Data parallelism: ranks that share the batch; none: all remaining processes."""
    virtual_stages: Annotated[int, Field(ge=1, le=MOST_LAYERS)] = 1
    """Pipeline stages per pipeline rank, interleaved for a smaller bubble; 1: one stage each (1F1B)."""
    exchange: Exchange = "gather"
    """State passing; gather: all ranks gather; two_level: within nodes, then between them; ring: rank to rank."""
    attention: Attention = "gather"
    """Softmax attention; gather: all keys on each rank; ring: keys from rank to rank; all_to_all: some heads a rank."""
    ranks_per_node: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Processes per node, for two_level; none: as launched."""


class ParameterGroup(Section):
    """[optimizer.groups.NAME]: parameters with a learning rate, weight decay, betas or clipping of their own."""

    parameters: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MOST_ENTRIES)]
    """Patterns of the names of parameters, such as ["embedding.*", "*norm.weight"]; * is any text."""
    lr_factor: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Factor of the learning rate; 0: the parameters keep their values."""
    weight_decay: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    """Weight decay, also of norms, biases and decays; none: as without the group."""
    betas: Annotated[list[Fraction], Field(max_length=MOST_ENTRIES)] | None = None
    """Decay rates per step, as many as optimizer.betas has; none: optimizer.betas."""
    grad_clip: PositiveOrZero | None = None
    """Largest norm of the group's gradients, which optimizer.grad_clip then does not see; 0: off; none: no limit of
    their own."""


class AdaptiveClipConfig(Section):
    """[optimizer.adaptive_clip]: a limit that follows the gradient norms of the run (ZClip)."""

    z_score: Positive = 2.5
    """Deviations above the mean norm from which a norm is clipped."""
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.97
    """Decay rate per step of the mean and the variance of the norms."""
    warmup_steps: Annotated[int, Field(ge=2, le=1_000_000)] = 25
    """Number of steps whose norms begin the statistics; until then grad_clip alone clips."""


AverageName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
"""Part of the names of tensors in checkpoints."""
MOST_AVERAGES = 8
"""Each takes as many bytes as the fp32 weights."""


MomentsDtype = Literal["fp32", "bf16"]
# bf16 has steps of 1/128 to 1/256: a mean that a step changes by less than half of one keeps an old value.
MOST_BF16_RATE = 0.99


class OptimizerConfig(Section):
    """[optimizer]: the optimizer and its learning rate schedule. Every optimizer has its own type, with more keys."""

    name: str = DEFAULT_OPTIMIZER
    """Optimizer; adamw: weight decay apart from the gradient; adam: added to it; lion: signs; ademamix: two means;
    schedulefree: an average in the place of a decay; muon: orthogonal matrices; soap: Adam in an eigenbasis."""
    lr: Small
    """Peak learning rate."""
    schedule: Literal[
        "constant", "linear", "cosine", "minus_sqrt", "polynomial", "inverse_sqrt", "wsd", "range_test"
    ] = "constant"
    """Shape after the warm-up; inverse_sqrt: as 1/sqrt(step); wsd: constant, then decay over decay_steps; range_test:
    growth from min_lr_ratio, for `lightscale lr-find`; others: the decay of that name until the end."""
    warmup_steps: StepsOrZero = 0
    """Length of the linear warm-up from 0, in steps."""
    decay_steps: Steps | None = None
    """Length of the final decay of wsd, in steps."""
    decay: Literal["linear", "cosine", "minus_sqrt", "polynomial"] = "linear"
    """Shape of the final decay of wsd over x from 0 to 1; minus_sqrt: 1 - sqrt(x); polynomial: (1 - x)^decay_power."""
    decay_power: Small = 1.0
    """Exponent of polynomial; 1: linear."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Final learning rate of a decay, and the first one of range_test, as a share of lr."""
    weight_decay: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.1
    """Weight decay, times lr, per step; of adam: added to the gradient. Norms, biases and decays have none."""
    grad_clip: PositiveOrZero = 1.0
    """Largest global gradient norm, without groups that have grad_clip; larger gradients are scaled down to it; 0:
    off."""
    adaptive_clip: AdaptiveClipConfig | None = None
    """Table of a limit of gradient norms by their running mean and deviation, beside grad_clip; none: no such limit."""
    qk_clip: Positive | None = None
    """Largest attention logit (QK-clip); a head that exceeds it has its queries and keys scaled after the step; none:
    off."""
    ema: dict[AverageName, Annotated[float, Field(gt=0, lt=1)]] = Field(default={}, max_length=MOST_AVERAGES)
    """Exponential moving averages of the weights: decay rate per step, by name; `lightscale average` reads them."""
    groups: dict[str, ParameterGroup] = Field(default={}, max_length=MOST_ENTRIES)
    """Parameter groups by name; a parameter is in one group at most."""

    def _check_moments(self) -> None:
        """Refuse means in bf16 whose steps are below their rounding."""
        if getattr(self, "moments_dtype", "fp32") == "fp32":
            return
        rates = {"betas": getattr(self, "betas", ()), "momentum": (getattr(self, "momentum", 0.0),)}
        rates |= {f"groups.{name}.betas": group.betas or () for name, group in self.groups.items()}
        for key, of_key in rates.items():
            if (largest := max(of_key, default=0.0)) > MOST_BF16_RATE:
                raise ValueError(
                    f"optimizer.{key}: a mean of rate {largest} changes by less per step than "
                    f'optimizer.moments_dtype = "bf16" rounds; use rates up to {MOST_BF16_RATE}, or "fp32"'
                )

    def _check_groups(self) -> None:
        for name, group in self.groups.items():
            if group.betas is None:
                continue
            where = f"optimizer.groups.{name}.betas = {group.betas}"
            if (field := type(self).model_fields.get("betas")) is None:
                raise ValueError(f'{where}: optimizer.name = "{self.name}" has no betas; remove it')
            kind: Any = Annotated[field.annotation, *field.metadata]
            try:
                TypeAdapter(kind).validate_python(group.betas)
            except ValidationError:
                raise ValueError(
                    f"{where}: must be a list as optimizer.betas is, such as {list(field.default)}"
                ) from None

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_groups()
        self._check_moments()
        schedule = schedule_of(self)
        schedule.check(self)
        for key, is_set in {"decay_steps": self.decay_steps is not None, "decay": self.decay != "linear"}.items():
            if is_set and key not in schedule.uses:
                fits = " or ".join(f'"{name}"' for name, one in SCHEDULES.items() if key in one.uses)
                raise ValueError(
                    f"optimizer.{key} = {getattr(self, key)} has no effect with optimizer.schedule = "
                    f'"{self.schedule}"; remove it or set the schedule to {fits}'
                )
        if self.decay_power != 1 and "polynomial" not in (self.schedule, self.decay):
            raise ValueError(
                f"optimizer.decay_power = {self.decay_power} is the exponent of the polynomial decay; remove it, or "
                'use optimizer.schedule = "polynomial", or optimizer.decay = "polynomial" with "wsd"'
            )
        return self


class RampStage(Section):
    """An entry of train.rampup_batch_size: a stage of smaller batches at the start of a run."""

    global_batch_size: Count
    """Sequences per step, over all ranks, fewer than in the next stage."""
    until_tokens: TokenCount
    """End of the stage, in tokens from the start of the run, such as 10e9; rounded up to whole steps."""
    increment: Count | None = None
    """Sequences by which the batch grows in equal parts of the stage, up to the next stage's; none: it stays."""


class RampPart(NamedTuple):
    """Steps of one batch in a ramp-up."""

    stage: int
    """Index in train.rampup_batch_size."""
    until_tokens: int
    sequences: int
    """Sequences per step, over all ranks."""
    is_grown: bool
    """Whether the batch is one that `increment` gives."""


class TrainConfig(Section):
    """[train]: length of the run, batch, numbers and device."""

    steps: Steps | None = None
    """Length of the run, in optimizer steps; set either steps or tokens."""
    tokens: TokenCount | None = None
    """Length of the run, in tokens, such as 300e9; rounded up to whole steps."""
    stop_step: Steps | None = None
    """Step after which the run saves and ends before its last step, with the learning rates of its whole length; a
    larger value continues it; none: the last step."""
    global_batch_size: Count
    """Sequences per step, over all ranks; with a ramp-up, behind it."""
    rampup_batch_size: list[RampStage] = Field(default=[], max_length=MOST_ENTRIES)
    """Stages of smaller batches, {global_batch_size, until_tokens} each, with increment also in Megatron's equal parts;
    the order of the samples stays the same."""
    micro_batch_size: Count = 1
    """Sequences per data rank and forward pass; gradients accumulate over the rest of the rank's share."""
    seed: Seed = 0
    """Seed of the initial weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the training; auto: cuda if a GPU is present, else cpu."""
    recompute: Recompute = "none"
    """Activations recomputed in backward to save memory; selective: gated linear units; full: whole layers."""
    recompute_layers: Count | None = None
    """Number of layers per pipeline stage that `recompute = "full"` recomputes; none: all layers."""
    kernels: Literal["auto", "triton", "chunked", "reference"] = "auto"
    """Back-end of the operators; auto: Triton on GPUs, else chunked PyTorch; reference: token by token."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of weights and activations; auto: fp32 on CPUs, bf16 with fp32 main weights on GPUs."""
    fp8: Literal["none", "current"] = "none"
    """Products of the blocks' linear maps with inputs in 8 bits (e4m3; gradients e5m2), scaled by the largest number of
    each tensor; in training alone."""
    cuda_graphs: Literal["auto", "off"] = "off"
    """CUDA graphs of micro-batches whose shapes repeat, with the same numbers; auto: where a run can be captured."""
    z_loss_multiplier: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """Factor of log² Z, Z the softmax's normaliser, added to the loss of each token in training (PaLM: 1e-4); 0: no
    term."""
    validate_every: StepsOrZero = 0
    """Steps between validations; 0: never."""
    init_from: RunAtStep | None = None
    """RUN@STEP: checkpoint with the initial weights; optimizer and data start from the beginning."""
    branch_from: RunAtStep | None = None
    """RUN@STEP: full checkpoint from which this run continues, at STEP, with its optimizer and position in the data."""
    profile_steps: Annotated[tuple[Steps, Steps], Field(strict=False)] | None = None
    """[first, last]: steps to profile, counted from 1."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.steps is None) == (self.tokens is None):
            found = "both are given" if self.steps else "neither is given"
            raise ValueError(f"set exactly one of train.steps and train.tokens, the run's length; {found}")
        if self.init_from is not None and self.branch_from is not None:
            raise ValueError(
                f'train.init_from = "{self.init_from}" and train.branch_from = "{self.branch_from}" exclude each '
                'other; set one of them to "none"'
            )
        if self.recompute_layers is not None and self.recompute != "full":
            raise ValueError(
                f'train.recompute_layers = {self.recompute_layers} needs train.recompute = "full", not '
                f'"{self.recompute}"; use "none" to unset it'
            )
        if self.profile_steps and self.profile_steps[0] > self.profile_steps[1]:
            first, last = self.profile_steps
            raise ValueError(f"train.profile_steps = [{first}, {last}] runs backwards; use [{last}, {first}]")
        self._check_ramp()
        return self

    def _check_ramp(self) -> None:
        before = 0
        for stage, following in self._stages():
            where = f"train.rampup_batch_size: global_batch_size = {stage.global_batch_size}"
            if stage.until_tokens <= before:
                raise ValueError(
                    f"train.rampup_batch_size: until_tokens = {stage.until_tokens} comes after {before}; list the "
                    "stages in the order of the run"
                )
            if stage.global_batch_size >= following:
                raise ValueError(
                    f"{where} is followed by {following}; use growing batches up to train.global_batch_size = "
                    f"{self.global_batch_size}"
                )
            if stage.increment is not None and (following - stage.global_batch_size) % stage.increment:
                grown = following - stage.global_batch_size
                raise ValueError(
                    f"{where} does not reach {following} by increment = {stage.increment}; use "
                    f"{near_divisor(grown, stage.increment)}"
                )
            before = stage.until_tokens

    def _stages(self) -> Iterator[tuple[RampStage, int]]:
        """The stages of the ramp-up, each with the batch that follows."""
        following = [*(stage.global_batch_size for stage in self.rampup_batch_size[1:]), self.global_batch_size]
        return zip(self.rampup_batch_size, following, strict=False)

    @property
    def ramp(self) -> list[RampPart]:
        """The parts of the ramp-up, one for each batch, in the order of the run."""
        found: list[RampPart] = []
        begin = 0
        for number, (stage, following) in enumerate(self._stages()):
            sizes = range(stage.global_batch_size, following, stage.increment or following)
            tokens = stage.until_tokens - begin
            found += [
                RampPart(number, begin + tokens * part // len(sizes), size, part > 1)
                for part, size in enumerate(sizes, 1)
            ]
            begin = stage.until_tokens
        return found


class AdapterConfig(Section):
    """[adapter]: low-rank matrices beside frozen linear maps, the only weights that the run trains and stores."""

    name: Literal["lora", "dora"] | None = None
    """Weights in the place of a frozen W; lora: W + lora_alpha / r B A; dora: these with rows of learned norms; none:
    all weights are trained.
    """
    r: Width = 8
    """Rank: rows of A and columns of B."""
    lora_alpha: Positive = 8.0
    """Numerator of lora_alpha / r, the factor of B A."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a map's inputs that its adapter reads as 0 in training; the others are divided by 1 - lora_dropout."""
    target_modules: list[Annotated[str, Field(min_length=1)]] = Field(
        default=["*"], min_length=1, max_length=MOST_ENTRIES
    )
    """Patterns of the linear maps that get an adapter, such as ["*.mixer.q", "*.mlp.*"]; * is any text."""


class CheckpointConfig(Section):
    """[checkpoint]: interval and retention of checkpoints."""

    every: Steps | None = None
    """Steps between checkpoints; none: by time, tuned to the cost of a save. The last step is always saved."""
    mtbf_hours: Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)] = 24.0
    """Mean hours between failures of the whole run, preemptions included; sets the interval of `every` = none."""
    keep: Annotated[int, Field(ge=2, le=1_000_000)] = 2
    """Number of newest checkpoints to keep."""
    keep_every: Steps | None = None
    """Keep checkpoints at multiples of this many steps for ever; none: keep only the newest."""
    keep_weights_every: Steps | None = None
    """Steps between weights-only checkpoints (4 bytes per parameter), which are kept for ever; none: never."""
    export_every: Steps | None = None
    """Steps between exports for transformers, in bf16, to RUN/exports; none: never."""
    asynchronous: bool = True
    """Write in the background; training waits only for the copy of its state."""
    max_failures: Count = 3
    """Consecutive failed saves after which the run stops."""


class GuardConfig(Section):
    """[guard]: detection of bad steps, which are skipped, and rollbacks when skipping does not help."""

    enabled: bool = True
    """False: no step is skipped, checkpoints are not checked, and the run never rolls back; an update with NaN is
    applied, as by a plain optimizer."""
    window: Annotated[int, Field(ge=8, le=100_000)] = 100
    """Number of steps for the median loss and gradient norm; until then only NaN and Inf are bad."""
    max_loss_rise: Positive | None = 1.0
    """Rise above the median loss, in nats, that skips a step; none: any finite loss is good."""
    max_grad_norm_ratio: Positive | None = 20.0
    """Multiple of the median gradient norm that skips a step; none: any finite norm is good."""
    max_skips: Count = 3
    """Consecutive skipped steps after which the run rolls back to a checkpoint and jumps over that data."""
    max_rollbacks: CountOrZero = 3
    """Most rollbacks of a run; at the next one it stops and needs attention."""
    compare_replicas_every: StepsOrZero = 0
    """Steps between comparisons of replicated weights, and of moments with those of the step before, to detect silent
    corruption; 0: never."""
    compare_gradients_every: StepsOrZero = 0
    """Steps between comparisons of gradients, which two data ranks compute of the same data, to detect wrong
    arithmetic; such a step takes up to twice as long. Also before each checkpoint; 0: never."""


class EvaluationConfig(Section):
    """[evaluation]: evaluation tasks between steps, on the training ranks."""

    every_steps: StepsOrZero = 0
    """Steps between evaluations; also after the last step; 0: never."""
    tasks: list[str] = Field(default=[], max_length=1000)
    """Names of tasks or task files, as for `lightscale evaluate --tasks`."""
    limit: Count | None = None
    """Number of documents or questions per task, from the first; none: the task's own number."""
    data: PathText = Path("data/evaluation")
    """Folder with the data of named tasks."""


class RestartConfig(Section):
    """[restart]: detection of failures, and restarts of the ranks."""

    max_cycles: Count = 3
    """Consecutive starts without a new checkpoint after which the run stops; two if they end alike before a step."""
    hang_timeout_s: Seconds = 60.0
    """Seconds without progress after which a rank counts as hanging; slow steps extend it."""
    collective_timeout_s: Seconds = 600.0
    """Timeout of one collective, in seconds; at most one week."""


class WandbConfig(Section):
    """[metrics.wandb]: options of the sink wandb; none: wandb's environment variables."""

    project: str | None = None
    """Project of the run; none: WANDB_PROJECT, or lightscale."""
    entity: str | None = None
    """User or team that owns the project; none: WANDB_ENTITY, or the user's default."""
    name: str | None = None
    """Name of the run; none: WANDB_NAME, or the name of the run's directory."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """offline: upload later with `wandb sync`; none: WANDB_MODE, or online."""


class MetricsConfig(Section):
    """[metrics]: metrics recorded during training, and their sinks."""

    log_every: Steps = 1
    """Steps between lines of metrics."""
    sinks: list[str] = Field(default=["tensorboard", "jsonl"], max_length=100)
    """Sinks of the metrics: tensorboard, wandb, and always jsonl, the record that other commands read."""
    position_buckets: Annotated[int, Field(ge=1, le=1024)] = 8
    """Number of equal parts of the sequence with a validation loss each."""
    parameter_norms_every: StepsOrZero = 10
    """Steps between norms of gradients and updates per parameter group, on logged steps only; 0: never."""
    attention_logits_every: StepsOrZero = 0
    """Steps between the largest attention logits per layer, on logged steps only; 0: never, or with optimizer.qk_clip
    always."""
    gradient_noise_every: StepsOrZero = 0
    """Steps between measurements of the gradient noise, on logged steps only; each takes one micro-batch more; 0:
    never. `lightscale noise-scale` reads them."""
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
                f"must contain {RECORD}: resume, runs and goodput read metrics.jsonl; use {[*sinks, RECORD]}"
            )
        return sinks


class RunConfig(Section):
    """A whole run."""

    model: ModelConfig
    task: Annotated[SerializeAsAny[TaskConfig], Field(validate_default=True)] = TaskConfig()
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    optimizer: SerializeAsAny[OptimizerConfig]
    train: TrainConfig
    adapter: AdapterConfig = AdapterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    guard: GuardConfig = GuardConfig()
    restart: RestartConfig = RestartConfig()
    metrics: MetricsConfig = MetricsConfig()

    @cached_property
    def tokens_per_step(self) -> int:
        """Tokens per step, over all ranks; with a ramp-up, behind it."""
        return self.train.global_batch_size * self.data.sequence_length

    @cached_property
    def step_tokens(self) -> StepTokens:
        """Tokens of every step."""
        ramp = [(part.until_tokens, part.sequences) for part in self.train.ramp]
        return StepTokens.of(self.data.sequence_length, self.train.global_batch_size, ramp)

    @cached_property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.train.steps is not None:
            return self.train.steps
        assert self.train.tokens is not None
        return self.step_tokens.steps_to(self.train.tokens)

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole run, in whole steps."""
        return self.step_tokens.after(self.total_steps)

    @property
    def last_step(self) -> int:
        """The step after which the run ends: ``train.stop_step``, or the last of ``total_steps``."""
        return self.train.stop_step or self.total_steps

    @property
    def parent_steps(self) -> int:
        """Steps that the parent of a branch has done at the beginning of the run; 0: the run is no branch."""
        return 0 if self.train.branch_from is None else int(self.train.branch_from.rpartition("@")[2])

    @property
    def own_steps(self) -> int:
        """Steps of the run itself, without those of its parent."""
        return self.total_steps - self.parent_steps

    def own_multiples(self, every: int | None) -> int:
        """Number of the run's own steps that are multiples of ``every``; None: none."""
        return 0 if every is None else self.total_steps // every - self.parent_steps // every

    def num_kept(self, newest: int) -> int:
        """Number of full checkpoints of the whole run behind its last save, where the ``newest`` stay.

        Of saves by time, none but the last is sure.
        """
        section, begin, last = self.checkpoint, self.parent_steps, self.total_steps
        due = [every for every in (section.every, section.export_every) if every is not None]
        saves = heapq.merge([last], *(range(last - last % every, begin, -every) for every in due), reverse=True)
        steps = [step for step, _ in itertools.islice(itertools.groupby(saves), newest)]
        if section.keep_every is None:
            return len(steps)
        kept = [math.lcm(section.keep_every, every) for every in due]

        def older(every: int) -> int:
            return (steps[-1] - 1) // every - begin // every

        # Steps that both intervals have would count twice.
        return len(steps) + sum(map(older, kept)) - (older(math.lcm(*kept)) if len(kept) > 1 else 0)

    @property
    def own_tokens(self) -> int:
        """Tokens of the run itself, without those of its parent."""
        return self.total_tokens - self.step_tokens.after(self.parent_steps)

    @property
    def adapters(self) -> AdapterConfig | None:
        """Section [adapter]; None: the run trains all weights."""
        return None if self.adapter.name is None else self.adapter

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the model with the frozen one that it begins from."""
        return getattr(self.task, "has_reference", False)

    @property
    def stored_reference(self) -> bool:
        """Whether the loss compares the model with log-probabilities that the store has."""
        return getattr(self.task, "stored_reference", False)

    @property
    def has_base(self) -> bool:
        """Whether the checkpoint of train.init_from is read at every start: beside adapters, or as a reference."""
        return self.adapters is not None or self.has_reference

    @property
    def teacher(self) -> str | None:
        """RUN@STEP of the frozen model that the run learns from; None: it learns from the labels alone."""
        return getattr(self.task, "teacher", None)

    @field_validator("task", mode="before")
    @classmethod
    def _typed_task(cls, table: Any) -> Section:
        """Validate the table with the named task's own type."""
        return typed_table("task", TASKS, DEFAULT_TASK, table)

    @field_validator("optimizer", mode="before")
    @classmethod
    def _typed_optimizer(cls, table: Any) -> Section:
        """Validate the table with the named optimizer's own type."""
        return typed_table("optimizer", OPTIMIZERS, DEFAULT_OPTIMIZER, table)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_task()
        self._check_adapter()
        self._check_grid()
        optimizer, steps = self.optimizer, self.total_steps
        schedule_of(optimizer).check_length(optimizer, steps)
        if self.own_steps < 1:
            raise ValueError(
                f'train.branch_from = "{self.train.branch_from}": the run ends at step {steps} (train.steps or '
                f"train.tokens); use more than {self.parent_steps}"
            )
        if not self.parent_steps < self.last_step <= steps:
            raise ValueError(
                f"train.stop_step = {self.train.stop_step} is none of the run's own steps, {self.parent_steps + 1} to "
                f'{steps} (train.steps or train.tokens); use one of them, or "none" for the last one'
            )
        if self.train.profile_steps and self.train.profile_steps[1] > steps:
            raise ValueError(
                f"train.profile_steps = {list(self.train.profile_steps)} ends after the run's {steps} steps "
                f'(train.steps or train.tokens); use steps up to {steps}, or "none"'
            )
        if self.train.validate_every and not self.data.validation:
            raise ValueError(
                f"train.validate_every = {self.train.validate_every} but data.validation has no set; "
                "add [data.validation.NAME] with its source, or set train.validate_every to 0"
            )
        if self.evaluation.every_steps and not self.evaluation.tasks:
            raise ValueError(
                f"evaluation.every_steps = {self.evaluation.every_steps} but evaluation.tasks is empty; add "
                'tasks, like ["lambada", "text.toml"], or set evaluation.every_steps to 0'
            )
        if self.evaluation.every_steps and self.parallel.virtual_stages > 1:
            raise ValueError(
                f"evaluation.every_steps = {self.evaluation.every_steps} does not support parallel.virtual_stages = "
                f"{self.parallel.virtual_stages}; use 1, or set evaluation.every_steps to 0 and evaluate from another "
                "job (lightscale evaluate RUN --follow)"
            )
        if self.metrics.position_buckets > self.data.sequence_length:
            raise ValueError(
                f"metrics.position_buckets = {self.metrics.position_buckets} exceeds "
                f"data.sequence_length = {self.data.sequence_length} tokens"
            )
        return self

    def _check_task(self) -> None:
        """Raise ValueError when the task does not fit the layers' directions, packing, head or evaluation."""
        name, task = self.task.name, task_class(self.task.name)
        if self.data.packing == "joined" and not task.writes_text and not task.reads_images:
            raise ValueError(
                f'data.packing = "joined" merges the documents of a sequence, but task.name = "{name}" needs them '
                'apart; use "concat" or "whole"'
            )
        if self.data.packing != "whole" and task.keeps_documents_whole:
            raise ValueError(
                f'data.packing = "{self.data.packing}" cuts documents, but task.name = "{name}" learns from whole ones;'
                ' use "whole"'
            )
        if task.predicts_labels and self.model.head is None:
            raise ValueError(
                f'task.name = "{name}" needs the table model.head; set model.head.num_labels to the number of classes, '
                "2 or more"
            )
        if self.model.head is not None and not task.predicts_labels:
            what = "noise" if task.predicts_noise else "tokens"
            raise ValueError(
                f'model.head predicts labels of documents, but task.name = "{name}" predicts {what}; remove the table, '
                'or use task.name = "classify"'
            )
        if self.model.head is not None and self.model.head.pairs and self.data.packing != "whole":
            raise ValueError(
                f'data.packing = "{self.data.packing}" cuts pairs of documents, and model.head.pairs = true predicts '
                'labels of whole ones; use "whole"'
            )
        compares = task.compares_answers
        has_logits = not (task.predicts_labels or task.predicts_noise)
        if self.train.z_loss_multiplier and (not has_logits or self.teacher is not None or compares):
            raise ValueError(
                f"train.z_loss_multiplier = {self.train.z_loss_multiplier} is for tasks that learn tokens from labels; "
                f'with task.name = "{name}" set it to 0'
            )
        if task.predicts_noise != (self.model.diffusion is not None):
            cure = "add model.diffusion" if task.predicts_noise else 'use task.name = "diffusion"'
            state = "is missing" if task.predicts_noise else "is set"
            raise ValueError(
                f'task.name = "{name}": model.diffusion, the blocks and output of a diffusion transformer, {state}; '
                f"{cure}"
            )
        if task.reads_images != (self.model.patches is not None):
            cure = "add model.patches" if task.reads_images else 'use task.name = "classify-image"'
            state = "is missing" if task.reads_images else "is set"
            raise ValueError(f'task.name = "{name}": model.patches, the inputs of images, {state}; {cure}')
        if task.reads_images:
            self._check_images()
        if self.teacher is not None and self.parallel.pipeline > 1:
            raise ValueError(
                f'parallel.pipeline = {self.parallel.pipeline}: the teacher of task.name = "{name}" has no pipeline '
                "stages; use parallel.pipeline = 1, with more tensor, sequence or data ranks"
            )
        directions = {self.model.direction(layer) for layer in range(len(self.model.layers))}
        if self.model.head is not None and self.model.head.pooling == "first" and directions == {"causal"}:
            raise ValueError(
                'model.head.pooling = "first": with causal layers, the first token has not seen the rest of its '
                'document; use "mean" or "last", or layers with causal = false'
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

    def _check_adapter(self) -> None:
        """Raise ValueError where adapters or a reference have no frozen model, or other weights would be trained."""
        is_compared = self.has_reference or self.stored_reference
        if is_compared and self.train.init_from is None and self.train.branch_from is None:
            raise ValueError(
                f'task.name = "{self.task.name}" compares the model with the one that it begins from; set '
                'train.init_from to RUN@STEP, or use task.loss = "simpo"'
            )
        if self.stored_reference and self.data.curriculum:
            raise ValueError(
                'task.reference = "stored" is of sequences of one length; remove data.curriculum, or use '
                'task.reference = "model"'
            )
        if self.adapter.name is None:
            for key in AdapterConfig.model_fields:
                if getattr(self.adapter, key) != getattr(AdapterConfig(), key):
                    raise ValueError(f'adapter.{key} has no effect without adapter.name; set it to "lora" or "dora"')
            return
        if self.train.init_from is None and self.train.branch_from is None:
            raise ValueError(
                "[adapter] trains matrices beside frozen weights, but no run has these; set train.init_from to "
                "RUN@STEP, or remove [adapter]"
            )
        if getattr(self.task, "stage", None) == "layers":
            raise ValueError(
                'task.stage = "layers" trains whole mixers, and [adapter] keeps them frozen; remove [adapter], or use '
                'task.stage = "logits"'
            )
        if self.optimizer.ema:
            raise ValueError(
                "optimizer.ema averages whole models, and [adapter] trains parts of them; remove [optimizer.ema], or "
                "give 'optimizer.ema={}' on the command line"
            )

    def _check_images(self) -> None:
        """Raise ValueError unless a sequence is one image."""
        assert self.model.grid is not None, "checked with the model"
        tokens = self.model.grid.document_tokens
        if self.data.sequence_length != tokens:
            raise ValueError(
                f"data.sequence_length = {self.data.sequence_length}: an image has {tokens} tokens (model.grid: "
                f"leading_tokens = {self.model.grid.leading_tokens}, shape = {self.model.grid.shape}); use {tokens}"
            )
        if self.data.packing != "concat":
            raise ValueError(f'data.packing = "{self.data.packing}": a sequence is one image; use "concat"')
        if self.data.curriculum:
            raise ValueError("data.curriculum: images have one size; remove the curriculum stages")
        patches, changes = self.model.patches, getattr(self.task, "augmentation", None)
        if patches is not None and patches.latents:
            if not task_class(self.task.name).predicts_noise:
                raise ValueError(
                    f'model.patches.latents = true with task.name = "{self.task.name}", which reads pixels; use '
                    'task.name = "diffusion"'
                )
            if changes is not None and not changes.only_flips:
                raise ValueError(
                    "task.augmentation changes pixels, and model.patches.latents = true: latents can be flipped alone; "
                    "use horizontal_flip, and leave out the others"
                )

    def _check_grid(self) -> None:
        """Raise ValueError where a sequence would cut documents, whose coordinates are counted from their starts."""
        if self.model.grid is None or self.model.patches is not None:
            return
        if self.data.packing == "joined":
            raise ValueError('data.packing = "joined" with model.grid: coordinates end with a document; use "concat"')
        tokens = self.model.grid.document_tokens
        lengths = [("data", self.data.sequence_length)]
        lengths += [("data.curriculum", stage.sequence_length) for stage in self.data.curriculum]
        for key, length in lengths:
            if length % tokens:
                raise ValueError(
                    f"{key}: sequence_length = {length} cuts documents of {tokens} tokens (model.grid); use "
                    f"{near_multiple(length, tokens)}"
                )


def _wrong_direction(task: str, layer: str, mixer: str, direction: Direction) -> str:
    can_do_both = len(mixer_entry(mixer).directions) == 2
    option = f"model.mixer_options.{mixer}.causal"
    if direction == "causal":
        fits = ", ".join(reading("bidirectional"))
        cure = f"set {option} = false" if can_do_both else f"use a bidirectional mixer: {fits}"
        return f'task.name = "{task}" needs tokens before and after, but {layer} reads only those before; {cure}'
    cure = f"remove {option} = false" if can_do_both else f"use a causal mixer: {', '.join(reading('causal'))}"
    return f'task.name = "{task}" predicts the next token, but {layer} reads it; {cure}, or use task.name = "masked"'
