"""What users choose of the check, and when it is due. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

ON_WRONG = ("leave", "restore", "stop", "warn")
ON_DOUBT = ("stop", "warn")
#: The second step of a run is checked too: so it is known early whether its steps can be repeated to the last bit.
FIRST_STEP = 1
#: What is sent and digested for a check, beside what is computed for it: so much more than that.
_BESIDES = 1.25


@dataclass(frozen=True)
class ComputeCheck:
    """How often workers are checked, and what follows; for `ModelState(check=)`. See docs/silent-corruption.md.

    With logical shards one shard of a step is computed by two workers, of different hosts where there are several; all
    pairs come by in turn. Without them each worker computes a step twice, from one snapshot: that finds what goes wrong
    now and then, and not what goes wrong each time. In both cases averaged gradients and weights are compared too.

    Args:
        every: the share of the training time that the checks may cost, as "0.5%"; or a check in so many steps.
        on_wrong: where it is known who is wrong. "leave": that worker leaves the run and is not started again on its
            host, and the others go on. "restore": so it is, and the others go back to the newest checkpoint of before
            the last check with it that agreed; needs a `TieredCheckpointManager`. "stop": the run ends with the error.
            "warn": an error in the log.
        on_doubt: where it is only known that one of several is wrong. "stop": the run ends with the error. "warn": an
            error in the log.

    Raises:
        ValueError: one of them is of another kind.
    """

    every: str | int = "0.5%"
    on_wrong: str = "leave"
    on_doubt: str = "stop"

    def __post_init__(self) -> None:
        for name, value, known in (("on_wrong", self.on_wrong, ON_WRONG), ("on_doubt", self.on_doubt, ON_DOUBT)):
            if value not in known:
                raise ValueError(f"ComputeCheck({name}={value!r}) is not one of {', '.join(known)}")
        self.interval_steps(1.0)

    def interval_steps(self, cost_steps: float) -> int:
        """From one check to the next, in steps.

        Args:
            cost_steps: what a check computes, as a part of a step's time.

        >>> ComputeCheck().interval_steps(1.0), ComputeCheck().interval_steps(0.25), ComputeCheck(7).interval_steps(1)
        (250, 63, 7)
        """
        every = self.every
        if isinstance(every, int) and not isinstance(every, bool) and every > 0:
            return every
        share = _share(every)
        if share is None:
            raise ValueError(
                f'ComputeCheck(every={every!r}) is no share of the training time, such as "0.5%", and no number of '
                "steps from 1 up"
            )
        return max(1, math.ceil(_BESIDES * cost_steps / share))


def _share(every: object) -> float | None:
    if not isinstance(every, str) or not every.endswith("%"):
        return None
    try:
        share = float(every[:-1]) / 100
    except ValueError:
        return None
    return share if 0 < share <= 1 else None


def is_due(step: int, interval_steps: int) -> bool:
    """Whether the step after so many committed ones is checked.

    >>> [step for step in range(13) if is_due(step, 4)]
    [1, 3, 7, 11]
    """
    return step == FIRST_STEP or (step + 1) % interval_steps == 0
