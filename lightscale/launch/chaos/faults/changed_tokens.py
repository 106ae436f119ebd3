"""Changed tokens of the store, under the running job or between two attempts, restored afterwards."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lightscale.data_pipeline.store.blocks import BLOCK_BYTES
from lightscale.data_pipeline.store.shards import read_metadata
from lightscale.errors import UserError
from lightscale.launch.chaos.faults.drawing import shuffled_cycle
from lightscale.launch.chaos.harness.trial import PATIENCE_SAVES, Bound, RunEnded, Runner

WAYS = ("a bit of every block", "every tenth token", "all moved by one token", "a page of zeros in every block")
_TOKEN_BYTES, _PAGE_BYTES = 4, 4096


@dataclass(frozen=True, kw_only=True)
class ChangedTokens:
    """Changes every block of the store's tokens in place: the run must stop at the next read and report the block."""

    way: str
    """One of `WAYS`."""
    while_running: bool
    seed: int
    steps: int
    """Steps of the attempt before a change under a job."""
    bound: ClassVar[Bound] = Bound(saves=2, seconds=120)

    @property
    def kind(self) -> str:
        """What it is, for the table."""
        return f"changed tokens {'under a job' if self.while_running else 'between attempts'}"

    def inject(self, run: Runner) -> None:
        """Change them, wait for the refusal, and restore them."""
        store = run.subject.config.data.store
        assert store is not None, "the campaign tries this on one store"
        shards = token_shards(store)
        if self.while_running:
            run.wait_for_first_step()
            run.wait_for_steps(self.steps)
        else:
            run.bring_down(lambda: True)
        before = {shard: shard.read_bytes() for shard in shards}
        said = run.training.num_output_bytes
        try:
            for shard, data in before.items():
                _write(shard, changed(data[: shards[shard]], self.way, random.Random(self.seed)))
            # The rank that reads one first ends, and with it the others, with its message.
            # FILE: source SOURCE, shard N, block B (tokens I to J) is not what was prepared; what to do
            says = rf"{re.escape(str(store))}/\S+/c/\d+: source \S+, shard \d+, block \d+ \(tokens .*data verify"
            if self.while_running:
                # What was read ahead before the change is right, and may be trained on.
                most_steps = PATIENCE_SAVES * run.every
                missed = run.ends(UserError.EXIT_CODE, says, first_bytes=said, most_steps=most_steps)
            else:
                missed = run.refused(UserError.EXIT_CODE, says)
        finally:
            for shard, data in before.items():
                _write(shard, data)
        if run.training.is_finished:
            # All that it still read had been read ahead: the comparison of its losses will tell.
            raise RunEnded
        run.happened(self, lambda since: missed)


def token_shards(store: Path) -> dict[Path, int]:
    """Files with the tokens of all sources of `store`, and the number of token bytes in each."""
    found = {}
    for metadata in sorted(store.glob("*/tokens/zarr.json")):
        length, layout = read_metadata(metadata)
        for shard in range(layout.num_shards(length)):
            found[layout.path(metadata.parent, shard)] = layout.values_in(shard, length) * layout.value_bytes
    return found


def changed(data: bytes, way: str, generator: random.Random) -> bytes:
    """The tokens of a shard with all blocks changed in one of `WAYS`."""
    content = bytearray(data)
    blocks = [(start, min(start + BLOCK_BYTES, len(data))) for start in range(0, len(data), BLOCK_BYTES)]
    if way == "every tenth token":
        for start in range(0, len(content), 10 * _TOKEN_BYTES):
            content[start] ^= 1
    elif way == "all moved by one token":
        content = content[_TOKEN_BYTES:] + content[:_TOKEN_BYTES]
    else:
        for start, stop in blocks:
            if way == "a bit of every block":
                bit = generator.randrange(8 * (stop - start))
                content[start + bit // 8] ^= 1 << bit % 8
            else:
                assert way == "a page of zeros in every block", way
                page = generator.randrange(start, stop, _PAGE_BYTES)
                end = min(page + _PAGE_BYTES, stop)
                content[page:end] = bytes(end - page)
    return bytes(content)


def _write(path: Path, data: bytes) -> None:
    # In place: a file that takes the place of this one is not what the ranks have open.
    with path.open("r+b") as file:
        file.write(data)


def draw_changed_tokens(generator: random.Random, number: int, processes: int) -> Iterator[ChangedTokens]:
    """Draw half of them under the running job; each way equally often."""
    for count, way in enumerate(shuffled_cycle(generator, WAYS, number)):
        yield ChangedTokens(
            way=way,
            # Every way in both, in turn.
            while_running=(count // len(WAYS) + count) % 2 == 0,
            seed=generator.randrange(1 << 30),
            steps=generator.randint(0, 8),
        )
