"""QK-clip beside its definition in fp64: what is scaled, by which logits, on all layouts, and what is refused."""

import math
import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lightscale.config.layout import check_layout
from lightscale.config.model import ModelConfig
from lightscale.config.schema import DataConfig, MetricsConfig, RunConfig, TrainConfig
from lightscale.errors import UserError
from lightscale.models.attention_heads import check_measured_logits
from lightscale.planning.hardware import H100
from lightscale.planning.step_cost import CostModel
from lightscale.runs.run_directory import RunDirectory, read_metrics
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.checkpoints.saving import Saver
from lightscale.training.optimizer.registry import optimizer_spec

HELPERS = Path(__file__).parents[2] / "helpers"
tiny = SimpleNamespace(**runpy.run_path(str(HELPERS / "tiny_engine.py")))
commands = runpy.run_path(str(HELPERS / "rank_commands.py"))["commands"]

RunRanks = Callable[..., list[Any]]
HEADS, WIDTH, STEPS = 4, 8, 10
MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": HEADS * WIDTH,
    "num_heads": HEADS,
    "intermediate_size": 24,
    "mixer": ["tnl", "llama"],
}
# Without rotary positions logits are products of projections, which a test computes by itself.
KINDS: dict[str, dict[str, Any]] = {
    "own keys": {"positions": "none", "attention_bias": "qkv"},
    "shared keys": {"positions": "none", "num_key_value_heads": 2, "output_gate": True},
}
LIMIT = 0.02
"""What some heads of every step exceed, and others do not."""


def optimizer(name: str, **more: Any) -> dict[str, Any]:
    own = {"newton_schulz_precision": "fp32"} if name == "muon" else {}
    return {"name": name, **own, **more}


def options(kind: str) -> dict[str, Any]:
    return MODEL | {"mixer_options": {"llama": KINDS[kind]}}


def main_weights(engine: Any) -> dict[str, Tensor]:
    return {
        name: engine.optimizer.owned(parameter).weights.view(parameter.shape) for name, parameter in tiny.named(engine)
    }


@contextmanager
def inputs_of(engine: Any) -> Iterator[list[Tensor]]:
    """(n, b, d) of the softmax layer, of every micro-batch."""
    seen: list[Tensor] = []
    layer = engine.module.decoder.layers[1].self_attention
    hook = layer.q_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    yield seen
    hook.remove()


