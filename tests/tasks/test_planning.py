"""What plans and MFU count of each task, against formulas."""

from pathlib import Path
from typing import Any

import pytest

from lightscale.config.files import load
from lightscale.config.layout import check_layout
from lightscale.config.schema import RunConfig
from lightscale.models.flops import forward_flops_per_token
from lightscale.planning.hardware import H100
from lightscale.planning.plan import plan
from lightscale.planning.step_cost import CostModel

ROOT = Path(__file__).parents[2]
BOTH_WAYS = "model.mixer_options.llama.causal=false"


def config(*overrides: str) -> RunConfig:
    return load(ROOT / "configs" / "llama-1b.toml", overrides)


CAUSAL = config()
MASKED = config("task.name=masked", BOTH_WAYS)
CLASSIFY = config("task.name=classify", BOTH_WAYS, "model.head.num_labels=7")


def test_attention_to_all_tokens_takes_twice_the_operations() -> None:
    """Two products with n tokens, of width d each, where causal attention sees half of them on average."""
    model, n = CAUSAL.model, 8192
    more = forward_flops_per_token(MASKED.model, n) - forward_flops_per_token(CAUSAL.model, n)
    assert more == model.num_layers * 2 * model.hidden_size * n
    head = forward_flops_per_token(MASKED.model, n) - forward_flops_per_token(CLASSIFY.model, n)
    assert head == pytest.approx(2 * model.hidden_size * (model.vocab_size - 7 / n), rel=1e-12)


def test_a_label_head_takes_the_place_of_the_vocabularys() -> None:
    tokens, labels = plan(MASKED), plan(CLASSIFY)
    assert labels.parameters.terms["label head"] == 7 * CAUSAL.model.hidden_size
    assert labels.parameters.embedding == CAUSAL.model.vocab_size * CAUSAL.model.hidden_size
    assert labels.parameters.rest - tokens.parameters.rest == 7 * CAUSAL.model.hidden_size
    assert labels.memory.logits_bytes < tokens.memory.logits_bytes
    assert plan(CAUSAL).study_flops is not None
    assert tokens.study_flops is None, "the study has causal models alone"


def test_ranks_that_all_see_all_tokens_wait_for_none() -> None:
    """On eight sequence ranks causal attention takes as long as on the last, 15 / 16 of attention to all tokens."""

    def operators_s(run: Any, ranks: int) -> float:
        layout = check_layout(
            run.model_copy(update={"parallel": run.parallel.model_copy(update={"sequence": ranks})}), 8
        )
        return CostModel(run, run.data.sequence_length, H100).predict(layout).work.operators_s

    assert operators_s(CAUSAL, 8) / operators_s(MASKED, 8) == pytest.approx(15 / 16, rel=1e-9)
    assert operators_s(CAUSAL, 1) / operators_s(MASKED, 1) == pytest.approx(1 / 2, rel=1e-9)
