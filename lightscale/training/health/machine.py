"""What one rank finds on its machine: GPUs, driver, versions; and what that means for a run."""

import importlib.metadata
import os
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
from lightscale.parallel.fused import APEX_REMEDY, wrong_apex
from lightscale.training.health.check_result import Finding, Result, size_text

# Of a GPU's memory; below, somebody else uses it.
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
    """What one rank finds on its machine."""

    host: str
    gpus: tuple[GPU, ...]
    """Those of this rank."""
    num_gpus: int
    """Those that are visible."""
    driver: str | None
    """Version of the NVIDIA driver; None: there is none."""
    versions: Mapping[str, str]
    """Of what computes, by package."""
    apex: str | None
    """A package of that name that is not NVIDIA's."""

    @classmethod
    def read(cls, local_rank: int | None = None) -> Self:
        """As of now. `local_rank`: look at the GPU of this rank alone; None: at all of them."""
        # A second or more passes until a GPU answers for the first time: a rank does not ask those of others.
        visible = torch.cuda.device_count()
        own = range(visible) if local_rank is None else range(local_rank, min(local_rank + 1, visible))
        return cls(
            host=host_name(),
            gpus=tuple(map(_read_gpu, own)),
            num_gpus=visible,
            driver=_driver(),
            versions=_versions(),
            apex=wrong_apex(),
        )


@dataclass(frozen=True, kw_only=True)
class KnownFault:
    """Versions of a package that go wrong."""

    package: str
    versions: SpecifierSet
    capability: tuple[int, int] | None
    """Of the GPUs on which they do; None: everywhere."""
    result: Result
    what: str
    right: str


# Only what somebody reported with a reproduction, and the versions of torch and Triton that lightscale allows have.
KNOWN_FAULTS = (
    KnownFault(
        package="triton",
        versions=SpecifierSet(">=3.4,<3.8"),
        capability=_HOPPER,
        result="warning",
        what="on Hopper compiles a dot whose transposed result enters another dot to wrong numbers, without an error; "
        "lightscale's own kernels have no such dot, those of other packages (flash-linear-attention) may",
        right="Triton 3.8 or newer; `make gpu-check` compares lightscale's kernels on this GPU with their references",
    ),
)


def host_name() -> str:
    """As SLURM calls this host, if it does: its list of hosts to leave out takes that name only."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def judge_machine(machine: Machine, *, processes: int, device: str) -> list[Finding]:
    """What one rank's facts say. `processes`: ranks of this machine, each of which needs a GPU where there are any."""
    return [*_judge_gpus(machine, processes, device), *_judge_versions(machine), _judge_apex(machine.apex)]


def _judge_gpus(machine: Machine, processes: int, device: str) -> list[Finding]:
    right = "GPUs that torch sees: see `nvidia-smi`, CUDA_VISIBLE_DEVICES and the driver"
    if machine.num_gpus == 0:
        if machine.driver is not None and device != "cpu":
            cuda = machine.versions.get("CUDA")
            built = f"is built for CUDA {cuda}" if cuda else "is built without CUDA"
            found = f"there is an NVIDIA driver, {machine.driver}, but torch, which {built}, sees no GPU"
            return [Finding(check="GPUs", result="failed", found=found, right=right, blames_host=True)]
        if device == "cuda":
            found = 'train.device = "cuda", but there is no GPU and no NVIDIA driver'
            return [Finding(check="GPUs", result="failed", found=found, right=right, blames_host=True)]
        return [Finding(check="GPUs", result="ok", found="none; training runs on CPUs")]
    if processes > machine.num_gpus:
        found = f"{machine.num_gpus} for at least {processes} ranks of this machine"
        return [Finding(check="GPUs", result="failed", found=found, right="one for each rank", blames_host=True)]
    names = ", ".join(f"{count} {name}" for name, count in Counter(gpu.name for gpu in machine.gpus).items())
    findings = [Finding(check="GPUs", result="ok", found=f"{names}, driver {machine.driver or 'unknown'}")]
    used = [gpu for gpu in machine.gpus if gpu.free_bytes < _LEAST_FREE * gpu.total_bytes]
    for gpu in used:
        found = f"{gpu.name}: {size_text(gpu.free_bytes)} of {size_text(gpu.total_bytes)} free"
        findings.append(
            Finding(check="GPU memory", result="warning", found=found, right="no other process there: see nvidia-smi")
        )
    return findings


def _judge_versions(machine: Machine) -> list[Finding]:
    found = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    findings = []
    for requirement in _requirements():
        version = machine.versions.get(requirement.name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            right = (
                f"{requirement.name} {requirement.specifier}: pip install '{requirement.name}{requirement.specifier}'"
            )
            findings.append(
                Finding(check="versions", result="failed", found=f"{requirement.name} {version}", right=right)
            )
    capabilities = {gpu.capability for gpu in machine.gpus}
    for fault in KNOWN_FAULTS:
        version = machine.versions.get(fault.package)
        concerned = fault.capability is None or fault.capability in capabilities
        if version is not None and concerned and fault.versions.contains(version, prereleases=True):
            text = f"{fault.package} {version} {fault.what}"
            findings.append(Finding(check="versions", result=fault.result, found=text, right=fault.right))
    return findings or [Finding(check="versions", result="ok", found=found)]


def _judge_apex(wrong: str | None) -> Finding:
    if wrong is None:
        return Finding(check="apex", result="ok", found="none that is not NVIDIA's")
    return Finding(
        check="apex",
        result="warning",
        found=f"{wrong} is another project than NVIDIA's, and is not used",
        right=APEX_REMEDY,
    )


def _read_gpu(index: int) -> GPU:
    free, total = torch.cuda.mem_get_info(index)
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    return GPU(name=name, capability=capability, free_bytes=free, total_bytes=total)


def _driver() -> str | None:
    try:
        text = _DRIVER_FILE.read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return match[0] if match else "of unknown version"


def _versions() -> dict[str, str]:
    versions = {"lightscale": __version__, "torch": torch.__version__}
    for package in ("triton", "megatron-core"):
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
    return [one for one in every if one.marker is None or one.marker.evaluate({"extra": ""})]
