"""Configurations, corpus files and settings of jobs with anything in them: valid or refused in few lines, at once."""

import copy
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from lightscale.config.arithmetic import near_divisor, near_multiple
from lightscale.config.fields import describe_fields, field_type_text, table_type, toml_value
from lightscale.config.files import load, to_toml
from lightscale.config.layout import check_layout
from lightscale.config.schema import RunConfig
from lightscale.config.toml import TomlError, parse_toml
from lightscale.data_pipeline.preparation.corpus import Corpus, SourceConfig, load_corpus, make_corpus
from lightscale.errors import UserError
from lightscale.launch.settings import LaunchSettings, load_settings

MOST_S = 1.0
MOST_CHARACTERS = 30_000
RUN: dict[str, Any] = {
    "model": {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "vocab_size": 512},
    "data": {
        "store": "store",
        "sequence_length": 64,
        "sources": {"a": 1.0},
        "curriculum": [{"sequence_length": 32, "until_tokens": 100}],
        "validation": {"v": {"source": "b"}},
    },
    "optimizer": {"lr": 1e-3},
    "train": {"steps": 100, "global_batch_size": 4},
}
CORPUS: dict[str, Any] = {"sources": {"a": {"paths": ["a.txt"], "language": "en", "filters": {"size": {"min": 3}}}}}
ENDLESS = "9" * 5000


def fields(section: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys of all fields, those of tables too; a table of the user's names has one of them."""
    for name, field in section.model_fields.items():
        inner, named = table_type(field.annotation)
        yield (*path, name)
        if inner is not None:
            yield from fields(inner, (*path, name, "v") if named else (*path, name))
        elif get_origin(field.annotation) is dict or any(get_origin(one) is dict for one in get_args(field.annotation)):
            yield (*path, name, "v")


INTEGERS = st.one_of(
    st.integers(-3, 200),
    st.sampled_from([2**n + d for n in (20, 24, 30, 31, 32, 53, 63, 64, 300) for d in (-1, 0, 1)]),
    st.integers(),
    st.just(2**14_000),  # hypothesis itself cannot print larger ones
)
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "",
            "none",
            "auto",
            "\0",
            "a\0b",
            "tnl*99999999999",
            f"tnl*{ENDLESS}",
            f"run@{ENDLESS}",
            "x" * 300,
            "x" * 10**6,
            *[
                "~nobody/x",
                "/",
                "..",
                "-x",
                "1-00:00:00",
                f"{ENDLESS}:00:00",
                "٣",
                "tnl",
                "tnl*2",
                "\u202e",
                "a\nb",
                "*",
            ],
        ]
    ),
)
FLAT = st.one_of(INTEGERS, st.floats(), TEXTS, st.booleans(), st.just(1e308), st.just(5e-324))
VALUES = st.one_of(
    FLAT,
    FLAT,
    st.lists(FLAT, max_size=4),
    st.dictionaries(TEXTS, FLAT, max_size=3),
    st.recursive(FLAT, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=2))),
    st.sampled_from([[1] * 20_000, ["tnl"] * 20_000, {str(n): n for n in range(20_000)}, ["x" * 10**5] * 5]),
)


def put(table: dict[str, Any], key: tuple[str, ...], value: object) -> dict[str, Any]:
    """A copy of `table` with `value` at `key`."""
    changed = copy.deepcopy(table)
    inner = changed
    for part in key[:-1]:
        inner = inner.setdefault(part, {})
        if not isinstance(inner, dict):
            return changed
    inner[key[-1]] = value
    return changed


def toml_text(value: object) -> str:
    """`value` in TOML, numbers of any length too."""
    if isinstance(value, bool) or not isinstance(value, int):
        if isinstance(value, dict):
            return "{" + ", ".join(f"{toml_value(name)} = {toml_text(one)}" for name, one in value.items()) + "}"
        return f"[{', '.join(map(toml_text, value))}]" if isinstance(value, list) else toml_value(value)
    return str(value) if value.bit_length() < 1000 else (hex(value) if value >= 0 else "-1")


