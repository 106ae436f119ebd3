"""Diffusion: noised batches taken apart again, the model written out plainly in fp64, and every axis."""

import math
import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightscale.config.files import load
from lightscale.config.model import ModelConfig
from lightscale.config.schema import AdapterConfig
from lightscale.data_pipeline.augmentation.noise import as_bytes, betas, scaled, signal_shares
from lightscale.data_pipeline.loading.loader import LoaderLayout, TokenLoader
from lightscale.data_pipeline.loading.windows import Batch
from lightscale.data_pipeline.store.token_store import StoreWriter, TokenStore
from lightscale.data_pipeline.tokenizers import NoText
from lightscale.errors import UserError
from lightscale.models.accounting import parameter_shapes, parameter_terms, rank_parameters
from lightscale.models.language_model import language_model_chunks, transformer_config
from lightscale.models.low_rank import add_adapters
from lightscale.parallel.engine import Engine, more_inputs
from lightscale.parallel.initialization import draw_weights, named_parameters, normal, set_initializer, zeros
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.tasks.diffusion import Diffusion, DiffusionTaskConfig
from lightscale.training.optimizer.adamw import AdamW

HELPERS = Path(__file__).parents[1] / "helpers"
parity, plain, drawing = (
    SimpleNamespace(**runpy.run_path(str(HELPERS / f"{name}.py"))) for name in ("parity", "plain_models", "drawing")
)
images = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("test_classify_image.py"))))
RunRanks = Callable[..., list[Any]]
MEAN, STD, CLASSES = [0.1, 0.2, 0.3], [0.5, 0.6, 0.7], images.LABELS


def model_of(**more: Any) -> ModelConfig:
    base = images.model_of(0, learned=True).model_dump(exclude={"head", "mixer", "mixer_options"})
    return ModelConfig.model_validate({**base, "diffusion": {"num_labels": CLASSES, "timestep_width": 6}, **more})


MODELS = {
    "vit": model_of(
        mixer="llama",
        norm="layernorm",
        glu_activation="silu",
        mixer_options={"llama": {"causal": False, "positions": "none"}},
    ),
    # As DiT's own blocks, and norms with weights.
    "dit": model_of(
        mixer="llama",
        norm="layernorm",
        norm_elementwise_affine=True,
        gated_linear_unit=False,
        mlp_bias=True,
        glu_activation="gelu_tanh",
        mixer_options={"llama": {"causal": False, "positions": "none"}},
    ),
    "lightnet": model_of(mixer="lightnet", mixer_options={"lightnet": {"causal": False, "learned_angles": True}}),
    "lion": model_of(mixer=["lion-lit", "lion-retnet", "lion-s", "lion-s"], num_layers=4, norm="rmsnorm"),
    "bi-rn": model_of(mixer="bi-rn", norm="layernorm"),
    "causal": model_of(mixer=["tnl", "lightnet"]),
    "raw": model_of(mixer="tnl", mixer_options={"tnl": {"gate_input": "raw"}}),
}
# Its gate reads the stream, which the plain mixers do not.
WRITTEN_OUT = [name for name in MODELS if name != "raw"]
AXES = ({"tensor": 2}, {"pipeline": 2}, {"sequence": 2}, {"data": 2})


def loader(path: Path, model: ModelConfig, *, task: dict[str, Any] | None = None, **layout: int) -> TokenLoader:
    store = TokenStore(path)
    assert model.grid is not None
    return TokenLoader(
        store,
        sequence_length=model.grid.document_tokens,
        global_batch_size=8,
        micro_batch_size=2,
        seed=0,
        layout=LoaderLayout(**layout),
        targets=Diffusion(DiffusionTaskConfig.model_validate(task or {}), model).targets(store, validation=False),
    )


