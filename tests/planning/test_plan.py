"""`lightscale plan` against the published table, against numbers worked out by hand, and against running models."""

import json
import math
import runpy
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightscale import cli
from lightscale.config.files import load
from lightscale.config.layout import check_layout
from lightscale.config.mixers import MIXERS
from lightscale.config.model import ModelConfig
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.models.language_model import LanguageModel, transformer_config
from lightscale.models.registry import mixer_spec
from lightscale.parallel.engine import Engine
from lightscale.parallel.initialization import draw_weights
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.planning.communication import EXCHANGES
from lightscale.planning.memory import fullest_rank, rank_memory
from lightscale.planning.plan import count_parameters, plan
from lightscale.planning.published import study_parameters, study_table, study_training_flops
from lightscale.planning.workload import Workload
from lightscale.training.build import cast_to_fp8
from lightscale.training.optimizer.registry import optimizer_spec

drawing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "drawing.py")))
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# So many that a state, which some operators keep, is little beside what each token keeps.
ROWS, TOKENS = 2, 1024
TINY: dict[str, tuple[str, ...]] = {
    **{name: (f"{name}-tiny",) for name in MIXERS if name != "decay-attention"},
    **{name: (f"{name}-tiny",) for name in ("lion-s-causal", "retnet-like", "mamba2-like")},
    "lightnet of whole documents": ("lightnet-tiny", "model.mixer_options.lightnet.causal=false", "task.name=masked"),
    "hgrn2 in two scans": ("hgrn2-tiny", "model.mixer_options.hgrn2.causal=false", "task.name=masked"),
    "tnl in two scans": ("tnl-tiny", "model.mixer_options.tnl.causal=false", "task.name=masked"),
    "lion-s by channel": ("lion-s-tiny", "model.mixer_options.lion-s.vector_decay=true"),
    "norms on both sides": ("llama-tiny", "model.norm_placement=both", "model.zero_centered_norm=true"),
    "relations of all pairs": (
        "causal-rn-tiny",
        "model.mixer_options.causal-rn.form=quadratic",
        "model.norm=layernorm",
    ),
}
"""A small run of each mixer, and of those that have two forms the other one."""
SOFTMAX = ("llama", "llama-local", "norms on both sides")
"""Those without a state of constant size."""
DRAWN: list[str] = drawing.some("models of the plan", list(TINY), 6)
KEPT = drawing.covering("activations", DRAWN, (torch.float32, torch.bfloat16), strength=1)

# Table 7 as it is printed: architecture-size, l, d, millions of parameters, petaFLOPs of a step.
TABLE_7 = """
llama-70m 6 512 20.5 1.6         llama-160m 12 768 85.0 5.6       llama-410m 26 1024 334.1 18.0
llama-1b 32 1536 906.2 40.4      llama-3b 35 2560 2775.8 99.6     llama-7b 32 4096 6476.5 202.7
tnl-70m 6 512 21.2 0.5           tnl-160m 12 768 87.3 2.2         tnl-410m 25 1024 327.7 7.9
tnl-1b 32 1536 918.6 22.3        tnl-3b 35 2560 2798.4 66.6       tnl-7b 32 4096 6509.6 154.4
hgrn2-70m 6 512 20.5 0.5         hgrn2-160m 12 768 84.9 2.1       hgrn2-410m 26 1024 334.0 8.0
hgrn2-1b 32 1536 906.0 22.0      hgrn2-3b 35 2560 2775.5 66.0     hgrn2-7b 32 4096 6476.1 153.6
cosformer2-70m 6 512 21.3 0.5    cosformer2-160m 12 768 87.5 2.3  cosformer2-410m 25 1024 328.0 8.1
cosformer2-1b 32 1536 919.1 22.7 cosformer2-3b 35 2560 2799.0 67.4 cosformer2-7b 32 4096 6511.0 155.6
"""
_WORDS = TABLE_7.split()
ENTRIES = [_WORDS[start : start + 5] for start in range(0, len(_WORDS), 5)]


def config(name: str, *overrides: str) -> RunConfig:
    return load(CONFIGS / f"{name}.toml", overrides)


