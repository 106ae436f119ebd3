"""Which commands a run can have beside it."""

from collections.abc import Callable

import pytest

from lightscale.config.schema import RunConfig
from lightscale.launch.chaos.faults.commands import COMMANDS


@pytest.mark.parametrize(
    ("words", "works"),
    [
        (["optimizer.schedule=cosine"], False),
        (["optimizer.schedule=wsd", "optimizer.decay_steps=1"], True),
        (["optimizer.schedule=constant"], True),
        (["optimizer.schedule=constant", "optimizer.name=schedulefree"], False),
    ],
)
def test_a_branch_needs_a_stable_phase(tiny_config: Callable[..., RunConfig], words: list[str], works: bool) -> None:
    """Without one `train --anneal` must be refused, also when it is given again."""
    config = tiny_config(*words)
    assert {name: one.works(config) for name, one in COMMANDS.items()} == {
        **dict.fromkeys(COMMANDS, True),
        "train --anneal": works,
    }
