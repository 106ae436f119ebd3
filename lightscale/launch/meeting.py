"""The meeting of all ranks of a run before anything is built: they compare their inputs, and start together or not.

They meet in the store of the rendezvous, which needs neither layout nor group, since the layout may differ. Every rank
writes its facts there; the first to arrive compares them, and all read its verdict.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

import torch.distributed as dist

from lightscale.config.schema import RestartConfig, RunConfig
from lightscale.errors import UserError
from lightscale.launch.environment import RankEnvironment
from lightscale.launch.launcher.rendezvous import CannotStart
from lightscale.launch.meeting_place import MeetingPlace
from lightscale.launch.rank_facts import FactReader, RankFacts, disagreement, wrong_numbers
from lightscale.parallel.rendezvous.rank_store import private
from lightscale.parallel.rendezvous.sockets import KEY_VARIABLE
from lightscale.runs.run_directory import RunDirectory

# Between two looks at the store: at least, at most.
_PAUSES_S = (0.005, 0.2)
# How long a rank waits until all others have read the verdict, whose store ends with rank 0.
_FAREWELL_S = 10.0
# For the verdict after the limit of the rank that gives it, which may have started later.
_VERDICT_S = 30.0
_MOST_RANKS = 8


def meet(
    environment: RankEnvironment, read: Callable[[], RunConfig], directory: RunDirectory, allow: Collection[str]
) -> tuple[RunConfig, dist.Store | None]:
    """The configuration from `read`, once all ranks have met and train the same run with it.

    Writes no files. No rank waits longer than `restart.collective_timeout_s` for the others. The store must live until
    the process groups exist, because rank 0's process may serve it; a single rank has no store.

    Raises:
        UserError: the ranks differ, have wrong numbers, or one cannot train; the same message on all ranks.
        CannotStart: ranks are missing, or failed without a mistake of the user.
    """
    facts = FactReader(environment.rank, environment.world_size)
    config = facts.read(read, directory, allow)
    store = None
    if environment.world_size > 1:
        timeout_s = (RestartConfig() if config is None else config.restart).collective_timeout_s
        try:
            store = agree(environment, facts.facts(), timeout_s)
        except CannotStart:
            # A fault of this rank's own program or machine, with its traceback; the others have only its message.
            if facts.error is not None and not isinstance(facts.error, UserError):
                raise facts.error from None
            raise
    if config is None:
        assert facts.error is not None, "a configuration or an error"
        raise facts.error
    return config, store


def agree(environment: RankEnvironment, facts: RankFacts, timeout_s: float) -> dist.Store:
    """Wait for all ranks, at most `timeout_s`, and compare their `facts`; errors are those of `meet`."""
    place = MeetingPlace(environment, time.monotonic() + timeout_s)
    result: Future[dist.Store] = Future()

    def work() -> None:
        try:
            result.set_result(_agree(place, facts, timeout_s))
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            result.set_exception(error)

    # In a thread of its own: no call of torch's store returns while the process that serves it is stopped.
    threading.Thread(target=work, name="meeting", daemon=True).start()
    try:
        return result.result(timeout_s + _VERDICT_S + 2 * _FAREWELL_S)
    except TimeoutError:
        if result.done():
            raise
        raise CannotStart(
            f"rank 0 at {place.place} no longer answers: its process is stopped, or the network was cut; end it "
            "and start the ranks again"
        ) from None


def _agree(place: MeetingPlace, facts: RankFacts, timeout_s: float) -> dist.Store:
    try:
        store = _Store(place)
        verdict = store.verdict(facts, timeout_s)
    except dist.DistError as error:
        raise CannotStart(f"the store of rank 0 at {place.place} is gone: it ended before all had met") from error
    if verdict["error"] is not None:
        raise (UserError if verdict["is_mistake"] else CannotStart)(verdict["error"])
    return store.store


class _Store:
    """The store at rank 0's address, and this rank's place in it."""

    def __init__(self, place: MeetingPlace) -> None:
        self.place, self._deadline, self._is_one_host = place.place, place.deadline, place.is_one_host
        self.store = private(place.open(), os.environ, "meeting")

    def verdict(self, facts: RankFacts, timeout_s: float) -> dict[str, object]:
        """Write `facts`, and read the verdict over all facts."""
        number = self.store.add("arrived", 1)
        self.store.set(f"facts-{number}", facts.to_json())
        if number == 1:
            self.store.set("verdict", json.dumps(self._judge(facts, timeout_s)))
        elif not self._wait("verdict", self._deadline + _VERDICT_S):
            raise CannotStart(f"no answer at {self.place} within {timeout_s:.0f} s from the first rank")
        found: dict[str, object] = json.loads(self.store.get("verdict"))
        if found["error"] is None and number > facts.world_size:
            text = f"all {facts.world_size} ranks have already met at {self.place}, and rank {facts.rank} arrived again"
            why = (
                "a rank number is used twice, or another run uses this port; end its ranks, or set another MASTER_PORT"
            )
            found = {"error": f"{text}: {why}", "is_mistake": True}
        # Also those that have not come yet, unless they were waited for: without the store they would wait for rank 0.
        readers = facts.world_size if found["is_mistake"] else self.store.add("arrived", 0)
        self._take_leave(readers)
        return found

    def _judge(self, own: RankFacts, timeout_s: float) -> dict[str, object]:
        ranks = [own]
        while len(ranks) < own.world_size:
            if not self._wait(f"facts-{len(ranks) + 1}", self._deadline):
                return {"error": self._missing(ranks, timeout_s), "is_mistake": False}
            ranks.append(RankFacts.from_json(self.store.get(f"facts-{len(ranks) + 1}")))
            # At once: with wrong numbers the wait for the rest is in vain.
            if wrong := wrong_numbers(ranks):
                return {"error": f"at {self.place}: {wrong}", "is_mistake": True}
        return {"error": disagreement(ranks), "is_mistake": all(one.is_mistake for one in ranks)}

    def _missing(self, ranks: Sequence[RankFacts], timeout_s: float) -> str:
        here = {one.rank for one in ranks}
        absent = [rank for rank in range(ranks[0].world_size) if rank not in here]
        names = ", ".join(map(str, absent[:_MOST_RANKS]))
        more = f" and {len(absent) - _MOST_RANKS} more" if len(absent) > _MOST_RANKS else ""
        hosts = sorted({one.host for one in ranks})
        seen = ", ".join(hosts[:_MOST_RANKS]) + (" and others" if len(hosts) > _MOST_RANKS else "")
        text = (
            f"of {ranks[0].world_size} ranks, {names}{more} did not come to {self.place} within {timeout_s:.0f} s "
            f"(restart.collective_timeout_s); those on {seen} did; start the missing ranks with this address, "
            "or find the cause of their end"
        )
        if not self._is_one_host:
            text += f", and set the same {KEY_VARIABLE} on all hosts"
        errors = [f"rank {one.rank} on {one.host}: {one.error}" for one in ranks if one.error is not None]
        return "\n".join([text, *errors[:_MOST_RANKS]])

    def _take_leave(self, readers: int) -> None:
        """Wait until that many have read the verdict: torchrun ends the ranks of a host with the first of them."""
        # What the others do no longer matters to this one.
        with contextlib.suppress(dist.DistError):
            if self.store.add("read", 1) >= readers:
                self.store.set("all-read", "")
            self._wait("all-read", time.monotonic() + _FAREWELL_S)

    def _wait(self, key: str, deadline: float) -> bool:
        """Until `key` is there; False: it was not by `deadline`."""
        began = time.monotonic()
        while not self.store.check([key]):
            now = time.monotonic()
            if now >= deadline:
                return False
            # Not the store's own wait, during which no signal is handled. Ranks of one host come within milliseconds of
            # each other, those of another may take minutes.
            time.sleep(min(max(_PAUSES_S[0], (now - began) / 10), _PAUSES_S[1]))
        return True
