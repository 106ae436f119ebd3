"""A whole run on a device that computes is the run on CPUs: the training loop with all that goes with its steps."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightscale.runs.run_directory import RunDirectory, read_lines, read_metrics

pytestmark = [pytest.mark.twin, pytest.mark.timeout(1800)]
STAND_INS = Path(__file__).parents[2] / "tools" / "cuda_twin" / "stand_ins"
WORDS = (
    "model.num_layers=2",
    "model.vocab_size=128",
    "data.sequence_length=64",
    "train.micro_batch_size=2",
    'train.precision="fp32"',
    "train.profile_steps=[2, 3]",
    "guard.compare_replicas_every=2",
    "metrics.parameter_norms_every=2",
)


def trained(
    twin: Any, folder: Path, *, on_gpu: bool, saves: int, kernels: str, stand_ins: tuple[str, ...] = ()
) -> RunDirectory:
    folder.mkdir()
    environment = {**twin.environment(devices=int(on_gpu), computes=on_gpu), "OMP_NUM_THREADS": "1"}
    folders = [str(STAND_INS / one) for one in stand_ins]
    environment["PYTHONPATH"] = os.pathsep.join([*folders, environment["PYTHONPATH"]])
    command = [sys.executable, "-m", "cuda_twin.training_run", folder, saves, "tnl-tiny", *WORDS]
    done = subprocess.run(
        [*map(str, command), f'train.kernels="{kernels}"'],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    (folder / "output").write_text(done.stdout + done.stderr, "utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    return RunDirectory(folder / "run")


def losses(run: RunDirectory) -> dict[int, tuple[float, float]]:
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in read_metrics(run.metrics)}


def assert_equal(run: RunDirectory, expected: RunDirectory) -> None:
    found, right = losses(run), losses(expected)
    assert list(found) == list(right) == [1, 2, 3, 4, 5, 6]
    for step in found:
        assert found[step] == pytest.approx(right[step], rel=2e-6), step


def test_a_run_with_kernels_that_compute_nothing_falls_back_and_is_the_run_on_cpus(
    cuda_twin: ModuleType, tmp_path: Path
) -> None:
    """The null device launches Triton's kernels, and they compute nothing: broken ones, as a compiler may make them."""
    twin = cuda_twin.installation.installed()
    expected = trained(twin, tmp_path / "cpu", on_gpu=False, saves=0, kernels="chunked")
    run = trained(twin, tmp_path / "gpu", on_gpu=True, saves=3, kernels="auto")
    assert_equal(run, expected)
    events = read_lines(run.events)
    wrong = {event["operator"] for event in events if event["event"] == "kernel_mismatch"}
    assert wrong == {"lightning", "heads", "norm", "glu", "cross_entropy"}
    assert [event["event"] for event in events].count("start") == 2
    assert any(run.profile.iterdir())


def test_a_run_with_nvidias_packages_is_the_run_on_cpus(cuda_twin: ModuleType, tmp_path: Path) -> None:
    """By stand-ins for them, whose optimizers save, and resume."""
    twin = cuda_twin.installation.installed()
    expected = trained(twin, tmp_path / "cpu", on_gpu=False, saves=0, kernels="chunked")
    for packages, stand_ins in (("apex", (".",)), ("apex and Transformer Engine", ("te", "."))):
        folder = tmp_path / packages
        run = trained(twin, folder, on_gpu=True, saves=3, kernels="chunked", stand_ins=stand_ins)
        assert_equal(run, expected)
        assert f"fused kernels: {packages}\n" in (folder / "output").read_text("utf-8")


DOCTOR = """
import sys
from cuda_twin.forks import keep_devices_unused
keep_devices_unused()
import torch
from cuda_twin.computing import Computing
from lightscale.config.files import load
from lightscale.launch.doctor.examine import judge_kernels
config = load(sys.argv[1], ["data.sequence_length=64", "train.precision='fp32'"])
with Computing():
    print(judge_kernels(config, torch.device("cuda", 0)))
"""


@pytest.mark.parametrize("architecture", ["tnl", "hgrn2", "lightnet", "cosformer2"])
@pytest.mark.parametrize("works", [True, False], ids=["interpreted", "broken"])
def test_the_doctor_judges_the_kernels(cuda_twin: ModuleType, architecture: str, works: bool) -> None:
    installation = cuda_twin.installation
    twin = installation.installed()
    environment = {**twin.environment(computes=True), "TRITON_INTERPRET": str(int(works)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DOCTOR, f"{architecture}-tiny"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("result='ok'" in done.stdout) == works, done.stdout
    assert works or "off" in done.stdout
