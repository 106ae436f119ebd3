"""The readers of what others wrote: of each a valid input, and the call that reads it. A new one is an entry below.

An input is one file, among the others that its reader needs. Where it is packed, framed or hashed, ``Target.inside``
lets mutations reach what is in it.
"""

import base64
import bz2
import gzip
import html.parser
import io
import json
import re
import runpy
import struct
import tarfile
import unicodedata
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
import tokenizers
import zstandard
from PIL import Image
from warcio.warcwriter import WARCWriter

from lightscale.config.files import launch_tables, load
from lightscale.data_pipeline.chat.files import find_template
from lightscale.data_pipeline.chat.prepared import Chat
from lightscale.data_pipeline.chat.shapes import ChatFault, conversation_of
from lightscale.data_pipeline.chat.template import ChatTemplate
from lightscale.data_pipeline.images.decode import ImageForm, decoded
from lightscale.data_pipeline.images.files import Fields, find_files
from lightscale.data_pipeline.preparation.corpus import load_corpus
from lightscale.data_pipeline.preparation.filters import classifier, contamination
from lightscale.data_pipeline.preparation.readers import cut_into_ranges
from lightscale.data_pipeline.preparation.readers import read as read_range
from lightscale.data_pipeline.preparation.readers.file_parts import FIRST, FilePart
from lightscale.data_pipeline.preparation.readers.inputs import Problems, ReadOptions
from lightscale.data_pipeline.preparation.readers.read import has_parts
from lightscale.data_pipeline.preparation.sources import FileLister
from lightscale.data_pipeline.store.token_store import StoreWriter, TokenStore
from lightscale.data_pipeline.store.verify import verify_store
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer, load_tokenizer
from lightscale.data_pipeline.tokenizers.sentencepiece_model import train_sentencepiece
from lightscale.errors import printable
from lightscale.evaluation.generation.prompt_file import PromptText, read_prompts
from lightscale.evaluation.inference.prompts import Sampling
from lightscale.evaluation.prediction.documents import MaskWriting, read_documents
from lightscale.evaluation.registry import find_tasks
from lightscale.evaluation.results import PartialAnswers, newest_results
from lightscale.evaluation.texts import read_file
from lightscale.exchange.export_reader import open_export
from lightscale.exchange.files import checksums
from lightscale.exchange.files.safetensors_files import Written, write_shards
from lightscale.launch.launcher.reports import read_reports
from lightscale.output.html import Html
from lightscale.runs.followers import needed
from lightscale.runs.lock import process_here
from lightscale.runs.run_directory import RunDirectory, read_lines, read_metrics
from lightscale.study.curve_files import COLUMNS, read_curve
from lightscale.study.definition import read_definition
from lightscale.study.points_file import read_points
from lightscale.training.checkpoints.manifest import NAME as MANIFEST
from lightscale.training.health.heartbeat import Beat, create_heartbeats, read_heartbeats

_ROOT = Path(__file__).resolve().parents[2]
_TEXT = "Once upon a time, 字 and é.\n"


