"""Exports in the tools of transformers and around it: each computes what the export's model computes by itself."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lightscale
from lightscale.evaluation.chosen_run import choose_run
from lightscale.exchange.export import export

conftest = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("conftest.py"))))

# Importing transformers takes long on a busy machine.
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("offline")]

NAMES = ("hybrid", "softmax", "delta", "masked", "classify_causal")
"""All mixers of the first five; windows; states behind convolutions; layers that read both ways; labels."""


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory, run_ranks: Callable[..., list[Any]]) -> Path:
    """A folder with an export in fp32 of each of ``NAMES``."""
    folder, tokenizer = tmp_path_factory.mktemp("tools"), conftest.byte_tokenizer()
    for name in NAMES:
        conftest.make_run(folder / "runs", name, tokenizer)
    run_ranks(conftest.save_runs, 1, str(folder / "runs"), list(NAMES))
    for name in NAMES:
        export(choose_run(folder / "runs" / name, any_task=True), folder / name, dtype="fp32")
    return folder


def loaded(transformers: Any, path: Path, auto: str = "AutoModelForCausalLM", **more: Any) -> Any:
    """The model in evaluation; what is not in the files, and what is there and not used, is an error."""
    model, info = getattr(transformers, auto).from_pretrained(
        path, trust_remote_code=True, output_loading_info=True, **more
    )
    assert not any(info.values()), info
    return model.eval()


def some_ids(rows: int = 2, tokens: int = 40) -> Tensor:
    return torch.randint(250, (rows, tokens), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def test_hidden_states(transformers: Any, exports: Path) -> None:
    """Those before each layer and behind the norm, of a loop written out here; as a keyword, a setting and a tuple."""
    model, ids = loaded(transformers, exports / "hybrid"), some_ids()
    found = model(ids, output_hidden_states=True)
    decoder = model.model
    x = decoder.tpe(decoder.embed_tokens(ids))[0]
    expected = [x]
    for number, layer in enumerate(decoder.layers):
        bound = {"lower_bound": decoder.lower_bounds()[number]} if model.config.mixers[number] == "hgrn2" else {}
        x = layer(x, None, None, **bound)[0]
        expected.append(x)
    expected[-1] = decoder.norm(x)
    assert len(found.hidden_states) == len(expected) == 6
    assert all(one.equal(right) for one, right in zip(found.hidden_states, expected, strict=True))
    assert model.lm_head(found.hidden_states[-1]).equal(found.logits)
    assert model(ids).hidden_states is None
    *_, of_tuple = model(ids, output_hidden_states=True, use_cache=False, return_dict=False)
    assert all(one.equal(right) for one, right in zip(of_tuple, expected, strict=True))
    written = model.generate(ids, max_new_tokens=3, output_hidden_states=True, return_dict_in_generate=True)
    assert [len(step) for step in written.hidden_states] == [6, 6, 6]
    model.config.output_hidden_states = True
    assert model(ids).hidden_states[2].equal(expected[2])
    with pytest.raises(ValueError, match="output_attentions: the layers have no attention weights"):
        model(ids, output_attentions=True)


@pytest.mark.parametrize(
    ("name", "auto"), [("masked", "AutoModelForMaskedLM"), ("classify_causal", "AutoModelForSequenceClassification")]
)
@torch.no_grad()
def test_hidden_states_of_masked_models_and_classifiers(transformers: Any, exports: Path, name: str, auto: str) -> None:
    model, ids = loaded(transformers, exports / name, auto), some_ids()
    found = model(ids, output_hidden_states=True)
    last = found.hidden_states[-1]
    assert len(found.hidden_states) == 1 + len(model.config.mixers)
    right = model.lm_head(last)[..., :-1] if name == "masked" else model.score(last.mean(1))
    torch.testing.assert_close(found.logits[..., : right.size(-1)], right)


def loss_gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize(("name", "reentrant"), [("hybrid", True), ("delta", False)])
def test_gradient_checkpointing(transformers: Any, exports: Path, name: str, reentrant: bool) -> None:
    """The same gradients, of less memory."""
    model, ids = loaded(transformers, exports / name).train(), some_ids()
    sizes: list[int] = []

    def kept(x: Tensor) -> Tensor:
        sizes[-1] += x.nbytes
        return x

    found = []
    for is_on in (False, True):
        if is_on:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        sizes.append(0)
        with torch.autograd.graph.saved_tensors_hooks(kept, lambda x: x):
            loss = model(ids, labels=ids).loss
        loss.backward()
        found.append({own: weight.grad.clone() for own, weight in model.named_parameters()})
        model.zero_grad()
    assert model.is_gradient_checkpointing and sizes[1] < sizes[0] / 3
    for own, right in found[0].items():
        torch.testing.assert_close(found[1][own], right, rtol=1e-5, atol=1e-7, msg=own)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


@torch.no_grad()
def test_the_model_without_a_head(transformers: Any, exports: Path) -> None:
    for name, auto in (("delta", "AutoModelForCausalLM"), ("masked", "AutoModelForMaskedLM")):
        model, ids = loaded(transformers, exports / name, "AutoModel"), some_ids()
        found = model(ids)
        expected = loaded(transformers, exports / name, auto)(ids, output_hidden_states=True)
        assert found.last_hidden_state.equal(expected.hidden_states[-1])
        assert (found.past_key_values is None) == (name == "masked")
        with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
            model()


@pytest.mark.parametrize("name", ["softmax", "delta"])
def test_number_formats_of_half_precision(transformers: Any, exports: Path, name: str) -> None:
    """Decays and logits of sinks stay as training has them."""
    model = loaded(transformers, exports / name, dtype=torch.bfloat16)
    wide = {own.rpartition(".")[2] for own, weight in model.named_parameters() if weight.dtype == torch.float32}
    assert wide == {"softmax": {"sinks"}, "delta": {"A_log", "dt_bias", "o_norm"}}[name]


def test_a_classifier_of_a_model_of_the_next_token(transformers: Any, exports: Path, tmp_path: Path) -> None:
    """The last real token's state is read, whichever side the padding is on; one step, and lightscale reads it."""
    model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        exports / "hybrid", trust_remote_code=True, output_loading_info=True, num_labels=3
    )
    assert info["missing_keys"] == {"score.weight"} and not info["unexpected_keys"]
    ids, weights = some_ids(1), model.score.weight
    assert 0.01 < weights.std() < 0.03
    expected = model.model(ids).last_hidden_state[:, -1] @ weights.T
    pad, real = torch.zeros(1, 5, dtype=torch.int64), torch.ones_like(ids)
    for order in (slice(None), slice(None, None, -1)):
        row, mask = (torch.cat([ids, pad][order], 1), torch.cat([real, pad][order], 1))
        torch.testing.assert_close(model(row, mask).logits, expected, rtol=1e-4, atol=1e-5)
    labels = torch.tensor([2])
    loss = model.train()(ids, labels=labels).loss
    torch.testing.assert_close(loss, -expected.log_softmax(-1)[0, 2], rtol=1e-4, atol=1e-5)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    assert model(ids, labels=labels).loss < loss
    model.save_pretrained(tmp_path / "to")
    transformers.AutoTokenizer.from_pretrained(exports / "hybrid").save_pretrained(tmp_path / "to")
    again = lightscale.load(tmp_path / "to").module
    with torch.no_grad():
        torch.testing.assert_close(again(ids), model.eval()(ids).logits, rtol=1e-4, atol=1e-5)


