"""Losses of pairs of answers: TRL's formulas written out over the logits of the plain model, fp64, on every axis."""

import itertools
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightscale.config.schema import AdapterConfig
from lightscale.exchange.files.weights import exported_tensors, shape_of
from lightscale.exchange.plain.model import CausalModel
from lightscale.models.adapters import adapted_maps
from lightscale.models.language_model import language_model_chunks, transformer_config
from lightscale.models.low_rank import add_adapters
from lightscale.parallel.engine import Engine
from lightscale.parallel.initialization import draw_weights
from lightscale.parallel.mesh import Mesh
from lightscale.parallel.micro_batch import GivenMicroBatch
from lightscale.tasks.preference import PreferenceConfig
from lightscale.training.optimizer.adamw import AdamW
from lightscale.training.preference import PreferenceObjective

TESTS = Path(__file__).parents[1]
parity = SimpleNamespace(**runpy.run_path(str(TESTS / "helpers" / "parity.py")))
forms = SimpleNamespace(**runpy.run_path(str(TESTS / "models" / "test_low_rank.py")))
RunRanks = Callable[..., list[Any]]
TASKS = {
    "dpo": PreferenceConfig(loss="dpo", beta=0.3),
    "ipo": PreferenceConfig(loss="ipo", beta=0.2),
    "simpo": PreferenceConfig(loss="simpo", beta=2.0, gamma=0.4),
}
ADAPTER = AdapterConfig(name="lora", r=2, lora_alpha=3.0)
# Tokens of the prompt, of the chosen and of the rejected answer, by row; the second of a micro-batch has padding, and
# no pair ends where a sequence rank does.
PAIRS = [[[(5, 9, 3), (7, 11, 19), (2, 17, 1)], [(20, 13, 6)]], [[(3, 31, 5), (1, 2, 3)], [(9, 1, 30), (4, 4, 5)]]]
Pair = tuple[Tensor, Tensor, int]
"""Ids of the chosen and the rejected document, and the tokens of their prompt."""


def pairs_of(rows: list[list[tuple[int, int, int]]], seed: int) -> list[list[Pair]]:
    generator = torch.Generator().manual_seed(seed)
    found: list[list[Pair]] = []
    for lengths in rows:
        found.append([])
        for prompt, chosen, rejected in lengths:
            ids = torch.randint(1, parity.VOCAB_SIZE, (prompt + chosen + rejected,), generator=generator)
            first = torch.cat([torch.zeros(1, dtype=torch.int64), ids[:prompt]])
            parts = ids[prompt : prompt + chosen], ids[prompt + chosen :]
            found[-1].append((torch.cat([first, parts[0]]), torch.cat([first, parts[1]]), prompt + 1))
    return found


def micro_batches(mesh: Mesh) -> list[Any]:
    """This rank's: documents one behind another, with labels behind them and a mask of the answers."""
    n = parity.TOKENS // mesh.sequence
    own = slice(mesh.sequence_rank * n, (mesh.sequence_rank + 1) * n)
    found = []
    for number, rows in enumerate(PAIRS):
        tokens, labels = (torch.zeros(len(rows), parity.TOKENS, dtype=torch.int64) for _ in range(2))
        mask, positions = torch.zeros(tokens.shape), torch.zeros_like(tokens)
        for row, pairs in enumerate(pairs_of(rows, number)):
            at = 0
            for document, prompt in ((one, pair[2]) for pair in pairs for one in pair[:2]):
                here = slice(at, at + len(document))
                tokens[row, here], positions[row, here] = document, torch.arange(len(document))
                labels[row, here] = torch.cat([document[1:], document[:1]])
                mask[row, at + prompt - 1 : at + len(document) - 1] = 1
                at += len(document)
            positions[row, at:] = torch.arange(parity.TOKENS - at)
        parts = (one[:, own] for one in (tokens, labels, mask, positions))
        named = zip(("tokens", "labels", "loss_mask", "positions"), parts, strict=True)
        found.append(GivenMicroBatch(**dict(named)))
    return found[mesh.data_rank :: mesh.data]


def engine_of(mesh: Mesh, case: Any, task: str, how: str) -> tuple[Engine, Engine | None]:
    """A trained engine, and the reference if it is another one."""
    model = parity.MODELS[case.model]
    made: list[Engine] = []
    is_alone = how == "adapter" or not TASKS[task].has_reference
    for is_trained in (True,) if is_alone else (False, True):
        config = transformer_config(model, mesh, torch.float64, recompute=case.recompute if is_trained else "none")
        chunks = language_model_chunks(config, model, vocab_size=parity.VOCAB_SIZE, mesh=mesh)
        if how == "adapter":
            add_adapters(chunks, ADAPTER)
        for chunk in chunks:
            draw_weights(chunk, seed=0, tensor_rank=mesh.groups.tp.rank(), tensor_size=mesh.tensor)
        objective = PreferenceObjective(TASKS[task], mesh, made[0] if made else None) if is_trained else None
        made.append(Engine(chunks, config, mesh, optimizer=AdamW() if is_trained else None, objective=objective))
    return made[-1], made[0] if len(made) > 1 else None


