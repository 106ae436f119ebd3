"""The batch script of a run's jobs, from the template `job.sh` beside this file."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from lightscale.errors import UserError
from lightscale.launch.scheduler import JobRequest
from lightscale.launch.settings import LaunchSettings
from lightscale.runs.run_directory import RunDirectory

_TEMPLATE = Path(__file__).with_name("job.sh")
_PLAIN = re.compile(r"[\w@%+=:,./\[\]*-]+")


def render(job: JobRequest) -> str:
    """Render the script of `job`."""
    settings, run = job.settings, job.run
    path = run.path.absolute()
    again = ": the next job of the chain does it" if job.is_chain else "queue_again"
    values = {
        "run": shlex.quote(str(path)),
        "options": "\n".join(f"#SBATCH {option}" for option in _options(settings, run, job.is_chain)),
        "setup": "".join(f"{line}\n" for line in settings.setup),
        "environment": "\n".join(job.exports()),
        "command": shlex.join(job.command("slurm")),
        "command_name": shlex.join([sys.executable, "-m", "lightscale"]),
        "signal_s": str(settings.signal_s),
        "again": again,
    }
    text = _TEMPLATE.read_text(encoding="utf-8")
    text = re.sub(r"{{(\w+)}}", lambda match: values[match[1]], text)
    return re.sub(r"\n{3,}", "\n\n", text)


def _options(settings: LaunchSettings, run: RunDirectory, is_chain: bool) -> Iterator[str]:
    path = run.path.absolute()
    yield _option("job-name", path.name)
    yield _option("nodes", settings.nodes)
    # One agent, which starts the ranks: SLURM's own count of tasks would be that of the ranks otherwise.
    yield _option("ntasks-per-node", 1)
    yield _option("time", settings.time)
    optional = {
        "partition": settings.partition,
        "account": settings.account,
        "gpus-per-node": settings.gpus_per_node,
        "cpus-per-task": settings.cpus_per_node,
    }
    for name, value in optional.items():
        if value is not None:
            yield _option(name, value)
    yield _option("chdir", Path.cwd())
    yield _option("output", f"{str(run.logs.absolute()).replace('%', '%%')}/slurm-%j.out")
    # A job that is queued again keeps its number, and so its file.
    yield "--open-mode=append"
    # B: to the batch script only, which passes it on. Otherwise SLURM signals the tasks of steps, but not the launcher.
    yield f"--signal=B:USR1@{settings.signal_s}"
    # SLURM itself then queues the job again after preemption, and when a node failed.
    yield "--requeue"
    if is_chain:
        # A failed node is then only taken out of the job, which continues on the others. If it was the first, which has
        # the launcher, the job ends, and the next one of the chain resumes.
        yield "--no-kill"
    yield from settings.options


def _option(name: str, value: object) -> str:
    text = str(value)
    if not _PLAIN.fullmatch(text):
        if re.search(r'["\\\n]', text):
            raise UserError(
                f"--{name} {text}: must have no quotes, backslashes and line breaks, which sbatch does not accept"
            )
        text = f'"{text}"'
    return f"--{name}={text}"
