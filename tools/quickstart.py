"""A first run from nothing: corpus, training on two processes, a stop and a resume, a sample of text.

Everything it does is a `lightscale` command that it prints first; use them for your own runs.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from lightscale.config.files import load
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.runs.run_directory import RunDirectory, read_lines, read_metrics

CONFIG = Path("configs/quickstart.toml")
STORE = Path("data/stdlib")
RUN = Path("runs/quickstart")
STAMP = Path(".venv/.installed")  # of the Makefile, with the seconds that the installation took
PROMPT = "def "
EXIT_RESUMABLE = 75
_POLL_S = 0.2
# An installation that ended so long before is part of this first run.
_JUST_S = 30.0

console = Console(highlight=False, soft_wrap=True)


def say(command: list[str]) -> None:
    """Show what is about to run."""
    console.print(f"\n[bold]$ {shlex.join(command)}[/bold]")


def run(command: list[str]) -> None:
    """Run a command to its end; leave with its exit code if it fails."""
    say(command)
    code = subprocess.run(lightscale(command), check=False).returncode
    if code:
        sys.exit(code)


def lightscale(command: list[str]) -> list[str]:
    """The command with this interpreter, whatever is on the PATH."""
    return [sys.executable, "-m", *command]


def train(command: list[str], *, stop_after: Path | None) -> tuple[float, float]:
    """Train; once the checkpoint ``stop_after`` is there, stop the run as a cluster would, with SIGTERM.

    Returns when it began and ended, in seconds since the epoch.
    """
    began_s = time.time()
    say(command)
    process = subprocess.Popen(lightscale(command))
    stopped = False
    try:
        while process.poll() is None:
            if stop_after is not None and not stopped and stop_after.exists():
                console.print("[bold]stopping the run to show that it resumes where it stopped[/bold]")
                process.send_signal(signal.SIGTERM)
                stopped = True
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        # The run has the signal too: it saves and leaves.
        sys.exit(process.wait())
    if process.returncode not in ((0, EXIT_RESUMABLE) if stopped else (0,)):
        sys.exit(process.returncode)
    return began_s, time.time()


def installation_s() -> float | None:
    """How long it took, where that was just now."""
    if not STAMP.exists() or time.time() - STAMP.stat().st_mtime > _JUST_S:
        return None
    text = STAMP.read_text().strip()
    return float(text) if text else None


def training_times(attempts: list[tuple[float, float]]) -> dict[str, float]:
    """Where the time of the attempts (began, ended) went, by the run's own records; in seconds."""
    lines = [line for line in read_metrics(RUN / "metrics.jsonl") if "loss" in line]
    events = read_lines(RUN / "events.jsonl")
    spent = {"starts of the ranks": 0.0, "training steps": 0.0, "saving": 0.0}
    for began_s, ended_s in attempts:
        here = [line for line in lines if began_s <= seconds(line["time"]) <= ended_s]
        if here:
            spent["starts of the ranks"] += seconds(here[0]["time"]) - here[0]["step_s"] - began_s
        spent["training steps"] += sum(line["step_s"] for line in here)
        saves = (event for event in events if event["event"] == "checkpoint")
        spent["saving"] += sum(event["stall_s"] for event in saves if began_s <= seconds(event["time"]) <= ended_s)
    whole_s = sum(ended_s - began_s for began_s, ended_s in attempts)
    return spent | {"validation and shutdown": whole_s - sum(spent.values())}


def seconds(time_utc: str) -> float:
    """Since the epoch, of a time in the records."""
    return datetime.fromisoformat(time_utc).timestamp()


def report_times(spent: dict[str, float]) -> None:
    """Print time by part."""
    table = Table("time by part", box=None)
    table.add_column("s", justify="right")
    for name, value_s in (spent | {"everything": sum(spent.values())}).items():
        table.add_row(name, f"{value_s:.0f}")
    console.print(table)


def report() -> None:
    """Print where the run began and ended, beside the entropy of single tokens."""
    metrics = read_metrics(RUN / "metrics.jsonl")
    training = [line["loss"] for line in metrics if "loss" in line]
    validation = [line["validation"]["stdlib"]["loss"] for line in metrics if "validation" in line]
    unigram = TokenStore(STORE).report()["unigram_entropy_nats"]["validation_under_train"]
    start, end = training[0], training[-1]
    console.print(f"\n[bold]loss[/bold] (nats per token): training {start:.3f} at the start, {end:.3f} at the end")
    console.print(f"validation {validation[-1]:.3f} at the end; unigram entropy of that text {unigram:.3f}")
    if validation[-1] > unigram - 0.5:
        console.print("[red]the validation loss is not clearly below the unigram entropy[/red]")
        sys.exit(1)


def main() -> None:
    """The whole first run."""
    os.chdir(Path(__file__).resolve().parent.parent)
    installed_s = installation_s()
    spent = {} if installed_s is None else {"installation": installed_s}
    began_s = time.time()
    gpus = torch.cuda.device_count()
    processes = gpus or 2
    if STORE.exists():
        console.print(f"{STORE} exists")
    else:
        prepare = f"lightscale data prepare --corpus stdlib --out {STORE} --vocab-size 4096 --validation 0.02"
        run(prepare.split())
    run(["lightscale", "data", "inspect", str(STORE)])
    spent["corpus and tokenizer"] = time.time() - began_s

    # Two processes share every sequence: each holds half of its tokens, and states pass from one to the other.
    sequence = 2 if processes % 2 == 0 else 1
    command = ["lightscale", "train", str(CONFIG), "--processes", str(processes), f"parallel.sequence={sequence}"]
    finished = (status := RunDirectory(RUN).read_status()) is not None and status.status == "finished"
    attempts = []
    if not finished:
        first = RUN / "checkpoints" / f"step-{load(CONFIG).checkpoint.every:08d}"
        attempts.append(train(command, stop_after=None if RUN.exists() else first))
    attempts.append(train(command, stop_after=None))
    spent |= training_times(attempts)
    report()

    began_s = time.time()
    run(["lightscale", "generate", str(RUN), "--prompt", PROMPT, "--tokens", "120"])
    spent["generation"] = time.time() - began_s
    events = [event["event"] for event in read_lines(RUN / "events.jsonl")]
    saved, resumed = events.count("checkpoint"), events.count("resume")
    console.print(f"\n{saved} checkpoints, {resumed} resume; the run's files are in {RUN}")
    tensorboard = Path(sys.executable).parent / "tensorboard"
    console.print(f"show the curves with: {tensorboard} --logdir {RUN / 'tensorboard'}")
    report_times(spent)


if __name__ == "__main__":
    main()
