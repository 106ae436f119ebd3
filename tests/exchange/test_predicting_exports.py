"""Models that fill masks or name classes: loaded, exported for transformers, brought back, and what they refuse."""

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
from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import choose_run
from lightscale.exchange.export import export
from lightscale.exchange.files.weights import run_shape
from lightscale.exchange.imported import import_model
from lightscale.exchange.plain.model import Classifier, MaskedModel

pytestmark = pytest.mark.timeout(300)

NAMES = ("masked", "masked_llama", "masked_rn", "classify", "classify_causal")
MASK = 264
"""Behind the last of the tokenizer's ids."""
VECTOR = {"feature_map": "elu", "scale": True, "eps": 0, "gate": "leave", "input_gate": False, "vector_decay": True}
TEXTS = ("the [MASK] 12345 text", "a[MASK]", "the [MASK] of 77777, and the [MASK] of it " * 4)
PLAIN_TEXTS = ("the other 12345 text", "a", "the end of 77777, and the rest of it " * 4)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(scope="module")
def exports(saved_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    for name in NAMES:
        export(choose_run(saved_runs / name, any_task=True), folder / name, dtype="fp32", shard_bytes=60_000)
    return folder


def loaded(transformers: Any, path: Path, dtype: torch.dtype | str = "auto", kind: str = "") -> Any:
    name = kind or ("MaskedLM" if "masked" in path.name else "SequenceClassification")
    model, info = getattr(transformers, f"AutoModelFor{name}").from_pretrained(
        path, trust_remote_code=True, dtype=dtype, output_loading_info=True
    )
    assert kind or not any(info.values()), info
    return model.eval()


def evaluated(rank: int, world_size: int, init_method: str, folder: str, asked: dict[str, list[list[int]]]) -> Any:
    """What the training model predicts of each document, alone: log-probabilities at masks, or of classes."""
    import numpy as np

    from lightscale.evaluation.inference.predictions import Predictor
    from lightscale.evaluation.model import mesh_of, restore

    found = {}
    for name, documents in asked.items():
        chosen = choose_run(Path(folder) / name, any_task=True)
        with mesh_of(chosen.config) as mesh:
            predictor = Predictor(restore(chosen, mesh).model, mesh)
            ids = [np.array(one, dtype=np.int32) for one in documents]
            found[name] = predictor.classify(ids) if "classify" in name else predictor.fill(ids, MASK, 264)
            found[name, "mean"] = predictor.embed(ids, "mean")
    return found


@pytest.fixture(scope="module")
def predicted(saved_runs: Path, run_ranks: Callable[..., list[Any]]) -> dict[Any, Any]:
    """Of the training model on the texts, by the run's name."""
    asked = {}
    for name in NAMES:
        model, texts = lightscale.load(saved_runs / name), TEXTS if "masked" in name else PLAIN_TEXTS
        asked[name] = [model.ids(text).tolist() for text in texts]
    return dict(run_ranks(evaluated, 1, str(saved_runs), asked)[0])


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_what_is_loaded_and_exported_is_the_training_model(
    transformers: Any, exports: Path, saved_runs: Path, predicted: dict[Any, Any], name: str
) -> None:
    """By itself, in rows padded on either side, and by ``lightscale.load``; the tokenizer knows the mask."""
    run, model = lightscale.load(saved_runs / name), loaded(transformers, exports / name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exports / name, trust_remote_code=True)
    texts, logits = (TEXTS if "masked" in name else PLAIN_TEXTS), {}
    for number, text in enumerate(texts):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        assert ids[0].tolist() == run.ids(text).tolist()
        logits[text] = run.logits(text)
        assert error(run.embed(text), torch.from_numpy(predicted[name, "mean"][number])) < 1e-5
        output = model(ids).logits[0]
        if "masked" in name:
            values, found = predicted[name][number]
            at = ids[0] == MASK
            assert tokenizer.mask_token_id == MASK and at.sum() == text.count("[MASK]") == len(values)
            expected = torch.from_numpy(values)
            mine = logits[text][at].log_softmax(-1).gather(1, torch.from_numpy(found).long())
            assert error(mine, expected) < 1e-5
            assert output.shape[-1] == MASK + 1 and (output.softmax(-1)[:, MASK] == 0).all()
            output = output[:, :MASK]
        else:
            assert error(logits[text].log_softmax(-1), torch.from_numpy(predicted[name][number])) < 1e-5
        assert error(output, logits[text]) < 1e-5
    # In fp64: the sums of padded rows are cut otherwise, and two logits near zero have little of fp32 to spare.
    run, model = (
        lightscale.load(saved_runs / name, dtype=torch.float64),
        loaded(transformers, exports / name, torch.float64),
    )
    for side in ("left", "right"):
        batch = tokenizer(list(texts), return_tensors="pt", padding=True, padding_side=side)
        output = model(**batch).logits
        for row, text in enumerate(texts):
            own = output[row][batch["attention_mask"][row].bool()][:, :MASK] if "masked" in name else output[row]
            assert error(own, run.logits(text)) < 1e-10


def test_losses_are_those_of_training(transformers: Any, exports: Path, saved_runs: Path) -> None:
    """transformers' own loss over hidden tokens alone, in which the mask takes no probability; and that of classes."""
    run, model = lightscale.load(saved_runs / "masked"), loaded(transformers, exports / "masked")
    ids = run.ids(TEXTS[2])[None]
    labels = torch.where(ids == MASK, 7, -100)
    expected = torch.nn.functional.cross_entropy(run.logits(ids).transpose(1, 2), labels)
    assert model(ids, labels=labels).loss.item() == pytest.approx(expected.item(), rel=1e-5)
    run, model = lightscale.load(saved_runs / "classify"), loaded(transformers, exports / "classify")
    ids = run.ids("the other")[None]
    expected = -run.logits(ids).log_softmax(-1)[0, 2]
    assert model(ids, labels=torch.tensor([2])).loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert model.config.id2label == {0: "good", 1: "bad", 2: "other"}


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_saved_by_transformers_it_is_the_same(transformers: Any, exports: Path, tmp_path: Path, name: str) -> None:
    model = loaded(transformers, exports / name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exports / name, trust_remote_code=True)
    model.save_pretrained(tmp_path / name)
    tokenizer.save_pretrained(tmp_path / name)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / name, trust_remote_code=True)
    text = (TEXTS if "masked" in name else PLAIN_TEXTS)[0]
    ids = again(text, return_tensors="pt")["input_ids"]
    assert ids.equal(tokenizer(text, return_tensors="pt")["input_ids"])
    with torch.no_grad():
        assert loaded(transformers, tmp_path / name)(ids).logits.equal(model(ids).logits)
        # Without the run's own tokenizer files: tokenizer.json is read, of which the mask is no token of texts.
        read = lightscale.load(tmp_path / name)
        assert read.ids(text).tolist() == ids[0].tolist()
        assert error(read.logits(text), model(ids).logits[0][..., :MASK]) < 1e-6
    import_model(tmp_path / name, tmp_path / "back")
    config, own = load(tmp_path / "back" / "config.toml"), load(exports / name / "run.toml")
    assert run_shape(config, num_ids=264) == run_shape(own, num_ids=264)
    assert lightscale.load(tmp_path / "back").logits(text).equal(read.logits(text))


