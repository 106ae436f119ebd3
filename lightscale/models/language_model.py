"""The language model: embedding, blocks of mixer and gated linear unit, tied output layer.

Blocks, their pipeline split and their activation recomputation are Megatron's; what stands in them is chosen here.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.config.schema import ModelConfig, Recompute
from lightscale.models.classes import mixer_class, shared_parts
from lightscale.models.layers.context import MixerState, SequenceContext
from lightscale.models.layers.linear import GatedLinearUnit, OutputLayer, leave_unset
from lightscale.models.layers.norms import RMSNorm, SRMSNorm
from lightscale.models.layers.shared_parts import EmbeddingPart, SharedPart, StagePart, for_all_layers
from lightscale.models.stages import layer_stages, megatron_layout
from lightscale.parallel.initialization import normal, set_initializer
from lightscale.parallel.megatron import (
    LanguageModule,
    MegatronModule,
    ModelType,
    ModuleSpec,
    ProcessGroupCollection,
    TransformerBlock,
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayer,
    TransformerLayerSubmodules,
    VocabParallelEmbedding,
    all_to_all_hp2sp,
    scatter_to_tensor_model_parallel_region,
)
from lightscale.parallel.mesh import Mesh
from lightscale.parallel.sequence import Replay

_NORMS = {"srmsnorm": SRMSNorm, "rmsnorm": RMSNorm}


def _identity(x: Tensor) -> Tensor:
    return x


_RECOMPUTE: dict[Recompute, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}

_ACTIVATIONS = {"none": _identity, "silu": F.silu}


def transformer_config(
    model: ModelConfig, mesh: Mesh, dtype: torch.dtype, *, recompute: Recompute = "none"
) -> TransformerConfig:
    """``model`` in Megatron's terms, on ``mesh``, with weights and activations of ``dtype``.

    ``recompute`` says which activations are computed again in the backward pass instead of kept: "none", "selective"
    (those of the gated linear units, about half of all) or "full" (all but the layers' inputs).
    """
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        ffn_hidden_size=model.intermediate_size,
        gated_linear_unit=True,
        activation_func=_ACTIVATIONS[model.glu_activation],
        layernorm_epsilon=model.norm_eps,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # Weights are drawn by their global names, the same on every layout (parallel.initialization).
        init_method=leave_unset,
        output_layer_init_method=leave_unset,
        embedding_init_method=leave_unset,
        bf16=dtype == torch.bfloat16,
        # Losses are summed and divided once by the number of valid tokens of the whole step, on every layout.
        calculate_per_token_loss=True,
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.pipeline,
        pipeline_model_parallel_layout=(
            megatron_layout(model.num_layers, mesh.pipeline * mesh.virtual_stages) if mesh.pipeline > 1 else None
        ),
        **_RECOMPUTE[recompute],
        # Megatron's "context" is our sequence axis; its "sequence parallel" splits activations over the tensor ranks.
        context_parallel_size=mesh.sequence,
        sequence_parallel=mesh.tensor > 1,
        # NCCL runs sends and receives one after the other: both neighbours' must go out together, or each waits.
        batch_p2p_comm=mesh.device.type == "cuda",
        deterministic_mode=mesh.device.type == "cpu",
    )


def _residual_sum(training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
    """Megatron's hook between a sublayer and the residual stream: a plain sum (no bias, no dropout)."""

    def add(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        return residual + output[0]

    return add


def _layer_spec(model: ModelConfig, mixer: str) -> ModuleSpec:
    norm = _NORMS[model.norm]
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(module=mixer_class(mixer), params={"model": model}),
            self_attn_bda=_residual_sum,
            pre_mlp_layernorm=norm,
            # A class, not a spec of one, of which Megatron would warn that it does not know it.
            mlp=GatedLinearUnit,
            mlp_bda=_residual_sum,
        ),
    )


