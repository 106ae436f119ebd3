"""A mixer of another package: found by its entry point, configured, counted and trained like lightscale's own.

The package is tests/helpers/toy_package; nothing of lightscale is changed or patched for it.
"""

import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.config import mixers
from lightscale.config.fields import describe_fields
from lightscale.config.files import load, to_toml
from lightscale.errors import UserError

HELPERS = Path(__file__).parents[1] / "helpers"
tiny = SimpleNamespace(**runpy.run_path(str(HELPERS / "tiny_engine.py")))

# Of tiny_engine's model.
L, D = tiny.MODEL["num_layers"], tiny.MODEL["hidden_size"]
MODEL: dict[str, Any] = {"mixer": "toy", "mixer_options": {"toy": {"decay": 0.5}}}
AXES = {"one": (1, 1, 1, 1), "tensor": (2, 2, 1, 1), "pipeline": (2, 1, 2, 1)}
STEPS = 2
RunRanks = Callable[..., list[Any]]


def install(folder: Path, name: str = "toy-mixer", entries: str = "toy = toy_mixer:ENTRY") -> None:
    """What pip leaves of a package beside its modules."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[lightscale.mixers]\n{entries}\n", encoding="utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(HELPERS / "toy_package", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    install(folder)
    return folder


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Makes a folder's packages importable, until the test ends."""
    yield lambda folder: monkeypatch.syspath_prepend(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy_mixer"]:
        del sys.modules[name]
    mixers.package_entry.cache_clear()


@pytest.fixture
def installed(site: Path, on_path: Callable[[Path], None]) -> None:
    on_path(site)


# ----- its configuration ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("installed")
def test_its_options_are_typed_described_and_resolved(tiny_run: Path, tmp_path: Path) -> None:
    assert mixers.known_mixers()[-1] == "toy"
    assert load(tiny_run, ["model.mixer=toy"]).model.mixer_options["toy"].model_dump() == {
        "decay": 0.75,
        "half_life": None,
    }
    config = load(tiny_run, ['model.mixer=["tnl", "toy"]', "model.mixer_options.toy.half_life=2"])
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(to_toml(config), encoding="utf-8")
    assert "[model.mixer_options.toy]\ndecay = 0.75\nhalf_life = 2\n" in to_toml(config)
    described = {field.key: field for field in describe_fields()}
    field = described["model.mixer_options.toy.decay"]
    assert (field.type, field.default) == ("a number > 0 and < 1", "0.75")
    assert field.description == "Share of a sum that is left one token later."
    assert "model.mixer_options.tnl.gate_rank" in described


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("decay=1.5", "model.mixer_options.toy.decay = 1.5: must be a number > 0 and < 1"),
        ("decay=fast", 'model.mixer_options.toy.decay = "fast": must be a number > 0 and < 1'),
        ("deacy=0.5", "unknown key model.mixer_options.toy.deacy; did you mean model.mixer_options.toy.decay?"),
        ("zebra=0.5", "unknown key model.mixer_options.toy.zebra; the mixer toy has the options decay, half_life"),
    ],
)
def test_wrong_options_are_refused(tiny_run: Path, override: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        load(tiny_run, ["model.mixer=toy", f"model.mixer_options.toy.{override}"])
    assert str(refused.value) == f'override "model.mixer_options.toy.{override}": {message}'


@pytest.mark.usefixtures("installed")
def test_the_mixers_own_checks_name_its_table(tiny_run: Path) -> None:
    tables = ["model.mixer=toy", "model.mixer_options.toy={decay = 0.5, half_life = 2}"]
    with pytest.raises(UserError) as refused:
        load(tiny_run, tables)
    assert str(refused.value) == (
        f'override "{tables[1]}": model.mixer_options.toy = {{decay = 0.5, half_life = 2}}: '
        "decay and half_life say one thing twice; use one of them"
    )


@pytest.mark.usefixtures("installed")
def test_it_is_among_the_known_mixers(tiny_run: Path) -> None:
    with pytest.raises(UserError, match=r"unknown mixer tyo; .*known: bi-rn, .*, tnl, toy$"):
        load(tiny_run, ["model.mixer=tyo"])
    with pytest.raises(UserError, match=r"model.mixer_options.toy = \{decay = 0.5\}: no layer uses this mixer"):
        load(tiny_run, ["model.mixer_options.toy.decay=0.5"])


def test_neither_its_configuration_nor_its_plan_imports_torch(site: Path, tiny_run: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from lightscale.cli import main\n"
        f"run = [{str(tiny_run)!r}, 'model.mixer=toy']\n"
        "names = {'torch', 'toy_mixer.options', 'toy_mixer.spec', 'toy_mixer.layer'}\n"
        "def loaded(): return sorted(names & set(sys.modules))\n"
        "assert main(['config', *run]) == main(['config', '--describe']) == 0\n"
        "configured = loaded()\n"
        "assert main(['plan', *run]) == main(['plan', *run, '--nodes', '1']) == 0\n"
        "print(configured, loaded())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.rstrip().endswith("['toy_mixer.options'] ['toy_mixer.options', 'toy_mixer.spec']")
    assert "toy positions" in done.stdout


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:ENTRY", "no_such_module:ENTRY, cannot be imported: No module named"),
        ("json:no_such_name", "json:no_such_name, cannot be imported: module 'json' has no"),
        ("json:dumps", "json:dumps, is a function; it must be a lightscale.config.mixers.MixerEntry"),
    ],
)
def test_a_broken_package_is_named(
    value: str, message: str, tiny_run: Path, tmp_path: Path, on_path: Callable[[Path], None]
) -> None:
    install(tmp_path / "site", entries=f"toy = {value}")
    on_path(tmp_path / "site")
    assert load(tiny_run).model.mixer == "tnl", "what a run does not use does not stop it"
    with pytest.raises(UserError, match=r"did you mean model.hidden_size\?$"):
        load(tiny_run, ["model.hiden_size=64"])
    with pytest.raises(UserError, match=r"^mixer toy: the entry point of toy-mixer, "):
        describe_fields()
    with pytest.raises(UserError) as refused:
        load(tiny_run, ["model.mixer=toy"])
    assert f"mixer toy: the entry point of toy-mixer, {message}" in str(refused.value)


