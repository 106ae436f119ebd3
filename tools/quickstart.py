"""A first run from nothing: corpus, training on two processes, a stop and a resume, a sample of text.

Everything it does is a `lightscale` command that it prints first; use them for your own runs.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console

from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.runs.run_directory import RunDirectory, read_metrics

CONFIG = Path("configs/quickstart.toml")
STORE = Path("data/stdlib")
RUN = Path("runs/quickstart")
PROMPT = "def "
EXIT_RESUMABLE = 75
_POLL_S = 0.2

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


def train(command: list[str], *, stop_after: Path | None) -> None:
    """Train; once the checkpoint ``stop_after`` is there, stop the run as a cluster would, with SIGTERM."""
    say(command)
    process = subprocess.Popen(lightscale(command))
    stopped = False
    try:
        while process.poll() is None:
            if stop_after is not None and not stopped and stop_after.exists():
                console.print("[bold]stopping the run now, to show that it resumes where it was[/bold]")
                process.send_signal(signal.SIGTERM)
                stopped = True
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        # The run has the signal too: it saves and leaves.
        sys.exit(process.wait())
    if process.returncode not in ((0, EXIT_RESUMABLE) if stopped else (0,)):
        sys.exit(process.returncode)


def report(began: float, seconds: float) -> None:
    """Print where the run began and ended, beside the entropy of single tokens."""
    metrics = read_metrics(RUN / "metrics.jsonl")
    training = [line["loss"] for line in metrics if "loss" in line]
    validation = [line["validation"]["stdlib"]["loss"] for line in metrics if "validation" in line]
    unigram = TokenStore(STORE).report()["unigram_entropy_nats"]["validation_under_train"]
    start, end = training[0], training[-1]
    console.print(f"\n[bold]loss[/bold] (nats per token): training {start:.3f} at the start, {end:.3f} at the end")
    console.print(f"validation {validation[-1]:.3f} at the end; unigram entropy of that text {unigram:.3f}")
    console.print(f"training took {seconds:.0f} s, everything {time.monotonic() - began:.0f} s")
    if validation[-1] > unigram - 0.5:
        console.print("[red]the validation loss is not clearly below the unigram entropy[/red]")
        sys.exit(1)


def main() -> None:
    """The whole first run."""
    os.chdir(Path(__file__).resolve().parent.parent)
    began = time.monotonic()
    gpus = torch.cuda.device_count()
    processes = gpus or 2
    if STORE.exists():
        console.print(f"{STORE} is there already")
    else:
        prepare = f"lightscale data prepare --corpus stdlib --out {STORE} --vocab-size 4096 --validation 0.02"
        run(prepare.split())
    run(["lightscale", "data", "inspect", str(STORE)])

    # Two processes share every sequence: each holds half of its tokens, and states pass from one to the other.
    sequence = 2 if processes % 2 == 0 else 1
    command = ["lightscale", "train", str(CONFIG), "--processes", str(processes), f"parallel.sequence={sequence}"]
    finished = (status := RunDirectory(RUN).read_status()) is not None and status.status == "finished"
    start = time.monotonic()
    if not finished:
        train(command, stop_after=None if RUN.exists() else RUN / "checkpoints" / "step-00000100")
    train(command, stop_after=None)
    report(began, time.monotonic() - start)

    run(["lightscale", "generate", str(RUN), "--prompt", PROMPT, "--tokens", "120"])
    events = [json.loads(line)["event"] for line in (RUN / "events.jsonl").read_text().splitlines()]
    saved, resumed = events.count("checkpoint"), events.count("resume")
    console.print(f"\n{saved} checkpoints, {resumed} resume; everything about the run is in {RUN}")
    tensorboard = Path(sys.executable).parent / "tensorboard"
    console.print(f"look at the curves with:  {tensorboard} --logdir {RUN / 'tensorboard'}")


if __name__ == "__main__":
    main()
