"""The output layer of classification: one label for each document, from the states of its tokens on all ranks.

    logits = W x + b,   x = pool(h_1 … h_n): the mean of the tokens' states, or that of the first or the last one
                        b: by an option

With ``model.head.pairs``, one label for two documents that the model has read separately:

    logits = W gelu(V [x₁, x₂, x₁ x₂, x₁ - x₂] + c) + b,   x₁ of the document before in the row, x₂ of its own

The features are those of Long Range Arena's retrieval (Tay et al. 2020, arXiv 2011.04006, section 2.3, and its code,
which has two hidden layers). One hidden layer as wide as the model, with GELU, is that of S5 (arXiv 2208.04933), whose
sizes LION's paper takes for these tasks.

The rank with the last token of a document predicts its label. Earlier sequence ranks send the sums of the states that
they have of a row's last document, and with pairs of the one before it, d numbers each, in one exchange each way.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.config.model import HeadConfig, Pooling
from lightscale.kernels.attention import to_device
from lightscale.models.layers.context import SequenceContext
from lightscale.models.specs.label_head import head_shapes
from lightscale.parallel.initialization import normal, set_initializer, zeros
from lightscale.parallel.megatron import TransformerConfig, gather_from_sequence_parallel_region
from lightscale.parallel.sequence import begin_gather


class LabelHead(nn.Module):
    """Held whole by every tensor rank, all of which compute the same.

    ``weight``: (labels, d); with pairs ``hidden_weight``: (d, 4 d); with an option ``bias``, ``hidden_bias``; or None.

    Args:
        config: the model's Megatron configuration.
        head: classes, pooling, and whether labels are of pairs.
        width: of the residual stream.
        std: of the initial weights.
        group: the tensor group.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    hidden_weight: nn.Parameter | None
    hidden_bias: nn.Parameter | None

    def __init__(
        self, config: TransformerConfig, head: HeadConfig, width: int, std: float, group: dist.ProcessGroup
    ) -> None:
        super().__init__()
        self.pooling, self.pairs, self.group = head.pooling, head.pairs, group
        shapes = head_shapes(head, width)
        for name in ("weight", "hidden_weight", "bias", "hidden_bias"):
            if name not in shapes:
                self.register_parameter(name, None)
                continue
            made = nn.Parameter(
                torch.empty(shapes[name], dtype=config.params_dtype, device=torch.cuda.current_device())
            )
            if group.size() > 1:
                # Every tensor rank has the whole gradient, which sums on GPUs do not give to the same bit twice:
                # Megatron takes the mean, and the copies stay equal.
                made.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]
            set_initializer(made, zeros if name.endswith("bias") else normal(std))
            self.register_parameter(name, made)

    def forward(self, hidden: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor]:
        """hidden: (n / tensor, b, d) -> logits (m, labels), fp32 or wider, of this rank's m documents, and (m,) int64.

        The numbers are the indices, among the b·n tokens, of the last token here of each document, row after row. The
        documents are those of the context. Logits of a document that continues behind this rank are meaningless, and
        with pairs those of a first document too.
        """
        pooled, last = pooled_documents(hidden, context, self.pooling, self.group, pairs=self.pairs)
        if self.pairs:
            one, two = pooled.unbind(1)
            features = torch.cat([one, two, one * two, one - two], dim=1)
            pooled = F.gelu(_linear(features, self.hidden_weight, self.hidden_bias))
        return _linear(pooled, self.weight, self.bias), last


