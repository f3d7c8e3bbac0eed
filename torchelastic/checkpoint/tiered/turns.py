"""Which tiers take part in a save: each may have a policy that makes it rarer than saves are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torchelastic.checkpoint.policy import SaveMoment
from torchelastic.checkpoint.store.tier import Tier


class TierTurns:
    """Asks each tier's `every`, and remembers when it took part last; on rank 0, on the training thread.

    Args:
        tiers: in their order.
        monotonic: a clock in seconds that never goes back.
    """

    def __init__(self, tiers: Sequence[Tier], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._tiers = tiers
        self._monotonic = monotonic
        self._began = (0, monotonic())
        self._last: dict[str, tuple[int, float]] = {}

    def begin(self, step: int) -> None:
        """The run goes on from this step, which is saved already."""
        self._began = (step, self._monotonic())
        self._last.clear()

    def next(self, step: int, *, everywhere: bool = False) -> list[str]:
        """The names of the tiers that take part in a save after this step; with `everywhere` all do."""
        now_s = self._monotonic()
        chosen = [tier.name for tier in self._tiers if everywhere or self._is_due(tier, step, now_s)]
        self._last.update(dict.fromkeys(chosen, (step, now_s)))
        return chosen

    def _is_due(self, tier: Tier, step: int, now_s: float) -> bool:
        if tier.every is None:
            return True
        last_step, last_s = self._last.get(tier.name, (None, None))
        moment = SaveMoment(
            step=step,
            now_s=now_s,
            last_saved_step=last_step,
            last_saved_s=last_s,
            began_s=self._began[1],
            began_step=self._began[0],
        )
        return tier.every.decide(moment).save
