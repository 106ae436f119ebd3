"""The mixers of the delta rule: against the recurrence written out, and against the layers of published models.

Those are transformers' own modules, with the same weights: Qwen3-Next, Qwen3.5, OLMo-Hybrid and Kimi-Linear.
"""

import functools
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.config.layout import check_mixers
from lightscale.config.model import ModelConfig
from lightscale.config.schema import ParallelConfig
from lightscale.errors import UserError
from lightscale.exchange.files.weights import exported_tensors
from lightscale.layers import DeltaForm, DeltaNetMixer, GatedDeltaNetMixer, KimiDeltaMixer
from lightscale.models.layers.context import SequenceContext
from lightscale.models.registry import mixer_spec
from lightscale.parallel.megatron_optimizer import _decays_no_weight as takes_no_decay

ROOT = Path(__file__).resolve().parents[3]
plain = SimpleNamespace(**runpy.run_path(str(ROOT / "tests/helpers/plain_models.py")))
mixers = SimpleNamespace(**runpy.run_path(str(ROOT / "tests/helpers/plain_mixers.py")))
RunRanks = Callable[..., list[Any]]

# Of another width each, so that none can be taken for another.
WIDTHS = {"key_head_dim": 7, "value_head_dim": 5}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "delta-net": ("delta-net", {}),
    "delta-net, two heads of values for each of keys": ("delta-net", {"num_value_heads": 6, **WIDTHS}),
    "delta-net that changes signs": ("delta-net", {"negative_eigenvalues": True, "short_convolution": 0}),
    "gated": ("gated-delta-net", {}),
    "gated, three heads": ("gated-delta-net", {"num_value_heads": 9, "short_convolution": 2, **WIDTHS}),
    "gated without convolution": ("gated-delta-net", {"short_convolution": 0, "negative_eigenvalues": True}),
    "kimi": ("kimi-delta", {}),
    "kimi, two heads": ("kimi-delta", {"num_value_heads": 6, "gate_rank": 4, **WIDTHS}),
}


def model_of(mixer: str, options: dict[str, Any]) -> ModelConfig:
    return ModelConfig(
        mixer=mixer,
        num_layers=2,
        hidden_size=36,
        num_heads=3,
        intermediate_size=37,
        vocab_size=101,
        norm="rmsnorm",
        mixer_options={mixer: options},
    )


MODELS = {name: model_of(*options) for name, options in OPTIONS.items()}


