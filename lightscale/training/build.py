"""From a configuration to a model on a mesh, for training and for everything that reads checkpoints."""

from collections.abc import Collection, Iterable
from typing import Any

import torch

from lightscale.config.schema import RunConfig, TrainConfig
from lightscale.kernels.common.backends import set_default_backend
from lightscale.models.fp8 import fp8_weights
from lightscale.models.language_model import LanguageModel, language_model_chunks, transformer_config
from lightscale.models.layers.linear import ColumnParallel, RowParallel
from lightscale.models.low_rank import add_adapters
from lightscale.models.mup import mup_scales
from lightscale.parallel.engine import Engine, Objective, Teaching
from lightscale.parallel.initialization import draw_weights, named_parameters
from lightscale.parallel.mesh import Mesh
from lightscale.training.health.memory import keep_freed_memory
from lightscale.training.optimizer.registry import optimizer_spec

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def weight_dtype(train: TrainConfig, device: torch.device) -> torch.dtype:
    """The number format of weights and activations: ``auto`` is fp32 on CPUs and bf16 on GPUs."""
    if train.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _DTYPES[train.precision]


def build_engine(
    config: RunConfig,
    mesh: Mesh,
    *,
    vocab_size: int,
    trainable: bool,
    num_sources: int = 0,
    dtype: torch.dtype | None = None,
    teach: Teaching | None = None,
    trained_mixers: Collection[int] | None = None,
    objective: Objective | None = None,
) -> Engine:
    """The model of ``config`` with its initial weights, on ``mesh``; those that adapters freeze are still to be read.

    Args:
        vocab_size: ids that the tokenizer uses; the rows of ``model.vocab_size`` beyond take no probability.
        trainable: with gradients and an optimizer; False for evaluation and generation.
        num_sources: of the data; their losses are summed apart.
        dtype: of weights and activations; None: as configured. An engine in fp64, for comparisons, has
            gradients and no optimizer.
        teach, objective: see ``Engine``.
        trained_mixers: layers whose mixers alone are trained, with the model's shared parts; None: all weights. The
            loss must give the other weights no gradient.
    """
    set_default_backend(config.train.kernels)
    if trainable and mesh.device.type == "cpu":
        keep_freed_memory()
    model = config.model
    dtype = dtype or weight_dtype(config.train, mesh.device)
    megatron = transformer_config(
        model, mesh, dtype, recompute=config.train.recompute, recompute_layers=config.train.recompute_layers
    )
    chunks = language_model_chunks(megatron, model, vocab_size=vocab_size, mesh=mesh)
    if config.adapters is not None:
        add_adapters(chunks, config.adapters, seed=config.train.seed)
    if trainable and config.train.fp8 != "none":
        cast_to_fp8(chunks)
    _draw(chunks, config.train.seed, mesh)
    if trained_mixers is not None:
        _hold_others(chunks, trained_mixers)
    return Engine(
        chunks,
        megatron,
        mesh,
        optimizer=optimizer_spec(config) if trainable else None,
        # Losses of an objective have no position.
        position_buckets=config.metrics.position_buckets if objective is None else 1,
        num_sources=num_sources,
        teach=teach,
        objective=objective,
        z_loss=config.train.z_loss_multiplier,
        # A bucket with weights that get no gradient would be waited for in vain.
        overlap=None if trained_mixers is None else False,
    )


def start_again(engine: Engine, seed: int) -> None:
    """Reset weights and optimizer of ``engine`` to those of ``build_engine``."""
    _draw(engine.chunks, seed, engine.mesh)
    engine.reset_optimizer()


def cast_to_fp8(chunks: Iterable[LanguageModel]) -> None:
    """Let the linear maps of ``fp8_weights`` compute their products in 8 bits."""
    for chunk in chunks:
        chosen, names = fp8_weights(chunk.model), {one: name for name, one in named_parameters(chunk)}
        for module in chunk.modules():
            if isinstance(module, (ColumnParallel, RowParallel)) and names[module.weight] in chosen:
                module.casts_to_fp8 = True


def _hold_others(chunks: Iterable[LanguageModel], layers: Collection[int]) -> None:
    """Keep all weights but those of the mixers of ``layers`` and of shared parts as they are.

    A weight without a gradient changes by weight decay alone. It stays in the optimizer, so that checkpoints and
    exports are those of any run.
    """
    for chunk in chunks:
        modules = [chunk.decoder.layers[layer].self_attention for layer in layers]
        modules += [chunk.get_submodule(name) for name in chunk.stage_parts]
        trained = {parameter for module in modules for parameter in module.parameters()}
        for parameter in chunk.parameters():
            if parameter not in trained:
                # And in no parameter group, which may have a weight decay of its own.
                parameter.no_weight_decay = parameter.keeps_its_values = True


def _draw(chunks: Iterable[Any], seed: int, mesh: Mesh) -> None:
    for chunk in chunks:
        factors = {name: scale.std for name, scale in mup_scales(chunk.model).items()}
        draw_weights(chunk, seed=seed, tensor_rank=mesh.groups.tp.rank(), tensor_size=mesh.tensor, factors=factors)
