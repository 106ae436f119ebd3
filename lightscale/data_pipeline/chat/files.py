"""Chat templates and special tokens in the files of a Hugging Face tokenizer.

chat_template.jinja     the template; with additional_chat_templates/NAME.jinja beside it
tokenizer_config.json   chat_template: a text, or a list of {"name", "template"}; bos_token and others
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightscale.data_pipeline.chat.named import NAMED
from lightscale.errors import UserError, shortened
from lightscale.files import read_regular

DEFAULT, TOOL_USE = "default", "tool_use"
"""Templates of a tokenizer: that of all conversations, and that of conversations with tools, if it has one."""
TEMPLATE_FILE = "chat_template.jinja"
_CONFIG, _MORE = "tokenizer_config.json", "additional_chat_templates"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names that templates have for them."""
_MOST_BYTES = 2**24


@dataclass(frozen=True, kw_only=True)
class TemplateFiles:
    """All that decides the texts of conversations."""

    origin: str
    """For messages: a name or a path."""
    templates: dict[str, str]
    """By ``DEFAULT`` and ``TOOL_USE``."""
    special_tokens: dict[str, str] = field(default_factory=dict)
    """Spellings by the names that templates have for them, such as bos_token."""


def find_template(choice: str | None, tokenizer: Path | None, *, key: str = "chat.template") -> TemplateFiles:
    """The template that ``choice`` names: one of ``NAMED``, or the path of a file or of a directory of a tokenizer.

    ``choice`` None: that of ``tokenizer``, the path of a tokenizer's file; ``key``: of ``choice``, for messages.
    Raises ``UserError``.
    """
    beside = None if tokenizer is None else tokenizer.parent
    if choice in NAMED:
        config = {} if beside is None else _config(beside / _CONFIG)
        return TemplateFiles(origin=choice, templates={DEFAULT: NAMED[choice]}, special_tokens=_special(config))
    names = ", ".join(NAMED)
    if choice is None and beside is None:
        raise UserError(f"{key}: the tokenizer has no file with a chat template; use {names} or a file's path")
    path = Path(choice) if choice is not None else beside
    assert path is not None
    if not path.exists():
        raise UserError(f"{key} = {choice}: no such file; use {names} or the path of a file")
    if (found := template_at(path)) is None:
        raise UserError(
            f"{path}: no chat template: neither {TEMPLATE_FILE} nor {_CONFIG} with chat_template; set {key} to "
            f"{names} or a file's path"
        )
    return found


def template_at(path: Path) -> TemplateFiles | None:
    """The template in the file ``path``, or of the tokenizer in the directory ``path``; None: it has none."""
    directory = path if path.is_dir() else path.parent
    config = _config(directory / _CONFIG if path.suffix != ".json" else path)
    if path.is_file() and path.suffix != ".json":
        templates = {DEFAULT: _read(path)}
    elif (directory / TEMPLATE_FILE).is_file() and path.is_dir():
        more = directory / extra_template(TOOL_USE)
        templates = {DEFAULT: _read(directory / TEMPLATE_FILE), **({TOOL_USE: _read(more)} if more.is_file() else {})}
    else:
        templates = _templates(config.get("chat_template"), path)
    if DEFAULT not in templates:
        return None
    return TemplateFiles(origin=str(path), templates=templates, special_tokens=_special(config))


def extra_template(name: str) -> str:
    """The file of a template other than the default, in the directory of its tokenizer."""
    return f"{_MORE}/{name}.jinja"


def _templates(found: Any, path: Path) -> dict[str, str]:
    if isinstance(found, str):
        return {DEFAULT: found}
    if isinstance(found, list):
        try:
            named = {one["name"]: one["template"] for one in found}
        except (KeyError, TypeError) as error:
            raise UserError(f"{path}: chat_template: a list of name and template is expected ({error!r})") from error
        return {name: text for name, text in named.items() if name in (DEFAULT, TOOL_USE) and isinstance(text, str)}
    return {}


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({shortened(str(error), 200)}); correct it") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object; correct it")
    return content


def _special(config: dict[str, Any]) -> dict[str, str]:
    """Spellings of the special tokens, which files write as texts or as objects."""
    found = {name: config.get(name) for name in SPECIAL_TOKENS}
    spelled = {name: one.get("content") if isinstance(one, dict) else one for name, one in found.items()}
    return {name: text for name, text in spelled.items() if isinstance(text, str)}


def _read(path: Path) -> str:
    try:
        return read_regular(path, what="a chat template", most_bytes=_MOST_BYTES, follow_links=True).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read the file ({error}); expected a chat template") from error