def measure(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    """The figures of each model on packed rows, and of its first mixer alone: output, and gradients by global name."""
    found = {}
    for number, (name, model) in enumerate(MODELS.items()):
        rows = plain.batch(model, plain.LENGTHS)
        with plain.built_model(model, f"{init_method}-{number}") as module:
            initial = plain.weights_of(module)
            plain.disturb(module)
            found[name] = {"initial": initial, **plain.figures(module, rows)}
            x, do = activations(model)
            mixer = module.decoder.layers[0].self_attention
            own = dict(mixer.named_parameters())
            o = mixer.mix(x.transpose(0, 1), SequenceContext.of(rows["positions"])).transpose(0, 1)
            dx, *gradients = torch.autograd.grad(o, [x, *own.values()], do)
            by_name = {f"decoder.layers.0.self_attention.{key}": dw for key, dw in zip(own, gradients, strict=True)}
            found[name] |= {"o": o.detach(), "dx": dx, "of mixer": by_name}
    for name in ("gated", "kimi"):
        with plain.built_model(MODELS[name], f"{init_method}-{name}", torch.bfloat16) as module:
            mixer = module.decoder.layers[0].self_attention
            kinds = {key: (weight.dtype, takes_no_decay(weight)) for key, weight in mixer.named_parameters()}
            found[name]["in bf16"] = kinds
    return found


def activations(model: ModelConfig) -> tuple[Tensor, Tensor]:
    """(b, n, d): the input of a mixer, and the gradient of its output."""
    shape = (len(plain.LENGTHS), sum(plain.LENGTHS[0]), model.hidden_size)
    x, do = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x.requires_grad_(), do


@pytest.fixture(scope="module")
def built(run_ranks: RunRanks) -> dict[str, Any]:
    (found,) = run_ranks(measure, 1)
    return dict(found)


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_the_plain_one(built: dict[str, Any], name: str) -> None:
    model = MODELS[name]
    rows = plain.batch(model, plain.LENGTHS)
    mix = functools.partial(mixers.delta_net, model)
    plain.assert_equal(built[name], plain.plain_figures(model, built[name]["weights"], rows, mix))


LAYERS = {"delta-net": DeltaNetMixer, "gated-delta-net": GatedDeltaNetMixer, "kimi-delta": KimiDeltaMixer}


@pytest.mark.parametrize("name", MODELS)
def test_the_layer_is_that_of_the_model(built: dict[str, Any], name: str) -> None:
    """``lightscale.layers``, each document a row, read in parts: against the model's packed rows."""
    (mixer, options), found = OPTIONS[name], built[name]
    form = DeltaForm(**{key: value for key, value in options.items() if key != "gate_rank"})
    rank = {"gate_rank": options["gate_rank"]} if "gate_rank" in options else {}
    layer = LAYERS[mixer](36, 3, form=form, **rank).double()
    prefix = "model.layers.0.mixer."
    taken = {key.removeprefix(prefix): rows for key, rows in exported_tensors(MODELS[name], vocab_size=97).items()}
    taken = {key: taken[key] for key in layer.state_dict()}
    layer.load_state_dict({key: taken_rows(found["weights"], rows) for key, rows in taken.items()})
    x, do = activations(MODELS[name])
    outputs = []
    for row, lengths in zip(x, plain.LENGTHS, strict=True):
        for document in row.split(lengths):
            o, whole = layer(document[None])
            first, state = layer(document[None, :1])
            # Padding before and behind the rest of the document.
            rest = torch.cat([document[:3], document[1:], document[:2]])[None]
            mask = (torch.arange(rest.size(1)) >= min(3, len(document)))[None]
            mask[:, rest.size(1) - min(2, len(document)) :] = False
            parts, state = layer(rest, state, mask)
            assert plain.error(torch.cat([first, parts[mask][None]], dim=1), o) < 1e-10
            assert state.keys() == whole.keys()
            assert all(torch.allclose(state[key], whole[key], rtol=1e-9, atol=1e-12) for key in whole)
            outputs.append(o[0])
    o = torch.cat(outputs).view(do.shape)
    assert plain.error(o, found["o"]) < 1e-10
    dx, *gradients = torch.autograd.grad(o, [x, *layer.parameters()], do)
    assert plain.error(dx, found["dx"]) < 1e-10
    for (key, _), gradient in zip(layer.named_parameters(), gradients, strict=True):
        expected = taken_rows(found["of mixer"], taken[key])
        assert expected.norm() > 0 and plain.error(gradient, expected) < 1e-10, key


def taken_rows(whole: dict[str, Tensor], rows: Any) -> Tensor:
    weight = whole[rows.key]
    return weight if rows.ranges is None else torch.cat([weight[first:last] for first, last in rows.ranges])


def test_sizes_that_a_layer_cannot_have() -> None:
    with pytest.raises(ValueError, match="hidden_size = 32 is not divisible by num_heads = 5"):
        KimiDeltaMixer(32, 5)
    assert DeltaNetMixer(32, 5, form=DeltaForm(key_head_dim=3, value_head_dim=2)).o_proj.in_features == 10
    with pytest.raises(ValueError, match="num_value_heads = 6 is not a multiple of num_heads = 4"):
        GatedDeltaNetMixer(32, 4, form=DeltaForm(num_value_heads=6))


def test_decays_begin_where_they_should(built: dict[str, Any]) -> None:
    for name in ("gated", "kimi"):
        initial = built[name]["initial"]
        rates = initial["decoder.layers.1.self_attention.decay.A_log"].exp()
        steps = torch.nn.functional.softplus(initial["decoder.layers.1.self_attention.step.dt_bias"])
        assert 0.01 <= rates.min() < rates.max() <= 16
        assert 0.99e-3 < steps.min() < steps.max() < 0.101


@pytest.mark.parametrize("name", ["gated", "kimi"])
def test_decays_and_the_norm_stay_wide_and_have_no_weight_decay(built: dict[str, Any], name: str) -> None:
    """bf16 would round the steps of A away, and a decayed A would forget its rate."""
    kinds = built[name]["in bf16"]
    kept = {"decay.A_log", "step.dt_bias", "output_norm.weight"}
    assert {key for key, (dtype, _) in kinds.items() if dtype == torch.float32} == kept
    assert {key for key, (_, undecayed) in kinds.items() if undecayed} == kept


# ----- layers of published models -------------------------------------------------------------------------------------

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-Next": ("gated-delta-net", {"num_value_heads": 6, **WIDTHS, "output_norm_eps": 1e-6}),
    "Qwen3.5": ("gated-delta-net", {"num_value_heads": 6, **WIDTHS, "output_norm_eps": 1e-6}),
    "OLMo-Hybrid": ("gated-delta-net", {**WIDTHS, "negative_eigenvalues": True}),
    "Kimi-Linear": ("kimi-delta", {"key_head_dim": 5, "value_head_dim": 5, "gate_rank": 5}),
}


