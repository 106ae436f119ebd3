"""µP's factors of every parameter beside the tables of the papers, and what is refused."""

import math
from typing import Any

import pytest

from lightscale.config.mixers import known_mixers
from lightscale.config.model import ModelConfig
from lightscale.errors import UserError
from lightscale.models.accounting import parameter_shapes
from lightscale.models.mup import MuPScale, at_width, mup_scales

SIZE = {"num_layers": 2, "hidden_size": 64, "num_heads": 8, "intermediate_size": 96, "vocab_size": 160}


def model(**keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({**SIZE, **keys})


def scale(**keys: Any) -> dict[str, MuPScale]:
    return mup_scales(model(**keys))


def figures(found: MuPScale) -> tuple[float, float, float]:
    return found.std, found.lr, found.eps


def test_width_is_that_of_table_8() -> None:
    """arXiv 2203.03466: a width m times the base; an output weight with its multiplier 1 / m inside."""
    m = 4
    found = scale(mixer="tnl", mup={"base_hidden_size": 64 // m}, tie_word_embeddings=False, norm="rmsnorm")
    block = "decoder.layers.1"
    hidden = pytest.approx((m**-0.5, 1 / m, 1 / m))
    of = {name: figures(one) for name, one in found.items()}
    assert of["embedding.word_embeddings.weight"] == (1, 1, 1 / m)
    assert of["output_layer.weight"] == (1 / m, 1 / m, 1)
    for name in ("kv_proj", "q_proj", "out_proj"):
        assert of[f"{block}.self_attention.{name}.weight"] == hidden
    assert of[f"{block}.mlp.linear_fc1.weight"] == of[f"{block}.mlp.linear_fc2.weight"] == hidden
    # The gate's inner width is a head's, at all widths.
    assert of[f"{block}.self_attention.gate_down.weight"] == (1 / m, 1 / m, 1 / m)
    assert of[f"{block}.self_attention.gate_up.weight"] == (1, 1, 1 / m)
    assert of["decoder.final_layernorm.weight"] == of[f"{block}.input_layernorm.weight"] == (1, 1, 1 / m)
    assert found.keys() == parameter_shapes(model(mixer="tnl", tie_word_embeddings=False, norm="rmsnorm")).keys()


def test_a_tied_embedding_is_the_output_layer() -> None:
    tied = model(mup={"base_hidden_size": 16}, embedding_multiplier=3.0)
    assert tied.input_multiplier == 12, "the factor undoes the embedding's smaller weights at the input"
    assert figures(mup_scales(tied)["embedding.word_embeddings.weight"]) == (1 / 4, 1 / 4, 1)
    assert model(mup={"base_hidden_size": 16}, tie_word_embeddings=False).input_multiplier == 1
    assert model(mup={"base_hidden_size": 16}, head={"num_labels": 3}).input_multiplier == 1


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_depth_is_that_of_complete_p(alpha: float) -> None:
    """arXiv 2505.01618, table 1: what a block adds times l^-α, rates of its weights times l^(α - 1).

    The multiplier l^-α of an output projection stands in its weight: deviation and rate have it, eps is free of it.
    """
    ratio, keys = 3, {"mixer": "causal-rn", "num_layers": 6}
    mup = {"base_hidden_size": 64, "base_num_layers": 2, "depth_exponent": alpha}
    found, deep = scale(**keys, mup=mup), model(**keys, mup=mup)
    block = "decoder.layers.5"
    added, steps = ratio**-alpha, ratio ** (alpha - 1)
    inside = pytest.approx((1, steps, added))
    for name in ("self_attention.a_proj.weight", "self_attention.a_proj.bias", "mlp.linear_fc1.weight"):
        assert figures(found[f"{block}.{name}"]) == inside, name
    for name in ("self_attention.out_proj.weight", "self_attention.out_proj.bias", "mlp.linear_fc2.weight"):
        assert figures(found[f"{block}.{name}"]) == pytest.approx((added, added * steps, 1)), name
    assert figures(found["embedding.word_embeddings.weight"]) == (1, 1, 1)
    # Of the base's depth: the sum of blocks is kept small by the factor above.
    assert deep.output_std == pytest.approx(deep.init_std / math.sqrt(2 * 2))


@pytest.mark.parametrize("mixer", known_mixers())
def test_the_base_model_has_no_factors(mixer: str) -> None:
    base = {"base_hidden_size": 64, "base_num_layers": 2}
    for one in scale(mixer=mixer, mup=base).values():
        assert one == MuPScale(growth=one.growth)
        assert one.growth == (1, 1)
    same = model(mixer=mixer, mup=base)
    assert (same.output_std, same.input_multiplier) == (model(mixer=mixer).output_std, 1)


@pytest.mark.parametrize("mixer", known_mixers())
def test_every_matrix_of_blocks_moves_what_it_maps_by_as_much_at_all_widths(mixer: str) -> None:
    """The spectral condition (arXiv 2310.17813): weights and steps have norms of about sqrt(rows / columns)."""
    wide, base = (model(mixer=mixer, hidden_size=d, num_heads=d // 8, intermediate_size=d) for d in (512, 64))
    found = mup_scales(wide.model_copy(update={"mup": model(mup={"base_hidden_size": 64}).mup}))
    shapes, small = parameter_shapes(wide), parameter_shapes(base)
    seen = 0
    for name, one in found.items():
        if one.growth == (1, 1):
            continue
        seen += 1
        (rows, columns), (few_rows, few_columns) = shapes[name], small[name]
        wanted = math.sqrt(rows / columns) / math.sqrt(few_rows / few_columns)
        # Of drawn elements, sqrt(rows) + sqrt(columns); of steps, whose elements are alike, sqrt(rows columns).
        drawn = (math.sqrt(rows) + math.sqrt(columns)) / (math.sqrt(few_rows) + math.sqrt(few_columns))
        stepped = math.sqrt(rows * columns / (few_rows * few_columns))
        assert 0.5 < one.std * drawn / wanted < 2, name
        assert one.lr * stepped == pytest.approx(wanted), name
        # And of an orthogonal matrix times 0.2 sqrt(max(rows, columns)), which is Muon's.
        own = math.sqrt(max(rows, columns) / max(few_rows, few_columns))
        lr = one.matrix_lr(rows, columns, lambda r, c: 0.2 * math.sqrt(max(r, c)))
        assert lr * own == pytest.approx(wanted), name
    assert seen >= 2 * 5


def test_heads_are_as_wide_at_all_widths() -> None:
    options = {"llama": {"num_key_value_heads": 2, "head_dim": 10}}
    wide = at_width(model(mixer="llama", mixer_options=options), 128)
    assert (wide.num_heads, wide.head_dim, wide.intermediate_size) == (16, 8, 192)
    assert wide.mixer_options["llama"].model_dump()["num_key_value_heads"] == 4


def test_what_undoes_the_factor_of_depth_is_refused() -> None:
    mup = {"base_hidden_size": 64, "base_num_layers": 1}
    with pytest.raises(ValueError, match=r'base_num_layers = 1 with model.norm_placement = "post".*use'):
        model(mup=mup, norm_placement="post")
    bare = model(mixer="tnl", mixer_options={"tnl": {"output_projection": False}}, mup=mup)
    with pytest.raises(UserError, match=r"model.mixer = tnl.*without an output projection.*use base_num_layers"):
        mup_scales(bare)