@pytest.mark.parametrize(("name", "layers", "width", "millions", "petaflops"), ENTRIES, ids=[row[0] for row in ENTRIES])
def test_shipped_run_gives_the_published_entry(
    name: str, layers: str, width: str, millions: str, petaflops: str
) -> None:
    run = config(name)
    model = run.model
    assert (model.num_layers, model.hidden_size, model.head_dim, model.vocab_size) == (
        int(layers),
        int(width),
        128,
        100_280,
    )
    parameters = study_parameters(model)
    flops = study_training_flops(model, sequence_length=8192, batch_size=480)
    assert parameters is not None and flops is not None
    assert abs(parameters / 1e6 - float(millions)) <= max(0.0015 * float(millions), 0.06)
    assert abs(flops / 1e15 - float(petaflops)) <= max(0.03 * float(petaflops), 0.08)
    # And the same numbers stand in the table that the command prints.
    row = next(row for row in study_table(CONFIGS) if f"{row.architecture}-{row.size}" == name)
    assert row.agrees
    assert (row.parameters_millions.published, row.step_petaflops.published) == (float(millions), float(petaflops))
    assert (row.parameters_millions.computed, row.step_petaflops.computed) == (parameters / 1e6, flops / 1e15)


@pytest.mark.parametrize("size", ["70m", "160m", "410m", "1b", "3b", "7b"])
@pytest.mark.parametrize("mixer", ["gated-delta-net", "kimi-delta"])
def test_delta_models_are_as_large_as_the_studys(mixer: str, size: str) -> None:
    """The same depth, width and heads, and LLaMA's parameters within 1 %."""
    model = config(f"{mixer}-{size}").model
    _, layers, width, millions, _ = next(row for row in ENTRIES if row[0] == f"llama-{size}")
    assert (model.num_layers, model.hidden_size, model.head_dim) == (int(layers), int(width), 128)
    assert abs(count_parameters(model).rest / 1e6 - float(millions)) < 0.01 * float(millions)
    assert model.intermediate_size % 64 == 0


def test_table_has_all_entries_once() -> None:
    names = [f"{row.architecture}-{row.size}" for row in study_table(CONFIGS)]
    assert sorted(names) == sorted(row[0] for row in ENTRIES)
    assert len(names) == 24


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*-*.toml")), ids=lambda path: path.stem)
def test_exact_count_is_the_studys_and_what_it_leaves_out(path: Path) -> None:
    run = load(path)
    model = run.model
    layers, d, e = model.num_layers, model.hidden_size, model.head_dim
    left_out = {
        "llama": {"norm weights": (2 * layers + 1) * d},
        "tnl": {} if getattr(model.layer_options(0), "lrpe", "first") == "none" else {"LRPE angles": d},
        "hgrn2": {},
        "cosformer2": {"LRPE angles": layers * d, "TPE decays": e},
        "lightnet": {"TPE decays": e},
    }
    parameters = count_parameters(model)
    if model.image_shape is not None:
        # A map of patches with a bias, and a vector for each leading token.
        assert model.patches is not None
        numbers = math.prod(side + 2 * model.patches.overlap for side in model.patches.size) * model.patches.channels
        assert parameters.embedding == (numbers + 1 + (0 if model.grid is None else model.grid.leading_tokens)) * d
        return
    assert parameters.embedding == model.vocab_size * d * (1 if model.tie_word_embeddings else 2)
    if len(set(model.layers)) > 1 or run.task.name != "causal" or model.layers[0] not in left_out:
        assert parameters.study is None
        return
    assert parameters.only_exact == left_out[model.layers[0]]
    assert parameters.study is not None
    # What the study counts and its equations 9, 13 and 17 do not use.
    unused = 0 if getattr(model.layer_options(0), "output_projection", True) else layers * d * d
    assert parameters.rest + unused == parameters.study + sum(parameters.only_exact.values())


