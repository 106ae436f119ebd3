"""Checkpoints with values that nobody saved, under hashes of their own: refused by name, by whatever uses them."""

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightscale.cli import main
from lightscale.config.files import to_toml
from lightscale.config.schedules.step_tokens import StepTokens
from lightscale.training.checkpoints.directories import Contents, directory_name
from lightscale.training.checkpoints.manifest import NAME
from lightscale.training.checkpoints.random_states import random_states
from lightscale.training.checkpoints.reading import DamagedCheckpoint
from lightscale.training.checkpoints.restore import Checkpoints, NoGoodCheckpoint

pytestmark = pytest.mark.timeout(300)

crafted = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "crafted_checkpoints.py")))
Victim, outcome, read = crafted.Victim, crafted.outcome, crafted.read
STEP, TOKENS, TENSORS, JSON = crafted.STEP, crafted.TOKENS, crafted.TENSORS, crafted.JSON
tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "tiny_engine.py")))
GOLDEN = Path(__file__).parents[1] / "training" / "checkpoints" / "golden" / "format-2"
GOLDEN_MODEL = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}


def setting(*keys: Any, to: Any) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        for key in keys[:-1]:
            value = value[key]
        value[keys[-1]] = to

    return change


def without(*keys: Any) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        for key in keys[:-1]:
            value = value[key]
        del value[keys[-1]]

    return change


def renaming(old: str, new: str) -> Callable[[Any], None]:
    """In the manifest: a file under another name."""

    def change(body: Any) -> None:
        body["files"][new] = body["files"].pop(old)

    return change


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


OUTPUT = "model.output.weight@0,0"
LAYER = "model.layer.weight@0,0"
LOW, HIGH = ("data_offsets", 0), ("data_offsets", 1)


def moving(name: str, by: int) -> Callable[[Any], None]:
    def change(header: Any) -> None:
        header[name]["data_offsets"] = [at + by for at in header[name]["data_offsets"]]

    return change