def published_layer(name: str, model: ModelConfig) -> torch.nn.Module:
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
    from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    own: Any = model.layer_options(0)
    config = SimpleNamespace(
        hidden_size=model.hidden_size,
        linear_num_value_heads=own.num_value_heads or model.num_heads,
        linear_num_key_heads=model.num_heads,
        linear_num_heads=model.num_heads,
        linear_key_head_dim=own.key_head_dim,
        linear_value_head_dim=own.value_head_dim,
        linear_head_dim=own.value_head_dim,
        linear_conv_kernel_dim=own.short_convolution,
        linear_allow_neg_eigval=own.negative_eigenvalues,
        linear_a_log_min=1.0,
        linear_a_log_max=16.0,
        linear_dt_min=1e-3,
        linear_dt_max=0.1,
        linear_dt_init_floor=1e-4,
        rms_norm_eps=own.output_norm_eps,
        hidden_act="silu",
        layer_types=["linear_attention"],
    )
    kinds = {
        "Qwen3-Next": Qwen3NextGatedDeltaNet,
        "Qwen3.5": Qwen3_5GatedDeltaNet,
        "OLMo-Hybrid": OlmoHybridGatedDeltaNet,
        "Kimi-Linear": KimiLinearDeltaAttention,
    }
    made: torch.nn.Module = kinds[name](config, layer_idx=0)
    return made


