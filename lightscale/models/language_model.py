"""The language model: embedding, blocks of mixer and gated linear unit, output layer, which is the embedding if tied.

Blocks, their pipeline split and their activation recomputation are Megatron's; this module chooses their content.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.config.model import ModelConfig, Pooling
from lightscale.config.schema import Recompute
from lightscale.kernels.attention import DocumentStarts
from lightscale.kernels.cross_entropy.divergence import SoftTargets
from lightscale.models.accounting import norm_placement, padded_vocab_size
from lightscale.models.classes import mixer_class, shared_parts
from lightscale.models.diffusion.head import DiffusionHead
from lightscale.models.diffusion.layer import DiffusionLayer
from lightscale.models.layers.blocks import DecoderLayer, DecoderLayers
from lightscale.models.layers.context import MixerState, SequenceContext
from lightscale.models.layers.label_head import LabelHead, label_losses, pooled_documents
from lightscale.models.layers.linear import (
    ACTIVATIONS,
    GatedLinearUnit,
    LinearUnit,
    OutputLayer,
    leave_unset,
    soft_capped,
    tokens_of_channels,
)
from lightscale.models.layers.norms import PostNorm, norm_class
from lightscale.models.layers.patches import PatchEmbedding
from lightscale.models.layers.shared_parts import EmbeddingPart, Shared, SharedPart, StagePart, for_all_layers
from lightscale.models.layers.transfer import LayerTarget, transfer_losses
from lightscale.models.stages import layer_stages, megatron_layout
from lightscale.parallel.cross_entropy import vocab_parallel_log_probability
from lightscale.parallel.initialization import normal, set_initializer, zeros
from lightscale.parallel.megatron import (
    LanguageModule,
    MegatronModule,
    ModelType,
    ModuleSpec,
    ProcessGroupCollection,
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayerSubmodules,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from lightscale.parallel.mesh import Mesh
from lightscale.parallel.sequence import Replay

# Tokens whose logits are held at once where the most probable ids are wanted.
_ROWS_AT_ONCE = 256


def _recompute(recompute: Recompute, num_layers: int) -> dict[str, Any]:
    """Megatron's options; its "block" recomputes the first so many layers of each stage, one by one."""
    if recompute == "none":
        return {}
    if recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": num_layers}


def transformer_config(
    model: ModelConfig,
    mesh: Mesh,
    dtype: torch.dtype,
    *,
    recompute: Recompute = "none",
    recompute_layers: int | None = None,
) -> TransformerConfig:
    """``model`` in Megatron's terms, on ``mesh``, with weights and activations of ``dtype``.

    ``recompute`` selects the activations that the backward pass recomputes: "none", "selective" (those of the gated
    linear units, about half of all) or "full" (all but the layers' inputs). ``recompute_layers``: number of layers of
    each stage, from the first; None: all.
    """
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        ffn_hidden_size=model.intermediate_size,
        gated_linear_unit=model.gated_linear_unit,
        activation_func=ACTIVATIONS[model.glu_activation],
        layernorm_epsilon=model.norm_eps,
        layernorm_zero_centered_gamma=model.zero_centered_norm,
        # Of the linear unit; mixers say themselves what of theirs has a bias.
        add_bias_linear=model.mlp_bias,
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
        **_recompute(recompute, recompute_layers or model.num_layers),
        # Megatron's "context" is our sequence axis; its "sequence parallel" splits activations over the tensor ranks.
        context_parallel_size=mesh.sequence,
        sequence_parallel=mesh.tensor > 1,
        # NCCL runs sends and receives one after the other: both neighbours' must go out together, or each waits.
        batch_p2p_comm=mesh.device.type == "cuda",
        # Each message otherwise ends with a wait for the whole device, against a race in versions of PyTorch long gone.
        batch_p2p_sync=False,
        deterministic_mode=mesh.device.type == "cpu",
    )