def write_entry(folder: Path, fields: str) -> None:
    text = f"from lightscale.config.mixers import MixerEntry\nENTRY = MixerEntry({fields})\n"
    (folder / "toy_mixer.py").write_text(text, encoding="utf-8")


def test_an_entry_without_a_spec_is_refused(tiny_run: Path, tmp_path: Path, on_path: Callable[[Path], None]) -> None:
    install(tmp_path / "site", entries="toy = toy_mixer:ENTRY")
    write_entry(tmp_path / "site", 'cls="toy_mixer.layer:Toy"')
    on_path(tmp_path / "site")
    with pytest.raises(UserError, match=r"mixer toy: the entry point of toy-mixer, .* missing .* 'spec'"):
        load(tiny_run, ["model.mixer=toy"])


def test_options_that_are_no_section_are_refused(
    tiny_run: Path, tmp_path: Path, on_path: Callable[[Path], None]
) -> None:
    install(tmp_path / "site", entries="toy = toy_mixer:ENTRY")
    write_entry(tmp_path / "site", 'spec="json:dumps", cls="json:dumps", options="json:dumps"')
    on_path(tmp_path / "site")
    with pytest.raises(UserError) as refused:
        load(tiny_run, ["model.mixer=toy"])
    message = "mixer toy: the type of its options, json:dumps, must be a lightscale.config.section.Section"
    assert str(refused.value) == f"{tiny_run}: model.mixer_options: {message}"


@pytest.mark.usefixtures("installed")
def test_two_packages_with_one_name_are_refused(
    tiny_run: Path, tmp_path: Path, on_path: Callable[[Path], None]
) -> None:
    install(tmp_path / "site", name="other-toy")
    on_path(tmp_path / "site")
    with pytest.raises(
        UserError, match="several packages provide a mixer toy: other-toy, toy-mixer; uninstall all but one"
    ):
        load(tiny_run, ["model.mixer=toy"])


# ----- its layers, in processes of their own -------------------------------------------------------------------------


def measure(rank: int, world_size: int, init_method: str, site: str) -> dict[str, dict[str, Any]]:
    """Of the layouts on so many processes, by their names."""
    sys.path.insert(0, site)
    layouts = [name for name, axes in AXES.items() if axes[0] == world_size]
    return {name: measure_layout(name, rank, f"{init_method}-{name}") for name in layouts}


