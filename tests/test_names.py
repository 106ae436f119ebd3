"""One name for one thing: those rules of CONTRIBUTING.md, "Words", that a program can hold."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "lightscale").rglob("*.py"))

MODULES = {
    "crew",
    "company",
    "keeper",
    "tally",
    "page",
    "telescope",
    "findings",
    "carry",
    "pieces",
    "fragments",
    "sample",
}
# In what a user or a reader sees: the phrase, and what to write.
PHRASES = {
    r"left out": "skipped",
    r"would do\b": "use …",
    r"must look": "needs attention",
    r"a person\b": "the user, or nobody",
}
# Words of identifiers that stand for something else in the field.
IDENTIFIERS = re.compile(
    r"(?:^|_)(?:crew|company|keeper|tally|telescope|carry|piece|pieces|fragment|fragments|finding|findings|"
    r"stretch|stretches)(?:_|$)"
)


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    return [(path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))) for path in FILES]


def identifiers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every name that a file gives to something, and its line."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def snake(name: str) -> str:
    """'TensorPiece' -> 'tensor_piece'. sentencepiece is a package."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.replace("SentencePiece", "Sentencepiece")).lower()


def test_no_two_public_classes_have_one_name() -> None:
    places = defaultdict(list)
    for path, tree in trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_modules_are_named_in_the_fields_words() -> None:
    assert [str(path) for path in FILES if path.stem in MODULES] == []


def test_identifiers_are_in_the_fields_words() -> None:
    found = [
        f"{path}:{line} {name}"
        for path, tree in trees()
        for name, line in identifiers(tree)
        if IDENTIFIERS.search(snake(name))
    ]
    assert found == []


def test_grid_is_tritons_launch_grid_in_kernels() -> None:
    """Elsewhere it is that of documents in several dimensions (``model.grid``)."""
    found = [
        f"{path}:{line} {name}"
        for path, tree in trees()
        if "kernels" in path.parts and "triton" not in path.parts
        for name, line in identifiers(tree)
        if re.search(r"(?:^|_)grids?(?:_|$)", snake(name))
    ]
    assert found == []


def test_strings_are_plain_technical_english() -> None:
    found = [
        f"{path}:{node.lineno}: {node.value!r}: write {instead!r}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for phrase, instead in PHRASES.items()
        if re.search(phrase, node.value)
    ]
    assert found == []
