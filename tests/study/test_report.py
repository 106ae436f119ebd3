"""Laws of a study whose losses lie on a known surface, and pages that need nothing else to be read."""

import io
import json
import re
from contextlib import redirect_stdout
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from lightscale.cli import main
from lightscale.runs.run_directory import write_atomically
from lightscale.study.fits.parametric import LossSurface
from lightscale.study.study import Study
from tests.study.studies import BASE, TINY, pretend, write_study

SURFACE = LossSurface(E=1.5, A=70.0, B=21.0, alpha=0.5, beta=0.5)
# a = β / (α + β) of N_opt ∝ C^a is 1/2.
STEPS = 400
LARGER = """
[axes.size.larger]
model = { num_layers = 4, hidden_size = 96, num_heads = 2, intermediate_size = 256 }
[axes]
"train.seed" = [0, 1]
# At equal compute four sizes must have been trained.
[[rules]]
when.size = "small"
set.train.steps = 4_000
[[rules]]
when.size = "medium"
set.train.steps = 1_200
[fit]
skip = 0.01
"""


class Text(HTMLParser):
    """What a page says, and the addresses in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]
        assert tag not in ("script", "link", "iframe", "object")

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("report")
    path = write_study(folder, TINY + LARGER, base=BASE.replace("steps = 40", f"steps = {STEPS}"))
    study = Study(path, folder / "study")
    study.begin()
    for number, cell in enumerate(study.cells()):
        counts = study.counts(cell)
        steps = np.unique(np.geomspace(1, counts.steps, num=STEPS).astype(int))
        tokens = steps * float(counts.tokens_per_step)
        losses = SURFACE(np.full_like(tokens, counts.parameters), tokens) * np.exp(1e-3 * (-1) ** number)
        pretend(study, cell, losses.tolist(), steps.tolist())
        scores = {"accuracy": {"value": 100 / losses[-1], "standard_error": None}}
        result = {"run": "x", "task": "toy", "step": STEPS, "identity": "x", "requests": 1, "scores": scores}
        path = study.run(cell).evaluation / f"step-{STEPS:08d}" / "toy.json"
        path.parent.mkdir(parents=True)
        write_atomically(path, json.dumps(result))
    return study


def test_laws_of_a_study_are_those_of_its_surface(finished: Study, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(finished.definition.path), "--dir", str(finished.path), "--draws", "4"]
    assert main(["study", "fit", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((finished.path / "fit.json").read_text())
    assert (finished.path / "curves.parquet").is_file()
    laws = {(one["architecture"], one["counting"]): one for one in found["laws"]}
    assert set(laws) == {(name, counting) for name in ("tnl", "llama") for counting in ("ours", "paper")}
    for one in laws.values():
        surface = {name: one["surface"][name]["value"] for name in ("E", "A", "B", "alpha", "beta")}
        if one["counting"] == "ours":
            assert surface == pytest.approx(SURFACE.constants(), rel=0.05)
        between = one["envelope"]["between"]
        assert "refused" not in between, (one["architecture"], one["counting"], between)
        assert abs(between["identity_residual"]) < 1e-9
        assert between["num_points"] > 50
        assert between["loss"]["exponent"]["low"] <= between["loss"]["exponent"]["high"] < 0
        # What the smallest and largest models own moves the exponents, and is shown beside it.
        assert one["envelope"]["all"]["window_pflop_days"][0] < between["window_pflop_days"][0]
        assert len(one["sizes"]) == 4
        assert one["isoflop"]["parameters"]["exponent"]["value"] == pytest.approx(0.5, abs=0.1)


@pytest.fixture(scope="module")
def written(finished: Study) -> list[Path]:
    """The page of the study and its picture, as the command names them."""
    arguments = [str(finished.definition.path), "--dir", str(finished.path), "--draws", "2"]
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["study", "report", *arguments]) == 0
    return [Path(line) for line in printed.getvalue().split()]


def test_a_report_shows_all_and_loads_nothing(finished: Study, written: list[Path]) -> None:
    path, picture = written
    text = path.read_text()
    page = Text(text)
    assert picture.read_text() in text
    assert all(f"{name}: C^" in picture.read_text() for name in ("tnl", "llama"))
    assert all(address.startswith("#") for address in page.addresses)
    assert "url(http" not in text and "@import" not in text
    words = " ".join(page.words)
    for expected in ("Table 3", "published", "3.539 C^-0.0768", "between", "isoFLOP", "Evaluation against size", "toy"):
        assert expected in words, expected
    assert all(cell.name in words for cell in finished.cells())
    # One picture of all architectures, curves and parabolas of each counting of each, one of the score, two of seeds.
    assert text.count("<svg") == 1 + 2 * 2 * 2 + 1 + 2
    names = re.findall(r'<clipPath id="([^"]+)"', text)
    assert len(names) == len(set(names))


def test_seeds_stand_beside_each_other(finished: Study, written: list[Path]) -> None:
    """Cells of even number are 0.1 % above the surface, odd ones 0.1 % below; the seed is the last axis."""
    row = r"<tr><td>((?:tnl|llama) \w+)</td><td>([\d,]+)</td>" + 3 * r"<td>([\d., ]+)</td>"
    rows = re.findall(row, written[0].read_text())
    sizes = ("small", "medium", "large", "larger")
    assert [name for name, *_ in rows] == [
        f"{architecture} {size}" for architecture in ("tnl", "llama") for size in sizes
    ]
    by_name = {cell.name: cell for cell in finished.cells()}
    for name, size, each, mean, spread in rows:
        counts = finished.counts(by_name[f"{name.replace(' ', '-')}-seed0"])
        assert size == f"{counts.parameters:,}"
        end = float(SURFACE(np.array([float(counts.parameters)]), np.array([float(counts.tokens)]))[0])
        assert [float(loss) for loss in each.split(", ")] == pytest.approx([1.001 * end, 0.999 * end], abs=2e-3)
        assert (float(mean), float(spread)) == pytest.approx((end, 0.002 * end), abs=2e-3)


def test_runs_are_compared(finished: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(finished.run(cell).path) for cell in finished.cells()[:2]]
    out = tmp_path / "page.html"
    assert main(["compare", *runs, "--out", str(out)]) == 0
    page = Text(out.read_text())
    words = " ".join(page.words)
    assert "train.seed" in words and "model.hidden_size" not in words
    assert "toy: accuracy" in words
    assert out.read_text().count("<svg") == 3
    assert all(address.startswith("#") for address in page.addresses)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--out", "page.html"], "no run nowhere"),
        (["{run}", "--out", "nowhere/page.html"], "--out nowhere/page.html: no folder nowhere"),
        (["{run}", "--out", "page.html", "--smoothing", "1"], "--smoothing 1.0: must be above 1"),
        (["{new}", "--out", "page.html"], "no run has a recorded step yet"),
    ],
)
def test_comparisons_that_are_refused(
    finished: Study,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    study = Study(write_study(tmp_path), tmp_path / "study")
    cell = study.cells()[0]
    study.run(cell).create(cell.config)
    names = {"run": str(finished.run(finished.cells()[0]).path), "new": str(study.run(cell).path)}
    assert main(["compare", *(one.format(**names) for one in arguments)]) == 78
    assert message in " ".join(capsys.readouterr().err.split())
    assert not Path("page.html").exists()


def test_too_few_cells_are_refused_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    study = Study(write_study(tmp_path))
    study.begin()
    assert main(["study", "fit", "tiny.toml"]) == 78
    assert "studies/tiny has no curves" in capsys.readouterr().err
    pretend(study, study.cells()[0], [5.0 - 0.01 * step for step in range(40)])
    assert main(["study", "fit", "tiny.toml"]) == 78
    assert "an envelope needs runs of at least 3 sizes; there are 1" in capsys.readouterr().err
    # The page shows what there is all the same.
    assert main(["study", "report", "tiny.toml"]) == 0
    assert "needs runs of at least 3 sizes" in Path("studies/tiny/report.html").read_text()


def test_sizes_that_hardly_differ_have_no_law(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The switches of an ablation change a model's size by a little: no exponent of N follows from that."""
    model = "num_layers = 1, hidden_size = 16, num_heads = 2, intermediate_size ="
    sizes = "".join(f"w{width} = {{ model = {{ {model} {width} }} }}\n" for width in (32, 40, 48))
    study = Study(write_study(tmp_path, f"[axes.size]\n{sizes}"), tmp_path / "study")
    study.begin()
    for number, cell in enumerate(study.cells()):
        pretend(study, cell, [5.0 - (0.05 + 0.01 * number) * step for step in range(40)])
    where = [str(study.definition.path), "--dir", str(study.path)]
    assert main(["study", "fit", *where]) == 78
    counts = [study.counts(cell).parameters for cell in study.cells()]
    error = " ".join(capsys.readouterr().err.split())
    assert f"from N = {counts[0]:,} to {counts[-1]:,} it grows by a factor of {counts[-1] / counts[0]:.2f}" in error
    assert main(["study", "report", *where]) == 0
    text = (study.path / "report.html").read_text()
    # Nor seeds, of which there is one.
    assert "a law of N needs models" in text and "Table 3" not in text and "several seeds" not in text


def test_losses_of_several_tasks_have_no_law(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_task = """
[axes.task]
causal = {}
masked = { task = { name = "masked" }, model = { mixer = "llama", mixer_options.llama.causal = false } }
"""
    study = Study(write_study(tmp_path, TINY + of_task), tmp_path / "study")
    study.begin()
    for cell in study.cells():
        pretend(study, cell, [5.0, 4.0], [1, 2])
    assert main(["study", "fit", str(study.definition.path), "--dir", str(study.path)]) == 78
    assert "task.name is causal and masked in its cells, and their losses are not" in capsys.readouterr().err
