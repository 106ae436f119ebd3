"""The benchmark of kernels: what it measures without a GPU, what it counts, how it judges, what it draws."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.kernels.delta_rule import delta_rule_reference
from lightscale.kernels.gla import gla_reference
from lightscale.kernels.lightning import lightning_attention_reference

ROOT = Path(__file__).resolve().parents[3]
OPERATORS = [
    "constant decay", "constant decay 64 x 32", "constant decay with LRPE", "decay per token", "decay per channel",
    "LightNet", "LightNet with LRPE", "delta rule, decay per head",
    "delta rule, decay per channel", "softmax attention",
]  # fmt: skip


@pytest.fixture(scope="module")
def tools(tools_path: Path) -> SimpleNamespace:
    """The modules of the tool, which import each other from their folder."""
    import bench
    import plot_kernels
    from benchmarks import gpu_kernels, subjects

    return SimpleNamespace(bench=bench, kernels=gpu_kernels, plot=plot_kernels, subjects=subjects)


@pytest.mark.long
def test_without_a_gpu_it_says_so_and_measures_what_is_there(
    tools: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--json", "--repeats", "2", "--shapes", "1x24", "2x16", "--save", str(tmp_path)]
    assert tools.bench.main(["kernels", *arguments]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["device"] == "cpu" and "Run the same command on a GPU" in figures["note"]
    assert {(x["operator"], x["way"], x["passes"], x["rows"], x["tokens"]) for x in figures["lines"]} == {
        (operator, way, passes, *shape)
        for operator in OPERATORS
        for way in (("flash",) if operator == "softmax attention" else ("lightscale", "recurrence"))
        for passes in ("forward", "forward + backward")
        for shape in ((1, 24), (2, 16))
    }
    for line in figures["lines"]:
        tokens = line["rows"] * line["tokens"]
        assert line["ns_per_token_head"] == pytest.approx(line["ms"] * 1e6 / (tokens * figures["heads"]))
        assert len(line["samples_ms"]) == 2
        assert line["floor_ns"] is None
    for operator in OPERATORS[:-1]:
        assert figures["difference_from_ours"][operator]["recurrence"] < 1e-5
    # What is saved is what is printed, with a mark that it is all of it; the picture is a PNG.
    json_file, picture = sorted(tmp_path.iterdir())
    assert json.loads(json_file.read_text()) == figures | {"complete": True}
    assert picture.name == json_file.with_suffix(".png").name
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "8192"], "must be ROWSxTOKENS, for example 4x8192, not '8192'"),
        (["--shapes", "0x16"], "must be ROWSxTOKENS"),
        (["--tune"], "--tune times tiles of Triton kernels, which needs a GPU"),
        (["--save", "/nowhere"], "--save /nowhere: no such folder"),
    ],
)
def test_bad_arguments_are_named(
    tools: SimpleNamespace, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = tools.bench.main(["kernels", *arguments])
    except SystemExit as refused:
        code = refused.code
    assert code in (2, 78)
    assert message in capsys.readouterr().err


def test_counts_of_the_operators(tools: SimpleNamespace) -> None:
    """For d = 128, as the page of each operator writes them out."""
    costs = tools.subjects.lightning_costs(128, 128)
    scan, products = 2 * 256 + 256, 3 * 256 + 256 + 256  # k, v → S;  q, k, v, S → o
    assert costs["forward"].bytes == scan + products
    assert costs["forward + backward"].bytes == 3 * scan + 4 * products
    # Scores with 96 partners on average, twice (once for each half of the outputs), and their product with v.
    inside = 2 * 96 * 128 * 2 + 2 * 96 * 128
    assert costs["forward"].flops == inside + 2 * 2 * 128 * 128
    assert costs["forward + backward"].flops == 4 * inside + 7 * 2 * 128 * 128
    by_token = tools.subjects.lightning_token_costs(128, 128)
    # log decays → two parts of their sums, which each of two passes reads.
    assert by_token["forward"].bytes == costs["forward"].bytes + 4 + 8 + 2 * 8
    # q and k and the states again, 2 x 2 parts of 4 bytes for each of dq and dk, written and read, dlog_decay.
    backward = 4 + 8 + 5 * 8 + 2 * 256 + 256 + 2 * 2 * 16 + 4
    assert by_token["forward + backward"].bytes == costs["forward + backward"].bytes + 4 + 8 + 2 * 8 + backward
    assert by_token["forward"].flops == costs["forward"].flops
    assert by_token["forward + backward"].flops == costs["forward + backward"].flops + 2 * 96 * (128 + 128)
    costs = tools.subjects.gla_costs(128, 128)
    assert (costs["forward"].bytes, costs["forward + backward"].bytes) == (4104, 4104 + 8712)
    assert round(costs["forward"].flops / 1000) == 639
    assert round((costs["forward + backward"].flops - costs["forward"].flops) / 1000) == 1360
    for with_lrpe, expected in ((False, (3328, 12288)), (True, (3840, 14080))):
        costs = tools.subjects.lightnet_costs(128, 128, with_lrpe=with_lrpe)
        assert (costs["forward"].bytes, costs["forward + backward"].bytes) == expected
    for by_channel, expected in ((False, (1820, 10700)), (True, (3368, 15068))):
        costs = tools.subjects.delta_rule_costs(128, 128, by_channel=by_channel)
        assert (costs["forward"].bytes, costs["forward + backward"].bytes) == expected
    # With decays of heads: two products of keys, two of values, and three through the state.
    forward = tools.subjects.delta_rule_costs(64, 128, by_channel=False)["forward"].flops
    assert forward == 2 * 2 * 32 * 64 + 2 * 2 * 32 * 128 + 3 * 2 * 64 * 128


def test_the_floor_is_that_of_bytes_or_of_arithmetic(tools: SimpleNamespace) -> None:
    rates = tools.kernels.Rates(copy_bytes_per_s=4e12, matmul_flops=800e12)
    assert rates.floor_ns(tools.subjects.Cost(bytes=4000, flops=1)) == pytest.approx(1.0)
    assert rates.floor_ns(tools.subjects.Cost(bytes=4, flops=1.6e6)) == pytest.approx(2.0)


def setting(tools: SimpleNamespace) -> Any:
    return tools.subjects.Setting(device=torch.device("cpu"), dtype=torch.float32, num_heads=2, width=8)


def swept(tools: SimpleNamespace) -> dict[str, Any]:
    """All lines beside fla-core, one tiny shape."""
    here = setting(tools)
    rates = tools.kernels.Rates(copy_bytes_per_s=1e9, matmul_flops=1e9)
    bench = tools.kernels.Bench(setting=here, timer=tools.kernels.Timer(here.device), rates=rates, repeats=1)
    *_, figures = tools.kernels.sweep(bench, [(1, 20)], with_fla=True)
    return dict(figures)


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch, tools: SimpleNamespace) -> None:
    """Kernels with fla-core's arguments and defaults, computed by our recurrences."""

    def chunk_simple_gla(
        q: Tensor, k: Tensor, v: Tensor, g: Any = None, g_gamma: Any = None, scale: float | None = None
    ) -> Any:
        assert g is None or g_gamma is None
        decay = g_gamma if g is None else g
        return lightning_attention_reference(q * (q.size(-1) ** -0.5 if scale is None else scale), k, v, decay)

    def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None) -> Any:
        return gla_reference(q * (q.size(-1) ** -0.5 if scale is None else scale), k, v, g)

    def chunk_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None) -> Any:
        return delta_rule_reference(q * (q.size(-1) ** -0.5 if scale is None else scale), k, v, g, beta)

    def fused_additive_gate(x: Tensor) -> Any:
        z = x.logcumsumexp(1)
        return (x - z).exp(), torch.cat([torch.zeros_like(z[:, :1]), z[:, :-1] - z[:, 1:]], 1), z[:, -1:]

    kernels: dict[str, Callable[..., Any]] = {
        "chunk_simple_gla": chunk_simple_gla, "chunk_gla": chunk_gla, "fused_additive_gate": fused_additive_gate,
        "chunk_gated_delta_rule": chunk_delta, "chunk_kda": chunk_delta,
    }  # fmt: skip
    monkeypatch.setattr(tools.subjects, "fla_kernel", lambda module, name: kernels[name])


