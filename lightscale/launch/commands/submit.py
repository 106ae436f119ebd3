"""``lightscale submit``: start a run, or go on with it, as jobs of a SLURM cluster."""

import argparse
import sys
import tempfile
from pathlib import Path

from lightscale.config.files import load
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.launch.commands.logs import follow
from lightscale.launch.commands.train import allowed_changes, check_run, default_directory, is_finished
from lightscale.launch.slurm.client import ask, partitions, require
from lightscale.launch.slurm.script import ranks, render
from lightscale.launch.slurm.settings import LaunchSettings, load_settings
from lightscale.runs.jobs import live_jobs, record_job, recorded_jobs
from lightscale.runs.lock import RunLock
from lightscale.runs.run_directory import RunDirectory, write_atomically


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightscale submit``."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of the run")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="values that replace the file's; launch.key=value for those of the cluster",
    )
    parser.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help="run directory; one that exists is resumed (default: runs/NAME of CONFIG)",
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes of the job (default: launch.nodes, or 1)")
    parser.add_argument("--time", metavar="TIME", help="time limit of the job, like 24:00:00 (default: launch.time)")
    parser.add_argument("--partition", metavar="NAME", help="SLURM's partition (default: launch.partition)")
    parser.add_argument("--account", metavar="NAME", help="whom SLURM charges (default: launch.account)")
    parser.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="GPUs of each node (default: launch.gpus_per_node)"
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="ranks on each node (default: launch.processes, or one per GPU, or one)",
    )
    parser.add_argument(
        "--chain",
        type=int,
        metavar="N",
        help="submit N jobs that follow one another (default: one, queued again until the run is finished)",
    )
    parser.add_argument("--dry-run", action="store_true", help="show the script, and submit nothing")
    parser.add_argument("--follow", action="store_true", help="then show the run's output until it ends")
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="resume although this differs from the run's, see `lightscale train --help`",
    )
    parser.epilog = (
        "The cluster's settings come from [launch] in ~/.config/lightscale/launch.toml, then in CONFIG. "
        + "; ".join(f"{name}: {field.description}".rstrip(".") for name, field in LaunchSettings.model_fields.items())
        + "."
    )


def run(args: argparse.Namespace) -> int:
    """Check the run here, then submit it; print the jobs' ids and the run directory."""
    ours = [text for text in args.overrides if text.startswith("launch.")]
    given = {
        name: getattr(args, name) for name in ("nodes", "time", "partition", "account", "gpus_per_node", "processes")
    }
    settings = load_settings(args.config, ours, given)
    if args.chain is not None and args.chain < 1:
        raise UserError(f"--chain {args.chain}: must be at least 1")
    config = load(args.config, [text for text in args.overrides if text not in ours])
    allow = allowed_changes(args.allow_change)
    check_run(config, settings.nodes * ranks(settings))
    directory = RunDirectory(args.run or default_directory(args.config))
    script = render(settings, directory, is_chain=args.chain is not None, allow=allow)
    if args.dry_run:
        print(script, end="")
        return 0
    require("sbatch", "squeue")
    _refuse_live_jobs(directory)
    _check_script(script, settings)
    if is_finished(directory, config, allow):
        print(f"{directory.path} is finished: all {config.total_steps} steps are done", file=sys.stderr)
        return 0
    jobs = _submit(directory, config, allow, script, args.chain or 1)
    print(f"{'job' if len(jobs) == 1 else 'jobs'} {', '.join(map(str, jobs))} in {directory.path}")
    if args.follow:
        return follow(directory, None)
    print(
        f"lightscale logs {directory.path} --follow, lightscale runs, lightscale cancel {directory.path}",
        file=sys.stderr,
    )
    return 0


def _refuse_live_jobs(directory: RunDirectory) -> None:
    live = live_jobs(recorded_jobs(directory))
    if live:
        jobs = ", ".join(map(str, live.values()))
        raise UserError(
            f"{directory.path} is in use by job {jobs}; wait for it, end it with `lightscale cancel {directory.path}`, "
            "or start another run with --run"
        )


def _check_script(script: str, settings: LaunchSettings) -> None:
    """Refuse what SLURM would not take, before anything is written."""
    if settings.partition is not None and settings.partition not in (there := partitions()):
        raise UserError(
            f'partition "{settings.partition}": the cluster has no such one; there are {", ".join(there) or "none"}'
        )
    with tempfile.NamedTemporaryFile("w", suffix=".sh", encoding="utf-8") as file:
        file.write(script)
        file.flush()
        ask("sbatch", "--test-only", file.name)


def _submit(directory: RunDirectory, config: RunConfig, allow: frozenset[str], script: str, count: int) -> list[int]:
    """Submit `count` jobs, each for after the one before."""
    directory.create(config)
    # For a moment: a job that runs has the lock, and would be refused by ours.
    with RunLock(directory):
        directory.create_or_open(config, allow)
        directory.logs.mkdir(exist_ok=True)
        path = directory.path / "job.sh"
        write_atomically(path, script)
    jobs: list[int] = []
    for _ in range(count):
        after = [f"--dependency=afterany:{jobs[-1]}"] if jobs else []
        jobs.append(int(ask("sbatch", "--parsable", *after, str(path)).split(";")[0]))
        record_job(directory, jobs[-1])
    return jobs
