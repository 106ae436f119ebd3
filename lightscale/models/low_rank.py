"""Low-rank adapters beside frozen linear layers, on tensor and sequence ranks: LoRA and DoRA.

    lora   y = W x + (lora_alpha / r) B A x                               (Hu et al. 2021, arXiv 2106.09685)
    dora   y = m / ||W + (lora_alpha / r) B A|| * (W x + (lora_alpha / r) B A x), rows apart
                                                                          (Liu et al. 2024, arXiv 2402.09353)

With dropout, an adapter reads D(x) in the place of x: each number is 0 with the probability lora_dropout, or divided by
1 - lora_dropout. What is drawn is a function of the seed, the map, the row's place in the run's data, the token and the
column (``models/dropout.py``), the same on every layout and in every repetition.

The norms get no gradient (DoRA's section 4.3). ``add_adapters`` freezes a model and gives its layers hooks. A layer
that holds the rows of several linear maps has one hook for all of them, with their A's above each other.

Tensor ranks split B as the rows of W, or A as its columns; the other matrix each of them holds whole. A of split rows,
and B of split columns, see the tokens of their own rank alone, so that what tensor ranks exchange is r wide.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.config.schema import AdapterConfig
from lightscale.models.adapters import ADAPTERS, LinearMap, adapted_maps
from lightscale.models.dropout import Dropout
from lightscale.models.language_model import LanguageModel
from lightscale.models.layers.blocks import DecoderLayer
from lightscale.models.layers.context import SequenceContext
from lightscale.parallel.initialization import named_parameters, ones, set_initializer, uniform, zeros
from lightscale.parallel.megatron import (
    MegatronModule,
    TransformerConfig,
    copy_to_tensor_model_parallel_region,
    ensure_metadata_has_dp_cp_group,
    gather_from_sequence_parallel_region,
    make_sharded_tensors_for_checkpoint,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from lightscale.parallel.model_shards import freeze


class LowRank(MegatronModule):
    """The trained matrices of one linear map, on this tensor rank.

    ``lora_A`` (r, width_in), ``lora_B`` (width_out, r), and of DoRA ``lora_magnitude_vector`` (width_out,).
    """

    def __init__(
        self, config: TransformerConfig, linear: LinearMap, adapter: AdapterConfig, group: dist.ProcessGroup
    ) -> None:
        super().__init__(config)
        self.tp_group = group
        # As PEFT draws them: the adapted map begins as the frozen one.
        draws = {
            "lora_A": uniform(1 / math.sqrt(linear.width_in)),
            "lora_B": zeros,
            # Norms of the rows, once these are known.
            "lora_magnitude_vector": ones,
        }
        self._split: dict[str, int] = {}
        for key, (shape, dim) in linear.parameters(adapter).items():
            name, own = key.rpartition(".")[2], list(shape)
            if dim is not None:
                own[dim] //= group.size()
                self._split[name] = dim
            made: Any = nn.Parameter(torch.empty(own, dtype=config.params_dtype, device=torch.cuda.current_device()))
            if dim is None:
                # Tensor ranks use it for their own tokens: the engine sums its gradient over them.
                made.sequence_parallel = config.sequence_parallel
            else:
                made.tensor_model_parallel, made.partition_dim, made.partition_stride = True, dim, 1
            set_initializer(made, draws[name])
            self.register_parameter(name, made)

    def forward(self) -> dict[str, Tensor]:
        """The matrices by name; a call waits for their gathered values, as Megatron's layers do in their forward."""
        return dict(self.named_parameters())

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description for checkpoints."""
        return make_sharded_tensors_for_checkpoint(
            dict(self.named_parameters()),
            prefix,
            self._split,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


class AdaptedLayer:
    """The hook of a frozen linear layer: adds to its output what the adapters of its rows give.

    Args:
        layer: frozen, with ``weight`` (rows, columns) of this tensor rank.
        parts: adapters of this layer's maps, with their rows in ``weight``.
        scale: lora_alpha / r.
        split: as in ``LinearMap``.
        dropouts: of each part; none: there is no dropout.
    """

    def __init__(
        self,
        layer: nn.Module,
        parts: Sequence[tuple[LowRank, Tensor]],
        *,
        scale: float,
        split: str | None,
        dropouts: Sequence[Dropout],
        config: TransformerConfig,
        group: dist.ProcessGroup,
    ) -> None:
        self.layer, self.scale, self.split, self.config, self.group = layer, scale, split, config, group
        self.adapters = [one for one, _ in parts]
        self.dropouts = list(dropouts)
        self.context: SequenceContext | None = None
        """Of the pass that computes."""
        weight: Any = layer.weight
        rows = torch.cat([own for _, own in parts])
        # Of each row of W: which row of the adapters', one behind another, is its own; the one behind them is zero.
        self.order = torch.full((weight.size(0),), len(rows), device=weight.device)
        self.order[rows] = torch.arange(len(rows), device=weight.device)
        self.is_whole = len(parts) == 1 and torch.equal(rows, torch.arange(weight.size(0)))
        self.has_norms = "lora_magnitude_vector" in dict(self.adapters[0].named_parameters())
        self.hook = layer.register_forward_hook(self)
        self.is_off = False

    def _read(self, name: str) -> list[Tensor]:
        """Of each adapter."""
        return [one()[name] for one in self.adapters]

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """A (R, columns) and B (rows, R) of all maps together, R the sum of their ranks."""
        first, second = map(self._read, ("lora_A", "lora_B"))
        if self.is_whole:
            return first[0], second[0]
        return torch.cat(first), F.pad(torch.block_diag(*second), (0, 0, 0, 1))[self.order]

    @torch.no_grad()
    def norms(self) -> Tensor:
        """(rows,), of W + scale B A; fp32 at least."""
        squares = self._sum(self._changed().square())
        return squares.sqrt()

    def _changed(self) -> Tensor:
        """W + scale B A, fp32 at least."""
        weight: Any = self.layer.weight
        a, b = (one.to(torch.promote_types(weight.dtype, torch.float32)) for one in self._matrices())
        return weight.to(a.dtype).addmm(b, a, alpha=self.scale)

    def _sum(self, squares: Tensor) -> Tensor:
        """(rows,), over the columns of all tensor ranks."""
        found = squares.sum(dim=1)
        if self.split == "columns" and self.group.size() > 1:
            dist.all_reduce(found, group=self.group)
        return found

    def _factors(self, norms: Tensor) -> Tensor:
        """m / norm of each row, (rows,); 1 of rows without an adapter."""
        magnitudes = torch.cat(self._read("lora_magnitude_vector"))
        # A row behind them, which rows without an adapter take: their own norm.
        found = F.pad(magnitudes, (0, 1))[self.order].to(norms.dtype)
        found = torch.where(self.order < len(magnitudes), found, norms)
        # A row of zeros stays one.
        return found / norms.clamp_min(torch.finfo(norms.dtype).tiny)

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """x: (n / tensor or n, b, columns), the layer's input; see ``register_forward_hook``."""
        if self.is_off:
            return output
        # Megatron's layers give a pair, the second part of which is a bias that is not added.
        y, *rest = output if isinstance(output, tuple) else (output,)
        a, b = self._matrices()
        change = F.linear(self._shared(self._inner(args[0], a) * self.scale), b)
        if self.has_norms:
            factors = self._factors(self.norms()).to(y.dtype)
            bias: Tensor | None = getattr(layer, "bias", None)
            # A bias is no part of the rows.
            y = y * factors if bias is None else (y - bias) * factors + bias
            change = change * factors
        y = y + change
        return (y, *rest) if isinstance(output, tuple) else y

    def _inner(self, x: Tensor, a: Tensor) -> Tensor:
        """A x, of every adapter's own D(x) with dropout: (n / tensor or n, b, R)."""
        if not (self.dropouts and self.layer.training):
            return F.linear(x, a)
        context, rank = self.context, self.group.rank()
        assert context is not None and context.places is not None, "the loader tells the places of rows"
        first_token = context.first_slot
        if x.size(0) < context.positions.size(1):
            # Tensor ranks share the tokens out.
            first_token += rank * x.size(0)
        first_column = rank * x.size(2) if self.split == "columns" else 0
        parts = zip(self.dropouts, a.split([one()["lora_A"].size(0) for one in self.adapters]), strict=True)
        return torch.cat(
            [F.linear(one(x, context.places, first_token, first_column), own) for one, own in parts], dim=2
        )

    def _shared(self, inner: Tensor) -> Tensor:
        """A x of this rank, as B takes it: (n / tensor or n, b, R)."""
        group, by_tokens = self.group, self.config.sequence_parallel
        if group.size() == 1 or self.split is None:
            return inner
        if self.split == "rows":
            found = (
                gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True, group=group)
                if by_tokens
                else copy_to_tensor_model_parallel_region(inner, group=group)
            )
        else:
            found = (
                reduce_scatter_to_sequence_parallel_region(inner, group=group)
                if by_tokens
                else reduce_from_tensor_model_parallel_region(inner, group=group)
            )
        shared: Tensor = found
        return shared

    @torch.no_grad()
    def begin(self) -> None:
        """Set DoRA's magnitudes to the norms of the rows, so that the layer computes what it does without adapters."""
        if self.has_norms:
            norms = self.norms()
            places = torch.argsort(self.order)
            at = 0
            for one in self.adapters:
                count = one.lora_B.size(0)
                one.lora_magnitude_vector.copy_(norms[places[at : at + count]])
                at += count

    @torch.no_grad()
    def merge(self) -> None:
        """Put the adapters into the weight, and drop the hook."""
        weight: Any = self.layer.weight
        changed = self._changed()
        if self.has_norms:
            changed *= self._factors(self._sum(changed.square()).sqrt())[:, None]
        weight.copy_(changed)
        self.hook.remove()