def test_losses_of_other_problems(transformers: Any, exports: Path) -> None:
    """A regression, and several labels of a row: squares, and a logistic loss of each."""
    ids = some_ids(4, 8)
    for kind, num_labels in (("regression", 1), ("multi_label_classification", 3)):
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            exports / "delta", trust_remote_code=True, num_labels=num_labels, problem_type=kind
        ).eval()
        labels = torch.rand(4, num_labels).round()
        found = model(ids, labels=labels)
        right = (found.logits - labels) ** 2
        if kind != "regression":
            right = -torch.where(labels > 0, found.logits, -found.logits).sigmoid().log()
        torch.testing.assert_close(found.loss, right.mean())


@torch.no_grad()
def test_attention_implementations(transformers: Any, exports: Path) -> None:
    ids, usual = some_ids(), loaded(transformers, exports / "hybrid")
    assert usual.config._attn_implementation == "sdpa"
    for kind in ("sdpa", "eager"):
        model = loaded(transformers, exports / "hybrid", attn_implementation=kind)
        assert model.config._attn_implementation == kind
        assert model(ids).logits.equal(usual(ids).logits)
    with pytest.raises(ValueError, match="flex_attention"):
        loaded(transformers, exports / "hybrid", attn_implementation="flex_attention")


@pytest.mark.parametrize("name", ["hybrid", "softmax", "delta"])
@torch.no_grad()
def test_assisted_decoding(transformers: Any, exports: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text that the model writes by itself, with an assistant that is right at times, and from the prompt."""
    model, assistant = (loaded(transformers, exports / name, dtype=torch.float64) for _ in range(2))
    cache_type = type(model(some_ids(1, 2)).past_key_values)
    generator = torch.Generator().manual_seed(2)
    for weight in assistant.parameters():
        weight.add_(torch.randn(weight.shape, generator=generator) * 0.005)
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    calls, of_assisted = list[int](), 0
    model.model.register_forward_pre_hook(lambda module, given: calls.append(len(given)))
    for most_back, prompt in ((256, some_ids(1, 30)), (16, some_ids(1, 30)), (256, some_ids(1, 4).repeat(1, 5))):
        monkeypatch.setattr(cache_type, "most_back", most_back)
        expected = model.generate(prompt, **settings)
        calls.clear()
        assert model.generate(prompt, **settings, assistant_model=assistant).equal(expected)
        of_assisted += len(calls)
        assert model.generate(prompt, **settings, prompt_lookup_num_tokens=4).equal(expected)
    # Some candidates were right, others wrong.
    assert 9 < of_assisted < 3 * 24


@pytest.mark.parametrize("name", ["hybrid", "softmax", "delta"])
@torch.no_grad()
def test_tokens_are_taken_back(transformers: Any, exports: Path, name: str) -> None:
    """Within a call and over several, with padding, again and again; where it cannot be, an error says why."""
    model, ids = loaded(transformers, exports / name, dtype=torch.float64), some_ids(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    expected = model(ids, mask).logits
    cache = type(model(ids[:, :2]).past_key_values)()
    cache.activate_past_recording()
    model(ids[:, :20], mask[:, :20], past_key_values=cache)
    for wrong in (3, 1):
        model(ids[:, :wrong], past_key_values=cache)
    cache.crop(-9)
    assert cache.get_seq_length() == 15
    cache.crop(-2)
    cache.crop(0)
    for start, stop in ((13, 14), (14, 30), (30, 40)):
        found = model(ids[:, start:stop], mask[:, start:stop], past_key_values=cache)
        torch.testing.assert_close(found.logits, expected[:, start:stop], rtol=1e-9, atol=1e-9)
        assert cache.get_seq_length() == stop
    cache.crop(0)
    with pytest.raises(ValueError, match=r"crop\(-1\) needs tokens to take back: the cache has the last 0"):
        cache.crop(-1)
    usual = model(ids).past_key_values
    with pytest.raises(ValueError, match=r"the cache has none; call activate_past_recording\(\) before"):
        usual.crop(-1)


def test_the_trainer_with_checkpointing_and_evaluation(transformers: Any, exports: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    ids = torch.tensor([259, *b"the other text, again and again"])
    rows = [{"input_ids": ids, "labels": ids}] * 8
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, learning_rate=3e-3, report_to=[], use_cpu=True, logging_steps=1,
        save_strategy="no", per_device_train_batch_size=2, disable_tqdm=True, gradient_checkpointing=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=loaded(transformers, exports / "hybrid"), args=settings, train_dataset=rows, eval_dataset=rows
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 1.5
    assert trainer.predict(rows).predictions.shape == (8, len(ids), 264)


def test_adapters_of_peft(transformers: Any, exports: Path, tmp_path: Path) -> None:
    """LoRA on every linear map: nothing else is trained; read again, and merged, it computes the same."""
    peft = pytest.importorskip("peft", reason="needs pip install peft")
    base, ids = loaded(transformers, exports / "delta"), some_ids()
    expected = base(ids).logits.detach()
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    assert model(ids).logits.equal(expected)
    adapted = {own.partition(".lora_")[0] for own, weight in model.named_parameters() if weight.requires_grad}
    linear = {
        own for own, one in loaded(transformers, exports / "delta").named_modules() if type(one) is torch.nn.Linear
    }
    assert {own.removeprefix("base_model.model.") for own in adapted} == linear - {"lm_head"}
    optimizer = torch.optim.Adam([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    model.train()
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(tmp_path)
    found = model(ids).logits.detach()
    assert (found - expected).abs().max() > 1e-3
    again = peft.PeftModel.from_pretrained(loaded(transformers, exports / "delta"), tmp_path)
    assert again(ids).logits.equal(found)
    assert again.generate(input_ids=ids, max_new_tokens=3, do_sample=False).shape == (2, 43)
    torch.testing.assert_close(again.merge_and_unload()(ids).logits, found, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_device_map_with_layers_on_disk(transformers: Any, exports: Path, tmp_path: Path) -> None:
    """Blocks stay whole; those for which there is no room are read from disk as they are computed."""
    pytest.importorskip("accelerate")
    ids, usual = some_ids(), loaded(transformers, exports / "hybrid")
    model = loaded(
        transformers, exports / "hybrid", device_map="auto", max_memory={"cpu": "500KB"}, offload_folder=tmp_path
    )
    places = model.hf_device_map
    assert {*places.values()} == {"cpu", "disk"} and any(name.startswith("model.layers.") for name in places)
    assert not any(".layers." in name and name.count(".") > 2 for name in places)
    assert any(weight.is_meta for weight in model.parameters())
    assert model(ids).logits.equal(usual(ids).logits)
    settings = {"max_new_tokens": 4, "do_sample": False}
    assert model.generate(ids, **settings).equal(usual.generate(ids, **settings))
    whole = loaded(transformers, exports / "hybrid", device_map="auto")
    assert whole(ids).logits.equal(usual(ids).logits)


@pytest.mark.long
def test_it_compiles_to_one_graph(transformers: Any, exports: Path) -> None:
    """In training, with hidden states and gradients; `test_export.py` has the other mixers, and inductor."""
    model, ids = loaded(transformers, exports / "softmax").train(), some_ids(1, 20)
    expected = loss_gradients(model, ids)
    right = model(ids, labels=ids, output_hidden_states=True)
    model.zero_grad()
    found = torch.compile(model, backend="eager", fullgraph=True)(ids, labels=ids, output_hidden_states=True)
    found.loss.backward()
    torch.testing.assert_close(found.hidden_states[1], right.hidden_states[1])
    for own, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, expected[own], rtol=1e-4, atol=1e-6)
