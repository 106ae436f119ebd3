"""Bad conversations and preferences: each fault in each file format, anywhere, names file, place, key and remedy."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lightscale.data_pipeline.preparation.corpus import load_corpus
from lightscale.data_pipeline.preparation.prepare import prepare
from lightscale.errors import UserError

Record = dict[str, Any]
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'fail' %}{{ raise_exception('not like this') }}{% endif %}"
    "{% if m.content == 'loop' %}{% for one in range(1000) %}{% for two in range(1000) %}{% endfor %}{% endfor %}"
    "{% endif %}{% if m.role == 'assistant' %}={% generation %}{{ m.content }}.{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
MOST_TOKENS = 60


def talk(question: str, answer: str = "yes") -> Record:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


CHAT: dict[str, tuple[Record, str, str]] = {
    "no role": ({"messages": [{"role": None, "content": "x"}]}, "messages", "role"),
    "unknown shape": ({"text": "x"}, "no conversation", "expected one of messages"),
    "empty": ({"messages": []}, "messages", "remove"),
    "nothing counts": ({"messages": [{"role": "user", "content": "x"}]}, "no token counts for the loss", "remove"),
    "too long": (talk("x" * MOST_TOKENS), f"more than chat.max_tokens = {MOST_TOKENS}", "raise it"),
    "template fails": (talk("fail"), "t.jinja: the template fails (not like this)", "correct"),
    "template loops": (talk("loop"), "loop items and calls", "correct its loops"),
}
PREFERENCES: dict[str, tuple[Record, str, str]] = {
    "equal": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal", "remove the pair"),
    "no rejected": ({"prompt": "a", "chosen": "b"}, "rejected", ""),
    "too long": (
        {"prompt": "x" * MOST_TOKENS, "chosen": "b", "rejected": "c"},
        f"more than chat.max_tokens = {MOST_TOKENS}",
        "raise it",
    ),
    "template loops": ({"prompt": "loop", "chosen": "b", "rejected": "c"}, "loop items and calls", "correct its loops"),
}
CASES = [("chat", name) for name in CHAT] + [("preference", name) for name in PREFERENCES]
SUFFIXES = ("jsonl", "jsonl.gz", "json", "parquet")


def write(path: Path, records: list[Record]) -> None:
    lines = "\n".join(map(json.dumps, records)).encode()
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    elif path.suffix == ".parquet":
        # Columns of text: lists and objects as their JSON.
        names = sorted({name for record in records for name in record})
        columns = {
            name: [one if isinstance(one, str | None) else json.dumps(one) for one in (r.get(name) for r in records)]
            for name in names
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    else:
        path.write_bytes(lines)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(("kind", "name"), CASES, ids=[" ".join(case) for case in CASES])
def test_a_fault_names_file_place_key_and_remedy(kind: str, name: str, suffix: str, tmp_path: Path) -> None:
    fault, found, remedy = (CHAT if kind == "chat" else PREFERENCES)[name]
    good = [
        talk(f"{number}") if kind == "chat" else {"prompt": f"{number}", "chosen": "a", "rejected": "b"}
        for number in range(5)
    ]
    place = random.Random(f"{kind} {name} {suffix}").randrange(len(good) + 1)
    file = tmp_path / f"talks.{suffix}"
    write(file, [*good[:place], fault, *good[place:]])
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    (tmp_path / "corpus.toml").write_text(
        f'tokenizer = "ascii"\n[sources.a]\npaths = ["{file.name}"]\nformat = "{kind}"\n'
        f'chat = {{template = "t.jinja", max_tokens = {MOST_TOKENS}}}\n'
    )
    with pytest.raises(UserError) as caught:
        prepare(load_corpus(tmp_path / "corpus.toml"), tmp_path / "store")
    message = str(caught.value)
    begin = 1 + sum(len(json.dumps(one)) + len(", ") for one in good[:place])
    where = {"parquet": f"row {place}", "json": f"line 1, byte {begin}"}.get(suffix, f"line {place + 1}")
    assert f"{file}, {where}: sources.a: " in message
    assert found in message and remedy in message
    assert "\n" not in message.strip()
    assert not (tmp_path / "store").exists()