def _linear(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """In the dtype of ``x``, which is wider than that of the weights in bf16."""
    assert weight is not None
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def pooled_documents(
    hidden: Tensor, context: SequenceContext, pooling: Pooling, group: dist.ProcessGroup, *, pairs: bool = False
) -> tuple[Tensor, Tensor]:
    """One vector for each document that has tokens on this rank, the same on all ranks of the tensor ``group``.

    Args:
        hidden: (n / tensor, b, d).
        context: of the pass.
        pooling: of a document's tokens, on this rank and on earlier ones.
        pairs: give two vectors, that of the document before in the row (0 before the first one) and its own.

    Returns:
        (m, d), or (m, 2, d) with ``pairs``, fp32 or wider, and (m,) int64: indices, among the b·n tokens, of the last
        token here of each, row after row. Vectors of documents that continue behind this rank are meaningless.
    """
    if group.size() > 1:
        # All ranks go on alike: each takes the gradient of its own tokens.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=group)
    states = hidden.transpose(0, 1).flatten(0, 1).to(torch.promote_types(hidden.dtype, torch.float32))
    positions = context.positions
    (b, n), device = positions.shape, states.device
    slots = context.document_starts.slots
    first = to_device(slots, device)
    last = to_device(torch.cat([slots[1:], slots.new_tensor([b * n])])[: len(slots)] - 1, device)
    flat = positions.flatten()
    if pooling == "last":
        sums = states[last]
        if not pairs:
            return sums, last
    else:
        if pooling == "first":
            states = states * (flat == 0)[:, None]
        number = torch.zeros_like(flat).index_fill(0, first, 1).cumsum(0) - 1
        sums = states.new_zeros(len(slots), states.size(1)).index_add(0, number, states)
    # By row: the first document here, and the last one.
    begins = slots % max(n, 1) == 0
    heads, tails = (to_device(found.nonzero().squeeze(1), device) for found in (begins, begins.roll(-1)))
    before = sums.new_zeros(len(heads), sums.size(1))
    if context.exchange is not None:
        incoming, tokens = _incoming(_leaving(sums, last - first + 1, heads, tails, 1 + pairs), context, pooling)
        if not n:
            # Nothing is predicted here, but the others wait for this rank in the backward pass of the gathering.
            return (incoming if pairs else incoming[:, 0])[:0], last
        if pooling != "last":
            sums = sums.index_add(0, heads, incoming[:, 0])
        if pairs:
            before = incoming[:, 1] / tokens[:, 1:].clamp_min(1) if pooling == "mean" else incoming[:, 1]
    pooled = sums / (flat[last] + 1)[:, None] if pooling == "mean" else sums
    if not pairs:
        return pooled, last
    return torch.stack([pooled.roll(1, 0).index_copy(0, heads, before), pooled], dim=1), last


def _leaving(sums: Tensor, tokens: Tensor, heads: Tensor, tails: Tensor, count: int) -> Tensor:
    """What a rank sends of each row's last document here, and for a ``count`` of 2 of the one before it: zeros where
    this rank has none of it.

    Args:
        sums: (m, d), of the tokens here of each document.
        tokens: (m,), their numbers.
        heads, tails: (b,), the first and the last document of each row; empty where this rank has no tokens.

    Returns:
        (b, count, d + 1): sums, and numbers of tokens.
    """
    counted = torch.cat([sums, tokens[:, None].to(sums.dtype)], dim=1)
    return torch.stack([counted[tails - back] * (tails - back >= heads)[:, None] for back in range(count)], dim=1)


def _incoming(leaving: Tensor, context: SequenceContext, pooling: Pooling) -> tuple[Tensor, Tensor]:
    """leaving: (b, k, d + 1) -> sums (b, k, d) and tokens (b, k) of each row's first document here, and for k = 2 of
    the one before it, on the ranks before.

    With ``pooling`` = "last", of the last rank that has tokens of it alone.
    """
    exchange, positions = context.exchange, context.positions
    assert exchange is not None
    b, n = positions.shape
    if not n:
        leaving = leaving.new_zeros(b, *leaving.shape[1:]) + leaving.sum()
    begun = (positions == 0).sum(dim=1).to(leaving.dtype)
    k = leaving.size(1)
    sent = torch.cat([leaving.flatten(1), begun[:, None]], dim=1)
    earlier = begin_gather(sent[:, None], exchange)()[:, : exchange.rank]
    begun, found = earlier[..., -1].detach(), earlier[..., :-1].unflatten(-1, leaving.shape[1:])
    # Documents by their numbers in the row, from 1 on: those that each rank has sent, and those that are wanted here.
    back = torch.arange(k, device=begun.device)
    sent_numbers = begun.cumsum(dim=1)[..., None] - back
    wanted = (begun.sum(dim=1) + 1 - context.continues.to(begun.dtype))[:, None] - back
    is_it = (sent_numbers[..., None] == wanted[:, None, None]) & (found[..., -1:].detach() > 0)
    if pooling == "last":
        has = is_it.any(dim=2)
        is_it = is_it & (has.flip(1).cumsum(dim=1).flip(1) == 1)[:, :, None]
    total = torch.einsum("brsw, brsd -> bwd", is_it.to(found.dtype), found)
    return total[..., :-1], total[..., -1].detach()


def label_losses(
    logits: Tensor,
    last: Tensor,
    labels: Tensor,
    loss_mask: Tensor | None,
    *,
    top: Sequence[int] = (),
    soft_labels: Tensor | None = None,
) -> Tensor:
    """Of each token, (b, n): the loss of its document at the document's last token, times the mask, and 0 elsewhere.

    With ``top`` (1 + k, b, n): the losses, and the mask where the label is among the so many most probable ones.

    Args:
        logits, last: as ``LabelHead`` gives them.
        labels, loss_mask: (b, n).
        soft_labels: (b, classes), the distribution that each row's one document learns in place of its label.
    """
    wanted = labels.flatten()[last]
    counted = logits.new_ones(len(last)) if loss_mask is None else loss_mask.flatten()[last].to(logits.dtype)
    # An empty segment has no row that is over.
    goal = wanted if soft_labels is None else soft_labels[last // max(labels.size(1), 1)].to(logits.dtype)
    found = [F.cross_entropy(logits, goal, reduction="none") * counted]
    for number in top:
        best = logits.topk(min(number, logits.size(-1)), dim=-1).indices
        found.append((best == wanted[:, None]).any(-1) * counted)
    rows = logits.new_zeros(len(found), labels.numel())
    rows = rows.index_copy(1, last, torch.stack(found)).view(len(found), *labels.shape)
    return rows if top else rows[0]
