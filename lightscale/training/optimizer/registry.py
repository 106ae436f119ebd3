"""The optimizers by name. A new one is one file and one line here."""

from lightscale.config.schema import OptimizerConfig
from lightscale.parallel.optimizer_spec import OptimizerSpec
from lightscale.training.optimizer.adamw import AdamW

OPTIMIZERS: dict[str, type[OptimizerSpec]] = {"adamw": AdamW}

# Section [optimizer] has no key that names one while there is only one.
DEFAULT = "adamw"


def optimizer_spec(config: OptimizerConfig) -> OptimizerSpec:
    """The optimizer that section [optimizer] describes."""
    return OPTIMIZERS[DEFAULT].from_config(config)
