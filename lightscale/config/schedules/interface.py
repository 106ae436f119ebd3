"""The interface of a schedule, and the settings that it reads."""

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol


class Settings(Protocol):
    """The keys of section [optimizer] that decide the learning rate."""

    @property
    def schedule(self) -> str:
        """Its name in ``registry.SCHEDULES``."""

    @property
    def lr(self) -> float:
        """Peak."""

    @property
    def warmup_steps(self) -> int:
        """Length of the warm-up, in steps."""

    @property
    def decay_steps(self) -> int | None:
        """Length of the final decay, in steps."""

    @property
    def decay(self) -> str:
        """Name of the final decay's shape, in ``decays.DECAYS``."""

    @property
    def decay_power(self) -> float:
        """Exponent of the shape ``polynomial``."""

    @property
    def min_lr_ratio(self) -> float:
        """Final learning rate of a decay, as a share of the peak."""


class Schedule(ABC):
    """The learning rate behind the warm-up, as a share of the peak.

    A schedule has no state. The rate of a step depends on the settings, the step and the length of the run alone, so
    that a resumed run, a run that rolled back and a branch compute the same rates.
    """

    uses: ClassVar[frozenset[str]] = frozenset()
    """Its keys among those that not every schedule reads."""

    @abstractmethod
    def share(self, settings: Settings, step: int, total_steps: int) -> float:
        """Share of the peak at ``step``, ``warmup_steps`` < ``step`` ≤ ``total_steps``."""

    @abstractmethod
    def fixed_until(self, settings: Settings, total_steps: int) -> int:
        """The last step of a run of ``total_steps`` whose rate does not depend on ``total_steps``."""

    def stable_steps(self, settings: Settings, total_steps: int) -> range | None:
        """The steps behind which a decay from the peak can begin; None: the schedule has no stable phase."""
        return None

    def check(self, settings: Settings) -> None:
        """Raise ValueError where a setting is missing; by default none is."""
        return

    def check_length(self, settings: Settings, total_steps: int) -> None:
        """Raise ValueError where a run of ``total_steps`` is too short; by default none is."""
        return
