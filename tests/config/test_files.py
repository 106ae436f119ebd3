"""Configuration files and overrides: what wins, what is refused with which words, and the resolved form."""

import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightscale.config.fields import describe_fields, toml_value
from lightscale.config.files import difference, load, to_toml
from lightscale.config.layout import check_mixers
from lightscale.config.mixers import MIXERS, reading
from lightscale.config.optimizers import OPTIMIZERS
from lightscale.config.schema import ParallelConfig, RunConfig
from lightscale.errors import UserError
from lightscale.models.specs.options import HGRN2Options, LightNetOptions, LLaMAOptions, TNLOptions

TinyConfig = Callable[..., RunConfig]


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.hiden_size=64", "unknown key model.hiden_size; did you mean model.hidden_size?"),
        ("modle.hidden_size=64", "unknown key modle; did you mean model?"),
        (
            "zebra.hidden_size=64",
            "the sections are model, task, data, parallel, optimizer, train, adapter, checkpoint, evaluation, guard, "
            "restart, metrics",
        ),
        ("optimizer.steps=1", "unknown key optimizer.steps; did you mean train.steps?"),
        ("train.warmup=1", "unknown key train.warmup; did you mean optimizer.warmup_steps?"),
        ("train.lr=1", "unknown key train.lr; did you mean optimizer.lr?"),
        ("parallel.zzz=1", "[parallel] has tensor, pipeline, sequence, data"),
        ("data.validation.v.sorce=a", "did you mean data.validation.v.source?"),
        ("model.hidden_size=abc", 'model.hidden_size = "abc": must be a whole number >= 1'),
        ("model.hidden_size=64.5", "model.hidden_size = 64.5: must be a whole number >= 1"),
        ("model.hidden_size=true", "model.hidden_size = true: must be a whole number >= 1"),
        ('model.hidden_size="64"', 'model.hidden_size = "64": must be a whole number >= 1'),
        ("model.mixer=3", "model.mixer = 3: must be text or a list of text"),
        ("model.norm=batchnorm", 'model.norm = "batchnorm": must be "srmsnorm" or "rmsnorm" or "layernorm"'),
        ("optimizer.lr=-1", "optimizer.lr = -1: must be a number > 0"),
        ("optimizer.lr=nan", "optimizer.lr = nan: must be a number > 0"),
        (
            "optimizer.betas=[0.9, 1.0]",
            "optimizer.betas = [0.9, 1.0]: must be a list of 2, each a number >= 0 and < 1",
        ),
        ("optimizer.betas=[0.9]", "optimizer.betas = [0.9]: must be a list of 2"),
        ("optimizer.name=loin", 'optimizer.name = "loin": unknown optimizer loin; did you mean lion?'),
        ("optimizer.alpha=1", 'unknown key optimizer.alpha; it needs optimizer.name = "ademamix"'),
        ("optimizer.groups.a.lr=1", "unknown key optimizer.groups.a.lr; did you mean optimizer.lr?"),
        ("checkpoint.keep=1", "checkpoint.keep = 1: must be a whole number >= 2"),
        ("checkpoint.asynchronous=yes", 'checkpoint.asynchronous = "yes": must be true or false'),
        ("metrics.tensorboard=true", "unknown key metrics.tensorboard; use its new name, metrics.sinks"),
        ('metrics.sinks=["jsonl", "tensorbord"]', "unknown sink tensorbord; did you mean tensorboard?"),
        ('metrics.sinks=["tensorboard"]', "must contain jsonl"),
        ('metrics.sinks=["jsonl", "jsonl"]', "names jsonl twice"),
        ("metrics.wandb.mode=later", 'metrics.wandb.mode = "later": must be "online" or "offline"'),
        ("data.sources.a=0", "data.sources.a = 0: must be a number > 0"),
        ("data.validation.v=3", "data.validation.v = 3: must be a table"),
        ("train.profile_steps=5", "train.profile_steps = 5: must be a list of 2"),
        ("train.tokens=1.5", "train.tokens = 1.5: must be a whole number >= 1"),
        (
            "model.mixer=tnt",
            'model.mixer = "tnt": unknown mixer tnt; did you mean tnl or lightnet or delta-net? '
            "known: bi-rn, causal-rn, cosformer2, decay-attention, delta-net, gated-delta-net, hgrn2, kimi-delta, "
            "lightnet, lion-lit, lion-retnet, lion-s, llama, llama-local, tnl",
        ),
        (
            "model.mixer_options.tnl.gate_rank=0",
            'model.mixer_options.tnl.gate_rank = 0: must be a whole number >= 1 and <= 1_048_576 or "none"',
        ),
        (
            "model.mixer_options.tnl.gate_rnk=8",
            "unknown key model.mixer_options.tnl.gate_rnk; did you mean model.mixer_options.tnl.gate_rank?",
        ),
        (
            "model.mixer_options.tnl.zebra=8",
            "unknown key model.mixer_options.tnl.zebra; the mixer tnl has the options gate_rank",
        ),
        (
            "model.mixer_options.tln.gate_rank=8",
            "model.mixer_options.tln = {gate_rank = 8}: no mixer has this name; did you mean tnl?",
        ),
        (
            "model.mixer_options.lightnet.gate_rank=8",
            "model.mixer_options.lightnet = {gate_rank = 8}: no layer uses this mixer; the model has tnl",
        ),
        (
            "model.mixer_options.gate_rank=8",
            "model.mixer_options.gate_rank = 8: use a table [model.mixer_options.NAME]",
        ),
        ("model.mixer_options.tnl=8", "model.mixer_options.tnl = 8: must be a table"),
        ("model.mixer_options=8", "model.mixer_options = 8: must be a table of NAME = a table"),
    ],
)
def test_mistake_in_an_override_names_it_and_what_is_right(tiny_run: Path, override: str, words: str) -> None:
    message = refusal(tiny_run, override)
    assert any(words in line and line.startswith(f'override "{override}": ') for line in message.split("\n"))