def add_adapters(chunks: Iterable[LanguageModel], adapter: AdapterConfig, *, seed: int = 0) -> None:
    """Freeze the models, and give their linear maps the adapters of ``adapter``, whose values are still to be drawn.

    ``seed``: of dropout.

    Those of a mixer or a gated linear unit are its submodule ``adapters``, by the last part of their maps' names.
    """
    for chunk in chunks:
        for parameter in chunk.parameters():
            freeze(parameter)
        maps: dict[str, list[LinearMap]] = {}
        for one in adapted_maps(chunk.model, adapter):
            maps.setdefault(one.weight, []).append(one)
        layers = dict(named_parameters(chunk))
        owners = {parameter: module for module in chunk.modules() for parameter in module.parameters(recurse=False)}
        blocks = {layer.layer_number - 1: layer for layer in chunk.decoder.layers}
        chunk.adapted = [
            _adapted(blocks[of_weight[0].layer], owners[layers[name]], of_weight, adapter, seed)
            for name, of_weight in maps.items()
            if name in layers
        ]
        if chunk.pre_process and chunk.config.recompute_granularity is not None:
            chunk.embedding.register_forward_hook(_with_gradient)


def _with_gradient(embedding: nn.Module, args: tuple[Any, ...], hidden: Tensor) -> Tensor:
    """What is recomputed gets gradients only if its input does, which a frozen embedding does not give it."""
    return hidden.requires_grad_() if embedding.training and torch.is_grad_enabled() else hidden


