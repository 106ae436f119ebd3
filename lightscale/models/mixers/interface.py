"""Interface of all token mixers; a new architecture implements only this."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightscale.config.model import ModelConfig
from lightscale.kernels.heads import Heads
from lightscale.models.layers.context import MixerState, SequenceContext
from lightscale.models.layers.linear import ReplicatedLinear, column_parallel, row_parallel, tokens_of_channels
from lightscale.models.layers.norms import gated_norm_split
from lightscale.models.layers.projections import Projection, project
from lightscale.models.specs.gated import gate_rank, gated_options, has_full_rank_gate
from lightscale.parallel.megatron import MegatronModule, ProcessGroupCollection, TransformerConfig


class Mixer(MegatronModule, ABC):
    """A map of (n / tensor, b, d), the ``self_attention`` of Megatron's transformer layer.

    Tokens see those of their document up to themselves, or all of it, as its ``MixerEntry`` declares. Heads are split
    over the tensor ranks, tokens over the sequence ranks. A mixer declares its parameters with initializers
    (``parallel.initialization``), takes states from the context and leaves them there. Facts that need no built mixer,
    such as the shapes of its parameters, are in its ``MixerSpec``.

    Args:
        config: the model's Megatron configuration.
        layer_number: number of the layer in the whole model, from 1 as Megatron counts.
        model: the shape of the whole model.
        pg_collection: Megatron's process groups.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        model: ModelConfig,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
    ) -> None:
        super().__init__(config)
        # Megatron counts layers from 1 over all stages; lightscale from 0, in names of states and everywhere else.
        self.layer = layer_number - 1
        self.state_name = f"layer-{self.layer}"
        self.model = model
        self.options = model.layer_options(self.layer)
        self.group: dist.ProcessGroup = pg_collection.tp
        # Of this tensor rank.
        self.num_heads = model.num_heads // self.group.size()
        self.heads = slice(self.group.rank() * self.num_heads, (self.group.rank() + 1) * self.num_heads)
        self.head_dim = model.head_dim
        self.output_std = model.output_std

    @abstractmethod
    def mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n / tensor, b, d), normalised -> (n / tensor, b, d)."""

    def with_room(self, state: MixerState, lengths: Sequence[int], tokens: int) -> MixerState:
        """``state`` with room for ``tokens`` more tokens per row without copying; for states that grow.

        Args:
            state: state of rows whose documents all end at the last token read.
            lengths: tokens of the document of each row.
            tokens: may become more; room is then made again.
        """
        return state

    def forward(
        self,
        hidden_states: Tensor | tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: SequenceContext,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Megatron's calling convention: the context comes as ``packed_seq_params``, and there is no bias."""
        return self._mix_normed(hidden_states, packed_seq_params), None

    def _mix_normed(self, hidden_states: Tensor | tuple[Tensor, Tensor], context: SequenceContext) -> Tensor:
        """``mix`` of the output of the block's norm."""
        assert not isinstance(hidden_states, tuple), "only gated mixers read their input twice"
        return self.mix(hidden_states, context)

    def _heads(self, projection: nn.Module, x: Tensor, parts: int = 1) -> list[Tensor]:
        """(n / tensor, b, d) -> ``parts`` of (b, n, h, k), by a projection whose rows are ordered head by head."""
        projected, _ = projection(x)
        n, b, width = projected.shape
        heads = width // (parts * self.head_dim)
        if parts == 1:
            # A view, whose gradient is no copy as that of `unbind`.
            return [projected.view(n, b, heads, self.head_dim).transpose(0, 1)]
        return list(projected.view(n, b, heads, parts, self.head_dim).transpose(0, 1).unbind(dim=3))

    def _norm(self, o: Tensor, gate: Tensor | None = None) -> Tensor:
        """(b, n, h, v) -> (n, b, h v): SRMSNorm over the heads of all tensor ranks together, times sigmoid(gate)."""
        o = o.transpose(0, 1).flatten(2)
        return gated_norm_split(o, gate, width=self.model.hidden_size, eps=self.model.norm_eps, group=self.group)

    def _projected(self, o: Tensor) -> Tensor:
        """(n, b, h v) -> (n / tensor, b, d): by ``out_proj``, or as it is where an option says that there is none."""
        if not hasattr(self, "out_proj"):
            return tokens_of_channels(o, self.group, share=self.config.sequence_parallel)
        out: Tensor = self.out_proj(o)[0]
        return out


