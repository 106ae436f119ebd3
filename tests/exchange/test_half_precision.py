"""Exports in bf16, as transformers computes them, beside the training model in bf16."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.evaluation.chosen_run import choose_run
from lightscale.evaluation.model import restore
from lightscale.exchange.export import export
from lightscale.parallel.mesh import start_mesh
from lightscale.training.build import build_engine
from lightscale.training.checkpoints.saving import Saver

runs = SimpleNamespace(**runpy.run_path(str(Path(__file__).parent / "conftest.py")))

pytestmark = pytest.mark.timeout(300)

NAMES = ("tnl", "hgrn2", "cosformer2", "lightnet", "llama", "hybrid", "decay", "printed", "pairs")
VOCAB_SIZE = 264
IDS = torch.randint(VOCAB_SIZE, (2, 90), generator=torch.Generator().manual_seed(0))


def training_logits(rank: int, world_size: int, init_method: str, folder: str) -> dict[str, dict[str, Tensor]]:
    """A run for each name, with its initial weights as a checkpoint; its logits in bf16 and in fp32."""
    tokenizer = runs.byte_tokenizer()
    common = {"data": {"tokens": 1152, "skips": [], "fingerprint": {"tokenizer": tokenizer.sha256}}}
    found: dict[str, dict[str, Tensor]] = {}
    positions = torch.arange(IDS.size(1)).expand(len(IDS), -1)
    with start_mesh(device="cpu", init_method=init_method, timeout_s=60) as mesh:
        for name in NAMES:
            run = runs.make_run(Path(folder), name, tokenizer)
            engine = build_engine(runs.load(run.config), mesh, vocab_size=tokenizer.vocab_size, trainable=False)
            saver = Saver(run.checkpoints, mesh)
            saver.save(engine, step=3, common=common, facts={"tokens": 1152}, contents=("weights",))
            for precision in ("bf16", "fp32"):
                model = restore(choose_run(run.path, overrides=[f"train.precision={precision}"]), mesh).model
                with torch.no_grad():
                    logits = model(IDS, positions)[..., :VOCAB_SIZE]
                found.setdefault(name, {})[precision] = logits.double()
    return found


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.long
def test_bf16_logits_are_those_of_training(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, transformers: Any
) -> None:
    (ours,) = run_ranks(training_logits, 1, str(tmp_path), timeout_s=200)
    for name in NAMES:
        export(choose_run(tmp_path / name), tmp_path / "exports" / name, dtype="bf16")
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exports" / name, trust_remote_code=True)
        with torch.no_grad():
            logits = model.eval()(IDS).logits
        assert logits.dtype == torch.bfloat16
        # Both round to 8 bits in the same places; sums in fp32 have other orders, so that a few round otherwise.
        assert error(logits.double(), ours[name]["bf16"]) < 6e-3, name
        of_training, exact = error(ours[name]["bf16"], ours[name]["fp32"]), ours[name]["fp32"]
        assert error(logits.double(), exact) < 1.05 * of_training < 1.4e-2, name