def test_study_has_no_flops_for_lightnet_and_hybrids() -> None:
    for name in ("lightnet-70m", "hybrid-tiny"):
        assert plan(config(name)).study_flops is None
    assert plan(config("hybrid-tiny")).parameters.study is None
    assert plan(config("llama-tiny", "model.mixer_options.llama.rope_theta=5e5")).parameters.study is not None
    grouped = plan(config("llama-tiny", "model.mixer_options.llama.num_key_value_heads=1"))
    assert grouped.parameters.study is None and grouped.study_flops is None
    assert plan(config("lightnet-70m")).parameters.study is not None


def test_plan_of_a_tiny_run_by_hand() -> None:
    """TNL of 4 layers, d 64, 4 heads, g 128 on 4 x 64 tokens, in fp32."""
    shape = ["model.vocab_size=512", "data.sequence_length=64", "train.global_batch_size=4", "train.micro_batch_size=1"]
    run = config("tnl-tiny", *shape, "train.tokens=1000", "train.device=cpu", "optimizer.schedule=constant")
    planned = plan(run, 2)
    assert (planned.layout.data, planned.tokens_per_step, planned.steps, planned.tokens) == (2, 256, 4, 1024)
    branch = config("tnl-tiny", *shape, "train.steps=4", "train.branch_from=runs/a@3", "optimizer.schedule=constant")
    assert (plan(branch).steps, plan(branch).tokens) == (1, 256), "those of its parent are done"
    d, t, g, v = 64, 16, 128, 512
    weights = v * d + 4 * (4 * d * d + 2 * d * t + 3 * d * g) + d
    assert planned.parameters.total == planned.memory.parameters == weights
    # Twice a multiplication and addition; the chunk is the sequence; queries and keys are doubled on the first layer.
    projections = 2 * 4 * (4 * d * d + 2 * d * t + 3 * d * g) + 2 * d * v
    attention = sum(4 * (2 * 64 * (k + 16) + 4 * k * 16) for k in (32, 16, 16, 16))
    assert planned.mfu_flops == 3 * 256 * (projections + attention)
    memory = planned.memory
    assert (memory.weights_bytes, memory.gradients_bytes) == (4 * weights, 4 * weights)
    assert memory.optimizer_bytes == 8 * weights // 2
    per_token = 4 * (4 * d + (4 * d + t) + 2 * d + 2 * d + 3 * g)
    assert memory.activations_bytes == 64 * per_token * 4
    # Hidden states before and behind the last norm, and their gradient.
    assert memory.logits_bytes == 64 * v * 4 + 3 * 64 * d * 4 + v * d * 4
    # In the GLU, beside the output layer's gradient.
    assert memory.block_bytes == 64 * (2 * g + d) * 4 + v * d * 4 < memory.logits_bytes
    assert memory.total_bytes == 4 * weights * 3 + memory.activations_bytes + memory.logits_bytes
    first, rest = planned.exchanges
    assert (first.layers, first.forward_bytes, first.backward_bytes) == ((0, 0), 4 * 4 * (32 * 16 + 1), 4 * 4 * 32 * 16)
    assert (rest.layers, rest.forward_bytes, rest.backward_bytes) == ((1, 3), 4 * 4 * (16 * 16 + 1), 4 * 4 * 16 * 16)


def test_half_precision_keeps_main_weights_and_shares_them_out() -> None:
    run = config("tnl-tiny", "train.precision=bf16", "train.micro_batch_size=1", "parallel.sequence=2")
    memory = plan(run, 8).memory
    assert memory.weights_bytes == 2 * memory.parameters
    assert memory.gradients_bytes == 4 * memory.parameters
    assert memory.optimizer_bytes == 12 * memory.parameters // 8  # 4 data ranks, 2 sequence ranks
    assert memory.logits_bytes == 256 * 4096 * 2 + 3 * 256 * 64 * 2 + 4096 * 64 * 4
    # However long the sequence, a chunk of the logits has room: this one is cut into 16, which fill it.
    long = config("tnl-tiny", "train.precision=bf16", "data.sequence_length=1048576", "train.micro_batch_size=1")
    assert plan(long, 1).memory.logits_bytes == (512 << 20) + 3 * 1048576 * 64 * 2 + 4096 * 64 * 4
    # Chunks are equal: of 8193 tokens at 64 KiB, one more than the room holds, 4097 are computed at a time.
    wide = config(
        "tnl-tiny", "train.precision=bf16", "train.micro_batch_size=1", "model.vocab_size=32768",
        "data.sequence_length=8193",
    )  # fmt: skip
    assert plan(wide, 1).memory.logits_bytes == 4097 * 65536 + 3 * 8193 * 64 * 2 + 32768 * 64 * 4
    # Few tokens: the weight's gradient, rounded behind the last chunk, is more than a chunk.
    few = config("tnl-tiny", "train.precision=bf16", "train.micro_batch_size=1", "data.sequence_length=32")
    assert plan(few, 1).memory.logits_bytes == 4096 * 64 * 2 + 3 * 32 * 64 * 2 + 4096 * 64 * 4


