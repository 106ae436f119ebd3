"""Models of LLaMA's type that others trained, against transformers' own classes: as objects, as runs, and out again."""

import json
import re
import runpy
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lightscale
from lightscale.cli import main
from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import choose_run
from lightscale.exchange.export import export
from lightscale.exchange.export_reader import open_export
from lightscale.exchange.files.own_classes import own_type
from lightscale.exchange.files.tokenizer_files import write_tokenizer
from lightscale.exchange.files.weights import exported_tensors
from lightscale.exchange.imported import import_model
from lightscale.exchange.plain.softmax_mixer import RopeScaling
from lightscale.models.accounting import parameter_terms
from lightscale.training.checkpoints.reader import verify

safetensors = pytest.importorskip("safetensors.torch")
HELPERS = Path(__file__).resolve().parents[1] / "helpers"
mixers = SimpleNamespace(**runpy.run_path(str(HELPERS / "plain_mixers.py")))
plain = SimpleNamespace(**runpy.run_path(str(HELPERS / "plain_models.py")))
conftest = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("conftest.py"))))

# Importing transformers takes long on a busy machine.
pytestmark = pytest.mark.timeout(600)

LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 1": ("Llama", {"tie_word_embeddings": False}),
    "llama 3": ("Llama", {"num_key_value_heads": 2, "rope_parameters": LLAMA_3}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}),
    "biases": ("Llama", {"attention_bias": True, "head_dim": 24, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"num_key_value_heads": 4, "head_dim": 10, "sliding_window": None, "hidden_size": 60}),
    "mistral, window": ("Mistral", {"num_key_value_heads": 4, "sliding_window": 20}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2, some windows": (
        "Qwen2",
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 20, "layer_types": [FULL, SLIDING]},
    ),
    "qwen3": ("Qwen3", {"num_key_value_heads": 4, "head_dim": 24, "rope_parameters": YARN}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 4, "attention_bias": True}),
    "olmo3": (
        "Olmo3",
        {
            "num_key_value_heads": 4,
            "sliding_window": 20,
            "layer_types": [SLIDING, FULL],
            "rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 300.0}, FULL: YARN},
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": ("SmolLM3", {"num_key_value_heads": 2, "no_rope_layers": [1, 0]}),
    "smollm3, windows": (
        "SmolLM3",
        {
            "num_key_value_heads": 8,
            "no_rope_layers": [1, 0],
            "use_sliding_window": True,
            "sliding_window": 20,
            "tie_word_embeddings": False,
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "num_key_value_heads": 4,
            "head_dim": 24,
            "query_pre_attn_scalar": 3,
            "sliding_window": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma2, no caps": (
        "Gemma2",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": [FULL, FULL],
            "tie_word_embeddings": False,
        },
    ),
    "phi3": (
        "Phi3",
        {
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            "sliding_window": 20,
        },
    ),
    "qwen3.5": (
        "Qwen3_5",
        {
            "num_key_value_heads": 4,
            "head_dim": 24,
            "layer_types": [LINEAR, FULL],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 10,
            "linear_value_head_dim": 6,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "layer_types": [LINEAR, FULL],
            "attention_bias": True,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
            "linear_conv_kernel_dim": 3,
            "num_experts": 0,
        },
    ),
    "olmo hybrid": (
        "OlmoHybrid",
        {"num_key_value_heads": 4, "layer_types": [FULL, LINEAR], "rope_parameters": {"rope_theta": None}},
    ),
    "olmo hybrid, positions": (
        "OlmoHybrid",
        {
            "rope_parameters": YARN,
            "linear_allow_neg_eigval": False,
            "linear_value_head_dim": 12,
            "tie_word_embeddings": True,
        },
    ),
}
HYBRIDS = ("qwen3.5", "qwen3-next", "olmo hybrid", "olmo hybrid, positions")
IDS, ROWS, TOKENS = 264, 280, 50
"""Ids of the tokenizer, rows of the embedding, tokens of a text."""


def error(found: Tensor, expected: Tensor) -> float:
    return plain.error(found, expected.double())  # type: ignore[no-any-return]


def exact(theirs: Any) -> None:
    """Let a model of transformers, whose norms and angles are fp32 whatever its weights are, compute in fp64."""
    theirs.double()
    for module in theirs.modules():
        # Those of hybrids have `.float()`, which is patched.
        if type(module).__name__.endswith("RMSNorm") and not type(module).__name__.startswith(("Qwen3Next", "Qwen3_5")):
            gemma = type(module).__name__.startswith("Gemma")
            eps, weight = module.eps if gemma else module.variance_epsilon, module.weight
            module.forward = lambda x, eps=eps, one=int(gemma), weight=weight: torch.rms_norm(
                x, x.shape[-1:], one + weight, eps
            )
    config, rotary = theirs.config, theirs.model.rotary_emb
    if rotary is None:
        return
    width = config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // config.num_attention_heads
    tables = config.rope_parameters if FULL in config.rope_parameters else {None: config.rope_parameters}
    angles = {kind: angles_of(rotary, kind, width, table) for kind, table in tables.items()}
    rotary.forward = lambda x, position_ids, layer_type=None: angles[layer_type]


def angles_of(rotary: Any, kind: str | None, width: int, table: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all tokens, written out once more: base, and the mixing of slow and fast waves."""
    absent = ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")
    usual = dict.fromkeys(absent) | {"truncate": True}
    scaling = SimpleNamespace(**usual | table)
    own = SimpleNamespace(
        rope_theta=scaling.rope_theta, rope_scaling=None if scaling.rope_type == "default" else scaling
    )
    theta, factor = mixers.rotary_angles(int(width * table.get("partial_rotary_factor", 1)), own)
    prefix = "" if kind is None else f"{kind}_"
    assert error(theta, getattr(rotary, f"{prefix}inv_freq")) < 1e-6
    assert factor == pytest.approx(getattr(rotary, f"{prefix}attention_scaling"))
    angles = torch.arange(TOKENS)[None, :, None] * theta.repeat(2)
    return factor * angles.cos(), factor * angles.sin()


def in_their_dtype(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """In the place of transformers' softmax, which is fp32 in attention that it writes out."""
    return x.softmax(dim=dim)


def by_head(gradient: Tensor, widths: dict[str, int], heads: int = 8) -> dict[str, Tensor]:
    """Parts of a tensor in which the rows of a head stand together."""
    parts = gradient.unflatten(0, (heads, -1)).split(list(widths.values()), dim=1)
    return {own: part.flatten(0, 1) for own, part in zip(widths, parts, strict=True)}


def split_hybrid(name: str, gradient: Tensor) -> dict[str, Tensor]:
    """A tensor of a hybrid, by the plain model's names. Qwen3-Next has 16 heads of values, of 6 channels."""
    where, _, own = name.rpartition("linear_attn.")
    if not where:
        if "self_attn.q_proj" in name and len(gradient) > 64:
            kind, width = name.rpartition(".")[2], len(gradient) // 16
            parts = by_head(gradient, {"q_proj": width, "gate_proj": width})
            return {name.replace(f"q_proj.{kind}", f"{part}.{kind}"): x for part, x in parts.items()}
        return {name: gradient}
    match own:
        case "in_proj_qkvz.weight":
            parts = by_head(
                gradient, {"q_proj.weight": 8, "k_proj.weight": 8, "v_proj.weight": 12, "gate_proj.weight": 12}
            )
        case "in_proj_ba.weight":
            parts = by_head(gradient, {"b_proj.weight": 2, "f_proj.weight": 2})
        case "in_proj_qkv.weight" | "conv1d.weight":
            keys = {208: 80, 224: 64, 192: 48}[len(gradient)]
            pieces = gradient.squeeze(1).split([keys, keys, len(gradient) - 2 * keys])
            parts = {
                f"{one}_{'conv' if own[0] == 'c' else 'proj.weight'}": x for one, x in zip("qkv", pieces, strict=True)
            }
        case _:
            others = {"in_proj_z": "gate_proj", "in_proj_b": "b_proj", "in_proj_a": "f_proj", "out_proj": "o_proj"}
            others |= {"a_proj": "f_proj", "g_proj": "gate_proj"}
            module, _, kind = own.rpartition(".")
            usual = f"{others.get(module, module)}.{kind}" if module else kind
            parts = {"o_norm" if module.endswith("norm") else usual: gradient}
    return {f"{where}self_attn.{part}": x for part, x in parts.items()}


def split(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without fused tensors: of Phi-3, with half as many heads of keys, and of values, as of queries."""
    if any("linear_attn" in name for name in gradients):
        return {own: part for name, whole in gradients.items() for own, part in split_hybrid(name, whole).items()}
    found = dict(gradients)
    for name, gradient in gradients.items():
        if "qkv_proj" in name:
            parts, of = gradient.chunk(4), "qkv"
            pieces = [torch.cat(parts[:2]), parts[2], parts[3]]
        elif "gate_up_proj" in name:
            pieces, of = list(gradient.chunk(2)), ""
        else:
            continue
        names = [f"{one}_proj" for one in of] or ["gate_proj", "up_proj"]
        fused = "qkv_proj" if of else "gate_up_proj"
        found |= {name.replace(fused, one): piece for one, piece in zip(names, pieces, strict=True)}
        del found[name]
    return found


def ids_and_weights() -> tuple[Tensor, Tensor]:
    """Two texts of one document each, and a weight for each token's logits."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(IDS, (2, TOKENS), generator=generator)
    return ids, torch.rand(2, TOKENS, IDS, generator=generator, dtype=torch.float64)


@pytest.fixture(scope="module")
def foreign(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with NAME, NAME as a run, and of each what transformers computes in fp64: logits, gradients."""
    folder, expected = tmp_path_factory.mktemp("foreign"), {}
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2, "intermediate_size": 48}
    # Of no text: the row of padding has no gradient.
    sizes |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), ROWS - 1)
    ids, weights = ids_and_weights()
    for name, (kind, more) in FOREIGN.items():
        config = getattr(transformers, {"Qwen3_5": "Qwen3_5TextConfig"}.get(kind, f"{kind}Config"))(
            vocab_size=ROWS, max_position_embeddings=128, **{**sizes, **more}
        )
        torch.manual_seed(1)
        theirs = getattr(transformers, f"{kind}ForCausalLM")(config)
        for weight in theirs.parameters():
            torch.nn.init.normal_(weight, std=0.2)
        theirs.save_pretrained(folder / name)
        write_tokenizer(conftest.byte_tokenizer(), folder / name, max_tokens=128)
        import_model(folder / name, folder / f"{name} run")
        exact(theirs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "softmax", in_their_dtype)
            if name in HYBRIDS:
                # They cast to fp32 in many places.
                patch.setattr(torch, "float32", torch.float64)
                patch.setattr(Tensor, "float", Tensor.double)
            logits = theirs(ids).logits[..., :IDS]
        (logits.softmax(dim=-1) * weights).sum().backward()
        gradients = split({own: weight.grad for own, weight in theirs.named_parameters()})
        expected[name] = {"logits": logits.detach(), "gradients": gradients}
    return folder, expected


def training_figures(rank: int, world_size: int, init_method: str, models: dict[str, Any]) -> dict[str, Any]:
    """What the training model computes in fp64, with the weights of each run's checkpoint."""
    ids, weights = ids_and_weights()
    positions, found = torch.arange(TOKENS).expand(2, -1), {}
    for number, (name, (model, stored)) in enumerate(models.items()):
        with plain.built_model(model, f"{init_method}-{number}") as module:
            with torch.no_grad():
                named = dict(plain.named_parameters(module))
                assert named.keys() == stored.keys(), named.keys() ^ stored.keys()
                for key, weight in named.items():
                    weight.copy_(stored[key])
            logits = module(ids, positions)[..., :IDS]
            (logits.softmax(dim=-1) * weights).sum().backward()
            gradients = {key: weight.grad for key, weight in named.items()}
            found[name] = {"logits": logits.detach(), "gradients": gradients}
    return found


@pytest.fixture(scope="module")
def trained(foreign: tuple[Path, dict[str, Any]], run_ranks: Callable[..., list[Any]]) -> dict[str, Any]:
    models = {}
    for name in FOREIGN:
        run = foreign[0] / f"{name} run"
        stored: dict[str, Tensor] = {}
        for name_in_file, tensor in safetensors.load_file(next(run.glob("checkpoints/*/*.safetensors"))).items():
            stored[name_in_file.rpartition("@")[0].removeprefix("model.")] = tensor
        models[name] = (load(run / "config.toml").model, stored)
    (found,) = run_ranks(training_figures, 1, models)
    return dict(found)


@pytest.mark.parametrize("name", FOREIGN)
def test_an_imported_run_trains_what_transformers_computes(
    foreign: tuple[Path, dict[str, Any]], trained: dict[str, Any], name: str
) -> None:
    """Logits and every gradient of the training model."""
    folder, expected = foreign[0], foreign[1][name]
    verify(next((folder / f"{name} run" / "checkpoints").iterdir()), 0)
    assert error(trained[name]["logits"], expected["logits"]) < 1e-10
    model = load(folder / f"{name} run" / "config.toml").model
    # Rows that no id of the tokenizer has stay behind.
    theirs = sum(
        min(x.size(0), IDS) * x[0].numel() if "lm_head" in own or "embed" in own else x.numel()
        for own, x in expected["gradients"].items()
    )
    assert sum(parameter_terms(model).values()) == theirs
    used = set()
    for own, rows in exported_tensors(model, vocab_size=IDS).items():
        whole = trained[name]["gradients"][rows.key]
        found = whole if rows.ranges is None else torch.cat([whole[first:last] for first, last in rows.ranges])
        right = expected["gradients"][own.replace(".mixer.", ".self_attn.")]
        assert error(found, right[: len(found)]) < 1e-10, own
        used.add(rows.key)
    assert used == trained[name]["gradients"].keys()


@pytest.mark.parametrize("name", FOREIGN)
def test_models_of_transformers_are_loaded(foreign: tuple[Path, dict[str, Any]], name: str) -> None:
    """As objects: in fp64, and what was imported is the same bit by bit."""
    folder, expected = foreign[0], foreign[1][name]
    (ids, weights), ours = ids_and_weights(), lightscale.load(folder / name, dtype=torch.float64)
    logits = ours.logits(ids)
    assert error(logits, expected["logits"]) < 1e-10
    (logits.softmax(dim=-1) * weights).sum().backward()
    for own, weight in ours.module.named_parameters():
        right = expected["gradients"][own.replace(".mixer.", ".self_attn.")]
        assert error(weight.grad, right[: len(weight)]) < 1e-10, own
    model, run = lightscale.load(folder / name), lightscale.load(folder / f"{name} run")
    assert model.logits(ids).equal(run.logits(ids))
    assert model.generate("the", tokens=5, temperature=0) == run.generate("the", tokens=5, temperature=0)


@pytest.mark.parametrize("name", FOREIGN)
def test_an_imported_run_is_exported_as_it_came(
    transformers: Any, foreign: tuple[Path, dict[str, Any]], tmp_path: Path, name: str
) -> None:
    """transformers' own class without remote code, and bitwise the weights."""
    folder = foreign[0]
    export(choose_run(folder / f"{name} run"), tmp_path / "to", dtype="fp32")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "to", output_loading_info=True)
    assert not any(info.values()), info
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / name)
    if name == "qwen3-next":
        # Without experts it is Qwen3.5, whose tensors are cut otherwise.
        assert type(model) is transformers.Qwen3_5ForCausalLM
        again = dict(lightscale.load(tmp_path / "to").module.named_parameters())
        assert all(x.equal(again[own]) for own, x in lightscale.load(folder / name).module.named_parameters())
    else:
        assert type(model) is type(theirs)
        before, after = theirs.state_dict(), model.state_dict()
        assert before.keys() == after.keys()
        assert all(tensor.equal(before[key][: len(tensor)]) for key, tensor in after.items())
    ids = ids_and_weights()[0]
    with torch.no_grad():
        assert model(ids).logits.equal(theirs(ids).logits[..., :IDS])


@pytest.mark.parametrize("name", ["olmo3", "gemma2", "phi3", "qwen3-next", "olmo hybrid"])
def test_sharded_files_of_half_precision_are_read(
    transformers: Any, foreign: tuple[Path, dict[str, Any]], tmp_path: Path, name: str
) -> None:
    to = tmp_path / "to"
    shutil.copytree(foreign[0] / name, to, ignore=shutil.ignore_patterns("*.safetensors"))
    model = transformers.AutoModelForCausalLM.from_pretrained(foreign[0] / name, dtype=torch.bfloat16)
    model.save_pretrained(to, max_shard_size="30KB")
    assert len(list(to.glob("*.safetensors"))) > 2
    found = dict(lightscale.load(to, dtype=torch.float64).module.named_parameters())
    whole = dict(lightscale.load(foreign[0] / name).module.named_parameters())
    assert found.keys() == whole.keys()
    for own, weight in found.items():
        # Of OLMo Hybrid transformers keeps them in fp32.
        is_wide = name == "olmo hybrid" and own.endswith("A_log")
        assert weight.equal((whole[own] if is_wide else whole[own].bfloat16()).double()), own
    import_model(to, tmp_path / "run")
    again = dict(lightscale.load(tmp_path / "run", dtype=torch.float64).module.named_parameters())
    assert all(weight.equal(again[own]) for own, weight in found.items())


def edited(folder: Path, name: str, to: Path, **values: Any) -> Path:
    """A copy of the model ``name`` with other values in its config.json; None removes one."""
    shutil.copytree(folder / name, to)
    path = to / "config.json"
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return to


def test_older_forms_are_read(foreign: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """rope_theta and rope_scaling as transformers 4 wrote them; angles that older versions saved with the weights."""
    old = {key: value for key, value in LLAMA_3.items() if key not in ("rope_type", "rope_theta")} | {"type": "llama3"}
    more = {"rope_parameters": None, "rope_scaling": old, "rope_theta": 500000.0}
    to = edited(foreign[0], "llama 3", tmp_path / "to", **more)
    tensors = safetensors.load_file(to / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    safetensors.save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    ids = ids_and_weights()[0]
    assert lightscale.load(to).logits(ids).equal(lightscale.load(foreign[0] / "llama 3").logits(ids))


def test_missing_keys_of_hybrids_have_the_defaults_of_transformers(
    foreign: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    name = "olmo hybrid, positions"
    absent = dict.fromkeys(("layer_types", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"))
    to, ids = edited(foreign[0], name, tmp_path / "to", **absent), ids_and_weights()[0]
    assert lightscale.load(to).logits(ids).equal(lightscale.load(foreign[0] / name).logits(ids))


def test_names_and_cuts_of_hybrids_are_those_of_any_file(
    transformers: Any, foreign: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Convolutions of queries, keys and values apart, as in published files and exports; whole, as in transformers."""
    name, layer, ids = "olmo hybrid", "model.layers.1.", ids_and_weights()[0]
    expected = lightscale.load(foreign[0] / name).logits(ids)
    export(choose_run(foreign[0] / f"{name} run"), tmp_path / "export", dtype="fp32")
    written = safetensors.load_file(tmp_path / "export" / "model.safetensors")
    rows = [len(written[f"{layer}linear_attn.{one}_conv1d.weight"]) for one in "qkv"]
    assert rows == [48, 48, 96]
    # transformers itself saves thirds.
    saved = safetensors.load_file(foreign[0] / name / "model.safetensors")
    assert len(saved[f"{layer}linear_attn.q_conv1d.weight"]) == 64
    assert written.keys() - saved.keys() == {"model.layers.0.post_attention_layernorm.weight"}
    assert lightscale.load(tmp_path / "export").logits(ids).equal(expected)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(foreign[0] / name)
    whole = edited(foreign[0], name, tmp_path / "whole")
    tensors = {own: tensor.contiguous() for own, tensor in theirs.state_dict().items()}
    assert f"{layer}linear_attn.conv1d.weight" in tensors
    safetensors.save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    assert lightscale.load(whole).logits(ids).equal(expected)


def test_no_class_has_scaled_positions_on_some_channels(foreign: tuple[Path, dict[str, Any]]) -> None:
    """Phi-3 would refuse them; such an export has code of its own."""
    shape = open_export(foreign[0] / "phi3").shape
    assert own_type(shape) == "phi3"
    scaling = RopeScaling(rope_type="linear", factor=2.0)
    assert own_type(replace(shape, attention=replace(shape.attention, rope_scaling=scaling))) is None


SCALING = {**LLAMA_3, "factor": 4.0}


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "smollm3",
            {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "layer_types": [FULL, SLIDING, SLIDING]}
            | {"use_sliding_window": True, "sliding_window": 64},
            "3 kinds of softmax layers, which differ in windows or positions; use at most two",
        ),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries; use 2"),
        ("olmo3", {"layer_types": [FULL]}, "layer_types has 1 entries; use 2"),
        ("olmo3", {"layer_types": [FULL, "chunked_attention"]}, "chunked_attention"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        ("phi3", {"num_key_value_heads": 2}, "is of another model: model.layers.0.self_attn.qkv_proj.weight is"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
            "rope_parameters.rope_type = 'longrope': its angles depend on the length of each text",
        ),
        ("phi3", {"rope_parameters": None, "rope_scaling": {"type": "su"}}, "rope_scaling.type = 'su': its angles"),
        ("phi3", {"rope_parameters": YARN}, "rope_type = 'yarn'"),
        ("llama 3", {"rope_parameters": {**SCALING, "rope_type": "longrope"}}, r"rope_type = 'longrope'.*llama3"),
        ("llama 3", {"rope_parameters": {"full_attention": LLAMA_3}}, "full_attention"),
        (
            "llama 3",
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "needs low_freq_factor; set it",
        ),
        ("llama 3", {"rope_parameters": {**LLAMA_3, "low_freq_factor": 4.0}}, "high_freq_factor = 4.0 must be above"),
        ("llama 3", {"num_key_value_heads": 3}, "num_attention_heads = 8 cannot share num_key_value_heads = 3"),
        ("llama 3", {"num_key_value_heads": 4}, r"is of another model: model.layers.0.self_attn.[kv]_proj.weight is"),
        ("llama 3", {"head_dim": 7}, "heads of 7 channels"),
        ("llama 3", {"mlp_bias": True}, "mlp_bias = True"),
        ("llama 3", {"tie_word_embeddings": True}, "lm_head.weight is in the file, but not in the model"),
        ("qwen2", {"model_type": "gpt2"}, "'gpt2'; use lightscale, vit, llama, mistral, .*phi3, .* or olmo_hybrid"),
        ("qwen3-next", {"num_experts": 4}, "num_experts = 4: layer 0 has experts; use a model without experts"),
        ("qwen3-next", {"num_experts": None}, "num_experts = 512: layer 0 has experts"),
        ("qwen3-next", {"num_experts": 4, "mlp_only_layers": [0]}, "layer 1 has experts"),
        ("qwen3-next", {"linear_num_key_heads": 4}, "linear_num_key_heads = 4 and num_attention_heads = 8"),
        ("qwen3.5", {"linear_num_value_heads": 12}, "linear_num_value_heads = 12 is not a multiple of 8"),
        ("qwen3.5", {"linear_key_head_dim": 8}, "is of another model: model.layers.0.linear_attn"),
        ("olmo hybrid", {"linear_value_head_dim": 8}, "is of another model: model.layers.1.linear_attn"),
        ("olmo hybrid", {"rope_parameters": {"rope_theta": 0}}, "rope_theta"),
        ("qwen3.5", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act = 'gelu_pytorch_tanh'"),
    ],
)
def test_what_is_not_computed_is_refused(
    foreign: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    values: dict[str, Any],
    message: str,
) -> None:
    to = edited(foreign[0], name, tmp_path / "to", **values)
    assert main(["import", str(to), "--run", str(tmp_path / "run")]) == UserError.EXIT_CODE
    assert re.search(message, capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["to"]


def test_windows_that_hide_nothing_are_read(foreign: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """They compute what the same files without a window compute."""
    ids = torch.arange(24)[None]
    for name, window in (
        ("mistral", {"sliding_window": 128}),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}),
    ):
        with_window = lightscale.load(edited(foreign[0], name, tmp_path / f"{name}-window", **window))
        without = lightscale.load(edited(foreign[0], name, tmp_path / f"{name}-none", sliding_window=None))
        assert torch.equal(with_window.logits(ids), without.logits(ids))


def test_a_model_without_its_tokenizer_or_shards_is_refused(
    foreign: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing in the directory is executed, and nothing is written."""
    to = edited(foreign[0], "llama 1", tmp_path / "to")
    weights = (to / "model.safetensors").read_bytes()
    (to / "model.safetensors").unlink()
    (to / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")
    (to / "modeling_llama.py").write_text("raise SystemExit")
    tokenizer = (to / "tokenizer.json").read_text()
    for message in ("pytorch_model.bin could run code", "tokenizer.json", "the tokenizer has"):
        assert main(["import", str(to), "--run", str(tmp_path / "run")]) == UserError.EXIT_CODE
        assert message in capsys.readouterr().err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["to"]
        if message == "tokenizer.json":
            # Of a model with far more ids.
            more = json.loads(tokenizer)
            last = more["added_tokens"][-1]
            more["added_tokens"] += [last | {"id": IDS + number, "content": f"<|{number}|>"} for number in range(100)]
            (to / "tokenizer.json").write_text(json.dumps(more))
        else:
            (to / "model.safetensors").write_bytes(weights)
            (to / "tokenizer.json").unlink(missing_ok=True)