def only_refused(read: Callable[[], Any]) -> Any:
    """What `read` gives, or None where it refuses; fails for another error, a long message and a long time."""
    began = time.thread_time()
    result, message = None, ""
    try:
        result = read()
    except UserError as error:
        message = str(error)
    assert len(message) < MOST_CHARACTERS, f"a message of {len(message)} characters: {message[:300]}"
    took_s = time.thread_time() - began
    assert took_s < MOST_S, f"took {took_s:.1f} s"
    return result


def read_run(folder: Path, table: dict[str, Any]) -> None:
    """Write `table`, read it as a run; where it is valid, its resolved form must read back equal."""
    path = folder / "run.toml"
    path.write_text("\n".join(f"{name} = {toml_text(value)}" for name, value in table.items()), encoding="utf-8")
    config = only_refused(lambda: load(path))
    if config is None:
        return
    (folder / "again.toml").write_text(to_toml(config), encoding="utf-8")
    assert load(folder / "again.toml") == config
    only_refused(lambda: check_layout(config, 8))


def one_change(section: type[BaseModel]) -> st.SearchStrategy[tuple[tuple[str, ...], object]]:
    return st.tuples(st.sampled_from(sorted(set(fields(section)))), VALUES)


ONE_OF_ALL = st.one_of(
    st.tuples(st.just("run"), one_change(RunConfig)),
    st.tuples(st.just("run"), one_change(RunConfig)),
    st.tuples(st.just("corpus"), one_change(Corpus)),
    st.tuples(st.just("launch"), one_change(LaunchSettings)),
)


def read_changed(folder: Path, kind: str, key: tuple[str, ...], value: object) -> None:
    if kind == "run":
        read_run(folder, put(RUN, key, value))
    elif kind == "corpus":
        table = put(CORPUS, tuple("a" if part == "v" else part for part in key), value)
        only_refused(lambda: make_corpus(table, origin="c.toml"))
        path = folder / "c.toml"
        path.write_text("\n".join(f"{name} = {toml_text(one)}" for name, one in table.items()), encoding="utf-8")
        only_refused(lambda: load_corpus(path))
    else:
        path = folder / "job.toml"
        path.write_text(f"launch = {toml_text(put({}, key, value))}\n", encoding="utf-8")
        only_refused(lambda: load_settings(path, [], {}))


QUICK = settings(max_examples=200, deadline=None, database=None, derandomize=True)
SOAK = settings(max_examples=10_000, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@settings(QUICK, suppress_health_check=list(HealthCheck))
@given(change=ONE_OF_ALL)
def test_any_value_of_any_field_is_valid_or_refused(folder: Path, change: tuple[str, Any]) -> None:
    read_changed(folder, change[0], *change[1])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@SOAK
@given(change=ONE_OF_ALL)
def test_ten_thousand_values_are_valid_or_refused(folder: Path, change: tuple[str, Any]) -> None:
    read_changed(folder, change[0], *change[1])


@pytest.mark.parametrize(
    "value",
    [16**5000, -1, 2**64, 1e308, float("nan"), float("inf"), "", "\0", "x" * 20_000, [], {}, [[]], {"": {"": 1}}],
    ids=itertools.count(),
)
def test_every_field_takes_a_hostile_value_or_refuses_it(folder: Path, value: object) -> None:
    for kind, section in (("run", RunConfig), ("corpus", Corpus), ("launch", LaunchSettings)):
        for key in set(fields(section)):
            read_changed(folder, kind, key, value)


def test_every_number_has_bounds() -> None:
    # Without one, a number of any size reaches arithmetic and allocations.
    texts = {field.key: field.type for field in describe_fields()}
    for section in (Corpus, SourceConfig, LaunchSettings):
        texts |= {name: field_type_text(field) for name, field in section.model_fields.items() if name != "filters"}
    numbers = {key: text for key, text in texts.items() if re.search(r"a (whole )?number", text)}
    assert len(numbers) > 60
    assert [key for key, text in numbers.items() if not re.search("number >.* and <", text)] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = " + "[" * 100_000, "deeper than 32 levels"),
        ("a = " + "{a = " * 200 + "1" + "}" * 200, "deeper than 32 levels"),
        ("a = " + "[" * 40 + "]" * 40, "deeper than 32 levels"),
        (".".join("a" * 300_000) + " = 1", "a dotted key has more than 64 parts"),
        ("[" + ".".join('"a"' for _ in range(100_000)) + "]", "a dotted key has more than 64 parts"),
        ("a." * 50 + "a = 1", "deeper than 32 levels"),
        (f"a = {ENDLESS}", "a number has thousands of digits"),
        ("k" * 10**6 + " = 1", "has more than 1000 characters"),
    ],
    ids=itertools.count(),
)
def test_text_that_stops_the_parser_is_refused(text: str, words: str) -> None:
    began = time.thread_time()
    with pytest.raises(TomlError, match=words):
        parse_toml(text)
    assert time.thread_time() - began < MOST_S


