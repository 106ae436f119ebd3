"""lightscale trains long-context language models whose token mixing is linear in the sequence length.

    import lightscale
    model = lightscale.load("runs/quickstart")    # or "runs/x@step", or an exported directory
    model.generate("def ", tokens=50)

``lightscale.layers`` has the mixers as plain modules. Neither is imported, nor is torch, before it is asked for.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# Import strings: what this module imported would come before every part of lightscale.
_LATER = {"load": "lightscale.exchange.library", "layers": "lightscale.layers"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_LATER[name])
    return module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
