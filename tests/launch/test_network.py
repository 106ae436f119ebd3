"""Interfaces that a user names must be there, on each host."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from lightscale.errors import UserError
from lightscale.launch.network import check_interfaces

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@pytest.fixture(autouse=True)
def three_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one has no address of the internet."""
    with_address = [SimpleNamespace(family=socket.AF_INET, address="10.0.0.1")]
    link_only = [SimpleNamespace(family=psutil.AF_LINK, address="00:11:22:33:44:55")]
    found = {"lo": with_address, "ib0": with_address, "ib1": link_only}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


@pytest.mark.parametrize(
    "environ",
    [{}, {GLOO: ""}, {GLOO: "ib0"}, {GLOO: "lo,ib0"}, {NCCL: "ib"}, {NCCL: "=ib0"}, {NCCL: "eth,ib"}, {NCCL: "^eth0"}],
)
def test_what_is_there(environ: dict[str, str]) -> None:
    check_interfaces(environ, uses_nccl=True)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({GLOO: "eth0"}, "eth0"),
        ({GLOO: "ib0,ib1"}, "ib1"),
        ({GLOO: "ib"}, "ib"),
        ({NCCL: "eth"}, "eth"),
        ({NCCL: "=ib"}, "ib"),
    ],
)
def test_what_is_not_there(environ: dict[str, str], name: str) -> None:
    ((variable, text),) = environ.items()
    with pytest.raises(UserError) as caught:
        check_interfaces(environ, uses_nccl=True)
    assert str(caught.value) == (
        f'{variable} = "{text}": {socket.gethostname()} has no network interface {name} with an address; unset the '
        "variable, or use one of ib0, lo"
    )


def test_without_gpus_nobody_uses_nccl() -> None:
    check_interfaces({NCCL: "eth"}, uses_nccl=False)
