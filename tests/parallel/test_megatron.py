"""Megatron is imported in one file, which keeps Dynamo and Inductor unloaded."""

import ast
import subprocess
import sys
from pathlib import Path

LOADED = """
import sys
import torch
compile = torch.compile
import lightscale.training.train
print(sorted({"torch._dynamo", "torch._inductor.compile_fx"} & set(sys.modules)), torch.compile is compile)
"""


def test_only_one_file_imports_megatron(root: Path) -> None:
    importing = {
        str(path.relative_to(root))
        for path in (root / "lightscale").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        if name.partition(".")[0] == "megatron"
    }
    assert importing == {"lightscale/parallel/megatron.py"}


def test_what_ranks_import_compiles_nothing() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LOADED], capture_output=True, text=True, check=True)
    assert done.stdout == "[] True\n"
