"""Images of another size than in training: positions by coordinates, and learned ones interpolated."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.config.model import GridConfig
from lightscale.models.language_model import LanguageModel
from lightscale.models.specs.positions import LearnedPositionsSpec


def set_grid(model: LanguageModel, shape: Sequence[int]) -> None:
    """Let a trained ``model`` read images of ``shape``, (rows, columns) of patches; on each rank alike.

    LRPE and TPE take the coordinates of the new grid, with the trained angles and decays. Learned positions become
    those of the new grid by bicubic interpolation, as in ViT (arXiv 2010.11929, section 3.2) and transformers.
    """
    grid = model.model.grid
    assert grid is not None, "a model of images"
    model.model = model.model.on_grid(shape)
    if model.pre_process and LearnedPositionsSpec.name in model.embedding.parts:
        positions = model.embedding.get_submodule(LearnedPositionsSpec.name)
        table = interpolated(positions.table.detach(), grid, shape)
        positions.table = nn.Parameter(table, requires_grad=False)


@contextmanager
def at_grid(model: LanguageModel, shape: Sequence[int]) -> Iterator[None]:
    """Within, ``model`` reads images of ``shape`` as by ``set_grid``; behind, those of training again."""
    trained, table = model.model, None
    has_table = model.pre_process and LearnedPositionsSpec.name in model.embedding.parts
    if has_table:
        table = model.embedding.get_submodule(LearnedPositionsSpec.name).table
    try:
        # The trained positions as they are where nothing changes.
        if trained.grid is None or list(shape) != trained.grid.shape:
            set_grid(model, shape)
        yield
    finally:
        model.model = trained
        if has_table:
            model.embedding.get_submodule(LearnedPositionsSpec.name).table = table


def interpolated(table: Tensor, grid: GridConfig, shape: Sequence[int]) -> Tensor:
    """Vectors (positions, d) of the tokens of ``grid``, of two axes, as those of a grid of ``shape``.

    Leading tokens keep theirs.
    """
    leading, cells = table[: grid.leading_tokens], table[grid.leading_tokens : grid.document_tokens]
    wide = cells.to(torch.promote_types(cells.dtype, torch.float32))
    planes = wide.T.reshape(1, -1, *grid.shape)
    found = F.interpolate(planes, size=tuple(shape), mode="bicubic", align_corners=False)
    return torch.cat([leading, found.flatten(2)[0].T.to(table.dtype)])