def measure_layout(name: str, rank: int, init_method: str) -> dict[str, Any]:
    from lightscale.config.model import ModelConfig
    from lightscale.config.schema import ParallelConfig
    from lightscale.kernels.common.backends import set_default_backend
    from lightscale.models.accounting import parameter_shapes, parameter_terms, rank_parameters
    from lightscale.models.flops import forward_flops_per_token
    from lightscale.models.operators import describe_operators
    from lightscale.models.registry import check_model
    from lightscale.parallel.initialization import named_parameters
    from lightscale.planning.workload import Workload

    model = ModelConfig(**{**tiny.MODEL, **MODEL})
    _, tensor, pipeline, _ = AXES[name]
    with tiny.engine_on(AXES[name], rank, init_method, **MODEL) as engine:
        found: dict[str, Any] = {
            "held": sum(parameter.numel() for parameter in engine.module.parameters()),
            "counted": rank_parameters(model, tensor=tensor, pipeline=pipeline)[engine.mesh.groups.pp.rank()],
            "records": tiny.train(engine, 0, STEPS),
        }
        if name != "one":
            return found
        found["shapes"] = {key: tuple(weight.shape) for key, weight in named_parameters(engine.module)}
        (rows, *_) = tiny.step_batches(0, engine.mesh)
        with torch.no_grad():
            found["losses"] = {}
            for backend in ("chunked", "reference"):
                set_default_backend(backend)
                found["losses"][backend] = engine.module(rows.tokens, rows.positions, rows.labels)
            set_default_backend("auto")
            found["in parts"] = in_parts(engine.module, rows)
    found["counted shapes"], found["terms"] = parameter_shapes(model), parameter_terms(model)
    found["flops"] = forward_flops_per_token(model, 48)
    work = Workload(model, 48)
    found["work"] = (work.embedding_part_flops, work.embedding_part_summaries(1), work.layers[0].cost.value)
    found["operators"] = describe_operators(model, torch.float32, torch.device("cpu"))
    with pytest.raises(UserError) as refused:
        check_model(model, ParallelConfig(sequence=2))
    found["refused"] = str(refused.value)
    return found


def in_parts(module: Any, rows: Any) -> float:
    """The error of logits with the state carried over cuts."""
    states: dict[str, Any] = {}
    parts = [
        module(tokens, positions, states=states)
        for tokens, positions in zip(
            rows.tokens.split([20, 1, 27], dim=1), rows.positions.split([20, 1, 27], dim=1), strict=True
        )
    ]
    return float(tiny.error(torch.cat(parts, dim=1), module(rows.tokens, rows.positions)))


@pytest.fixture(scope="module")
def measured(run_ranks: RunRanks, site: Path) -> dict[str, list[dict[str, Any]]]:
    """What every rank of every layout found."""
    by_size = {size: run_ranks(measure, size, str(site)) for size in sorted({axes[0] for axes in AXES.values()})}
    return {name: [of_rank[name] for of_rank in by_size[axes[0]]] for name, axes in AXES.items()}


def test_it_is_counted_as_it_is_built(measured: dict[str, list[dict[str, Any]]]) -> None:
    (one,) = measured["one"]
    assert one["shapes"] == one["counted shapes"]
    own = {"toy scales": L * D, "toy positions": 32 * D + 1, "projections": L * 2 * D * D}
    assert {name: one["terms"][name] for name in own} == own
    for found in measured.values():
        assert [of_rank["held"] for of_rank in found] == [of_rank["counted"] for of_rank in found]
    # Two projections and chunks of 16 tokens in each layer, a multiplication and addition per channel before them.
    layers = L * (4 * D * D + 2 * 16 * D + 6 * D * tiny.MODEL["intermediate_size"])
    assert one["flops"] == layers + 2 * D + 2 * D * tiny.MODEL["vocab_size"]
    # Its positions have no state to exchange.
    assert one["work"] == (2 * D, {}, "scan")


def test_its_operator_is_chosen_like_any_other(measured: dict[str, list[dict[str, Any]]]) -> None:
    (one,) = measured["one"]
    assert one["operators"].startswith("kernels: toy_sum chunked, norm ")
    assert tiny.error(one["losses"]["chunked"], one["losses"]["reference"]) < 1e-6
    assert one["in parts"] < 1e-5


def test_it_trains_alike_on_one_rank_and_on_two(measured: dict[str, list[dict[str, Any]]]) -> None:
    (one,) = measured["one"]
    first, last = one["records"][0], one["records"][-1]
    for name in ("toy_scales.table", "embedding.toy_positions.table", "embedding.toy_positions.strength"):
        assert first[1][name].norm() > 0, name
        assert not torch.equal(first[2][name], last[2][name]), f"{name} is not trained"
    for axes in ("tensor", "pipeline"):
        for of_rank in measured[axes]:
            numbers: dict[str, list[tuple[Tensor, Tensor]]] = {}
            for expected, found in zip(one["records"], of_rank["records"], strict=True):
                assert abs(found[0] - expected[0]) < 1e-5, axes
                assert found[1].keys() == expected[1].keys()
                for name in expected[1]:
                    if expected[1][name].numel() == 1:
                        numbers.setdefault(name, []).append((found[1][name], expected[1][name]))
                    else:
                        assert tiny.error(found[1][name], expected[1][name]) < 1e-4, f"{axes}: gradient of {name}"
            # A sum over all tokens nearly cancels in some step: all steps together.
            for name, pairs in numbers.items():
                assert tiny.error(*map(torch.stack, zip(*pairs, strict=True))) < 1e-4, f"{axes}: gradient of {name}"


def test_an_axis_that_it_cannot_be_split_on_is_refused(measured: dict[str, list[dict[str, Any]]]) -> None:
    assert measured["one"][0]["refused"].startswith(
        "parallel.sequence = 2: layer 0 (toy) cannot be split along sequence"
    )