@pytest.mark.usefixtures("fla")
def test_kernels_of_fla_core_are_called_so_that_they_compute_the_same(tools: SimpleNamespace) -> None:
    figures = swept(tools)
    assert figures["failures"] == []
    operators = [name.replace("64 x 32", "16 x 8") for name in OPERATORS if name != "softmax attention"]
    for operator in operators:
        assert figures["difference_from_ours"][operator]["fla-core"] < 1e-5, operator
        assert {x["way"] for x in figures["lines"] if x["operator"] == operator} == {"lightscale", "fla-core"}


def test_without_fla_core_its_lines_are_missing_and_the_verdict_says_so(
    tools: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools.subjects, "find_spec", lambda name: None)
    figures = swept(tools)
    assert {x["way"] for x in figures["lines"]} == {"lightscale", "flash"}
    assert len(figures["verdict"]["not_compared_with_fla"]) == 18
    assert figures["verdict"]["missed"] == []


def test_a_way_that_fails_costs_only_its_own_lines(tools: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(tools.subjects, "fla_kernel", lambda module, name: broken)
    figures = swept(tools)
    assert {x["way"] for x in figures["lines"]} == {"lightscale", "flash"}
    assert {x["way"] for x in figures["failures"]} == {"fla-core"}
    assert figures["failures"][0]["reason"] == "RuntimeError: no such instruction"


def test_slow_work_is_not_repeated_and_compiling_does_not_count(tools: SimpleNamespace) -> None:
    timer = tools.kernels.Timer(torch.device("cpu"))
    for times, compiled, expected in (
        ([5000.0, 1.0, 2.0, 3.0], False, [2.0, 3.0]),
        ([5000.0, 4000.0], False, [4000.0]),
        ([5000.0], True, [5000.0]),
        ([9.0, 1.0, 2.0, 3.0], True, [2.0, 3.0]),
    ):
        left = iter(times)
        timer.ms = lambda work, left=left: next(left)
        assert timer.samples_ms(lambda: None, 2, compiled=compiled) == expected
        assert not list(left)


def figures_of(tools: SimpleNamespace, *, device: str = "NVIDIA H200", fla_ns: float = 9.0, **ns: float) -> Any:
    """Made-up figures of one shape; ``ns`` by the first letters of operator and pass."""
    lines, here = [], setting(tools)
    for subject in tools.subjects.subjects(here, with_fla=True):
        ways = ["flash"] if subject.name == "softmax attention" else ["lightscale", "fla-core"]
        for number, passes in enumerate(tools.subjects.PASSES):
            for way in ways:
                own = ns.get(subject.name.replace(" ", "_"), 1.0) * (1, 2.9)[number]
                for rows, tokens in ((1, 8192), (1, 131072), (16, 8192)):
                    time_ns = {"lightscale": own, "fla-core": fla_ns, "flash": tokens / 4096}[way]
                    floor = 0.5 if way == "lightscale" else None
                    lines.append(
                        {
                            "operator": subject.name,
                            "way": way,
                            "passes": passes,
                            "rows": rows,
                            "tokens": tokens,
                            "ms": time_ns * rows * tokens * 16 / 1e6,
                            "ns_per_token_head": time_ns,
                            "floor_ns": floor,
                            "times_floor": floor and time_ns / floor,
                        }
                    )
    targets = {x.name: x.target_ns for x in tools.subjects.subjects(here, with_fla=True) if x.target_ns}
    return {
        "device": device, "dtype": "bfloat16", "heads": 16, "width": 128, "machine": {"date": "2026-01-01"},
        "copy_gb_per_s": 4300.0, "matmul_tflop_per_s": 790.0, "backend": "triton", "note": None,
        "targets_ns": targets, "lines": lines, "failures": [],
    }  # fmt: skip


def test_targets(tools: SimpleNamespace) -> None:
    """1.2 and 3.5 ns for a constant decay, and 2.5, 1.3 and 2.2 times that."""
    targets = figures_of(tools)["targets_ns"]
    assert targets["constant decay"] == {"forward": 1.2, "forward + backward": 3.5}
    for name, factor in (("decay per channel", 2.5), ("LightNet", 1.3), ("LightNet with LRPE", 2.2)):
        assert targets[name] == pytest.approx({"forward": 1.2 * factor, "forward + backward": 3.5 * factor})
    judge = tools.kernels.judge
    assert judge(figures_of(tools))["missed"] == []
    # 1.21 ns forward misses, 2.9 times that does too; other operators are allowed more.
    slow = judge(figures_of(tools, constant_decay=1.21))["missed"]
    assert slow[:1] == ["constant decay, forward, 1 x 8192: 1.21 ns, target 1.20"]
    assert len(slow) == 6
    assert judge(figures_of(tools, decay_per_channel=3.0))["missed"] == []
    assert len(judge(figures_of(tools, decay_per_channel=3.1))["missed"]) == 6
    # Targets are an H200's; to be faster than fla-core is asked for everywhere.
    assert judge(figures_of(tools, device="NVIDIA A100", constant_decay=7.0, fla_ns=30.0))["missed"] == []
    equal = judge(figures_of(tools, device="NVIDIA A100", constant_decay=9.0, fla_ns=9.0))["missed"]
    assert "constant decay, forward, 1 x 8192: 9.00 ns, fla-core 9.00" in equal


def test_what_did_not_run_is_missed_or_not_compared(tools: SimpleNamespace) -> None:
    figures = figures_of(tools)
    for way, passes in (("lightscale", "forward"), ("fla-core", "forward + backward")):
        case = {"operator": "LightNet", "way": way, "passes": passes, "rows": 1, "tokens": 131072}
        figures["lines"] = [x for x in figures["lines"] if {name: x[name] for name in case} != case]
        figures["failures"].append(case | {"reason": "does not fit in memory"})
    verdict = tools.kernels.judge(figures)
    assert verdict["missed"] == ["LightNet, forward, 1 x 131072: does not fit in memory"]
    assert verdict["not_compared_with_fla"] == ["LightNet, forward + backward, 1 x 131072"]


def test_the_table_has_a_line_for_each_measurement_and_the_verdict(tools: SimpleNamespace) -> None:
    figures = figures_of(tools, constant_decay=2.0)
    figures["verdict"] = tools.kernels.judge(figures)
    table = tools.kernels.table(figures)
    assert table.row_count == len(figures["lines"])
    assert "missed: constant decay, forward, 1 x 8192: 2.00 ns, target 1.20" in str(table.caption)


@pytest.mark.long
def test_the_picture_is_drawn_from_what_was_saved(
    tools: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kernels.json"
    file.write_text(json.dumps(figures_of(tools)))
    assert tools.plot.main([str(file)]) == 0
    assert (tmp_path / "kernels.png").read_bytes().startswith(b"\x89PNG")
    assert tools.plot.main(["missing.json"]) == 78
    assert "missing.json: no such file" in capsys.readouterr().err


def test_the_picture_shows_every_way_its_target_and_its_floor(tools: SimpleNamespace) -> None:
    figure_module: ModuleType = pytest.importorskip("matplotlib.figure")
    axes = figure_module.Figure().add_subplot()
    tools.plot._panel(axes, figures_of(tools), "LightNet", "forward")
    curves = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert curves["lightscale"] == [[8192, 1.0], [131072, 1.0]]
    assert curves["floor"] == [[8192, 0.5], [131072, 0.5]]
    assert curves["softmax attention (flash)"] == [[8192, 2.0], [131072, 32.0]]
    assert curves["target"] == [[0, 1.56], [1, 1.56]]
    # Of several rows, apart from the curve: softmax attention depends on the length, not on the tokens.
    assert curves["the same, more rows than 1"] in ([[131072, 1.0]], [[131072, 9.0]], [[131072, 2.0]])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["8K", "128K"]


def test_what_is_cut_off_keeps_what_it_has(
    tools: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def cut_off(*_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        figures = figures_of(tools) | {"verdict": {"missed": [], "not_compared_with_fla": []}}
        yield figures | {"lines": figures["lines"][:1]}
        yield figures | {"lines": figures["lines"][:2]}
        raise KeyboardInterrupt

    monkeypatch.setattr(tools.kernels, "run", cut_off)
    with pytest.raises(KeyboardInterrupt):
        tools.bench.main(["kernels", "--save", str(tmp_path)])
    (saved,) = tmp_path.iterdir()
    figures = json.loads(saved.read_text())
    assert (len(figures["lines"]), figures["complete"]) == (2, False)
