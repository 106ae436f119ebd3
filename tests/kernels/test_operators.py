"""Descriptions of operators against what the operators are: back-ends, chunks, states; and the choice of a back-end."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.kernels import operators
from lightscale.kernels.common.angles import Angles
from lightscale.kernels.common.backends import (
    choose_backend,
    dispatch_pass,
    dispatch_step,
    implementation,
    set_default_backend,
)
from lightscale.kernels.delta_rule import chunked as delta_rule_chunked
from lightscale.kernels.delta_rule.triton import tiling as delta_rule_tiling
from lightscale.kernels.gla import chunked as gla_chunked
from lightscale.kernels.gla import gla
from lightscale.kernels.gla.triton import tiling as gla_tiling
from lightscale.kernels.lightnet import chunked as lightnet_chunked
from lightscale.kernels.lightnet import lightnet_attention
from lightscale.kernels.lightnet.triton import tiling as lightnet_tiling
from lightscale.kernels.lightning import chunked as lightning_chunked
from lightscale.kernels.lightning import lightning_attention
from lightscale.kernels.lightning.triton import tiling as lightning_tiling
from lightscale.kernels.lion import chunked as lion_chunked
from lightscale.kernels.lion import lion, vector
from lightscale.kernels.lion.triton import tiling as lion_tiling
from lightscale.kernels.log_sum import chunked as log_sum_chunked
from lightscale.kernels.log_sum import log_sum
from lightscale.kernels.log_sum.triton import tiling as log_sum_tiling
from lightscale.kernels.norm.eager import WIDEST
from lightscale.kernels.operators import Backend, CostClass, Operator, get_operator, register
from lightscale.kernels.tpe import chunked as tpe_chunked
from lightscale.kernels.tpe import tpe_scan
from lightscale.kernels.tpe.triton import COMPILE_CASES as TPE_CASES
from lightscale.parallel.sequence import (
    GatedScan,
    LightNetScan,
    LightNetWholeScan,
    LightningScan,
    LionScan,
    LionVectorScan,
    LogSumScan,
    LogSumWholeScan,
    Scan,
    TPEScan,
)
from lightscale.parallel.sequence.algebra import BOTH, DIAGONAL, LOG_SUM_EXP, WHOLE_LOG_SUM_EXP
from lightscale.parallel.sequence.log_sums import LOG_SUM, WHOLE_LOG_SUM
from lightscale.parallel.sequence.scans import algebra_of

FOLDERS = Path(operators.__file__).parent
TOY = '''
from torch import Tensor

def state_fwd(x: Tensor, *, scale: float = 1.0) -> Tensor:
    """A pass."""
    return x * (scale * {factor})

def recurrent_step(x: Tensor, state: tuple[Tensor, ...]) -> Tensor:
    """A step."""
    return (x + state[0]) * {factor}
'''


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten behind it."""
    monkeypatch.setattr(operators, "_OPERATORS", dict(operators._OPERATORS))


@pytest.fixture
def setting() -> Iterator[None]:
    yield
    set_default_backend("auto")