@pytest.mark.parametrize(
    "text", ["a" * 500_000, "a " * 300_000, '"' * 500_001, "'\"" * 200_000, ". " * 300_000], ids=itertools.count()
)
def test_looking_for_long_keys_is_quick(text: str) -> None:
    began = time.thread_time()
    with pytest.raises(TomlError):
        parse_toml(text)
    assert time.thread_time() - began < 2 * MOST_S


def refusal(path: Path, *overrides: str) -> str:
    began = time.thread_time()
    with pytest.raises(UserError) as caught:
        load(path, overrides)
    assert time.thread_time() - began < 2 * MOST_S
    assert len(str(caught.value)) < MOST_CHARACTERS
    return str(caught.value)


def test_files_that_extend_without_end_are_refused(tmp_path: Path) -> None:
    for number in range(1500):
        (tmp_path / f"chain-{number}.toml").write_text(f'extends = "chain-{number + 1}.toml"')
        following = [f"double-{number + 1}.toml"] * 2
        (tmp_path / f"double-{number}.toml").write_text(f"extends = {following}" if number < 15 else "")
    (tmp_path / "wide.toml").write_text(f"extends = {['double-15.toml'] * 50_000}")
    (tmp_path / "large.toml").write_text("# " + "x" * 600_000)
    (tmp_path / "twice.toml").write_text('extends = ["large.toml", "large.toml"]')
    assert "a chain of 16 files extend one another" in refusal(tmp_path / "chain-0.toml")
    assert "extends reads more than 64 files" in refusal(tmp_path / "double-0.toml")
    assert "extends reads more than 64 files" in refusal(tmp_path / "wide.toml")
    assert "exceed 1,048,576 bytes" in refusal(tmp_path / "twice.toml")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "huge.toml").write_bytes(b"")
    os.truncate(tmp_path / "huge.toml", 2**40)
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    (tmp_path / "nul.toml").write_text(r'extends = "a\u0000b"')
    assert "a character device; a configuration file is a regular file" in refusal(Path("/dev/zero"))
    assert "a named pipe; a configuration file is a regular file" in refusal(tmp_path / "pipe.toml")
    assert "a configuration file has at most 1,048,576" in refusal(tmp_path / "huge.toml")
    assert "no configuration file" in refusal(tmp_path / "loop.toml")
    assert "without NUL characters" in refusal(tmp_path / "nul.toml")
    assert "names of at most 255" in refusal(Path("x" * 100_000))
    for bad in ("pipe.toml", "huge.toml", "loop.toml"):
        with pytest.raises(UserError, match=r"a corpus file|links"):
            load_corpus(tmp_path / bad)
        assert bad in refusal(write(tmp_path / "outer.toml", f'extends = "{bad}"'))


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.hidden_size=1000000000000", "model.hidden_size = 1000000000000: must be a whole number >= 1 and <="),
        ("model.vocab_size=1000000000000", "must be a whole number >= 0 and <= 16_777_216"),
        ("model.mixer=tnl*99999999999", "gives a pattern of more than 10_000 layers"),
        (f"model.mixer=tnl*{ENDLESS}", "gives a pattern of more than 10_000 layers"),
        (f"train.steps={ENDLESS}", "(5,002 characters): must be a whole number"),
        (f"train.steps=0x{'f' * 5000}", "a number of 20,000 bits: must be a whole number"),
        (f"train.init_from=runs/a@{ENDLESS}", "must be RUN@STEP"),
        ('data.store="a\\u0000b"', "must not contain a NUL character"),
        ("data.store=" + "x" * 300, "names of at most 255"),
        ("data.store=", "must be a path, not empty"),
        ("data.store=\udcff", "must be UTF-8 text"),
        ("restart.collective_timeout_s=1e300", "must be a number > 0 and <= 604_800"),
        ("optimizer.lr=1e300", "must be a number > 0 and <= 100"),
        ("model.norm=" + "x" * 10**6, "must be at most 65_536 bytes of text"),
        ("model.norm=" + "x" * 10**4, 'must be "srmsnorm" or "rmsnorm"'),
        ("x" * 60_000, "must be section.key=value"),
        ("model." + "x" * 60_000 + "=1", "must be section.key=value"),
        ("metrics.sinks=" + str(["jsonl"] * 5_000), "must be a list of text"),
        ("model.mixer=" + str([1] * 20_000), "must be text or a list of text"),
    ],
    ids=itertools.count(),
)
def test_hostile_overrides_are_refused_by_name(tmp_path: Path, override: str, words: str) -> None:
    run = write(tmp_path / "run.toml", "\n".join(f"{name} = {toml_text(value)}" for name, value in RUN.items()))
    message = refusal(run, override)
    assert words in message
    assert len(message) < 2000


