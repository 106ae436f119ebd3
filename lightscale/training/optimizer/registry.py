"""The optimizers by name. A new one is one file and one line here."""

from lightscale.config.schema import OptimizerConfig
from lightscale.parallel.optimizer_spec import OptimizerSpec
from lightscale.training.optimizer.adamw import Adam, AdamW

OPTIMIZERS: dict[str, type[OptimizerSpec]] = {"adamw": AdamW, "adam": Adam}


def optimizer_spec(config: OptimizerConfig) -> OptimizerSpec:
    """The optimizer that section [optimizer] describes."""
    return OPTIMIZERS[config.name].from_config(config)