def moved(weights: dict[str, Tensor], seed: int, scale: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in sorted(weights.items()):
        found[name] = weight + scale * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return found


def log_probability(model: CausalModel, weights: dict[str, Tensor], ids: Tensor, prompt: int) -> tuple[Tensor, int]:
    """Of the answer, and its tokens; as TRL's: log-softmax, gathered, the prompt left out, summed."""
    logits = torch.func.functional_call(model, weights, (ids[None],))[0][0, :, : parity.VOCAB_SIZE]
    per_token = torch.log_softmax(logits[:-1], dim=-1).gather(1, ids[1:, None])[:, 0]
    return per_token[prompt - 1 :].sum(), len(ids) - prompt


def written_out(
    task: PreferenceConfig, policy: dict[str, Tensor], reference: dict[str, Tensor], model: Any
) -> tuple[Tensor, int]:
    """The mean loss over all pairs, and how many of them prefer the chosen answer."""
    plain = CausalModel(shape_of(model, vocab_size=parity.VOCAB_SIZE)).double()
    losses, right = [], []
    pairs = itertools.chain.from_iterable(row for n, rows in enumerate(PAIRS) for row in pairs_of(rows, n))
    for chosen, rejected, prompt in pairs:
        sums, lengths = zip(*(log_probability(plain, policy, one, prompt) for one in (chosen, rejected)), strict=True)
        with torch.no_grad():
            of_reference = [log_probability(plain, reference, one, prompt)[0] for one in (chosen, rejected)]
        if task.loss == "dpo":
            logits = (sums[0] - sums[1]) - (of_reference[0] - of_reference[1])
            losses.append(-F.logsigmoid(task.beta * logits))
        elif task.loss == "ipo":
            # TRL: "average_log_prob" for ipo.
            means = [one / count for one, count in zip(sums, lengths, strict=True)]
            of_means = [one / count for one, count in zip(of_reference, lengths, strict=True)]
            logits = (means[0] - means[1]) - (of_means[0] - of_means[1])
            losses.append((logits - 1 / (2 * task.beta)) ** 2)
        else:
            logits = sums[0] / lengths[0] - sums[1] / lengths[1]
            losses.append(-F.logsigmoid(task.beta * (logits - task.gamma / task.beta)))
        right.append(bool(logits > 0))
    return torch.stack(losses).mean(), sum(right)


def plain_weights(weights: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """As the plain model has them; differentiable."""
    found = {}
    for name, rows in exported_tensors(model, vocab_size=parity.VOCAB_SIZE).items():
        whole = weights[rows.key]
        found[name] = whole if rows.ranges is None else torch.cat([whole[first:last] for first, last in rows.ranges])
    return found


def record(rank: int, world_size: int, init_method: str, path: str, cases: list[str]) -> None:
    """Weights, losses and gradients of all tasks, by autograd of the formulas."""
    found = {}
    for name in {one.split(": ")[1].split()[0] for one in cases}:
        case, model = parity.Case.of(name), parity.MODELS[name]
        with parity.mesh_of(case, rank, world_size, f"{init_method}-{name}") as mesh:
            engine, _ = engine_of(mesh, case, "simpo", "whole")
            reference = moved(parity.weights(engine), 1, 0.02)
        wanted = {one.split(": ")[0] for one in cases if one.split(": ")[1].split()[0] == name}
        for task, how in map(str.split, sorted(wanted)):
            if how == "adapter":
                trained, policy = with_adapters(reference, model)
            else:
                trained = policy = {key: one.requires_grad_() for key, one in moved(reference, 2, 0.03).items()}
            both = (plain_weights(one, model) for one in (policy, reference))
            loss, right = written_out(TASKS[task], *both, model)
            loss.backward()
            of_trained = {key: (one.detach(), one.grad) for key, one in trained.items()}
            values, gradients = ({key: one[place] for key, one in of_trained.items()} for place in (0, 1))
            found[f"{task} {how} {name}"] = (reference, values, float(loss.detach()), float(right), gradients)
    torch.save(found, path)


def compare(rank: int, world_size: int, init_method: str, path: str, cases: list[str]) -> dict[str, dict[str, float]]:
    recorded, found = torch.load(path, weights_only=False), {}
    of_layout: dict[str, list[str]] = {}
    for how, layout in (one.split(": ") for one in cases):
        of_layout.setdefault(layout, []).append(how)
    for layout, case, mesh in parity.on_meshes(of_layout, rank, world_size, init_method):
        for task, how in (one.split() for one in of_layout[layout]):
            print(f"case: {task} {how}: {layout}", flush=True)
            expected = recorded[f"{task} {how} {case.model}"]
            errors = of_adapters if how == "adapter" else of_weights
            found[f"{task} {how}: {layout}"] = errors(mesh, case, task, expected)
    return found


def of_weights(mesh: Mesh, case: Any, task: str, expected: tuple[Any, ...]) -> dict[str, float]:
    before, policy, loss, right, gradients = expected
    engine, reference = engine_of(mesh, case, task, "whole")
    parity.set_weights(engine, policy)
    if reference is not None:
        parity.set_weights(reference, before)
    sums = engine.forward_backward(micro_batches(mesh))
    assert sums.tokens == sum(len(row) for rows in PAIRS for row in rows), "every pair counts once"
    errors = {"loss": abs(sums.mean - loss)}
    errors |= of_gradients(engine, gradients)
    validated = engine.forward_only(micro_batches(mesh), top=(1,))
    assert validated.correct == (int(right),)
    errors["validation"] = abs(validated.mean - loss)
    return errors


def of_gradients(engine: Engine, expected: dict[str, Tensor]) -> dict[str, float]:
    """The errors of all that this rank trains, by name."""
    found = parity.gradients(engine)
    assert found.keys() == {name for name, one in parity.named(engine) if one.requires_grad}
    return {name: parity.error(gradient, expected[name]) for name, gradient in found.items()}


def with_adapters(before: dict[str, Tensor], model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Adapters by their global names, and the weights with these in them."""
    values, parts = {}, dict[str, Any]()
    for linear in adapted_maps(model, ADAPTER):
        own = {name: one.requires_grad_() for name, one in forms.values_of(linear, ADAPTER).items()}
        parts.setdefault(linear.weight, []).append((linear, own))
        values |= own
    return values, {**before, **{key: forms.plain_form(before[key], some, ADAPTER) for key, some in parts.items()}}


def of_adapters(mesh: Mesh, case: Any, task: str, expected: tuple[Any, ...]) -> dict[str, float]:
    """The reference is the model without its adapters."""
    before, values, loss, right, gradients = expected
    engine, _ = engine_of(mesh, case, task, "adapter")
    parity.set_weights(engine, {**before, **values})
    errors = {"loss": abs(engine.forward_backward(micro_batches(mesh)).mean - loss)}
    errors |= of_gradients(engine, gradients)
    validated = engine.forward_only(micro_batches(mesh), top=(1,))
    assert validated.correct == (int(right),)
    return errors


def check(run_ranks: RunRanks, tmp_path: Path, layouts: dict[int, list[str]]) -> None:
    path, cases = str(tmp_path / "recorded.pt"), [case for of_size in layouts.values() for case in of_size]
    run_ranks(record, 1, path, cases, timeout_s=300)
    recorded = torch.load(path, weights_only=False)
    for world_size, of_size in layouts.items():
        compared: dict[str, set[str]] = {}
        for errors in run_ranks(compare, world_size, path, of_size, timeout_s=600):
            for case, of_case in errors.items():
                assert max(of_case.values()) < 1e-9, f"{case}: {of_case}"
                compared.setdefault(case, set()).update(of_case.keys() - {"loss", "validation"})
        for case, names in compared.items():
            how, layout = case.split(": ")
            # Pipeline ranks hold a part each.
            assert names == recorded[f"{how} {layout.split()[0]}"][4].keys(), case


@pytest.mark.timeout(300)
def test_every_axis_gives_the_gradients_of_the_formulas(run_ranks: RunRanks, tmp_path: Path) -> None:
    check(run_ranks, tmp_path, {1: ["dpo whole: tnl"], 2: ["ipo whole: tnl sequence=2", "simpo whole: tnl pipeline=2"]})


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_loss_on_every_axis(run_ranks: RunRanks, tmp_path: Path) -> None:
    layouts = {
        1: [f"{task} whole: hybrid" for task in TASKS] + ["dpo adapter: tnl", "ipo adapter: hybrid"],
        4: [
            *[f"{task} whole: hybrid tensor=2 sequence=2" for task in TASKS],
            *["dpo whole: cosformer2 pipeline=2 sequence=2 recompute=full", "dpo whole: tnl sequence=4"],
            *["ipo whole: tnl tensor=2 pipeline=2 virtual_stages=2", "dpo whole: tnl tensor=2"],
            *["dpo adapter: tnl tensor=2 pipeline=2", "ipo adapter: hybrid sequence=2 recompute=selective"],
        ],
    }
    check(run_ranks, tmp_path, layouts)