def largest(inputs: list[Tensor], weights: dict[str, Tensor], kind: str) -> Tensor:
    """(heads,) fp64, of causal attention over whole rows."""
    groups = KINDS[kind].get("num_key_value_heads", HEADS)
    name = "decoder.layers.1.self_attention.{}_proj.{}"
    found = []
    for x in inputs:
        q, kv = (
            x.double() @ weights[name.format(part, "weight")].double().mT
            + (weights[name.format(part, "bias")].double() if "attention_bias" in KINDS[kind] else 0)
            for part in ("q", "kv")
        )
        q = q.unflatten(-1, (HEADS, -1))[..., :WIDTH]
        k = kv.unflatten(-1, (groups, 2, WIDTH))[..., 0, :].repeat_interleave(HEADS // groups, dim=-2)
        scores = torch.einsum("tbhk, sbhk -> bhts", q, k) / math.sqrt(WIDTH)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        found.append(scores.masked_fill(future, -torch.inf).amax(dim=(0, 2, 3)))
    return torch.stack(found).amax(dim=0)


def scale(weights: dict[str, Tensor], shares: Tensor, kind: str) -> None:
    """By the paper's rule, in place: keys of one head of queries by the root, shared keys not at all."""
    for name, weight in weights.items():
        part = name.removeprefix("decoder.layers.1.self_attention.")
        if part.startswith("q_proj"):
            rows = weight.unflatten(0, (HEADS, -1))[:, :WIDTH]
            own = shares.sqrt() if kind == "own keys" else shares
        elif part.startswith("kv_proj") and kind == "own keys":
            rows, own = weight.unflatten(0, (HEADS, 2, WIDTH))[:, 0], shares.sqrt()
        else:
            continue
        rows.mul_(own.view(-1, *[1] * (rows.dim() - 1)).to(rows))


def beside_the_definition(rank: int, world_size: int, init_method: str) -> list[str]:
    """Faults of ten steps: the same without QK-clip, behind each of which the test scales the weights."""
    faults = []
    with tiny.mesh_on((1, 1, 1, 1), rank, init_method) as mesh:
        for name, kind, precision in (
            ("muon", "own keys", "fp32"),
            ("adamw", "shared keys", "fp32"),
            ("lion", "own keys", "bf16"),
        ):
            how: dict[str, Any] = {"precision": precision, **options(kind)}
            clipped = tiny.engine_in(mesh, optimizer=optimizer(name, qk_clip=LIMIT), **how)
            plain = tiny.engine_in(mesh, optimizer=optimizer(name), **how)
            numbers = []
            for step in range(STEPS):
                batches = tiny.step_batches(step, mesh)
                with inputs_of(plain) as seen:
                    plain.forward_backward(batches)
                held = {key: weight.detach() for key, weight in tiny.named(plain)}
                logits = largest(seen, held, kind)
                plain.step(tiny.LR)
                shares = (LIMIT / logits).clamp(max=1.0).where(logits > 0, 1.0)
                scale(main_weights(plain), shares, kind)
                plain.finish_loading(None)
                numbers.append(int((shares < 1).sum()))
                clipped.forward_backward(batches)
                found = clipped.largest_logits()[1].double()
                near = 1e-4 if precision == "fp32" else 2e-2
                if not torch.allclose(found, logits, rtol=near):
                    faults.append(f"{name}, step {step}: logits {found} are not {logits}")
                if not bool((clipped.largest_logits()[0] == -torch.inf).all()):
                    faults.append(f"{name}: a layer without softmax has logits")
                clipped.step(tiny.LR)
                held = dict(tiny.named(clipped))
                for key, weight in main_weights(clipped).items():
                    expected = main_weights(plain)[key]
                    # In bf16 the model's own logits are of rounded queries and keys.
                    if (weight - expected).abs().max() > (near * expected.abs().max() if "_proj" in key else 0):
                        faults.append(f"{name}, {kind}, step {step}: {key} is another")
                    if not torch.equal(weight.to(held[key].dtype), held[key]):
                        faults.append(f"{name}, step {step}: the model has not the clipped {key}")
                    # Roundings would decide the next signs of gradients.
                    expected.copy_(weight)
                plain.finish_loading(None)
            if not any(0 < number < HEADS for number in numbers):
                faults.append(f"{name}: all or no heads are clipped: {numbers}")
    return faults


def test_ten_steps_are_those_of_the_definition(run_ranks: RunRanks) -> None:
    assert run_ranks(beside_the_definition, 1) == [[]]


def on_layouts(rank: int, world_size: int, init_method: str, layouts: list[Any], folder: str) -> list[str]:
    """Faults of logits and weights beside those of one process, and behind its checkpoint."""
    faults = []
    for number, axes in enumerate(layouts):
        with tiny.mesh_on(axes, rank, f"{init_method}-{number}") as mesh:
            for kind in KINDS:
                how: dict[str, Any] = {"optimizer": optimizer("muon", qk_clip=LIMIT), **options(kind)}
                how["mixer_options"] = {"llama": KINDS[kind] | {"positions": "rope"}}
                engine = tiny.engine_in(mesh, **how)
                found = [(tiny.train(engine, step, step + 1)[0][2], engine.largest_logits()) for step in range(2)]
                saved = Path(folder) / kind
                if mesh.world_size == 1:
                    Saver(saved, mesh).save(engine, step=2, common={}, facts={})
                else:
                    engine = tiny.engine_in(mesh, seed=7, **how)
                    assert Checkpoints(saved, mesh).restore(engine) is not None
                found.append((tiny.train(engine, 2, 3)[0][2], engine.largest_logits()))
                if mesh.world_size == 1:
                    torch.save(found, saved / "found.pt")
                    continue
                for step, (own, one) in enumerate(zip(found, torch.load(saved / "found.pt"), strict=True)):
                    if not torch.allclose(own[1], one[1], rtol=1e-3):
                        faults.append(f"{kind} on {axes}, step {step}: logits {own[1]} are not {one[1]}")
                    for key, weight in one[0].items():
                        off = float(((own[0][key] - weight).abs() > 0.02 * tiny.LR).double().mean())
                        if off > 0.01:
                            faults.append(f"{kind} on {axes}, step {step}: {off:.1%} of {key} are apart")
    return faults


@pytest.mark.long
def test_layouts_clip_as_one_process(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(on_layouts, 1, [(1, 1, 1, 1)], str(tmp_path)) == [[]]
    layouts = [(2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (2, 1, 1, 1)]
    assert run_ranks(on_layouts, 2, layouts, str(tmp_path)) == [[], []]


def what_stays(rank: int, world_size: int, init_method: str) -> list[str]:
    """Weights of a group without a learning rate that change, and logits of validation."""
    faults = []
    still = {"still": {"parameters": ["*.layers.1.*"], "lr_factor": 0.0}}
    with tiny.mesh_on((1, 1, 1, 1), rank, init_method) as mesh:
        engine = tiny.engine_in(mesh, optimizer=optimizer("lion", qk_clip=LIMIT, groups=still), **options("own keys"))
        before = {name: weight.clone() for name, weight in main_weights(engine).items()}
        engine.forward_backward(tiny.step_batches(0, mesh))
        seen = engine.largest_logits().clone()
        engine.step(tiny.LR)
        faults += [
            name
            for name, weight in main_weights(engine).items()
            if ".layers.1." in name and not torch.equal(weight, before[name])
        ]
        engine.forward_only(tiny.step_batches(1, mesh))
        if not torch.equal(seen, engine.largest_logits()):
            faults.append("validation is measured")
    return faults


def test_what_is_not_trained_is_not_clipped(run_ranks: RunRanks) -> None:
    assert run_ranks(what_stays, 1) == [[]]


def config_of(model: dict[str, Any], optimizer: dict[str, Any], **metrics: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(**{**MODEL, "vocab_size": 128, **model}),
        data=DataConfig(store=Path("store"), sequence_length=48),
        optimizer={"lr": 1e-3, **optimizer},  # type: ignore[arg-type]
        train=TrainConfig(steps=1, global_batch_size=1),
        metrics=MetricsConfig(**metrics),
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"mixer": ["tnl", "hgrn2"]},
            "no layer of the model (tnl, hgrn2) has softmax attention, whose logits it bounds; set it to none",
        ),
        (
            {"mixer": "llama", "mixer_options": {"llama": {"qk_norm": "head"}}},
            'model.mixer_options.llama.qk_norm = "head" normalises queries and keys, and undoes what it scales; set it '
            'to none, or model.mixer_options.llama.qk_norm to "none"',
        ),
    ],
)
def test_models_that_cannot_be_clipped_are_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        optimizer_spec(config_of(model, {"qk_clip": 100.0}))
    assert str(error.value) == f"optimizer.qk_clip = 100.0: {message}"


