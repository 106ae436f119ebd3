"""A run's adapters as PEFT's files: adapter_config.json and adapter_model.safetensors, for the exported base.

Modules are those of the base's export for transformers. One that holds the rows of several linear maps has one adapter
for all of them, of the sum of their ranks and with the same scale (``rank_pattern``, ``alpha_pattern``).
"""

import json
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.exchange.files import export_config
from lightscale.exchange.files.merged_tensors import MergedTensors, joined
from lightscale.exchange.files.own_classes import whole_parts, whole_shapes
from lightscale.exchange.files.safetensors_files import Written
from lightscale.exchange.files.weights import TensorRows
from lightscale.exchange.trained import TrainedRun

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
_TASKS = {"causal": "CAUSAL_LM", "classify": "SEQ_CLS"}
_NOT_ADAPTED = ("embed_tokens.weight", "lm_head.weight", "score.weight", "conv.weight", "conv1d.weight", "table")


def peft_adapter(run: TrainedRun, dtype: torch.dtype, base: str | None) -> tuple[str, list[Written]]:
    """The text of adapter_config.json, and the tensors of adapter_model.safetensors.

    Args:
        run: with adapters.
        dtype: of the tensors.
        base: path or name of the exported base, for the configuration; None: unset.
    """
    tensors, adapter = run.tensors, run.chosen.config.adapters
    if adapter is None or not isinstance(tensors, MergedTensors):
        raise UserError(f"--adapter: {run.chosen.directory.path} has no [adapter]; remove --adapter")
    modules = _modules(run, tensors)
    ranks = {name: own["lora_A"].size(0) for name, own in modules.items() if own["lora_A"].size(0) != adapter.r}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": _TASKS.get(run.shape.task),
        "base_model_name_or_path": base,
        "r": adapter.r,
        "lora_alpha": adapter.lora_alpha,
        "target_modules": _targets(modules, _linear_modules(run)),
        "rank_pattern": ranks,
        "alpha_pattern": {name: tensors.scale * rank for name, rank in ranks.items()},
        "use_dora": adapter.name == "dora",
        "lora_dropout": adapter.lora_dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    written = [
        Written(name=f"base_model.model.{module}.{_KEYS[key]}", dtype=dtype, shape=tuple(one.shape), blocks=[one])
        for module, own in modules.items()
        for key, one in own.items()
    ]
    return json.dumps(config, indent=2) + "\n", written


_KEYS = {
    "lora_A": "lora_A.weight",
    "lora_B": "lora_B.weight",
    "lora_magnitude_vector": "lora_magnitude_vector",
}
"""PEFT's names of the tensors of a module."""


def _modules(run: TrainedRun, tensors: MergedTensors) -> dict[str, dict[str, Tensor]]:
    """The tensors of each adapted module of the export, by its name."""
    of_rows = {(one.weight, one.ranges): one for maps in tensors.maps.values() for one in maps}
    held: dict[str, dict[str, Tensor]] = {}
    for name, rows in run.rows.items():
        ranges = rows.ranges or ((0, tensors.shape(TensorRows(key=rows.key))[0]),)
        if (linear := of_rows.pop((rows.key, ranges), None)) is not None:
            held[name] = tensors.matrices(linear)
    if of_rows:
        names = ", ".join(one.name for one in of_rows.values())
        raise UserError(f"--adapter: exports have no matrix for {names}; use --merge")
    places = export_config.written_places(run.shape)
    sizes = {name: tensors.shape(rows) for name, rows in run.rows.items()}
    found = {}
    for key, parts in whole_parts(places, sizes).items():
        adapted = [(part.rows, part.first, held[part.name]) for part in parts if part.name in held]
        if not adapted:
            continue
        norms = [tensors.norms(run.rows[part.name].part(part.first, len(part.rows))) for part in parts]
        found[key.removesuffix(".weight")] = joined(adapted, torch.cat(norms))
    return found


def _linear_modules(run: TrainedRun) -> list[str]:
    """Names of all linear layers of the export that PEFT could find by a part of their names."""
    places = export_config.written_places(run.shape)
    sizes = {name: run.tensors.shape(rows) for name, rows in run.rows.items()}
    return [
        key.removesuffix(".weight")
        for key, shape in whole_shapes(places, sizes).items()
        if len(shape) == 2 and key.endswith(".weight") and not key.endswith(_NOT_ADAPTED)
    ]


def _targets(modules: Collection[str], linear: Iterable[str]) -> list[str]:
    """``modules`` as PEFT looks for them: by the last part of their names where no other layer ends with it."""
    others = {name.rpartition(".")[2] for name in linear if name not in modules}
    return list(dict.fromkeys(end if (end := name.rpartition(".")[2]) not in others else name for name in modules))