def test_layers_to_recompute_want_full_recomputation(tiny_run: Path) -> None:
    message = refusal(tiny_run, "train.recompute_layers=4")
    assert f'{tiny_run}: train.recompute_layers = 4 needs train.recompute = "full", not "none"' in message
    assert load(tiny_run, ["train.recompute_layers=4", "train.recompute=full"]).train.recompute_layers == 4


@pytest.mark.parametrize("override", ["train.steps", "steps=3", "train..steps=3", "=3", ""])
def test_malformed_override_is_refused(tiny_run: Path, override: str) -> None:
    assert f'override "{override}": must be section.key=value' in refusal(tiny_run, override)


def test_mistakes_in_a_file_name_the_file_that_holds_them(tiny_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(f'extends = "{tiny_run.name}"\n[model]\nnum_heds = 4\n[train]\nsteps = "x"\n', encoding="utf-8")
    tiny_run.write_text(tiny_run.read_text().replace("lr = 1e-3", 'lr = "high"'), encoding="utf-8")
    assert refusal(run).split("\n") == [
        f"{run}: unknown key model.num_heds; did you mean model.num_heads?",
        f'{tiny_run}: optimizer.lr = "high": must be a number > 0 and <= 100',
        f'{run}: train.steps = "x": must be a whole number >= 1 and <= 1_000_000_000 or "none"',
    ]


def test_options_of_a_mixer_without_any_are_refused(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS, "bare", replace(MIXERS["tnl"], options=None))
    message = refusal(tiny_run, "model.mixer=bare", "model.mixer_options.bare.gate_rank=8")
    assert message.endswith("unknown key model.mixer_options.bare.gate_rank; the mixer bare has no options")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("rope_scaling.fctor=8", "did you mean model.mixer_options.llama.rope_scaling.factor?"),
        ("rope_scaling.zebra=8", "has rope_type, factor, low_freq_factor, high_freq_factor, original"),
        ("rope_scaling.rope_type=yarn", 'rope_type = "yarn" has no low_freq_factor; remove it'),
        ("rope_scaling.rope_type=ntk", 'llama.rope_scaling.rope_type = "ntk": must be "llama3" or "yarn" or "linear"'),
        ("rope_scaling=8", 'model.mixer_options.llama.rope_scaling = 8: must be a table or "none"'),
        ("rope_scaling.high_freq_factor=1.0", "high_freq_factor = 1.0 must be above low_freq_factor = 1.0"),
        ("rope_scaling={factor=8.0}", 'rope_type = "llama3" needs low_freq_factor; set it'),
        ("attention_bias=true", '.attention_bias = true: must be "none" or "qkv" or "all"'),
        ("head_dim=7", "model.mixer_options.llama.head_dim = 7: llama rotates channels in pairs; use 8"),
        ("num_key_value_heads=3", "num_key_value_heads = 3 does not divide model.num_heads = 4; use 2"),
    ],
)
def test_options_that_are_tables(tiny_run: Path, option: str, message: str) -> None:
    """Named with the whole key, unset by "none", and written and read back."""
    table = "{factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64}"
    overrides = ["model.mixer=llama", f"model.mixer_options.llama.rope_scaling={table}"]
    with pytest.raises(UserError) as caught:
        check_mixers(load(tiny_run, [*overrides, f"model.mixer_options.llama.{option}"]).model, ParallelConfig())
    assert message in str(caught.value)
    config = load(tiny_run, overrides)
    written = tiny_run.with_name("written.toml")
    written.write_text(to_toml(config), encoding="utf-8")
    assert load(written) == config
    unset = load(tiny_run, [*overrides, "model.mixer_options.llama.rope_scaling=none"])
    assert unset.model.mixer_options == {"llama": LLaMAOptions()}