def test_tensor_and_sequence_ranks_share_the_activations() -> None:
    run = config("tnl-tiny")
    alone = plan(run).memory
    # The output layer's input and its gradient are split over sequence ranks, the gradient of its rows over tensor
    # ranks, of which each has what the norm reads and writes for its own tokens, and gathers the input.
    of_input, of_rows = run.train.micro_batch_size * run.data.sequence_length * 64 * 2, 4096 * 64 * 4
    for axis, inputs, share in (("tensor", 3.0, 2), ("sequence", 1.5, 1)):
        memory = plan(config("tnl-tiny", f"parallel.{axis}=2")).memory
        assert 2 * memory.activations_bytes == alone.activations_bytes
        logits = memory.logits_bytes - inputs * of_input - of_rows // share
        assert 2 * logits == alone.logits_bytes - 3 * of_input - of_rows
    # The gate's first half is whole on every tensor rank.
    shared = plan(config("tnl-tiny", "parallel.tensor=2")).memory.parameters
    assert 2 * shared == alone.parameters + 4 * 64 * 16


def test_the_first_pipeline_stage_runs_ahead() -> None:
    run = config("tnl-tiny", "parallel.pipeline=4", "train.micro_batch_size=1", "model.vocab_size=64")
    layout = check_layout(run, 4)
    stages = [rank_memory(run, layout, stage) for stage in range(4)]
    one = stages[3].activations_bytes
    assert [stage.activations_bytes for stage in stages[1:]] == [3 * one, 2 * one, one]
    assert stages[0].activations_bytes == 4 * one
    assert [stage.logits_bytes > 0 for stage in stages] == [False, False, False, True]
    embedding = 64 * 64
    assert stages[0].parameters == stages[1].parameters + embedding + 64
    assert stages[3].parameters == stages[1].parameters + embedding
    assert fullest_rank(run, layout) == max(stages, key=lambda stage: stage.total_bytes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{configs}/tln-70m.toml"], ["tln-70m.toml", "did you mean", "tnl-70m.toml"]),
        (["{configs}/tnl-71m.toml"], ["tnl-71m.toml", "did you mean", "tnl-70m.toml"]),
        (["{configs}/tnl-tiny.toml", "model.mixer=hgrn"], ['model.mixer = "hgrn"', "did you mean hgrn2"]),
        (["{configs}/tnl-tiny.toml", "--processes", "0"], ["--processes 0", "at least 1"]),
        (["{configs}/tnl-tiny.toml", "--processes", "3"], ["train.global_batch_size = 8", "data ranks"]),
        (["{configs}/tnl-tiny.toml", "model.num_heads=5"], ["model.hidden_size = 64", "model.num_heads = 5"]),
        (["{tmp}/run.toml"], ["size/71M.toml", "did you mean"]),
        ([], ["no CONFIG given", "--study"]),
        (["--study", "{tmp}/nowhere"], ["nowhere", "no such folder"]),
        (["--study", "{configs}", "train.steps=1"], ["--study", "overrides"]),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(f'extends = "{CONFIGS}/size/71M.toml"\n', encoding="utf-8")
    filled = [argument.format(configs=CONFIGS, tmp=tmp_path) for argument in arguments]
    assert cli.main(["plan", *filled]) == UserError.EXIT_CODE
    printed = capsys.readouterr()
    assert printed.out == ""
    for word in words:
        assert word in printed.err


def test_an_axis_that_a_mixer_cannot_be_split_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS, "tnl", replace(MIXERS["tnl"], axes=frozenset({"data"})))
    with pytest.raises(UserError, match=r"parallel\.sequence = 2: layer 0 \(tnl\)"):
        plan(config("tnl-tiny", "parallel.sequence=2"))