def published_weights(name: str, model: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Ours under the layer's names, by what each is for; differentiable."""
    of = {}
    for role, rows in mixer_spec(model.layers[0]).roles(model, 0).items():
        weight = weights[rows.parameter]
        of[role] = weight if rows.ranges is None else torch.cat([weight[a:b] for a, b in rows.ranges])
    heads = model.num_heads
    found = {"conv1d.weight": torch.cat([of["q_conv"], of["k_conv"], of["v_conv"]])[:, None]}
    if name == "Kimi-Linear":
        return found | {
            **{f"{role}_proj.weight": of[role] for role in ("q", "k", "v", "o")},
            "b_proj.weight": of["beta"],
            "forget_gate.f_a_proj.weight": of["forget_down"],
            "forget_gate.f_b_proj.weight": of["forget_up"],
            "forget_gate.dt_bias": of["dt_bias"].flatten(),
            "forget_gate.A_log": of["A_log"].view(1, 1, -1, 1),
            "g_a_proj.weight": of["gate_down"],
            "g_b_proj.weight": of["gate_up"],
            "o_norm.weight": of["output_norm"],
        }
    found |= {"A_log": of["A_log"], "dt_bias": of["dt_bias"]}
    if name == "OLMo-Hybrid":
        return found | {
            **{f"{role}_proj.weight": of[role] for role in ("q", "k", "v", "o")},
            "a_proj.weight": of["forget"],
            "b_proj.weight": of["beta"],
            "g_proj.weight": of["gate"],
            "o_norm.weight": of["output_norm"],
        }
    found |= {"norm.weight": of["output_norm"], "out_proj.weight": of["o"]}
    if name == "Qwen3.5":
        return found | {
            "in_proj_qkv.weight": torch.cat([of["q"], of["k"], of["v"]]),
            "in_proj_z.weight": of["gate"],
            "in_proj_b.weight": of["beta"],
            "in_proj_a.weight": of["forget"],
        }

    def by_head(*roles: str) -> Tensor:
        return torch.cat([of[role].unflatten(0, (heads, -1)) for role in roles], dim=1).flatten(0, 1)

    return found | {
        "in_proj_qkvz.weight": by_head("q", "k", "v", "gate"),
        "in_proj_ba.weight": by_head("beta", "forget"),
    }


def beside_published(rank: int, world_size: int, init_method: str) -> dict[str, dict[str, float]]:
    """Errors of outputs and of every gradient, in fp32, of layers with our weights; ours computes in fp64."""
    found = {}
    for number, (name, options) in enumerate(PUBLISHED.items()):
        model = model_of(*options)
        with plain.built_model(model, f"{init_method}-{number}") as module:
            with torch.no_grad():
                plain.disturb(module)
            layer = module.decoder.layers[0].self_attention
            generator = torch.Generator().manual_seed(1)
            x, do = torch.randn(2, 2, 70, model.hidden_size, generator=generator, dtype=torch.float64)
            x.requires_grad_()
            context = SequenceContext.of(torch.arange(70).repeat(2, 1))
            own = dict(layer.named_parameters())
            outputs = [layer.mix(x.transpose(0, 1), context).transpose(0, 1)]
            gradients = [torch.autograd.grad(outputs[0], [x, *own.values()], do)]
            theirs = published_layer(name, model)
            weights = published_weights(name, model, own)
            assert weights.keys() == dict(theirs.named_parameters()).keys()
            weights = {key: weight.float() for key, weight in weights.items()}
            outputs.append(torch.func.functional_call(theirs, weights, (x.float(),)))
            gradients.append(torch.autograd.grad(outputs[1], [x, *own.values()], do.float()))
            pairs = {"o": outputs, **dict(zip(("x", *own), zip(*gradients, strict=True), strict=True))}
            found[name] = {key: plain.error(a.detach(), b.detach()) for key, (a, b) in pairs.items()}
    return found


def test_layers_are_those_of_published_models(run_ranks: RunRanks) -> None:
    pytest.importorskip("transformers", reason="needs pip install 'lightscale[hf]'")
    (found,) = run_ranks(beside_published, 1)
    for name, errors in found.items():
        wrong = {key: error for key, error in errors.items() if not error < 1e-5}
        assert not wrong, (name, wrong)


# ----- what is refused ------------------------------------------------------------------------------------------------


def test_heads_that_do_not_share_out_are_refused() -> None:
    model = model_of("gated-delta-net", {"num_value_heads": 7})
    with pytest.raises(UserError, match=r"num_value_heads = 7 is not a multiple of model\.num_heads = 3; use 6"):
        check_mixers(model, ParallelConfig())
    with pytest.raises(ValueError, match="short_convolution = 1 covers only the token itself"):
        model_of("delta-net", {"short_convolution": 1})
