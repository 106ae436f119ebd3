"""``lightscale train``: start or resume a run."""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch

from lightscale.config.files import load
from lightscale.config.layout import check_layout, check_mixers
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.store.token_store import TokenizerIdentity, TokenStore
from lightscale.errors import UserError
from lightscale.launch.duration import parse_duration
from lightscale.launch.environment import RankEnvironment
from lightscale.launch.network import choose_interface
from lightscale.launch.rank import LAUNCHER_VARIABLE, run_rank, summary_and_notes
from lightscale.launch.restart import EXIT_CODES, Nodes, RestartPolicy, run_ranks
from lightscale.launch.scheduler import adopt_job, default_scheduler, get_scheduler
from lightscale.launch.torchrun import ThisMachine
from lightscale.runs.job_environment import job_id
from lightscale.runs.lock import InUse, RunLock
from lightscale.runs.run_directory import RunDirectory, Status
from lightscale.training.signals import DEADLINE_VARIABLE

# The command line of a rank, before its arguments.
_COMMAND = [sys.executable, "-m", "lightscale", "train"]
# Longer than it takes until a lock that is not renewed becomes stale, a minute: see `runs/lock.py`.
_PATIENCE_S, _PAUSE_S = 150.0, 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale train``."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace the file's")
    parser.add_argument(
        "--run",
        "--run-dir",  # torchrun takes the first for one of its own, abbreviated
        type=Path,
        metavar="DIR",
        help="run directory; one that exists is resumed (default: runs/NAME of CONFIG)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="ranks on this machine, or on each node (default: one per GPU, or one)",
    )
    parser.add_argument(
        "--scheduler",
        metavar="NAME",
        help="start the ranks on all nodes of this scheduler's job that this runs in; what `lightscale submit` does",
    )
    parser.add_argument(
        "--min-nodes",
        type=int,
        metavar="N",
        help="with --scheduler: least number of nodes with which the run continues after others failed (default: half "
        "of them); with fewer it exits, to be queued again",
    )
    parser.add_argument(
        "--stop-after",
        metavar="TIME",
        help="save and exit after this time, such as 23h30m: the job's time limit less a step and a save",
    )
    parser.add_argument(
        "--no-restart", action="store_true", help="do not restart the ranks after a failure: the job script does"
    )
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="resume although this differs from the run's: a key or section of the configuration, data (another "
        "store or tokenizer), versions or versions.PACKAGE; may be given several times",
    )
    parser.add_argument("--json", action="store_true", help="print at the end, as JSON, how the run ended")


def run(args: argparse.Namespace) -> int:
    """Train. Inside a rank (started by torchrun, srun or mpirun) joins the others, else starts the ranks.

    Returns one of the exit codes that `launch/restart.py` lists; a rank that stopped together with the others
    returns 0.
    """
    adopt_job(os.environ)
    # Counted from the start of the command, over all restarts, as the time limit of a job is.
    deadline_s = None if args.stop_after is None else time.time() + parse_duration("--stop-after", args.stop_after)
    directory = RunDirectory(args.run or default_directory(args.config))
    environment = RankEnvironment.read(os.environ)
    # The launcher and its ranks are the same command: a process with a rank's number in its environment is a rank.
    if environment is None:
        return _launch(args, directory, deadline_s)
    # Where our launcher started the ranks the variable is set already; here another launcher did.
    if deadline_s is not None:
        os.environ[DEADLINE_VARIABLE] = str(deadline_s)
    rank, allow = environment, allowed_changes(args.allow_change)
    # The configuration is read within the frame, so that a mistake in it is recorded for the launcher like any other
    # error.
    return run_rank(lambda: _train(load(args.config, args.overrides), directory, rank, allow))


