"""The picture of README: its counts against the shapes themselves, and both themes."""

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest

from lightscale.config.files import load

ROOT = Path(__file__).resolve().parents[3]
LENGTH = 2**20


@pytest.fixture(scope="module")
def why() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_why", ROOT / "tools" / "figures" / "draw_why.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_keys_and_values_grow_and_states_do_not(why: ModuleType) -> None:
    model = load("tnl-1b").model
    head_dim = model.hidden_size // model.num_heads
    # A matrix per head, fp32.
    assert why.past_bytes("tnl-1b", LENGTH) == why.past_bytes("tnl-1b", 8192) == 4 * model.hidden_size * head_dim
    # As many keys as values, bf16.
    assert why.past_bytes("llama-1b", LENGTH) == 2 * 2 * load("llama-1b").model.hidden_size * LENGTH


def test_both_themes_are_drawn(why: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(why, "tokens_per_s", lambda name, length: 1e6 / math.log(length))
    why.main([str(tmp_path)])
    drawn = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    assert sorted(drawn) == ["why-dark.svg", "why-light.svg"]
    assert why._THEMES["dark"] in drawn["why-dark.svg"]
    assert why._THEMES["dark"] not in drawn["why-light.svg"]
    why.main([str(tmp_path)])
    assert {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()} == drawn, (
        "the same picture, the same file"
    )