def test_options_are_those_of_the_mixers_in_use(tiny_run: Path, tmp_path: Path) -> None:
    tiny_run.write_text(
        tiny_run.read_text(encoding="utf-8") + "[model.mixer_options.tnl]\ngate_rank = 3\n", encoding="utf-8"
    )
    stack = ['model.mixer=["tnl", "lightnet", "hgrn2", "llama"]', "model.mixer_options.lightnet.gate_rank=5"]
    config = load(tiny_run, stack)
    assert config.model.mixer_options == {
        "tnl": TNLOptions(gate_rank=3),
        "lightnet": LightNetOptions(gate_rank=5),
        "hgrn2": HGRN2Options(),
        "llama": LLaMAOptions(),
    }
    assert config.model.layer_options(1) == LightNetOptions(gate_rank=5)
    assert load(tiny_run, ["model.mixer_options.tnl.gate_rank=none"]).model.layer_options(0) == TNLOptions()
    path = tmp_path / "resolved.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert "[model.mixer_options.tnl]\ngate_rank = 3\n" in path.read_text(encoding="utf-8")
    assert load(path) == config


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("width", "hidden_size"),
        ("glu_width", "intermediate_size"),
        ("gate_rank", "mixer_options.NAME.gate_rank"),
    ],
)
def test_an_old_name_of_a_key_is_refused_with_the_new_one(tiny_run: Path, old: str, new: str) -> None:
    assert f"unknown key model.{old}; use its new name, model.{new}" in refusal(tiny_run, f"model.{old}=64")


def test_missing_sections_and_keys_are_named(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text("[optimizer]\n[train]\nsteps = 1\nglobal_batch_size = 1\n", encoding="utf-8")
    assert refusal(run).split("\n") == [
        f"{run}: the section [model] is missing; it needs num_layers, hidden_size, num_heads, intermediate_size",
        f"{run}: the section [data] is missing; it needs sequence_length",
        f"{run}: optimizer.lr is missing; it must be a number > 0 and <= 100",
    ]


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "quickstart.toml").write_bytes(b"[model]\nhidden_size = \xff\n")
    (tmp_path / "broken.toml").write_text("[model\n", encoding="utf-8")
    (tmp_path / "child.toml").write_text('extends = "size/3Q.toml"\n', encoding="utf-8")
    (tmp_path / "number.toml").write_text("extends = 3\n", encoding="utf-8")
    assert "did you mean" in refusal(tmp_path / "quikstart.toml")
    assert "quickstart.toml" in refusal(tmp_path / "quikstart.toml")
    assert "not UTF-8" in refusal(tmp_path / "quickstart.toml")
    assert f"{tmp_path / 'broken.toml'}: not valid TOML" in refusal(tmp_path / "broken.toml")
    assert str(tmp_path / "child.toml") in refusal(tmp_path / "child.toml")
    assert 'extends "size/3Q.toml"' in refusal(tmp_path / "child.toml")
    assert f"searched {tmp_path / 'size'} and " in refusal(tmp_path / "child.toml")
    assert "extends = 3: must be a path or a list of paths" in refusal(tmp_path / "number.toml")
    assert "a directory; a configuration file is a regular file" in refusal(tmp_path)


