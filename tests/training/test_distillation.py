"""A student and its frozen teacher on ranks, in fp64, against models and losses that are written out plainly."""

import itertools
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.models.language_model import LanguageModel, transformer_config
from lightscale.parallel.engine import Engine
from lightscale.parallel.mesh import Mesh
from lightscale.tasks.distill import DistillConfig
from lightscale.training.distillation import Teacher

HELPERS = Path(__file__).parents[1] / "helpers"
parity = SimpleNamespace(**runpy.run_path(str(HELPERS / "parity.py")))
plain = SimpleNamespace(**runpy.run_path(str(HELPERS / "plain_models.py")))
mixers = SimpleNamespace(**runpy.run_path(str(HELPERS / "plain_mixers.py")))

STUDENT, TEACHER = "tnl", "llama"
TASKS = {
    "logits": DistillConfig(teacher="runs/teacher@1", temperature=2.0, cross_entropy_weight=0.5),
    "layers": DistillConfig(teacher="runs/teacher@1", stage="layers"),
}
Weights = dict[str, Tensor]


def teacher_on(mesh: Mesh) -> Engine:
    model = parity.MODELS[TEACHER]
    config = transformer_config(model, mesh, torch.float64)
    engine = Engine(LanguageModel(config, model, vocab_size=parity.VOCAB_SIZE, mesh=mesh), config, mesh)
    parity.draw_weights(engine.module, seed=3, tensor_rank=mesh.groups.tp.rank(), tensor_size=mesh.tensor)
    parity.set_weights(engine, parity.disturbed(engine))
    return engine


def learned(rank: int, world_size: int, init_method: str, cases: list[str]) -> dict[str, Any]:
    """Of each case and stage: weights of both, the loss and all gradients, and the loss without the teacher."""
    found = {}
    for text, case, mesh in parity.on_meshes(cases, rank, world_size, init_method):
        teacher = teacher_on(mesh)
        for stage, task in TASKS.items():
            with parity.engine_in(mesh, case, torch.float64) as engine:
                parity.set_weights(engine, parity.disturbed(engine))
                engine.teach = Teacher(teacher, task, parity.MODELS[STUDENT])
                batches = parity.step_batches(0, mesh, case)
                loss = engine.forward_backward(batches).mean
                gradients = parity.gradients(engine)
                alone = engine.forward_only(batches).mean
                found[f"{text} {stage}"] = (parity.weights(engine), parity.weights(teacher), loss, gradients, alone)
    return found


def logits_and_mixers(name: str, weights: Weights, ids: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Logits (n, V) of a document, and the residual stream and output of each mixer."""
    model, kept = parity.MODELS[name], []

    def mix(x: Tensor, own: Weights, layer: int) -> Tensor:
        out = mixers.MIX[name](model, x, own, layer)
        kept.append((own[plain.RAW_INPUT], out))
        return out

    return plain.document_logits(model, weights, ids, mix)[:, : parity.VOCAB_SIZE], kept


def transfer_loss(weights: Weights, kept: list[tuple[Tensor, Tensor]]) -> Tensor:
    """(n,): relative errors of the student's mixers on the teacher's streams."""
    model, total = parity.MODELS[STUDENT], torch.zeros(())
    of_model = {name: weight for name, weight in weights.items() if ".layers." not in name}
    for layer, (stream, wanted) in enumerate(kept):
        prefix = f"decoder.layers.{layer}.self_attention."
        own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        x = plain.block_norm(model, stream, {}, "")
        out = mixers.MIX[STUDENT](model, x, own | of_model | {plain.RAW_INPUT: stream}, layer)
        total = total + (out - wanted).square().sum(dim=1) / wanted.square().sum(dim=1) / len(kept)
    return total


def divergence(own: Tensor, wanted: Tensor, labels: Tensor) -> Tensor:
    task = TASKS["logits"]
    soft = [torch.log_softmax(x / task.temperature, dim=1) for x in (own, wanted)]
    hard = torch.log_softmax(own, dim=1)[torch.arange(len(labels)), labels]
    return task.temperature**2 * (soft[1].exp() * (soft[1] - soft[0])).sum(dim=1) - task.cross_entropy_weight * hard


def plain_loss(stage: str, weights: Weights, teacher: Weights) -> Tensor:
    losses, count = [], 0.0
    for tokens, mask, positions in parity.whole_batches(0):
        for row, row_mask, row_positions in zip(tokens, mask, positions, strict=True):
            starts = [*(row_positions == 0).nonzero().flatten().tolist(), parity.TOKENS]
            for start, stop in itertools.pairwise(starts):
                ids, labels = row[start:stop], row[start + 1 : stop + 1]
                with torch.no_grad():
                    wanted, kept = logits_and_mixers(TEACHER, teacher, ids)
                if stage == "layers":
                    own = transfer_loss(weights, kept)
                else:
                    own = divergence(logits_and_mixers(STUDENT, weights, ids)[0], wanted, labels)
                losses.append((own * row_mask[start:stop]).sum())
            count += float(row_mask.sum())
    return torch.stack(losses).sum() / count


@pytest.mark.timeout(600)
def test_losses_and_gradients_are_those_of_the_plain_models(run_ranks: Callable[..., list[Any]]) -> None:
    cases = run_ranks(learned, 1, [STUDENT])[0]
    # The last has two data ranks.
    cases |= run_ranks(learned, 2, [f"{STUDENT} tensor=2", f"{STUDENT} sequence=2", f"{STUDENT} sequence=1"])[0]
    for stage in TASKS:
        weights, teacher, *_ = cases[f"{STUDENT} {stage}"]
        leaves = {key: weight.double().clone().requires_grad_() for key, weight in weights.items()}
        expected = plain_loss(stage, leaves, teacher)
        wanted = torch.autograd.grad(expected, list(leaves.values()), materialize_grads=True)
        for text in (name for name in cases if name.endswith(stage)):
            own, other, loss, gradients, alone = cases[text]
            assert all(torch.equal(own[key], weight) for key, weight in weights.items()), text
            assert all(torch.equal(other[key], weight) for key, weight in teacher.items()), text
            assert loss == pytest.approx(expected.item(), rel=1e-12), text
            # Validation is the cross entropy of labels, in both stages.
            assert alone == pytest.approx(cases[f"{STUDENT} logits"][4], rel=1e-12), text
            for key, gradient in zip(leaves, wanted, strict=True):
                trains = stage == "logits" or ".self_attention." in key
                assert bool(gradient.any()) == trains, key
                assert parity.error(gradients[key], gradient) < 1e-10, f"{text}: {key}"
