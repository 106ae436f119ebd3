"""``lightscale study run``: train the cells of a study, or continue it."""

import argparse
import fnmatch
import json
import time

from lightscale.config.schedulers import SCHEDULERS
from lightscale.errors import UserError, counted
from lightscale.launch.commands.checks import check_run, check_trained_on
from lightscale.launch.duration import parse_duration
from lightscale.launch.scheduler import get_scheduler
from lightscale.launch.settings import LaunchSettings, load_settings
from lightscale.study.cells import Cell
from lightscale.study.commands.arguments import add_study, the_study
from lightscale.study.launchers import CellLauncher, Here, Through
from lightscale.study.runner import Outcome, StudyRunner, study_lock
from lightscale.study.study import Study

EXIT_FAILED, EXIT_STOPPED = 1, 75
_MOST_JOBS = 1000
_SETTINGS = ("nodes", "time", "partition", "account", "gpus_per_node", "processes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    add_study(parser)
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="number of concurrent cells (default: 1; with --scheduler: all, queued by the scheduler)",
    )
    parser.add_argument("--only", metavar="PATTERN", help='run only cells with matching names, such as "tnl-*"')
    parser.add_argument("--stop-after", metavar="TIME", help="save and exit after this time, such as 2h30m")
    parser.add_argument("--extend", action="store_true", help="add new cells to a study that has started")
    parser.add_argument("--processes", type=int, metavar="N", help="ranks of each run (with --scheduler: per node)")
    parser.add_argument(
        "--scheduler",
        metavar="NAME",
        help=f"run cells as scheduler jobs: {', '.join(SCHEDULERS)} (default: as local processes)",
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="with --scheduler: nodes of each job")
    parser.add_argument("--time", metavar="TIME", help="with --scheduler: time limit of each job")
    parser.add_argument("--partition", metavar="NAME", help="with --scheduler: partition of the cluster")
    parser.add_argument("--account", metavar="NAME", help="with --scheduler: account to charge")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="with --scheduler: GPUs per node")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.epilog = (
        "Exit codes: 0 all cells are finished, or stopped by a search; 75 stopped, the same command continues; 1 some "
        "cells failed. Each cell is a run in STUDY/runs. On GPUs use --scheduler local, which assigns GPUs to each run."
    )


def run(args: argparse.Namespace) -> int:
    """Check everything, then train the cells."""
    left_s = None if args.stop_after is None else parse_duration("--stop-after", args.stop_after)
    jobs = args.jobs if args.jobs is not None else 1 if args.scheduler is None else _MOST_JOBS
    if not 1 <= jobs <= _MOST_JOBS:
        raise UserError(f"--jobs {jobs}: must be 1 to {_MOST_JOBS}")
    study = the_study(args)
    settings = _settings(args, study)
    study.check(extend=args.extend)
    cells = [cell for cell in study.cells() if args.only is None or fnmatch.fnmatch(cell.name, args.only)]
    if not cells:
        raise UserError(f'--only "{args.only}": no cell has such a name; `lightscale study plan` lists the cells')
    _check(study, cells, settings)
    launcher: CellLauncher
    if args.scheduler is None:
        launcher = Here(study, jobs=jobs, processes=args.processes)
    else:
        launcher = Through(study, scheduler=args.scheduler, settings=settings)
    study.path.mkdir(parents=True, exist_ok=True)
    with study_lock(study.path):
        study.begin(extend=args.extend)
        runner = StudyRunner(
            study,
            launcher,
            jobs=jobs,
            is_wanted=lambda name: args.only is None or fnmatch.fnmatch(name, args.only),
            deadline_s=None if left_s is None else time.monotonic() + left_s,
            say=(lambda line: None) if args.json else lambda line: print(line, flush=True),
        )
        outcome = runner.run()
    return _report(args, study, outcome)


def _settings(args: argparse.Namespace, study: Study) -> LaunchSettings:
    given = {name: getattr(args, name) for name in _SETTINGS}
    if args.scheduler is None:
        only = [name for name in _SETTINGS if given[name] is not None and name != "processes"]
        if only:
            raise UserError(f"--{only[0].replace('_', '-')}: needs --scheduler")
        return LaunchSettings(processes=args.processes) if args.processes else LaunchSettings()
    settings = load_settings(study.definition.path, [], given)
    get_scheduler(args.scheduler).check_settings(settings)
    return settings


def _check(study: Study, cells: list[Cell], settings: LaunchSettings) -> None:
    """Refuse cells that could not start, or whose data was replaced since they finished, all at once."""
    faults: dict[str, list[str]] = {}
    for cell in cells:
        record = study.finished_record(cell)
        try:
            if record is None and cell.stopped is None:
                check_run(cell.config, settings.nodes * settings.ranks_per_node, study.run(cell))
            elif record is not None and (fingerprint := record.get("store")):
                check_trained_on(cell.config, str(fingerprint))
        except UserError as error:
            faults.setdefault(str(error), []).append(cell.name)
    if faults:
        lines = [f"{', '.join(names[:3])}{' …' * (len(names) > 3)}: {fault}" for fault, names in faults.items()]
        raise UserError("\n".join(lines))


def _report(args: argparse.Namespace, study: Study, outcome: Outcome) -> int:
    code = EXIT_FAILED if outcome.failed else EXIT_STOPPED if outcome.left else 0
    if args.json:
        print(
            json.dumps(
                {
                    "study": str(study.path),
                    "exit_code": code,
                    "finished": sorted(outcome.finished),
                    "failed": outcome.failed,
                    "stopped": outcome.stopped,
                    "left": outcome.left,
                }
            )
        )
        return code
    for name, reason in outcome.failed.items():
        print(f"failed: {name}: {reason}")
    for name, reason in outcome.stopped.items():
        print(f"{name}: {reason}")
    stopped = f", {len(outcome.stopped)} stopped by the search" * bool(outcome.stopped)
    print(
        f"{study.path}: {counted(len(outcome.finished), 'cell')} finished, {len(outcome.failed)} failed, "
        f"{len(outcome.left)} left{stopped}"
    )
    return code
