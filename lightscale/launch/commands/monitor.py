"""``lightscale monitor``: serve the curves of runs in TensorBoard, also during training, until interrupted."""

import argparse
import contextlib
import getpass
import json
import os
import signal
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from tensorboard import program

from lightscale.config.arguments import RUN, require_run, run_argument
from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.launch.scheduler import adopt_job
from lightscale.runs.job_environment import job_id, submit_host
from lightscale.runs.run_directory import RunDirectory

_LOCALHOST = "localhost"
# The first start imports TensorBoard, which may take a minute from a network file system.
_START_TIMEOUT_S = 120.0
_POLL_S = 0.1
# Soon after each line of metrics is on disk.
_RELOAD_S = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale monitor``."""
    parser.add_argument(
        "runs", nargs="+", type=run_argument, metavar=RUN, help="run directories, or one folder of runs"
    )
    parser.add_argument("--port", type=int, metavar="N", help="port (default: 6006 or the next free one; 0: any)")
    parser.add_argument(
        "--host",
        default=_LOCALHOST,
        metavar="ADDRESS",
        help="address to listen on; with 0.0.0.0 everyone who can reach this machine sees the curves "
        "(default: localhost)",
    )
    parser.add_argument("--json", action="store_true", help="print the address as one line of JSON")


def run(args: argparse.Namespace) -> int:
    """Start TensorBoard, print its address, and wait for Ctrl-C or SIGTERM, which end it with exit code 0."""
    if args.port is not None and not 0 <= args.port < 1 << 16:
        raise UserError(f"--port {args.port}: must be a port number, 0 to 65535")
    # For the `ssh` command, which differs on the node of a job.
    adopt_job(os.environ)
    stop = threading.Event()
    with log_directory(args.runs) as logs:
        server = start(logs, host=args.host, port=args.port)
        port = urlsplit(server).port
        assert port is not None
        _wait_for_answer(port, args.host)
        forward = forwarding(os.environ, host=args.host, port=port)
        # Only now: while TensorBoard starts, a signal ends the command by its own action.
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda *_: stop.set())
        if args.json:
            print(json.dumps({"url": server, "port": port, "forward": forward}), flush=True)
        else:
            print(f"{server}  (stop with Ctrl-C)", flush=True)
            print(f"from another machine: run {forward}, then open {_address(_LOCALHOST, port)} there", flush=True)
        # With a time limit: on some systems an endless wait is not interrupted by signals.
        while not stop.wait(1.0):
            pass
    return 0


@contextlib.contextmanager
def log_directory(runs: Sequence[Path]) -> Iterator[Path]:
    """A directory with the curves of exactly `runs`.

    For one folder of runs it is that folder, so that runs started later appear too.
    """
    if len(runs) == 1 and not _is_run(runs[0]):
        folder = runs[0]
        if not folder.is_dir() or not any(map(_is_run, folder.iterdir())):
            raise UserError(f"{folder} is neither a run nor a folder of runs: it contains no config.toml")
        yield folder
        return
    for path in runs:
        _check(path)
    with tempfile.TemporaryDirectory(prefix="lightscale-monitor-") as name:
        for label, path in zip(_labels(runs), runs, strict=True):
            link = Path(name) / label
            link.parent.mkdir(parents=True, exist_ok=True)
            # Absolute, because the link is in another directory than the one from which `runs` was given.
            link.symlink_to(RunDirectory(path.absolute()).tensorboard)
        yield Path(name)


def start(logs: Path, *, host: str, port: int | None) -> str:
    """Start TensorBoard in a thread of this process; returns its address."""
    server = program.TensorBoard()
    options = ["--logdir", str(logs), "--host", host, "--reload_interval", str(_RELOAD_S)]
    server.configure(["tensorboard", *options, *([] if port is None else ["--port", str(port)])])
    try:
        url: str = server.launch()
    except program.TensorBoardPortInUseError:
        raise UserError(f"--port {port} is used by another program; use another port, or 0 for any") from None
    except program.TensorBoardServerException as error:
        raise UserError(f"TensorBoard does not start: {error.msg}") from None
    found = urlsplit(url).port
    assert found is not None
    return _address(socket.gethostname() if _is_any(host) else host, found)


def forwarding(environ: Mapping[str, str], *, host: str, port: int) -> str:
    """The `ssh` command that forwards `port` of this machine, to run on the user's own machine."""
    here, user = socket.gethostname(), _user()
    if job_id(environ) is not None:
        login = submit_host(environ) or "LOGIN_HOST"
        # Compute nodes are reached through a login node. What listens on localhost is reached only by a login to this
        # node itself (-J); what listens on all addresses, from the login node.
        if host == _LOCALHOST:
            return f"ssh -L {port}:{_LOCALHOST}:{port} -J {user}@{login} {user}@{here}"
        return f"ssh -L {port}:{here}:{port} {user}@{login}"
    # "client address, client port, server address, server port": the server's is the one the user can reach.
    connection = environ.get("SSH_CONNECTION", "").split()
    reached = connection[2] if len(connection) == 4 else here
    return f"ssh -L {port}:{_LOCALHOST if host == _LOCALHOST or _is_any(host) else host}:{port} {user}@{reached}"


def _wait_for_answer(port: int, host: str) -> None:
    address = _address(_LOCALHOST if _is_any(host) else host, port)
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{address}data/environment", timeout=_START_TIMEOUT_S) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > deadline:
                raise UserError(f"TensorBoard does not answer at {address}: {error}") from None
        time.sleep(_POLL_S)


def _check(path: Path) -> None:
    require_run(path)
    directory = RunDirectory(path)
    if not directory.tensorboard.exists() and "tensorboard" not in load(directory.config).metrics.sinks:
        raise UserError(f"{path} has no curves: metrics.sinks lacks tensorboard; read the numbers in metrics.jsonl")


def _is_run(path: Path) -> bool:
    return (path / "config.toml").is_file()


def _labels(runs: Sequence[Path]) -> list[str]:
    """Names that distinguish the runs: their paths without their common directory."""
    absolute = [path.absolute() for path in runs]
    if len(set(absolute)) < len(absolute):
        raise UserError(f"{' '.join(map(str, runs))}: the same run twice; name each run once")
    # Names alone are not enough: runs in two folders may be called alike.
    common = os.path.commonpath([path.parent for path in absolute])
    return [str(path.relative_to(common)) for path in absolute]


def _is_any(host: str) -> bool:
    return host in ("0.0.0.0", "::")


def _address(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "USER"
