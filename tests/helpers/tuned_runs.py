"""What tests of fine-tuned runs share: a template, a configuration, interrupted copies. Loaded by path (runpy)."""

import shutil
from collections.abc import Iterable
from typing import Any

import pytest

from lightscale.runs.run_directory import RunDirectory
from lightscale.training.checkpoints.directories import directory_name

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}={% generation %}{{ m.content }}.{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
"""An answer begins behind "=", and all of it counts."""
MODEL = """\
[model]
mixer = {mixer}
vocab_size = 128
num_layers = 2
hidden_size = 32
num_heads = 2
intermediate_size = 48
"""


def interrupted(run: str, names: Iterable[str], *, step: int) -> list[RunDirectory]:
    """Copies of a finished run, as it was before its last checkpoint, of ``step``."""
    copies = [RunDirectory(f"runs/{name}") for name in names]
    for copy in copies:
        shutil.copytree(run, copy.path)
        shutil.rmtree(copy.checkpoints / directory_name(step))
        copy.status.unlink()
    return copies


def check_losses(found: list[dict[str, Any]], expected: list[dict[str, Any]], *, first: int, rel: float) -> None:
    """Those of the steps behind ``first``, on other ranks."""
    assert len(found) == len(expected) > first
    for one, other in zip(found[first:], expected[first:], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=rel)
