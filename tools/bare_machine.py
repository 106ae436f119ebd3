"""What README promises of a fresh machine, tried on one: a Debian with only what README names, in a folder.

    python3 tools/bare_machine.py                           # `make quickstart` and `make test`, as root and as a user
    python3 tools/bare_machine.py --user ordinary "make test"
    python3 tools/bare_machine.py --suite trixie            # with the Python of another Debian
    python3 tools/bare_machine.py --folder /var/tmp/bare --keep    # keep the systems; `--again` uses them once more

Each user gets a system of its own: debootstrap's smallest with `PACKAGES`, and a copy of the tracked files as they lie
in the working tree. `ordinary` has a home directory that is not there and that it cannot make. Commands run in
namespaces of their own for mounts and processes: whatever ends this program, nothing stays mounted, and no process is
left behind. Debian's mirror is that of this machine's apt, Python's index that of its pip.

Needs root, debootstrap, git and util-linux; nothing of lightscale, so that any Python 3.11 runs it. About 6 GB.
Exit code 0: every command passed; 1: one failed; 2: it could not be tried.
"""

import argparse
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What README says is needed; ca-certificates, since an index is asked by https.
PACKAGES = ("python3", "python3-venv", "gcc", "libc6-dev", "make", "ca-certificates")
COMMANDS = ("make quickstart", "make test")
USERS = ("root", "ordinary")
ORDINARY_ID = 1000
# Of each user, in the system.
HOMES = {"root": "/root", "ordinary": "/nonexistent"}
TREE = Path("srv/lightscale")
PROGRAMS = {"debootstrap": "debootstrap", "unshare": "util-linux", "chroot": "coreutils", "tar": "tar", "git": "git"}
# Of their own, so that mounts and processes end with the first process of them.
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--")
# The first process stays, and waits for those whose parents have gone.
INSIDE = """
set -e
system=$1; pty=$2; shift 2
mount -t proc proc "$system/proc"
mount -t sysfs -o ro sysfs "$system/sys"
mkdir -p "$system/dev/shm" "$system/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$system/dev/shm"
if [ "$pty" = yes ]; then
  mount -t devpts -o newinstance,mode=620,ptmxmode=666 devpts "$system/dev/pts"
  mount --bind "$system/dev/pts/ptmx" "$system/dev/ptmx"
fi
while [ "$1" != -- ]; do
  mount --bind -o ro "$1" "$system$1"
  shift
done
shift
code=0
chroot "$@" || code=$?
exit $code
"""


class NotTried(Exception):
    """Something that this machine lacks; the message says what helps."""


