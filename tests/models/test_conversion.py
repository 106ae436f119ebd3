"""Which weights a model keeps of one with other mixers, from their shapes alone."""

from collections import Counter
from typing import Any

import pytest

from lightscale.config.mixers import MIXERS
from lightscale.config.model import ModelConfig
from lightscale.errors import UserError
from lightscale.models.conversion import Conversion, conversion, other_settings
from lightscale.models.registry import mixer_spec
from lightscale.models.specs.interface import MixerSpec
from lightscale.models.specs.llama import LLaMASpec


def shape(mixer: str | list[str], **fields: Any) -> ModelConfig:
    of_all = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "vocab_size": 128}
    return ModelConfig(mixer=mixer, **{**of_all, **fields})


def converted(source: ModelConfig, target: ModelConfig) -> Conversion:
    found = conversion(source, target)
    assert found is not None
    return found


GROUPED = shape("llama", mixer_options={"llama": {"num_key_value_heads": 2, "head_dim": 6, "attention_bias": "all"}})


@pytest.mark.parametrize("model", [*map(shape, MIXERS), GROUPED], ids=[*MIXERS, "grouped"])
def test_each_row_of_a_mixer_has_one_role(model: ModelConfig) -> None:
    mixer = model.layers[0]
    for layer in (0, 1):
        rows: Counter[tuple[str, int]] = Counter()
        shapes = mixer_spec(mixer).parameter_shapes(model, layer)
        for one in mixer_spec(mixer).roles(model, layer).values():
            for first, last in one.ranges or ((0, shapes[one.parameter][0]),):
                rows.update((one.parameter, row) for row in range(first, last))
        assert rows == Counter((name, row) for name, sizes in shapes.items() for row in range(sizes[0]))


LINES = """\
from llama to hgrn2, tnl, llama:
  embedding.word_embeddings.weight: kept
  lower_bounds.table: drawn, missing in the source
  decoder.layers.0,2.self_attention.fv_proj.weight (forget): drawn, missing in the source
  decoder.layers.0,2.self_attention.fv_proj.weight (v): from decoder.layers.0,2.self_attention.kv_proj.weight
  decoder.layers.0-2.self_attention.q_proj.weight (q): kept
  decoder.layers.0-2.self_attention.out_proj.weight (o): kept
  decoder.layers.0-3.mlp.linear_fc1.weight: kept
  decoder.layers.0-3.mlp.linear_fc2.weight: kept
  decoder.layers.1.self_attention.kv_proj.weight (k): kept
  decoder.layers.1.self_attention.kv_proj.weight (v): kept
  decoder.layers.1.self_attention.gate_down.weight (gate_down): drawn, missing in the source
  decoder.layers.1.self_attention.gate_up.weight (gate_up): drawn, missing in the source
  decoder.layers.3.self_attention.kv_proj.weight: kept
  decoder.layers.3.self_attention.q_proj.weight: kept
  decoder.layers.3.self_attention.out_proj.weight: kept
  decoder.layers.0,2.self_attention.kv_proj.weight (k): not used
  decoder.layers.0-3.input_layernorm.weight: not used
  decoder.layers.0-3.pre_mlp_layernorm.weight: not used
  decoder.final_layernorm.weight: not used
  model.norm = "srmsnorm" here and "rmsnorm" there: kept weights compute something else
"""


def test_the_table_of_a_softmax_model_that_becomes_linear() -> None:
    source = shape("llama", norm="rmsnorm", glu_activation="silu")
    found = converted(source, shape(["hgrn2", "tnl", "hgrn2", "llama"], glu_activation="silu"))
    assert found.lines() == LINES.splitlines()
    rows = {(row.get("parameter") or row["unused"], row.get("role")): row for row in found.table()}
    attention = "decoder.layers.0,2.self_attention"
    assert rows[f"{attention}.fv_proj.weight", "v"]["from"] == f"{attention}.kv_proj.weight"
    assert rows[f"{attention}.fv_proj.weight", "forget"]["drawn"] == "missing in the source"


def test_what_has_no_role_stays_with_mixers_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLaMASpec, "roles", MixerSpec.roles)
    found = converted(shape("llama"), shape(["tnl", "llama"]))
    for one in found.beginnings:
        is_kept = ".self_attention." not in one.weight.parameter or one.weight.parameter.split(".")[2] in "13"
        assert (one.source is not None) == is_kept, one


def test_weights_of_another_shape_are_drawn() -> None:
    found = converted(shape("tnl", mixer_options={"tnl": {"gate_rank": 4}}), shape("lightnet"))
    drawn = {row["parameter"]: row["drawn"] for row in found.table() if "drawn" in row and "role" in row}
    assert drawn == {
        "decoder.layers.0-3.self_attention.gate_down.weight": "(4, 32) there and (8, 32) here",
        "decoder.layers.0-3.self_attention.gate_up.weight": "(32, 4) there and (32, 8) here",
    }


