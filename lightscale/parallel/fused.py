"""Optional fused kernels, found at run time: NVIDIA apex and Transformer Engine."""

import importlib.metadata
import importlib.util


def describe_fused_kernels() -> str:
    """Which optional libraries Megatron takes fused kernels from, and a wrong ``apex`` if there is one."""
    found = [
        name
        for name, module in (("apex", "apex.optimizers"), ("Transformer Engine", "transformer_engine"))
        if _has(module)
    ]
    text = f"fused kernels: {' and '.join(found) or 'none, neither NVIDIA apex nor Transformer Engine is installed'}"
    if "apex" not in found and _distribution("apex"):
        text += (
            f"; the installed package apex {_distribution('apex')} is another project than NVIDIA's and is not used: "
            "uninstall it, and build NVIDIA's from its source"
        )
    return text


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, AttributeError, ValueError):
        return False


def _distribution(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
