"""Conclusions from the workers' events: was every image trained exactly once in each epoch, and how fast was recovery.

Pure functions over lists of events; the numbers come from what the workers loaded, not from what a sampler meant to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from examples.imagenet.events import Event


@dataclass(frozen=True)
class SampleLedger:
    """How often the final model saw the images.

    Attributes:
        steps: committed steps.
        trained: images in these steps, all epochs together.
        lost: images that an epoch should have had and did not, all epochs together.
        repeated: second and further appearances of an image within one epoch.
    """

    steps: int
    trained: int
    lost: int
    repeated: int


def group_of_each_step(events: Iterable[Event]) -> dict[int, int]:
    """Tells in which group each step became part of the surviving model.

    That is the last group that attempted it, if anything shows that it succeeded there: a worker committed it, or went
    on to later steps. (All workers may fail after their optimizers have stepped, each too late to learn of success from
    the others; such a step counts without anybody's commit.) Its gradients held the images of the whole group, so it
    does not matter which worker committed it.
    """
    last_attempt: dict[int, int] = {}
    succeeded: dict[int, int] = {}
    for event in sorted(events, key=lambda event: event.time_s):
        if event.kind == "attempt":
            last_attempt[event.step] = event.group
            succeeded.pop(event.step, None)  # whatever was achieved before, it is being repeated
        reached = event.step + 1 if event.kind == "commit" else event.step
        for step in range(reached - 1, -1, -1):
            if step in succeeded:
                break
            if step in last_attempt:
                succeeded[step] = last_attempt[step]
    return succeeded


def steps_trained_twice(events: Iterable[Event]) -> int:
    """Counts the repetitions of steps that a worker repeats although it had committed them itself.

    (If only workers that died had committed a step, the others rightly repeat it.)
    """
    committed_steps: dict[int, int] = {}  # of each process
    repetitions: set[tuple[int, int]] = set()
    for event in sorted(events, key=lambda event: event.time_s):
        had = committed_steps.get(event.pid, 0)
        if event.kind == "attempt" and event.step < had:
            repetitions.add((event.step, event.group))
        reached = event.step + 1 if event.kind == "commit" else event.step
        committed_steps[event.pid] = max(had, reached)
    return len(repetitions)


def sample_ledger(events: Sequence[Event], *, images: int, epochs: int) -> SampleLedger:
    """Counts what the surviving model was trained on.

    Args:
        events: of all workers, the dead ones too.
        images: size of the training set; indices are 0..images-1.
        epochs: how many passes there should have been.
    """
    group_of_step = group_of_each_step(events)
    seen: Counter[tuple[int, int]] = Counter()
    for event in events:
        if event.kind == "attempt" and group_of_step.get(event.step) == event.group:
            seen.update((event.epoch, index) for index in event.indices)
    expected = {(epoch, index) for epoch in range(epochs) for index in range(images)}
    repeated = sum(count - 1 for count in seen.values()) + sum(1 for sample in seen if sample not in expected)
    return SampleLedger(
        steps=len(group_of_step),
        trained=sum(seen.values()),
        lost=sum(1 for sample in expected if sample not in seen),
        repeated=repeated + steps_trained_twice(events),
    )


def groups_formed(events: Iterable[Event]) -> list[int]:
    """The groups that committed at least one step, in order."""
    return list(dict.fromkeys(event.group for event in events if event.kind == "commit"))


def recovery_s(events: Iterable[Event], killed_pid: int, killed_at_s: float) -> float | None:
    """Seconds from a kill to the next step committed by a group without the victim; None if there was none."""
    ordered = sorted(events, key=lambda event: event.time_s)
    groups_of_victim = {event.group for event in ordered if event.pid == killed_pid}
    for event in ordered:
        if event.kind == "commit" and event.time_s > killed_at_s and event.group not in groups_of_victim:
            return event.time_s - killed_at_s
    return None