def _layer_spec(config: TransformerConfig, model: ModelConfig, mixer: str) -> ModuleSpec:
    norm = norm_class(model)
    placement = norm_placement(model, mixer)
    has_pre, has_post = placement != "post", placement != "pre"
    of_output = {"norm": norm, "config": config, "hidden_size": model.hidden_size, "eps": model.norm_eps}
    # What is absent is Megatron's own, which does nothing.
    parts: dict[str, Any] = {"self_attention": ModuleSpec(module=mixer_class(mixer), params={"model": model})}
    if has_post:
        parts["self_attn_bda"] = ModuleSpec(module=PostNorm, params=of_output)
    if has_pre:
        parts["input_layernorm"] = norm
    if model.intermediate_size:
        # A class, not a spec of one, of which Megatron would warn that it does not know it.
        parts["mlp"] = GatedLinearUnit if model.gated_linear_unit else LinearUnit
        if has_post:
            parts["mlp_bda"] = ModuleSpec(module=PostNorm, params=of_output)
        if has_pre:
            parts["pre_mlp_layernorm"] = norm
    layer = DecoderLayer if model.diffusion is None else DiffusionLayer
    return ModuleSpec(module=layer, submodules=TransformerLayerSubmodules(**parts))


class Embedding(MegatronModule):
    """Token ids (b, n), or patches of images (b, n, p), to activations (n / tensor, b, d).

    Word embeddings or the linear map of patches, then the parts in the order given.
    """

    def __init__(
        self,
        config: TransformerConfig,
        model: ModelConfig,
        groups: ProcessGroupCollection,
        parts: Sequence[type[EmbeddingPart]],
    ) -> None:
        super().__init__(config)
        self.group: dist.ProcessGroup = groups.tp
        self.multiplier = model.input_multiplier
        self.parts = _added(self, parts, config, model, groups, stage=0)
        # None: images have no ids.
        self.word_embeddings: Any = None
        if model.patches is not None:
            return
        self.word_embeddings = VocabParallelEmbedding(
            padded_vocab_size(model.vocab_size, groups.tp.size()),
            model.hidden_size,
            init_method=leave_unset,
            # Parts see all tokens of a segment: tensor ranks share the tokens out behind the last one.
            reduce_scatter_embeddings=config.sequence_parallel and not parts,
            config=config,
            tp_group=self.group,
        )

    def forward(self, tokens: Tensor, context: SequenceContext) -> Tensor:
        """tokens: (b, n) int64, or (b, n, p) uint8."""
        if self.word_embeddings is None:
            # Their map comes first of the parts: it gives all tokens of some channels.
            return self._encoded(tokens, context, split=self.group.size() > 1)
        embedded: Tensor = self.word_embeddings(tokens)
        if self.multiplier != 1:
            # In the activations' dtype, as transformers has it: Gemma was trained with the rounded factor.
            embedded = embedded * embedded.new_full((), self.multiplier)
        if self.word_embeddings.reduce_scatter_embeddings:
            return embedded
        hidden = embedded.transpose(0, 1).contiguous()
        split = bool(self.parts) and self.group.size() > 1
        # All tokens of some channels, then some tokens of all channels.
        channels = scatter_to_tensor_model_parallel_region(hidden, group=self.group) if split else hidden
        return self._encoded(channels, context, split=split)

    def _encoded(self, channels: Tensor, context: SequenceContext, *, split: bool) -> Tensor:
        for name in self.parts:
            channels = self.get_submodule(name)(channels, context)
        if not split:
            return channels
        return tokens_of_channels(channels, self.group, share=self.config.sequence_parallel)


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
        assert not hasattr(module, part.spec.name), f"{type(module).__name__} has its own {part.spec.name}"
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
        self.adapted: list[Any] = []
        """Linear layers with adapters (``low_rank.py``)."""
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.share_embeddings_and_output_weights = model.ties_weights
        self.model_type = ModelType.encoder_or_decoder
        self.exchange, self.attention = mesh.exchange, mesh.attention
        # Stages are counted as they follow in the model: virtual stages go round the pipeline ranks.
        parts, stage = shared_parts(model), (vp_stage or 0) * mesh.pipeline + groups.pp.rank()
        of_stages = [part for part in parts if issubclass(part, StagePart)]
        self.stage_parts = _added(self, of_stages, config, model, groups, stage=stage)
        if pre_process:
            of_embedding = [part for part in parts if issubclass(part, EmbeddingPart)]
            # What makes activations of the inputs comes before what changes them.
            of_embedding.sort(key=lambda part: part is not PatchEmbedding)
            self.embedding = Embedding(config, model, groups, of_embedding)
        own = layer_stages(model.num_layers, mesh.pipeline * mesh.virtual_stages)[stage]
        mixers = model.layers[own.start : own.stop]
        self.decoder = DecoderLayers(
            config=config,
            spec=TransformerBlockSubmodules(
                layer_specs=[_layer_spec(config, model, mixer) for mixer in mixers],
                layer_norm=norm_class(model),
            ),
            pre_process=pre_process,
            post_process=post_process,
            post_layer_norm=model.final_norm,
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        self.replay = self._replay(config)
        if post_process:
            self.output_layer = self._output_layer(config)
        self._name_initializers()
        # Megatron marks and ties the weights of ids, which images have none of.
        if (pre_process or post_process) and model.patches is None:
            self.setup_embeddings_and_output_layer()

    def _output_layer(self, config: TransformerConfig) -> OutputLayer | LabelHead | DiffusionHead:
        model, group = self.model, self.pg_collection.tp
        if model.diffusion is not None:
            return DiffusionHead(config, model, group)
        if model.head is not None:
            return LabelHead(config, model.head, model.hidden_size, model.init_std, group)
        return OutputLayer(
            model.hidden_size,
            padded_vocab_size(model.vocab_size, group.size()),
            config=config,
            init_method=leave_unset,
            bias=False,
            skip_weight_param_allocation=self.pre_process and model.tie_word_embeddings,
            cap=model.final_logit_cap,
            tp_group=group,
        )

    def _replay(self, config: TransformerConfig) -> Replay | None:
        # Layers whose activations are all recomputed would exchange their states twice: the second time they take what
        # came in the first time.
        if config.recompute_granularity != "full":
            return None
        recomputed = self.decoder.layers[: config.recompute_num_layers]
        return Replay(layer.self_attention.state_name for layer in recomputed)

    def _name_initializers(self) -> None:
        """Initial distributions of the weights that Megatron's own modules hold."""
        std = self.model.init_std
        embedding_std = self.model.embedding_std or std
        rows = self.model.vocab_size
        if self.pre_process and self.embedding.word_embeddings is not None:
            set_initializer(self.embedding.word_embeddings.weight, normal(embedding_std), rows=rows)
        has_ids = self.model.diffusion is None and self.model.head is None
        if self.post_process and has_ids and self.output_layer.weight is not None:
            # A tied one that is here, on the last of several stages, is a copy of the embedding.
            tied = self.share_embeddings_and_output_weights
            set_initializer(self.output_layer.weight, normal(embedding_std if tied else std), rows=rows)
        for layer in self.decoder.layers if self.model.intermediate_size else ():
            set_initializer(layer.mlp.linear_fc1.weight, normal(std))
            set_initializer(layer.mlp.linear_fc2.weight, normal(self.model.output_std))
            if self.model.mlp_bias:
                set_initializer(layer.mlp.linear_fc1.bias, zeros)
                set_initializer(layer.mlp.linear_fc2.bias, zeros)

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Called by Megatron's schedules with the activations of the stage before: one of (n / tensor, b, d)."""
        self.decoder.set_input_tensor(input_tensor[0])

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        labels: Tensor | None = None,
        *,
        loss_mask: Tensor | None = None,
        document_starts: tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None] | None = None,
        cu_seqlens: Tensor | None = None,
        lengths: Sequence[int] | None = None,
        states: dict[str, MixerState] | None = None,
        last_only: bool = False,
        hidden_only: bool = False,
        top: Sequence[int] = (),
        targets: SoftTargets | None = None,
        transfer: Sequence[LayerTarget] | None = None,
        z_loss: float = 0.0,
        soft_labels: Tensor | None = None,
        conditions: Tensor | None = None,
        wanted: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """One pass over this rank's segment of the rows.

        Args:
            tokens, positions: (b, n) int64; see ``SequenceContext``. With ``model.patches`` tokens are
                (b, n, p) uint8, or fp32 of noised ones.
            labels: (b, n) int64, the next token of each, or another label.
            loss_mask: (b, n), factor of each loss; None for 1. It is an argument, because the gradients are computed
                together with the losses.
            document_starts: where documents start in the rows (``DocumentStarts``); None: read from ``positions``, for
                which the host waits on a GPU.
            cu_seqlens: instead of them, boundaries of documents on the device, which the host does not read; see
                ``boundaries_of_tokens``.
            lengths: n of every sequence rank where they differ, which needs tensor = pipeline = 1.
            states: in generation, the states of all layers, read and replaced.
            last_only: without labels, and with every token on this rank (``whole_tokens``), give the logits of the last
                token only: (b, 1, V / tensor).
            top: with labels and a mask, (1 + k, b, n): the losses, and for each of these k numbers 1 where the label is
                among the so many most probable ones.
            hidden_only: return the input of the output layer on the last stage too; ``log_probability`` continues
                from it with the requested tokens.
            targets: with labels, another model's distributions, (n / tensor, b, d') and (V / tensor, d'): the losses
                are the divergence from them.
            transfer: what mixers of this model, which must all be on this stage, are to give; the losses are their
                errors (``transfer_losses``), and no other part of the model is computed.
            z_loss: with labels of ids, factor of log² Z in the losses (``linear_cross_entropy``); not 0: the losses,
                and this term of them, (b, n) without a gradient.
            soft_labels: with ``model.head``, (b, classes): distributions in place of the labels.
            conditions: with ``model.diffusion``, (b, 2): timestep and class of each row.
            wanted: with ``model.diffusion``, (b, n, p): what is to be predicted; None: give predictions, (b, n, p).
            places: (b,) int64, what tells each row from all others of a run; adapters with dropout need it in training.

        Returns:
            Activations (n / tensor, b, d) on all but the last stage; there the loss per token (b, n), or without
            labels the logits (b, n, V / tensor), padding rows included. With ``model.head`` the loss of a document
            stands at its last token.
        """
        context = SequenceContext.of(
            positions,
            starts=None if document_starts is None else DocumentStarts(*document_starts),
            cu_seqlens=cu_seqlens,
            exchange=self.exchange,
            across=self.attention,
            # Nothing is recomputed in evaluation: states that it left there would be taken by the next training step.
            replay=self.replay if self.training else None,
            lengths=lengths,
            states=states,
            grid=self.model.grid,
            places=places,
        )
        if conditions is not None:
            context = replace(context, conditions=conditions)
        if transfer is not None:
            # Nothing is recomputed here: states that were kept for it would be taken by the next pass.
            parts = {name: self.get_submodule(name)(context) for name in self.stage_parts}
            of_mixers = replace(context, shared=parts, replay=None)
            losses = transfer_losses(self.decoder.layers, transfer, of_mixers, self.pg_collection.tp).transpose(0, 1)
            return losses if loss_mask is None else losses * loss_mask
        hidden = self.embedding(tokens, context) if self.pre_process else self.decoder.input_tensor
        shared: dict[str, Shared] = {}
        for name in self.stage_parts:
            hidden, shared[name] = for_all_layers(hidden, self.get_submodule(name)(context))
        context = replace(context, shared=shared)
        if not self.pre_process:
            # Megatron's block takes its input from where the schedule left it, not from its argument.
            self.decoder.set_input_tensor(hidden)
        hidden = self.decoder(hidden_states=hidden, attention_mask=None, packed_seq_params=context)
        if not self.post_process or hidden_only:
            return hidden
        if isinstance(self.output_layer, DiffusionHead):
            output = self.output_layer(hidden, context, wanted)
            return output if wanted is None or loss_mask is None else output * loss_mask
        if isinstance(self.output_layer, LabelHead):
            assert labels is not None, "labels of documents stand at their last tokens"
            logits, last = self.output_layer(hidden, context)
            return label_losses(logits, last, labels, loss_mask, top=top, soft_labels=soft_labels)
        if top:
            assert tuple(top) == (1,), "of ids only the most probable one is compared"
            assert labels is not None
            assert loss_mask is not None
            return self._scores(hidden, labels, loss_mask)
        # Before the output layer: the logits of all tokens of a prompt would be by far the largest tensor.
        if last_only:
            hidden = hidden[-1:]
        # Of tied ones a stage that has the embedding too uses its weight, and a last stage of several a copy in its
        # output layer.
        weight = None if self.output_layer.weight is not None else self.embedding.word_embeddings.weight
        labels, loss_mask = (None if x is None else x.transpose(0, 1) for x in (labels, loss_mask))
        output, terms = self.output_layer(
            hidden,
            weight,
            labels=labels,
            loss_mask=loss_mask,
            targets=targets,
            z_loss=z_loss,
            vocab_size=self.vocab_size,
        )
        # Apart: the head keeps the gradients of a plain sum, as which it would not know that of a stacked result.
        return (output.transpose(0, 1), terms.transpose(0, 1)) if z_loss else output.transpose(0, 1)

    def _scores(self, hidden: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
        """See ``top``; no logits but those of masked tokens are computed. fp64."""
        chosen = loss_mask.flatten().nonzero().squeeze(1)
        scores = torch.zeros(2, labels.numel(), dtype=torch.float64, device=hidden.device)
        # Tensor ranks have the same tokens: they go without together.
        if len(chosen):
            log_probability, is_best = self.log_probability(hidden, chosen, labels.flatten()[chosen])
            scores[:, chosen] = torch.stack([-log_probability.double(), is_best.double()])
        return scores.view(2, *labels.shape)

    def log_probability(self, hidden: Tensor, chosen: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """log softmax(logits)[label] of ``chosen`` tokens, and whether each label is the most probable id.

        On the last stage, in evaluation; no logits but those of these tokens are computed, and few at a time.

        Args:
            hidden: (n / tensor, b, d), the result of ``forward`` with ``hidden_only``.
            chosen: (m,) int64, indices into the b·n tokens, row after row; the same on all tensor ranks.
            labels: (m,) int64 ids.

        Returns:
            (m,) fp32 (fp64 of fp64 models), and (m,) bool.
        """
        group = self.pg_collection.tp
        return vocab_parallel_log_probability(
            hidden,
            self.output_rows,
            chosen,
            labels,
            vocab_size=self.vocab_size,
            group=group,
            cap=self.model.final_logit_cap,
        )

    def states_of(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """(m, d): the states of ``chosen`` tokens, equal on all tensor ranks; arguments as of ``log_probability``."""
        group = self.pg_collection.tp
        if group.size() > 1:
            hidden = gather_from_sequence_parallel_region(hidden.contiguous(), group=group)
        n, b = hidden.shape[:2]
        # Tokens come first in activations, rows in indices.
        return hidden.reshape(n * b, -1)[chosen % n * b + chosen // n]

    @property
    def output_rows(self) -> Tensor:
        """(V / tensor, d), this rank's rows of the output layer on the last stage; the embedding's if tied."""
        own: Tensor | None = self.output_layer.weight
        return self.embedding.word_embeddings.weight if own is None else own

    def most_probable(self, hidden: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The ``count`` most probable ids of ``chosen`` tokens, most probable first, equal on all tensor ranks.

        On the last stage, in evaluation; arguments as of ``log_probability``.

        Returns:
            (m, count) log-probabilities, fp32 (fp64 of fp64 models), and (m, count) ids.
        """
        rows = self.states_of(hidden, chosen)
        parts = [self._best(some, self.output_rows, count) for some in rows.split(_ROWS_AT_ONCE)]
        values, ids = (torch.cat(one) for one in zip(*parts, strict=True))
        return values, ids

    def _best(self, rows: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """rows: (m, d) -> (m, count) log-probabilities and ids."""
        logits = soft_capped(F.linear(rows, weight), self.model.final_logit_cap)
        if self.pg_collection.tp.size() > 1:
            logits = gather_from_tensor_model_parallel_region(logits, group=self.pg_collection.tp)
        logits = logits[:, : self.vocab_size].to(torch.promote_types(logits.dtype, torch.float32))
        found = torch.log_softmax(logits, dim=-1).topk(count)
        return found.values, found.indices

    def label_log_probability(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """log softmax of the label head's logits, (m, labels), and which token each of the m documents ends at.

        hidden: as of ``log_probability``; positions: (b, n). See ``LabelHead``.
        """
        assert isinstance(self.output_layer, LabelHead), "model.head"
        logits, last = self.output_layer(hidden, SequenceContext.of(positions, exchange=self.exchange))
        return torch.log_softmax(logits, dim=-1), last

    def pooled(self, hidden: Tensor, positions: Tensor, pooling: Pooling) -> tuple[Tensor, Tensor]:
        """A vector of each document, (m, d), and which token it ends at; see ``pooled_documents``."""
        context = SequenceContext.of(positions, exchange=self.exchange)
        return pooled_documents(hidden, context, pooling, self.pg_collection.tp)

    @contextmanager
    def whole_tokens(self) -> Iterator[None]:
        """Within, every tensor rank has all tokens between the layers; for passes without gradients.

        Outside of it, tensor ranks share the tokens of a row and must divide their number, so that a row has several.
        """
        # What Megatron's modules read at each call; the configuration is one object for all of them.
        objects = (self.config, *self.modules()) if self.config.sequence_parallel else ()
        names = ("sequence_parallel", "reduce_scatter_embeddings")
        # Not by getattr, which modules answer slowly for what they lack: this is done for each token.
        shared = [(vars(one), name) for one in objects for name in names if vars(one).get(name)]
        for attributes, name in shared:
            attributes[name] = False
        try:
            yield
        finally:
            for attributes, name in shared:
                attributes[name] = True

    @torch.inference_mode()
    def next_logits(self, tokens: Tensor, positions: Tensor, states: dict[str, MixerState]) -> Tensor:
        """The logits of the token after each row, (b, vocab_size), equal on all tensor ranks; without padding rows.

        Any number of tokens goes, whatever the tensor ranks; all layers must be on this rank.

        Args:
            tokens, positions: (b, n) int64.
            states: of all layers, read and replaced.
        """
        with self.whole_tokens():
            logits = self(tokens, positions, states=states, last_only=True)[:, -1]
        if self.pg_collection.tp.size() > 1:
            logits = gather_from_tensor_model_parallel_region(logits, group=self.pg_collection.tp)
        found: Tensor = logits[:, : self.vocab_size]
        return found

    def give_room(self, states: dict[str, MixerState], lengths: Sequence[int], tokens: int) -> None:
        """Let ``states``, of rows whose documents end together, take ``tokens`` more in; see ``Mixer.with_room``."""
        for layer in self.decoder.layers:
            mixer = layer.self_attention
            if mixer.state_name in states:
                states[mixer.state_name] = mixer.with_room(states[mixer.state_name], lengths, tokens)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description for checkpoints: one entry per layer, because layers may hold different mixers."""
        return super().sharded_state_dict(prefix, sharded_offsets, {**(metadata or {}), "non_homogeneous_layers": True})


def language_model_chunks(
    config: TransformerConfig, model: ModelConfig, *, vocab_size: int, mesh: Mesh
) -> list[LanguageModel]:
    """This pipeline rank's part of the model, a module per virtual stage; arguments as ``LanguageModel``."""
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
