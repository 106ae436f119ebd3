"""Adapters against the merged weights, fp64: the chain rule written out, on every axis."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.config.schema import AdapterConfig
from lightscale.models.adapters import LinearMap, adapted_maps, rank_adapter_parameters
from lightscale.models.language_model import language_model_chunks, transformer_config
from lightscale.models.low_rank import add_adapters, begin_adapters, merge_adapters
from lightscale.parallel.engine import Engine
from lightscale.parallel.initialization import draw_weights, named_parameters
from lightscale.parallel.mesh import Mesh
from lightscale.training.optimizer.adamw import AdamW

parity = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "parity.py")))
RunRanks = Callable[..., list[Any]]
KINDS = {
    "lora": AdapterConfig(name="lora", r=3, lora_alpha=5.0),
    "dora": AdapterConfig(name="dora", r=2, lora_alpha=3.0),
    # Rows of a layer without adapters, beside rows that have some; layers before the first that has.
    "some": AdapterConfig(name="dora", r=2, target_modules=["*.v", "*.mixer.q", "*.up", "layers.[13].*.o"]),
    "queries": AdapterConfig(name="lora", r=2, target_modules=["*.q"]),
}


def adapted_engine(
    mesh: Mesh, case: Any, kind: str, dtype: torch.dtype = torch.float64, *, overlap: bool | None = None
) -> Engine:
    model = parity.MODELS[case.model]
    config = transformer_config(model, mesh, dtype, recompute=case.recompute, recompute_layers=case.recompute_layers)
    chunks = language_model_chunks(config, model, vocab_size=parity.VOCAB_SIZE, mesh=mesh)
    add_adapters(chunks, KINDS[kind])
    for chunk in chunks:
        draw_weights(chunk, seed=0, tensor_rank=mesh.groups.tp.rank(), tensor_size=mesh.tensor)
    return Engine(chunks, config, mesh, optimizer=AdamW(), position_buckets=4, overlap=overlap)


def values_of(linear: LinearMap, adapter: AdapterConfig) -> dict[str, Tensor]:
    """Random A, B and magnitudes by their global names, the same on every rank."""
    generator = torch.Generator().manual_seed(sum(map(ord, linear.name)))
    found = {}
    for name, (shape, _) in linear.parameters(adapter).items():
        found[name] = 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith("magnitude_vector"):
            found[name] = 0.2 + found[name].abs()
    return found


def plain_form(weight: Tensor, parts: list[tuple[LinearMap, dict[str, Tensor]]], adapter: AdapterConfig) -> Tensor:
    """What stands in the place of a weight."""
    merged = weight.clone()
    for linear, (a, b, *magnitudes) in ((one, [*own.values()]) for one, own in parts):
        rows = torch.cat([torch.arange(first, last) for first, last in linear.ranges])
        changed = weight[rows] + adapter.lora_alpha / adapter.r * b @ a
        if magnitudes:
            changed = changed * (magnitudes[0] / changed.norm(dim=1).detach())[:, None]
        merged = merged.index_put((rows,), changed)
    return merged


def split_kinds(cases: list[str]) -> dict[str, list[str]]:
    """The kinds of each layout, of cases like "dora: tnl tensor=2"."""
    found: dict[str, list[str]] = {}
    for kind, layout in (one.split(": ") for one in cases):
        found.setdefault(layout, []).append(kind)
    return found


def record(rank: int, world_size: int, init_method: str, path: str, cases: list[str]) -> None:
    """Of each model and kind: its weights, and loss and gradients of the merged model by autograd of ``plain_form``."""
    found = {}
    of_model = split_kinds([" ".join(one.split()[:2]) for one in cases])
    for name, case, mesh in parity.on_meshes(of_model, rank, world_size, init_method):
        with parity.engine_in(mesh, case, torch.float64) as engine:
            frozen = parity.disturbed(engine)
            for kind in {*of_model[name]}:
                adapter = KINDS[kind]
                of_weight: dict[str, list[tuple[LinearMap, dict[str, Tensor]]]] = {}
                for linear in adapted_maps(parity.MODELS[name], adapter):
                    values = {key: one.requires_grad_() for key, one in values_of(linear, adapter).items()}
                    of_weight.setdefault(linear.weight, []).append((linear, values))
                merged = {key: plain_form(frozen[key], parts, adapter) for key, parts in of_weight.items()}
                parity.set_weights(engine, {**frozen, **{key: one.detach() for key, one in merged.items()}})
                with parity.kept_logits(engine) as logits:
                    sums = engine.forward_backward(parity.step_batches(0, mesh, case))
                gradients = parity.gradients(engine)
                torch.autograd.backward(list(merged.values()), [gradients[key] for key in merged])
                expected = {
                    key: (one.detach(), one.grad)
                    for parts in of_weight.values()
                    for _, values in parts
                    for key, one in values.items()
                }
                found[f"{kind}: {name}"] = (frozen, expected, sums.mean, logits)
    torch.save(found, path)


def compare(rank: int, world_size: int, init_method: str, path: str, cases: list[str]) -> dict[str, dict[str, float]]:
    """Errors of loss, logits and gradients of each case."""
    recorded, found, of_layout = torch.load(path, weights_only=False), {}, split_kinds(cases)
    for layout, case, mesh in parity.on_meshes(of_layout, rank, world_size, init_method):
        for kind in of_layout[layout]:
            print(f"case: {kind}: {layout}", flush=True)
            found[f"{kind}: {layout}"] = errors_of(mesh, case, kind, recorded[f"{kind}: {case.model}"])
    return found


def errors_of(mesh: Mesh, case: Any, kind: str, recorded: tuple[Any, ...]) -> dict[str, float]:
    frozen, expected, loss, logits = recorded
    engine = adapted_engine(mesh, case, kind)
    stages = rank_adapter_parameters(
        parity.MODELS[case.model], KINDS[kind], tensor=mesh.tensor, pipeline=mesh.pipeline * mesh.virtual_stages
    )
    for number, chunk in enumerate(engine.chunks):
        trained = {name: one.numel() for name, one in named_parameters(chunk) if one.requires_grad}
        assert trained == stages[number * mesh.pipeline + mesh.groups.pp.rank()], "as the planner counts them"
    parity.set_weights(engine, {**frozen, **{name: value for name, (value, _) in expected.items()}})
    with parity.kept_logits(engine) as own:
        sums = engine.forward_backward(parity.step_batches(0, mesh, case))
    errors = {"loss": abs(sums.mean - loss)}
    for number, output in enumerate(own):
        part = parity.own_part(logits[mesh.data_rank + number * mesh.data], case, mesh)
        errors["logits"] = max(errors.get("logits", 0.0), parity.error(output, part) if part.numel() else 0.0)
    gradients = parity.gradients(engine)
    trained = {name for chunk in engine.chunks for name, one in named_parameters(chunk) if one.requires_grad}
    assert gradients.keys() == trained <= expected.keys(), "frozen weights have no gradient"
    for name, gradient in gradients.items():
        errors[name] = parity.error(gradient, expected[name][1])
    merge_adapters(engine.chunks)
    errors["merged loss"] = abs(engine.forward_only(parity.step_batches(0, mesh, case)).mean - loss)
    return errors


def check(run_ranks: RunRanks, tmp_path: Path, layouts: dict[int, list[str]]) -> None:
    path, cases = str(tmp_path / "recorded.pt"), [case for of_size in layouts.values() for case in of_size]
    run_ranks(record, 1, path, cases, timeout_s=300)
    for world_size, of_size in layouts.items():
        for errors in run_ranks(compare, world_size, path, of_size, timeout_s=600):
            for case, of_case in errors.items():
                assert max(of_case.values()) < 1e-10, f"{case}: {of_case}"


def test_every_axis_gives_the_gradients_of_the_merged_form(run_ranks: RunRanks, tmp_path: Path) -> None:
    layouts = {
        1: ["lora: tnl"],
        2: ["dora: tnl tensor=2", "some: hybrid pipeline=2 recompute=full"],
    }
    check(run_ranks, tmp_path, layouts)


def steps(rank: int, world_size: int, init_method: str, kinds: list[str]) -> list[list[float]]:
    """Losses of three steps of each kind, without and with gathering beside the computation."""
    found = []
    for _, case, mesh in parity.on_meshes(["tnl"], rank, world_size, init_method):
        for kind in kinds:
            for overlap in (False, True):
                engine = adapted_engine(mesh, case, kind, torch.float32, overlap=overlap)
                begin_adapters(engine.chunks)
                losses = []
                for step in range(3):
                    losses.append(engine.forward_backward(parity.step_batches(step, mesh, case)).mean)
                    engine.step(1e-1)
                found.append(losses)
    return found


def test_what_is_gathered_beside_the_computation_is_waited_for(run_ranks: RunRanks) -> None:
    """As on GPUs: each data rank steps its share of the adapters, and reads those of the others."""
    apart, beside, dora_apart, dora_beside = run_ranks(steps, 2, ["lora", "dora"])[0]
    assert apart == beside and dora_apart == dora_beside
    assert len({*apart}) == 3, "the steps change something"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_mixer_on_every_axis(run_ranks: RunRanks, tmp_path: Path) -> None:
    names = [name for name in parity.MODELS if name not in ("lion-vector", "grid", "grid-whole")]
    layouts = {
        1: [f"{kind}: {name}" for name in names for kind in ("lora", "dora")],
        4: [
            *[f"dora: {name} tensor=2 sequence=2" for name in names],
            *["some: tnl tensor=2 pipeline=2 recompute=selective"],
            *["lora: kimi-delta tensor=2 pipeline=2 virtual_stages=2"],
            *["queries: lightnet sequence=2 recompute=full", "queries: hybrid sequence=4", "queries: tnl pipeline=2"],
        ],
    }
    check(run_ranks, tmp_path, layouts)
