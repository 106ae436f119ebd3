"""Triton's interpreter without work that it repeats: nearly half of the time of a test of kernels.

At each launch it replaces the functions of Triton's language by its own, and restores them at the end. At each call of
a device function within the launch it looks through the language for them once more, where they have been replaced.
"""

import inspect
from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter


def patch_language_once() -> None:
    """For this process, and versions of Triton that have these names; others interpret as they are."""
    if not hasattr(interpreter, "_LangPatchScope") or hasattr(interpreter._patch_lang, "once"):
        return
    patch: Callable[[Any], Any] = interpreter._patch_lang
    modules: dict[int, frozenset[int]] = {}
    patched: set[int] = set()

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        def restore(self) -> None:
            super().restore()
            patched.clear()

    def languages(fn: Any) -> frozenset[int]:
        of_file = fn.__globals__
        if id(of_file) not in modules:
            known = (interpreter.tl, interpreter.tl.core)
            found = (value for value in of_file.values() if inspect.ismodule(value) and value in known)
            modules[id(of_file)] = frozenset(map(id, found))
        return modules[id(of_file)]

    def once(fn: Any) -> Any:
        found = languages(fn)
        if found <= patched:
            return Scope()
        patched.update(found)
        return patch(fn)

    once.once = True  # type: ignore[attr-defined]
    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = once
