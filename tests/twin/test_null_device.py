"""Real training steps on the null device: what they ask for is within its budget, and what planning says."""

import json
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

# Seconds of work for each case; a slow machine must not be taken for a hang.
pytestmark = pytest.mark.timeout(900)
Found = dict[str, Any]
COMPUTE = 0
"""The stream of the computation."""
MOST_HOST_WAITS = 3
"""Of a step without validation: the number of tokens, the sums of the loss, the gradient norm."""
WITH_EXCHANGES = "tnl 1B, 2 layers, sequence 8"


@pytest.fixture(scope="module")
def quick(cuda_twin: ModuleType) -> dict[str, Found]:
    """The quick cases, in one start."""
    return recorded(cuda_twin, cuda_twin.cases.quick_cases())


def recorded(cuda_twin: ModuleType, cases: dict[str, Any]) -> dict[str, Found]:
    found = cuda_twin.null_cases.record(cuda_twin.installation.installed(), list(cases.values()))
    return dict(zip(cases, found, strict=True))


def collectives(found: Found, *groups: str) -> list[Found]:
    return [one for one in found["steps"][-1]["collectives"] if one["group"] in groups]


def hold(cuda_twin: ModuleType, runs: dict[str, Found]) -> None:
    for name, found in runs.items():
        check_run(cuda_twin, name, found)
    budgets = cuda_twin.cases.read_budgets()
    exceeded = [line for name, found in runs.items() for line in cuda_twin.cases.exceeded(name, found, budgets)]
    assert not exceeded, "\n".join(exceeded)


def check_run(cuda_twin: ModuleType, name: str, found: Found) -> None:
    """Nothing that would fail on a GPU, and nothing of which the null device knows nothing."""
    assert found["faults"] == {}, name
    step = found["steps"][-1]
    assert step["allocations"] == {}, f"{name}: the second step allocates, which waits for the device"
    assert set(step["unknown"]) <= {"cublasSetMathMode", "cublasSetWorkspace_v2"}, name
    assert step["launches_in_all"] > 0
    # Among them Megatron's that buckets of weights are gathered in another order than they are asked for.
    assert found["warnings"] == [], name
    check_states(cuda_twin, name, found)
    check_messages(name, found)
    check_gradients(cuda_twin, name, found)
    check_streams(name, found)
    check_waits(name, found)


def check_states(cuda_twin: ModuleType, name: str, found: Found) -> None:
    """States: as many bytes as planning says, for every layer, micro-batch and direction."""
    planned = cuda_twin.null_cases.planned_state_bytes(found)
    given = cuda_twin.null_cases.given_bytes(found, "states")
    assert planned in (None, given), f"{name}: {given:,} bytes of states, planned {planned:,}"


def check_messages(name: str, found: Found) -> None:
    """Between pipeline stages: sent and received together, and the host waits neither for them nor for the device."""
    if found["layout"]["pipeline"] == 1:
        return
    messages = {one["call"]: one["calls"] for one in collectives(found, "pipeline_model_parallel")}
    assert sum(messages.get(call, 0) for call in ("Send", "Recv")) >= found["case"]["micro_batches"], name
    waits = found["steps"][-1]["host_waits"]
    assert not [wait for wait in waits if "pipeline" in wait["where"] or wait["call"] == "cudaDeviceSynchronize"], waits


def check_gradients(cuda_twin: ModuleType, name: str, found: Found) -> None:
    """Gradients are reduced once a step in fp32, and weights gathered once; padding of the buckets aside."""
    planned, layout = found["planned"], found["layout"]
    group, given_bytes = "data_parallel_group_with_cp", cuda_twin.null_cases.given_bytes
    ranks = layout["data"] * layout["sequence"]
    if ranks == 1:
        return
    reduced = given_bytes(found, group, "ReduceScatter")
    assert planned["gradients_bytes"] <= reduced <= 1.02 * planned["gradients_bytes"] + 2**20, name
    gathered = ranks * given_bytes(found, group, "AllGather")
    assert planned["weights_bytes"] <= gathered <= 1.02 * planned["weights_bytes"] + 2**20, name


def check_streams(name: str, found: Found) -> None:
    """What runs beside the computation has a stream of its own, and the computation is on one."""
    streams: dict[str, set[int]] = {}
    for one in found["steps"][-1]["collectives"]:
        streams.setdefault(f"{one['group']} {one['call']}", set()).add(one["stream"])
    beside = [key for key in streams if key.startswith("states") or key.endswith("ReduceScatter")]
    for key in beside:
        if not key.startswith("tensor_model_parallel"):
            assert COMPUTE not in streams[key], f"{name}: {key} waits for the computation"
    work = {stream: counts for stream, counts in found["steps"][-1]["streams"].items() if counts.get("product")}
    assert list(work) == [hex(COMPUTE)], f"{name}: matrix products on {list(work)}"


def check_waits(name: str, found: Found) -> None:
    """Whatever two streams, or a stream and the host, share is ordered, from the start of the run on."""
    waits = found["waits"]
    assert waits["races"] == [], f"{name}: {waits['races']}"
    # Something was looked at, on every stream that collectives are on.
    assert waits["accesses"] > 1000, name
    assert {hex(one["stream"]) for one in found["steps"][-1]["collectives"]} <= set(waits["accesses_of_streams"]), name
    if not found["case"]["validate"]:
        assert found["steps"][-1]["host_waits_in_all"] <= MOST_HOST_WAITS, name