class GatedMixer(Mixer):
    """A mixer of queries, keys and values with a low-rank gate on its normalised output.

    out = W_o (norm(concat o) * sigmoid(x W_down W_up))

    (Options change the input of the gate, its rank, and whether there is a norm and W_o.)

    Keys and values come first: their summary travels to other sequence ranks while the queries and the gate are
    computed. Hence two projections, one product where nothing travels (``layers/projections.py``).

    Its spec is a ``GatedMixerSpec``.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, model, *args, **kwargs)
        d, std, group = model.hidden_size, model.init_std, self.group
        # Rows are ordered head by head, k and v of a head together, so that a contiguous shard holds whole heads.
        self.kv_proj = column_parallel(config, d, 2 * d, std=std, group=group)
        self.q_proj = column_parallel(config, d, d, std=std, group=group)
        options, rank = gated_options(model, self.layer), gate_rank(model, self.layer)
        self.is_full_rank = has_full_rank_gate(options)
        self.reads_raw = options.gate_input == "raw"
        if self.is_full_rank:
            self.gate_proj = column_parallel(config, d, d, std=std, group=group)
        else:
            self.gate_down = ReplicatedLinear(config, d, rank, std=std)
            self.gate_up = column_parallel(config, rank, d, std=std, group=group)
        if options.output_projection:
            self.out_proj = row_parallel(config, d, d, std=self.output_std, group=group)

    @abstractmethod
    def mix(self, x: Tensor, context: SequenceContext, raw: Tensor | None = None) -> Tensor:
        """x: (n / tensor, b, d), normalised -> (n / tensor, b, d).

        ``raw``: x before the block's norm, the input of the gate with ``gate_input = "raw"``; None: the input is x.
        """

    def _mix_normed(self, hidden_states: Tensor | tuple[Tensor, Tensor], context: SequenceContext) -> Tensor:
        # Two tensors come from a block whose mixer ``reads_raw`` (``layers/blocks.py``).
        x, raw = hidden_states if isinstance(hidden_states, tuple) else (hidden_states, None)
        return self.mix(x, context, raw)

    def _read(
        self, x: Tensor, raw: Tensor | None, context: SequenceContext, *, key: str, query: str
    ) -> tuple[Tensor, Tensor, Callable[[], tuple[Tensor, Tensor]]]:
        """x: (n / tensor, b, d) -> k and v (b, n, h, k), and what gives q (b, n, h, k) and the gate (n, b, h v).

        Over sequence ranks the latter are computed when they are asked for, while the state of k and v travels.
        ``key``, ``query``: their activations; ``raw``: see ``mix``. The gate is that before its sigmoid.
        """
        heads = self.num_heads, self.head_dim
        kv = Projection(self.kv_proj, Heads(*heads, (key, "none")))
        late = [Projection(self.q_proj, Heads(*heads, (query,)))]
        gate = self._gate_projection()
        if raw is None:
            late.append(gate)
        travels = context.exchange is not None
        k, v, *now = project(x, kv, *(() if travels else late))

        def rest() -> tuple[Tensor, Tensor]:
            q, *given = project(x, *late) if travels else now
            (given_gate,) = given or project(x if raw is None else raw, gate)
            columns = given_gate.transpose(0, 1).flatten(2)
            # Down on each tensor rank's own tokens, so that gate_up gathers them gate_rank wide instead of d.
            return q, columns if self.is_full_rank else self.gate_up(columns)[0]

        return k, v, rest

    def _gate_projection(self) -> Projection:
        if self.is_full_rank:
            return Projection(self.gate_proj, Heads(1, self.num_heads * self.head_dim, ("none",)))
        # A copy: the product of its weight's gradient reads dense rows.
        return Projection(self.gate_down, Heads(1, self.gate_down.weight.shape[0], ("copy",)))

    def _gate(self, x: Tensor) -> Tensor:
        """x: (n / tensor, b, d), the gate's input -> (n, b, h v), before the sigmoid."""
        if self.is_full_rank:
            whole: Tensor = self.gate_proj(x)[0]
            return whole
        gate: Tensor = self.gate_up(self.gate_down(x))[0]
        return gate

    def _gated_output(self, o: Tensor, gate: Tensor) -> Tensor:
        """o: (b, n, h, v), gate: (n, b, h v) -> (n / tensor, b, d)."""
        return self._projected(self._norm(o, gate))
