"""Cases of ``crashes.py`` that write small records: a study, and the queue of one machine."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from crash_case import EARLIER, WHOLE, Case, Context, Wrong

from lightscale.data_pipeline.store.token_store import StoreWriter
from lightscale.errors import UserError
from lightscale.launch.local.queue import Queue
from lightscale.runs.run_directory import LineWriter
from lightscale.study.study import Study

_STUDY = """
[base]
data.store = "STORE"
data.sequence_length = 32
model = { vocab_size = 64, num_heads = 2, intermediate_size = 32 }
optimizer = { lr = 3e-3, schedule = "constant", warmup_steps = 2 }
train = { steps = 40, global_batch_size = 4, micro_batch_size = 4 }
[axes.architecture.tnl]
extends = "arch/tnl"
[axes.size.small]
model = { num_layers = 1, hidden_size = 16 }
[axes.size.medium]
model = { num_layers = 2, hidden_size = 32 }
"""


class _Letters:
    """A tokenizer of 64 ids; no text passes through it."""

    name, eot_id, vocab_size, sha256 = "letters", 0, 64, "0" * 64

    def encode(self, text: str) -> Any:
        raise AssertionError(text)

    def encode_batch(self, texts: Any) -> Any:
        raise AssertionError(texts)

    def decode(self, ids: Any) -> str:
        raise AssertionError(ids)

    def save(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text(json.dumps({"kind": "sentencepiece", "sha256": self.sha256}))


def study_case(work: Path) -> Case:
    """`study run`, where all cells are trained: their records are written. Trained runs are cases of their own."""
    with StoreWriter(work / "store", _Letters()) as writer:
        writer.source("text").append(np.arange(1, 2000, dtype=np.uint32) % 63 + 1, num_bytes=2000)
        writer.finish({})
    file, folder = work / "tiny.toml", work / "disk/study"
    file.write_text(_STUDY.replace("STORE", str(work / "store")), encoding="utf-8")
    study = Study(file, folder)
    for cell in study.cells():
        run = study.run(cell)
        run.path.parent.mkdir(parents=True, exist_ok=True)
        run.create(cell.config)
        attempt = run.begin_attempt()
        with LineWriter(run.metrics) as lines:
            for step in range(1, cell.config.total_steps + 1):
                lines.write({"step": step, "attempt": attempt, "loss": 4.0 / step, "step_s": 0.5})
        tokens = cell.config.total_tokens
        run.write_status("finished", reason="all steps are done", step=cell.config.total_steps, tokens=tokens)

    def look() -> Any:
        if not study.record_path.exists():
            raise FileNotFoundError(study.record_path)
        fresh = Study(file, folder)
        fresh.check()
        found = {}
        for cell in fresh.cells():
            if (record := fresh.finished_record(cell)) is not None:
                # A cell counts as finished when its record is there: its curve must be, too.
                found[cell.name] = record, repr(fresh.curve(cell))
        return found

    def judge(context: Context, found: Any) -> str:
        if wrong := [name for name, one in found.items() if context.after.get(name) != one]:
            raise Wrong(f"the record of {wrong[0]} opens, with other contents than were written")
        return WHOLE if found == context.after else EARLIER

    return Case(
        name="study",
        # What the runs are is read as well, and not written.
        read=r"study/(study\.json|cells(/.*)?)",
        command=("study", "run", str(file), "--dir", str(folder)),
        folder=work / "disk",
        look=look,
        judge=judge,
        final=look,
    )


# As `submit`, its runners and `cancel` change the queue, without the processes of jobs. What is written is reported by
# a line that is synced, as an answer to a user would be.
_QUEUE = """
import json, os, sys
from pathlib import Path
from lightscale.launch.local.queue import Job, Queue
folder = Path(sys.argv[1])
queue = Queue(folder / "queue")
events = (folder / "events.jsonl").open("a")

def write(job):
    queue.write(job)
    events.write(json.dumps({"job": job.number, "phase": job.phase}) + "\\n")
    events.flush()
    os.fsync(events.fileno())

with queue.locked():
    for number in range(queue.newest_number() + 1, 4):
        write(Job(number=number, host="here", order=number, run=folder / "run", directory=folder, gpus=[], num_gpus=0,
                  at_once=1, time_s=None, signal_s=60, is_chain=False, after=None))
for number, job in queue.jobs().items():
    for phase in ("running", "ended"):
        with queue.locked():
            write(job.model_copy(update={"phase": phase}))
with queue.locked():
    queue.forget_ended()
"""
_PHASES = ("waiting", "running", "ended")


def queue_case(work: Path) -> Case:
    """Three jobs come into the queue of one machine, run, end, and are forgotten."""
    folder = work / "disk"
    queue = folder / "queue"

    def look() -> Any:
        if not queue.exists():
            raise FileNotFoundError(queue)
        jobs = Queue(queue).jobs()
        if damaged := sorted(queue.glob("*.damaged")):
            raise UserError(f"{damaged[0].name}: set aside")
        return {number: job.phase for number, job in jobs.items()}, Queue(queue).newest_number()

    def judge(context: Context, found: Any) -> str:
        jobs, newest = found
        for line in context.reported.splitlines():
            one = json.loads(line)
            # Ended jobs are forgotten, and the newest number is not given again.
            phase = jobs.get(one["job"], "ended")
            if _PHASES.index(phase) < _PHASES.index(one["phase"]) or newest < one["job"]:
                raise Wrong(f"job {one['job']} was reported as {one['phase']}, and is {phase} with {newest} the newest")
        return WHOLE if found == context.after else EARLIER

    def final() -> Any:
        # The last job is kept for its number.
        return look()[1], {number for number, phase in look()[0].items() if phase != "ended"}

    return Case(
        name="queue",
        label="the queue's own changes",
        read=r"queue(/.*)?",
        program=(sys.executable, "-c", _QUEUE),
        command=(str(folder),),
        folder=folder,
        look=look,
        judge=judge,
        final=final,
    )