def test_extends_in_a_circle_is_refused_with_the_circle(tmp_path: Path) -> None:
    for name, base in (("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / f"{name}.toml").write_text(f'extends = "{base}.toml"\n', encoding="utf-8")
    a, b, c = (tmp_path / f"{name}.toml" for name in "abc")
    assert f"{a} -> {b} -> {c} -> {a}" in refusal(a)


def test_later_wins_from_base_to_override(tiny_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sub"
    folder.mkdir()
    (folder / "first.toml").write_text("[train]\nseed = 1\nsteps = 10\n[optimizer]\neps = 0.1\n", encoding="utf-8")
    (folder / "second.toml").write_text("[train]\nseed = 2\n", encoding="utf-8")
    run = tmp_path / "run.toml"
    run.write_text(
        f'extends = ["{tiny_run.name}", "sub/first.toml", "sub/second.toml"]\n[model]\nnorm_eps = 0.5\n',
        encoding="utf-8",
    )
    config = load(run, ["train.steps=20"])
    assert (config.train.seed, config.train.steps, config.optimizer.eps) == (2, 20, 0.1)
    assert (config.model.norm_eps, config.model.hidden_size, config.optimizer.lr) == (0.5, 64, 1e-3)


def test_the_same_base_twice_is_no_circle(tiny_run: Path, tmp_path: Path) -> None:
    (tmp_path / "left.toml").write_text(f'extends = "{tiny_run.name}"\n[train]\nseed = 5\n', encoding="utf-8")
    run = tmp_path / "run.toml"
    run.write_text(f'extends = ["{tiny_run.name}", "left.toml"]\n', encoding="utf-8")
    assert load(run).train.seed == 5


def test_of_steps_and_tokens_the_later_replaces_the_earlier(tiny_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(f'extends = "{tiny_run.name}"\n[train]\ntokens = 512\n', encoding="utf-8")
    assert (load(run).train.steps, load(run).train.tokens) == (None, 512)
    assert load(run, ["train.steps=3"]).train.tokens is None


def test_override_values_are_toml_or_text(tiny_config: TinyConfig) -> None:
    config = tiny_config(
        "data.store=some/where",
        'train.init_from="runs/a@3"',
        "optimizer.lr=3e-4",
        "optimizer.betas=[0.8, 0.9]",
        "data.validation.docs.source=held-out",
        "data.validation.docs.store=other",
        "parallel.data=4",
    )
    assert config.data.store == Path("some/where")
    assert config.train.init_from == "runs/a@3"
    assert (config.optimizer.lr, config.optimizer.betas) == (3e-4, (0.8, 0.9))
    assert config.data.validation["docs"].source == "held-out"
    assert config.data.validation["docs"].store == Path("other")
    assert config.parallel.data == 4


def test_tables_of_files_merge_and_overrides_replace(tiny_run: Path, tmp_path: Path) -> None:
    base = tiny_run.read_text(encoding="utf-8").replace("[data]", "[data]\nsources = {a = 1, b = 2}")
    tiny_run.write_text(base, encoding="utf-8")
    run = tmp_path / "run.toml"
    run.write_text(f'extends = "{tiny_run.name}"\n[data.sources]\nb = 3\n', encoding="utf-8")
    assert load(run).data.sources == {"a": 1.0, "b": 3.0}
    assert load(run, ["data.sources.c=4"]).data.sources == {"a": 1.0, "b": 3.0, "c": 4.0}
    assert load(run, ["data.sources={c = 4}"]).data.sources == {"c": 4.0}
    assert load(run, ["data.sources={}"]).data.sources == {}


def test_none_unsets_what_an_earlier_file_set(tiny_run: Path) -> None:
    text = tiny_run.read_text(encoding="utf-8") + "profile_steps = [1, 2]\n[parallel]\ndata = 3\n"
    tiny_run.write_text(text, encoding="utf-8")
    assert load(tiny_run).parallel.data == 3
    config = load(tiny_run, ["parallel.data=none", "train.profile_steps=none"])
    assert config.parallel.data is None
    assert config.train.profile_steps is None
    assert config.model.glu_activation == "none"


def test_none_unsets_what_is_set_by_default(tiny_run: Path) -> None:
    assert load(tiny_run).guard.max_grad_norm_ratio is not None
    guard = load(tiny_run, ["guard.max_grad_norm_ratio=none", "guard.max_loss_rise=none"]).guard
    assert guard.max_grad_norm_ratio is guard.max_loss_rise is None


def test_resolved_form_reads_back_as_the_same_configuration(tiny_config: TinyConfig, tmp_path: Path) -> None:
    config = tiny_config(
        'model.mixer=["tnl*3", "llama"]',
        'data.store=a "quoted" \\ path\twith é',
        'data.sources={"a.b" = 1.5, plain = 1e-7}',
        "data.validation.v.source=x",
        "train.profile_steps=[1, 2]",
        "train.tokens=1024",
    )
    path = tmp_path / "resolved.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert load(path) == config
    assert to_toml(load(path)) == to_toml(config)


def test_resolved_form_holds_every_field(tiny_config: TinyConfig) -> None:
    # Of all mixers: a configuration holds the options of those in use.
    scaling = "{factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64}"
    mixers = [
        "data.validation.v.source=x",
        f"model.mixer={reading('causal')}",
        f"model.num_layers={len(reading('causal'))}",
        *(f"model.mixer_options.{name}.rope_scaling={scaling}" for name in ("llama", "llama-local")),
        "model.tpe.modes=8",
        "model.grid.shape=[7,9]",
        "model.mup.base_hidden_size=64",
    ]
    resolved = tomllib.loads(to_toml(tiny_config(*mixers)))
    # Of all tasks: it holds those of the one in use.
    both_ways = reading("bidirectional")
    every_bidirectional = (
        f"model.mixer={both_ways}",
        f"model.num_layers={len(both_ways)}",
        *(f"model.mixer_options.{name}.causal=false" for name in ("tnl", "hgrn2", "lightnet", "llama-local")),
    )
    distill = ("task.name=distill", "task.teacher=runs/teacher@1")
    classify, preference = (
        ("task.name=classify", "model.head.num_labels=3"),
        ("task.name=preference", "task.loss=simpo"),
    )
    for task in ((*MASKED, *every_bidirectional), classify, distill, (*preference, "data.packing=whole")):
        of_task = tomllib.loads(to_toml(tiny_config(*task)))
        resolved["task"] |= of_task["task"]
        resolved["model"]["mixer_options"] = of_task["model"]["mixer_options"] | resolved["model"]["mixer_options"]
        if "classify" in task[0]:
            resolved["model"]["head"] = of_task["model"]["head"]
    of_images = tomllib.loads(to_toml(load("vit-digits", ["task.augmentation.horizontal_flip=0.5"])))
    of_drawing = tomllib.loads(to_toml(load("lightnet-dit-digits")))
    resolved["task"] |= of_images["task"] | of_drawing["task"]
    resolved["model"]["diffusion"] = of_drawing["model"]["diffusion"]
    for name in OPTIMIZERS:
        keys = (f"optimizer.name={name}", "optimizer.groups.v.parameters=['*']", "optimizer.adaptive_clip={}")
        resolved["optimizer"] |= tomllib.loads(to_toml(tiny_config(*keys)))["optimizer"]
    resolved["model"]["patches"] = tomllib.loads(to_toml(load("vit-digits")))["model"]["patches"]
    of_stores = tomllib.loads(to_toml(tiny_config("data.store=none", "data.stores={v={path='a b', weight=0.5}}")))
    resolved["data"]["stores"] = of_stores["data"]["stores"]
    for field in describe_fields():
        value = resolved
        for part in field.key.replace("NAME", "v").split("."):
            assert part in value, field.key
            value = value[part]


MASKED = ("model.mixer=llama", "model.mixer_options.llama.causal=false", "task.name=masked")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["task.name=maskd"], 'task.name = "maskd": unknown task maskd; did you mean masked?'),
        (
            ["task.name=3"],
            "task.name = 3: unknown task 3; known: causal, masked, classify, classify-image, diffusion, distill, sft",
        ),
        (["task.mlm_probability=0.3"], 'unknown key task.mlm_probability; it needs task.name = "masked"'),
        (
            ["task.name=sft"],
            'data.packing = "concat" cuts documents, but task.name = "sft" learns from whole ones; use',
        ),
        ([*MASKED, "task.mlm_probabilit=0.3"], "unknown key task.mlm_probabilit; did you mean task.mlm_probability?"),
        ([*MASKED, "task.zebra=1"], "unknown key task.zebra; [task] has name, mlm_probability"),
        ([*MASKED, "task.mlm_probability=0.0"], "task.mlm_probability = 0.0: must be a number > 0 and <= 1"),
        ([*MASKED, "task.mask_replace_prob=0.95"], "add up to more than 1; use at most 0.05 for random_replace_prob"),
        (
            ["task.name=masked", "model.mixer=cosformer2"],
            "but layer 0 (cosformer2) reads only those before; use a bidirectional mixer: tnl, hgrn2, lightnet, llama",
        ),
        (
            ["task.name=masked", "model.mixer=llama"],
            "but layer 0 (llama) reads only those before; set model.mixer_options.llama.causal = false",
        ),
        (
            [*MASKED, 'model.mixer=["llama", "hgrn2"]'],
            "but layer 1 (hgrn2) reads only those before",
        ),
        (
            [*MASKED, "task.name=causal"],
            "predicts the next token, but layer 0 (llama) reads it; remove model.mixer_options.llama.causal = false",
        ),
        (
            [*MASKED, "evaluation.every_steps=5", 'evaluation.tasks=["lambada"]'],
            'evaluation.every_steps = 5 needs a model that predicts the next token, but task.name = "masked"',
        ),
        (["task.name=classify"], "needs the table model.head; set model.head.num_labels to the number of classes"),
        (
            ["task.name=classify", "model.head.num_labels=2", "train.z_loss_multiplier=1e-4"],
            "train.z_loss_multiplier = 0.0001 is for tasks that learn tokens from labels; with task.name",
        ),
        (["model.head.num_labels=3"], 'but task.name = "causal" predicts tokens; remove the table'),
        (["task.name=classify", "model.head.num_labels=1"], "model.head.num_labels = 1: must be a whole number >= 2"),
        (
            ["task.name=classify", "task.mlm_probability=0.1"],
            'unknown key task.mlm_probability; it needs task.name = "masked"',
        ),
    ],
    ids=lambda value: value[-1].replace("/", "_") if isinstance(value, list) else "",
)
def test_a_task_that_does_not_fit_is_refused(tiny_run: Path, overrides: list[str], words: str) -> None:
    assert words in refusal(tiny_run, *overrides)


def test_a_task_has_keys_of_its_own(tiny_run: Path) -> None:
    config = load(tiny_run, [*MASKED, "task.mlm_probability=0.3"])
    assert config.task.model_dump() == {
        "name": "masked",
        "mlm_probability": 0.3,
        "validation_mlm_probability": None,
        "whole_word_mask": False,
        "mask_replace_prob": 0.8,
        "random_replace_prob": 0.1,
        "seed": 0,
    }
    path = tiny_run.with_name("resolved.toml")
    path.write_text(to_toml(config), encoding="utf-8")
    assert load(path) == config
    assert load(path).task == config.task
    assert type(load(path).task) is type(config.task)


@given(st.text() | st.floats(allow_nan=False) | st.integers(-(2**63), 2**63 - 1) | st.booleans())
def test_values_are_written_as_toml_reads_them(value: object) -> None:
    if isinstance(value, str) and any(0xD800 <= ord(character) <= 0xDFFF for character in value):
        return  # no text that a file can hold
    assert tomllib.loads(f"value = {toml_value(value)}") == {"value": value}


def test_difference_names_the_keys_that_differ(tiny_config: TinyConfig) -> None:
    first = tiny_config("data.sources.a=1")
    second = tiny_config("data.sources.b=2", "optimizer.lr=1", "train.tokens=512")
    assert difference(first, first) == []
    assert difference(first, second) == [
        ("data.sources.a", 1.0, None),
        ("optimizer.lr", 1e-3, 1.0),
        ("train.steps", 4, None),
        ("train.tokens", None, 512),
        ("data.sources.b", None, 2.0),
    ]


def test_a_check_of_the_whole_names_the_file_and_quotes_no_table(tiny_run: Path) -> None:
    with pytest.raises(UserError) as refused:
        load(tiny_run, ["optimizer.schedule=cosine", "optimizer.warmup_steps=20"])
    assert str(refused.value).startswith(f"{tiny_run}: optimizer.warmup_steps = 20 leaves none of the run's 4 steps")