@pytest.mark.parametrize("name", NAMES)
def test_what_was_exported_comes_back_bit_by_bit(
    saved_runs: Path, exports: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["import", str(exports / name), "--run", str(tmp_path / "back")]) == 0
    assert f"or: lightscale predict {tmp_path / 'back'} --file" in capsys.readouterr().err
    before, after = (lightscale.load(path) for path in (saved_runs / name, tmp_path / "back"))
    weights = dict(after.module.named_parameters())
    assert weights and all(weight.equal(weights[own]) for own, weight in before.module.named_parameters())
    assert load(tmp_path / "back" / "config.toml") == load(saved_runs / name / "config.toml")
    kept = tmp_path / "back" / "classes.json"
    assert kept.exists() == (name == "classify")
    if name == "classify":
        assert json.loads(kept.read_text()) == ["good", "bad", "other"]


def test_a_notebook_fills_masks_and_names_classes(saved_runs: Path) -> None:
    model = lightscale.load(saved_runs / "masked")
    assert isinstance(model.module, MaskedModel)
    (first, second) = model.fill("the [MASK] of [MASK]", top=3)
    logits = model.logits("the [MASK] of [MASK]")[-1].softmax(-1)
    assert [one.id for one in second] == logits.topk(3).indices.tolist()
    assert [one.probability for one in second] == pytest.approx(logits.topk(3).values.tolist())
    assert len(first) == 3
    with pytest.raises(UserError, match=r"no mask in the text; write \[MASK\]"):
        model.fill("the text")
    classifier = lightscale.load(saved_runs / "classify")
    assert isinstance(classifier.module, Classifier)
    shares = classifier.classify("the text")
    assert {*shares} == {"good", "bad", "other"} and sum(shares.values()) == pytest.approx(1)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert {*lightscale.load(saved_runs / "classify_causal").classify("the text")} == {"0", "1"}
    for one in (model, classifier):
        for call in (one.generate, one.loss, one.stream):
            with pytest.raises(UserError, match="only models that predict the next token"):
                call("the")
    with pytest.raises(UserError, match="pooling = 'first': use mean or last"):
        model.embed("the", pooling="first")


