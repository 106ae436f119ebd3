"""The copy of the tokenizer in a run: the directory of a run suffices to use its model without the store.

That is its tokenizer, the chat template of its conversations, and the names of the classes that it learns to tell
apart. `keep_tokenizer` and `keep_template` are called at every start, so that runs from before, which keep none, get
theirs when they are resumed.
"""

from collections.abc import Collection, Sequence
from typing import Any

from lightscale.data_pipeline.chat.prepared import Chat
from lightscale.data_pipeline.chat.recorded import KEYS, read_template
from lightscale.data_pipeline.store.format import TOKENIZER_DIR
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.tokenizers import copy_tokenizer, files_sha256
from lightscale.data_pipeline.whole_files import write_json
from lightscale.errors import UserError
from lightscale.parallel.agreement import Agreement
from lightscale.runs.journal import Journal
from lightscale.runs.run_directory import RunDirectory


def keep_tokenizer(
    run: RunDirectory, store: TokenStore, journal: Journal, ranks: Agreement, allow: Collection[str]
) -> None:
    """Copy the tokenizer of `store` to `run`, unless it is there and whole; collective over `ranks`.

    Raises UserError, on all ranks, if the run keeps another tokenizer and `allow` does not name `data`, or if the files
    of the store have changed since it was written.
    """

    def keep() -> None:
        now, kept = store.tokenizer, _kept_sha256(run, journal)
        if kept == now.sha256:
            return
        if kept is not None and "data" not in allow:
            raise UserError(
                f"{run.tokenizer} is a different tokenizer (sha256 {kept[:16]}…) than in {store.path} ({now.name}, "
                f"sha256 {now.sha256[:16]}…); use a store prepared with the tokenizer of the run, start a new run with "
                "--run, or accept the other tokenizer at your own risk with --allow-change data"
            )
        copy_tokenizer(store.path / TOKENIZER_DIR, run.tokenizer, sha256=now.sha256)
        if kept is not None:
            journal.event("tokenizer_changed", before=kept, now=now.sha256)

    ranks.on_first(keep)


def keep_template(
    run: RunDirectory, chat: Chat | None, journal: Journal, ranks: Agreement, allow: Collection[str]
) -> None:
    """Write the chat template of the run's conversations to `run`, where it has some; collective over `ranks`.

    Raises UserError, on all ranks, if the run keeps another template and `allow` does not name `data`.
    """

    def keep() -> None:
        if chat is None:
            return
        now, kept = chat.description(), _kept_template(run, journal)
        if kept == now:
            return
        different = ", ".join(key for key in KEYS if kept is not None and kept[key] != now[key])
        if different and "data" not in allow:
            raise UserError(
                f"{run.chat} is another chat template than {chat.files.origin} (different: {different}); use "
                "a store prepared with the template of the run, start a new run with --run, or accept the other "
                "template at your own risk with --allow-change data"
            )
        write_json(run.chat, now)
        if different:
            journal.event("chat_template_changed", before=kept, now=now)

    ranks.on_first(keep)


def keep_classes(run: RunDirectory, names: Sequence[str], ranks: Agreement) -> None:
    """Write the `names` of classes, by number, to `run`, where there are any; collective over `ranks`."""

    def keep() -> None:
        if names:
            write_json(run.classes, list(names))

    ranks.on_first(keep)


def _kept_sha256(run: RunDirectory, journal: Journal) -> str | None:
    """Of the tokenizer in the run; None: there is none, or it is damaged."""
    if not run.tokenizer.exists():
        return None
    try:
        return files_sha256(run.tokenizer)
    except UserError as error:
        journal.say(f"{error}; copied again from the token store")
        return None


def _kept_template(run: RunDirectory, journal: Journal) -> dict[str, Any] | None:
    """Of the run; None: there is none, or it is damaged."""
    try:
        kept = read_template(run.chat)
    except UserError as error:
        journal.say(f"{error}; written again from the token store")
        return None
    return None if kept is None else kept.description()