def main(arguments: list[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the folder is removed then too
    try:
        _check_this_machine()
        with _folder(options) as folder:
            failed = _try_all(folder, options)
    except (NotTried, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return 1 if failed else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "commands", nargs="*", metavar="COMMAND", help=f"a line of shell; else {' and '.join(COMMANDS)}"
    )
    parser.add_argument(
        "--user", choices=USERS, action="append", help=("user to run as (default: both, one after the other)")
    )
    parser.add_argument("--suite", default="bookworm", help="Debian suite (default: %(default)s)")
    parser.add_argument(
        "--mirror", metavar="URL", help=("URL of the Debian mirror (default: the mirror of this machine's apt)")
    )
    parser.add_argument("--folder", type=Path, help="folder of the systems; the output of debootstrap is reused")
    parser.add_argument("--keep", action="store_true", help="keep the systems in --folder after the run")
    parser.add_argument("--again", action="store_true", help="reuse the systems of --keep; copy tracked files again")
    parser.add_argument("--no-pty", action="store_true", help="run without pseudo-terminals (devpts)")
    options = parser.parse_args(arguments)
    if (options.keep or options.again) and options.folder is None:
        parser.error("--keep and --again need --folder, the folder of the systems")
    return options


def _check_this_machine() -> None:
    if os.geteuid() != 0:
        raise NotTried("root is needed to create a system in a folder: run this with sudo")
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # of root, also where su has left that of a user
    os.environ["PATH"] = path
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        packages = " ".join(PROGRAMS[program] for program in missing)
        raise NotTried(f"missing: {', '.join(missing)}; install with: apt-get install {packages}")
    tried = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        raise NotTried(f"namespaces are not available: run this outside of containers: {tried.stderr.strip()}")


@contextmanager
def _folder(options: argparse.Namespace) -> Iterator[Path]:
    """Where systems are made: that of the options, or one that is removed at the end."""
    if options.folder is not None:
        folder = options.folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="bare-machine-", dir="/var/tmp") as name:  # /tmp may be memory
        yield Path(name)


def _try_all(folder: Path, options: argparse.Namespace) -> list[str]:
    """The commands that failed, with their users."""
    settings = _pip_settings()
    results: list[tuple[str, int, float]] = []
    for user in options.user or USERS:
        system = folder / f"{options.suite}-{user}"
        if not (options.again and system.is_dir()):
            shutil.rmtree(system, ignore_errors=True)
            _make_system(_base(folder, options), system)
        try:
            _copy_tree(system, user)
            for command in options.commands or COMMANDS:
                what = f"{options.suite}, {user}{', no pseudo-terminals' if options.no_pty else ''}: {command}"
                print(f"== {what}", flush=True)
                began = time.monotonic()
                code = _run(system, user, command, settings=settings, pty=not options.no_pty)
                results.append((what, code, time.monotonic() - began))
        finally:
            if options.keep:
                print(f"kept: {system}", flush=True)
            else:
                shutil.rmtree(system)
    for what, code, seconds in results:
        print(f"{'passed' if code == 0 else f'FAILED ({code})'} in {seconds / 60:.1f} min  {what}")
    return [what for what, code, _ in results if code != 0]


# ----- making a system ------------------------------------------------------------------------------------------------


def _base(folder: Path, options: argparse.Namespace) -> Path:
    """The system that debootstrap makes, to be copied."""
    base: Path = folder / f"base-{options.suite}"
    if not base.is_dir():
        mirror = options.mirror or _mirror()
        print(f"== debootstrap of {options.suite} with {', '.join(PACKAGES)}", flush=True)
        unfinished = base.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
        log = folder / f"debootstrap-{options.suite}.log"
        with log.open("w") as file:
            made = subprocess.run(
                [*NAMESPACES, *command, options.suite, str(unfinished), mirror], stdout=file, stderr=file, check=False
            )
        if made.returncode != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
            raise NotTried(f"debootstrap of {options.suite} failed; set another mirror with --mirror\n{tail}")
        unfinished.rename(base)
    return base


def _mirror() -> str:
    """Debian's archive, as this machine's apt names it."""
    command = [
        "apt-get",
        "indextargets",
        "--format",
        "$(REPO_URI)",
        "Created-By: Packages",
        "Origin: Debian",
        "Label: Debian",
    ]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        found = []
    if not found:
        raise NotTried("apt has no Debian archive: run `apt-get update`, or set one with --mirror URL")
    return found[0].rstrip("/")


def _make_system(base: Path, system: Path) -> None:
    print(f"== copying it to {system}", flush=True)
    subprocess.run(["cp", "--archive", "--reflink=auto", str(base), str(system)], check=True)
    # As Debian's installer writes it, and whatever starts containers.
    names = f"127.0.0.1 localhost\n::1 localhost ip6-localhost\n127.0.1.1 {socket.gethostname()}\n"
    (system / "etc/hosts").write_text(names)
    add_user = ["useradd", "--no-create-home", "--home-dir", HOMES["ordinary"], "--uid", str(ORDINARY_ID), "ordinary"]
    subprocess.run(["chroot", str(system), *add_user], check=True)


def _copy_tree(system: Path, user: str) -> None:
    """Put the tracked files there; of an earlier copy the environments stay, and nothing else."""
    tree = system / TREE
    tree.mkdir(parents=True, exist_ok=True)
    for old in tree.iterdir():
        if not old.name.startswith(".venv"):
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    # Git refuses a repository of another user, as root's is where sudo was used.
    git = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), "ls-files", "-z"]
    names = subprocess.run(git, check=True, stdout=subprocess.PIPE).stdout
    pack = ["tar", "--create", f"--directory={ROOT}", "--no-recursion", "--null", "--files-from=-"]
    packed = subprocess.run(pack, input=names, stdout=subprocess.PIPE, check=True).stdout
    unpack = ["tar", "--extract", "--no-same-owner", f"--directory={tree}"]
    subprocess.run(unpack, input=packed, check=True)
    if user == "ordinary":
        subprocess.run(
            ["chown", "--recursive", "--no-dereference", f"{ORDINARY_ID}:{ORDINARY_ID}", str(tree)], check=True
        )


# ----- running in it --------------------------------------------------------------------------------------------------


def _run(system: Path, user: str, command: str, *, settings: dict[str, str], pty: bool) -> int:
    """The exit code of `command` in the system, with an environment of its own."""
    own_id = 0 if user == "root" else ORDINARY_ID
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": HOMES[user],
        "USER": user,
        **settings,
    }
    shared = _local_paths(settings)
    for path in shared:
        _make_mount_point(system / path.relative_to("/"), is_folder=path.is_dir())
    words = [f"--userspec={own_id}:{own_id}", str(system), "env", "-i", f"--chdir=/{TREE}"]
    words += [f"{name}={value}" for name, value in environment.items()] + ["sh", "-c", command]
    inside = ["sh", "-c", INSIDE, "inside", str(system), "yes" if pty else "no", *map(str, shared), "--", *words]
    return subprocess.run([*NAMESPACES, *inside], stdin=subprocess.DEVNULL, check=False).returncode


def _pip_settings() -> dict[str, str]:
    """What pip is told on this machine, and the proxies, as environment variables."""
    settings = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in ("global", "install", "site", "user", ":env:"):
            settings[f"PIP_{key.upper().replace('-', '_')}"] = " ".join(shlex.split(value))
    return settings


def _local_paths(settings: dict[str, str]) -> list[Path]:
    """The files and folders of this machine that settings name."""
    words = [
        word.removeprefix("file://")
        for name, value in settings.items()
        if name != "PIP_CACHE_DIR"
        for word in value.split()
    ]
    named = {Path(word) for word in words if word.startswith("/")}
    # `simple`, the index in a folder, has links to what lies beside it.
    return sorted({path.parent if path.name == "simple" else path for path in named if path.exists()})


def _make_mount_point(point: Path, *, is_folder: bool) -> None:
    (point if is_folder else point.parent).mkdir(parents=True, exist_ok=True)
    if not is_folder:
        point.touch()


if __name__ == "__main__":
    sys.exit(main())
