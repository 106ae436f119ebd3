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
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from lightscale.config.arguments import add_config, add_overrides, add_run_option
from lightscale.config.files import load
from lightscale.config.layout import Layout, check_layout
from lightscale.config.schedulers import default_scheduler
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError, counted
from lightscale.launch.commands import by_hand
from lightscale.launch.commands.anneal import add_anneal_arguments, resolve_anneal
from lightscale.launch.commands.checks import (
    allowed_changes,
    check_divides,
    check_inputs,
    default_directory,
    is_finished,
    num_gpus,
    num_processes,
)
from lightscale.launch.duration import parse_duration
from lightscale.launch.environment import RankEnvironment
from lightscale.launch.launcher.rank import LAUNCHER_VARIABLE, SEVERAL_LAUNCHERS_VARIABLE, run_rank, summary_and_notes
from lightscale.launch.launcher.rendezvous import Rendezvous
from lightscale.launch.network import check_interfaces, choose_interface
from lightscale.launch.scheduler import adopt_job, get_scheduler, job_states
from lightscale.output.streams import lasting_output
from lightscale.parallel.device.settings import apply_device_settings
from lightscale.runs.held_directory import DirectoryReplaced
from lightscale.runs.job_environment import job_id
from lightscale.runs.jobs import recorded_jobs
from lightscale.runs.lock import InUse, RunLock
from lightscale.runs.metrics.sink import COMMAND_VARIABLE
from lightscale.runs.run_directory import RunDirectory, Status, end_text
from lightscale.training.health.limits import Needs, require_limits
from lightscale.training.signals import DEADLINE_VARIABLE

if TYPE_CHECKING:
    from lightscale.launch.launcher.restart import Nodes

# The command line of a rank, before its arguments.
_COMMAND = [sys.executable, "-m", "lightscale", "train"]
_EVALUATION = "lightscale.evaluation.during_training"
# Longer than it takes until a lock that is not renewed becomes stale, a minute: see `runs/lock.py`.
_PATIENCE_S, _PAUSE_S = 150.0, 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale train``."""
    add_config(parser)
    add_overrides(parser)
    add_run_option(parser, "run directory; an existing one is resumed (default: runs/NAME of CONFIG)")
    parser.add_argument(
        "--processes",
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="ranks on this machine, or per node (default: one per GPU, or one)",
    )
    parser.add_argument(
        "--scheduler",
        metavar="NAME",
        help="inside a job: start the ranks on all its nodes (used by `lightscale submit`)",
    )
    parser.add_argument(
        "--min-nodes",
        type=int,
        metavar="N",
        help="with --scheduler: minimum number of nodes to continue with after node failures (default: half of them); "
        "with fewer the run exits, to be requeued",
    )
    parser.add_argument(
        "--stop-after",
        metavar="TIME",
        help="save and exit after this time, such as 23h30m: the job's time limit minus a step and a save",
    )
    parser.add_argument(
        "--no-restart",
        action="store_true",
        help="do not restart the ranks after a failure; exit, so that the job script can",
    )
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="resume although KEY differs from the run's: a key or section of the configuration, data (another store "
        "or tokenizer), versions or versions.PACKAGE; lost-checkpoints: start again at step 0 when all checkpoints are "
        "gone; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print the result of the run as JSON at the end")
    add_anneal_arguments(parser)
    by_hand.add_node_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Train. A rank (started by torchrun, srun or mpirun) joins the others; any other process starts the ranks.

    Returns one of the exit codes in `launch/launcher/restart.py`; a rank that stops together with the others returns 0.
    """
    adopt_job(os.environ)
    # Counted from the start of the command, over all restarts, as the time limit of a job is.
    left_s = None if args.stop_after is None else parse_duration("--stop-after", args.stop_after)
    deadline_s = None if left_s is None else time.monotonic() + left_s
    resolve_anneal(args)
    directory = RunDirectory(args.run or default_directory(args.config))
    environment = RankEnvironment.read(os.environ)
    # The launcher and its ranks are the same command: a process with a rank's number in its environment is a rank.
    if environment is None:
        # A run does not end with the terminal or the program that its output goes to.
        with lasting_output():
            return _launch(args, directory, deadline_s)
    by_hand.refuse_within_rank(args, environment.launcher)
    # Where our launcher started the ranks the variable is set already; here another launcher did.
    if left_s is not None:
        os.environ[DEADLINE_VARIABLE] = str(time.time() + left_s)
    rank, allow = environment, allowed_changes(args.allow_change)
    # The configuration is read within the frame, so that a mistake in it is recorded for the launcher like any other
    # error.
    return run_rank(lambda: _train(lambda: load(args.config, args.overrides), directory, rank, allow))


