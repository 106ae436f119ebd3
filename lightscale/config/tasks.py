"""The training tasks that ``task.name`` can name, and the modules that implement them.

Entries are import strings, as for mixers. A task's module defines the type of its keys in [task]; it is imported when
a configuration is checked.
"""

import difflib
import importlib
from typing import Any

from lightscale.errors import UserError, shortened

DEFAULT = "causal"
TASKS = {
    "causal": "lightscale.tasks.causal:Causal",
    "masked": "lightscale.tasks.masked:Masked",
    "classify": "lightscale.tasks.classify:Classify",
}
"""Name to "module:class", a subclass of ``lightscale.tasks.interface.TrainingTask``, in a module without torch."""


def task_class(name: object) -> Any:
    """The class of the task ``name``. Raises UserError with the nearest and all known names for an unknown one."""
    if not isinstance(name, str) or name not in TASKS:
        near = difflib.get_close_matches(str(name), TASKS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"unknown task {shortened(str(name))}; {hint}known: {', '.join(TASKS)}")
    module, _, attribute = TASKS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