@pytest.fixture
def toy(table: None, setting: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Operator:
    """An operator of another package: its Triton back-end triples, its chunked one doubles."""
    (tmp_path / "toy_operator").mkdir()
    for name, factor in (("triton", 3), ("chunked", 2), ("reference", 5)):
        (tmp_path / "toy_operator" / f"{name}.py").write_text(TOY.format(factor=factor), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    names: tuple[operators.BackendName, ...] = ("triton", "chunked", "reference")
    backends = tuple(Backend(name=name, module=f"toy_operator.{name}") for name in names)
    return register(Operator(name="toy", cost=CostClass.SCAN, backends=backends))


def test_descriptions_need_no_torch() -> None:
    """Planning reads them on machines that have none."""
    code = "import sys, lightscale.kernels.operators; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_folder_is_described() -> None:
    folders = {path.parent.name for path in FOLDERS.glob("*/reference.py")}
    with_triton = {path.parents[1].name for path in FOLDERS.glob("*/triton/__init__.py")} - {"common"}
    described = [get_operator(name) for name in operators.operator_names()]
    # Forms of their own, in the folders of lightnet and of lion.
    whole = {"lightnet_noncausal", "lion_vector"}
    assert {operator.name for operator in described if operator.backends} == folders | whole
    assert {operator.name for operator in described if "triton" in operator.backend_names} == with_triton | whole
    assert [operator.name for operator in described if not operator.backends] == ["log_sum_whole", "SDPA"]


def test_every_module_is_there() -> None:
    for name in operators.operator_names():
        for backend in get_operator(name).backends:
            assert importlib.util.find_spec(backend.module) is not None, backend
            assert implementation(name, backend.name).__name__ == backend.module


@pytest.mark.parametrize(
    ("name", "tiling", "chunked"),
    [
        ("lightning", lightning_tiling, lightning_chunked),
        ("gla", gla_tiling, gla_chunked),
        ("delta_rule", delta_rule_tiling, delta_rule_chunked),
        ("lightnet", lightnet_tiling, lightnet_chunked),
        ("lion", lion_tiling, lion_chunked),
    ],
)
def test_chunks_are_those_of_the_kernels(name: str, tiling: Any, chunked: Any) -> None:
    triton = get_operator(name).backend("triton")
    for dtype in (torch.float16, torch.bfloat16):
        assert tiling.tiling_of(dtype).chunk == triton.chunk_size == get_operator(name).chunk_size
    assert tiling.tiling_of(torch.float32).chunk == (triton.fp32_chunk_size or triton.chunk_size)
    assert get_operator(name).backend("chunked").chunk_size == chunked.DEFAULT_CHUNK_SIZE


def test_chunks_of_the_positional_encoding_and_the_width_of_the_norm() -> None:
    steps = {case.constants["STEP"] for case in TPE_CASES if "STEP" in case.constants}
    assert steps == {get_operator("tpe").backend("triton").chunk_size}
    assert get_operator("tpe").backend("chunked").chunk_size == tpe_chunked.DEFAULT_CHUNK_SIZE
    assert get_operator("log_sum").backend("triton").chunk_size == log_sum_tiling.CHUNK
    assert get_operator("log_sum").backend("chunked").chunk_size == log_sum_chunked.DEFAULT_CHUNK_SIZE
    assert get_operator("norm").backend("triton").max_width == WIDEST


def final_state(name: str, tokens: int, dtype: torch.dtype, *, angles: bool) -> tuple[Tensor, ...]:
    """Of 2 rows, 3 heads, K = 4, V = 5; 6 channels and 7 modes."""
    q, k, v = (torch.ones(2, tokens, 3, width, dtype=dtype) for width in (4, 4, 5))
    turned = Angles(torch.ones(3, 4), torch.arange(tokens).expand(2, tokens)) if angles else None
    if name == "lightning":
        state: Any = lightning_attention(q, k, v, angles=turned, output_final_state=True)[1]
    elif name == "gla":
        state = gla(q, k, v, -torch.ones(2, tokens, 3, 4), output_final_state=True)[1]
    elif name == "lightnet":
        state = lightnet_attention(q, k, v, angles=turned, output_final_state=True)[1]
    elif name == "lion":
        state = lion(q, k, v, output_final_state=True)[1]
    elif name == "lion_vector":
        state = vector.state_fwd(k, v, -torch.ones(2, tokens, 3, 5))[0]
    elif name == "log_sum":
        state = log_sum(torch.ones(2, tokens, 6, dtype=dtype))[:, -1]
    else:
        x = torch.ones(2, tokens, 6, dtype=dtype)
        state = tpe_scan(x, -torch.ones(7), torch.ones(6, 7), output_final_state=True)[1]
    return (state,) if isinstance(state, Tensor) else tuple(state)


@pytest.mark.parametrize("angles", [False, True], ids=["", "angles"])
@pytest.mark.parametrize("name", ["lightning", "gla", "lightnet", "lion", "lion_vector", "tpe", "log_sum"])
def test_states_are_described(name: str, angles: bool) -> None:
    described = get_operator(name).state
    assert described is not None and not described.grows and described.dtype == "fp32"
    sizes = {"B": 2, "H": 3, "K": 4, "R": 8 if angles else 4, "V": 5, "W": 6, "U": 10, "D": 6, "E": 7}
    for tokens, dtype, expected in ((3, torch.bfloat16, torch.float32), (70, torch.float64, torch.float64)):
        found = final_state(name, tokens, dtype, angles=angles)
        for tensor, description in zip(found, described.tensors, strict=True):
            assert tuple(tensor.shape) == tuple(sizes[symbol] for symbol in description.shape), description
            assert tensor.dtype == expected


def test_only_attention_and_relations_keep_all_tokens() -> None:
    growing = [name for name in operators.operator_names() if operators.state_grows(name)]
    assert growing == ["relation", "SDPA"]
    assert not operators.state_grows("norm")


@pytest.mark.parametrize(
    ("name", "scan", "algebra"),
    [
        ("lightning", LightningScan, DIAGONAL),
        ("gla", GatedScan, DIAGONAL),
        ("tpe", TPEScan, DIAGONAL),
        ("lightnet", LightNetScan, LOG_SUM_EXP),
        ("lightnet_noncausal", LightNetWholeScan, WHOLE_LOG_SUM_EXP),
        ("lion", LionScan, BOTH),
        ("lion_vector", LionVectorScan, BOTH),
        ("log_sum", LogSumScan, LOG_SUM),
        ("log_sum_whole", LogSumWholeScan, WHOLE_LOG_SUM),
    ],
)
def test_states_travel_by_the_described_algebra(name: str, scan: type[Scan], algebra: Any) -> None:
    assert algebra_of(name) is scan.algebra is algebra


@pytest.mark.parametrize(("name", "why"), [("SDPA", "a prefix state of 'concatenation'"), ("norm", "no state")])
def test_other_states_do_not_travel(name: str, why: str) -> None:
    with pytest.raises(UserError, match=rf"operator '{name}' has {why}; .* for: prefix states of 'diagonal', "):
        algebra_of(name)


@pytest.mark.usefixtures("table")
def test_a_name_is_described_once() -> None:
    operator = Operator(name="toy", cost=CostClass.SCAN)
    assert register(operator) is register(replace(operator)) is get_operator("toy") is operator
    with pytest.raises(UserError, match="operator 'toy' is already registered with a different description"):
        register(replace(operator, cost=CostClass.SOFTMAX))
    assert get_operator("toy").cost is CostClass.SCAN


@pytest.mark.parametrize(
    ("name", "names"), [("toy", ["chunked", "chunked"]), ("toy", ["cuda"]), ("", ["chunked"])], ids=str
)
def test_wrong_descriptions_are_refused(name: str, names: list[Any]) -> None:
    with pytest.raises(UserError, match=r"back-ends .*each back-end once, out of triton, chunked, reference"):
        Operator(name=name, cost=CostClass.SCAN, backends=tuple(Backend(name=x, module="toy") for x in names))


def test_an_unknown_operator_is_refused() -> None:
    for use in (lambda: get_operator("delta"), lambda: choose_backend("delta", torch.ones(1))):
        with pytest.raises(UserError, match=r"no operator 'delta'; use one of SDPA, cross_entropy, .*register$"):
            use()


def test_a_chunk_that_nobody_described_is_refused() -> None:
    with pytest.raises(UserError, match="operator 'SDPA' has no back-end with a chunk_size"):
        _ = get_operator("SDPA").chunk_size
    with pytest.raises(UserError, match="norm has no backend 'cuda'; use triton, chunked, reference"):
        get_operator("norm").backend("cuda")
    with pytest.raises(UserError, match="SDPA has no backend 'triton'; use PyTorch"):
        get_operator("SDPA").backend("triton")


@pytest.mark.usefixtures("setting")
def test_what_pytorch_computes_has_no_choice() -> None:
    for asked in ("auto", "triton", "reference"):
        set_default_backend(asked)
        assert choose_backend("SDPA", torch.ones(1)) == "PyTorch"


def test_a_wide_norm_is_not_for_triton() -> None:
    assert choose_backend("norm", torch.ones(1, WIDEST), "triton") == "triton"
    with pytest.raises(UserError, match="norm has no backend 'triton'; use auto, chunked, reference"):
        choose_backend("norm", torch.ones(1, WIDEST + 1), "triton")


@pytest.mark.usefixtures("table")
def test_an_operator_without_a_back_end_for_the_device_is_refused() -> None:
    register(Operator(name="toy", cost=CostClass.SCAN, backends=(Backend(name="triton", module="toy.triton"),)))
    with pytest.raises(UserError, match=r"toy has no back-end for torch.float32 on cpu; use auto, triton"):
        choose_backend("toy", torch.ones(1))


def test_passes_of_another_package_are_dispatched(toy: Operator) -> None:
    state_fwd = dispatch_pass("toy", implementation("toy", "chunked").state_fwd)
    assert (state_fwd.__name__, state_fwd.__doc__) == ("state_fwd", "A pass.")
    x = torch.ones(2)
    for setting, factor in (("auto", 2), ("chunked", 2), ("triton", 3)):
        set_default_backend(setting)
        assert state_fwd(x, scale=10.0).tolist() == [10 * factor] * 2
    set_default_backend("reference")
    with pytest.raises(UserError, match="sequence-parallel toy has no backend 'reference'; use auto, triton"):
        state_fwd(x)


def test_a_step_with_a_gradient_is_the_one_that_autograd_knows(toy: Operator) -> None:
    step = dispatch_step("toy", implementation("toy", "chunked").recurrent_step)
    x, learned = torch.ones(1), torch.ones(1, requires_grad=True)
    for setting, factor in (("auto", 2), ("triton", 3), ("reference", 2)):
        set_default_backend(setting)
        assert step(x, (x,)).item() == 2 * factor
    set_default_backend("triton")
    # Also where what learns is inside a state.
    assert step(learned, (x,)).requires_grad and step(learned, (x,)).item() == 4
    assert step(x, (learned,)).requires_grad and step(x, (learned,)).item() == 4
    with torch.no_grad():
        assert step(x, (learned,)).item() == 6


def test_what_is_asked_for_comes_before_the_setting(toy: Operator) -> None:
    set_default_backend("reference")
    x = torch.ones(1)
    assert [choose_backend("toy", x, asked) for asked in ("auto", "chunked", "triton")] == [
        "reference",
        "chunked",
        "triton",
    ]
