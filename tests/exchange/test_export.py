"""``lightscale export``: what transformers loads is the run's model, and nothing half-written looks whole."""

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightscale
from lightscale.cli import main
from lightscale.data_pipeline.whole_files import whole_directory
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import choose_run
from lightscale.exchange.export import export
from lightscale.exchange.files import safetensors_files
from lightscale.exchange.files.modelling_file import modelling_file
from lightscale.exchange.files.tokenizer_files import comparison_texts

# Importing transformers takes long on a busy machine.
pytestmark = pytest.mark.timeout(300)

SHORT = ("llama", "grouped", "hybrid", "decay", "printed", "pairs")
NAMES = ("tnl", "hgrn2", "cosformer2", "lightnet", "llama", "grouped", "hybrid", "decay", "printed", "pairs")
TEXTS = ("the other 12345 text", "a", "the end of 77777, and the rest of it " * 4)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(scope="module")
def exports(saved_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports in fp32, in several files each."""
    folder = tmp_path_factory.mktemp("exports")
    for name in NAMES:
        export(choose_run(saved_runs / name), folder / name, dtype="fp32", shard_bytes=60_000)
    return folder


def loaded(transformers: Any, path: Path, dtype: torch.dtype | str = "auto") -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, trust_remote_code=True, dtype=dtype, output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def tokenizer_of(transformers: Any, path: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=True)


# The hybrid has all mixers in it.
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long if n not in SHORT else ()) for n in NAMES])
@torch.no_grad()
def test_what_transformers_computes_is_the_runs_model(
    transformers: Any, exports: Path, saved_runs: Path, name: str
) -> None:
    """Whole rows, rows padded on either side, and generation by states, by recomputation and by beams."""
    model, tokenizer = loaded(transformers, exports / name), tokenizer_of(transformers, exports / name)
    run = lightscale.load(saved_runs / name)
    expected = {}
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        assert ids[0].tolist() == run.ids(text).tolist()
        expected[text] = run.logits(text)
        assert error(model(ids).logits[0], expected[text]) < 1e-5
    for side in ("left", "right"):
        batch = tokenizer(list(TEXTS), return_tensors="pt", padding=True, padding_side=side)
        logits = model(**batch).logits
        for row, text in enumerate(TEXTS):
            real = batch["attention_mask"][row].bool()
            assert error(logits[row][real], expected[text]) < 1e-5
    batch = tokenizer(list(TEXTS[:2]), return_tensors="pt", padding=True)
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    together = model.generate(**batch, **settings)[:, -12:]
    for row, text in enumerate(TEXTS[:2]):
        one = tokenizer(text, return_tensors="pt")
        assert model.generate(**one, **settings)[0, -12:].equal(together[row])
        assert model.generate(**one, **settings, use_cache=False)[0, -12:].equal(together[row])
        written = [*together[row].tolist(), run.tokenizer.eot_id]
        written = written[: written.index(run.tokenizer.eot_id)]
        assert run.tokenizer.decode(written) == run.generate(text, tokens=12, temperature=0)
    beams = {**settings, "num_beams": 3, "max_new_tokens": 6}
    assert model.generate(**one, **beams).equal(model.generate(**one, **beams, use_cache=False))


@pytest.mark.parametrize("name", ["hybrid", pytest.param("hgrn2", marks=pytest.mark.long)])
@torch.no_grad()
def test_number_formats(transformers: Any, exports: Path, saved_runs: Path, tmp_path: Path, name: str) -> None:
    run = lightscale.load(saved_runs / name, dtype=torch.float64)
    ids = run.ids(TEXTS[2])[None]
    exact = run.logits(ids)
    assert error(loaded(transformers, exports / name, torch.float64)(ids).logits, exact) < 1e-10
    export(choose_run(saved_runs / name), tmp_path / "half")
    half = loaded(transformers, tmp_path / "half")
    rounded = lightscale.load(tmp_path / "half", dtype=torch.float64)
    # Of the same rounded weights; these are random and large, which magnifies the rounding of activations.
    assert error(half(ids).logits, rounded.logits(ids)) < 3e-2
    for weight, right in zip(rounded.module.parameters(), run.module.parameters(), strict=True):
        assert weight.equal(right.bfloat16().double()) or weight.equal(right)
    wide = {own.rpartition(".")[2] for own, weight in half.named_parameters() if weight.dtype == torch.float32}
    assert wide == ({"table"} if name == "hgrn2" else {"theta", "decay_logit", "table"})


@pytest.mark.parametrize("name", ["tnl", "llama"])
def test_tokens_are_those_of_training(transformers: Any, exports: Path, saved_runs: Path, name: str) -> None:
    """As AutoTokenizer loads them, whatever class it takes for the architecture; a spelled special token is text."""
    tokenizer, own = tokenizer_of(transformers, exports / name), lightscale.load(saved_runs / name).tokenizer
    for text in comparison_texts(300, seed=4):
        expected = own.encode(text)
        assert tokenizer(text)["input_ids"] == [own.eot_id, *expected]
        assert tokenizer.decode(expected) == own.decode(expected)
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == tokenizer.pad_token_id == own.eot_id
    assert len(tokenizer) == own.vocab_size


def test_llama_is_transformers_own_class(transformers: Any, exports: Path) -> None:
    assert type(loaded(transformers, exports / "llama")) is transformers.LlamaForCausalLM
    assert not (exports / "llama" / "modeling_lightscale.py").exists()


def test_the_state_of_generation_does_not_grow(transformers: Any, exports: Path) -> None:
    model = loaded(transformers, exports / "lightnet")
    cache, sizes = None, set()
    for length in (3, 70, 1, 1, 200):
        cache = model(torch.ones(1, length, dtype=torch.int64), past_key_values=cache, use_cache=True).past_key_values
        sizes.add(cache.state_bytes())
    assert len(sizes) == 1 and cache.get_seq_length() == 275


@pytest.mark.parametrize("name", ["hybrid"])
def test_saved_again_by_transformers_it_is_the_same(
    transformers: Any, exports: Path, tmp_path: Path, name: str
) -> None:
    model, tokenizer = loaded(transformers, exports / name), tokenizer_of(transformers, exports / name)
    model.save_pretrained(tmp_path / "again")
    tokenizer.save_pretrained(tmp_path / "again")
    ids = torch.tensor([[259, 1, 2, 3, 4]])
    with torch.no_grad():
        assert loaded(transformers, tmp_path / "again")(ids).logits.equal(model(ids).logits)
        # Without the run's own tokenizer files: tokenizer.json is read.
        assert error(lightscale.load(tmp_path / "again").logits(ids), model(ids).logits) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("name", ["hybrid", "decay", "printed", "pairs"])
def test_it_compiles_to_one_graph(transformers: Any, exports: Path, name: str) -> None:
    model, ids = loaded(transformers, exports / name), torch.tensor([[259, *range(80)]])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids).logits)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param("tnl", marks=pytest.mark.long), pytest.param("hybrid", marks=pytest.mark.soak)]
)
def test_it_compiles_with_inductor(transformers: Any, exports: Path, name: str) -> None:
    """The hybrid takes a C++ compiler minutes; `test_it_compiles_to_one_graph` has it too."""
    model, ids = loaded(transformers, exports / name), torch.tensor([[259, *range(80)]])
    with torch.no_grad():
        assert error(torch.compile(model)(ids, use_cache=False).logits, model(ids).logits) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("name", ["hybrid", "tnl"])
def test_ten_steps_of_the_trainer(transformers: Any, exports: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("accelerate")
    model = loaded(transformers, exports / name)
    ids = torch.tensor([259, *b"the other text, again and again"])
    rows = [{"input_ids": ids, "labels": ids}] * 40
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=10, learning_rate=3e-3, report_to=[], use_cpu=True, logging_steps=1,
        save_strategy="no", per_device_train_batch_size=2, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 10 and losses[-1] < losses[0] / 2


def test_the_modelling_file_needs_torch_and_transformers_alone() -> None:
    text = modelling_file()
    imported = {
        line.split()[1].partition(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))
    }
    assert imported <= {"torch", "transformers", "math", "typing", "collections", "dataclasses"}
    assert "lightscale.exchange" not in text


def test_the_bytes_are_the_checkpoints(exports: Path, saved_runs: Path) -> None:
    """Read by another package; padding rows are cut, and the output layer is not written twice."""
    safetensors = pytest.importorskip("safetensors.torch")
    whole: dict[str, Tensor] = {}
    for file in sorted((exports / "hgrn2").glob("*.safetensors")):
        assert file.stat().st_size < 90_000
        whole |= safetensors.load_file(file)
    stored = safetensors.load_file(next((saved_runs / "hgrn2").glob("checkpoints/*/*.safetensors")))
    embedding = stored["model.embedding.word_embeddings.weight@0,0"]
    assert whole["model.embed_tokens.weight"].equal(embedding[:264]) and len(embedding) == 320
    both = stored["model.decoder.layers.1.self_attention.fv_proj.weight@0,0"].view(8, 2, 8, 64)
    assert whole["model.layers.1.mixer.f_proj.weight"].equal(both[:, 0].flatten(0, 1))
    assert whole["model.layers.1.mixer.v_proj.weight"].equal(both[:, 1].flatten(0, 1))
    assert "lm_head.weight" not in whole
    index = json.loads((exports / "hgrn2" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in whole.values())


def test_the_card_says_what_was_trained(own_run: Callable[[str], Path], tmp_path: Path) -> None:
    run = own_run("tnl")
    common = {"attempt": 1, "time": "2026-11-23T00:00:00Z"}
    lines = [
        {"step": 2, "loss": 3.25, **common},
        {"step": 3, "tokens": 1152, "validation": {"held": {"loss": 3.5, "loss_by_position": [3.5]}}, **common},
        {"step": 4, "loss": 1.0, **common},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    export(choose_run(run), tmp_path / "to")
    card = (tmp_path / "to" / "README.md").read_text()
    for part in ("3, 1,152", "3.2500 (step 2)", "validation loss, held | 3.5000 (step 3)", "trust_remote_code=True"):
        assert part in card
    assert "1.0000" not in card
    front, heading = card.split("---\n")[1:3]
    assert front == "library_name: transformers\npipeline_tag: text-generation\ntags: [lightscale, linear-attention]\n"
    assert heading.startswith("\n# tnl")
    assert "\n| | |\n|---|---|\n| task |" in card
    # Quotation marks of the source are no part of the text.
    assert '"' not in card.replace('("Once upon a time", return_tensors="pt")', "").partition("```")[0]


def test_an_interruption_leaves_nothing_that_looks_whole(
    saved_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = safetensors_files.write_file

    def interrupted(path: Path, tensors: Any) -> None:
        written(path, tensors)
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors_files, "write_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(choose_run(saved_runs / "tnl"), tmp_path / "to")
    assert list(tmp_path.iterdir()) == []


def test_weights_too_large_for_a_format_are_refused(tmp_path: Path) -> None:
    blocks = [torch.full((2, 3), 70_000.0)]
    tensor = safetensors_files.Written(name="a.weight", dtype=torch.float16, shape=(2, 3), blocks=blocks)
    with pytest.raises(UserError, match=r"a\.weight: a weight is too large for fp16; use bf16 or fp32"):
        safetensors_files.write_shards(tmp_path, [tensor], shard_bytes=10**6)


def test_the_command(saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", f"{saved_runs / 'tnl'}@3", "--to", str(tmp_path / "to"), "--dtype", "fp32"]) == 0
    assert "parameters" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == [
        "README.md",
        "XXH128SUMS",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_lightscale.py",
        "run.toml",
        "tokenizer",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert main(["export", str(saved_runs / "tnl"), "--to", str(tmp_path / "to")]) == 78
    assert "it exists; use a new directory" in capsys.readouterr().err


def test_of_two_exports_to_one_place_one_says_that_it_was_too_late(tmp_path: Path) -> None:
    late = r"to: another process wrote it at the same time; use another directory"
    target = tmp_path / "to"

    def write() -> None:
        with whole_directory(target, others_are_equal=False) as draft:
            (draft / "mine").touch()
            target.mkdir()
            (target / "theirs").touch()

    with pytest.raises(UserError, match=late):
        write()
    assert [path.name for path in tmp_path.rglob("*")] == ["to", "theirs"]


def files(to: Path) -> list[Path]:
    return sorted(to.glob("model-*.safetensors"))


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def edit(to: Path, **values: Any) -> None:
    path = to / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def only_a_pickle(to: Path) -> None:
    for path in [*to.glob("*.safetensors*")]:
        path.unlink()
    (to / "pytorch_model.bin").touch()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda to: (to / "config.json").unlink(), "not a run .* or an export"),
        (lambda to: files(to)[1].unlink(), r"model-00002-of-0000.\.safetensors: No such file"),
        (lambda to: shorten(files(to)[-1]), "copy the file again"),
        (
            lambda to: edit(to, model_type="gpt2"),
            r"model_type = 'gpt2'; use lightscale, vit, llama, mistral, .* or olmo_hybrid",
        ),
        (lambda to: edit(to, mixers=["tnl", "retnet"]), "unknown mixer 'retnet'"),
        (lambda to: edit(to, forms={"hgrn2": {}}), "forms.hgrn2 is not one of the model's mixers, tnl"),
        (lambda to: edit(to, forms={"tnl": {"decay": "none"}}), "forms.tnl.decay = 'none': Input should be 'alibi'"),
        (lambda to: edit(to, forms={"tnl": {"decays": "linear"}}), "forms.tnl.decays = 'linear'; use "),
        (lambda to: edit(to, forms={"tnl": {"lrpe": "all"}}), "is of another model: model.layers.1.mixer.theta"),
        (lambda to: edit(to, learned_positions=9), "no mixer of the model uses learned_positions"),
        (lambda to: edit(to, hidden_size=72), r"is of another model: .* must be"),
        (lambda to: edit(to, hidden_size="64"), "hidden_size = '64'"),
        (lambda to: edit(to, vocab_size=999), "is of another model: model.embed_tokens.weight"),
        (
            lambda to: shutil.rmtree(to / "tokenizer") or (to / "tokenizer.json").unlink(),
            "tokenizer.json: No such file",
        ),
        (only_a_pickle, r"pytorch_model.bin could run code when loaded and is not read"),
    ],
    ids=[
        "no model",
        "missing",
        "short",
        "other",
        "mixer",
        *(f"form {n}" for n in range(5)),
        "shape",
        "type",
        "rows",
        "no tokenizer",
        "pickle",
    ],
)
def test_a_wrong_directory_is_refused(
    exports: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    to = tmp_path / "to"
    shutil.copytree(exports / "tnl", to)
    damage(to)
    with pytest.raises(UserError, match=message):
        lightscale.load(to)


def test_what_the_plain_model_does_not_know_is_named(
    own_run: Callable[[str], Path], saved_runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixers of other packages, and options that were added without a plain form."""
    weights = importlib.import_module("lightscale.exchange.files.weights")
    monkeypatch.setattr(weights, "_ELSEWHERE", frozenset())
    monkeypatch.setattr(weights, "_OF_MODEL", weights._OF_MODEL - {"final_norm"})
    with pytest.raises(UserError, match=r"cosformer2\.gate_rank = 6 cannot be loaded or exported; use \"none\""):
        lightscale.load(saved_runs / "cosformer2")
    with pytest.raises(UserError, match=r"model\.final_norm = false cannot be loaded or exported"):
        lightscale.load(saved_runs / "printed")
    monkeypatch.setattr(weights, "MIXER_NAMES", ("llama",))
    with pytest.raises(UserError, match="mixer: tnl cannot be loaded or exported"):
        lightscale.load(own_run("tnl"))