class Embedding(MegatronModule):
    """Token ids (b, n) to activations (n / tensor, b, d): word embeddings, then the parts in the order given."""

    def __init__(
        self,
        config: TransformerConfig,
        model: ModelConfig,
        groups: ProcessGroupCollection,
        parts: Sequence[type[EmbeddingPart]],
    ) -> None:
        super().__init__(config)
        self.group: dist.ProcessGroup = groups.tp
        self.parts = _added(self, parts, config, model, groups, stage=0)
        self.word_embeddings = VocabParallelEmbedding(
            model.vocab_size,
            model.hidden_size,
            init_method=leave_unset,
            # Parts see all tokens of a segment: tensor ranks share the tokens out behind the last one.
            reduce_scatter_embeddings=config.sequence_parallel and not parts,
            config=config,
            tp_group=self.group,
        )

    def forward(self, tokens: Tensor, context: SequenceContext) -> Tensor:
        """tokens: (b, n) int64."""
        embedded: Tensor = self.word_embeddings(tokens)
        if not self.parts and self.config.sequence_parallel:
            return embedded
        hidden = embedded.transpose(0, 1).contiguous()
        split = bool(self.parts) and self.config.sequence_parallel
        # All tokens of some channels, then some tokens of all channels.
        channels = scatter_to_tensor_model_parallel_region(hidden, group=self.group) if split else hidden
        for name in self.parts:
            channels = self.get_submodule(name)(channels, context)
        if not split:
            return channels
        n, b, _ = channels.shape
        tokens_of: Tensor = all_to_all_hp2sp(channels.flatten(0, 1), group=self.group)
        return tokens_of.view(n // self.group.size(), b, -1)


def _added(
    module: nn.Module,
    parts: Iterable[type[SharedPart]],
    config: TransformerConfig,
    model: ModelConfig,
    groups: ProcessGroupCollection,
    *,
    stage: int,
) -> tuple[str, ...]:
    """Build ``parts`` as submodules of ``module`` under their own names, which begin the names of their parameters."""
    for part in parts:
        assert not hasattr(module, part.spec.name), f"{type(module).__name__} has a {part.spec.name} of its own"
        module.add_module(part.spec.name, part(config, model, groups, stage=stage))
    return tuple(part.spec.name for part in parts)


class LanguageModel(LanguageModule):
    """The part of the model that this pipeline stage holds.

    Args:
        config: see ``transformer_config``.
        model: the shape of the whole model.
        vocab_size: ids in use; the rows of ``model.vocab_size`` beyond them are padding and take no probability.
        mesh: where this process stands.
        pre_process, post_process: whether this stage holds the embedding, and the output layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        model: ModelConfig,
        *,
        vocab_size: int,
        mesh: Mesh,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
    ) -> None:
        groups: ProcessGroupCollection = mesh.groups
        super().__init__(config, groups)
        self.model, self.vocab_size = model, vocab_size
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.share_embeddings_and_output_weights = True
        self.model_type = ModelType.encoder_or_decoder
        self.exchange = mesh.exchange
        # Layers whose activations are all recomputed would exchange their states twice: the second time they take what
        # came in the first time.
        self.replay = Replay() if config.recompute_granularity == "full" else None

        # Stages are counted as they follow in the model: virtual stages go round the pipeline ranks.
        parts, stage = shared_parts(model), (vp_stage or 0) * mesh.pipeline + groups.pp.rank()
        of_stages = [part for part in parts if issubclass(part, StagePart)]
        self.stage_parts = _added(self, of_stages, config, model, groups, stage=stage)
        if pre_process:
            of_embedding = [part for part in parts if issubclass(part, EmbeddingPart)]
            self.embedding = Embedding(config, model, groups, of_embedding)
        own = layer_stages(model.num_layers, mesh.pipeline * mesh.virtual_stages)[stage]
        mixers = model.layers[own.start : own.stop]
        self.decoder = TransformerBlock(
            config=config,
            spec=TransformerBlockSubmodules(
                layer_specs=[_layer_spec(model, mixer) for mixer in mixers],
                layer_norm=_NORMS[model.norm],
            ),
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        if post_process:
            self.output_layer = OutputLayer(
                model.hidden_size,
                model.vocab_size,
                config=config,
                init_method=leave_unset,
                bias=False,
                skip_weight_param_allocation=pre_process,
                tp_group=groups.tp,
            )
        self._name_initializers()
        if pre_process or post_process:
            self.setup_embeddings_and_output_layer()

    def _name_initializers(self) -> None:
        """Initial distributions of the weights that Megatron's own modules hold."""
        std = self.model.init_std
        if self.pre_process:
            set_initializer(self.embedding.word_embeddings.weight, normal(std))
        elif self.post_process:
            set_initializer(self.output_layer.weight, normal(std))
        for layer in self.decoder.layers:
            set_initializer(layer.mlp.linear_fc1.weight, normal(std))
            set_initializer(layer.mlp.linear_fc2.weight, normal(std / math.sqrt(2 * self.model.num_layers)))

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Called by Megatron's schedules with the activations of the stage before: one of (n / tensor, b, d)."""
        self.decoder.set_input_tensor(input_tensor[0])

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        labels: Tensor | None = None,
        *,
        lengths: Sequence[int] | None = None,
        states: dict[str, MixerState] | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """One pass over this rank's segment of the rows.

        Args:
            tokens, positions: (b, n) int64; see ``SequenceContext``.
            labels: (b, n) int64, the next token of each.
            lengths: n of every sequence rank where they differ, which needs tensor = pipeline = 1.
            states: in generation, the states of all layers, read and replaced.
            last_only: without labels and tensor parallelism, give the logits of the last token only: (b, 1, V).

        Returns:
            Activations (n / tensor, b, d) on all but the last stage; there the loss per token (b, n), or without
            labels the logits (b, n, V / tensor), padding rows included.
        """
        context = SequenceContext.of(
            positions,
            exchange=self.exchange,
            # Nothing is recomputed in evaluation: states that it left there would be taken by the next training step.
            replay=self.replay if self.training else None,
            lengths=lengths,
            states=states,
        )
        hidden = self.embedding(tokens, context) if self.pre_process else self.decoder.input_tensor
        shared: dict[str, Tensor] = {}
        for name in self.stage_parts:
            hidden, shared[name] = for_all_layers(hidden, self.get_submodule(name)(context))
        context = replace(context, shared=shared)
        if not self.pre_process:
            # Megatron's block takes its input from where the schedule left it, not from its argument.
            self.decoder.set_input_tensor(hidden)
        hidden = self.decoder(hidden_states=hidden, attention_mask=None, packed_seq_params=context)
        if not self.post_process:
            return hidden
        # Before the output layer: the logits of all tokens of a prompt would be by far the largest tensor.
        if last_only:
            hidden = hidden[-1:]
        # A stage that has the embedding too uses its weight; a last stage of several has a copy in its output layer.
        weight = self.shared_embedding_or_output_weight() if self.pre_process else None
        labels = None if labels is None else labels.transpose(0, 1)
        output, _ = self.output_layer(hidden, weight, labels=labels, vocab_size=self.vocab_size)
        return output.transpose(0, 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description for checkpoints: one entry per layer, because layers may hold different mixers."""
        return super().sharded_state_dict(prefix, sharded_offsets, {**(metadata or {}), "non_homogeneous_layers": True})


def language_model_chunks(
    config: TransformerConfig, model: ModelConfig, *, vocab_size: int, mesh: Mesh
) -> list[LanguageModel]:
    """What this pipeline rank holds of the model, a module per virtual stage; arguments as ``LanguageModel``."""
    first, last = mesh.groups.pp.rank() == 0, mesh.is_last_stage
    final = mesh.virtual_stages - 1
    return [
        LanguageModel(
            config,
            model,
            vocab_size=vocab_size,
            mesh=mesh,
            pre_process=first and number == 0,
            post_process=last and number == final,
            vp_stage=number if mesh.virtual_stages > 1 else None,
        )
        for number in range(mesh.virtual_stages)
    ]
