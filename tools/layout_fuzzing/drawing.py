"""Configurations drawn from the schema: every field of what a layout can change, of every mixer and task.

A field's values are those of its type: both of a bool, all of a Literal; of numbers those that ``NUMBERS`` names. A
new option is drawn without a change here, unless it is a number: then ``undrawn`` names it, and a test asks for values
or a reason.
"""

import random
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from lightscale.config.mixers import MIXERS, mixer_options_type
from lightscale.config.model import ModelConfig
from lightscale.config.schema import OptimizerConfig, ParallelConfig, TrainConfig
from lightscale.config.tasks import TASKS, task_class

TOKENS = 48
NUM_IDS = 128
"""Of the tokenizer of the stores (``ascii``)."""

NUMBERS: dict[str, list[Any]] = {
    # The masked task has an id more than the tokenizer; tensor ranks divide neither 131 nor 301.
    "model.vocab_size": [131, 160, 301],
    "model.num_layers": [2, 4],
    "model.hidden_size": [24, 32, 48],
    "model.num_heads": [2, 4, 8],
    "model.intermediate_size": [0, 24, 40],
    "model.norm_eps": [1e-6, 1e-3],
    "model.init_std": [0.02, 0.1],
    "model.embedding_std": [None, 0.5],
    "model.head.num_labels": [3],
    "model.tpe.modes": [None, 3],
    "gate_rank": [None, 3],
    "num_key_value_heads": [None, 1, 2, 4],
    "head_dim": [None, 6],
    "key_head_dim": [None, 5],
    "value_head_dim": [None, 6],
    "num_value_heads": [None, 8, 16],
    "rope_theta": [10000.0, 100.0],
    "rope_scaling.factor": [8.0],
    "llama.positions": ["rope", "none"],
    "rope_fraction": [1.0, 0.5],
    "window": [None, 5, 20],
    "softmax_scale": [None, 0.7],
    "attention_logit_cap": [None, 2.0],
    "model.embedding_multiplier": [1.0, 5.0],
    "model.final_logit_cap": [None, 2.0],
    "rope_scaling.low_freq_factor": [1.0, None],
    "rope_scaling.high_freq_factor": [4.0, None],
    "rope_scaling.original_max_position_embeddings": [16],
    "rope_scaling.beta_fast": [None, 4.0],
    "rope_scaling.beta_slow": [None],
    "rope_scaling.attention_factor": [None],
    "eps": [1e-6, 0.1],
    "initial_decay": [0.5, 0.9],
    "short_convolution": [0, 2, 4],
    "output_norm_eps": [1e-5, 0.1],
    "expansion": [1, 2],
    "positions": [None, TOKENS],
    "task.mlm_probability": [0.15, 0.5],
    "task.mask_replace_prob": [0.8, 0.5],
    "task.random_replace_prob": [0.1, 0.3],
    "train.micro_batch_size": [1, 2],
    "train.recompute_layers": [None, 1],
    "optimizer.weight_decay": [0.1, 0.0],
    "optimizer.grad_clip": [1.0, 0.1],
}
"""By the key, or its last part."""

