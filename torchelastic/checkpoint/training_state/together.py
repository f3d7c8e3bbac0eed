"""What the ranks do together: each its part, and all learn whether one has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.local.roll_call import RollCall, listed

if TYPE_CHECKING:
    import torch.distributed as dist

_TOLD = 4


class Together:
    """The meetings of one `BCPState`; used on the thread that trains.

    Args:
        process_group: see `RollCall`.
        timeout_s: for how long a rank is waited for.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self._roll = RollCall(process_group, timeout_s)

    @property
    def rank(self) -> int:
        """The own rank; 0 without a process group."""
        return self._roll.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are; 1 without a process group."""
        return self._roll.world_size

    def do(self, call: str, work: Callable[[], Any]) -> list[Any]:
        """Does this rank's part, and returns what each rank's part returned (JSON can hold it).

        Raises:
            CorruptCheckpointError: what is stored is damaged, as at least one rank has found, and none has failed
                otherwise.
            CheckpointError: another rank failed; names it. The own failure is raised as it is, if it is no damage.
            OutOfStepError: a rank calls something else, or does not come; names it.
        """
        failure: Exception | None = None
        try:
            answer = {"value": work()}
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must not wait for this rank
            is_damage = isinstance(error, CorruptCheckpointError)
            failure, answer = error, {"error": f"{type(error).__name__}: {error}"[:2000], "is_damage": is_damage}
        answers = self._roll.gather(call, answer)
        failed = {rank: each for rank, each in enumerate(answers) if "error" in each}
        if not failed:
            return [each["value"] for each in answers]
        told = "; ".join(f"rank {rank}: {each['error']}" for rank, each in list(failed.items())[:_TOLD])
        if all(each["is_damage"] for each in failed.values()):
            raise CorruptCheckpointError(told) from failure
        if failure is not None and not isinstance(failure, CorruptCheckpointError):
            raise failure
        raise CheckpointError(f"{call} failed on {listed(list(failed))}: {told}") from failure

    def close(self) -> None:
        """Lets the group go. Not a collective."""
        self._roll.close()
