"""A command on several hosts, here all this machine: what counts as its end, and what each of them has to say."""

import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest

from lightscale.config.schema import RunConfig
from lightscale.launch.chaos.harness.hosts import Host
from lightscale.launch.chaos.harness.training import Training
from lightscale.launch.chaos.harness.trial import Runner, Subject
from lightscale.runs.run_directory import RunDirectory

HOSTS = [Host(name=f"node-{letter}", address="127.0.0.1", variables={"WHERE": letter}) for letter in "ab"]
# CODE:WORD of each host.
PROGRAM = """
import os, sys
ends, *place = sys.argv[1:]
code, word = ends.split(",")[int(place[1].removeprefix("--node-rank="))].split(":")
print(word, os.environ["WHERE"], *place)
sys.exit(int(code))
"""

Start = Callable[[str], Runner]


@pytest.fixture
def start(tmp_path: Path, tiny_config: Callable[..., RunConfig]) -> Start:
    def start(ends: str) -> Runner:
        training = Training(
            [sys.executable, "-c", PROGRAM, ends],
            RunDirectory(tmp_path / "run"),
            faults_folder=tmp_path / "faults",
            log=tmp_path / "log",
            hosts=HOSTS,
            port=29999,
        )
        subject = Subject(config=tiny_config(), processes=4, checkpoint_bytes=1, other_store=tmp_path)
        return Runner(training, deque(), subject, patience_s=60, report=lambda trial, fault: None)

    return start


def test_each_host_gets_its_place(start: Start) -> None:
    run = start("0:ended,0:ended")
    assert run.refused(0) is None
    assert run.training.is_finished and run.training.starts == 1
    place = "--nodes=2 --node-rank={} --master-addr=127.0.0.1 --master-port=29999"
    assert run.training.outputs() == [f"ended {one} {place.format(rank)}\n" for rank, one in enumerate("ab")]
    # From where the first start had ended.
    said = run.training.num_output_bytes
    assert run.training.outputs(said) == ["", ""]


@pytest.mark.parametrize(
    ("ends", "missed"),
    [
        ("78:damaged,78:damaged", None),
        ("78:damaged,1:damaged", "it ended with 78 and 1, not 78: damaged a"),
        ("0:damaged,78:damaged", "it ended with 0 and 78, not 78: damaged a"),
        ("78:damaged,78:broken", "it did not print '^damaged': damaged a"),
        ("78:broken,78:damaged", "it did not print '^damaged': broken a"),
    ],
)
def test_a_refusal_of_all_ranks_comes_from_every_host(start: Start, ends: str, missed: str | None) -> None:
    run = start(ends)
    found = run.refused(78, "^damaged")
    assert found is None if missed is None else found is not None and found.startswith(missed)
    assert not run.training.is_finished
