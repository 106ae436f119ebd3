"""The chat template of a trained model: recorded by the sources of its store, and kept in its run.

A source has it in its attribute ``chat``; runs and exports in the file ``chat.json``, with the same keys. Exports of
other programs have the files of a tokenizer alone (``files.py``).
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_args

from lightscale.data_pipeline.chat.counted import Loss
from lightscale.data_pipeline.chat.files import DEFAULT, TOOL_USE, TemplateFiles, template_at
from lightscale.data_pipeline.chat.prepared import Chat
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError, shortened
from lightscale.files import NotRegular, read_regular

FILE = "chat.json"
"""In the directory of a run or an export."""
KEYS = ("templates", "special_tokens", "variables")
"""Keys of ``Chat.description`` that decide the text of a conversation."""
_MOST_BYTES = 2**24


def template_of(store: TokenStore, sources: Collection[str] = ()) -> Chat | None:
    """The one chat template of ``sources`` of ``store``; None: no source has conversations.

    ``sources``: those that a model is trained on; none: all but those with validation data.

    Raises ``UserError`` where two sources have different ones, or where one is damaged.
    """
    chosen = sources or [name for name, source in store.sources.items() if source.split == "train"]
    found = {name: chat for name in chosen if (chat := store.source(name).chat) is not None}
    if not found:
        return None
    first, *others = found
    for name in others:
        if different := [key for key in KEYS if found[name].get(key) != found[first].get(key)]:
            raise UserError(
                f"{store.title}: the conversations of source {name} have another chat template than those of source "
                f"{first} (different: {', '.join(different)}), and a model answers with one template; prepare both "
                "with the same chat.template and chat.variables, or set data.sources to one of them"
            )
    return chat_of(found[first], origin=f"the chat template of source {first} in {store.title}")


def kept_template(directory: Path) -> Chat | None:
    """The template of the run or export in ``directory``; None: it has none. Raises ``UserError`` for a damaged one."""
    if (kept := read_template(directory / FILE)) is not None:
        return kept
    found = template_at(directory)
    return None if found is None else Chat(files=found)


def read_template(path: Path) -> Chat | None:
    """The template in the file ``path`` of a run; None: no such file. Raises ``UserError`` for a damaged one."""
    try:
        content = json.loads(read_regular(path, what="a chat template", most_bytes=_MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, NotRegular) as error:
        raise UserError(f"{path}: damaged ({shortened(str(error), 200)}); remove it, and use --template") from error
    return chat_of(content, origin=str(path))


def chat_of(record: Any, *, origin: str) -> Chat:
    """The template that ``record`` describes (``Chat.description``). Raises ``UserError`` that names ``origin``."""
    parts: dict[str, Any] = {key: record.get(key) if isinstance(record, Mapping) else None for key in KEYS}
    templates, special, variables = parts.values()
    is_right = (
        all(isinstance(part, Mapping) for part in parts.values())
        and DEFAULT in templates
        and set(templates) <= {DEFAULT, TOOL_USE}
        and all(isinstance(text, str) for text in (*templates.values(), *special.values()))
        and record.get("loss") in get_args(Loss)
    )
    if not is_right:
        raise UserError(f"{origin}: damaged: expected tables {', '.join(KEYS)} and loss; prepare the store again")
    chat = Chat(
        files=TemplateFiles(origin=origin, templates=dict(templates), special_tokens=dict(special)),
        variables=dict(variables),
        loss=record["loss"],
        has_pairs=bool(record.get("pairs")),
    )
    chat.check()
    return chat
