"""How often the optimizers of a train step step, and how often one can expect them to."""

from __future__ import annotations

from dataclasses import dataclass

#: Of an optimizer that has stepped more often than in the steps before: it may always have more to do than one knows.
UNKNOWN_STEPS = 2**31


@dataclass(frozen=True)
class StepCounts:
    """Steps of each optimizer: in this train step, and as one can expect them. Pure.

    Attributes:
        begun: in this train step.
        done: in this train step.
        usual: the most in any committed train step; one at first; `UNKNOWN_STEPS` where one cannot tell.
    """

    begun: tuple[int, ...]
    done: tuple[int, ...]
    usual: tuple[int, ...]

    @property
    def are_complete(self) -> bool:
        """Whether everything has stepped as often as it ever does in a train step."""
        return self.begun == self.done == self.usual

    def more_to_come(self, number: int) -> bool:
        """Whether other steps follow when this optimizer begins its next one."""
        following = [count + (1 if other == number else 0) for other, count in enumerate(self.begun)]
        return any(count < usual for count, usual in zip(following, self.usual, strict=True))


def expected_steps(usual: int, done: int) -> int:
    """How often an optimizer is expected to step in a train step, after one in which it has stepped `done` times.

    >>> expected_steps(0, 3), expected_steps(3, 2)  # the first that it takes part in, and one that stops early
    (3, 3)
    >>> expected_steps(3, 5) == expected_steps(UNKNOWN_STEPS, 1) == UNKNOWN_STEPS
    True
    """
    return UNKNOWN_STEPS if 0 < usual < done else max(usual, done)