def shapes(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def edit(header: Any) -> None:
        value = json.loads(header["__metadata__"]["shapes"])
        result = change(value)
        header["__metadata__"]["shapes"] = result if isinstance(result, str) else json.dumps(value)

    return edit


def box_renamed(old: str, new: str) -> Callable[[Any], Any]:
    return lambda header: {new if key == old else key: value for key, value in header.items()}


# Name: the file, the change of its JSON value, and what the refusal says.
CASES: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "a name that leads out of the directory": (NAME, renaming("state.json", "../state.json"), "../state.json"),
    "an absolute name": (NAME, renaming("state.json", "/etc/passwd"), "/etc/passwd"),
    "a device": (NAME, renaming("state.json", "/dev/zero"), "/dev/zero"),
    "a name in a directory": (NAME, renaming("state.json", "sub/state.json"), "sub/state.json"),
    "a name of control characters": (NAME, renaming("state.json", "\x1b[31m\n"), "files"),
    "half of a surrogate pair": (NAME, setting("hosts", 0, to="\ud800"), "hosts.0"),
    "a host that moves the cursor": (NAME, setting("hosts", 0, to="\x1b[2J"), "hosts.0"),
    "a file more": (NAME, lambda body: body["files"].update(extra=body["files"]["state.json"]), "has a extra"),
    "a rank more": (NAME, lambda body: body["files"].update({"rank-00002.json": body["files"][JSON[1]]}), "rank-00002"),
    "a file less": (NAME, without("files", "rank-00001.json"), "has no rank-00001.json"),
    "no files": (NAME, without("files"), "files"),
    "files as a list": (NAME, setting("files", to=[]), "files"),
    "files as null": (NAME, setting("files", to=None), "files"),
    "a record that is a number": (NAME, setting("files", "state.json", to=3), "files.state.json"),
    "a record without a hash": (NAME, without("files", "state.json", "xxh3_128"), "files.state.json.xxh3_128"),
    "a hash of another form": (NAME, setting("files", "state.json", "xxh3_128", to="zz"), "xxh3_128"),
    "a negative size": (NAME, setting("files", "state.json", "bytes", to=-1), "files.state.json.bytes"),
    "a size as text": (NAME, setting("files", "state.json", "bytes", to="9"), "files.state.json.bytes"),
    "a size that is true": (NAME, setting("files", "state.json", "bytes", to=True), "files.state.json.bytes"),
    "a huge size": (NAME, setting("files", "state.json", "bytes", to=10**30), "files.state.json.bytes"),
    "no step": (NAME, without("step"), "step"),
    "a step as text": (NAME, setting("step", to="20"), "step"),
    "another step": (NAME, setting("step", to=21), "expected step 20, found 21"),
    "a step of 30 digits": (NAME, setting("step", to=10**30), "step"),
    "tokens as text": (NAME, setting("tokens", to="many"), "tokens"),
    "other tokens": (NAME, setting("tokens", to=TOKENS + 256), "expected 5376 tokens as in MANIFEST.json, found 5120"),
    "no layout": (NAME, without("layout"), "layout"),
    "a layout of text": (NAME, setting("layout", to="one"), "layout"),
    "a layout without an axis": (NAME, without("layout", "data"), "layout.data"),
    "an axis of no rank": (NAME, setting("layout", "data", to=0), "layout.data"),
    "a layout of more ranks": (NAME, setting("layout", "tensor", to=2), "a layout of 4 ranks, and the hosts of 2"),
    "ranks without files": (
        NAME,
        lambda body: body.update(hosts=["a"] * 4, layout={**body["layout"], "data": 4}),
        "has no rank-00002.json",
    ),
    "no versions": (NAME, without("versions"), "versions"),
    "versions as a list": (NAME, setting("versions", to=["torch"]), "versions"),
    "a version that is a number": (NAME, setting("versions", "torch", to=2), "versions.torch"),
    "no hosts": (NAME, without("hosts"), "hosts"),
    "hosts as text": (NAME, setting("hosts", to="ab"), "hosts"),
    "other contents": (NAME, setting("contents", to="everything"), "contents"),
    "contents of weights": (NAME, setting("contents", to="weights"), "its name is step-00000020-weights"),
    "a format that is text": (NAME, setting("format", to="2"), "format"),
    "a format that is true": (NAME, setting("format", to=True), "format"),
    "no format": (NAME, without("format"), "format"),
    "a manifest that is a list": (NAME, lambda body: [body], "expected a JSON object"),
    "a manifest that is nested": (NAME, lambda body: nested(10_000), "nested"),
    "a fact that is nested": (NAME, lambda body: json.dumps(body)[:-1] + f', "x": {nested(40)}}}', "nested"),
    "a number of 5000 digits": (NAME, lambda body: json.dumps(body)[:-1] + f', "x": {"9" * 5000}}}', "JSON"),
    "a key twice": (NAME, lambda body: json.dumps(body)[:-1] + ', "step": 20}', "duplicate key 'step'"),
    "a state that is a list": ("state.json", lambda state: [], "expected a JSON object"),
    "a state that is empty": ("state.json", lambda state: "", "JSON"),
    "a state that is nested": ("state.json", lambda state: nested(100_000), "nested"),
    "a state with a key twice": (
        "state.json",
        lambda state: json.dumps(state)[:-1] + ', "step": 20}',
        "duplicate key 'step'",
    ),
    "a state of another step": ("state.json", setting("step", to=19), "expected step 20, found 19"),
    "a state without a step": ("state.json", without("step"), "step"),
    "optimizer: null": ("state.json", setting("optimizer", to=None), "optimizer"),
    "no optimizer": ("state.json", without("optimizer"), "no optimizer counters"),
    "a negative counter": ("state.json", setting("optimizer", "adam_steps", to=-1), "optimizer.adam_steps"),
    "a counter that is text": ("state.json", setting("optimizer", "adam_steps", to="3"), "optimizer.adam_steps"),
    "a counter that is a fraction": ("state.json", setting("optimizer", "adam_steps", to=3.5), "optimizer.adam_steps"),
    "more steps than the run": ("state.json", setting("optimizer", "adam_steps", to=21), "21 steps as adam_steps"),
    "another count of tokens": ("state.json", setting("data", "tokens", to=TOKENS - 256), "expected 5120 tokens"),
    "tokens that are a fraction": ("state.json", setting("data", "tokens", to=5120.0), "data.tokens"),
    "no data": ("state.json", without("data"), "has no data"),
    "data: null": ("state.json", setting("data", to=None), "data"),
    "skips under another key": (
        "state.json",
        lambda state: state["data"].update(skip=state["data"].pop("skips")),
        "skip",
    ),
    "a skip of one number": ("state.json", setting("data", "skips", to=[[1]]), "data.skips.0"),
    "a skip of nothing": ("state.json", setting("data", "skips", to=[[1, 0]]), "data.skips.0.1"),
    "a skip that is to come": ("state.json", setting("data", "skips", to=[[TOKENS + 1, 4]]), "skipped after 5121"),
    "a fingerprint that is a list": ("state.json", setting("data", "fingerprint", to=[]), "data.fingerprint"),
    "a fingerprint of nothing": ("state.json", setting("data", "fingerprint", to={}), "no tokenizer"),
    "no guard": ("state.json", without("guard"), "has no guard"),
    "guard: null": ("state.json", setting("guard", to=None), "guard"),
    "a loss that is NaN": ("state.json", setting("guard", "losses", 0, to=float("nan")), "NaN is not a JSON number"),
    "a loss that is infinite": (
        "state.json",
        lambda state: json.dumps(state).replace("5.25", "1e999"),
        "number 1e999 is too large",
    ),
    "a loss that is a word": ("state.json", setting("guard", "losses", 0, to="low"), "guard.losses.0"),
    "a loss of 400 digits": ("state.json", setting("guard", "losses", 0, to=10**400), "guard.losses.0"),
    "losses without norms": ("state.json", setting("guard", "grad_norms", to=[1.0]), "2 losses and 1 norms"),
    "skips in a row below 0": ("state.json", setting("guard", "skips_in_a_row", to=-1), "guard.skips_in_a_row"),
    "no torch generator": ("rank-00001.json", without("torch"), "rank-00001.json: torch"),
    "a torch generator that is short": ("rank-00000.json", setting("torch", to="00"), "rank-00000.json"),
    "a torch generator of zeros": ("rank-00000.json", setting("torch", to="00" * 5056), "not a generator state"),
    "a torch generator of words": ("rank-00000.json", setting("torch", to="no hex"), "torch"),
    "a torch generator of huge size": ("rank-00000.json", setting("torch", to="00" * (1 << 20)), "at most 262144"),
    "Python's generator short": ("rank-00000.json", setting("python", 1, to=[1, 2]), "python.1"),
    "Python's generator of words": ("rank-00000.json", setting("python", 1, 3, to="7"), "python.1.3"),
    "Python's generator at 0": ("rank-00000.json", setting("python", 1, 624, to=0), "at position 0"),
    "Python's generator of another version": ("rank-00000.json", setting("python", 0, to=2), "python.0"),
    "a word of 33 bits": ("rank-00000.json", setting("numpy", 1, 0, to=1 << 32), "numpy.1.0"),
    "NumPy's generator of another kind": ("rank-00000.json", setting("numpy", 0, to="PCG64"), "numpy.0"),
    "NumPy's generator at 700": ("rank-00000.json", setting("numpy", 2, to=700), "numpy.2"),
    "random states as a list": ("rank-00000.json", lambda states: [states], "expected a JSON object"),
    "no shapes": (TENSORS[0], without("__metadata__"), "no shapes"),
    "shapes that are no text": (TENSORS[0], setting("__metadata__", "shapes", to={}), "no shapes"),
    "shapes that are no JSON": (TENSORS[0], setting("__metadata__", "shapes", to="{"), "JSON"),
    "more metadata": (TENSORS[0], setting("__metadata__", "run", to="x"), "no shapes"),
    "a shape less": (TENSORS[0], shapes(without("model.output.weight")), OUTPUT),
    "a shape more": (TENSORS[0], shapes(setting("model.more", to=[1])), "model.more"),
    "a shape of other ranks": (TENSORS[0], shapes(setting("model.output.weight", to=[8, 6])), "several shapes"),
    "a shape of fractions": (TENSORS[0], shapes(setting("model.output.weight", to=[4.0, 6])), "shape.0"),
    "a shape of 2 ** 60": (TENSORS[0], shapes(setting("model.output.weight", to=[1 << 60, 6])), "shape.0"),
    "a shape that is nested": (TENSORS[0], shapes(lambda value: nested(100_000)), "nested"),
    "no dtype": (TENSORS[0], without(OUTPUT, "dtype"), f"{OUTPUT}.dtype"),
    "a dtype of objects": (TENSORS[0], setting(OUTPUT, "dtype", to="O"), f"{OUTPUT}.dtype"),
    "whole numbers as weights": (
        TENSORS[0],
        setting(OUTPUT, "dtype", to="I32"),
        "model.output.weight has dtype F32, I32",
    ),
    "half numbers as weights": (TENSORS[0], setting(OUTPUT, "dtype", to="BF16"), "bytes"),
    "overlapping offsets": (TENSORS[0], moving(LAYER, -8), "begins at byte"),
    "offsets of another tensor": (
        TENSORS[0],
        lambda header: header["exp_avg.output.weight@0,0"].update(data_offsets=header[OUTPUT]["data_offsets"]),
        "begins at byte",
    ),
    "offsets that leave a hole": (TENSORS[0], moving(OUTPUT, 8), "begins at byte"),
    "offsets behind the file": (TENSORS[0], moving(OUTPUT, 1 << 40), "begins at byte"),
    "offsets that are negative": (TENSORS[0], moving(OUTPUT, -64), "data_offsets"),
    "offsets the wrong way round": (
        TENSORS[0],
        lambda header: header[OUTPUT]["data_offsets"].reverse(),
        "its offsets give",
    ),
    "offsets of three": (TENSORS[0], setting(OUTPUT, "data_offsets", to=[0, 48, 48]), "data_offsets"),
    "a tensor that is not there": (TENSORS[0], without(OUTPUT), "begins at byte"),
    "a box of another size": (TENSORS[0], setting(OUTPUT, "shape", to=[3, 6]), "bytes"),
    "a box of no elements": (TENSORS[0], setting(OUTPUT, "shape", to=[0, 6]), f"{OUTPUT}.shape.0"),
    "a box of nine dims": (TENSORS[0], setting(OUTPUT, "shape", to=[1] * 7 + [2, 6]), f"{OUTPUT}.shape"),
    "a box of other dims": (TENSORS[0], setting(OUTPUT, "shape", to=[12]), "does not fit into"),
    "a box behind its tensor": (TENSORS[0], box_renamed(OUTPUT, "model.output.weight@3,0"), "does not fit into"),
    "a box that others hold": (
        TENSORS[0],
        box_renamed(OUTPUT, "model.output.weight@2,0"),
        "is stored 0 times at (0, 0)",
    ),
    "a box below 0": (TENSORS[0], box_renamed(OUTPUT, "model.output.weight@-1,0"), "not a box name"),
    "a box without an offset": (TENSORS[0], box_renamed(OUTPUT, "model.output.weight"), "not a box name"),
    "a name that cannot be printed": (TENSORS[0], box_renamed(OUTPUT, "model.\x1b[2J@0,0"), "not a box name"),
    "a name of half a pair": (TENSORS[0], box_renamed(OUTPUT, "model.\ud800@0,0"), "not a box name"),
    "a box with more to it": (TENSORS[0], setting(OUTPUT, "sparse", to=True), f"{OUTPUT}.sparse"),
    "a box that is a number": (TENSORS[0], setting(OUTPUT, to=4), OUTPUT),
    "a header that is a list": (TENSORS[0], lambda header: [header], "expected a JSON object"),
    "a header that is nested": (TENSORS[0], lambda header: nested(100_000), "nested"),
    "a header with a key twice": (
        TENSORS[0],
        lambda header: json.dumps(header)[:-1] + f', "{OUTPUT}": 1}}',
        "duplicate key",
    ),
}


