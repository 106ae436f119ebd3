import argparse
import copy
import json
import runpy
import shutil
import statistics
import string
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lightscale.config.files import load
from lightscale.data_pipeline.loading.loader import LoaderLayout, TokenLoader
from lightscale.data_pipeline.store.token_store import StoreWriter, TokenStore
from lightscale.data_pipeline.tokenizers import (
    TiktokenTokenizer,
    Tokenizer,
    copy_tokenizer,
    load_tokenizer,
    train_sentencepiece,
)
from lightscale.errors import UserError
from lightscale.evaluation.inference.documents import Documents
from lightscale.evaluation.inference.generate import generate
from lightscale.evaluation.inference.prompts import Sampling
from lightscale.evaluation.inference.sampling import chosen_tokens
from lightscale.evaluation.inference.written_text import decode_stream, encode_prompt
from lightscale.evaluation.model import LoadedModel, load_model
from lightscale.launch.commands import generate as generate_command
from lightscale.parallel.mesh import start_mesh
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.build import build_engine
from lightscale.training.checkpoints.directories import Contents, directory_name
from lightscale.training.checkpoints.saving import Saver

RunRanks = Callable[..., list[Any]]

ROOT = Path(__file__).resolve().parents[3]
warm_commands = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "helpers" / "warm_commands.py")))
STEP = 2
LAYOUTS: dict[str, dict[str, Any]] = {"sequence": {"sequence": 2}, "tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}}
TEXT = "the end of the text, the start of the next: 字 and 😀, e\u0301 and \u00e9. " + string.printable

# Wide initial weights, so that the logits tell tokens apart; 92 rows of the embedding are padding.
CONFIG = """
extends = ["{root}/configs/arch/tnl.toml", "{root}/configs/size/tiny.toml"]

[model]
vocab_size = 512
init_std = 0.3

[data]
store = "{store}"
sequence_length = 64

[optimizer]
lr = 1e-3

[train]
steps = 4
global_batch_size = 4
"""


def save(
    run: Path,
    rank: int,
    world_size: int,
    init_method: str,
    *,
    precision: str = "fp32",
    contents: Contents = "full",
    **axes: int,
) -> None:
    """A checkpoint of the initial weights, made by ``world_size`` ranks laid out along ``axes``."""
    config = load(run / "config.toml", [f"train.precision={precision}"])
    store = TokenStore(config.data.store)
    with start_mesh(device="cpu", rank=rank, world_size=world_size, init_method=init_method, **axes) as mesh:
        engine = build_engine(config, mesh, vocab_size=store.tokenizer.vocab_size, trainable=False)
        loader = TokenLoader(
            store,
            sequence_length=config.data.sequence_length,
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=1,
            sources=config.data.sources,
            seed=0,
            layout=LoaderLayout(data_rank=0, data_size=1, sequence_rank=0, sequence_size=1),
        )
        common = {"data": loader.state_dict()}
        saver = Saver(RunDirectory(run).checkpoints, mesh)
        saver.save(engine, step=STEP, common=common, facts={}, contents=(contents,))


def save_all(rank: int, world_size: int, init_method: str, folder: Path) -> None:
    """One run for each layout of two ranks, and two of one rank."""
    for name, axes in LAYOUTS.items():
        save(folder / name, rank, world_size, f"{init_method}-{name}", **axes)
    save(folder / "weights", rank, world_size, f"{init_method}-weights", contents="weights", tensor=2)
    if rank == 0:
        save(folder / "one", 0, 1, f"{init_method}-one")
        save(folder / "half", 0, 1, f"{init_method}-half", precision="bf16")


def write_store(path: Path, tokenizer: Tokenizer) -> None:
    with StoreWriter(path, tokenizer) as writer:
        writer.source("text").append(tokenizer.encode(TEXT), num_bytes=len(TEXT.encode()))
        writer.finish({})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, run_ranks: RunRanks) -> Path:
    """A folder of runs, one for each layout, with the store they were trained on, and a store of another tokenizer."""
    folder = tmp_path_factory.mktemp("runs")
    write_store(folder / "store", train_sentencepiece([TEXT] * 20, vocab_size=420))
    write_store(folder / "other-store", train_sentencepiece([TEXT] * 20, vocab_size=400))
    (folder / "run.toml").write_text(CONFIG.format(root=ROOT, store=folder / "store"), encoding="utf-8")
    for name in (*LAYOUTS, "one", "half", "weights"):
        RunDirectory(folder / name).create_or_open(load(folder / "run.toml"))
    run_ranks(save_all, 2, folder)
    return folder


