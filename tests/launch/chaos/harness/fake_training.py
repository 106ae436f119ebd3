"""Stands in for `lightscale train`, without torch: `fake_training.py BEHAVIOUR RUN [FLAG]` starts two ranks of itself.

A step takes 30 ms, so that a run lasts longer than any fault waits. The loss is a function of the step; every 5 steps
there is a checkpoint of two files. BEHAVIOUR is "good", "restarts" (the launcher starts its ranks again itself),
"watches" (and ends them when one is stopped), or one of the mistakes that the chaos harness must find; "careless" are
those that do not look at what was lost or damaged.
"""

import json
import os
import shutil
import subprocess
import sys
import time

import psutil

from lightscale.launch.chaos.faults.lost_checkpoints import EXIT_LOST, FLAG
from lightscale.launch.chaos.harness.verify import GIVEN_UP
from lightscale.runs.run_directory import LineWriter, RunDirectory, read_lines
from lightscale.training.checkpoints.manifest import (
    hash_file,
    read_manifest,
    verify_files,
    write_manifest,
)
from lightscale.training.checkpoints.reading import DamagedCheckpoint
from lightscale.training.health.fault_injection import fault_point
from lightscale.training.signals import die_with_parent

STEPS, EVERY, KEEP, STEP_S = 60, 5, 3, 0.03


def launch(behaviour: str, path: str, flag: str = "") -> int:
    run = RunDirectory(path)
    run.path.mkdir(parents=True, exist_ok=True)
    if behaviour != "careless":
        run.recover_records()
        saved: list[str] = []
        for event in read_lines(run.events):
            if event["event"] == "checkpoint":
                saved.append(event["checkpoint"])
            elif event["event"] == GIVEN_UP:
                saved.clear()
        if saved and not any(run.checkpoints.glob("step-*")) and flag != FLAG:
            print(f"error: the run saved {', '.join(saved)}; begin again with --allow-change lost-checkpoints")
            return EXIT_LOST
        os.environ["FLAG"] = flag
    if behaviour == "gives up" and run.attempt:
        return 70
    while (code := run_ranks(behaviour, path)) != 0 and behaviour == "restarts":
        pass
    return code


def run_ranks(behaviour: str, path: str) -> int:
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, behaviour, path],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LAUNCHER": str(os.getpid())},
        )
        for rank in range(2)
    ]
    while any(rank.poll() is None for rank in ranks):
        stopped = any(
            rank.poll() is None and psutil.Process(rank.pid).status() == psutil.STATUS_STOPPED for rank in ranks
        )
        if any(rank.poll() for rank in ranks) or (stopped and behaviour == "watches"):
            for rank in ranks:
                rank.kill()
                rank.wait()
            return 1
        time.sleep(0.01)
    return max(rank.returncode for rank in ranks)


def rank(behaviour: str, path: str) -> int:
    # Not whose child it is by now: the launcher may have been killed while this rank began.
    launcher, run = int(os.environ["LAUNCHER"]), RunDirectory(path)
    if behaviour != "orphans":
        die_with_parent(launcher)
    code = train(run, behaviour) if os.environ["RANK"] == "0" else follow(run)
    if os.getppid() != launcher:
        time.sleep(60)
    return code


def train(run: RunDirectory, behaviour: str) -> int:
    run.begin_attempt(world_size=2)
    if os.environ.get("FLAG") == FLAG:
        run.event(GIVEN_UP, step=0)
    step = 0 if behaviour == "forgets" else restore(run, behaviour)
    resumed = step > 0
    with LineWriter(run.metrics) as metrics:
        while step < STEPS:
            step += 1
            fault_point("step:begin")
            time.sleep(STEP_S)
            fault_point("step:optimizer")
            loss = 10 / step + (1e-15 * step if resumed and behaviour == "drifts" else 0)
            metrics.write({"step": step, "attempt": run.attempt, "tokens": 8 * step, "loss": loss, "grad_norm": 1.0})
            if step % EVERY == 0:
                if behaviour == "stumbles":
                    return 1
                save(run, step)
    run.write_status("finished", reason="", step=step, tokens=8 * step)
    return 0


def follow(run: RunDirectory) -> int:
    """The other rank: goes through the phases that every rank has."""
    while run.read_status() is None:
        for point in ("load:verify", "load:read", "step:begin", "step:optimizer", "save:begin", "save:open"):
            fault_point(point)
        for point in ("save:write", "save:sync"):
            fault_point(point)
        time.sleep(STEP_S)
    return 0


def save(run: RunDirectory, step: int) -> None:
    fault_point("save:begin")
    final = run.checkpoints / f"step-{step:08d}"
    if final.exists():
        return
    draft = final.with_suffix(".tmp")
    # Left by one that was killed.
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    files = [draft / f"rank-{rank}" for rank in range(2)]
    for rank, file in enumerate(files):
        fault_point("save:open")
        fault_point("save:write")
        file.write_text(json.dumps({"rank": rank, "step": step}))
        fault_point("save:sync")
    fault_point("save:manifest")
    write_manifest(draft, {file.name: hash_file(file) for file in files}, {"step": step})
    fault_point("save:rename")
    draft.rename(final)
    removed = []
    for old in sorted(path for path in run.checkpoints.glob("step-*") if not path.suffix)[:-KEEP]:
        doomed = old.rename(old.with_suffix(".old"))
        fault_point("save:retention")
        for file in doomed.iterdir():
            file.unlink()
        doomed.rmdir()
        removed.append(int(old.name.removeprefix("step-")))
    run.event("checkpoint", step=step, checkpoint=final.name, removed=removed)


def restore(run: RunDirectory, behaviour: str) -> int:
    refused = []
    fault_point("load:verify")
    for path in sorted((path for path in run.checkpoints.glob("step-*") if not path.suffix), reverse=True):
        try:
            manifest = read_manifest(path)
            if behaviour != "trusts":
                verify_files(path, manifest, manifest.files)
        except DamagedCheckpoint as error:
            refused.append(str(error))
            path.rename(path.with_suffix(f".bad{time.monotonic_ns()}"))
            continue
        fault_point("load:read")
        step = int(path.name.removeprefix("step-"))
        run.event("resume", step=step, refused=refused)
        return step
    return 0


if __name__ == "__main__":
    entry = rank if "RANK" in os.environ else launch
    sys.exit(entry(*sys.argv[1:]))