def test_json_holds_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    path = CONFIGS / "cosformer2-7b.toml"
    assert cli.main(["plan", str(path), "parallel.tensor=8", "--processes", "16", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    planned = plan(load(path, ["parallel.tensor=8"]), 16)
    assert record["layout"] | {"tensor": 8, "data": 2, "processes": 16} == record["layout"]
    assert record["parameters"]["total"] == planned.parameters.total
    assert record["parameters"]["only_exact"] == {"LRPE angles": 32 * 4096, "TPE decays": 128}
    assert record["training_flops_per_step"] == {"study": planned.study_flops, "mfu": planned.mfu_flops}
    assert record["run"] == {
        "tokens_per_step": 3_932_160,
        "steps": 76_294,
        "tokens": 76_294 * 3_932_160,
        "equal_steps": [{"steps": 76_294, "tokens_per_step": 3_932_160}],
    }
    ramp = "train.rampup_batch_size=[{global_batch_size=240,until_tokens=1e12}]"
    growing = plan(load(path, ["parallel.tensor=8", ramp]), 16)
    assert growing.equal_steps == ((152_588, 1_966_080),) and growing.tokens == 152_588 * 1_966_080
    assert record["memory"]["total_bytes"] == planned.memory.total_bytes
    assert len(record["state_exchange"]) == len(planned.exchanges) > 0


def test_people_see_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(CONFIGS / "hybrid-tiny.toml"), "parallel.tensor=2"]) == 0
    out = capsys.readouterr().out
    for words in (
        "on 2 processes: tensor 2",
        "604,224",  # all parameters
        "for MFU",
        "1,024,000",  # tokens of the run
        "optimizer",
        "tnl, layers 1 to 6",
        "llama, layer 7",
        "not counted: ",
    ):
        assert words in out


def test_study_in_json_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--study", str(CONFIGS), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 24
    assert all(row["agrees"] for row in rows)
    (row,) = [row for row in rows if (row["architecture"], row["size"]) == ("tnl", "410m")]
    assert (row["num_layers"], row["hidden_size"], row["num_heads"], row["intermediate_size"]) == (25, 1024, 8, 2816)


def test_study_names_what_disagrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(CONFIGS, tmp_path / "configs")
    size = tmp_path / "configs" / "arch" / "tnl-410m.toml"
    size.write_text(size.read_text(encoding="utf-8").replace("num_layers = 25", "num_layers = 26"), encoding="utf-8")
    assert cli.main(["plan", "--study", str(tmp_path / "configs")]) == 1
    out = capsys.readouterr().out
    assert "outside the tolerances: tnl-410m\n" in out
    assert out.count(" NO ") == 1


def test_study_reads_what_is_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "--study"]) == 0
    assert "all 24 agree" in capsys.readouterr().out


def loss_of(
    model: ModelConfig, mesh: Mesh, dtype: torch.dtype = torch.float32, tokens: int = TOKENS
) -> tuple[LanguageModel, Callable[[], Tensor]]:
    """A model, and its loss on rows of one document each, this rank's segment of them."""
    module = LanguageModel(transformer_config(model, mesh, dtype), model, vocab_size=model.vocab_size, mesh=mesh)
    draw_weights(module, seed=0, tensor_rank=0, tensor_size=1)
    n = tokens // mesh.sequence
    positions = (mesh.sequence_rank * n + torch.arange(n)).repeat(ROWS, 1)
    ids = torch.randint(0, model.vocab_size, (ROWS, n))
    return module, lambda: module(ids, positions, ids).sum()


def kept_bytes(model: ModelConfig, mesh: Mesh, dtype: torch.dtype, *, fp8: bool = False) -> float:
    """Bytes per token that autograd keeps, parameters not among them, each memory counted once."""
    module, loss = loss_of(model, mesh, dtype)
    if fp8:
        cast_to_fp8([module])
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with ExitStack() as stack:
        for name in ("gla", "lightning", "lightnet"):
            # States of batches, which PyTorch's forms of these keep too and Triton's do not.
            stack.enter_context(mock.patch(f"lightscale.kernels.{name}.chunked.kept_states", return_value=[]))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
        loss()
    sizes = [tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in weights]
    return sum(sizes) / (ROWS * TOKENS)