def test_steps_ask_for_no_more_than_their_budgets(cuda_twin: ModuleType, quick: dict[str, Found]) -> None:
    hold(cuda_twin, quick)


def test_a_budget_that_is_exceeded_is_named(cuda_twin: ModuleType, quick: dict[str, Found]) -> None:
    name, found = next(iter(quick.items()))
    asked = cuda_twin.cases.asked(found)
    budgets = {name: {**asked, "host_waits": asked["host_waits"] - 1}}
    (line,) = cuda_twin.cases.exceeded(name, found, budgets)
    assert line.startswith(f"{name}: {asked['host_waits']} host waits in a step")


def test_every_host_wait_has_its_line(quick: dict[str, Found]) -> None:
    for found in quick.values():
        for wait in found["steps"][-1]["host_waits"]:
            assert wait["where"].startswith("lightscale/"), wait


@pytest.mark.twin
def test_each_wait_for_an_exchange_is_needed_and_missed(cuda_twin: ModuleType) -> None:
    """Each wait of a step is left out of the records once."""
    case = {**cuda_twin.cases.all_cases()[WITH_EXCHANGES], "waits_tried": True}
    waits = recorded(cuda_twin, {"": case})[""]["waits"]["stream_waits"]
    print(*waits, sep="\n")
    exchanges = [one for one in waits if "sequence/exchange.py" in one["where"]]
    # Before an exchange and behind it, forward and backward, of each layer and micro-batch.
    assert [one["waits"] for one in exchanges] == [8, 8]
    assert all(one.get("needed") == one["waits"] for one in exchanges)
    missed = " ".join(key for one in waits for key in one if key.startswith("without one"))
    for race in ("before ReduceScatter", "orders ReduceScatter", "before AllGather", "orders AllGather"):
        assert race in missed, missed


@pytest.mark.twin
def test_what_lightscale_forgets_is_noticed(cuda_twin: ModuleType) -> None:
    """Its own calls do nothing, so that waits are not recorded, and memory is handed out too early."""
    case = cuda_twin.cases.all_cases()[WITH_EXCHANGES]
    forgotten = {
        "wait_stream": "before aten::cat (lightscale/parallel/sequence/exchange.py",
        "wait_event": "nothing orders fold_segments (lightscale/kernels/common/triton/segments.py",
        "record_stream": "nothing orders aten::cat (lightscale/parallel/sequence/exchange.py",
    }
    for method, found in recorded(cuda_twin, {one: {**case, "forgets": one} for one in forgotten}).items():
        races = [one["race"] for one in found["waits"]["races"]]
        assert any(forgotten[method] in race for race in races), f"{method}: {races}"


@pytest.fixture(scope="module")
def kept(cuda_twin: ModuleType) -> dict[str, Found]:
    """All kept cases, in one start."""
    return recorded(cuda_twin, cuda_twin.cases.all_cases())


@pytest.mark.twin
@pytest.mark.timeout(3600)
def test_every_kept_case_asks_for_no_more_than_its_budget(cuda_twin: ModuleType, kept: dict[str, Found]) -> None:
    hold(cuda_twin, kept)


@pytest.mark.twin
@pytest.mark.timeout(3600)
def test_launches_beside_the_loss_do_not_depend_on_the_length(cuda_twin: ModuleType, kept: dict[str, Found]) -> None:
    for name, counts in cuda_twin.cases.length_pairs(kept).items():
        assert len(set(counts)) == 1, f"{name}: {counts} kernels a step"


@pytest.mark.twin
@pytest.mark.timeout(3600)
def test_launches_do_not_grow_with_the_ranks(cuda_twin: ModuleType, kept: dict[str, Found]) -> None:
    """States are folded over 8 ranks and over 64, of which each has less to do for itself."""
    for name, (few, many) in cuda_twin.cases.rank_pairs(kept).items():
        assert many <= few, f"{name}: {few} and {many} launches a step"


@pytest.mark.twin
def test_kernels_are_compared_within_a_minute(cuda_twin: ModuleType) -> None:
    """By the doctor, at widths of 1B: few launches, and beside what compilers take a second of an H100's."""
    cases, seconds = cuda_twin.cases, cuda_twin.null_cases.comparison_s
    runs = recorded(cuda_twin, cases.kernel_cases())
    budgets = cases.read_budgets()
    assert not [line for name, one in runs.items() for line in cases.exceeded(name, one, budgets)]
    for name, found in runs.items():
        assert found["faults"] == {}, name
        assert found["steps"][-1]["launches"]["triton"] > 3, name
        assert 0.01 < seconds(found) < 2, name


@pytest.mark.twin
def test_a_user_is_told_what_a_run_asks_for(cuda_twin: ModuleType) -> None:
    words = ["plan", "tnl-tiny", "--trace", "--json", "--rank", "1", "--processes", "2", "parallel.sequence=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lightscale", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["case"]["rank"], found["layout"]["sequence"], found["waits"]["races"]) == (1, 2, [])
    check_run(cuda_twin, "tnl-tiny", found)


@pytest.mark.twin
@pytest.mark.timeout(3600)
def test_peak_memory_is_what_planning_says(cuda_twin: ModuleType) -> None:
    """Within 2 %."""
    found = recorded(cuda_twin, cuda_twin.cases.planned_cases())
    off = {name: cuda_twin.null_cases.off_plan(one) for name, one in found.items()}
    print({name: f"{100 * value:+.1f} %" for name, value in off.items()})
    assert all(abs(value) <= 0.02 for value in off.values()), off
