"""The null device is built with headers of the CUDA that PyTorch's build is for, wherever these are."""

from pathlib import Path
from types import ModuleType

import pytest

from lightscale.errors import UserError


@pytest.fixture
def installation(tools_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from cuda_twin import installation

    monkeypatch.setenv(installation.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(installation, "_triton_headers", lambda: tmp_path / "triton")
    return installation


def write_headers(folder: Path, version: int) -> None:
    folder.mkdir(parents=True)
    (folder / "cuda_runtime_api.h").write_text(f"/** API Version */\n#define CUDART_VERSION  {version}\n")


def write_build(installation: ModuleType, cuda: str) -> None:
    path = installation.wheel_path() / "torch/version.py"
    path.parent.mkdir(parents=True)
    path.write_text(f"__version__ = '2.11.0'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n")


def test_tritons_where_they_are_of_the_same_cuda(installation: ModuleType, tmp_path: Path) -> None:
    write_build(installation, "'13.0'")
    write_headers(tmp_path / "triton", 13010)
    write_headers(tmp_path / "cuda-13.0/nvidia/cu13/include", 13000)
    assert installation.headers() == tmp_path / "triton"


def test_fetched_ones_where_tritons_are_of_another_cuda(installation: ModuleType, tmp_path: Path) -> None:
    write_build(installation, "'13.0'")
    write_headers(tmp_path / "triton", 12080)
    assert installation.headers() is None
    write_headers(tmp_path / "cuda-13.0/nvidia/cu13/include", 13000)
    assert installation.headers() == tmp_path / "cuda-13.0/nvidia/cu13/include"


def test_a_build_for_an_older_cuda_takes_older_headers(installation: ModuleType, tmp_path: Path) -> None:
    write_build(installation, "'12.8'")
    write_headers(tmp_path / "triton", 13010)
    assert installation.headers() is None
    assert installation._header_packages("12.8") == ["nvidia-cuda-runtime-cu12==12.8.*"]
    assert installation._header_packages("13.0") == ["nvidia-cuda-runtime==13.0.*", "nvidia-cuda-crt==13.0.*"]


def test_a_build_without_cuda_is_refused(installation: ModuleType) -> None:
    write_build(installation, "None")
    with pytest.raises(UserError, match="without CUDA"):
        installation.cuda_version()
