"""GPUs, driver and package versions of a rank's machine, and whether a run can work with them."""

import importlib.metadata
import platform
import re
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lightscale import __version__
from lightscale.files import size_text
from lightscale.parallel.device.fused import APEX_REMEDY, wrong_apex
from lightscale.runs.job_environment import node_name
from lightscale.training.health.check_result import CheckResult, Outcome

# Share of a GPU's memory; with less free, another process uses it.
_LEAST_FREE = 0.9
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_HOPPER = (9, 0)


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One GPU that torch sees."""

    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about a rank's machine."""

    host: str
    gpus: tuple[GPU, ...]
    """Examined GPUs: that of this rank, or all."""
    num_gpus: int
    """Number of visible GPUs."""
    driver: str | None
    """Version of the NVIDIA driver; None: no driver."""
    versions: Mapping[str, str]
    """Of the packages that compute, by name."""
    apex: str | None
    """A package named apex that is not NVIDIA's; None: no such package."""

    @classmethod
    def read(cls, local_rank: int | None = None) -> Self:
        """The facts as of now. `local_rank`: look at the GPU of this rank only; None: at all GPUs."""
        # The first call to a GPU takes a second or more: a rank does not ask those of others.
        visible = torch.cuda.device_count()
        own = range(visible) if local_rank is None else range(local_rank, min(local_rank + 1, visible))
        return cls(
            host=host_name(),
            gpus=tuple(map(_read_gpu, own)),
            num_gpus=visible,
            driver=_driver(),
            versions=package_versions(),
            apex=wrong_apex(),
        )


@dataclass(frozen=True, kw_only=True)
class KnownFault:
    """Versions of a package that are known to compute wrong numbers."""

    package: str
    versions: SpecifierSet
    capability: tuple[int, int] | None
    """Of the GPUs on which they do; None: on all."""
    result: Outcome
    what: str
    right: str


# Only faults that were reported with a reproduction, of versions that lightscale allows.
KNOWN_FAULTS = (
    KnownFault(
        package="triton",
        versions=SpecifierSet(">=3.4,<3.8"),
        capability=_HOPPER,
        result="warning",
        what=(
            "on Hopper silently miscompiles a dot whose transposed result enters another dot; lightscale's kernels "
            "have no such dot, kernels of other packages (flash-linear-attention) may"
        ),
        right="Triton 3.8 or newer; `make gpu-check` compares lightscale's kernels on this GPU with their references",
    ),
)


def host_name() -> str:
    """The scheduler's name of this host, if it has one, since its list of hosts to exclude accepts only that name."""
    return node_name() or socket.gethostname()


def judge_machine(machine: Machine, *, processes: int, device: str) -> list[CheckResult]:
    """Check one rank's facts. `processes`: ranks of this machine, each of which needs a GPU where there are any."""
    return [*_judge_gpus(machine, processes, device), *_judge_versions(machine), _judge_apex(machine.apex)]


def _judge_gpus(machine: Machine, processes: int, device: str) -> list[CheckResult]:
    right = "GPUs visible to torch; check `nvidia-smi`, CUDA_VISIBLE_DEVICES and the driver"
    if machine.num_gpus == 0:
        # With a driver but no visible GPU something is broken, also where the device is "auto" and CPUs would be used
        # silently.
        if machine.driver is not None and device != "cpu":
            cuda = machine.versions.get("CUDA")
            built = f"is built for CUDA {cuda}" if cuda else "is built without CUDA"
            found = f"NVIDIA driver {machine.driver} is installed, but torch, which {built}, finds no GPU"
            return [CheckResult(check="GPUs", result="failed", found=found, right=right, blames_host=True)]
        if device == "cuda":
            found = 'train.device = "cuda", but this machine has no GPU and no NVIDIA driver'
            return [CheckResult(check="GPUs", result="failed", found=found, right=right, blames_host=True)]
        return [CheckResult(check="GPUs", result="ok", found="none; training runs on CPUs")]
    # NCCL refuses two ranks on one GPU too, but only when these first communicate.
    if processes > machine.num_gpus:
        found = f"{machine.num_gpus} for at least {processes} ranks on this machine"
        return [CheckResult(check="GPUs", result="failed", found=found, right="one per rank", blames_host=True)]
    names = ", ".join(f"{count} {name}" for name, count in Counter(gpu.name for gpu in machine.gpus).items())
    results = [CheckResult(check="GPUs", result="ok", found=f"{names}, driver {machine.driver or 'unknown'}")]
    used = [gpu for gpu in machine.gpus if gpu.free_bytes < _LEAST_FREE * gpu.total_bytes]
    for gpu in used:
        found = f"{gpu.name}: {size_text(gpu.free_bytes)} of {size_text(gpu.total_bytes)} free"
        results.append(
            CheckResult(
                check="GPU memory",
                result="warning",
                found=found,
                right=("no other process on this GPU; check nvidia-smi"),
            )
        )
    return results


def _judge_versions(machine: Machine) -> list[CheckResult]:
    found = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    results = []
    for requirement in _requirements():
        version = machine.versions.get(requirement.name)
        # The torch of NVIDIA's containers is a pre-release: without `prereleases` it would be refused whatever its
        # number.
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            right = (
                f"{requirement.name} {requirement.specifier}: pip install '{requirement.name}{requirement.specifier}'"
            )
            results.append(
                CheckResult(check="versions", result="failed", found=f"{requirement.name} {version}", right=right)
            )
    capabilities = {gpu.capability for gpu in machine.gpus}
    for fault in KNOWN_FAULTS:
        version = machine.versions.get(fault.package)
        concerned = fault.capability is None or fault.capability in capabilities
        if version is not None and concerned and fault.versions.contains(version, prereleases=True):
            text = f"{fault.package} {version} {fault.what}"
            results.append(CheckResult(check="versions", result=fault.result, found=text, right=fault.right))
    return results or [CheckResult(check="versions", result="ok", found=found)]


def _judge_apex(wrong: str | None) -> CheckResult:
    if wrong is None:
        return CheckResult(check="apex", result="ok", found="no package named apex except NVIDIA's")
    return CheckResult(
        check="apex",
        result="warning",
        found=f"{wrong} is not NVIDIA's apex and is not used",
        right=APEX_REMEDY,
    )


def _read_gpu(index: int) -> GPU:
    # Makes a CUDA context, some hundreds of MB that count as used; `_LEAST_FREE` leaves room for that.
    free, total = torch.cuda.mem_get_info(index)
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    return GPU(name=name, capability=capability, free_bytes=free, total_bytes=total)


def _driver() -> str | None:
    try:
        # Not `nvidia-smi`, which need not be installed in a container, and which may hang on a broken GPU.
        text = _DRIVER_FILE.read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return match[0] if match else "unknown version"


def package_versions() -> dict[str, str]:
    """Versions of the software that computes the numbers of a run, by name."""
    versions = {"Python": platform.python_version(), "lightscale": __version__, "torch": torch.__version__}
    for package in ("numpy", "triton", "megatron-core", "transformer-engine"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        versions["CUDA"] = torch.version.cuda
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def _requirements() -> list[Requirement]:
    """What lightscale was installed with; nothing where it was not installed."""
    try:
        lines = importlib.metadata.requires("lightscale") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    every = [Requirement(line) for line in lines]
    # Requirements of optional extras have a marker that is false for no extra at all.
    return [one for one in every if one.marker is None or one.marker.evaluate({"extra": ""})]
