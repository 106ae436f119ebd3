"""Nothing that is read can execute anything: what SECURITY.md promises, held in the sources."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Text that exports are made of, for transformers to run: lightscale reads it as text, and never imports it.
EXPORTED = ROOT / "lightscale/exchange/plain/transformers_model.py"
SOURCES = sorted({*(ROOT / "lightscale").rglob("*.py")} - {EXPORTED})

MODULES = {
    "pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "yaml",
    "jsonpickle",
    "transformers",
}
CALLS = {"eval", "exec", "compile", "__import__"}
# Calls whose name's end decides, with the keywords that make them safe, or unsafe.
NEEDS = {("torch", "load"): ("weights_only", True)}
FORBIDS = {"allow_pickle": True, "trust_remote_code": True, "shell": True}
ATTRIBUTES = {("os", "system"), ("os", "popen"), ("yaml", "load"), ("runpy", "run_path")}


def dotted(node: ast.expr) -> tuple[str, ...]:
    if isinstance(node, ast.Attribute):
        return (*dotted(node.value), node.attr)
    return (node.id,) if isinstance(node, ast.Name) else ("?",)


def faults(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").partition(".")[0]}
        else:
            names = set()
        yield from (f"line {node.lineno}: imports {name}" for name in names & MODULES)  # type: ignore[attr-defined]
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        keywords = {one.arg: getattr(one.value, "value", ...) for one in node.keywords}
        if name in {(call,) for call in CALLS} or name[-2:] in ATTRIBUTES:
            yield f"line {node.lineno}: calls {'.'.join(name)}"
        if name[-2:] in NEEDS and keywords.get(NEEDS[name[-2:]][0]) is not NEEDS[name[-2:]][1]:
            yield f"line {node.lineno}: {'.'.join(name)} needs {NEEDS[name[-2:]][0]}={NEEDS[name[-2:]][1]}"
        for keyword, value in FORBIDS.items():
            # A value that is computed may be the unsafe one.
            if keyword in keywords and keywords[keyword] is not (not value):
                yield f"line {node.lineno}: {'.'.join(name)}({keyword}=…)"


def test_nothing_is_unpickled_or_evaluated() -> None:
    assert [f"{path}: {fault}" for path in SOURCES for fault in faults(ast.parse(path.read_bytes()))] == []


def test_what_is_for_transformers_alone_is_not_imported() -> None:
    assert EXPORTED.is_file()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                assert EXPORTED.stem not in ast.unparse(node), path


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from yaml import load",
        "from transformers import AutoTokenizer",
        "eval(text)",
        "exec(code, {})",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=choice)",
        "subprocess.run(line, shell=True)",
        "os.system(line)",
        "make(trust_remote_code=True)",
    ],
)
def test_what_would_be_found(source: str) -> None:
    assert list(faults(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    ["model.eval()", "re.compile('a')", "torch.compile(f)", "np.load(path, allow_pickle=False)", "json.loads(text)"],
)
def test_what_is_no_fault(source: str) -> None:
    assert not list(faults(ast.parse(source)))