def _launch(args: argparse.Namespace, directory: RunDirectory, deadline_s: float | None) -> int:
    """Start the ranks, here or in a job, or those of this host; say at the end how the run ended."""
    if args.anneal is not None:
        print(f"branch {directory.path}: {', '.join(args.overrides)}", file=sys.stderr, flush=True)
    rendezvous = by_hand.read_rendezvous(args)
    if rendezvous is None:
        code = _launch_all(args, directory, deadline_s)
    else:
        code = _launch_host(args, directory, deadline_s, rendezvous)
    if args.json:
        status = directory.read_status()
        record = dataclasses.asdict(status) if status else {}
        print(json.dumps({"run": str(directory.path), "exit_code": code, **record}))
    return code


def _launch_all(args: argparse.Namespace, directory: RunDirectory, deadline_s: float | None) -> int:
    """Check everything that can be checked without ranks, then start them."""
    config, allow = load(args.config, args.overrides), allowed_changes(args.allow_change)
    # Before the run's directory exists: a mistake leaves nothing behind. And before torch is imported, for seconds.
    check_inputs(config, directory, allow)
    processes = num_processes(config, args.processes)
    allocation = _allocation(args, config, processes)
    num_nodes = 1 if allocation is None else allocation.num_nodes
    check_divides(config, processes * num_nodes)
    _require_limits(config, processes, processes * num_nodes)
    if is_finished(directory, config, allow):
        print(f"{directory.path} is finished: {end_text(config)}", file=sys.stderr)
        return 0
    _say_loading()
    from lightscale.launch.launcher.restart import RestartPolicy, run_ranks  # noqa: PLC0415
    from lightscale.launch.launcher.torchrun import ThisMachine  # noqa: PLC0415

    # The ranks read the stored form: the user may edit CONFIG during the run.
    command = [*_COMMAND, str(directory.config), "--run", str(directory.path)]
    command += [f"--allow-change={key}" for key in sorted(allow)]
    # CUDA does not work in a fork of a process that has touched it, which counting GPUs does with some drivers.
    nodes = allocation or (ThisMachine() if num_gpus(config) else ThisMachine(_forked_rank))
    policy = RestartPolicy(config=config.restart, again=not args.no_restart, deadline_s=deadline_s)
    resume = _command_line(args, directory)
    os.environ[COMMAND_VARIABLE] = resume
    job = None if args.scheduler is None else job_id()
    print(f"starting {counted(processes * nodes.num_nodes, 'rank')}", file=sys.stderr, flush=True)
    if isinstance(nodes, ThisMachine) and nodes.forks:
        _preload(config)
    # By the launcher, over all restarts: between two starts of the ranks no other job can take the run.
    with _held(directory, config, allow, job=job):
        return run_ranks(directory, command, processes=processes, resume=resume, policy=policy, nodes=nodes)


