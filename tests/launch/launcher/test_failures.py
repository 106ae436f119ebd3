"""Which failures end a run: mistakes, not ranks that did not come."""

import os

import pytest

from lightscale.errors import UserError
from lightscale.launch.launcher.failures import RankFailure
from lightscale.launch.launcher.rendezvous import CannotStart


@pytest.mark.parametrize(("code", "mistake"), [(None, None), (CannotStart.EXIT_CODE, None), (UserError.EXIT_CODE, 78)])
def test_ranks_that_did_not_come_are_no_mistake(code: int | None, mistake: int | None) -> None:
    assert CannotStart.EXIT_CODE == os.EX_TEMPFAIL
    assert RankFailure(rank=1, summary="…", time_s=0.0, exit_code=code).mistake_code == mistake