def craft(victim: Victim, case: str) -> None:
    """Make the change of ``case``, and write the hashes again."""
    name, change, _ = CASES[case]
    if name == NAME:
        body = json.loads(victim.content[NAME])
        result = change(body)
        if isinstance(result, str | list):
            victim.write(NAME, result.encode() if isinstance(result, str) else json.dumps(result).encode())
        else:
            victim.seal_manifest(body)
    else:
        victim.edit(name, change)
        victim.seal()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("case", CASES)
def test_a_crafted_value_is_refused_by_its_name(case: str, victim: Victim) -> None:
    expected = CASES[case][2]
    craft(victim, case)
    message = outcome(victim)
    assert message is not None
    assert expected in message
    with pytest.raises(DamagedCheckpoint):
        read(victim.path)


def test_moments_among_weights_alone(alone: Victim) -> None:
    for rank in range(2):
        alone.edit(TENSORS[rank], lambda header: json.dumps(header).replace("model.norm", "exp_avg.norm"))
    alone.seal()
    assert "exp_avg.norm.weight, and holds only weights" in (outcome(alone) or "")
    alone.repair()
    alone.edit("state.json", setting("optimizer", to={}))
    alone.seal()
    assert "has optimizer counters, and holds only weights" in (outcome(alone) or "")