def _launch_host(
    args: argparse.Namespace, directory: RunDirectory, deadline_s: float | None, rendezvous: Rendezvous
) -> int:
    """Start the ranks of this host, which do with those of the others what ranks of torchrun do.

    Checked here is only what ranks cannot say to all: they meet, and refuse together what is wrong on one host.
    """
    config, allow = load(args.config, args.overrides), allowed_changes(args.allow_change)
    processes = num_processes(config, args.processes)
    rendezvous.check()
    _require_limits(config, processes, processes * rendezvous.num_nodes)
    # What fails while hosts meet is said in one line; torch would print warnings with stacks of its own before it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _say_loading()
    from lightscale.launch.launcher.by_hand import run_host  # noqa: PLC0415
    from lightscale.launch.launcher.restart import RestartPolicy  # noqa: PLC0415

    command = [*_COMMAND, str(args.config), *args.overrides, "--run", str(directory.path)]
    command += [f"--allow-change={key}" for key in sorted(allow)]
    program = None if num_gpus(config) else _forked_rank
    resume = _command_line(args, directory)
    os.environ[COMMAND_VARIABLE] = resume
    first, last = rendezvous.node * processes, (rendezvous.node + 1) * processes - 1
    which = f"rank {first}" if first == last else f"ranks {first} to {last}"
    count = rendezvous.num_nodes * processes
    print(f"starting {which} of {count}, rendezvous at {rendezvous.place}", file=sys.stderr, flush=True)
    if program is not None:
        _preload(config)
    return run_host(
        directory,
        command,
        processes=processes,
        rendezvous=rendezvous,
        resume=resume,
        policy=RestartPolicy(config=config.restart, again=False, deadline_s=deadline_s),
        program=program,
    )


def _say_loading() -> None:
    print("loading PyTorch and Megatron …", file=sys.stderr, flush=True)


def _require_limits(config: RunConfig, processes: int, num_ranks: int) -> None:
    """Raise the limits of this process, which its ranks inherit, or refuse a start that would meet them."""
    on_gpu = num_gpus(config) > 0
    require_limits(Needs.of(config, local_ranks=processes, num_ranks=num_ranks, on_gpu=on_gpu))


def _preload(config: RunConfig) -> None:
    """Import what ranks that are forks need: once, for all of them and all restarts."""
    _training().preload(config)
    if config.evaluation.every_steps:
        importlib.import_module(_EVALUATION)


def _allocation(args: argparse.Namespace, config: RunConfig, processes: int) -> "Nodes | None":
    """The nodes of the job that this runs in; None: no job, the ranks run on this machine."""
    if args.scheduler is None:
        if args.min_nodes is not None:
            raise UserError(f"--min-nodes {args.min_nodes}: needs --scheduler, inside a job")
        return None

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
    try:
        return run(parser.parse_args(command[len(_COMMAND) :]))
    except UserError as error:
        # As `cli.main` does for a program of its own: the launcher could not be told, as where its logs are gone.
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.EXIT_CODE


def _train(
    read: Callable[[], RunConfig], directory: RunDirectory, environment: RankEnvironment, allow: frozenset[str]
) -> int:
    """The work of one rank. `read` reads its configuration."""
    # torch.distributed and Megatron know only torchrun's variables.
    os.environ.update(environment.variables())
    choose_interface(environment)
    apply_device_settings(os.environ)
    # One launcher of ours holds the run, and writes how it ended; without it rank 0 does both.
    alone = LAUNCHER_VARIABLE not in os.environ or SEVERAL_LAUNCHERS_VARIABLE in os.environ

    def read_here() -> RunConfig:
        config = read()
        # By each rank, as a part of what all of them hear of: it is wrong on one host only, perhaps.
        check_interfaces(os.environ, uses_nccl=num_gpus(config) > 0)
        if alone:
            # One launcher of ours would have done it.
            check_inputs(config, directory, allow)
        return config

    # By name, because the launcher, in the same module, needs no torch: seconds of each start.
    meeting = importlib.import_module("lightscale.launch.meeting")
    # Before anything is written or built.
    config, store = meeting.meet(environment, read_here, directory, allow)
    layout = check_divides(config, environment.world_size)
    apply_device_settings(os.environ, tensor=config.parallel.tensor)
    is_main = environment.rank == 0
    # Only rank 0 may create the directory. The others have to come to the same answer without it.
    if is_finished(directory, config, allow) if is_main else directory.is_finished(config):
        return 0
    hold = functools.partial(_held_by_rank, directory, config, allow) if alone else contextlib.nullcontext
    planned = _planned_memory_bytes(config, layout) if is_main else None
    # It stands above training, which does not know it.
    evaluation = importlib.import_module(_EVALUATION).DuringTraining if config.evaluation.every_steps else None
    _training().train(config, directory, allow, hold, planned, evaluation, store)
    # The launcher takes exit code 0 of all ranks without a status for a failure.
    assert not is_main or directory.read_status() is not None, "training ended without a status"
    return 0