def _launch(args: argparse.Namespace, directory: RunDirectory, deadline_s: float | None) -> int:
    """Check everything that can be checked without ranks, then start them."""
    config, allow = load(args.config, args.overrides), allowed_changes(args.allow_change)
    processes = _num_processes(config, args.processes)
    nodes = _nodes(args, config, processes)
    # Before the run's directory exists: a mistake leaves nothing behind.
    check_run(config, processes * nodes.num_nodes)
    if is_finished(directory, config, allow):
        print(f"{directory.path} is finished: all {config.total_steps} steps are done", file=sys.stderr)
        code = EXIT_CODES["finished"]
    else:
        # The ranks read the stored form: the user may edit CONFIG during the run.
        command = [*_COMMAND, str(directory.config), "--run", str(directory.path)]
        command += [f"--allow-change={key}" for key in sorted(allow)]
        policy = RestartPolicy(config=config.restart, again=not args.no_restart, deadline_s=deadline_s)
        resume = _command_line(args, directory)
        job = None if args.scheduler is None else job_id()
        print(f"starting {processes * nodes.num_nodes} ranks", file=sys.stderr, flush=True)
        if isinstance(nodes, ThisMachine) and nodes.forks:
            # Once, for all ranks and all restarts.
            _training().preload(config)
        # By the launcher, over all restarts: between two starts of the ranks no other job can take the run.
        with _held(directory, config, allow, job=job):
            code = run_ranks(directory, command, processes=processes, resume=resume, policy=policy, nodes=nodes)
    if args.json:
        status = directory.read_status()
        record = dataclasses.asdict(status) if status else {}
        print(json.dumps({"run": str(directory.path), "exit_code": code, **record}))
    return code


def _nodes(args: argparse.Namespace, config: RunConfig, processes: int) -> Nodes:
    """Where the ranks run."""
    if args.scheduler is None:
        if args.min_nodes is not None:
            raise UserError(f"--min-nodes {args.min_nodes}: only for runs on the nodes of a job; use --scheduler too")
        if _num_gpus(config):
            # CUDA does not work in a fork of a process that has touched it, which counting GPUs does with some drivers.
            return ThisMachine()
        return ThisMachine(_forked_rank)

    # Asked again after nodes failed, for those that are left.
    def fits(num_nodes: int) -> bool:
        try:
            check_layout(config, processes * num_nodes)
        except UserError:
            return False
        return True

    return get_scheduler(args.scheduler).allocation(os.environ, min_nodes=args.min_nodes, fits=fits)


def _forked_rank(command: Sequence[str]) -> int:
    """The command line of a rank, in a fork of the launcher."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(command[len(_COMMAND) :]))


def check_run(config: RunConfig, num_ranks: int) -> None:
    """Refuse a configuration that cannot run on so many ranks, or whose data is not there."""
    # The quickest first: reading the store may take seconds on a network file system.
    check_layout(config, num_ranks)
    check_mixers(config.model, config.parallel)
    _check_store(config)


def _train(config: RunConfig, directory: RunDirectory, environment: RankEnvironment, allow: frozenset[str]) -> int:
    """The work of one rank."""
    # torch.distributed and Megatron know only torchrun's variables.
    os.environ.update(environment.variables())
    check_layout(config, environment.world_size)
    is_main = environment.rank == 0
    # Only rank 0 may create the directory. The others have to come to the same answer without it.
    if is_finished(directory, config, allow) if is_main else directory.is_finished(config):
        return 0
    choose_interface(environment)
    # Our launcher holds the run, and writes how it ended; without it rank 0 does both.
    alone = LAUNCHER_VARIABLE not in os.environ
    hold = functools.partial(_held_by_rank, directory, config, allow) if alone else contextlib.nullcontext
    _training().train(config, directory, allow, hold)
    # The launcher takes exit code 0 of all ranks without a status for a failure.
    assert not is_main or directory.read_status() is not None, "training ended without a status"
    return 0


def _training() -> ModuleType:
    """The training loop, by name: importing models and engine takes seconds, which not every launcher has to spend."""
    return importlib.import_module("lightscale.training.train")


def allowed_changes(keys: Sequence[str]) -> frozenset[str]:
    """What ``--allow-change`` names."""
    for key in keys:
        section, _, rest = key.partition(".")
        fields = getattr(RunConfig.model_fields.get(section), "annotation", None)
        known = section == "versions" or (
            fields is not None and (not rest or rest.split(".")[0] in fields.model_fields)
        )
        if not known:
            raise UserError(
                f"--allow-change {key}: neither a key or section of the configuration, like optimizer.lr or data, "
                "nor versions or versions.PACKAGE"
            )
    return frozenset(keys)


def is_finished(directory: RunDirectory, config: RunConfig, allow: frozenset[str]) -> bool:
    """Whether nothing is left to do; refuses a run of another configuration. Nothing of an existing run is touched."""
    # By one rename: of two processes that start the same new run at once, the slower one compares with the faster
    # one's.
    if directory.create(config):
        return False
    directory.changes(config, allow)
    return directory.is_finished(config)


@contextlib.contextmanager
def _held(directory: RunDirectory, config: RunConfig, allow: frozenset[str], job: str | None = None) -> Iterator[None]:
    """Hold the run's lock, with `config` stored. `job`: the scheduler's job that this launcher runs in."""
    with contextlib.ExitStack() as stack:
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                stack.enter_context(RunLock(directory))
                break
            except InUse as error:
                # A job that was queued again is the only one of its number: the holder is its own earlier start, whose
                # node failed, and the lock becomes stale. Any other holder is at work, and waiting would be in vain.
                if job is None or error.job != job or time.monotonic() > deadline_s:
                    raise
            time.sleep(_PAUSE_S)
        # Under the lock: until now another launcher could have written another configuration.
        directory.create_or_open(config, allow)
        yield


@contextlib.contextmanager
def _held_by_rank(directory: RunDirectory, config: RunConfig, allow: frozenset[str]) -> Iterator[None]:
    """The same for ranks that another launcher started: their errors become the run's status."""
    with _held(directory, config, allow):
        try:
            yield
        except Exception as error:
            step, tokens = directory.progress()
            # Nobody restarts these ranks, but whoever has started them may do so after any error that is no mistake of
            # the user.
            status: Status = "stopped" if isinstance(error, UserError) else "resumable"
            directory.write_status(status, reason=f"rank 0: {summary_and_notes(error)}", step=step, tokens=tokens)
            raise