def test_moments_of_other_tensors(victim: Victim) -> None:
    for rank in range(2):
        victim.edit(TENSORS[rank], lambda header: json.dumps(header).replace("exp_avg.norm", "exp_avg.morn"))
    victim.seal()
    assert "of exp_avg differs from that of the weights" in (outcome(victim) or "")


def test_a_box_that_is_held_twice(victim: Victim) -> None:
    """As many elements as there are, one of them twice and another never."""
    victim.edit(TENSORS[1], box_renamed("model.norm.weight@4", "model.norm.weight@3"))
    victim.seal()
    assert "model.norm.weight is stored 2 times at (3,)" in (outcome(victim) or "")


# --- What uses it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        "an absolute name",
        "files as null",
        "a host that moves the cursor",
        "no layout",
        "a format that is true",
        "a manifest that is a list",
        "optimizer: null",
        "a torch generator that is short",
        "overlapping offsets",
        "a name that cannot be printed",
        "no shapes",
    ],
)
def test_the_command_names_what_is_wrong(
    victims: dict[Contents, Victim], tiny_config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    run = tmp_path / "[/run]"
    whole, crafted = (run / "checkpoints" / directory_name(step) for step in (STEP, STEP + 1))
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(tiny_config()))
    shutil.copytree(victims["full"].path, whole)
    shutil.copytree(victims["full"].path, crafted)
    victim = Victim(crafted)
    at_next(victim)
    victim.content = {file.name: file.read_bytes() for file in crafted.iterdir()}
    craft(victim, case)

    def command(*words: str) -> tuple[int, str]:
        code = main(["checkpoint", *words])
        output = capsys.readouterr()
        assert all(line.isprintable() for line in (output.out + output.err).splitlines())
        return code, output.out + output.err

    code, text = command("verify", str(run))
    assert code == 1 and "step 20: intact" in text and f"step 21: {crafted}" in text
    code, text = command("list", str(run), "--json")
    assert [row["step"] for row in json.loads(text)["checkpoints"]] == [STEP, STEP + 1]
    assert code == (1 if CASES[case][0] == NAME else 0)
    assert command("list", str(run))[0] == code
    # Of what it shows: the manifest and the headers.
    shown_too = CASES[case][0] in ("state.json", "rank-00000.json")
    assert (command("show", f"{run}@21")[0] == 0) == shown_too
    code, text = command("diff", f"{run}@20", f"{run}@21")
    assert code == 78 and str(crafted) in text
    assert "nothing removed: only 1 checkpoints" in command("prune", str(run))[1]
    assert whole.is_dir() and crafted.is_dir()