def test_logits_are_measured_where_there_are_some() -> None:
    check_measured_logits(config_of({}, {}, attention_logits_every=10))
    check_measured_logits(config_of({"mixer": "tnl"}, {}))
    with pytest.raises(UserError) as error:
        check_measured_logits(config_of({"mixer": "tnl"}, {}, attention_logits_every=10))
    assert str(error.value) == (
        "metrics.attention_logits_every = 10: no layer of the model (tnl) has softmax attention; set it to 0"
    )


def test_a_plan_counts_the_scores_once_more() -> None:
    plain, clipped = (
        CostModel(one, 48, H100).predict(check_layout(one, 1))
        for one in (config_of({}, {}), config_of({}, {"qk_clip": 100.0}))
    )
    # A product of queries and keys in each layer: 2 T² / 2 H D FLOPs.
    flops = MODEL["num_layers"] * 48**2 * MODEL["hidden_size"]
    more_s = clipped.work.operators_s - plain.work.operators_s
    assert more_s == pytest.approx(flops / plain.peak_flops, rel=1e-6)
    assert clipped.step_s - plain.step_s == pytest.approx(more_s, rel=1e-2)


@pytest.mark.long
def test_a_run_records_the_largest_logits(workplace: Path, run_ranks: RunRanks) -> None:
    """Also of two pipeline stages, of which the first has no logits."""
    words = ["train", "run.toml", "train.steps=4", "train.validate_every=0", "optimizer.warmup_steps=0"]
    words += ["model.num_layers=2", 'model.mixer=["tnl", "llama"]', "parallel.pipeline=2"]
    for name, own, steps in (
        ("clipped", ["optimizer.qk_clip=0.01", "metrics.log_every=2"], [2, 4]),
        ("measured", ["metrics.attention_logits_every=3"], [3]),
    ):
        results = run_ranks(commands, 2, str(workplace), [[*words, *own, "--run", name]])
        assert [code for code, _ in results[0]] == [0], results
        run = RunDirectory(workplace / name)
        lines = {line["step"]: line["largest_logit"] for line in read_metrics(run.metrics) if "largest_logit" in line}
        assert list(lines) == steps
        assert all(of.keys() == {"1"} and of["1"] > 0 for of in lines.values())
        board = EventAccumulator(str(run.tensorboard), size_guidance={"scalars": 0})
        board.Reload()
        assert [event.step for event in board.Scalars("largest_logit/1")] == steps
