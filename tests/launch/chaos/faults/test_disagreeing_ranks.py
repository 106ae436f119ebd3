"""What a refusal of ranks that disagree must say, by the message that they have."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightscale.config.files import flat, load
from lightscale.config.schema import RunConfig
from lightscale.launch.chaos.faults.disagreeing_ranks import WAYS, Difference, _tree, difference, names
from lightscale.launch.chaos.harness.trial import Subject
from lightscale.launch.chaos.stores import write_other_store
from lightscale.launch.rank_facts import RankFacts, contents, disagreement
from lightscale.training.health.machine import host_name


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, write_store: Callable[..., None]) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    write_store(folder / "store", 512, text=np.arange(1, 400))
    write_other_store(folder / "store", folder / "other")
    return folder


def facts(config: RunConfig, rank: int, host: str) -> RankFacts:
    values = {key: str(value) if isinstance(value, int | float) else repr(value) for key, value in flat(config).items()}
    return RankFacts(rank=rank, world_size=4, host=host, process=rank, values={**values, **contents(config)})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("layout", ["1", "2"])
@pytest.mark.parametrize("host_names", [[host_name()], ["node-a", "node-b"]])
def test_the_message_names_it(
    stores: Path, tiny_run: Path, way: str, number: int, layout: str, host_names: list[str]
) -> None:
    words = [f"data.store={stores}/store", f"parallel.sequence={layout}"]
    config = load(tiny_run, words)
    subject = Subject(config=config, processes=number, checkpoint_bytes=1, other_store=stores / "other")
    other = difference(subject, way)
    hosts = [host_names[rank * len(host_names) // number] for rank in range(number)]
    for odd in range(number):
        ranks = [
            facts(load(tiny_run, [*words, other.override]) if rank == odd else config, rank, hosts[rank])
            for rank in range(number)
        ]
        said = disagreement(ranks)
        assert said is not None
        # As a command prints it.
        text = "error: " + said.replace("\n", "\n       ")
        assert names(text, other, odd, hosts), text
        assert not names(text, other, (odd + 1) % number, hosts)
        for change in ({"key": "train.steps"}, {"values": ("0.5", other.values[1])}):
            assert not names(text, dataclasses.replace(other, **change), odd, hosts)
        assert len(set(hosts)) == 1 or not names(text, other, odd, hosts[::-1])
    assert disagreement([facts(config, rank, hosts[rank]) for rank in range(number)]) is None


def test_a_value_is_not_the_beginning_of_another() -> None:
    other = Difference(override="", key="train.seed", values=("1", "2"))
    text = f"train.seed: {{}} on {host_name()} (rank 1), 1 on {host_name()} (rank 0)"
    hosts = [host_name()] * 2
    assert names(text.format("2"), other, 1, hosts)
    assert not names(text.format("2345"), other, 1, hosts)


def test_whatever_is_written_is_seen(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.toml").write_text("a")
    # As a launcher leaves it that was killed (`heartbeat.shared_heartbeats`).
    (run / "heartbeats").symlink_to(f"/proc/{os.getpid()}/fd/1000000")
    before = _tree(run)
    assert _tree(run) == before
    (run / "logs").mkdir()
    assert {name for name, _, _ in _tree(run) ^ before} == {"logs"}
    (run / "logs").rmdir()
    (run / "config.toml").write_text("b")
    assert {name for name, _, _ in _tree(run) ^ before} == {"config.toml"}
