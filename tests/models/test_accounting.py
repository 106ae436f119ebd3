"""Counts of parameters against models that are really built: every mixer, every shipped run, every rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightscale.config.files import load
from lightscale.config.mixers import MIXERS, MixerEntry
from lightscale.config.model import ModelConfig
from lightscale.models.accounting import parameter_shapes, parameter_terms, rank_parameters
from lightscale.models.flops import forward_flops_per_token
from lightscale.models.language_model import LanguageModel, transformer_config
from lightscale.models.registry import check_model
from lightscale.models.specs.interface import MixerSpec, Shapes
from lightscale.parallel.initialization import named_parameters
from lightscale.parallel.mesh import Mesh, start_mesh

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RUNS = sorted(CONFIGS.glob("*.toml"))
SIZES = ("tiny", "70m", "160m", "410m", "1b", "3b", "7b")
AXES: dict[str, dict[str, int]] = {"tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}}


def tiny(mixer: str | list[str], **fields: Any) -> ModelConfig:
    shape: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 128,
    }
    return ModelConfig(mixer=mixer, **{**shape, **fields})


GROUPED = tiny(
    "llama",
    norm="rmsnorm",
    tie_word_embeddings=False,
    mixer_options={"llama": {"num_key_value_heads": 2, "head_dim": 6, "attention_bias": "all"}},
)
BY_CHANNEL = tiny("lion-s", norm="rmsnorm", mixer_options={"lion-s": {"vector_decay": True}})
SPLIT = {**{name: tiny(name, norm="rmsnorm") for name in MIXERS}, "grouped": GROUPED, "by channel": BY_CHANNEL}
SPLIT |= {
    f"norm of {kind}": tiny("llama", mixer_options={"llama": {"qk_norm": kind, "num_key_value_heads": 2}})
    for kind in ("head", "all")
}
SPLIT |= {f"norms {placement}": tiny("tnl", norm="rmsnorm", norm_placement=placement) for placement in ("post", "both")}
SPLIT["norms by mixer"] = tiny(["tnl", "llama"], norm="rmsnorm", norm_placement="by_mixer")
SPLIT["sinks"] = tiny("llama", mixer_options={"llama": {"attention_sinks": True}})
SPLIT["gated"] = tiny("llama", mixer_options={"llama": {"output_gate": True, "attention_bias": "all"}})
SPLIT |= {f"padded, {tied=}": tiny("tnl", vocab_size=321, tie_word_embeddings=tied) for tied in (True, False)}


def build(model: ModelConfig, mesh: Mesh) -> LanguageModel:
    return LanguageModel(
        transformer_config(model, mesh, torch.float32),
        model,
        vocab_size=model.vocab_size,
        mesh=mesh,
        pre_process=mesh.groups.pp.rank() == 0,
        post_process=mesh.is_last_stage,
    )


def shapes_of(model: LanguageModel) -> Shapes:
    return {name: tuple(parameter.shape) for name, parameter in named_parameters(model)}


def shapes_and_shares(
    rank: int, world_size: int, init_method: str, models: dict[str, ModelConfig], split: dict[str, ModelConfig]
) -> tuple[dict[str, Shapes], dict[tuple[str, str], int], int]:
    """Parameters of ``models``, each whole, on rank 0; their number here of ``split``; bytes of one with memory."""
    with start_mesh(device="cpu", rank=rank, world_size=world_size, init_method=init_method) as mesh:
        real = build(tiny("tnl"), mesh)
        num_bytes = sum(parameter.untyped_storage().nbytes() for parameter in real.parameters())
        # From here on models are built on the meta device: parameters with shapes but without memory.
        torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment,return-value]
        mine = models if rank == 0 else {}
        shapes = {name: shapes_of(build(model, mesh)) for name, model in mine.items()}
    shares = {}
    for axis, degrees in AXES.items():
        method = f"{init_method}-{axis}"
        with start_mesh(device="cpu", rank=rank, world_size=world_size, init_method=method, **degrees) as mesh:
            for name, model in split.items():
                if axis in MIXERS[model.layers[0]].axes:
                    shares[axis, name] = sum(parameter.numel() for parameter in build(model, mesh).parameters())
    return shapes, shares, num_bytes


@pytest.fixture(scope="module")
def built(run_ranks: Callable[..., list[Any]]) -> list[Any]:
    models = {path.stem: load(path).model for path in RUNS}
    return run_ranks(shapes_and_shares, 2, {**models, "grouped": GROUPED}, SPLIT)


@pytest.mark.parametrize("name", [*(path.stem for path in RUNS), "grouped"])
def test_shapes_are_those_of_the_built_model(built: list[Any], name: str) -> None:
    model = GROUPED if name == "grouped" else load(CONFIGS / f"{name}.toml").model
    expected = built[0][0][name]
    assert parameter_shapes(model) == expected
    counted = sum(torch.Size(shape).numel() for shape in expected.values())
    assert sum(parameter_terms(model).values()) == counted


def test_every_architecture_of_the_study_is_shipped_in_every_size() -> None:
    study = ("llama", "tnl", "hgrn2", "cosformer2", "lightnet")
    assert {f"{mixer}-{size}" for mixer in study for size in SIZES} <= {path.stem for path in RUNS}


def test_a_real_model_has_the_counted_bytes(built: list[Any]) -> None:
    assert built[0][2] == 4 * sum(parameter_terms(tiny("tnl")).values())


@pytest.mark.parametrize(
    ("name", "axis"),
    [(name, axis) for name, model in SPLIT.items() for axis in AXES if axis in MIXERS[model.layers[0]].axes],
)
def test_each_rank_holds_the_counted_share(built: list[Any], name: str, axis: str) -> None:
    degrees = {"tensor": 1, "pipeline": 1, **AXES[axis]}
    model = SPLIT[name]
    for rank, (_, shares, _) in enumerate(built):
        stage = rank if axis == "pipeline" else 0
        assert rank_parameters(model, **degrees)[stage] == shares[axis, name]


@pytest.mark.parametrize(
    ("model", "terms"),
    [
        (tiny("tnl"), {"gates": 4 * 2 * 64 * 16, "LRPE angles": 64}),
        (tiny("tnl", mixer_options={"tnl": {"gate_rank": 8}}), {"gates": 4 * 2 * 64 * 8, "LRPE angles": 64}),
        (tiny("hgrn2"), {"lower bounds": 4 * 64}),
        (
            tiny("cosformer2"),
            {"gates": 4 * 2 * 64 * 16, "LRPE angles": 4 * 64, "TPE": 64 * 16, "TPE decays": 16},
        ),
        (tiny("lightnet"), {"gates": 4 * 2 * 64 * 16, "TPE": 64 * 16, "TPE decays": 16}),
        (tiny("llama", norm="rmsnorm"), {"norm weights": 9 * 64}),
        (tiny(["tnl*3", "llama"]), {"gates": 3 * 2 * 64 * 16, "LRPE angles": 64}),
        (
            tiny(["hgrn2", "lightnet"]),
            {"gates": 2 * 2 * 64 * 16, "lower bounds": 4 * 64, "TPE": 64 * 16, "TPE decays": 16},
        ),
    ],
    ids=["tnl", "gate rank", "hgrn2", "cosformer2", "lightnet", "llama", "hybrid", "two shared parts"],
)
def test_terms_are_the_formulas(model: ModelConfig, terms: dict[str, int]) -> None:
    common = {"embedding": 128 * 64, "projections": 4 * 4 * 64 * 64, "GLU": 4 * 3 * 64 * 96}
    assert parameter_terms(model) == {**common, **terms}
    assert next(iter(parameter_terms(model))) == "embedding"


def test_terms_of_grouped_heads_are_the_formulas() -> None:
    """4 heads of queries and 2 of keys and values, 6 channels each; the output layer counts with the embedding."""
    projections = 4 * (2 * 24 * 64 + 2 * 12 * 64 + 24 + 2 * 12 + 64)
    common = {"embedding": 2 * 128 * 64, "GLU": 4 * 3 * 64 * 96, "norm weights": 9 * 64}
    assert parameter_terms(GROUPED) == {**common, "projections": projections}
    # Four projections, and two products of 24 channels with half of the other tokens.
    mixer = 2 * (2 * 24 * 64 + 2 * 12 * 64) + 2 * 24 * 100
    assert forward_flops_per_token(GROUPED, 100) == 4 * (mixer + 6 * 64 * 96) + 2 * 64 * 128


class Convolution(MixerSpec):
    @staticmethod
    def parameter_shapes(model: ModelConfig, layer: int) -> Shapes:
        return {"out_proj.weight": (model.hidden_size, model.hidden_size), "conv.weight": (model.hidden_size, 4)}


def test_an_unknown_kind_of_parameter_is_named_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS, "convolution", MixerEntry(spec=f"{__name__}:Convolution", cls="not.looked:At"))
    model = tiny("convolution")
    check_model(model, load(CONFIGS / "tnl-tiny.toml").parallel)
    assert parameter_terms(model)["conv.weight"] == 4 * 64 * 4
    assert parameter_terms(model)["projections"] == 4 * 64 * 64


def test_terms_of_the_options_of_attention_are_the_formulas() -> None:
    """Gates are as wide as queries; norms, sinks and windows cost no products."""
    options = {"qk_norm": "all", "num_key_value_heads": 2, "attention_sinks": True, "output_gate": True, "window": 30}
    model = tiny("llama", norm="rmsnorm", mixer_options={"llama": options})
    projections = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 64 * 64)
    common = {"embedding": 128 * 64, "GLU": 4 * 3 * 64 * 96, "norm weights": 9 * 64 + 4 * (64 + 32)}
    assert parameter_terms(model) == {**common, "projections": projections, "attention sinks": 4 * 4}
    # The first 30 of 100 tokens see half of the window on average.
    seen = 30 * (100 - 30) / 100 + 30 * 30 / 2 / 100
    mixer = 2 * projections / 4 + 4 * 64 * seen
    assert forward_flops_per_token(model, 100) == pytest.approx(4 * (mixer + 6 * 64 * 96) + 2 * 64 * 128)