def measure(
    rank: int, world_size: int, init_method: str, models: dict[str, tuple[ModelConfig, ModelConfig]]
) -> tuple[dict[tuple[str, torch.dtype], float], dict[tuple[str, str], int]]:
    """What one more layer keeps, in this rank's share of the cases; bytes that a sequence rank contributes, there and
    back."""
    with start_mesh(device="cpu", rank=rank, world_size=world_size, init_method=init_method) as mesh:
        kept = {
            (name, dtype): kept_bytes(models[name][1], mesh, dtype) - kept_bytes(models[name][0], mesh, dtype)
            for name, dtype in KEPT[rank::world_size]
        }
    payloads = {}
    options: dict[str, Any] = {"device": "cpu", "rank": rank, "world_size": world_size, "sequence": 2}
    for way in EXCHANGES:
        with start_mesh(**options, init_method=f"{init_method}-{way}", exchange=way) as mesh:
            assert mesh.exchange is not None
            for name, (model, _) in models.items():
                before = mesh.exchange.payload_bytes
                # It does not depend on their number.
                _, loss = loss_of(model, mesh, tokens=128)
                loss().backward()
                payloads[name, way] = mesh.exchange.payload_bytes - before
    return kept, payloads


@pytest.fixture(scope="module")
def measured(
    run_ranks: Callable[..., list[Any]],
) -> tuple[dict[tuple[str, torch.dtype], float], list[dict[tuple[str, str], int]]]:
    models = {}
    for name in DRAWN:
        wide = ["model.hidden_size=128", "model.intermediate_size=352", "model.vocab_size=64"]
        short, long = (config(*TINY[name], *wide, f"model.num_layers={layers}").model for layers in (2, 3))
        models[name] = (short, long)
    by_rank = run_ranks(measure, 2, models)
    return by_rank[0][0] | by_rank[1][0], [payloads for _, payloads in by_rank]


@pytest.mark.parametrize(("name", "dtype"), KEPT)
def test_activations_are_what_autograd_keeps(
    measured: tuple[dict[tuple[str, torch.dtype], float], Any], name: str, dtype: torch.dtype
) -> None:
    wide = ["model.hidden_size=128", "model.intermediate_size=352", "model.num_layers=3"]
    layer = Workload(config(*TINY[name], *wide).model, TOKENS).layers[2]
    # On CPUs each projection is a product of its own; the twin measures those that are one (`make twin`).
    kept = layer.kept_bytes("none", dtype.itemsize) - layer.joined * dtype.itemsize
    assert 0.99 < kept / measured[0][name, dtype] < 1.05


def measure_fp8(rank: int, world_size: int, init_method: str, models: list[tuple[ModelConfig, ModelConfig]]) -> Any:
    """What one more layer keeps with products in 8 bits."""
    with start_mesh(device="cpu", rank=rank, world_size=world_size, init_method=init_method) as mesh:
        return [
            kept_bytes(long, mesh, torch.bfloat16, fp8=True) - kept_bytes(short, mesh, torch.bfloat16, fp8=True)
            for short, long in models
        ]


def test_inputs_in_8_bits_are_what_autograd_keeps(run_ranks: Callable[..., list[Any]]) -> None:
    names, wide = ("tnl", "llama"), ["model.hidden_size=128", "model.intermediate_size=352", "model.vocab_size=64"]
    models = [
        tuple(config(*TINY[name], *wide, f"model.num_layers={layers}").model for layers in (2, 3)) for name in names
    ]
    (found,) = run_ranks(measure_fp8, 1, models)
    for name, (_, model), measured in zip(names, models, found, strict=True):
        plain, layer = (Workload(model, TOKENS, fp8=fp8).layers[2] for fp8 in (False, True))
        # On CPUs each projection has a product, and so a cast, of its own.
        kept = layer.kept_bytes("none", 2) - layer.joined * 2 + model.hidden_size
        assert 0.99 < kept / measured < 1.05, name
        assert layer.kept_bytes("none", 2) < plain.kept_bytes("none", 2)
        assert layer.kept_bytes("full", 2) == plain.kept_bytes("full", 2)