# ----- noise --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timesteps", [4, 1000])
def test_schedules_are_the_printed_ones(timesteps: int) -> None:
    for name in ("linear", "cosine"):
        share, expected = 1.0, []
        for t in range(timesteps):
            if name == "linear":
                beta = min(1000 / timesteps * (1e-4 + (0.02 - 1e-4) * t / (timesteps - 1)), 0.999)
            else:
                now, then = (math.cos((moment / timesteps + 0.008) / 1.008 * math.pi / 2) ** 2 for moment in (t, t + 1))
                beta = min(1 - then / now, 0.999)
            share *= 1 - beta
            expected.append(share)
        np.testing.assert_allclose(signal_shares(name, timesteps), expected, rtol=1e-9)
        assert 0 < betas(name, timesteps)[-1] <= 0.999


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_noise_can_be_taken_off_again(tmp_path: Path, prediction: str) -> None:
    store = images.write_store(tmp_path / "store")
    task = {"prediction": prediction, "timesteps": 50, "label_dropout": 0.3, "schedule": "cosine"}
    whole = loader(store.path, MODELS["vit"], task=task)
    halves = [loader(store.path, MODELS["vit"], task=task, sequence_rank=rank, sequence_size=2) for rank in range(2)]
    shares, noises, timesteps, dropped = signal_shares("cosine", 50), [], [], 0
    for number in range(12):
        at = whole.step_tokens.after(number)
        samples, batches, parts = (
            whole.step_after(at),
            whole.batches_after(at),
            [one.batches_after(at) for one in halves],
        )
        for row, location in enumerate(samples.locations):
            batch, own = batches[row // 2], row % 2
            assert batch.conditions is not None and batch.wanted is not None
            t, label = batch.conditions[own].tolist()
            signal, spread = math.sqrt(shares[t]), math.sqrt(1 - shares[t])
            noised, wanted = batch.tokens[own].double().numpy(), batch.wanted[own].double().numpy()
            if prediction == "epsilon":
                image, noise = (noised - spread * wanted) / signal, wanted
            else:
                image, noise = signal * noised - spread * wanted, spread * noised + signal * wanted
            # Whatever is left of an image in fp32 at the last timesteps.
            if signal > 0.05:
                pixels = np.stack(images.patches(images.pixels()[location.window]))
                assert np.array_equal(as_bytes(image, MEAN, STD), pixels)
                np.testing.assert_allclose(scaled(pixels, MEAN, STD), image, atol=1e-4)
            noises.append(noise)
            timesteps.append(t)
            dropped += label == CLASSES
            assert label in (CLASSES, images.label_of(location.window))
            assert batch.loss_mask[own].tolist() == [1] * 8
            for name in ("tokens", "wanted", "conditions"):
                joined = [getattr(half[row // 2], name)[own] for half in parts]
                found = joined[0] if name == "conditions" else torch.cat(joined)
                assert torch.equal(found, getattr(batch, name)[own])
    numbers = np.stack(noises)
    assert len(np.unique(numbers.round(5))) > 0.95 * numbers.size
    assert abs(numbers.mean()) < 4 / math.sqrt(numbers.size)
    assert abs(numbers.std() - 1) < 4 / math.sqrt(2 * numbers.size)
    assert min(timesteps) < 5 and max(timesteps) > 44 and len(set(timesteps)) > 30
    assert 12 < dropped < 48


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_latents_are_noised_as_they_are(tmp_path: Path, dtype: str) -> None:
    """Neither scaled by 255 nor cut off nor rounded; flipped from left to right where that is asked for."""
    latents = (20 * np.random.default_rng(4).normal(size=(images.IMAGES, *images.SHAPE)) - 30).astype(dtype)
    documents: Any = {"image": (dtype, (latents[0].size,)), "label": "int32"}
    with StoreWriter(
        tmp_path / "store", NoText(), image_shape=images.SHAPE, shard_tokens=64, chunk_tokens=16
    ) as writer:
        source = writer.source("latents", documents=documents)
        for number, one in enumerate(latents):
            values = {"image": one.ravel(), "label": images.label_of(number)}
            source.append([], num_bytes=one.nbytes, documents=values)
        writer.finish({"sources": {"latents": {}}})
    mean, std = [-30.0, -31.0, 2.0], [20.0, 7.0, 0.5]
    model = model_of(mixer="lion-lit", patches={"size": [2, 2], "latents": True, "mean": mean, "std": std})
    Diffusion(DiffusionTaskConfig(), model).check_store(model, TokenStore(tmp_path / "store"), ["latents"])
    shares, flipped = signal_shares("linear", 1000), 0
    task = {"augmentation": {"horizontal_flip": 0.5}}
    data = loader(tmp_path / "store", model, task=task)
    for number in range(6):
        at = data.step_tokens.after(number)
        for row, location in enumerate(data.step_after(at).locations):
            batch, own = data.batches_after(at)[row // 2], row % 2
            assert batch.conditions is not None and batch.wanted is not None
            t, _ = batch.conditions[own].tolist()
            image = batch.tokens[own].double().numpy() - math.sqrt(1 - shares[t]) * batch.wanted[own].double().numpy()
            whole = (latents[location.window].astype(np.float64) - mean) / std
            ways = [np.stack(images.patches(one)) * math.sqrt(shares[t]) for one in (whole, whole[:, ::-1])]
            errors = [np.abs(image - one).max() for one in ways]
            assert min(errors) < 1e-4
            flipped += errors[1] < errors[0]
    assert 10 < flipped < 38


def test_validation_drops_no_class_and_repeats(tmp_path: Path) -> None:
    store = images.write_store(tmp_path / "store")
    made = Diffusion(DiffusionTaskConfig(label_dropout=1.0), MODELS["vit"])
    training, validation = (made.targets(store, validation=held) for held in (False, True))
    assert training.noise is not None and validation.noise is not None
    assert training.noise.label_dropout == 1.0
    assert validation.noise.label_dropout == 0.0


def test_a_run_is_not_resumed_with_other_noise(tmp_path: Path) -> None:
    path = images.write_store(tmp_path / "store").path
    one = loader(path, MODELS["vit"])
    one.next_step()
    again = loader(path, MODELS["vit"], data_rank=1, data_size=2)
    again.load_state_dict(one.state_dict())
    for mine, theirs in zip(one.next_step()[1::2], again.next_step(), strict=True):
        assert torch.equal(mine.tokens, theirs.tokens)
        assert torch.equal(mine.conditions, theirs.conditions)  # type: ignore[arg-type]
    for change in ({"seed": 1}, {"schedule": "cosine"}, {"timesteps": 7}, {"prediction": "v"}, {"label_dropout": 0.0}):
        with pytest.raises(UserError, match="diffusion label, patches of 2 x 2"):
            loader(path, MODELS["vit"], task=change).load_state_dict(one.state_dict())


# ----- the model ----------------------------------------------------------------------------------------------------


def chunks_of(mesh: Mesh, model: ModelConfig, config: Any) -> list[Any]:
    chunks = language_model_chunks(config, model, vocab_size=1, mesh=mesh)
    for chunk in chunks:
        for _, weight in named_parameters(chunk):
            # Behind an output and gates of 0 nothing would get a gradient.
            if weight.draw_weights is zeros:  # type: ignore[attr-defined]
                set_initializer(weight, normal(0.2))
        draw_weights(chunk, seed=0, tensor_rank=mesh.groups.tp.rank(), tensor_size=mesh.tensor)
    return list(chunks)


def by_the_engine(
    rank: int, world_size: int, init_method: str, path: Path, cases: list[tuple[str, dict[str, Any]]]
) -> list[dict[str, Any]]:
    found = []
    for number, (name, axes) in enumerate(cases):
        place, layout = f"{init_method}-{number}", {axis: size for axis, size in axes.items() if axis != "recompute"}
        layout.pop("data", None)
        with start_mesh(device="cpu", rank=rank, world_size=world_size, init_method=place, **layout) as mesh:
            config = transformer_config(MODELS[name], mesh, torch.float64, recompute=axes.get("recompute", "none"))
            chunks = chunks_of(mesh, MODELS[name], config)
            engine = Engine(chunks, config, mesh, optimizer=AdamW(), num_sources=1)
            of_rank = {"sequence_rank": mesh.sequence_rank, "sequence_size": mesh.sequence}
            data = loader(path, MODELS[name], data_rank=mesh.data_rank, data_size=mesh.data, **of_rank)
            batches: list[Batch] = [batch.to(mesh.device) for batch in data.next_step()]
            scores, sums = engine.forward_only(batches), engine.forward_backward(batches)
            assert abs(scores.loss - sums.loss) < 1e-9
            found.append({"loss": sums.loss, "tokens": sums.tokens, "gradients": parity.gradients(engine)})
            if world_size == 1:
                # The engine would take the gradients away.
                (module,) = chunks_of(mesh, MODELS[name], config)
                plain.disturb(module, scale=0.05)
                found[-1]["disturbed"] = disturbed(module, batches[0])
    return found


def disturbed(module: Any, batch: Batch) -> dict[str, Any]:
    how = more_inputs(batch)
    predicted = module(batch.tokens, batch.positions, conditions=how["conditions"])
    weight = torch.rand(batch.labels.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    losses = module(batch.tokens, batch.positions, batch.labels, loss_mask=weight, **how)
    losses.sum().backward()
    return {
        "logits": predicted.detach(),
        "losses": losses.detach(),
        "gradients": {name: weight.grad for name, weight in named_parameters(module)},
        "weights": plain.weights_of(module),
        "weight": weight,
        "tokens": batch.tokens,
        **how,
    }


def conditioning(leaves: dict[str, Tensor], timestep: int, label: int) -> Tensor:
    width = leaves["conditioning.time_in"].size(1)
    angles = [timestep * 10_000 ** (-2 * j / width) for j in range(width // 2)]
    features = torch.tensor([*map(math.cos, angles), *map(math.sin, angles)], dtype=torch.float64)
    inner = leaves["conditioning.time_in"] @ features + leaves["conditioning.time_in_bias"]
    of_time = leaves["conditioning.time_out"] @ (inner * inner.sigmoid()) + leaves["conditioning.time_out_bias"]
    total = of_time + leaves["conditioning.labels"][label]
    return total * total.sigmoid()


def plainly(model: ModelConfig, figures: dict[str, Any]) -> dict[str, Any]:
    """Each image by itself: patches, positions, blocks around the stream, output."""
    leaves = {name: weight.clone().requires_grad_() for name, weight in figures["weights"].items()}
    of_model = {name: weight for name, weight in leaves.items() if ".layers." not in name}
    found = []
    for image, (timestep, label) in zip(figures["tokens"].double(), figures["conditions"].tolist(), strict=True):
        c, d = conditioning(leaves, timestep, label), model.hidden_size
        x = image @ leaves["embedding.patches.weight"].T + leaves["embedding.patches.bias"]
        x = x + leaves["embedding.positions.table"]
        if "embedding.tpe.decay_logit" in leaves:
            x = plain.grid_toeplitz(model, x, leaves)
        for layer in range(model.num_layers):
            prefix = f"decoder.layers.{layer}."
            own = {name.removeprefix(prefix): weight for name, weight in leaves.items() if name.startswith(prefix)}
            six = (own["modulation.weight"] @ c + own["modulation.bias"]).view(6, d)
            of_mixer = {name.removeprefix("self_attention."): weight for name, weight in own.items()}
            of_mixer |= of_model
            y = plain.block_norm(model, x, own, "input_layernorm") * (1 + six[1]) + six[0]
            x = x + six[2] * images.mix(model, y, of_mixer, layer)
            y = plain.block_norm(model, x, own, "pre_mlp_layernorm") * (1 + six[4]) + six[3]
            x = x + six[5] * plain.gated_linear_unit(model, y, own)
        x = plain.block_norm(model, x, leaves, "decoder.final_layernorm")
        two = (leaves["output_layer.modulation.weight"] @ c + leaves["output_layer.modulation.bias"]).view(2, d)
        x = x * (1 + two[1]) + two[0]
        found.append(x @ leaves["output_layer.weight"].T + leaves["output_layer.bias"])
    predicted = torch.stack(found)
    losses = (predicted - figures["wanted"]).square().mean(-1) * figures["weight"]
    gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
    return {
        "logits": predicted.detach(),
        "losses": losses.detach(),
        "gradients": dict(zip(leaves, gradients, strict=True)),
    }


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = images.write_store(tmp_path_factory.mktemp("images") / "store").path
    return found


@pytest.fixture(scope="module")
def one_rank(run_ranks: RunRanks, store: Path) -> dict[str, dict[str, Any]]:
    (found,) = run_ranks(by_the_engine, 1, store, [(name, {}) for name in MODELS], timeout_s=300)
    return dict(zip(MODELS, found, strict=True))


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_the_model_is_the_plain_one(one_rank: dict[str, dict[str, Any]], name: str) -> None:
    figures = one_rank[name]["disturbed"]
    plain.assert_equal(figures, plainly(MODELS[name], figures))
    shapes = {key: tuple(weight.shape) for key, weight in figures["weights"].items()}
    assert shapes == parameter_shapes(MODELS[name])


def check(cases: list[tuple[str, dict[str, Any]]], ranks: list[Any], one_rank: dict[str, dict[str, Any]]) -> None:
    for number, (name, axes) in enumerate(cases):
        expected, compared = one_rank[name], set()
        for found in ranks:
            one = found[number]
            assert one["tokens"] == 64, (name, axes)
            assert one["loss"] == pytest.approx(expected["loss"], rel=1e-12), (name, axes)
            for key, gradient in one["gradients"].items():
                assert expected["gradients"][key].norm() > 0, key
                assert parity.error(gradient, expected["gradients"][key]) < 1e-10, (name, axes, key)
            compared |= one["gradients"].keys()
        assert compared == expected["gradients"].keys()


def test_four_ranks_equal_one(run_ranks: RunRanks, store: Path, one_rank: dict[str, dict[str, Any]]) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("lightnet", {"tensor": 2, "pipeline": 2, "recompute": "full"}),
        ("vit", {"sequence": 2, "data": 2}),
    ]
    check(cases, run_ranks(by_the_engine, 4, store, cases, timeout_s=300), one_rank)


@pytest.mark.long
def test_two_ranks_equal_one(run_ranks: RunRanks, store: Path, one_rank: dict[str, dict[str, Any]]) -> None:
    """Every axis, every model and every recomputation; the loss and every gradient."""
    recompute = ({}, {"recompute": "full"}, {"recompute": "selective"})
    drawn = drawing.covering("axes of diffusion", list(MODELS), AXES, recompute)
    cases = [(name, {**axes, **more}) for name, axes, more in drawn]
    cases.append(("lion", {"pipeline": 2, "virtual_stages": 2}))
    check(cases, run_ranks(by_the_engine, 2, store, cases, timeout_s=600), one_rank)


def with_adapters(rank: int, world_size: int, init_method: str, path: Path, shares: list[float]) -> list[Any]:
    """Gradients of adapters whose inputs are dropped by these shares, without recomputation and with both kinds."""
    found = []
    with start_mesh(device="cpu", init_method=init_method) as mesh:
        for share in shares:
            for recompute in ("none", "selective", "full"):
                config = transformer_config(MODELS["vit"], mesh, torch.float64, recompute=recompute)
                chunks = chunks_of(mesh, MODELS["vit"], config)
                add_adapters(chunks, AdapterConfig(name="lora", r=2, lora_dropout=share), seed=3)
                for chunk in chunks:
                    draw_weights(chunk, seed=0, tensor_rank=0, tensor_size=1)
                    for name, weight in named_parameters(chunk):
                        if name.endswith("lora_B"):
                            weight.data.normal_(generator=torch.Generator().manual_seed(1))
                engine = Engine(chunks, config, mesh, optimizer=AdamW(), num_sources=1)
                batches = [
                    replace(batch, places=number * 1000 + torch.arange(len(batch.labels)))
                    for number, batch in enumerate(loader(path, MODELS["vit"]).next_step())
                ]
                engine.forward_backward(batches)
                found.append({name: one for name, one in parity.gradients(engine).items() if "lora" in name})
    return found


def test_adapters_drop_the_same_in_a_pass_that_is_repeated(run_ranks: RunRanks, store: Path) -> None:
    ((plain_one, *others, dropped, selective, full),) = run_ranks(with_adapters, 1, store, [0.0, 0.3])
    assert plain_one and all(one.keys() == plain_one.keys() for one in (*others, dropped, selective, full))
    for name, gradient in dropped.items():
        for one in (selective, full):
            assert parity.error(one[name], gradient) < 1e-10, name
        assert parity.error(plain_one[name], gradient) > 1e-3, name


def test_counts_are_those_of_the_ranks() -> None:
    for name, model in MODELS.items():
        shapes = parameter_shapes(model)
        total = sum(map(math.prod, shapes.values()))
        assert sum(parameter_terms(model).values()) == total, name
        assert rank_parameters(model, tensor=1, pipeline=1) == [total]
        part = sum(math.prod(shape) for key, shape in shapes.items() if key.startswith("conditioning."))
        # Every stage has the conditioning.
        assert sum(rank_parameters(model, tensor=1, pipeline=2)) == total + part


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.diffusion=none"], "model.patches without model.head"),
        (["model.head={num_labels=3}"], "model.diffusion with model.head is set"),
        (["model.norm_placement=both"], 'model.norm_placement = "both"'),
        (["model.final_norm=false"], "model.final_norm = false"),
        (["model.intermediate_size=0"], "model.intermediate_size = 0"),
        (["model.final_logit_cap=3.0"], "model.final_logit_cap"),
        (["model.grid.leading_tokens=1", "data.sequence_length=17"], "model.grid.leading_tokens"),
        (["task.augmentation.mixup_alpha=1.0"], "task.augmentation mixes images"),
        (["train.z_loss_multiplier=0.1"], "train.z_loss_multiplier"),
        (["model.diffusion.timestep_width=7"], "model.diffusion.timestep_width"),
        (["data.sequence_length=8"], "an image has 16 tokens"),
    ],
)
def test_wrong_combinations_are_refused_by_name(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load("lightnet-dit-digits", words)


def test_texts_are_not_noised() -> None:
    with pytest.raises(UserError, match=re.escape('task.name = "diffusion": model.diffusion')):
        load("tnl-tiny", ["task.name=diffusion"])
    with pytest.raises(UserError, match=re.escape('but task.name = "diffusion" predicts noise; remove the table')):
        load("vit-digits", ["task.name=diffusion"])


@pytest.mark.parametrize(("size", "printed"), [("s", 33), ("b", 131), ("l", 470), ("xl", 680)])
def test_published_sizes_have_the_printed_counts(size: str, printed: int) -> None:
    """LightNet's table 13."""
    for patch in (8, 4, 2):
        config = load(f"lightnet-dit-{size}-{patch}")
        assert round(sum(parameter_terms(config.model).values()) / 1e6) == printed
        assert config.model.image_shape == (32, 32, 3)
