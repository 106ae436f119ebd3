"""Gradients of fine-tuning and preferences beside TRL's trainers, on exported models; `make test-trl` installs TRL."""

import json
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.config.files import load
from lightscale.data_pipeline.loading.loader import LoaderLayout, TokenLoader
from lightscale.data_pipeline.loading.packing import WholeWindows
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.exchange.files.export_config import written_places
from lightscale.exchange.files.weights import exported_tensors, shape_of
from lightscale.parallel.mesh import start_mesh
from lightscale.runs.run_directory import RunDirectory
from lightscale.tasks.preference import PreferenceConfig
from lightscale.training.base import read_base
from lightscale.training.build import build_engine
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.preference import PreferenceObjective, build_reference

TESTS = Path(__file__).parents[1]
parity = SimpleNamespace(**runpy.run_path(str(TESTS / "helpers" / "parity.py")))
commands = runpy.run_path(str(TESTS / "helpers" / "rank_commands.py"))["commands"]
helpers = SimpleNamespace(**runpy.run_path(str(TESTS / "exchange/chat/conftest.py"), run_name="helpers"))
RunRanks = Callable[..., list[Any]]
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
LENGTH = 96
# TRL counts what follows an answer's end marker in preferences: nothing does here.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
CORPUS = """\
tokenizer = "tokenizer.json"
[duplicates]
near = false
[sources.talks]
paths = ["{kind}.jsonl"]
format = "{kind}"
chat = {{ template = "t.jinja", max_tokens = {length} }}
"""
MODELS = {"llama": '"llama"', "hybrid": '["gated-delta-net", "tnl", "llama"]'}
RUN = """\
[model]
mixer = {mixer}
norm = "rmsnorm"
glu_activation = "silu"
num_layers = 3
hidden_size = 32
num_heads = 4
intermediate_size = 48
vocab_size = 272
init_std = 0.2
[data]
store = "chat"
sequence_length = {length}
packing = "whole"
[optimizer]
lr = 1e-2
[train]
steps = 2
global_batch_size = 4
[guard]
enabled = false
[task]
name = "sft"
"""


def asked(number: int) -> tuple[str, str]:
    return f"{number} and {number % 3}?", f"{number + number % 3}" * (1 + number % 3)


def conversations() -> list[dict[str, Any]]:
    """Of one turn or two, some with a message of the system."""
    found: list[dict[str, Any]] = []
    for number in range(5, 12):
        messages = [{"role": "system", "content": "Sums é."}] if number % 2 else []
        for turn in range(1 + number % 2):
            for role, text in zip(("user", "assistant"), asked(number + 20 * turn), strict=True):
                messages.append({"role": role, "content": text})
        found.append({"messages": messages})
    return [one for one in found if len(json.dumps(one)) < 300]


def preferences() -> list[dict[str, Any]]:
    found = []
    for number in range(5, 10):
        question, answer = asked(number)
        sides = {"chosen": answer, "rejected": f"{number}, no"}
        answers = {side: [{"role": "assistant", "content": text}] for side, text in sides.items()}
        found.append({"prompt": [{"role": "user", "content": question}], **answers})
    return found


