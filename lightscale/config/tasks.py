"""The tasks that ``task.name`` can name, what a model is trained to predict, and where each is implemented.

Entries are import strings, as those of mixers: a task's module has the type of its keys in [task], which is imported
where a configuration is checked.
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
    """The class of the task ``name``. UserError with the nearest and all known names where there is none."""
    if not isinstance(name, str) or name not in TASKS:
        near = difflib.get_close_matches(str(name), TASKS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"no task is called {shortened(str(name))}; {hint}known: {', '.join(TASKS)}")
    module, _, attribute = TASKS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
