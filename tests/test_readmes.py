"""READMEs and pages name what exists; every folder of the package that needs a README has one, of one screen."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("lightscale", "tools", "tests", "benchmarks", "docs")
# Of `docs`, pages that name files of the repository.
# Whose READMEs are short; `benchmarks` has results in its own.
SHORT = ("lightscale", "tools", "tests")
READMES = sorted(
    {
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(path for name in FOLDERS for path in (ROOT / name).rglob("README.md")),
        *(ROOT / "docs").rglob("*.md"),
    }
)
MOST_LINES = 60
# Of the first page.
MOST_LINES_ON_TOP = 130

# What can be a file or a folder of the repository: `engine.py`, `../common/angles.py`, `launch/slurm`, `sequence/`.
# Capitals are placeholders (`RUN/job.sh`); files that programs write (`status.json`) are not looked for.
NAME = re.compile(r"(?:\.\./)*[a-z0-9_][a-z0-9_./-]*(?:\.py|\.sh|/)|(?:lightscale|tests|tools)(?:/[a-z0-9_.-]+)+")
CONFIGURATION = re.compile(r"(?:configs|arch|recipe|size)/[A-Za-z0-9_./-]+\.toml")
QUOTED = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#:\s]+)\)")
MADE_BY_RUNS = {"logs/", "tensorboard/", "tokenizer/"}
LISTED = re.compile(r"^ {4}((?:[a-z0-9_/]+\.(?:py|sh)(?:, )?)+)", re.MULTILINE)


def named(text: str) -> set[str]:
    """The files and folders that a README names in backticks, in links, or at the start of the lines of a list."""
    found = set(LINK.findall(text))
    for quoted in QUOTED.findall(text):
        for part in re.split(r"[ ,=]+", quoted):
            if NAME.fullmatch(part) or CONFIGURATION.fullmatch(part):
                found.add(part)
    for names in LISTED.findall(text):
        found.update(name for name in names.split(", ") if name)
    return found


def missing(readme: Path) -> list[str]:
    """What a README names and does not exist, from its folder, the package, the repository or a folder it names."""
    names = named(readme.read_text(encoding="utf-8")) - MADE_BY_RUNS
    if readme.is_relative_to(ROOT / "docs"):
        # Pages name the files of runs, exports and users too.
        names = {name for name in names if name.startswith((*(f"{folder}/" for folder in FOLDERS), "../"))}
    bases = {readme.parent, ROOT / "lightscale", ROOT}
    for _ in range(2):  # `lightning/` is in `kernels/`, and `triton/` in that.
        paths = {base / name for base in bases for name in names}
        bases |= {path if path.is_dir() else path.parent for path in paths if path.exists()}
    return sorted(name for name in names if not any((base / name).exists() for base in bases))


def folders_without(root: Path) -> list[str]:
    """Folders with three or more files of code, and no README."""
    found = []
    for folder in sorted(path for path in (root, *root.rglob("*")) if path.is_dir() and path.name != "__pycache__"):
        files = [path for path in folder.iterdir() if path.suffix in (".py", ".sh")]
        if len(files) >= 3 and not (folder / "README.md").is_file():
            found.append(str(folder.relative_to(root)))
    return found


@pytest.mark.parametrize("readme", READMES, ids=[str(path.relative_to(ROOT)) for path in READMES])
def test_what_a_readme_names_exists(readme: Path) -> None:
    assert missing(readme) == []


def test_every_folder_of_code_has_a_readme() -> None:
    assert folders_without(ROOT / "lightscale") == []


def too_long(root: Path) -> list[str]:
    """READMEs with more lines than one reads before a change."""
    readmes = [root / "README.md", *(path for name in SHORT for path in sorted((root / name).rglob("README.md")))]
    return [
        str(readme.relative_to(root))
        for readme in readmes
        if len(readme.read_text(encoding="utf-8").splitlines())
        > (MOST_LINES_ON_TOP if readme.parent == root else MOST_LINES)
    ]


def test_a_readme_of_a_folder_has_at_most_60_lines() -> None:
    assert too_long(ROOT) == []


def test_a_long_readme_is_found(tmp_path: Path) -> None:
    for name, lines in ((".", 131), ("lightscale/short", 60), ("lightscale/long", 61)):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "README.md").write_text("line\n" * lines)
    assert too_long(tmp_path) == ["README.md", "lightscale/long/README.md"]
    (tmp_path / "README.md").write_text("line\n" * 130)
    assert too_long(tmp_path) == ["lightscale/long/README.md"]


def test_a_wrong_name_and_a_missing_readme_are_found(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).touch()
    assert folders_without(tmp_path) == ["."]
    readme = tmp_path / "README.md"
    readme.write_text(
        "`a.py`, `gone.py N`, [it](lost.md), `RUN/job.sh`, `status.json`, `parallel/nowhere/`, `launch/slurm/`\n\n"
        "    b.py, absent.py   what they do\n"
        "`tests/nothing`, `arch/none.toml`, `configs/arch/tnl.toml`\n"
    )
    expected = ["absent.py", "arch/none.toml", "gone.py", "lost.md", "parallel/nowhere/", "tests/nothing"]
    assert missing(readme) == expected
    assert folders_without(tmp_path) == []
