"""The training tasks that ``task.name`` can name, and the modules that implement them.

Entries are import strings, as for mixers. A task's module defines the type of its keys in [task]; it is imported when
a configuration is checked.
"""

from typing import Any

from lightscale.config.kinds import named_class

DEFAULT = "causal"
TASKS = {
    "causal": "lightscale.tasks.causal:Causal",
    "masked": "lightscale.tasks.masked:Masked",
    "classify": "lightscale.tasks.classify:Classify",
    "classify-image": "lightscale.tasks.classify_image:ClassifyImage",
    "diffusion": "lightscale.tasks.diffusion:Diffusion",
    "distill": "lightscale.tasks.distill:Distill",
    "sft": "lightscale.tasks.sft:SFT",
    "preference": "lightscale.tasks.preference:Preference",
}
"""Name to "module:class", a subclass of ``lightscale.tasks.interface.TrainingTask``, in a module without torch."""


def task_class(name: object) -> Any:
    """The class of the task ``name``. Raises UserError with the nearest and all known names for an unknown one."""
    return named_class("task", TASKS, name)
