"""The plan of a run that trains adapters, by hand."""

from math import prod

import pytest

from lightscale.config.files import load
from lightscale.models.accounting import parameter_shapes
from lightscale.models.flops import forward_flops_per_token, training_flops_per_token
from lightscale.planning.plan import plan

BASE = ["llama-tiny", "train.precision=bf16"]
OPTIONS = ["train.init_from=runs/base@1", "adapter.r=4"]


def planned(*options: str):  # type: ignore[no-untyped-def]
    config = load(BASE[0], [*BASE[1:], *options])
    return config, plan(config)


@pytest.mark.parametrize(("kind", "bytes_per_number"), [("adamw", 4 + 8), ("lion", 4 + 4)])
def test_frozen_weights_have_neither_gradients_nor_fp32_copies(kind: str, bytes_per_number: int) -> None:
    targets = 'adapter.target_modules=["*.q", "*.mlp.down"]'
    config, of_adapters = planned(*OPTIONS, "adapter.name=lora", targets, f"optimizer.name={kind}")
    _, whole = planned(f"optimizer.name={kind}")
    model = config.model
    d, inner, layers = model.hidden_size, model.intermediate_size, model.num_layers
    trained, frozen = layers * 4 * (d + d + inner + d), sum(map(prod, parameter_shapes(model).values()))
    memory = of_adapters.memory
    assert (memory.parameters, memory.trained) == (frozen + trained, trained)
    assert memory.weights_bytes == 2 * (frozen + trained)
    assert memory.gradients_bytes == 4 * trained
    assert memory.optimizer_bytes == bytes_per_number * trained
    assert whole.memory.optimizer_bytes == bytes_per_number * frozen
    # What A gives of each token; and no gradient of the output layer.
    tokens = config.train.micro_batch_size * config.data.sequence_length
    assert memory.activations_bytes - whole.memory.activations_bytes == 2 * layers * 2 * 4 * tokens
    assert memory.logits_bytes < whole.memory.logits_bytes


def test_a_reference_is_a_copy_of_the_weights_and_a_forward_pass() -> None:
    task = ["task.name=preference", "data.packing=whole", OPTIONS[0]]
    _, plain = planned("task.name=sft", "data.packing=whole")
    config, compared = planned(*task)
    assert compared.memory.teacher_bytes == plain.memory.weights_bytes
    forward = forward_flops_per_token(config.model, config.data.sequence_length)
    assert compared.mfu_flops - plain.mfu_flops == pytest.approx(forward * config.tokens_per_step)
    _, alone = planned(*task, "task.loss=simpo")
    _, adapted = planned(*task, "adapter.name=lora", OPTIONS[1])
    assert alone.memory.teacher_bytes == adapted.memory.teacher_bytes == 0
    assert alone.mfu_flops == plain.mfu_flops


def test_products_of_frozen_gradients_are_no_operations() -> None:
    config, _ = planned(*OPTIONS, "adapter.name=dora")
    model, length = config.model, config.data.sequence_length
    d, inner = model.hidden_size, model.intermediate_size
    frozen = model.num_layers * 2 * (4 * d * d + 3 * d * inner) + 2 * d * model.vocab_size
    added = model.num_layers * 2 * 4 * (4 * 2 * d + 3 * (d + inner))
    found = training_flops_per_token(model, length, adapter=config.adapters)
    assert found == 3 * forward_flops_per_token(model, length) - frozen + 3 * added
