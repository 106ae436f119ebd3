"""The output layer of classification: one label for each document, from the states of its tokens on all ranks.

    logits = W pool(h_1 … h_n) + b,   pool: the mean of the tokens' states, or that of the first or the last one
                                      b: by an option

The rank with the last token of a document predicts its label. Earlier sequence ranks with tokens of the document send
the sum of their states, d numbers per row, in one exchange each way.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.config.model import HeadConfig, Pooling
from lightscale.kernels.attention import to_device
from lightscale.models.layers.context import SequenceContext
from lightscale.parallel.initialization import set_initializer, zeros
from lightscale.parallel.megatron import TransformerConfig, gather_from_sequence_parallel_region
from lightscale.parallel.sequence import begin_gather


class LabelHead(nn.Module):
    """Held whole by every tensor rank, all of which compute the same.

    ``weight``: (labels, d); ``bias``: (labels,), or None.

    Args:
        config: the model's Megatron configuration.
        head: classes and pooling.
        width: of the residual stream.
        group: the tensor group.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, config: TransformerConfig, head: HeadConfig, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.pooling, self.group = head.pooling, group
        shapes = {"weight": (head.num_labels, width), "bias": (head.num_labels,) if head.bias else None}
        for name, shape in shapes.items():
            if shape is None:
                self.register_parameter(name, None)
                continue
            made = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device()))
            if group.size() > 1:
                # Every tensor rank has the whole gradient, which sums on GPUs do not give to the same bit twice:
                # Megatron takes the mean, and the copies stay equal.
                made.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]
            self.register_parameter(name, made)
        if self.bias is not None:
            set_initializer(self.bias, zeros)

    def forward(self, hidden: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor]:
        """hidden: (n / tensor, b, d) -> logits (m, labels), fp32 or wider, of this rank's m documents, and (m,) int64.

        The numbers are the indices, among the b·n tokens, of the last token here of each document, row after row. The
        documents are those of the context. Logits of a document that continues behind this rank are meaningless.
        """
        pooled, last = pooled_documents(hidden, context, self.pooling, self.group)
        bias = None if self.bias is None else self.bias.to(pooled.dtype)
        return F.linear(pooled, self.weight.to(pooled.dtype), bias), last


def pooled_documents(
    hidden: Tensor, context: SequenceContext, pooling: Pooling, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """One vector for each document that has tokens on this rank, the same on all ranks of the tensor ``group``.

    Args:
        hidden: (n / tensor, b, d).
        context: of the pass.
        pooling: of a document's tokens, on this rank and on earlier ones.

    Returns:
        (m, d), fp32 or wider, and (m,) int64: indices, among the b·n tokens, of the last token here of each, row after
        row. Vectors of documents that continue behind this rank are meaningless.
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
    if pooling == "last":
        return states[last], last
    flat = positions.flatten()
    if pooling == "first":
        states = states * (flat == 0)[:, None]
    number = torch.zeros_like(flat).index_fill(0, first, 1).cumsum(0) - 1
    sums = states.new_zeros(len(slots), states.size(1)).index_add(0, number, states)
    if context.exchange is not None:
        begins = slots % max(n, 1) == 0
        ends = torch.cat([begins[1:], begins.new_ones(1)])[: len(slots)]
        incoming = _incoming(sums[to_device(ends.nonzero().squeeze(1), device)], context)
        if not n:
            # Nothing is predicted here, but the others wait for this rank in the backward pass of the gathering.
            return incoming[:0], last
        sums = sums.index_add(0, to_device(begins.nonzero().squeeze(1), device), incoming)
    return (sums / (flat[last] + 1)[:, None] if pooling == "mean" else sums), last


def _incoming(leaving: Tensor, context: SequenceContext) -> Tensor:
    """leaving: (b, d), sums of each row's last document here -> (b, d), of the first one, on the ranks before."""
    exchange, positions = context.exchange, context.positions
    assert exchange is not None
    b, n = positions.shape
    if not n:
        leaving = leaving.new_zeros(b, leaving.size(1)) + leaving.sum()
    # Whether a document goes through the whole row, and what an earlier rank has of it comes here too.
    is_through = (positions > 0).all(dim=1)
    sent = torch.cat([leaving, is_through[:, None].to(leaving.dtype)], dim=1)
    gathered = begin_gather(sent[:, None], exchange)()
    arrives = context.continues.to(leaving.dtype)
    shares = [torch.zeros_like(arrives)] * exchange.size
    for rank in reversed(range(exchange.rank)):
        shares[rank] = arrives
        arrives = arrives * gathered[:, rank, -1].detach()
    return torch.einsum("br, brd -> bd", torch.stack(shares, dim=1), gathered[..., :-1])


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
