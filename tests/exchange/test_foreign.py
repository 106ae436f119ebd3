"""Models of LLaMA's type that others trained, against transformers' own classes: as objects, as runs, and out again."""

import json
import re
import runpy
import shutil
from collections.abc import Callable
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
from lightscale.exchange.files.tokenizer_files import write_tokenizer
from lightscale.exchange.files.weights import exported_tensors
from lightscale.exchange.imported import import_model
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
SLIDING, FULL = "sliding_attention", "full_attention"
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
}
IDS, ROWS, TOKENS = 264, 280, 50
"""Ids of the tokenizer, rows of the embedding, tokens of a text."""


def error(found: Tensor, expected: Tensor) -> float:
    return plain.error(found, expected.double())  # type: ignore[no-any-return]


def exact(theirs: Any) -> None:
    """Let a model of transformers, whose norms and angles are fp32 whatever its weights are, compute in fp64."""
    theirs.double()
    for module in theirs.modules():
        if type(module).__name__.endswith("RMSNorm"):
            gemma = type(module).__name__.startswith("Gemma")
            eps, weight = module.eps if gemma else module.variance_epsilon, module.weight
            module.forward = lambda x, eps=eps, one=int(gemma), weight=weight: torch.rms_norm(
                x, x.shape[-1:], one + weight, eps
            )
    config, rotary = theirs.config, theirs.model.rotary_emb
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


def split(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without fused tensors: of Phi-3, with half as many heads of keys, and of values, as of queries."""
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
        config = getattr(transformers, f"{kind}Config")(
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
    assert type(model) is type(theirs)
    before, after = theirs.state_dict(), model.state_dict()
    assert before.keys() == after.keys()
    assert all(tensor.equal(before[key][: len(tensor)]) for key, tensor in after.items())
    ids = ids_and_weights()[0]
    with torch.no_grad():
        assert model(ids).logits.equal(theirs(ids).logits[..., :IDS])


@pytest.mark.parametrize("name", ["olmo3", "gemma2", "phi3"])
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
    assert all(weight.equal(whole[own].bfloat16().double()) for own, weight in found.items())
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
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type = 'longrope'"),
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
        ("qwen2", {"model_type": "gpt2"}, "'gpt2'; use lightscale, llama, mistral, .*gemma2 or phi3"),
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