def test_the_command_and_its_card(saved_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(saved_runs / "masked"), "--to", str(tmp_path / "to")]) == 0
    card = (tmp_path / "to" / "README.md").read_text()
    for part in ("pipeline_tag: fill-mask", "| task | masked: ", "AutoModelForMaskedLM", "mask_token_id"):
        assert part in card
    assert not (tmp_path / "to" / "generation_config.json").exists()
    assert main(["export", str(saved_runs / "classify"), "--to", str(tmp_path / "classify")]) == 0
    card = (tmp_path / "classify" / "README.md").read_text()
    assert "classify: 3 classes: good, bad, other" in card and "pipeline_tag: text-classification" in card
    assert main(["export", str(saved_runs / "masked"), "--to", str(tmp_path / "fla"), "--format", "fla"]) == 78
    assert "fla's language models predict only the next token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"architectures": ["LightscaleForCausalLM"]}, "a model of the next token, LightscaleForCausalLM, with layers"),
        ({"architectures": ["BertForMaskedLM"]}, "use one of LightscaleForCausalLM"),
        ({"lion": {}}, "lion describes nothing"),
        (
            {"lion": dict.fromkeys(("lion-s", "lion-retnet", "lion-lit"), VECTOR)},
            "only lion-s supports it, with input_gate",
        ),
        ({"vocab_size": 266}, "is of another model"),
    ],
)
def test_a_wrong_configuration_is_refused(exports: Path, tmp_path: Path, edits: dict[str, Any], message: str) -> None:
    shutil.copytree(exports / "masked", tmp_path / "to")
    path = tmp_path / "to" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | edits))
    with pytest.raises(UserError, match=message):
        lightscale.load(tmp_path / "to")


@pytest.mark.long
def test_what_filled_masks_is_fine_tuned_to_classify_by_the_trainer(
    transformers: Any, exports: Path, tmp_path: Path
) -> None:
    """Ten steps of each task; the new head alone is drawn."""
    pytest.importorskip("accelerate")
    ids = torch.tensor([259, *b"the other text, again and again"])
    masked = ids.clone()
    masked[5::6] = MASK
    rows = {
        "MaskedLM": [{"input_ids": masked, "labels": torch.where(masked == MASK, ids, -100)}],
        "SequenceClassification": [{"input_ids": ids, "labels": 1}, {"input_ids": ids.flip(0), "labels": 0}],
    }
    for kind, examples in rows.items():
        model = loaded(transformers, exports / "masked", kind=kind)
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=10, learning_rate=3e-3, report_to=[], use_cpu=True, logging_steps=1,
            save_strategy="no", per_device_train_batch_size=2, disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=settings, train_dataset=examples * 20)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(losses) == 10 and losses[-1] < losses[0] / 2, (kind, losses)