def allocate(rank: int, world_size: int, init_method: str, run: RunConfig) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer of an engine for bf16 weights."""
    with start_mesh(device="cpu", rank=rank, world_size=world_size, init_method=init_method) as mesh:
        module, _ = loss_of(run.model, mesh, torch.bfloat16)
        engine = Engine(module, module.config, mesh, optimizer=optimizer_spec(run))
        assert engine.optimizer is not None
        # The distributed optimizer keeps all weights in its buffers, and the model's are views of them.
        buffers = [buffer for model in engine.models for buffer in model.buffers]
        owned = [engine.optimizer.owned(parameter) for parameter in module.parameters()]
        states = [tensor for one in owned if one is not None for tensor in (one.weights, *one.state.values())]
        return (
            sum(buffer.param_data.nbytes for buffer in buffers),
            sum(buffer.grad_data.nbytes for buffer in buffers),
            sum(tensor.nbytes for tensor in states),
        )


def test_states_are_what_the_engine_allocates(run_ranks: Callable[..., list[Any]]) -> None:
    """bf16 weights and fp32 gradients whole on each of two data ranks; fp32 weights and two moments shared out."""
    run = config("tnl-tiny", "model.vocab_size=512", "train.precision=bf16", "train.micro_batch_size=1")
    memory = plan(run, 2).memory
    found = run_ranks(allocate, 2, run)
    for weights, gradients, _ in found:
        # Each rank's part of a buffer begins at an even address: zeros between parameters.
        assert memory.weights_bytes <= weights < 1.02 * memory.weights_bytes
        assert memory.gradients_bytes <= gradients < 1.02 * memory.gradients_bytes
    # The ranks' shares differ by what stands at the border between them.
    optimizer = sum(state for _, _, state in found)
    assert abs(optimizer - 2 * memory.optimizer_bytes) <= 24


@pytest.mark.parametrize("way", EXCHANGES)
@pytest.mark.parametrize("name", [name for name in DRAWN if name not in (*SOFTMAX, "relations of all pairs")])
def test_state_exchange_is_what_ranks_count(measured: tuple[Any, list[dict[Any, int]]], name: str, way: str) -> None:
    wide = ["model.hidden_size=128", "model.intermediate_size=352", "model.vocab_size=64", "model.num_layers=2"]
    sizes = [
        f"train.micro_batch_size={ROWS}",
        "parallel.sequence=2",
        f"parallel.exchange={way}",
        "train.precision=fp32",
    ]
    run = config(*TINY[name], *wide, *sizes)
    both_ways = run.model.direction(0) == "bidirectional"
    # Numbers of the last tokens, which a ring gathers too: from both ranks, there and back.
    tail = 4 * ROWS * mixer_spec(run.model.layers[0]).tail_values(run.model, 0)
    expected = [0, 0]
    for exchange in plan(run).exchanges:
        first, last = exchange.layers or (0, 0)
        assert exchange.forward_bytes is not None and exchange.backward_bytes is not None
        forward, backward = ((last - first + 1) * size for size in (exchange.forward_bytes, exchange.backward_bytes))
        of_ranks = (forward + backward,) * 2
        if way == "ring":
            # Of two ranks the first sends forward and the second backward; half of what goes both ways is each one's.
            half = (forward + backward) // 2
            own = (last - first + 1) * tail if exchange.layers else 0
            of_ranks = (half, half) if both_ways and exchange.layers else (forward + own, backward + own)
        expected = [sent + more for sent, more in zip(expected, of_ranks, strict=True)]
    assert [payloads[name, way] for payloads in measured[1]] == expected


def test_a_mixer_without_a_constant_state_is_said_to_have_none() -> None:
    (exchange,) = plan(config("llama-tiny", "parallel.sequence=2")).exchanges
    assert (exchange.forward_bytes, exchange.backward_bytes) == (None, None)
