"""The search of layouts against trying all of them with `check_layout`, and the command that shows it."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightscale import cli
from lightscale.config.files import load
from lightscale.config.layout import check_layout
from lightscale.config.mixers import MIXERS
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.planning.hardware import H100, with_settings
from lightscale.planning.search import Fixed, best_layouts, explain_none, least_nodes, run_seconds
from lightscale.planning.step_cost import CostModel

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
K = 1024
FREE = Fixed()


def config(name: str, *overrides: str) -> RunConfig:
    return load(CONFIGS / f"{name}.toml", overrides)


def allowed(gpus: int, length: int, *, batches: range) -> set[tuple[int, ...]]:
    """(tensor, pipeline, sequence, data) that run with one of the `batches`, tensor ranks within a node."""
    found = set()
    degrees = [degree for degree in range(1, gpus + 1) if gpus % degree == 0]
    for tensor, pipeline, sequence in itertools.product(degrees, repeat=3):
        if tensor > 8 or gpus % (tensor * pipeline * sequence):
            continue
        axes = [f"parallel.tensor={tensor}", f"parallel.pipeline={pipeline}", f"parallel.sequence={sequence}"]
        shape = ["model.vocab_size=512", f"data.sequence_length={length}", "train.micro_batch_size=1"]
        for batch in batches:
            run = config("tnl-tiny", *shape, *axes, f"train.global_batch_size={batch}")
            try:
                data = check_layout(run, gpus).data
            except UserError:
                continue
            found.add((tensor, pipeline, sequence, data))
    return found


@pytest.mark.parametrize(
    ("nodes", "batch", "batches"),
    [(2, 16, range(16, 17)), (2, 12, range(12, 13)), (5, 21, range(19, 24))],
    ids=["two nodes", "data ranks divide by 4 alone", "no layout keeps the batch"],
)
def test_all_layouts_that_run_are_found(nodes: int, batch: int, batches: range) -> None:
    """With exactly the batch, and where no layout keeps it, 10 % more or less."""
    run = config(
        "tnl-tiny", "model.vocab_size=512", "data.sequence_length=64", f"train.global_batch_size={batch}",
        "model.num_layers=4",
    )  # fmt: skip
    found = best_layouts(run, nodes=nodes, sequence_length=64, hardware=H100, fixed=FREE)
    layouts = {(one.layout.tensor, one.layout.pipeline, one.layout.sequence, one.layout.data) for one in found}
    assert layouts == allowed(8 * nodes, 64, batches=batches)
    assert len(layouts) > 5
    changes = [abs(one.global_batch_size - batch) for one in found]
    assert changes == sorted(changes)
    assert all(one.global_batch_size in batches for one in found)


def test_layouts_divide_every_batch_of_a_ramp() -> None:
    """The seconds of the run are those of steps of each batch, predicted as runs of their own."""
    words = ["tnl-tiny", "model.vocab_size=512", "data.sequence_length=64", "train.tokens=100000"]
    ramp = "train.rampup_batch_size=[{global_batch_size=4,until_tokens=5000},{global_batch_size=8,until_tokens=9000}]"
    run = config(*words, ramp, "train.global_batch_size=16")
    where: dict[str, Any] = {"nodes": 1, "sequence_length": 64, "hardware": H100}
    found = best_layouts(run, **where, fixed=FREE)
    for one in found:
        layout = one.layout
        axes = [f"parallel.{axis}={getattr(layout, axis)}" for axis in ("tensor", "pipeline", "sequence")]
        size = f"train.micro_batch_size={layout.micro_batch_size}"
        assert check_layout(config(*words, ramp, "train.global_batch_size=16", *axes, size), 8) == layout
    assert {one.layout.data for one in found} == {1, 2, 4}
    best = next(one for one in found if one.layout.data == 2)
    expected = 0.0
    for batch, steps in ((4, 20), (8, 8), (16, 89)):
        own = config(*words, f"train.global_batch_size={batch}")
        axes = {axis: getattr(best.layout, axis) for axis in ("tensor", "pipeline", "sequence", "data")}
        fixed = Fixed(axes=axes, micro_batch_size=best.layout.micro_batch_size, recompute=best.recompute)
        like = [one for one in best_layouts(own, **where, fixed=fixed) if one.exchange == best.exchange]
        expected += steps * like[0].step_s
    assert run.step_tokens.steps_to(100_000) == 20 + 8 + 89
    assert run_seconds(run, best, H100) == pytest.approx(expected)


def test_layouts_leave_micro_batches_for_the_gradient_noise() -> None:
    """All but those whose data ranks have one sequence each; and the fault of a layout is its own."""
    where: Any = {"nodes": 1, "sequence_length": 8 * K, "hardware": H100}
    plain, measuring = (
        config("tnl-70m", "train.global_batch_size=8", *more) for more in ([], ["metrics.gradient_noise_every=10"])
    )
    free, found = (best_layouts(one, **where, fixed=FREE) for one in (plain, measuring))
    assert all(one.layout.num_microbatches > 1 for one in found)
    of_ranks, of_all = (
        {replace(one.layout, micro_batch_size=1, num_microbatches=1) for one in several} for several in (found, free)
    )
    assert of_ranks == {one for one in of_all if one.data < 8} < of_all
    error = explain_none(measuring, **where, fixed=Fixed(axes={"tensor": 3}))
    assert "8 processes cannot be divided among parallel.tensor = 3" in str(error)


def test_the_micro_batch_is_the_smallest_than_which_none_is_clearly_faster() -> None:
    """Of 256 tokens a rank, one sequence at a time leaves the GPU waiting for launches."""
    run = config("tnl-7b")
    found = best_layouts(run, nodes=128, sequence_length=8 * K, hardware=H100, fixed=FREE)
    sizes = {one.layout.micro_batch_size for one in found}
    assert {1, 3, 15} <= sizes
    for one in found[:3]:
        layout, micro = one.layout, one.layout.micro_batch_size
        axes = {axis: getattr(layout, axis) for axis in ("tensor", "pipeline", "sequence")}
        share = run.train.global_batch_size // layout.data
        others = [
            predicted
            for size in range(1, share + 1)
            if share % size == 0 and size != micro
            for predicted in best_layouts(
                run, nodes=128, sequence_length=8 * K, hardware=H100,
                fixed=Fixed(axes=axes, micro_batch_size=size, exchange=one.exchange),
            )
        ]  # fmt: skip
        for other in others:
            assert not other.fits or other.tokens_per_s < 1.03 * one.tokens_per_s
            if other.layout.micro_batch_size <= micro / 2:
                assert other.tokens_per_s < one.tokens_per_s


def test_the_least_nodes_are_the_first_that_fit() -> None:
    run, where = config("tnl-7b"), {"sequence_length": 4096 * K, "hardware": H100, "fixed": FREE}
    least = least_nodes(run, more_than=1, **where)  # type: ignore[arg-type]
    fits = {nodes: best_layouts(run, nodes=nodes, **where)[0].fits for nodes in (1, 2, 4)}  # type: ignore[arg-type]
    assert (least, fits) == (4, {1: False, 2: False, 4: True})
    # Five nodes divide only the layers, six hardly more, and the stages do not fit.
    for nodes in (5, 6):
        assert not best_layouts(run, nodes=nodes, **where)[0].fits  # type: ignore[arg-type]
    assert least_nodes(run, more_than=4, **where) == 8  # type: ignore[arg-type]
    too_small = {**where, "hardware": with_settings(H100, ["memory_gib=7"])}
    assert least_nodes(config("tnl-7b"), more_than=1000, **too_small) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "nodes", "length"), [("tnl-1b", 2, 256), ("llama-7b", 4, 64), ("lightnet-7b", 3, 8)])
def test_found_layouts_run_and_are_in_order(name: str, nodes: int, length: int) -> None:
    found = best_layouts(config(name), nodes=nodes, sequence_length=length * K, hardware=H100, fixed=FREE)
    tokens = config(name).tokens_per_step
    for one in found[:20]:
        layout = one.layout
        run = config(
            name, f"parallel.tensor={layout.tensor}", f"parallel.pipeline={layout.pipeline}",
            f"parallel.sequence={layout.sequence}", f"parallel.exchange={one.exchange}",
            f"train.recompute={one.recompute}", f"data.sequence_length={one.sequence_length}",
            f"train.global_batch_size={one.global_batch_size}",
            f"train.micro_batch_size={layout.micro_batch_size}",
        )  # fmt: skip
        assert check_layout(run, 8 * nodes) == layout
        assert abs(run.tokens_per_step - tokens) <= 0.1 * tokens
    fit = [one.tokens_per_s for one in found if one.fits]
    assert fit and fit == sorted(fit, reverse=True)
    assert all(one.fits for one in found[: len(fit)])
    assert {one.fits for one in found} == {one.memory.total_bytes <= 73.6 * 2**30 for one in found} | {True}


def test_no_more_is_recomputed_than_memory_wants() -> None:
    run = config("tnl-1b")
    for one in best_layouts(run, nodes=1, sequence_length=64 * K, hardware=H100, fixed=FREE):
        model = CostModel(run, 64 * K, H100)
        if one.recompute != "none":
            assert not model.predict(one.layout, recompute="none", exchange=one.exchange).fits
        if one.recompute == "full":
            selective = model.predict(one.layout, recompute="selective", exchange=one.exchange)
            assert not selective.fits or selective.step_s > one.step_s
            layers = (one.recompute_layers or run.model.num_layers // one.layout.pipeline) - 1
            less = model.predict(one.layout, recompute="full", recompute_layers=layers, exchange=one.exchange)
            assert not less.fits


def test_a_million_tokens_on_one_node_recompute_some_layers_only() -> None:
    """As few as leave room; the time of those that are kept is not spent."""
    run = config("tnl-1b")
    best, *_ = best_layouts(run, nodes=1, sequence_length=1024 * K, hardware=H100, fixed=FREE)
    assert best.fits and best.recompute == "full"
    assert best.recompute_layers is not None and 0 < best.recompute_layers < run.model.num_layers
    model = CostModel(run, 1024 * K, H100)
    how: Any = {"recompute": "full", "exchange": best.exchange}
    every = model.predict(best.layout, **how)
    assert every.fits and best.memory.activations_bytes > every.memory.activations_bytes
    share = best.recompute_layers / run.model.num_layers
    assert best.work.replay_s == pytest.approx(share * every.work.replay_s, rel=0.01)
    assert best.work.products_s == every.work.products_s


def test_what_is_fixed_stays() -> None:
    fixed = Fixed.parse("tensor=2,recompute=full,exchange=ring")
    found = best_layouts(config("tnl-1b"), nodes=2, sequence_length=64 * K, hardware=H100, fixed=fixed)
    assert len(found) > 3
    assert {(one.layout.tensor, one.recompute, one.exchange) for one in found} == {(2, "full", "ring")}
    fixed = Fixed.parse("tensor=1,pipeline=1,sequence=4,exchange=gather")
    (one,) = best_layouts(config("tnl-1b"), nodes=1, sequence_length=64 * K, hardware=H100, fixed=fixed)
    assert (one.layout.data, one.layout.rank_sequence_tokens) == (2, 16 * K)


def test_an_axis_that_a_mixer_cannot_be_split_on_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS, "tnl", replace(MIXERS["tnl"], axes=frozenset({"data", "pipeline"})))
    found = best_layouts(config("tnl-1b"), nodes=1, sequence_length=8 * K, hardware=H100, fixed=FREE)
    assert {(one.layout.tensor, one.layout.sequence) for one in found} == {(1, 1)}


def plan(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert cli.main(["plan", *arguments]) == code
    return capsys.readouterr().out


def test_json_of_many_points(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(capsys, str(CONFIGS / "tnl-1b.toml"), "--nodes", "1..2,3", "--length", "8K,64K", "--json")
    record: dict[str, Any] = json.loads(out)
    assert record["predicted"] is True
    points = [(point["nodes"], point["gpus"], point["sequence_length"]) for point in record["points"]]
    assert points == [(n, 8 * n, length) for n in (1, 2, 3) for length in (8 * K, 64 * K)]
    assert record["hardware"]["numbers"]["nic_gbytes_s"]["value"] == 50
    assert all(number["source"] for number in record["hardware"]["numbers"].values())
    best = record["points"][0]["layouts"][0]
    expected = best_layouts(config("tnl-1b"), nodes=1, sequence_length=8 * K, hardware=H100, fixed=FREE)[0]
    assert best["layout"] == {"tensor": 1, "pipeline": 1, "sequence": 1, "data": 8}
    assert (best["global_batch_size"], best["step_s"]) == (480, expected.step_s)
    assert best["tokens_per_s_per_gpu"] == pytest.approx(480 * 8 * K / best["step_s"] / 8)
    seconds = best["seconds"]
    assert best["compute_s"] + best["exposed_s"] == pytest.approx(best["step_s"])
    assert sum(seconds[name] for name in ("products_s", "operators_s", "elementwise_s")) < best["step_s"]
    assert best["memory"]["total_bytes"] == expected.memory.total_bytes


def test_people_see_a_prediction_and_what_it_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(CONFIGS / "tnl-1b.toml")
    out = plan(capsys, path, "--nodes", "8", "--length", "1M", "--set", "nic_gbytes_s=25")
    for words in (
        "predicted, not measured",
        "1·1·32·2",
        "sequence: states",
        "of 73.6 usable",
        "train.recompute=none data.sequence_length=1048576 train.global_batch_size=4",
        "train.global_batch_size=4 gives 4,194,304, +6.7%",
        "given by --set",
        "assumed",
        "pipeline: 1F1B",
    ):
        assert words in " ".join(out.split()), words
    table = plan(capsys, path, "--nodes", "1,2", "--length", "2M..4M")
    assert table.count("does not fit") == 1
    assert "1 node, sequences of 4M tokens: no layout fits; use at least 2 nodes\n" in table
    assert "matrix products" not in table.split("hardware numbers")[0]


def test_settings_change_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(CONFIGS / "tnl-7b.toml"), "--nodes", "8", "--length", "8K", "--layout", "tensor=8", "--json"]
    steps = []
    for setting in ([], ["--set", "nvlink_gbytes_s=45"], ["--hardware", "a100"]):
        record = json.loads(plan(capsys, *arguments, *setting))
        steps.append(record["points"][0]["layouts"][0]["step_s"])
    assert steps[0] < steps[1] and 2 * steps[0] < steps[2]


def test_exit_code_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(CONFIGS / "llama-7b.toml"), "--nodes", "1", "--length", "4M"]
    out = plan(capsys, *arguments, code=1)
    assert "does not fit" in out
    assert json.loads(plan(capsys, *arguments, "--json", code=1))["points"][0]["layouts"][0]["fits"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "0"], ["--nodes", "'0'", "1..128"]),
        (["--nodes", "8..2"], ["--nodes 8..2", "use 2..8"]),
        (["--nodes", "1", "--length", "8Q"], ["--length", "'8Q'", "8K"]),
        (["--length", "8K"], ["--length", "use --nodes 1"]),
        (["--layout", "tensor=2"], ["--layout", "--nodes"]),
        (["--set", "nic_gbytes_s=1"], ["--set", "--nodes"]),
        (["--nodes", "1", "--processes", "8"], ["--processes 8", "--nodes 1", "one rank per GPU"]),
        (["--nodes", "1", "--layout", "tensor"], ["--layout tensor", "number of ranks"]),
        (["--nodes", "1", "--layout", "tensor=0"], ["--layout tensor=0", "tensor=2"]),
        (["--nodes", "1", "--layout", "micro_batch_size=0"], ["micro_batch_size must be a number of sequences"]),
        (["--nodes", "1", "--layout", "context=2"], ["--layout context=2", "tensor, pipeline, sequence, data"]),
        (["--nodes", "1", "--layout", "recompute=all"], ["recompute", "none, selective, full"]),
        (["--nodes", "1", "--layout", "tensor=8"], ["model.num_heads = 4", "parallel.tensor = 8"]),
        (["--nodes", "1", "--layout", "pipeline=8"], ["model.num_layers = 4", "use parallel.pipeline = 4"]),
        (["--nodes", "1", "--layout", "sequence=3"], ["8 processes", "parallel.sequence = 3"]),
        (["--nodes", "1", "--layout", "tensor=2,data=8"], ["8 processes", "parallel.data = 8"]),
        (["--nodes", "3", "--layout", "sequence=24"], ["data.sequence_length = 512", "parallel.sequence = 24"]),
        (
            [
                "--nodes",
                "3",
                "--length",
                "384",
                "--layout",
                "sequence=12,tensor=1,exchange=two_level",
                "train.micro_batch_size=1",
            ],
            ["two_level", "gather"],
        ),
        (["--nodes", "4096"], ["32768 GPUs", "train.global_batch_size"]),
        (["--nodes", "1", "--set", "nic=1"], ["--set nic=1", "known: "]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("--") else "",
)
def test_impossible_requests_are_named(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(CONFIGS / "tnl-tiny.toml"), *arguments]) == UserError.EXIT_CODE
    printed = capsys.readouterr()
    assert printed.out == ""
    for word in words:
        assert word in printed.err


def test_settings_survive_in_a_copy() -> None:
    twice = with_settings(with_settings(H100, ["nic_gbytes_s=25"]), ["hop_us=5"])
    assert sorted(twice.sources) == ["hop_us", "nic_gbytes_s"]