def gradients(
    rank: int, world_size: int, init_method: str, folder: str, run: str, words: list[str]
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one step over the whole store, in fp64, by the names of the export."""
    os.chdir(folder)
    config = load(RunDirectory(run).config, words)
    store = TokenStore(config.data.store)
    windows = WholeWindows(store.source("talks"), config.data.sequence_length)
    # All windows in one step, and some padding.
    words = [*words, f"train.global_batch_size={windows.num_windows}", "train.micro_batch_size=1"]
    config = load(RunDirectory(run).config, words)
    loader = TokenLoader.of(config, store, layout=LoaderLayout(), index_dir=Path(folder))
    with start_mesh(device="cpu", rank=rank, world_size=world_size, init_method=init_method) as mesh:
        made = {"vocab_size": store.tokenizer.vocab_size, "dtype": torch.float64}
        reference, objective = build_reference(config, mesh, **made), None
        if isinstance(config.task, PreferenceConfig):
            objective = PreferenceObjective(config.task, mesh, reference)
        engine = build_engine(config, mesh, trainable=True, objective=objective, **made)
        if reference is not None:
            read_base(config, reference)
        Checkpoints(RunDirectory(run).checkpoints, mesh, parts=["data"]).restore(engine, step=2, weights_only=True)
        batches = [batch.to(mesh.device) for batch in loader.next_step()]
        assert any((one.loss_mask.sum(dim=1) < one.labels.size(1)).any() for one in batches)
        assert max(len(one.start_slots) for one in batches) > 2, "several documents in a row"
        loss = engine.forward_backward(batches).mean
        found = parity.gradients(engine)
    named = {}
    places = written_places(shape_of(config.model, vocab_size=made["vocab_size"]))
    for name, rows in exported_tensors(config.model, vocab_size=made["vocab_size"]).items():
        whole = found[rows.key]
        assert places[name].ranges is None
        parts = [whole] if rows.ranges is None else [whole[first:last] for first, last in rows.ranges]
        named[places[name].key] = torch.cat(parts)
    return loss, named


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_ranks: RunRanks) -> Path:
    """Stores; of each model a base and the model that two steps make of it, both exported."""
    pytest.importorskip("trl")
    folder = tmp_path_factory.mktemp("trl")
    (folder / "tokenizer.json").write_bytes(helpers.byte_level_file())
    (folder / "t.jinja").write_text(TEMPLATE)
    lines = []
    for kind, records in (("chat", conversations()), ("preference", preferences())):
        (folder / f"{kind}.jsonl").write_text("\n".join(map(json.dumps, records)))
        (folder / f"{kind}.toml").write_text(CORPUS.format(kind=kind, length=LENGTH))
        lines.append(["data", "prepare", f"{kind}.toml", "--out", kind])
    for name, mixer in MODELS.items():
        (folder / f"{name}.toml").write_text(RUN.format(mixer=mixer, length=LENGTH))
        for run, words in (("base", []), ("tuned", [f"train.init_from=runs/{name}-base@2"])):
            lines.append(["train", f"{name}.toml", "--run", f"runs/{name}-{run}", *words])
            lines.append(["export", f"runs/{name}-{run}", "--to", f"out/{name}-{run}", "--dtype", "fp32"])
    (results,) = run_ranks(commands, 1, str(folder), lines, timeout_s=600)
    assert not [one for one in results if one[0]], results
    return folder


def model_of(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    # Where documents are packed, this attention keeps them apart by their positions.
    how = {"attn_implementation": "sdpa"} if "llama" in name else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(f"out/{name}", trust_remote_code=True, **how)
    # In fp64, as ours: layers of the delta rule round to 2e-5 of the gradient in fp32.
    model = model.double()
    # transformers' LLaMA gives the input embedding of the padding token, which begins our documents, no gradient.
    model.get_input_embeddings().padding_idx = None
    return model


def settings(**more: Any) -> dict[str, Any]:
    batch = {"per_device_train_batch_size": 64, "dataloader_pin_memory": False}
    return {"output_dir": "trl", "use_cpu": True, "bf16": False, "report_to": "none", **batch, **more}


def theirs(trainer: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the trainer's first batch, which has all that there is."""
    (batch,) = list(trainer.get_train_dataloader())
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return float(loss.detach()), {name: one.grad for name, one in trainer.model.named_parameters()}


def check(ours: tuple[float, dict[str, Tensor]], found: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(ours[0], rel=1e-5)
    assert found[1].keys() == ours[1].keys()
    largest = max(float(one.norm()) for one in ours[1].values())
    for name, expected in ours[1].items():
        assert float((found[1][name] - expected).norm()) < 1e-5 * max(float(expected.norm()), 1e-3 * largest), name


def parts(name: str) -> tuple[Any, Any, Any, Any]:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    return (
        trl,
        datasets,
        transformers.AutoTokenizer.from_pretrained(f"out/{name}", trust_remote_code=True),
        model_of(name),
    )


@pytest.mark.parametrize(("name", "packing"), [("llama", True), ("llama", False), ("hybrid", False)])
def test_fine_tuning_has_the_gradients_of_sft_trainer(
    folder: Path, name: str, packing: bool, monkeypatch: pytest.MonkeyPatch, run_ranks: RunRanks
) -> None:
    monkeypatch.chdir(folder)
    trl, datasets, tokenizer, model = parts(f"{name}-base")
    packed = {"packing": True, "packing_strategy": "bfd"} if packing else {"packing": False}
    config = trl.SFTConfig(**settings(max_length=LENGTH, assistant_only_loss=True, **packed))
    trainer = trl.SFTTrainer(
        model, config, train_dataset=datasets.Dataset.from_list(conversations()), processing_class=tokenizer
    )
    (ours,) = run_ranks(gradients, 1, str(folder), f"runs/{name}-base", [], timeout_s=300)
    check(ours, theirs(trainer))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_preferences_have_the_gradients_of_dpo_trainer(
    folder: Path, name: str, loss: str, monkeypatch: pytest.MonkeyPatch, run_ranks: RunRanks
) -> None:
    monkeypatch.chdir(folder)
    trl, datasets, tokenizer, model = parts(f"{name}-tuned")
    of_loss = {"loss_type": {"dpo": "sigmoid", "ipo": "ipo"}[loss], "beta": 0.3}
    config = trl.DPOConfig(**settings(max_length=LENGTH, **of_loss))
    trainer = trl.DPOTrainer(
        model,
        model_of(f"{name}-base"),
        config,
        train_dataset=datasets.Dataset.from_list(preferences()),
        processing_class=tokenizer,
    )
    words = ["task.name=preference", f"task.loss={loss}", "task.beta=0.3", "data.store=preference"]
    words += [f"data.sequence_length={3 * LENGTH}", f"train.init_from=runs/{name}-base@2"]
    (ours,) = run_ranks(gradients, 1, str(folder), f"runs/{name}-tuned", words, timeout_s=300)
    check(ours, theirs(trainer))
