"""``lightscale configs``."""

import json
from pathlib import Path

import pytest

from lightscale import cli
from lightscale.config.shipped import FOLDER, part_names, run_names, study_names

STUDIES = [
    "ablation-two-cores",
    "aspect-ratio",
    "aspect-ratio-two-cores",
    "characters-two-cores",
    "context-length",
    "eight-mixers-two-cores",
    "listops-two-cores",
    "masked-two-cores",
    "scaling-law",
    "search-two-cores",
    "two-cores",
]


def test_all_that_is_shipped_with_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["configs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["folder"], listed["extends"]) == (str(FOLDER), part_names())
    assert listed["studies"] == study_names() == STUDIES
    runs = {one["name"]: one for one in listed["configs"]}
    assert sorted(runs) == run_names()
    assert runs["hybrid-tiny"]["architecture"] == "tnl*7 llama"
    assert runs["needle-tiny"]["architecture"] == "hgrn2 llama"
    for name in ("tnl-7b", "llama-70m", "quickstart"):
        assert cli.main(["plan", name, "--json"]) == 0
        planned = json.loads(capsys.readouterr().out)
        assert runs[name]["parameters"] == planned["parameters"]["total"]
        assert runs[name]["tokens"] == planned["run"]["tokens"]
    # By its parts: embedding 50,304 x 512 and so on are in tests/models; here only that it is no rounded figure.
    assert runs["tnl-7b"]["parameters"] == 6_920_310_784
    assert runs["tnl-7b"]["sequence_length"] == 8192


def test_people_see_names_sizes_and_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["configs"]) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.split()}
    assert lines["tnl-7b"] == ["tnl", "6,920,310,784", "300,000,215,040", "8,192"]
    assert lines["lra-path-x"][-1] == "16,400" and "…" not in shown
    assert set(run_names()) <= set(lines)
    assert lines["arch:"] == part_names()["arch"]
    assert f"studies, for `lightscale study`: {' '.join(STUDIES)}" in shown
