"""Training steps whose numbers are kept.

In a twin that computes, the steps run through CUDA's path; where no device is visible, through the CPU's. Both are the
same PyTorch, so that what differs is the path.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cuda_twin.computing import Computing
from lightscale.config.files import load
from lightscale.data_pipeline.loading.windows import Batch
from lightscale.parallel.device.products import use_mkl_products
from lightscale.parallel.engine import Engine
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.training.build import build_engine
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.checkpoints.saving import Saver

STEPS = 3
ROWS = 2


@dataclass(frozen=True, kw_only=True)
class ComputingCase:
    """A model, a layout, and where its ranks meet."""

    config: str
    meeting: str
    """A file that is not there yet."""
    world_size: int = 1
    overrides: list[str] = field(default_factory=list)
    documents: bool = True
    """Several in each row; else one."""
    micro_batches: int = 8
    """Of a step, on all data ranks together."""
    first: int = 0
    """Steps before it are those of the checkpoint that is resumed; 0 begins anew."""
    last: int = STEPS
    graphs: bool = False
    """Whether micro-batches are captured as CUDA graphs where they can be."""
    checkpoints: str = ""
    """Directory of a run's checkpoints: read where steps come before, else written at the end; nothing where empty."""


def step_batches(
    step: int, mesh: Mesh, *, tokens: int, vocab_size: int, documents: bool, micro_batches: int
) -> Iterator[Batch]:
    """This rank's micro-batches of a step: the same whole rows for every layout."""
    generator = torch.Generator().manual_seed(step)
    n = tokens // mesh.sequence
    own = slice(mesh.sequence_rank * n, (mesh.sequence_rank + 1) * n)
    for number in range(micro_batches):
        ids = torch.randint(0, vocab_size, (ROWS, tokens + 1), generator=generator)
        cuts = torch.randint(1, tokens, (ROWS, 3), generator=generator)
        if number % mesh.data or number // mesh.data >= micro_batches // mesh.data:
            continue
        begins = torch.zeros(ROWS, tokens, dtype=torch.bool)
        begins[:, 0] = True
        if documents:
            begins.scatter_(1, cuts, True)
        slots = torch.arange(tokens).expand(ROWS, -1)
        positions = (slots - torch.where(begins, slots, 0).cummax(dim=1).values)[:, own]
        starts = (positions == 0) | (torch.arange(n) == 0)
        yield Batch(
            tokens=ids[:, :-1][:, own].int(),
            labels=ids[:, 1:][:, own].int(),
            loss_mask=torch.ones(ROWS, n),
            start_slots=starts.flatten().nonzero().flatten(),
            start_positions=positions[starts],
            sources=torch.zeros(ROWS, dtype=torch.int64),
        )


def run(case: ComputingCase, rank: int) -> dict[str, Any]:
    """Loss, norm, gradients and weights of each step, as this rank holds them."""
    config = load(Path(case.config), case.overrides)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parallel = config.parallel
    mode = Computing() if device == "cuda" else nullcontext()
    steps = []
    with (
        mode,
        start_mesh(
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            sequence=parallel.sequence,
            virtual_stages=parallel.virtual_stages,
            exchange=parallel.exchange,
            attention=parallel.attention,
            ranks_per_node=parallel.ranks_per_node or case.world_size,
            device=device,
            rank=rank,
            local_rank=rank,
            world_size=case.world_size,
            init_method=f"file://{case.meeting}",
            timeout_s=120,
        ) as mesh,
    ):
        # Both paths by MKL: oneDNN, which the CPU path has chosen by now, rounds by the strides of what it reads.
        use_mkl_products()
        engine = build_engine(config, mesh, vocab_size=config.model.vocab_size, trainable=True)
        refused: list[str] = []
        if case.graphs:
            engine.capture_graphs(refused.append)
        if case.first:
            restored = Checkpoints(Path(case.checkpoints), mesh).restore(engine)
            assert restored is not None and restored.step == case.first
        for step in range(case.first, case.last):
            batches = step_batches(
                step,
                mesh,
                tokens=config.data.sequence_length,
                vocab_size=config.model.vocab_size,
                documents=case.documents,
                micro_batches=case.micro_batches,
            )
            sums = engine.forward_backward([batch.to(mesh.device) for batch in batches])
            gradients = {name: _kept(gradient) for name, _, gradient in engine.gradients()}
            norm = engine.gradient_norm()
            engine.apply(config.optimizer.lr)
            steps.append({"loss": sums.mean, "norm": norm, "gradients": gradients, "weights": _weights(engine)})
        if case.checkpoints and not case.first:
            Saver(Path(case.checkpoints), mesh).save(engine, step=case.last, common={}, facts={})
        computed = mode.computed if isinstance(mode, Computing) else 0
        replayed = engine.graphs.replayed if engine.graphs is not None else 0
        return {"device": device, "computed": computed, "steps": steps, "refused": refused, "replayed": replayed}


def _weights(engine: Engine) -> dict[str, Tensor]:
    for model in engine.models:
        # Weights that are gathered beside the next forward pass are not there yet.
        model.start_param_sync(force_sync=True)
    return {name: _kept(weight) for chunk in engine.chunks for name, weight in chunk.named_parameters()}


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