class Inside(NamedTuple):
    """What is in an input, and the input that has it."""

    unpack: Callable[[bytes], bytes]
    """Raises an exception where it is none."""
    pack: Callable[[bytes], bytes]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A reader."""

    file: str
    """Name of the input below a folder."""
    valid: Callable[[Path], Iterable[bytes]]
    """Valid inputs; writes the other files to the folder."""
    read: Callable[[Path], object]
    """Read the file, as commands do. Right is to return, or a UserError."""
    inside: Inside | None = None


class WrongText(Exception):
    """What was read is shown as a terminal or browser would obey it."""


# ----- texts of a corpus -------------------------------------------------------------------------------------------


def _records(count: int = 3) -> list[dict[str, Any]]:
    return [{"text": _TEXT * (one + 1), "id": f"d{one}", "label": one % 2} for one in range(count)]


def _lines(records: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def _table() -> Any:
    return pyarrow.Table.from_pylist(_records(8))


def _parquet(table: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(table, out, **options)
    return out.getvalue()


def _arrow(opened: Callable[..., Any]) -> bytes:
    out = io.BytesIO()
    with opened(out, _table().schema) as writer:
        writer.write_table(_table(), max_chunksize=3)
    return out.getvalue()


def _warc(*, packed: bool) -> bytes:
    out = io.BytesIO()
    writer = WARCWriter(out, gzip=packed)
    for kind, media in (("conversion", "text/plain"), ("resource", "text/plain; charset=latin-1")):
        headers = {"Content-Type": media, "WARC-Date": "2026-01-01T00:00:00Z", "WARC-Record-ID": "<urn:uuid:1>"}
        record = writer.create_warc_record(
            "http://example.org/", kind, payload=io.BytesIO(_TEXT.encode()), warc_headers_dict=headers
        )
        writer.write_record(record)
    return out.getvalue()


def _read_corpus(path: Path) -> None:
    """All documents, whole and in ranges, and of a compressed file in parts."""
    options = ReadOptions(label_field="label", id_field="id")
    for range_bytes in (10**9, 100):
        problems = Problems()
        (file,) = FileLister(problems).files([str(path)])
        for file_range in cut_into_ranges(file, range_bytes, problems, options=options):
            part = FilePart(FIRST, range_bytes) if has_parts(file, options) else None
            while True:
                for _ in read_range(file_range, problems, options=options, advance=lambda count: None, part=part):
                    pass
                if part is None or part.end is None:
                    break
                part = part.next()
        _require_shown(json.dumps(problems.as_json(), ensure_ascii=False))


def _gunzip(data: bytes) -> bytes:
    return zlib.decompressobj(31).decompress(data, 2**20)


_GZIP = Inside(_gunzip, partial(gzip.compress, mtime=0))
_BZIP2 = Inside(lambda data: bz2.BZ2Decompressor().decompress(data, 2**20), bz2.compress)
_ZSTD = Inside(
    lambda data: zstandard.ZstdDecompressor().decompressobj().decompress(data)[: 2**20],
    zstandard.ZstdCompressor(write_checksum=True).compress,
)


def _corpus(file: str, *valid: bytes, inside: Inside | None = None) -> Target:
    return Target(file=file, valid=lambda folder: valid, read=_read_corpus, inside=inside)


def _header(data: bytes) -> bytes:
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def _framed(header: bytes) -> bytes:
    """With the bytes of tensors that the header asks for, where they are few."""
    ends = [int(end) for end in re.findall(rb'"data_offsets": *\[\d+, *(\d{1,5})\]', header)]
    return struct.pack("<Q", len(header)) + header + bytes(max(ends, default=64))


_SAFETENSORS = Inside(_header, _framed)


# ----- tokenizers and chat templates -------------------------------------------------------------------------------


def _byte_tokenizer() -> TiktokenTokenizer:
    ranks = {bytes([byte]): byte for byte in range(256)}
    return TiktokenTokenizer(
        name="bytes", pat_str=r"(?s:.+)", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256}
    )


@cache
def _huggingface_file() -> bytes:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator([_TEXT] * 9, trainer)
    text: str = tokenizer.to_str()
    return text.encode()


def _use(tokenizer: Any) -> None:
    tokenizer.decode(tokenizer.encode(_TEXT))


def _saved(tokenizer: Any, file: str) -> Callable[[Path], list[bytes]]:
    def valid(folder: Path) -> list[bytes]:
        (folder / "tokenizer").mkdir(exist_ok=True)
        tokenizer().save(folder / "tokenizer")
        return [(folder / file).read_bytes()]

    return valid


_MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4", "reasoning_content": "Add.", "tool_calls": [{"name": "f", "x": [1, "a"]}]},
]
_TEMPLATES = (
    b"{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}",
    b"{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% set ns = namespace(n=0) %}{% for m in messages %}"
    b"{% if loop.first and m.role != 'system' %}{{ raise_exception('x') }}{% endif %}{% generation %}"
    b"{{ m.content ~ 'x' * 3 }}{% endgeneration %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    b"{{ '%05d' % ns.n }}{{ '{:>9}'.format(ns.n) }}",
    b"{% macro f(x, d=2) %}{{ x | string | center(9) | replace('a', 'bb') }}{% endmacro %}{{ f(messages|length ** 2) }}"
    b"{{ range(3) | list | join(',') }}{{ messages | map(attribute='role') | list | batch(2, 'x') | list }}"
    b"{{ 'a b'.split() | first | upper }}{{ 'ab'.ljust(9, '.') }}{{ [1, 2] * 2 }}{{ 'a' | indent(4) | wordwrap(3) }}",
)


def _render(path: Path) -> None:
    origin = str(path)
    text = path.read_bytes().decode(errors="replace")
    template = ChatTemplate(text, origin=origin, variables={"eos_token": "</s>"})
    for conversation in ({"messages": _MESSAGES}, {"messages": _MESSAGES[1:], "tools": [{"name": "f"}]}):
        try:
            template.render(conversation_of(conversation, {}, {}), add_generation_prompt=True)
        except ChatFault as error:
            if origin not in str(error):
                raise


def _tokenizer_config(path: Path) -> None:
    found = find_template(None, path.parent / "tokenizer.json")
    Chat(files=found, fields={}, roles={}, variables={}, most_characters=2**20).check()


def _converse(path: Path) -> None:
    """Lines of conversations; a ChatFault is counted there, and its place is said by the caller."""
    chat = Chat(files=find_template("chatml", None), fields={}, roles={}, variables={}, most_characters=2**20)
    problems = Problems()
    (file,) = FileLister(problems).files([str(path)])
    options = ReadOptions(has_records=True)
    for file_range in cut_into_ranges(file, 10**9, problems, options=options):
        for raw in read_range(file_range, problems, options=options, advance=lambda count: None):
            try:
                chat.text_of(json.loads(raw.data))
            except ChatFault:
                continue


# ----- stores, checkpoints, exports --------------------------------------------------------------------------------


def _store(file: str) -> Target:
    def valid(folder: Path) -> list[bytes]:
        if not (folder / "store").exists():
            with StoreWriter(folder / "store", _byte_tokenizer(), shard_tokens=64, chunk_tokens=16) as writer:
                for name in ("a", "b"):
                    writer.source(name).append(np.arange(100, dtype=np.uint32), num_bytes=100)
                writer.finish({})
        return [(folder / "store" / file).read_bytes()]

    def read(path: Path) -> None:
        folder = next(parent for parent in path.parents if parent.name == "store")
        verify_store(folder, lambda step, done, total: None)
        store = TokenStore(folder)
        for name in store.sources:
            source = store.source(name)
            source.read(0, min(source.num_tokens, 1000))
            source.document_ends(0, min(source.num_documents, 1000))
        store.training_weights()

    return Target(file=f"store/{file}", valid=valid, read=read)


def _crafted() -> Any:
    return SimpleNamespace(**runpy.run_path(str(_ROOT / "tests/helpers/crafted_checkpoints.py")))


def _checkpoint(file: str, *, inside: Inside | None = None) -> Target:
    victims: dict[Path, Any] = {}

    def valid(folder: Path) -> list[bytes]:
        crafted = _crafted()
        if not list(folder.glob("step-*")):
            crafted.write_checkpoint(folder)
        (path,) = folder.glob("step-*")
        victims[folder] = crafted.Victim(path), crafted.read
        return [(path / file).read_bytes()]

    def read(path: Path) -> None:
        victim, read = victims[path.parents[1]]
        victim.seal()
        try:
            read(path.parent)
        finally:
            (path.parent / MANIFEST).write_bytes(victim.content[MANIFEST])

    return Target(file=f"step-00000020/{file}", valid=valid, read=read, inside=inside)


_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 257,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}


_LAYER = "model.layers.0."
_LLAMA_SHAPES = {
    "model.embed_tokens.weight": (257, 16),
    f"{_LAYER}input_layernorm.weight": (16,),
    f"{_LAYER}self_attn.q_proj.weight": (16, 16),
    f"{_LAYER}self_attn.k_proj.weight": (8, 16),
    f"{_LAYER}self_attn.v_proj.weight": (8, 16),
    f"{_LAYER}self_attn.o_proj.weight": (16, 16),
    f"{_LAYER}post_attention_layernorm.weight": (16,),
    f"{_LAYER}mlp.gate_proj.weight": (16, 16),
    f"{_LAYER}mlp.up_proj.weight": (16, 16),
    f"{_LAYER}mlp.down_proj.weight": (16, 16),
    "model.norm.weight": (16,),
    "lm_head.weight": (257, 16),
}


def _export(file: str, *, inside: Inside | None = None) -> Target:
    """A small LLaMA as transformers writes it, opened by import, load and verify."""

    def valid(folder: Path) -> list[bytes]:
        import torch  # noqa: PLC0415 - only here

        if not (folder / "export").exists():
            out = folder / "export"
            (out / "tokenizer").mkdir(parents=True)
            _byte_tokenizer().save(out / "tokenizer")
            (out / "config.json").write_text(json.dumps(_LLAMA))
            tensors = [
                Written(name=name, dtype=torch.bfloat16, shape=size, blocks=[torch.zeros(size)])
                for name, size in _LLAMA_SHAPES.items()
            ]
            write_shards(out, tensors, shard_bytes=2**30)
            index = {"weight_map": dict.fromkeys(_LLAMA_SHAPES, "model.safetensors")}
            (out / "model.safetensors.index.json").write_text(json.dumps(index))
            checksums.write_checksums(out)
        return [(folder / "export" / file).read_bytes()]

    def read(path: Path) -> None:
        folder = next(parent for parent in path.parents if parent.name == "export")
        if path.name != checksums.NAME:
            # A crafted export has hashes of its own.
            (folder / checksums.NAME).unlink(missing_ok=True)
        opened = open_export(folder)
        for name in opened.places:
            opened.read(name)

    return Target(file=f"export/{file}", valid=valid, read=read, inside=inside)


# ----- configurations, records of runs, evaluation, studies ---------------------------------------------------------

_RUN = f"""
extends = ["{_ROOT}/configs/arch/tnl.toml", "{_ROOT}/configs/size/tiny.toml"]
[model]
vocab_size = 320
mixer = ["tnl", "llama"]
mixer_options.llama = {{window = 8}}
[data]
store = "store"
sequence_length = 64
[train]
steps = 10
global_batch_size = 2
[optimizer]
lr = 1e-3
[optimizer.groups.norms]
parameters = ["*norm.weight"]
lr_factor = 0.5
[launch]
nodes = 2
""".encode()
_CORPUS = b"""
tokenizer = "sentencepiece"
vocab_size = 500
[sources.a]
paths = ["a.jsonl", "b/*.txt"]
weight = 0.5
text_field = "text"
filters = ["en", {c4 = {}}]
[sources.b]
paths = ["c.jsonl"]
weight = 0.5
format = "chat"
[sources.b.chat]
template = "chatml"
[duplicates]
near = false
"""
_STUDY = b"""
[study]
about = "x"
[base]
extends = "recipe/scaling_law"
[axes.architecture]
tnl = {extends = "arch/tnl"}
llama = {extends = "arch/llama"}
[axes]
"optimizer.lr" = [1e-3, 2e-3]
[[rules]]
when = {architecture = ["tnl", "llama"]}
set.model.num_layers = 25
"""
_TASK = b"""
kind = "perplexity"
name = "p"
paths = ["texts.jsonl"]
text_field = "text"
window = 64
lengths = [8, 16]
limit = 3
"""


def _toml(file: str, read: Callable[[Path], object], *valid: bytes) -> Target:
    def seeds(folder: Path) -> Iterable[bytes]:
        (folder / "texts.jsonl").write_bytes(_lines(_records()))
        return valid

    return Target(file=file, valid=seeds, read=read)


def _configuration(path: Path) -> None:
    list(launch_tables(path))
    load(path)


def _run_file(file: str, read: Callable[[RunDirectory], object], *valid: bytes) -> Target:
    """A record of a run; ``read`` gets the run."""
    return Target(file=f"run/{file}", valid=lambda folder: valid, read=lambda path: read(_run_of(path)))


def _run_of(path: Path) -> RunDirectory:
    return RunDirectory(next(parent for parent in path.parents if parent.name == "run"))


def _metrics(run: RunDirectory) -> None:
    read_metrics(run.metrics)
    run.progress()


def _heartbeats(folder: Path) -> list[bytes]:
    path = folder / "made"
    if not path.exists():
        create_heartbeats(path, 2)
    return [path.read_bytes()]


_CURVE = ",".join(COLUMNS).encode() + b"\n1,100,1e3,,0.5,5.0,5.0\n2,200,2e3,,1.0,4.5,4.8\n"
_RESULT = {"run": "r", "task": "t", "step": 1, "requests": 2, "identity": "ab", "scores": {"acc": {"value": 0.5}}}


def _partial(path: Path) -> None:
    result = path.with_name("t.json")
    found = PartialAnswers(result, "abcdefgh")
    found.read()


def _prompts(path: Path) -> None:
    for prompt in read_prompts(path, PromptText(text="", max_tokens=8, sampling=Sampling())):
        prompt.encoded(_shared_bytes())


@cache
def _shared_bytes() -> TiktokenTokenizer:
    return _byte_tokenizer()


# ----- images, filters, what people see ----------------------------------------------------------------------------


def _picture(kind: str, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)).convert(mode).save(out, kind)
    return out.getvalue()


_FORM = ImageForm(shape=(8, 8, 3), resize="crop", convert=True)


def _image(path: Path) -> None:
    decoded(path.read_bytes(), _FORM, str(path))


def _images(path: Path) -> None:
    for files in find_files([path], Fields()):
        list(files.labels())
        for found in files.images():
            decoded(found.data, _FORM, found.id)


def _tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in (("a.png", _picture("PNG")), ("a.cls", b"0"), ("b.png", _picture("PNG"))):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        content = b'{"label": "cat"}'
        entry = tarfile.TarInfo("b.json")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def _npz() -> bytes:
    out = io.BytesIO()
    np.savez(out, images=np.zeros((2, 8, 8, 3), np.uint8), labels=np.array([0, 1]))
    return out.getvalue()


def _image_table() -> bytes:
    rows = [{"image": {"bytes": _picture("PNG"), "path": "a.png"}, "label": one} for one in range(3)]
    return _parquet(pyarrow.Table.from_pylist(rows))


def _classifier(folder: Path) -> list[bytes]:
    classifier.save(folder / "made", np.arange(4, dtype=np.float64), 0.5, about={})
    return [(folder / "made").read_bytes()]


def _judge(path: Path) -> None:
    classifier._loaded.cache_clear()
    step = classifier.ClassifierFilter(path=str(path))
    step.files()
    step.judge("some words")


def _contamination(path: Path) -> None:
    contamination._known.cache_clear()
    contamination.ContaminationFilter(sets={"a": str(path)}, n=2).judge("upon a time there was")


class _Marks(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Any]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, attrs))


def _require_shown(text: str) -> None:
    """Whatever is in ``text``, a terminal gets nothing to obey and a page no mark that it had not without it."""
    shown = printable(text)
    if any(unicodedata.category(one) in ("Cc", "Cf", "Cs") and one not in "\n\t\u200c\u200d" for one in shown):
        raise WrongText(f"the terminal gets {shown!r}")
    pages = []
    # An empty caption is none.
    for one in (text or "a", "a"):
        page = Html(one)
        page.heading(one)
        page.paragraph(one)
        page.lines(one, one)
        page.picture("<svg></svg>", one)
        page.table([one], [[one.replace("\n", " ")]])
        marks = _Marks()
        marks.feed(page.text())
        pages.append(marks.found)
    if pages[0] != pages[1]:
        raise WrongText(f"the page has other marks: {pages[0]}")


def _show(path: Path) -> None:
    _require_shown(path.read_bytes().decode(errors="surrogateescape"))


TARGETS: dict[str, Target] = {
    # What data prepare reads.
    "text": _corpus("d.txt", _TEXT.encode()),
    "jsonl": _corpus("d.jsonl", _lines(_records())),
    "json": _corpus("d.json", json.dumps(_records()).encode(), _lines(_records())),
    "csv": _corpus("d.csv", b'text,id,label\n"a ""b"", c",1,0\nd,2,1\n'),
    "tsv": _corpus("d.tsv", b"text\tid\tlabel\na b\t1\t0\n"),
    "parquet": _corpus("d.parquet", _parquet(_table(), row_group_size=3), _parquet(_table(), compression="zstd")),
    "arrow": _corpus("d.arrow", _arrow(pyarrow.ipc.new_file), _arrow(pyarrow.ipc.new_stream)),
    "warc": _corpus("d.warc", _warc(packed=False)),
    "warc-gzip": _corpus("d.warc.gz", _warc(packed=True), inside=_GZIP),
    "gzip": _corpus("d.jsonl.gz", gzip.compress(_lines(_records()), mtime=0), inside=_GZIP),
    "bzip2": _corpus("d.jsonl.bz2", bz2.compress(_lines(_records())), inside=_BZIP2),
    "zstd": _corpus("d.jsonl.zst", zstandard.ZstdCompressor().compress(_lines(_records())), inside=_ZSTD),
    "conversations": Target(
        file="d.jsonl",
        valid=lambda folder: [
            _lines(
                [
                    {"messages": _MESSAGES, "tools": [{"name": "f"}]},
                    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
                    {"instruction": "Say a.", "input": "x", "output": "a", "system": "s"},
                    {"prompt": "a", "completion": "b"},
                ]
            )
        ],
        read=_converse,
    ),
    "classifier": Target(file="c.safetensors", valid=_classifier, read=_judge, inside=_SAFETENSORS),
    "contamination": Target(
        file="s.jsonl.gz",
        valid=lambda folder: [gzip.compress(_lines(_records()), mtime=0)],
        read=_contamination,
        inside=_GZIP,
    ),
    # Tokenizers, chat templates.
    "tokenizer-huggingface": Target(
        file="t.json",
        valid=lambda folder: [_huggingface_file()],
        read=lambda path: _use(load_tokenizer(path)),
    ),
    "tokenizer-sentencepiece": Target(
        file="t.model",
        valid=lambda folder: [train_sentencepiece([_TEXT * 9], vocab_size=280).model],
        read=lambda path: _use(load_tokenizer(path)),
    ),
    "tokenizer-tiktoken": Target(
        file="tokenizer/ranks.tiktoken",
        valid=_saved(_byte_tokenizer, "tokenizer/ranks.tiktoken"),
        read=lambda path: _use(load_tokenizer(path.parents[1])),
    ),
    "tokenizer-description": Target(
        file="tokenizer/tokenizer.json",
        valid=_saved(_byte_tokenizer, "tokenizer/tokenizer.json"),
        read=lambda path: _use(load_tokenizer(path.parents[1])),
    ),
    "chat-template": Target(file="t.jinja", valid=lambda folder: _TEMPLATES, read=_render),
    "tokenizer-config": Target(
        file="tokenizer_config.json",
        valid=lambda folder: [
            json.dumps({"chat_template": _TEMPLATES[0].decode(), "eos_token": {"content": "</s>"}}).encode(),
            json.dumps({"chat_template": [{"name": "default", "template": "{{ messages }}"}]}).encode(),
        ],
        read=_tokenizer_config,
    ),
    # Stores, checkpoints, exports.
    "store": _store("zarr.json"),
    "store-source": _store("a/zarr.json"),
    "store-array": _store("a/tokens/zarr.json"),
    "store-shard": _store("a/tokens/c/0"),
    "checkpoint-manifest": _checkpoint(MANIFEST),
    "checkpoint-state": _checkpoint("state.json"),
    "checkpoint-generators": _checkpoint("rank-00000.json"),
    "checkpoint-safetensors": _checkpoint("rank-00000.safetensors", inside=_SAFETENSORS),
    "export-config": _export("config.json"),
    "export-safetensors": _export("model.safetensors", inside=_SAFETENSORS),
    "export-index": _export("model.safetensors.index.json"),
    "export-checksums": _export(checksums.NAME),
    # Configurations.
    "run-toml": _toml("run.toml", _configuration, _RUN),
    "corpus-toml": _toml("corpus.toml", load_corpus, _CORPUS),
    "study-toml": _toml("study.toml", read_definition, _STUDY),
    "task-toml": _toml("task.toml", lambda path: find_tasks([str(path)], path.parent), _TASK),
    # Records of a run.
    "metrics": _run_file("metrics.jsonl", _metrics, _lines([{"step": 1, "attempt": 1, "loss": 5.0, "tokens": 9}] * 3)),
    "events": _run_file(
        "events.jsonl",
        lambda run: read_lines(run.events),
        _lines(
            [
                {"event": "start", "attempt": 1, "time": "2026-01-01T00:00:00+00:00", "world_size": 2},
                {"event": "data_skipped", "attempt": 1, "at_tokens": 5, "skip_tokens": 9},
                {"event": "checkpoint", "attempt": 1, "step": 3, "checkpoint": "step-00000003", "removed": [1]},
            ]
        ),
    ),
    "status": _run_file(
        "status.json",
        lambda run: (run.read_status(), run.status_fault()),
        b'{"status": "running", "reason": "", "step": 1, "tokens": 5, "time": "2026-01-01T00:00:00+00:00"}',
    ),
    "lock": _run_file(
        "lock/1",
        process_here,
        b'{"host": "h", "process": 5, "process_started": 1.5, "boot": "b", "time": "t", "job": null}',
    ),
    "follower": _run_file(
        "evaluation/followers/h-1.json", lambda run: needed(run, [1, 2]), b'{"tasks": ["t"], "done": [1], "at": 2}'
    ),
    "node-report": Target(
        file="logs/node-0.json",
        valid=lambda folder: [
            json.dumps(
                {
                    "failures": [{"rank": 0, "summary": "s", "time_s": 1.5}],
                    "hang": {"ranks": [0], "reason": "r"},
                    "beats": [asdict(Beat(rank=0, doing="step", step=1, time_s=1.0, allowed_s=2.0, process_id=5))],
                }
            ).encode()
        ],
        read=lambda path: read_reports(path.parent),
    ),
    "heartbeats": Target(file="heartbeats", valid=_heartbeats, read=read_heartbeats),
    # Evaluation, generation, studies.
    "evaluation-texts": Target(
        file="t.jsonl.gz",
        valid=lambda folder: [gzip.compress(_lines(_records()), mtime=0)],
        read=read_file,
        inside=_GZIP,
    ),
    "evaluation-parquet": Target(file="t.parquet", valid=lambda folder: [_parquet(_table())], read=read_file),
    "result": _run_file("evaluation/step-00000001/t.json", newest_results, json.dumps(_RESULT).encode()),
    "partial-answers": Target(
        file="t.abcdefgh.partial.jsonl",
        valid=lambda folder: [
            _lines([{"identity": "abcdefgh"}, {"0": [base64.b85encode(bytes(8)).decode()]}, {"1": [-1.5, True]}])
        ],
        read=_partial,
    ),
    "prompts": Target(
        file="p.jsonl",
        valid=lambda folder: [
            _lines([{"prompt": "def ", "id": "a", "tokens": 50, "temperature": 0, "stop": ["\n"], "top_p": 0.5}])
        ],
        read=_prompts,
    ),
    "documents": Target(
        file="d.jsonl",
        valid=lambda folder: [_lines([{"text": "The [MASK] sat.", "id": "a"}])],
        read=lambda path: read_documents(
            path, _shared_bytes(), text_field="text", masks=MaskWriting(text="[MASK]", id=257), most_tokens=100
        ),
    ),
    "points": Target(
        file="p.csv", valid=lambda folder: [b"N,loss,D,run\n1e6,3.5,1e9,a\n2e6,3.1,1e9,b\n"], read=read_points
    ),
    "curve": Target(file="c.csv", valid=lambda folder: [_CURVE], read=read_curve),
    # Images.
    "image": Target(
        file="i.png",
        valid=lambda folder: [
            *(_picture(kind) for kind in ("PNG", "JPEG", "BMP", "PPM", "TIFF", "WEBP")),
            *(_picture("GIF", "P"), _picture("PNG", "L"), _picture("TIFF", "L")),
        ],
        read=_image,
    ),
    "image-tar": Target(file="i.tar", valid=lambda folder: [_tar()], read=_images),
    "image-npz": Target(file="i.npz", valid=lambda folder: [_npz()], read=_images),
    "image-parquet": Target(file="i.parquet", valid=lambda folder: [_image_table()], read=_images),
    # What terminals and browsers get.
    "shown": Target(
        file="s.txt",
        valid=lambda folder: ["<b>a</b> \x1b[31m \u202e \u2066x\u2069 \ud83d".encode(errors="replace"), b"&lt;<!--"],
        read=_show,
    ),
}
"""By name."""