def _adapted(
    block: nn.Module, layer: nn.Module, maps: Sequence[LinearMap], adapter: AdapterConfig, seed: int
) -> AdaptedLayer:
    module: Any = block.self_attention if ".mixer." in maps[0].name else block.mlp
    config, weight = module.config, layer.weight
    # Of GatedLinearUnit, Mixer.
    group: dist.ProcessGroup = module.tp_group if ".mlp." in maps[0].name else module.group
    if not hasattr(module, ADAPTERS):
        # Of Megatron's kind, which describes its parts for checkpoints.
        module.add_module(ADAPTERS, MegatronModule(config))
    held = getattr(module, ADAPTERS)
    parts = []
    for one in maps:
        own = LowRank(config, one, adapter, group)
        held.add_module(one.name.rpartition(".")[2], own)
        parts.append((own, _own_rows(one, weight, group)))
    dropouts = [Dropout(adapter.lora_dropout, seed=seed, name=one.name) for one in maps] if adapter.lora_dropout else []
    made = AdaptedLayer(
        layer,
        parts,
        scale=adapter.lora_alpha / adapter.r,
        split=maps[0].split,
        dropouts=dropouts,
        config=config,
        group=group,
    )
    if dropouts:
        assert isinstance(block, DecoderLayer)
        block.tell = partial(_tell, made, block.tell)
    return made


def _tell(layer: AdaptedLayer, others: Callable[[SequenceContext], None] | None, context: SequenceContext) -> None:
    layer.context = context
    if others is not None:
        others(context)


def _own_rows(linear: LinearMap, weight: Any, group: dist.ProcessGroup) -> Tensor:
    """Those rows of this tensor rank's ``weight`` that belong to ``linear``, in their order."""
    rows = torch.cat([torch.arange(first, last) for first, last in linear.ranges])
    if linear.split != "rows" or group.size() == 1:
        return rows.to(weight.device)
    # As `parallel.initialization.shard` cuts it: where several matrices are stacked, each by itself.
    stride, own = weight.partition_stride, weight.size(0)
    whole = torch.arange(own * group.size())
    held = torch.cat([part.chunk(group.size())[group.rank()] for part in whole.chunk(stride)])
    places = torch.full_like(whole, -1)
    places[held] = torch.arange(own)
    share = rows.chunk(group.size())[group.rank()]
    found = places[share]
    assert (found >= 0).all(), f"{linear.name}: tensor ranks do not share its rows in their order"
    return found.to(weight.device)


@contextmanager
def without_adapters(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Within, the models compute what they do without adapters."""
    layers = list(_adapted_layers(chunks))
    for one in layers:
        one.is_off = True
    try:
        yield
    finally:
        for one in layers:
            one.is_off = False


def begin_adapters(chunks: Iterable[nn.Module]) -> None:
    """Let the adapters begin at the frozen weights, which have been read; collective over the tensor ranks."""
    for one in _adapted_layers(chunks):
        one.begin()


def merge_adapters(chunks: Iterable[nn.Module]) -> None:
    """Put the adapters into the weights; collective over the tensor ranks. The models then need no hooks."""
    for one in _adapted_layers(chunks):
        one.merge()


def _adapted_layers(chunks: Iterable[nn.Module]) -> Iterator[AdaptedLayer]:
    for chunk in chunks:
        assert isinstance(chunk, LanguageModel)
        yield from chunk.adapted
