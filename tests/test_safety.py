"""Nothing that is read can execute anything: what SECURITY.md promises, held in the sources."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightscale.launch.rank_facts import VARIABLES

ROOT = Path(__file__).resolve().parents[1]
# Text that exports are made of, for transformers and diffusers to run: lightscale reads it, and never imports it.
PLAIN = ROOT / "lightscale/exchange/plain"
EXPORTED = {*PLAIN.glob("transformers_*.py"), *PLAIN.glob("diffusers_*.py")}
SOURCES = sorted({*(ROOT / "lightscale").rglob("*.py")} - EXPORTED)

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


# Who passes the whole environment on to a process that it starts, or looks names up in it; nobody writes it.
WHOLE_ENVIRONMENT = {
    "launch/chaos/harness/training.py",
    "launch/launcher/torchrun.py",
    "launch/local/runner.py",
    "launch/slurm/allocation.py",
    "launch/slurm/client.py",
    "study/launchers.py",
    "training/checkpoints/exports.py",
}
# `gettempdir`: of the cache of kernels, which trusts a folder of its user alone (kernels/common/triton/cache.py).
TEMPORARY = {"TemporaryFile", "gettempdir", "mkdtemp", "TemporaryDirectory", "NamedTemporaryFile"}


def environments(tree: ast.AST) -> int:
    """Places where all of the environment is taken: its items, a copy, or by **."""
    text = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Call, ast.Dict))]
    wholes = ("os.environ.items()", "os.environ.copy()", "dict(os.environ)", "environ.items()")
    return sum(one in wholes or (one.startswith("{") and "**os.environ" in one) for one in text)


def test_only_processes_that_are_started_get_the_whole_environment() -> None:
    """Else a secret in it may be written: records have variables by name (`VARIABLES` in launch/rank_facts.py)."""
    found = {
        str(path.relative_to(ROOT / "lightscale")) for path in SOURCES if environments(ast.parse(path.read_bytes()))
    }
    assert found == WHOLE_ENVIRONMENT
    assert not [name for name in VARIABLES if re.search("KEY|TOKEN|SECRET|PASS", name)]


def test_files_have_the_rights_of_the_umask_and_temporary_ones_no_known_names() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith("/tmp"), path
            if isinstance(node, ast.Call):
                name = dotted(node.func)
                assert name[-1] not in ("chmod", "fchmod", "umask", "mktemp"), path
                assert name[0] != "tempfile" or name[-1] in TEMPORARY, path


def test_what_is_for_transformers_alone_is_not_imported() -> None:
    assert EXPORTED
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                assert not [one for one in EXPORTED if one.stem in ast.unparse(node)], path


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
