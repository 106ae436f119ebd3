"""The oracles of tests: running sums of exponentials, and sums over whole documents, in the log domain."""

from itertools import pairwise

import torch
from torch import Tensor


def log_sum_reference(
    b: Tensor, *, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """z_t = log Σ_{s ≤ t} e^{b_s} per channel, all pairs at once (CausalRN, equation 9 and Figure 8).

    All arithmetic has the dtype of the inputs. Autograd differentiates it; memory grows with the square of the length.

    Args:
        b: (B, T, D).
        initial_state: (B, D), one more term of the first document of each row.
        cu_seqlens: (N+1,) document boundaries over the flattened B·T tokens, every row start included.

    Returns:
        z (B, T, D), and the z (B, D) of each row's last token.
    """
    num_tokens = b.shape[1]
    rows = []
    for row, b_row in enumerate(b):
        inside = () if cu_seqlens is None else (x - row * num_tokens for x in cu_seqlens.tolist())
        edges = sorted({0, num_tokens, *(x for x in inside if 0 < x < num_tokens)})
        parts = []
        for start, end in pairwise(edges):
            terms = b_row[start:end]
            seen = torch.ones(end - start, end - start, dtype=torch.bool, device=b.device).tril()
            if start == 0 and initial_state is not None:
                terms = torch.cat([initial_state[row : row + 1], terms])
                seen = torch.nn.functional.pad(seen, (1, 0), value=True)
            parts.append(torch.logsumexp(torch.where(seen[..., None], terms, -torch.inf), dim=1))
        rows.append(torch.cat(parts) if parts else b_row)
    z = torch.stack(rows)
    if num_tokens:
        return z, z[:, -1]
    empty = b.new_full((b.shape[0], b.shape[2]), -torch.inf)
    return z, empty if initial_state is None else initial_state


def log_sum_whole_reference(b: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """log Σ_s e^{b_s} over the document of each token, (B, T, D) (BiRN, equation 9)."""
    num_tokens = b.shape[1]
    edges = range(0, b.shape[0] * num_tokens + 1, num_tokens) if cu_seqlens is None else cu_seqlens.tolist()
    parts = [b.flatten(0, 1)[start:end] for start, end in pairwise(edges)]
    return torch.cat([torch.logsumexp(part, dim=0).expand_as(part) for part in parts]).view(b.shape)