def test_of_many_mistakes_the_first_are_shown(tmp_path: Path) -> None:
    text = "\n".join(f"unknown{number} = {number}" for number in range(5_000))
    message = refusal(write(tmp_path / "run.toml", text))
    assert "unknown key unknown0; the sections are" in message
    assert message.endswith("more")
    assert len(message.split("\n")) == 21


def test_nearest_divisors_and_multiples_of_large_numbers() -> None:
    for number in range(1, 300):
        divisors = [one for one in range(1, number + 1) if number % one == 0]
        for wanted in (1, 2, 7, 100, 10**12):
            assert near_divisor(number, wanted) == min(divisors, key=lambda one: (abs(one - wanted), one))
            assert near_multiple(number, wanted) == max(1, round(number / wanted)) * wanted
    assert near_divisor(2**31 - 1, 7) == 1  # a prime
    assert near_multiple(10**400 + 1, 2**30) % 2**30 == 0


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (("sources", "a", "paths"), [""], 'sources.a.paths: "" must be a path, not empty'),
        (("sources", "a", "paths"), ["a\0"], "must not contain a NUL character"),
        (("sources", "a", "suffixes"), [""], "matches every file"),
        (("tokenizer",), "", "must be a path, not empty"),
        (("vocab_size",), 10**12, "must be a whole number >= 1 and <= 16_777_216"),
        (("shard_tokens",), 10**15, "must be a whole number >= 1 and <="),
        (("chunk_tokens",), 10**15, "must be a whole number >= 1 and <="),
        (("chunk_tokens",), 1, "gives more than 1_048_576 chunks"),
        (("sources", "a", "filters"), {"size": {"min": 16**5000}}, "must be a number ≥ 0 and ≤"),
    ],
    ids=itertools.count(),
)
def test_hostile_corpus_files_are_refused_by_name(key: tuple[str, ...], value: object, words: str) -> None:
    with pytest.raises(UserError) as caught:
        make_corpus(put(CORPUS, key, value), origin="c.toml")
    assert words in str(caught.value)


def test_the_home_of_nobody_in_a_corpus_file(tmp_path: Path) -> None:
    corpus = write(tmp_path / "c.toml", '[sources.a]\npaths = ["~nobody-of-this-name/x"]\n')
    with pytest.raises(UserError, match="write the full path"):
        load_corpus(corpus)