def test_keys_of_fewer_heads_are_drawn() -> None:
    grouped = shape("llama", mixer_options={"llama": {"num_key_value_heads": 2}})
    found = converted(grouped, shape("tnl"))
    drawn = {
        row["role"]: row["drawn"] for row in found.table() if "drawn" in row and row.get("role") in ("q", "k", "v", "o")
    }
    assert drawn == dict.fromkeys("kv", "(16, 32) there and (32, 32) here")


def test_settings_that_are_no_weights_are_said() -> None:
    there = shape("llama", norm_eps=1e-5, mixer_options={"llama": {"rope_theta": 5e5}})
    assert other_settings(there, shape("llama")) == [
        "model.norm_eps = 1e-06 here and 1e-05 there: kept weights compute something else",
        "model.mixer_options.llama.rope_theta = 10000.0 here and 500000.0 there: kept weights compute something else",
    ]
    assert other_settings(there, there) == []
    # Only drawn weights differ by it.
    options = [{"vector_decay": True, "initial_decay": decay} for decay in (0.5, "s4d-real")]
    assert other_settings(*(shape("lion-s", mixer_options={"lion-s": one}) for one in options)) == []
    (line,) = other_settings(shape("tnl"), shape("tnl", grid={"shape": [4, 4]}))
    assert line.startswith('model.grid = {shape = [4, 4], leading_tokens = 1} here and "none" there: kept weights')


def test_other_inputs_are_refused_and_other_patches_are_said() -> None:
    def images(**patches: Any) -> ModelConfig:
        table = {"head": {"num_labels": 3}, "grid": {"shape": [2, 2]}, "patches": {"size": [2, 2], **patches}}
        return shape("lion-lit", vocab_size=0, **table)

    (line,) = other_settings(images(), images(mean=[0.4]))
    assert line.startswith("model.patches = ") and line.endswith("kept weights compute something else")
    texts = shape("lion-lit", head={"num_labels": 3})
    for source, target, message in (
        (texts, images(), "reads ids and that of this run patches of images .* use a run of patches of images"),
        (images(), texts, "reads patches of images and that of this run ids .* use a run of ids"),
    ):
        with pytest.raises(UserError, match=message):
            conversion(source, target)


def test_the_same_mixers_are_no_conversion() -> None:
    assert conversion(shape("tnl"), shape(["tnl", "tnl"], norm_eps=1e-3)) is None
    assert conversion(shape("tnl"), shape("tnl", num_heads=8)) is not None


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_size", 64), ("num_layers", 2), ("intermediate_size", 64), ("vocab_size", 256)]
)
def test_sizes_that_cannot_fit_are_refused(key: str, value: int) -> None:
    with pytest.raises(UserError, match=rf"model\.{key} is {value} .* use model\.{key}={value}( or more)?$"):
        conversion(shape("llama", **{key: value}), shape("tnl"))


def test_more_ids_keep_those_that_were_there() -> None:
    found = converted(shape("tnl"), shape("tnl", vocab_size=130, tie_word_embeddings=False))
    assert found.lines()[:5] == [
        "from tnl to tnl:",
        "  embedding.word_embeddings.weight (ids 0 to 127): kept",
        "  embedding.word_embeddings.weight (ids 128 to 129): drawn, missing in the source",
        "  output_layer.weight (ids 0 to 127): drawn, missing in the source",
        "  output_layer.weight (ids 128 to 129): drawn, missing in the source",
    ]
    (move,) = found.moves["embedding.word_embeddings.weight"]
    assert (move.first, move.last, move.to, move.shape) == (0, 128, 0, (130, 32))
    assert found.unused == ()


def test_the_same_mixers_of_other_shapes_are_refused() -> None:
    """Before a run's directory exists; the checkpoint's own shapes would refuse them once ranks have started."""
    images = {"head": {"num_labels": 3}, "grid": {"shape": [2, 2]}}
    gray, color = (
        shape("lion-lit", vocab_size=0, **images, patches={"size": [2, 2], "channels": channels}) for channels in (1, 3)
    )
    with pytest.raises(
        UserError, match=r"\(32, 4\) there and \(32, 12\) here: model\.patches = .*channels = 3.* there$"
    ):
        conversion(gray, color)
    with pytest.raises(UserError, match=r"gate_down\.weight is .*: model\.mixer_options\.tnl\.gate_rank = 4 here"):
        conversion(shape("tnl"), shape("tnl", mixer_options={"tnl": {"gate_rank": 4}}))
    with pytest.raises(UserError, match=r"output_layer\.weight is missing there and \(128, 32\) here$"):
        conversion(shape("tnl"), shape("tnl", tie_word_embeddings=False))


def test_what_more_ids_alone_would_lose_is_refused() -> None:
    untied = shape("llama", tie_word_embeddings=False)
    with pytest.raises(UserError, match=r"separate output layer .* use model\.tie_word_embeddings=false"):
        conversion(untied, shape("llama", vocab_size=192))
    with pytest.raises(UserError, match=r"self_attention\.kv_proj\.weight is \(\d+, 32\) there and \(\d+, 32\) here"):
        conversion(GROUPED, shape("llama", vocab_size=192))
