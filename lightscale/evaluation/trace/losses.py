"""The loss of every document of a step, with the weights of a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightscale.data_pipeline.loading.loader import TokenLoader
from lightscale.data_pipeline.loading.samples import (
    DocumentRange,
    StepContent,
    recorded_tokens,
    run_loader,
    step_content,
)
from lightscale.data_pipeline.loading.windows import Batch
from lightscale.evaluation.chosen_run import ChosenRun
from lightscale.evaluation.model import restore
from lightscale.models.language_model import LanguageModel
from lightscale.parallel.engine import more_inputs
from lightscale.parallel.mesh import start_mesh
from lightscale.tasks.interface import task_of


@dataclass(frozen=True, kw_only=True)
class DocumentLoss:
    """A document of the step."""

    sample: int
    """Index of its sequence in the order of the curriculum stage."""
    source: str
    part: DocumentRange
    """The part that the step read, and its origin."""
    loss: float
    """Mean over its labels that count, in nats; 0 without any."""
    labels: int


@dataclass(frozen=True, kw_only=True)
class StepLosses:
    """The data of a step, with its losses."""

    content: StepContent
    loss: float
    """Mean over all labels of the step."""
    documents: list[DocumentLoss]
    """In the order of the rows."""


def step_losses(chosen: ChosenRun, step: int) -> StepLosses:
    """Of step ``step`` of the run, with the weights of the checkpoint ``chosen``; on this one process."""
    config, loader = run_loader(
        chosen.directory.path, targets=lambda config, store: task_of(config).targets(store, validation=False)
    )
    content = step_content(loader, step, recorded_tokens(chosen.directory.path))
    with start_mesh(device=config.train.device) as mesh:
        model = restore(chosen, mesh).model
        documents, total, count = _documents(model, loader, content, mesh.device)
    return StepLosses(content=content, loss=total / max(count, 1), documents=documents)


@torch.no_grad()
def _documents(
    model: LanguageModel, loader: TokenLoader, content: StepContent, device: torch.device
) -> tuple[list[DocumentLoss], float, int]:
    found: list[DocumentLoss] = []
    samples = iter(content.samples)
    total, count = 0.0, 0
    # Without other data ranks the micro-batches hold the samples of the step in their order.
    for batch in loader.batches_after(content.first_token, content.num_tokens):
        losses = _token_losses(model, batch.to(device))
        for row, counted, sample in zip(losses, batch.loss_mask, samples, strict=False):
            slot = 0
            for part in sample.documents:
                stop = slot + part.stop - part.start
                labels = int((counted[slot:stop] != 0).sum())
                loss = float(row[slot:stop].sum())
                total, count = total + loss, count + labels
                found.append(
                    DocumentLoss(
                        sample=sample.sample,
                        source=sample.source,
                        part=part,
                        loss=loss / max(labels, 1),
                        labels=labels,
                    )
                )
                slot = stop
    return found, total, count


def _token_losses(model: LanguageModel, batch: Batch) -> torch.Tensor:
    """(b, n) fp64 on the host: the loss of each label that counts, 0 of others."""
    losses = model(
        batch.tokens,
        batch.positions,
        batch.labels,
        loss_mask=batch.loss_mask,
        document_starts=batch.document_starts,
        **more_inputs(batch),
    )
    return losses.double().cpu().view(batch.labels.shape)


def worst_first(documents: Sequence[DocumentLoss]) -> list[DocumentLoss]:
    """By loss; of equal ones the order of the rows stays."""
    return sorted(documents, key=lambda one: -one.loss)
