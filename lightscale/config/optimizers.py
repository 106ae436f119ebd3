"""The optimizers that ``optimizer.name`` can name, and the modules that describe them.

Entries are import strings, as for tasks. An optimizer's module defines the type of its keys in [optimizer]; it is
imported when a configuration is checked.
"""

from typing import Any

from lightscale.config.kinds import named_class

DEFAULT = "adamw"
_PACKAGE = "lightscale.training.optimizer"
OPTIMIZERS = {
    "adamw": f"{_PACKAGE}.adamw:AdamW",
    "adam": f"{_PACKAGE}.adamw:Adam",
    "lion": f"{_PACKAGE}.lion:Lion",
    "ademamix": f"{_PACKAGE}.ademamix:AdEMAMix",
    "schedulefree": f"{_PACKAGE}.schedulefree:ScheduleFree",
    "muon": f"{_PACKAGE}.muon:Muon",
    "soap": f"{_PACKAGE}.soap:SOAP",
}
"""Name to "module:class", a subclass of ``lightscale.parallel.optimizer_spec.OptimizerSpec``, in a module without
torch."""


def optimizer_class(name: object) -> Any:
    """The class of the optimizer ``name``. Raises UserError with the nearest and all known names for an unknown one."""
    return named_class("optimizer", OPTIMIZERS, name)


def length_defaults(optimizer: Any, total_steps: int) -> dict[str, Any]:
    """Keys of [optimizer] that are "none", with the constants that a run of ``total_steps`` has for them."""
    spec = optimizer_class(optimizer.name).from_config(optimizer, total_steps)
    constants = {key: getattr(spec, key, None) for key, value in optimizer if value is None}
    return {key: constant for key, constant in constants.items() if constant is not None}