def at_next(victim: Victim) -> None:
    """Make it the checkpoint of the step behind."""
    victim.edit("state.json", setting("step", to=STEP + 1))
    body = json.loads(victim.content[NAME])
    victim.seal_manifest({**body, "step": STEP + 1})
    victim.seal()


def restore_crafted(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[str, str, bool]]:
    """On the golden checkpoint, a real one: (case, refusal, whether the state is as before)."""
    golden = GOLDEN / directory_name(1)
    found = []
    with tiny.engine_on((1, 1, 1, 1), rank, init_method, seed=7, **GOLDEN_MODEL) as engine:

        def attempt(case: str, change: Callable[[Victim], None], **kept: Any) -> None:
            victim = Victim(Path(shutil.copytree(golden, Path(folder) / case / directory_name(1))))
            change(victim)
            before = tiny.own_state(engine)
            generators = random_states()
            try:
                Checkpoints(victim.path.parent, engine.mesh, **kept).restore(engine, allow=["versions"])
                message = "accepted"
            except NoGoodCheckpoint as refusal:
                message = str(refusal)
            same = tiny.differing(before, tiny.own_state(engine)) == [] and random_states() == generators
            found.append((case, message, same))

        for case in RESTORED:
            attempt(case, lambda victim, case=case: craft(victim, case))
        counters = setting("optimizer", to={"sgd_steps": 1})
        attempt("other counters", lambda victim: (victim.edit("state.json", counters), victim.seal()))
        attempt("other tokens", lambda victim: None, step_tokens=StepTokens(full=96))
        attempt("no guard", lambda victim: None, parts=["guard"])
        attempt("no tokenizer", lambda victim: None, parts=["data"])
        attempt("whole", lambda victim: None, step_tokens=StepTokens(full=192))
    return found


RESTORED = (
    "a name that leads out of the directory",
    "files as null",
    "optimizer: null",
    "another count of tokens",
    "a torch generator of zeros",
    "Python's generator short",
    "no shapes",
)


def test_no_weight_changes_before_all_is_checked(run_ranks: Any, tmp_path: Path) -> None:
    (found,) = run_ranks(restore_crafted, 1, str(tmp_path))
    *refused, whole = found
    assert whole == ("whole", "accepted", False)
    expected = {case: CASES[case][2] for case in RESTORED if case != "another count of tokens"} | {
        "another count of tokens": "expected 192 tokens as in MANIFEST.json, found 4864",
        "other counters": "expected the optimizer counters adam_steps, found sgd_steps",
        "other tokens": "expected 96 tokens after step 1, found 192",
        "no guard": "state.json: has no guard",
        "no tokenizer": "the data fingerprint has no tokenizer",
    }
    assert len(refused) == len(expected)
    for case, message, same in refused:
        assert expected[case] in message and same, (case, message)