def _training() -> ModuleType:
    """The training loop, by name: importing models and engine takes seconds, which not every launcher has to spend."""
    return importlib.import_module("lightscale.training.train")


def _planned_memory_bytes(config: RunConfig, layout: Layout) -> int | None:
    """What planning expects rank 0, on the first pipeline stage, to hold; None where it cannot say."""
    # Without a device the plan is for GPUs, whose number format is another.
    device = "cuda" if importlib.import_module("torch").cuda.is_available() else "cpu"
    here = config.model_copy(update={"train": config.train.model_copy(update={"device": device})})
    # By name, as the trainer: only rank 0 needs it.
    planning = importlib.import_module("lightscale.planning.memory")
    try:
        planned: int = planning.rank_memory(here, layout, 0).total_bytes
    except Exception as error:  # noqa: BLE001 - a line on a chart is not worth the run
        print(f"the memory plan is unavailable: {error}", file=sys.stderr, flush=True)
        return None
    return planned


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
                # The lock of a job that has ended becomes stale. Any other holder is at work: waiting would be in vain.
                if job is None or not _has_ended(error.job, job, directory) or time.monotonic() > deadline_s:
                    raise
            time.sleep(_PAUSE_S)
        directory.hold()
        directory.recover_records()
        # Under the lock: until now another launcher could have written another configuration.
        directory.create_or_open(config, allow)
        yield


def _has_ended(holder: str | None, job: str, directory: RunDirectory) -> bool:
    """Whether the job `holder`, which the lock names, is no more; asked by `job` of the same run."""
    # A job that was queued again is the only one of its number: the holder is its own earlier start, whose node failed.
    if holder == job:
        return True
    # The one before it in a chain, as its scheduler says; one that the scheduler does not know is no job of ours.
    records = [record for record in recorded_jobs(directory) if str(record.number) == holder]
    return bool(records) and all(state.phase == "ended" for state in job_states(records).values())


@contextlib.contextmanager
def _held_by_rank(directory: RunDirectory, config: RunConfig, allow: frozenset[str]) -> Iterator[None]:
    """The same for ranks that another launcher started: their errors become the run's status."""
    with _held(directory, config, allow):
        try:
            yield
        except DirectoryReplaced:
            # What is there now is not the run, and gets no status.
            raise
        except Exception as error:
            step, tokens = directory.progress()
            # Nobody restarts these ranks, but whoever has started them may do so after any error that is no mistake of
            # the user.
            status: Status = "stopped" if isinstance(error, UserError) else "resumable"
            directory.write_status(status, reason=f"rank 0: {summary_and_notes(error)}", step=step, tokens=tokens)
            raise


def _command_line(args: argparse.Namespace, directory: RunDirectory) -> str:
    if args.scheduler is not None:
        other = "" if args.scheduler == default_scheduler() else f"--scheduler {args.scheduler} "
        return f"lightscale submit {shlex.join([str(directory.config)])} {other}--nodes … --time …"
    arguments = ["lightscale", "train", str(args.config), *args.overrides, "--run", str(directory.path)]
    if args.processes is not None:
        arguments += ["--processes", str(args.processes)]
    arguments += by_hand.words_of(args)
    if args.stop_after is not None:
        arguments += ["--stop-after", args.stop_after]
    if args.no_restart:
        arguments.append("--no-restart")
    return shlex.join(arguments)
