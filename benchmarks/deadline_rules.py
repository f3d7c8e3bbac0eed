"""When to save before a deadline: our `IterManager` and models of the rules of velastic and PyRecover, one interface.

The models are the rules alone, from their sources: what those packages lose besides (ranks that do not agree, files
that are overwritten in place) is not in them. Neither handles a signal, so a notice that comes as one is not seen.
"""

from __future__ import annotations

import math
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchelastic.lifetime import IterManager
from torchelastic.lifetime.grace import TERM_GRACE_S
from torchelastic.lifetime.sources import Notices
from torchelastic.lifetime.sources.signals import signal_notice
from torchelastic.testing.clock import FakeClock

#: How long the only tier of a trace is called by our rule where a trace names none.
ONLY_TIER = "checkpoint"


@dataclass(frozen=True)
class End:
    """How the end of a life becomes known.

    Attributes:
        at_s: when the life ends, by the clock of the simulation.
        told_s: when that becomes known; a moment before the life: from its beginning.
        is_signal: it is a SIGTERM, which does not say how much time is left.
    """

    at_s: float
    told_s: float = -math.inf
    is_signal: bool = False


@dataclass(frozen=True)
class Action:
    """What a rule wants before a step: `tier` names where to save; None: do not save."""

    tier: str | None = None
    stops: bool = False


class Rule(ABC):
    """A job that lives several times. What is kept from life to life is the rule's own matter."""

    def __init__(self, clock: FakeClock, folder: Path, tiers: tuple[str, ...]) -> None:
        self.clock, self.folder, self.tiers = clock, folder, tiers

    @abstractmethod
    def begin_life(self, end: End) -> None:
        """A process starts."""

    @abstractmethod
    def before_step(self) -> Action:
        """Asked at the beginning of each step."""

    def step_took(self, seconds: float) -> None:  # noqa: B027 - not every rule wants to know
        """A step is over, and took so long."""

    def is_saved(self) -> None:  # noqa: B027 - the same
        """The save that was wanted is durable."""


@dataclass
class _Told:
    """A deadline that becomes known at some moment; `torchelastic.lifetime.Deadline`."""

    end: End
    name: str = "simulated"
    reason: str = "of the trace"

    def remaining_s(self, now_s: float) -> float | None:
        return self.end.at_s - now_s if now_s >= self.end.told_s else None


class _Signal(Notices):
    """SIGTERM at some moment, as `SignalNotices` tells it where nobody has said what the grace is."""

    def __init__(self, end: End) -> None:
        super().__init__("signal", "none came")
        self._end = end

    def remaining_s(self, now_s: float) -> float | None:
        if now_s >= self._end.told_s and not self.notices:
            told_s = self._end.told_s
            notice = signal_notice(self.name, signal.SIGTERM, told_s, TERM_GRACE_S, None, is_sure=False)
            assert notice is not None  # no scheduler knows the end
            self.tell([notice])
        return super().remaining_s(now_s)


class Ours(Rule):
    """`IterManager` itself, by a clock that is moved."""

    manager: IterManager

    def begin_life(self, end: End) -> None:
        deadline = _Signal(end) if end.is_signal else _Told(end)
        self.manager = IterManager(
            velastic_dir=self.folder,
            deadline=deadline,
            clock=self.clock,
            tiers=self.tiers or (ONLY_TIER,),
            redundant_time=1,
        )

    def before_step(self) -> Action:
        self.manager.iter()
        if not self.manager.should_save_ckpt():
            return Action(stops=self.manager.should_stop)
        decision = self.manager.decision
        tier = self.tiers[0] if decision is None or decision.tier is None else decision.tier
        self._saving = self.manager.saving(tier)
        self._saving.__enter__()
        return Action(tier, self.manager.should_stop)

    def is_saved(self) -> None:
        self._saving.__exit__(None, None, None)


class Velastic(Rule):
    """Save if less is left than the save time that the user gives (0) + 5 s + the longest step ever, in all lives.

    It would go on then, and save in each step until it is killed; here it stops, as its users would want it to.
    """

    REDUNDANT_S, SAVE_S = 5.0, 0.0
    _longest_s = _kept_s = 0.0

    def begin_life(self, end: End) -> None:
        self._end, self._longest_s = end, self._kept_s

    def before_step(self) -> Action:
        now_s = self.clock()
        if self._end.is_signal or now_s < self._end.told_s:
            return Action()
        if self._end.at_s - now_s >= self.SAVE_S + self.REDUNDANT_S + self._longest_s:
            return Action()
        self._kept_s = self._longest_s  # pickled when it decides
        return Action(self.tiers[0], stops=True)

    def step_took(self, seconds: float) -> None:
        self._longest_s = max(self._longest_s, seconds)


class PyRecover(Rule):
    """Stop after this step if less is left than 6 of the longest steps and 2 of the longest saves; nothing is kept.

    The floors are its defaults: 1 s for a step, 10 s for a save. Saves count where they are periodic; there are none.
    """

    STEP_S, SAVE_S = 1.0, 10.0

    def begin_life(self, end: End) -> None:
        self._end, self._step_s, self._has_trained, self._stops = end, self.STEP_S, False, False

    def before_step(self) -> Action:
        if self._stops:
            return Action(self.tiers[0], stops=True)
        now_s = self.clock()
        if not self._end.is_signal and now_s >= self._end.told_s:
            steps, saves = (6, 2) if self._has_trained else (11, 3)
            self._stops = self._end.at_s - now_s < steps * self._step_s + saves * self.SAVE_S
        return Action()

    def step_took(self, seconds: float) -> None:
        self._step_s, self._has_trained = max(self._step_s, seconds), True


RULES: Mapping[str, type[Rule]] = {"torchelastic": Ours, "velastic": Velastic, "PyRecover": PyRecover}


@dataclass
class Tally:
    """What became of the lives of one trace under one rule.

    Attributes:
        lives: how many there were.
        missed: of them, those that ended with trained steps that were not saved; after a SIGTERM: without a save since.
        unused: of each life, the share of its time in which nothing was trained that is kept.
    """

    lives: int = 0
    missed: int = 0
    unused: list[float] = field(default_factory=list)

    @property
    def missed_share(self) -> float:
        """Of all lives."""
        return self.missed / self.lives

    @property
    def wasted_share(self) -> float:
        """Of the time of all lives: starting, saving, waiting for the end, and work that was lost."""
        return sum(self.unused) / len(self.unused)
