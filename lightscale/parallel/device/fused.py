"""Optional fused kernels, found at run time: NVIDIA apex and Transformer Engine."""

import importlib.metadata
from importlib.machinery import ModuleSpec, PathFinder


# What is looked for are the very modules that Megatron imports: it takes them silently where they are, and its results
# then differ in rounding, so the log has to say which ran.
def describe_fused_kernels() -> str:
    """Which optional libraries Megatron takes fused kernels from, and a wrong ``apex`` if there is one."""
    found = [
        name
        for name, module in (("apex", "apex.optimizers"), ("Transformer Engine", "transformer_engine"))
        if _has(module)
    ]
    text = f"fused kernels: {' and '.join(found) or 'none; NVIDIA apex and Transformer Engine are not installed'}"
    wrong = wrong_apex()
    return text if wrong is None else f"{text}; {wrong} is not NVIDIA's apex and is not used: {APEX_REMEDY}"


APEX_REMEDY = "uninstall it and build NVIDIA apex from source"


def wrong_apex() -> str | None:
    """The package ``apex`` that is installed and is not NVIDIA's, like PyPI's; None: there is no such."""
    if _has("apex.optimizers"):
        return None
    try:
        return f"the installed package apex {importlib.metadata.version('apex')}"
    except importlib.metadata.PackageNotFoundError:
        spec = _find("apex")
        # Without an origin it is no package, only a folder of that name on the path.
        return f"the package in {spec.origin}" if spec is not None and spec.origin is not None else None


def _has(module: str) -> bool:
    return _find(module) is not None


def _find(module: str) -> ModuleSpec | None:
    """Where ``module`` would come from; nothing is imported, because another project's package may do anything."""
    path: list[str] | None = None
    spec = None
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:length]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return spec
