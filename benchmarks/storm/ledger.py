"""What the workers of a storm have computed, and what of it has counted. Pure: works on what they wrote down."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from benchmarks.job.events import Event


@dataclass(frozen=True)
class Ledger:
    """The work of one run, and its result.

    Attributes:
        committed_steps: steps that count.
        first_attempt_steps: those of them that the first group to try has committed.
        wasted_attempts: attempts at a step of which nothing has counted.
        committed_samples: samples that count, over all epochs.
        computed_samples: samples that workers have computed, without the last, unfinished attempt of each killed one.
        lost_samples: of the whole epochs of the run, how many have not counted.
        repeated_samples: how many have counted more than once in an epoch.
        gaps: steps that nobody has committed, below the last one that somebody has.
    """

    committed_steps: int
    first_attempt_steps: int
    wasted_attempts: int
    committed_samples: int
    computed_samples: int
    lost_samples: int
    repeated_samples: int
    gaps: int

    @property
    def sample_efficiency(self) -> float:
        """Samples that count over samples computed by those who survived their attempt."""
        return self.committed_samples / self.computed_samples

    @property
    def attempt_efficiency(self) -> float:
        """Committed steps over these and the attempts that were thrown away whole."""
        return self.committed_steps / (self.committed_steps + self.wasted_attempts)

    @property
    def is_whole(self) -> bool:
        """Whether every sample of every epoch has counted once."""
        return not (self.lost_samples or self.repeated_samples or self.gaps)


def read(events: Sequence[Event], killed_pids: Collection[int], dataset_size: int, epochs: int) -> Ledger:
    """Make up the ledger of a finished run.

    Args:
        events: "drawn" and "committed" ones of all workers.
        killed_pids: of the workers that were killed.
        dataset_size: samples of an epoch.
        epochs: of the run.
    """
    round_of: dict[int, int] = {}  # of each step: the group that has committed it
    for event in events:
        if event["e"] == "committed":
            round_of[event["step"]] = max(event["round"], round_of.get(event["step"], 0))
    drawn = [event for event in events if event["e"] == "drawn"]
    attempts: defaultdict[int, set[int]] = defaultdict(set)
    counted: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for event in drawn:
        attempts[event["step"]].add(event["round"])
        if round_of.get(event["step"]) == event["round"]:
            counted[event["epoch"]].update(event["indices"] + event["carried"])
    return Ledger(
        committed_steps=len(round_of),
        first_attempt_steps=sum(1 for step, number in round_of.items() if number == min(attempts[step])),
        wasted_attempts=_wasted(drawn, round_of),
        committed_samples=sum(sum(counts.values()) for counts in counted.values()),
        computed_samples=sum(len(event["indices"]) for event in _of_survivors(drawn, round_of, killed_pids)),
        lost_samples=sum(dataset_size - len(counted[epoch]) for epoch in range(epochs)),
        repeated_samples=sum(count - 1 for counts in counted.values() for count in counts.values()),
        gaps=max(round_of, default=-1) + 1 - len(round_of),
    )


def _wasted(drawn: Sequence[Event], round_of: dict[int, int]) -> int:
    """Attempts in which something was computed, of which nothing counts: neither committed nor brought along."""
    computed: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    counting: defaultdict[int, set[int]] = defaultdict(set)
    for event in drawn:
        step, number = event["step"], event["round"]
        computed[step, number] |= set(event["indices"])
        if round_of.get(step) == number:
            counting[step] |= set(event["carried"])
    return sum(
        1
        for (step, number), indices in computed.items()
        if indices and round_of.get(step) != number and not indices & counting[step]
    )


def _of_survivors(drawn: Sequence[Event], round_of: dict[int, int], killed_pids: Collection[int]) -> list[Event]:
    """All attempts but the last one of each killed worker, unless the others have committed it."""
    last = {event["pid"]: event for event in drawn if event["pid"] in killed_pids}
    unfinished = [event for event in last.values() if round_of.get(event["step"]) != event["round"]]
    return [event for event in drawn if not any(event is other for other in unfinished)]