def default_directory(config: Path) -> Path:
    """Where the run of a configuration is: runs/NAME for NAME.toml; a run's own config.toml stands for that run."""
    # Otherwise a command line that names a run's own file would start another run, runs/config.
    if config.name == "config.toml" and (config.parent / "events.jsonl").exists():
        return config.parent
    return Path("runs") / config.stem


def _num_gpus(config: RunConfig) -> int:
    # device_count asks the driver without creating a context: the GPUs are for the ranks.
    return 0 if config.train.device == "cpu" else torch.cuda.device_count()


def _num_processes(config: RunConfig, wanted: int | None) -> int:
    gpus = _num_gpus(config)
    if config.train.device == "cuda" and gpus == 0:
        raise UserError('train.device = "cuda", but torch sees no GPU; use "auto" or "cpu"')
    processes = wanted if wanted is not None else max(1, gpus)
    if processes < 1:
        raise UserError(f"--processes {processes}: must be at least 1")
    if gpus and processes > gpus:
        raise UserError(f"--processes {processes}: there are only {gpus} GPUs, and each process needs its own")
    return processes


def _check_store(config: RunConfig) -> None:
    """Refuse a store that is missing, damaged, lacks a named source, or whose tokenizer does not fit."""
    data = config.data
    store = TokenStore(data.store)
    tokenizer = store.tokenizer
    # An id without an embedding would fail on the device, far from its cause.
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"model.vocab_size = {config.model.vocab_size} is less than the {tokenizer.vocab_size} tokens of "
            f"{tokenizer.name} in data.store = {data.store}; use at least as many"
        )
    for name in data.sources:
        _check_source(f"data.sources.{name}", name, store)
    for name, validation in data.validation.items():
        other = store if validation.store is None else TokenStore(validation.store)
        _check_source(f"data.validation.{name}.source", validation.source, other)
        # Losses per token of two tokenizers cannot be compared.
        if other.tokenizer.sha256 != tokenizer.sha256:
            raise UserError(
                f"data.validation.{name}.store = {validation.store} was written with another tokenizer "
                f"({_describe(other.tokenizer)}) than data.store = {data.store} ({_describe(tokenizer)}); "
                "prepare both with the same one"
            )


def _check_source(key: str, name: str, store: TokenStore) -> None:
    if name not in store.sources:
        raise UserError(f"{key}: no source {name!r} in {store.path}; it has {', '.join(store.sources)}")


def _describe(tokenizer: TokenizerIdentity) -> str:
    return f"{tokenizer.name}, {tokenizer.vocab_size} tokens, {tokenizer.sha256[:8]}"


def _command_line(args: argparse.Namespace, directory: RunDirectory) -> str:
    if args.scheduler is not None:
        other = "" if args.scheduler == default_scheduler() else f"--scheduler {args.scheduler} "
        return f"lightscale submit {shlex.join([str(directory.config)])} {other}--nodes … --time …"
    arguments = ["lightscale", "train", str(args.config), *args.overrides, "--run", str(directory.path)]
    if args.processes is not None:
        arguments += ["--processes", str(args.processes)]
    if args.stop_after is not None:
        arguments += ["--stop-after", args.stop_after]
    if args.no_restart:
        arguments.append("--no-restart")
    return shlex.join(arguments)
