"""``lightscale.load``: what a notebook gets."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lightscale
from lightscale import layers
from lightscale.errors import UserError

CODE = """
import json, resource, sys
import lightscale
used = resource.getrusage(resource.RUSAGE_SELF)
heavy = sorted({"torch", "megatron", "numpy", "pydantic"} & set(sys.modules))
cpu_s = used.ru_utime + used.ru_stime
model = lightscale.load(sys.argv[1])
text = model.generate("the", tokens=8, temperature=0)
import torch.distributed as dist
also = sorted({"megatron", "transformers", "lightscale.parallel.mesh"} & set(sys.modules))
print(json.dumps({"heavy": heavy, "cpu_s": cpu_s, "text": text, "group": dist.is_initialized(), "also": also}))
"""


@pytest.mark.timeout(300)
def test_importing_takes_no_time_and_loading_no_process_group(saved_runs: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(saved_runs / "tnl")], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert (found["heavy"], found["group"], found["also"]) == ([], False, [])
    assert found["cpu_s"] < 0.3
    assert found["text"] == lightscale.load(saved_runs / "tnl").generate("the", tokens=8, temperature=0)


def test_several_models_at_once(saved_runs: Path) -> None:
    first, second = (lightscale.load(saved_runs / name) for name in ("hybrid", "llama"))
    text = "the 1234 other"
    logits = first.logits(text)
    ids = first.ids(text)
    assert ids[0] == first.tokenizer.eot_id and logits.shape == (len(ids), 264)
    assert not torch.allclose(logits, second.logits(text))
    assert torch.equal(logits, first.logits(text))
    # Each row by itself, and from a list of ids. Products of other shapes may add in another order.
    torch.testing.assert_close(first.logits(ids.repeat(2, 1))[1], logits)
    assert torch.equal(first.logits(ids.tolist()), logits)
    expected = torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).item()
    assert first.loss(text) == pytest.approx(expected, rel=1e-6)
    assert first.loss(ids) == first.loss(text)


def test_a_long_text_passes_in_parts(saved_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lightscale.load(saved_runs / "hybrid")
    text = "the other 123 " * 20
    whole, generated = model.loss(text), model.generate(text, tokens=6, temperature=0)
    monkeypatch.setattr("lightscale.exchange.library.PREFILL_TOKENS", 32)
    assert model.loss(text) == pytest.approx(whole, rel=1e-5)
    assert model.generate(text, tokens=6, temperature=0) == generated
    assert "".join(model.stream(text, tokens=6, temperature=0)) == generated


def test_stop_strings_and_repetition(saved_runs: Path) -> None:
    model = lightscale.load(saved_runs / "hgrn2")
    how: dict[str, Any] = {"tokens": 16, "temperature": 1.0, "seed": 1}
    text = model.generate("the", **how)
    stop = text[4:6]
    assert stop
    for given in (stop, [stop, "nowhere to be found"]):
        assert model.generate("the", stop=given, **how) == text[: text.index(stop)]
    greedy = {**how, "temperature": 0}
    assert model.generate("the", repetition_penalty=1e9, **greedy) != model.generate("the", **greedy)
    with pytest.raises(UserError, match="stop = ''"):
        model.generate("the", stop=["a", ""])


def test_a_loaded_model_can_be_trained(saved_runs: Path) -> None:
    model = lightscale.load(saved_runs / "hgrn2")
    before = model.loss("the other")
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    ids = model.ids("the other")
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model.logits(ids)[:-1], ids[1:]).backward()
        optimizer.step()
    assert model.loss("the other") < before


def test_half_precision_keeps_bounds_wide(saved_runs: Path) -> None:
    model = lightscale.load(saved_runs / "hybrid", dtype=torch.bfloat16)
    kinds = {name: weight.dtype for name, weight in model.module.named_parameters()}
    wide = {name for name, dtype in kinds.items() if dtype == torch.float32}
    assert {name.rpartition(".")[2] for name in wide} == {"theta", "decay_logit", "table"}
    exact = lightscale.load(saved_runs / "hybrid", dtype=torch.float64).logits("the other")
    # Weights that are random and large magnify the rounding.
    assert (model.logits("the other").double() - exact).norm() < 0.05 * exact.norm()


def test_a_layer_by_itself() -> None:
    mixer = layers.HGRN2Mixer(hidden_size=32, num_heads=4)
    x = torch.randn(2, 21, 32)
    whole, _ = mixer(x)
    first, state = mixer(x[:, :13])
    second, _ = mixer(x[:, 13:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    with pytest.raises(ValueError, match="not divisible by num_heads = 5"):
        layers.TNLMixer(hidden_size=32, num_heads=5)


def test_documents_are_no_longer_than_learned_positions(saved_runs: Path) -> None:
    model = lightscale.load(saved_runs / "printed")
    assert model.logits([1] * 400).shape == (400, 264)
    for call in (lambda: model.logits([1] * 401), lambda: model.generate("the", tokens=400)):
        with pytest.raises(UserError, match=r"40[12] tokens, but .*step-00000003.* has 400 learned positions"):
            call()
    with pytest.raises(ValueError, match="401 tokens, but the model has 400 learned positions"):
        model.module(torch.ones(1, 401, dtype=torch.int64))


def test_a_damaged_checkpoint_is_refused(own_run: Callable[[str], Path]) -> None:
    run = own_run("tnl")
    file = next(run.glob("checkpoints/*/rank-00000.safetensors"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"no intact checkpoint:\n.*rank-00000"):
        lightscale.load(run)


def test_what_is_not_there_is_named(saved_runs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run"):
        lightscale.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="has no checkpoint of step 9; it has: 3"):
        lightscale.load(f"{saved_runs / 'tnl'}@9")
    with pytest.raises(UserError, match="device = 'tpu'"):
        lightscale.load(saved_runs / "tnl", device="tpu")
    model = lightscale.load(saved_runs / "tnl")
    with pytest.raises(UserError, match="from 0 to 263"):
        model.logits([1, 264])
    with pytest.raises(UserError, match="no token to score"):
        model.loss("")
    with pytest.raises(UserError, match="tokens = 0"):
        model.generate("the", tokens=0)
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        lightscale.laod  # noqa: B018