NOT_DRAWN: dict[str, str] = {
    "model.mixer": "drawn as the pattern of the layers",
    "model.mixer_options": "drawn for each mixer",
    "task.name": "drawn first",
    "task.label": "the name of the store's array",
    "task.seed": "decides the numbers, not how they come about",
    "task.validation_mlm_probability": "of validation, which the fuzzer does not do",
    "train.steps": "three",
    "train.tokens": "as train.steps",
    "train.global_batch_size": "drawn with the layout, which must divide it",
    "train.seed": "decides the numbers, not how they come about",
    "train.device": "the fuzzer is for CPUs",
    "train.kernels": "back-ends are compared operator by operator (tests/kernels)",
    "train.precision": "fp64 for comparisons, fp32 with the optimizer",
    "train.validate_every": "of validation, which the fuzzer does not do",
    "train.init_from": "changes what training begins with",
    "train.profile_steps": "measures",
    "optimizer.lr": "the schedule is a function of the step (tests/training)",
    "optimizer.schedule": "as optimizer.lr",
    "optimizer.warmup_steps": "as optimizer.lr",
    "optimizer.decay_steps": "as optimizer.lr",
    "optimizer.min_lr_ratio": "as optimizer.lr",
    "optimizer.betas": "element by element",
    "optimizer.eps": "element by element",
    "parallel.tensor": "drawn as the layout",
    "parallel.pipeline": "drawn as the layout",
    "parallel.sequence": "drawn as the layout",
    "parallel.data": "the rest of the ranks",
    "parallel.virtual_stages": "drawn with the layout",
    "parallel.ranks_per_node": "drawn with the exchange",
}
"""Fields that are not drawn by themselves, and why."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A case: a configuration's keys that were drawn, the ranks, and where sequence ranks begin if not evenly."""

    world_size: int
    keys: dict[str, Any] = field(default_factory=dict)
    """Dotted keys to values; others have their defaults."""
    cuts: tuple[int, ...] | None = None
    """First token of each sequence rank."""

    def axes(self) -> dict[str, int]:
        """Ranks along each axis."""
        found = {axis: int(self.keys.get(f"parallel.{axis}", 1)) for axis in ("tensor", "pipeline", "sequence")}
        used = found["tensor"] * found["pipeline"] * found["sequence"]
        return {**found, "data": self.world_size // used}


def tables() -> dict[str, type[BaseModel]]:
    """What is drawn from: the prefix of its keys, and its type. Of each mixer and each task its own."""
    found: dict[str, type[BaseModel]] = {
        "model": ModelConfig,
        "train": TrainConfig,
        "optimizer": OptimizerConfig,
        "parallel": ParallelConfig,
    }
    found |= {f"task:{name}": task_class(name).options for name in TASKS}
    for name in MIXERS:
        options = mixer_options_type(name)
        if options is not None:
            found[f"model.mixer_options.{name}"] = options
    return found


def values_of(key: str, annotation: Any, default: Any) -> list[Any] | None:
    """What a field may be drawn as; None: not known here."""
    for known in (key, ".".join(key.split(".")[-2:]), key.rpartition(".")[2]):
        if known in NUMBERS:
            return NUMBERS[known]
    origin = typing.get_origin(annotation)
    if annotation is bool:
        return [False, True]
    if origin is Literal:
        return list(typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        inner = [one for one in typing.get_args(annotation) if one is not type(None)]
        if len(inner) == 1 and isinstance(inner[0], type) and issubclass(inner[0], BaseModel):
            return [None, inner[0]]
    if origin is typing.Annotated:
        return values_of(key, typing.get_args(annotation)[0], default)
    return None


def undrawn() -> list[str]:
    """Keys that are neither drawn nor in ``NOT_DRAWN``."""
    found = []
    for table, kind in tables().items():
        prefix = table.partition(":")[0]
        for name, one in kind.model_fields.items():
            key = f"{prefix}.{name}"
            if key not in NOT_DRAWN and values_of(key, one.annotation, one.default) is None:
                found.append(key)
    return found


class Drawer:
    """Draws cases from ``rng``; ``share``: of the options that are not left at their defaults."""

    def __init__(self, rng: random.Random, *, world_sizes: tuple[int, ...] = (2, 3, 4), share: float = 0.35) -> None:
        self.rng, self.world_sizes, self.share = rng, world_sizes, share

    def draw(self) -> Drawn:
        """A case, which validation may refuse."""
        rng = self.rng
        task = rng.choice(sorted(TASKS))
        directions = task_class(task).directions
        able = [name for name, entry in MIXERS.items() if entry.directions & directions]
        pattern = rng.sample(able, k=rng.choice((1, 1, 2)))
        keys: dict[str, Any] = {"task.name": task, "model.mixer": pattern if len(pattern) > 1 else pattern[0]}
        for name in ("num_layers", "hidden_size", "num_heads", "intermediate_size", "vocab_size"):
            keys[f"model.{name}"] = rng.choice(NUMBERS[f"model.{name}"])
        self._options(keys, "model", ModelConfig)
        for name in pattern:
            options = mixer_options_type(name)
            if options is not None:
                self._options(keys, f"model.mixer_options.{name}", options)
            if len(MIXERS[name].directions) == 2:
                keys[f"model.mixer_options.{name}.causal"] = "causal" in directions
        self._options(keys, "task", task_class(task).options)
        self._options(keys, "train", TrainConfig)
        self._options(keys, "optimizer", OptimizerConfig)
        # A head goes with labels alone, and then always.
        head = {key: value for key, value in keys.items() if key.startswith("model.head.")}
        keys = {key: value for key, value in keys.items() if not key.startswith("model.head")}
        if task == "classify":
            keys |= {"model.head.num_labels": 3} | head
        keys["data.packing"] = "whole" if task == "classify" else rng.choice(("concat", "joined", "whole"))
        world_size = rng.choice(self.world_sizes)
        self._layout(keys, world_size)
        drawn = Drawn(world_size=world_size, keys=keys, cuts=self._cuts(keys))
        keys["train.global_batch_size"] = keys.get("train.micro_batch_size", 1) * _micro_batches(drawn)
        return drawn

    def _options(self, keys: dict[str, Any], prefix: str, kind: type[BaseModel]) -> None:
        for name, one in kind.model_fields.items():
            key = f"{prefix}.{name}"
            values = values_of(key, one.annotation, one.default)
            if key in keys or key in NOT_DRAWN or values is None or self.rng.random() > self.share:
                continue
            value = self.rng.choice(values)
            if isinstance(value, type):
                self._table(keys, key, value)
            else:
                keys[key] = value

    def _table(self, keys: dict[str, Any], prefix: str, kind: type[BaseModel]) -> None:
        """All fields of a table that is there or not."""
        for name, one in kind.model_fields.items():
            values = values_of(f"{prefix}.{name}", one.annotation, one.default)
            if values is not None:
                keys[f"{prefix}.{name}"] = self.rng.choice(values)

    def _layout(self, keys: dict[str, Any], world_size: int) -> None:
        rng, left = self.rng, world_size
        for axis in rng.sample(("tensor", "pipeline", "sequence", "data"), k=4):
            ranks = rng.choice([n for n in range(1, left + 1) if left % n == 0])
            left //= ranks
            if axis != "data":
                keys[f"parallel.{axis}"] = ranks
        if left > 1:
            # Not all were given out: to sequence ranks, which every model can have.
            keys["parallel.sequence"] *= left if rng.random() < 0.5 else 1
        if keys["parallel.pipeline"] > 1 and rng.random() < 0.3:
            keys["parallel.virtual_stages"] = 2
        if keys["parallel.sequence"] > 1:
            keys["parallel.exchange"] = rng.choice(("gather", "ring", "two_level"))
            if keys["parallel.exchange"] == "two_level":
                keys["parallel.ranks_per_node"] = rng.choice((1, 2, 4))

    def _cuts(self, keys: dict[str, Any]) -> tuple[int, ...] | None:
        """Uneven segments, some of them empty, where one tensor rank and one stage allow any length."""
        ranks = keys["parallel.sequence"]
        if ranks == 1 or keys["parallel.tensor"] * keys["parallel.pipeline"] > 1 or self.rng.random() > 0.4:
            return None
        return (0, *sorted(self.rng.choice((0, TOKENS, self.rng.randrange(TOKENS))) for _ in range(ranks - 1)))


def _micro_batches(drawn: Drawn) -> int:
    """Of a step, on all data ranks: the fewest, but two, that the layout divides."""
    axes = drawn.axes()
    return max(2, axes["data"] * (axes["pipeline"] if "parallel.virtual_stages" in drawn.keys else 1))


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as tables. Names of mixers have no dots."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        *path, name = key.split(".")
        table = found
        for part in path:
            table = table.setdefault(part, {})
        table[name] = value
    return found
