"""Which checkpoint a refusal must name."""

from pathlib import Path

from lightscale.launch.chaos.faults.lost_checkpoints import newest_recorded
from lightscale.launch.chaos.harness.verify import GIVEN_UP
from lightscale.runs.run_directory import RunDirectory


def test_the_newest_that_is_recorded_and_there(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.begin_attempt()
    # One that was finished, but killed before it could be recorded: nobody can miss it.
    (run.checkpoints / "step-00000005").mkdir(parents=True)
    assert newest_recorded(run) is None
    for step in (5, 10):
        run.event("checkpoint", step=step, checkpoint=f"step-{step:08d}")
    assert newest_recorded(run) is None, "a fault has put it aside"
    (run.checkpoints / "step-00000010").mkdir()
    assert newest_recorded(run) == "step-00000010"
    run.event(GIVEN_UP, step=10)
    assert newest_recorded(run) is None