def continued(loaded: LoadedModel, max_tokens: int = 30, **sampling: Any) -> list[int]:
    prompt = encode_prompt(loaded.tokenizer, "the start of")
    return list(generate(loaded.model, loaded.tokenizer, prompt, max_tokens=max_tokens, sampling=Sampling(**sampling)))


class Document:
    """One document by itself."""

    def __init__(self, model: Any, **how: Any) -> None:
        self.documents = Documents(model, **how)

    @property
    def position(self) -> int:
        return self.documents.positions[0]

    @position.setter
    def position(self, value: int) -> None:
        self.documents.positions = [value]

    @property
    def state_bytes(self) -> int:
        return self.documents.state_bytes

    def feed(self, ids: list[int]) -> torch.Tensor:
        """Logits (vocab_size,) behind ``ids``."""
        return (self.documents.feed([ids]) if len(self.documents) else self.documents.begin([ids]))[0]


# Of the prompt's parts: one token at a time from the start, then splits at, before and after a chunk's edges.
CUTS = ([1] * 200, [200], [64, 64, 64, 8], [1, 62, 1, 65, 71], [130, *[1] * 70], [7] * 28 + [4])


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """RMSE(difference) / RMSE(reference)."""
    return float((found - expected).norm() / expected.norm())


def deviations(loaded: LoadedModel, cuts: Sequence[list[int]] = CUTS) -> list[list[float]]:
    """For each way to cut 200 tokens, the error of the logits against the parallel form at the end of each part."""
    ids = torch.randint(420, (200,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        parallel = loaded.model(ids[None], torch.arange(200)[None])[0, :, :420]

    errors = [[error(Document(loaded.model, prefill_tokens=33).feed(ids.tolist()), parallel[-1])]]
    for parts in cuts:
        document, of_parts = Document(loaded.model), []
        for part in ids.split(parts):
            logits = document.feed(part.tolist())
            of_parts.append(error(logits, parallel[document.position - 1]))
        errors.append(of_parts)
    return errors


def texts(loaded: LoadedModel, times: int = 2) -> dict[str, Any]:
    """What a model writes under several settings, each so many times."""
    settings: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seed 0": {"seed": 0}, "seed 1": {"seed": 1}}
    settings["narrow"] = {"top_k": 40, "top_p": 0.9}
    return {name: [continued(loaded, **sampling) for _ in range(times)] for name, sampling in settings.items()}


def weights(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in loaded.model.named_parameters()}


def endings(loaded: LoadedModel) -> dict[str, Any]:
    """Generation with another end-of-text token, after a document, and with a padding that draws all probability."""
    facts: dict[str, Any] = {"greedy": continued(loaded, temperature=0)}
    other = copy.copy(loaded.tokenizer)
    *before, other.eot_id = first_distinct(facts["greedy"])
    prompt = encode_prompt(loaded.tokenizer, "the start of")
    facts["stopped"] = list(generate(loaded.model, other, prompt, sampling=Sampling(temperature=0)))
    facts["before"] = before

    document = Document(loaded.model)
    for ids in ([5, 6, 7], [8]):
        document.feed([9, 10])
        document.position = 0
        facts[f"restart with {len(ids)}"] = error(document.feed(ids), Document(loaded.model).feed(ids))

    with torch.inference_mode():
        loaded.model.embedding.word_embeddings.weight[420:] *= 1e4
        tokens = torch.tensor([prompt])
        logits = loaded.model(tokens, torch.arange(tokens.size(1))[None])
    facts["best of all rows"] = int(logits[0, -1].argmax())
    facts["beside padding"] = [*continued(loaded, temperature=0), *continued(loaded, temperature=5.0, max_tokens=100)]
    return facts


def first_distinct(ids: list[int]) -> list[int]:
    """The shortest beginning of at least four tokens whose last one is new."""
    return next(ids[: n + 1] for n in range(3, len(ids)) if ids[n] not in ids[:n])


class Operations(TorchDispatchMode):
    """Every tensor operation, with the shapes of what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = tuple(tuple(value.shape) for value in args if isinstance(value, torch.Tensor))
        self.seen.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


def costs(loaded: LoadedModel) -> dict[str, Any]:
    """What one token takes at positions 100 and 20,000: operations, bytes, and times of 200 tokens by turns."""
    documents = {100: Document(loaded.model), 20_000: Document(loaded.model)}
    facts: dict[str, Any] = {"operations": {}, "bytes": {}, "times": {}}
    for position, document in documents.items():
        document.feed([5] * position)
        prefilled = document.state_bytes
        with Operations() as operations:
            document.feed([6])
        facts["operations"][position] = operations.seen
        facts["bytes"][position] = (prefilled, document.state_bytes)
        facts["times"][position] = []
    for _ in range(200):
        for position, document in documents.items():
            started = time.perf_counter()
            document.feed([6])
            facts["times"][position].append(time.perf_counter() - started)
    with Operations() as operations:
        documents[100].feed([6, 6])
    facts["operations of two"] = operations.seen
    return facts


def measure(rank: int, world_size: int, init_method: str, folder: Path) -> dict[str, Any]:
    """All that is asked of loaded models, in one process."""
    facts: dict[str, Any] = {"texts": {}, "weights differ": []}
    for name in ("one", *LAYOUTS):
        with load_model(folder / name, device="cpu") as loaded:
            facts["texts"][name] = {"step": loaded.step, **texts(loaded, times=1)}
            if name == "one":
                expected = weights(loaded)
                facts["costs"] = costs(loaded)
                facts |= endings(loaded)
            elif any(not torch.equal(weight, expected[key]) for key, weight in weights(loaded).items()):
                facts["weights differ"].append(name)
    with load_model(folder / "half", device="cpu") as loaded:
        wide = {key: weight for key, weight in expected.items() if key.endswith("theta")}
        rounded = {key: weight.bfloat16().float() for key, weight in expected.items()} | wide
        if any(not torch.equal(weight, rounded[key]) for key, weight in weights(loaded).items()):
            facts["weights differ"].append("half")
    try:
        with load_model(folder / "one", device="cpu", store=folder / "other-store"):
            pass
    except UserError as error:
        facts["wrong tokenizer"] = str(error)
    return facts


@pytest.fixture(scope="module")
def facts(runs: Path, run_ranks: RunRanks) -> dict[str, Any]:
    (measured,) = run_ranks(measure, 1, runs)
    return dict(measured)


def test_any_layout_loads_on_one_process(facts: dict[str, Any]) -> None:
    assert facts["weights differ"] == []
    for name in LAYOUTS:
        assert facts["texts"][name] == facts["texts"]["one"], name
    assert facts["texts"]["one"]["step"] == STEP


def test_the_tokenizer_must_be_the_one_of_the_run(facts: dict[str, Any], runs: Path) -> None:
    message = facts["wrong tokenizer"]
    assert message.startswith(f"{runs / 'other-store'}: its tokenizer (sentencepiece, sha256 ")
    assert f"differs from the tokenizer of {runs / 'one/checkpoints' / directory_name(STEP)}" in message


def test_generation_ends_with_the_text(facts: dict[str, Any]) -> None:
    assert len(facts["before"]) >= 3
    assert facts["stopped"] == facts["before"]


def test_a_document_knows_nothing_of_the_one_before(facts: dict[str, Any]) -> None:
    assert facts["restart with 3"] < 1e-5
    assert facts["restart with 1"] < 1e-5


def test_padding_is_never_written(facts: dict[str, Any]) -> None:
    assert facts["best of all rows"] >= 420
    assert len(facts["beside padding"]) > 30
    assert max(facts["beside padding"]) < 420


def test_a_token_costs_the_same_at_every_position(facts: dict[str, Any]) -> None:
    costs = facts["costs"]
    operations = costs["operations"]
    assert operations[100] == operations[20_000]
    # One token takes the recurrence, not a chunk that is mostly empty.
    assert 50 < len(operations[100]) < len(costs["operations of two"])
    # Four layers of 4 heads of 16 x 16 fp32, keys twice as wide in the first.
    assert costs["bytes"][100] == costs["bytes"][20_000] == (5 * 4 * 16 * 16 * 4,) * 2
    times = {position: statistics.median(values) for position, values in costs["times"].items()}
    ratio = times[20_000] / times[100]
    print(
        f"\na token at position 100: {times[100] * 1e3:.3f} ms; at 20,000: {times[20_000] * 1e3:.3f} ms; {ratio:.3f}x"
    )
    assert ratio < 2


LOGITS = torch.tensor([0.5, 0.05, 0.3, 0.15]).log()


def draws(num_draws: int = 2000, **sampling: Any) -> Counter[int]:
    uniform = torch.rand(num_draws, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Counter(chosen_tokens(LOGITS.expand(num_draws, -1), Sampling(**sampling), uniform).tolist())


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"temperature": 1.0}, {0: 0.5, 1: 0.05, 2: 0.3, 3: 0.15}),
        ({"temperature": 0.5}, {0: 0.25 / 0.365, 1: 0.0025 / 0.365, 2: 0.09 / 0.365, 3: 0.0225 / 0.365}),
        ({"temperature": 1.0, "top_k": 2}, {0: 0.625, 2: 0.375}),
        ({"temperature": 1.0, "top_k": 9}, {0: 0.5, 1: 0.05, 2: 0.3, 3: 0.15}),
        ({"temperature": 1.0, "top_p": 0.7}, {0: 0.625, 2: 0.375}),
        # Of the two that top_k leaves the first alone has 0.625.
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.6}, {0: 1.0}),
        ({"temperature": 1.0, "top_p": 1e-300}, {0: 1.0}),
        ({"temperature": 1e-300}, {0: 1.0}),
        ({"temperature": 0.0, "top_k": 3}, {0: 1.0}),
    ],
)
def test_tokens_are_drawn_with_their_probabilities(sampling: dict[str, Any], expected: dict[int, float]) -> None:
    drawn = draws(**sampling)
    assert set(drawn) <= set(expected)
    for token, probability in expected.items():
        # Four standard deviations of 2000 draws.
        assert drawn[token] / 2000 == pytest.approx(
            probability, abs=4 * (probability * (1 - probability) / 2000) ** 0.5
        )


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": float("inf")}, "temperature inf"),
        ({"top_k": 0}, "top-k 0"),
        ({"top_p": 0.0}, "top-p 0"),
        ({"top_p": 1.5}, "top-p 1.5"),
        ({"repetition_penalty": 0.0}, "repetition-penalty 0"),
        ({"repetition_penalty": float("nan")}, "repetition-penalty nan"),
        ({"seed": 2**64}, "seed 18446744073709551616"),
    ],
)
def test_impossible_sampling_is_refused(sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Sampling(**sampling)


@pytest.fixture(scope="module")
def tokenizers(runs: Path) -> dict[str, Tokenizer]:
    """One whose rare characters are bytes, one whose tokens are all single bytes."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    special = {"<|endoftext|>": 256}
    return {
        "sentencepiece": load_tokenizer(runs / "store"),
        "bytes": TiktokenTokenizer(name="bytes", pat_str=r"(?s:.+)", mergeable_ranks=ranks, special_tokens=special),
    }


NAMES = pytest.mark.parametrize("name", ["sentencepiece", "bytes"])


@NAMES
@given(text=st.text())
def test_characters_come_whole(tokenizers: dict[str, Tokenizer], name: str, text: str) -> None:
    tokenizer = tokenizers[name]
    parts = list(decode_stream(tokenizer, tokenizer.encode(text)))
    assert "".join(parts) == text
    assert all(parts)


@NAMES
@given(ids=st.lists(st.integers(min_value=0, max_value=256)))
def test_broken_characters_come_as_in_the_whole(tokenizers: dict[str, Tokenizer], name: str, ids: list[int]) -> None:
    tokenizer = tokenizers[name]
    assert "".join(decode_stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_text_comes_as_soon_as_it_is_complete(tokenizers: dict[str, Tokenizer]) -> None:
    ids = iter([*"a😀b".encode()])
    read: list[int] = []
    parts = decode_stream(tokenizers["bytes"], (read.append(token) or token for token in ids))  # type: ignore[func-returns-value]
    assert [(next(parts), len(read)) for _ in range(3)] == [("a", 1), ("😀", 5), ("b", 6)]


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    generate_command.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{runs}/nowhere"], "no run {runs}/nowhere: no such directory"),
        (["{runs}/store"], "{runs}/store is not a run directory: it has no config.toml"),
        (["{runs}/empty"], "{runs}/empty has no checkpoint yet"),
        (["{runs}/one", "--step", "7"], "{runs}/one/checkpoints has no checkpoint of step 7; it has: 2"),
        (["{runs}/one", "--store", "{runs}/no-store"], "--store {runs}/no-store: no token store"),
        (["{runs}/moved"], "elsewhere: the token store of {runs}/moved/config.toml is missing"),
        (["{runs}/one", "--store", "{runs}/one"], "{runs}/one/tokenizer/tokenizer.json"),
        (["{runs}/weights@7"], "{runs}/weights/checkpoints has no checkpoint of step 7; it has: 2 (weights)"),
        (["{runs}/one@2", "--step", "1"], "{runs}/one@2 and --step 1 both set the step"),
        (["{runs}/one@last"], '"{runs}/one@last": the step after @ must be a number, like {runs}/one@1000'),
        (["{runs}/one", "--prompt", ""], "--prompt: empty"),
        (["{runs}/one", "--prompt", "a\udcff"], "--prompt: not valid UTF-8 at character 1"),
        (["{runs}/one", "--prompt", "a", "--prompt-file", "b"], "--prompt and --prompt-file both"),
        (["{runs}/one", "--prompt-file", "{runs}/none.txt"], "--prompt-file {runs}/none.txt: No such file"),
        (["{runs}/one", "--prompt-file", "{runs}/blank.txt"], "--prompt-file {runs}/blank.txt: empty"),
        (["{runs}/one", "--prompt-file", "{runs}/latin.txt"], "{runs}/latin.txt: not valid UTF-8 at byte 3"),
        (["{runs}/one", "--tokens", "0"], "--tokens 0"),
        (["{runs}/one", "--temperature", "-1"], "temperature -1"),
    ],
)
def test_a_mistake_is_named(runs: Path, words: list[str], message: str) -> None:
    RunDirectory(runs / "empty").create_or_open(load(runs / "run.toml"))
    if RunDirectory(runs / "moved").create_or_open(load(runs / "run.toml", ['data.store="elsewhere"'])):
        shutil.copytree(runs / "one/checkpoints", runs / "moved/checkpoints")
    (runs / "blank.txt").touch()
    (runs / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError) as caught:
        generate_command.run(parse(*(word.format(runs=runs) for word in words)))
    assert message.format(runs=runs) in str(caught.value)


def test_a_copied_run_needs_no_store(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory alone, with weights alone, written by two ranks: the text is that of the run with its store."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ["--prompt", "the start of", "--tokens", "20", "--json"]
    assert generate_command.run(parse(f"{runs}/one@{STEP}", *words)) == 0
    expected = json.loads(capsys.readouterr().out)
    store, copied = tmp_path / "store", RunDirectory(tmp_path / "copied")
    shutil.copytree(runs / "store", store)
    config = load(runs / "run.toml", [f'data.store="{store}"'])
    run = RunDirectory(tmp_path / "run")
    run.create_or_open(config)
    shutil.copytree(runs / "weights/checkpoints", run.checkpoints)
    identity = TokenStore(store).tokenizer
    copy_tokenizer(store / "tokenizer", run.tokenizer, sha256=identity.sha256)
    shutil.copytree(run.path, copied.path)
    shutil.rmtree(store)
    shutil.rmtree(run.path)
    assert generate_command.run(parse(f"{copied.path}@{STEP}", *words)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoint"] == str(copied.checkpoints / directory_name(STEP, "weights"))
    assert (found["text"], found["tokens"]) == (expected["text"], expected["tokens"])

    # Another tokenizer in its place, and one that was changed.
    other = TokenStore(runs / "other-store").tokenizer
    copy_tokenizer(runs / "other-store" / "tokenizer", copied.tokenizer, sha256=other.sha256)
    with pytest.raises(UserError) as refused:
        generate_command.run(parse(str(copied.path), *words))
    assert f"{copied.path}: its tokenizer (sentencepiece, sha256 {other.sha256[:16]}…)" in str(refused.value)
    assert f" (sha256 {identity.sha256[:16]}…)" in str(refused.value)
    model = copied.tokenizer / "sentencepiece.model"
    model.write_bytes((runs / "store" / "tokenizer" / model.name).read_bytes())
    with pytest.raises(UserError, match=f"{copied.tokenizer}: the files have sha256 {identity.sha256}"):
        generate_command.run(parse(str(copied.path), *words))


def lightscale(*commands: list[str]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each ``lightscale generate``, run at the same time."""
    processes = [warm_commands.Command(["generate", *words], cwd=Path.cwd()) for words in commands]
    outputs = [process.communicate(timeout=100) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.long
def test_the_command_writes_the_text_and_nothing_else(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "one", run)
    good = run / "checkpoints" / directory_name(STEP)
    bad = good.with_name(directory_name(STEP + 1))
    shutil.copytree(good, bad)
    (bad / "state.json").write_bytes(b"")

    options = [str(run), "--prompt", "the start: 字", "--tokens", "40", "--seed", "3"]
    plain, as_json = lightscale(options, [*options, "--json", "--step", str(STEP)])
    code, text, messages = plain
    assert code == 0, messages
    _, warning, summary = messages.splitlines()
    assert warning.startswith(f"skipped a damaged checkpoint: {bad}/")
    assert summary.endswith(f"tokens/s after the prompt), from {good}")

    assert (as_json[0], as_json[2]) == (0, "loading PyTorch and Megatron …\n")
    record = json.loads(as_json[1])
    # What reads the output here turns a carriage return into a line feed.
    assert text == f"the start: 字{record['text']}\n".replace("\r\n", "\n").replace("\r", "\n")
    assert (record["checkpoint"], record["step"], record["prompt"]) == (str(good), STEP, "the start: 字")
    assert load_tokenizer(runs / "store").decode(record["tokens"]) == record["text"]
    assert record["end_of_text"] == (len(record["tokens"]) < 40)
    assert record["tokens_per_s"] > 1
