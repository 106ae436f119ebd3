"""The types of a configuration, the layouts they give, and the shipped runs."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from lightscale.config.fields import describe_fields
from lightscale.config.files import load, to_toml
from lightscale.config.layout import check_layout
from lightscale.config.model import ModelConfig
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.toml"))

TinyConfig = Callable[..., RunConfig]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_run_resolves_to_its_golden_file(path: Path) -> None:
    golden = ROOT / "tests/config/golden" / path.name
    assert to_toml(load(path)) == golden.read_text(encoding="utf-8"), "`make golden` writes it again"


def test_every_golden_file_has_its_run() -> None:
    assert [path.name for path in SHIPPED] == sorted(path.name for path in (ROOT / "tests/config/golden").iterdir())


@pytest.mark.parametrize(
    ("name", "non_embedding_millions"),
    [("70m", 21.2), ("160m", 87.3), ("410m", 327.7), ("1b", 918.6), ("3b", 2798.4), ("7b", 6509.6)],
)
def test_tnl_sizes_give_the_parameters_of_the_study(name: str, non_embedding_millions: float) -> None:
    """Scaling-law study, Table 7: 4 l d^2 + 2 l d t + 3 l d g, within 0.15 % or 0.06M."""
    config = load(ROOT / f"configs/tnl-{name}.toml")
    model = config.model
    l, d, t, g = model.num_layers, model.hidden_size, model.head_dim, model.intermediate_size  # noqa: E741
    millions = (4 * l * d * d + 2 * l * d * t + 3 * l * d * g) / 1e6
    assert abs(millions - non_embedding_millions) <= max(0.0015 * non_embedding_millions, 0.06)
    assert t == 128
    assert config.tokens_per_step == 3_932_160
    assert config.total_steps == 76_294  # 300e9 / 3,932,160 = 76,293.9
    assert (config.optimizer.lr, config.optimizer.weight_decay, model.vocab_size) == (3e-4, 0.1, 100_280)


def test_quickstart_has_about_three_million_parameters() -> None:
    model = load(ROOT / "configs/quickstart.toml").model
    per_layer = (
        4 * model.hidden_size**2
        + 2 * model.hidden_size * model.head_dim
        + 3 * model.hidden_size * model.intermediate_size
    )
    assert 2.8e6 < model.vocab_size * model.hidden_size + model.num_layers * per_layer < 3.2e6


def test_every_field_says_what_it_is() -> None:
    fields = describe_fields()
    assert [field.key for field in fields if not field.description] == []
    keys = {field.key for field in fields}
    for key in ("model.mixer", "data.validation.NAME.source", "train.profile_steps", "checkpoint.keep_every"):
        assert key in keys
    by_key = {field.key: field for field in fields}
    assert by_key["checkpoint.keep"].type == "a whole number >= 2 and <= 1_000_000"
    assert by_key["checkpoint.keep"].default == "2"
    assert by_key["model.hidden_size"].default == "(required)"
    assert by_key["parallel.data"].type == 'a whole number >= 1 and <= 1_000_000 or "none"'


def test_configurations_are_frozen(tiny_config: TinyConfig) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        tiny_config().model.hidden_size = 128  # type: ignore[misc]


@pytest.mark.parametrize(
    ("mixer", "layers"),
    [
        ("tnl", "tnl tnl tnl tnl"),
        ("tnl*2", "tnl tnl tnl tnl"),
        (["tnl*3", "llama"], "tnl tnl tnl llama"),
        (["tnl", "llama"], "tnl llama tnl llama"),
        (["tnl", "tnl*2", "hgrn2"], "tnl tnl tnl hgrn2"),
    ],
)
def test_mixer_patterns_give_a_mixer_per_layer(mixer: str | list[str], layers: str) -> None:
    model = ModelConfig(mixer=mixer, num_layers=4, hidden_size=64, num_heads=4, intermediate_size=128, vocab_size=512)
    assert model.layers == tuple(layers.split())
    assert model.head_dim == 16


def test_run_length_in_tokens_is_rounded_up_to_steps(tiny_config: TinyConfig) -> None:
    assert tiny_config("train.steps=7").total_steps == 7
    assert tiny_config("train.tokens=2560").total_steps == 10  # 4 x 64 tokens a step
    assert tiny_config("train.tokens=2561").total_steps == 11
    assert tiny_config("train.tokens=1e6").train.tokens == 1_000_000


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.num_heads=5"], ["model.hidden_size = 64", "model.num_heads = 5", "4 heads"]),
        (['model.mixer=["tnl*2", "llama"]'], ["model.num_layers = 4", "the 3 layers", "use 3"]),
        (["model.mixer=[]"], ["model.mixer = []"]),
        (["model.mixer=tnl*0"], ["model.mixer", '"tnl*0"', "NAME*COUNT"]),
        (["train.steps=none"], ["train.steps", "train.tokens", "neither"]),
        (["train.steps=1", "train.tokens=256"], ["train.steps", "train.tokens", "both"]),
        (["train.profile_steps=[3, 2]"], ["train.profile_steps = [3, 2]", "[2, 3]"]),
        (["train.profile_steps=[3, 9]"], ["train.profile_steps = [3, 9]", "4 steps"]),
        (["train.init_from=runs/a"], ["train.init_from", '"runs/a"', "RUN@STEP"]),
        (["train.validate_every=2"], ["train.validate_every = 2", "data.validation"]),
        (
            ["optimizer.schedule=cosine", "optimizer.warmup_steps=4"],
            ["optimizer.warmup_steps = 4", "4 steps"],
        ),
        (["optimizer.schedule=wsd"], ['optimizer.schedule = "wsd"', "optimizer.decay_steps"]),
        (["optimizer.decay_steps=2"], ["optimizer.decay_steps = 2", 'optimizer.schedule = "constant"']),
        (
            ["optimizer.schedule=wsd", "optimizer.warmup_steps=2", "optimizer.decay_steps=3"],
            ["optimizer.warmup_steps = 2", "optimizer.decay_steps = 3", "4 steps"],
        ),
        (["data.sources.a=1", "data.validation.v.source=a"], ["data.sources", "data.validation.v", "'a'"]),
        (['data.validation."a/b".source=a'], ["data.validation", "'a/b'"]),
        (["metrics.position_buckets=65"], ["metrics.position_buckets = 65", "data.sequence_length = 64"]),
    ],
)
def test_impossible_combination_is_refused(tiny_config: TinyConfig, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        tiny_config(*overrides)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("axes", "world_size", "data", "num_microbatches", "rank_sequence_tokens"),
    [
        ((1, 1, 1), 1, 1, 4, 64),
        ((1, 1, 1), 4, 4, 1, 64),
        ((2, 1, 1), 2, 1, 4, 64),
        ((1, 2, 1), 4, 2, 2, 64),
        ((1, 1, 4), 8, 2, 2, 16),
        ((2, 2, 2), 8, 1, 4, 32),
    ],
)
def test_data_axis_takes_the_rest_of_the_processes(
    tiny_config: TinyConfig,
    axes: tuple[int, int, int],
    world_size: int,
    data: int,
    num_microbatches: int,
    rank_sequence_tokens: int,
) -> None:
    names = ("tensor", "pipeline", "sequence")
    config = tiny_config(*(f"parallel.{name}={ranks}" for name, ranks in zip(names, axes, strict=True)))
    layout = check_layout(config, world_size)
    assert (layout.tensor, layout.pipeline, layout.sequence, layout.data) == (*axes, data)
    assert layout.world_size == world_size
    assert layout.num_microbatches == num_microbatches
    assert layout.rank_sequence_tokens == rank_sequence_tokens


@pytest.mark.parametrize(
    ("overrides", "world_size", "words", "cure", "cured_world_size"),
    [
        (["parallel.tensor=3"], 3, ["model.num_heads = 4", "parallel.tensor = 3"], "parallel.tensor=4", 4),
        (
            ["parallel.tensor=4", "model.mixer=llama", "model.mixer_options.llama.num_key_value_heads=2"],
            4,
            ["model.mixer_options.llama.num_key_value_heads = 2", "parallel.tensor = 4", "use parallel.tensor = 2"],
            "parallel.tensor=2",
            4,
        ),
        (
            ["parallel.tensor=4", "model.intermediate_size=130"],
            4,
            ["model.intermediate_size = 130", "parallel.tensor = 4", "model.intermediate_size = 128"],
            "model.intermediate_size=128",
            4,
        ),
        (
            # Of four sequences only those in the middle are cut unevenly: all ranks refuse it.
            [
                *("parallel.sequence=3", "data.sequence_length=63"),
                *("parallel.exchange=two_level", "parallel.ranks_per_node=4"),
            ],
            12,
            ["equal numbers of sequence ranks on all nodes; with 4 ranks per node", "[1, 2]", "gather"],
            "parallel.exchange=gather",
            12,
        ),
        (
            ["parallel.sequence=8", "model.mixer=llama", "parallel.attention=all_to_all"],
            8,
            ['parallel.attention = "all_to_all"', "model.num_heads = 4", "parallel.sequence = 8"],
            "parallel.attention=ring",
            8,
        ),
        (
            [
                *("parallel.sequence=3", "data.sequence_length=66", "parallel.attention=all_to_all"),
                *("model.mixer=llama-local", "model.num_heads=12", "model.hidden_size=48"),
                "model.mixer_options.llama-local.num_key_value_heads=2",
            ],
            3,
            ["model.mixer_options.llama-local.num_key_value_heads = 2", "parallel.sequence = 3", "neither divides"],
            "parallel.attention=ring",
            3,
        ),
        (
            ["parallel.pipeline=5"],
            5,
            ["model.num_layers = 4", "parallel.pipeline = 5", "use parallel.pipeline = 4"],
            "parallel.pipeline=4",
            4,
        ),
        (
            ["parallel.sequence=3"],
            3,
            ["data.sequence_length = 64", "parallel.sequence = 3", "data.sequence_length = 63"],
            "data.sequence_length=63",
            3,
        ),
        (
            ["parallel.sequence=2", "parallel.tensor=4", "data.sequence_length=62"],
            8,
            ["data.sequence_length = 62", "parallel.sequence = 2", "parallel.tensor = 4", "64 tokens"],
            "data.sequence_length=64",
            8,
        ),
        (
            ["train.micro_batch_size=3"],
            1,
            ["train.global_batch_size = 4", "train.micro_batch_size = 3", "3 sequences"],
            "train.global_batch_size=3",
            1,
        ),
        (
            [],
            3,
            ["train.global_batch_size = 4", "3 data ranks", "3 sequences"],
            "train.global_batch_size=3",
            3,
        ),
        (
            ["parallel.tensor=2"],
            3,
            ["3 processes", "parallel.tensor = 2", "4 processes"],
            "parallel.data=2",
            4,
        ),
        (
            ["parallel.tensor=2", "parallel.data=1"],
            4,
            ["4 processes", "parallel.tensor = 2", "parallel.data = 1", "2 processes", "parallel.data = 2"],
            "parallel.data=2",
            4,
        ),
    ],
)
def test_impossible_layout_is_refused_and_its_advice_works(
    tiny_config: TinyConfig,
    overrides: list[str],
    world_size: int,
    words: list[str],
    cure: str,
    cured_world_size: int,
) -> None:
    with pytest.raises(UserError) as caught:
        check_layout(tiny_config(*overrides), world_size)
    for word in words:
        assert word in str(caught.value)
    assert check_layout(tiny_config(*overrides, cure), cured_world_size).world_size == cured_world_size
