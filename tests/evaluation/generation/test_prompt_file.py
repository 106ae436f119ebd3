"""Prompts out of files: every setting comes through, and every mistake is named with its line."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightscale.errors import UserError
from lightscale.evaluation.generation.prompt_file import PromptText, read_prompts
from lightscale.evaluation.inference.prompts import Sampling, seed_of

DEFAULT = PromptText(text="", max_tokens=9, stop=("end",), sampling=Sampling(temperature=0.5, top_k=3, seed=11))
TEXTS = ["def ", "", "two\nlines", "字 😀 \u2028 \x85 \x0c \r\n", '"quoted" \\ \t']


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_texts_come_through_as_they_are(tmp_path: Path) -> None:
    # Without escapes JSON has U+2028, at which Python splits lines, but JSON lines do not.
    lines = [json.dumps({"prompt": text, "id": number}, ensure_ascii=False) for number, text in enumerate(TEXTS)]
    found = read_prompts(write(tmp_path / "p.jsonl", lines[0], "", *lines[1:], ""), DEFAULT)
    assert [(one.text, one.id) for one in found] == [(text, number) for number, text in enumerate(TEXTS)]
    assert found[1].origin == f"{tmp_path / 'p.jsonl'}:3"


def test_a_line_has_settings_of_its_own(tmp_path: Path) -> None:
    own = {"temperature": 0, "top_k": 7, "top_p": 0.5, "repetition_penalty": 1.2, "seed": 4}
    lines = [{"prompt": "a"}, {"prompt": "b", "id": "x", "tokens": 2, "stop": "\n", **own}, {"prompt": "c", "stop": []}]
    first, second, third = read_prompts(write(tmp_path / "p.jsonl", *lines), DEFAULT)
    assert (first.max_tokens, first.stop, first.sampling, first.id) == (9, ("end",), DEFAULT.sampling, None)
    assert (second.max_tokens, second.stop, second.id) == (2, ("\n",), "x")
    assert second.sampling == Sampling(temperature=0, top_k=7, top_p=0.5, repetition_penalty=1.2, seed=4)
    assert third.stop == ()
    # Its own random numbers, by which it can be written alone.
    assert third.sampling.seed == seed_of(11, 2) not in (11, seed_of(11, 1), seed_of(12, 2))


BAD = {
    "": "p.jsonl: the file is empty; each line is an object",
    "\n \n": "p.jsonl: the file is empty",
    '{"prompt": "a"}\n{"prompt": "b"': 'p.jsonl:2: not a JSON object: {"prompt": "b"',
    '"a"': "p.jsonl:1: not a JSON object",
    "[" * 100_000: "p.jsonl:1: not a JSON object",
    '{"text": "a"}': "p.jsonl:1: text: no such key",
    '{"id": 1}': 'p.jsonl:1: no "prompt"',
    '\n{"prompt": "a", "temprature": 1}': "p.jsonl:2: temprature: no such key; did you mean temperature?",
    '{"prompt": 3}': "p.jsonl:1: prompt = 3: must be a text",
    '{"prompt": "a", "tokens": "3"}': "p.jsonl:1: tokens = '3': must be a whole number",
    '{"prompt": "a", "tokens": 0}': "p.jsonl:1: tokens 0: must be at least 1",
    '{"prompt": "a", "top_k": true}': "p.jsonl:1: top_k = True: must be a whole number",
    '{"prompt": "a", "top_p": 2}': "p.jsonl:1: top-p 2: must be above 0",
    f'{{"prompt": "a", "top_p": {10**400}}}': "p.jsonl:1: top_p = 10000",
    f'{{"prompt": "a", "temperature": {10**400}}}': "p.jsonl:1: temperature = 10000",
    '{"prompt": "a", "temperature": NaN}': "p.jsonl:1: temperature nan",
    '{"prompt": "a", "seed": 1e3}': "p.jsonl:1: seed = 1000.0: must be a whole number",
    '{"prompt": "a", "seed": 99999999999999999999}': "p.jsonl:1: seed 99999999999999999999: must fit into 64 bits",
    '{"prompt": "a", "stop": [""]}': "p.jsonl:1: stop '': a stop string must have",
    '{"prompt": "a", "stop": 1}': "p.jsonl:1: stop = 1: must be a text or a list",
    '{"prompt": "a\\ud800"}': "p.jsonl:1: not valid UTF-8 at character 1",
}


class Tokenizer:
    eot_id = 0

    @staticmethod
    def encode(text: str) -> list[int]:
        return [*text.encode()]


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:40])
def test_mistakes_are_named_with_their_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        [prompt.encoded(Tokenizer()) for prompt in read_prompts(tmp_path / "p.jsonl", DEFAULT)]  # type: ignore[arg-type]
    assert BAD[text] in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jsonl: No such file"):
        read_prompts(tmp_path / "none.jsonl", DEFAULT)
    with pytest.raises(UserError, match="a directory"):
        read_prompts(tmp_path, DEFAULT)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(UserError, match=r"latin\.jsonl: not UTF-8 text"):
        read_prompts(tmp_path / "latin.jsonl", DEFAULT)


def test_seeds_of_several_texts() -> None:
    assert [seed_of(seed, 0) for seed in (0, -1, 2**63 - 1)] == [0, -1, 2**63 - 1]
    seeds = {seed_of(seed, number) for seed in (-1, 0, 1, 2**63 - 1) for number in range(1, 200)}
    assert len(seeds) == 4 * 199
    assert all(0 <= seed < 2**53 for seed in seeds)
