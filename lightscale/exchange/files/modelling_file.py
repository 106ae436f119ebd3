"""The one modelling file of an export, made of the files in ``plain/``: it imports torch, and transformers or
safetensors, alone.

transformers and diffusers copy one file from a directory and run it, so that they are put behind each other: their
imports at its head, without those of each other.
"""

import ast
from collections.abc import Sequence
from importlib import resources

NAME = "modeling_lightscale.py"
_MODEL = (
    "operators",
    "patches",
    "diffusion",
    "mixers",
    "toeplitz",
    "softmax_mixer",
    "decay_mixer",
    "delta_mixer",
    "lion",
    "relation",
    "units",
    "model",
)
TRANSFORMERS = (*_MODEL, "transformers_config", "transformers_model", "transformers_images")
"""The modules of the file that transformers loads."""
DIFFUSERS = (*_MODEL, "diffusers_model")
"""Those of the file that diffusers loads."""
_PACKAGE = "lightscale.exchange.plain"
_HEAD = '''"""A model of lightscale, whole in one file of plain PyTorch.

Token mixers with a state for each layer (TNL, HGRN2, cosFormer2, LightNet, scalar decays, the delta rule, CausalRN,
softmax attention), those that read both ways (LION, LightNet, BiRN, softmax attention), and the classes by which
libraries load them.
Written by `lightscale export`; licence: Apache-2.0.
"""
'''


def modelling_file(modules: Sequence[str] = TRANSFORMERS) -> str:
    """Its text, of the files ``modules`` in ``plain/``."""
    imports: dict[str, set[str]] = {}
    plain: set[str] = set()
    bodies = []
    for module in modules:
        text = (resources.files(_PACKAGE) / f"{module}.py").read_text(encoding="utf-8")
        tree = ast.parse(text)
        last = 0
        # Docstring and imports stand first, as everywhere here.
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                if not str(node.module).startswith(_PACKAGE):
                    imports.setdefault(str(node.module), set()).update(map(ast.unparse, node.names))
            elif isinstance(node, ast.Import):
                plain.update(map(ast.unparse, node.names))
            elif not (isinstance(node, ast.Expr) and node is tree.body[0]):
                break
            last = node.end_lineno or 0
        heading = ast.get_docstring(tree) or ""
        comment = "\n".join(f"# {line}".rstrip() for line in heading.splitlines())
        bodies.append(f"{comment}\n\n" + "\n".join(text.splitlines()[last:]).strip("\n") + "\n")
    head = [f"import {name}" for name in sorted(plain)]
    head += [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(imports.items())]
    return "\n".join([_HEAD, *head, "", ""]) + "\n" + "\n\n".join(bodies)
