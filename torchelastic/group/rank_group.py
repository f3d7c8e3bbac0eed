"""All ranks tell each other what they are about to do, so that those who are not in step are named and nobody hangs.

Everything travels as JSON in tensors of bytes, in a gloo group of its own: never a pickle, and never mixed up with the
collectives of training. (Keys of the store of the program are faster where that is a server, but slower where it is a
file, and say nothing of a rank that has died before the time limit.)
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, OutOfStepError
from torchelastic.group.messages import all_gather_texts
from torchelastic.group.notes import Mailbox
from torchelastic.group.peers import Peers
from torchelastic.group.store_mailbox import StoreMailbox
from torchelastic.group.watched_group import RanksMissingError, WatchedGroup, describe_lost
from torchelastic.processes.background import done_here, in_background
from torchelastic.text import describe_calls, listed
from torchelastic.torch_internals.c10d_types import PrefixStore
from torchelastic.torch_internals.process_groups import default_store

#: Of how many failing ranks an error tells the reason.
_EXPLAINED_RANKS = 4
_MAX_TEXT = 2000
#: What `ProgramPeers` are called at.
_POINT = "the same point of saving or loading a checkpoint"

Answer = TypeVar("Answer")
Got = TypeVar("Got")


class RankGroup:
    """The ranks that save and load together. Any thread may call, in the same order on all ranks.

    Without a process group, and in one of one rank, nobody is asked. Nothing is sent before the first call.

    Args:
        process_group: whose ranks; None: the default group, as it is at each call (it may be formed anew between).
        timeout_s: for how long a rank is waited for.

    Attributes:
        timeout_s: as given.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._given = process_group
        self._lock = threading.Lock()
        self._source: dist.ProcessGroup | None = None
        self._group: WatchedGroup | None = None
        self._calls = 0
        self._broken = ""

    @property
    def source(self) -> dist.ProcessGroup | None:
        """The group of the program whose ranks these are; None if this process is alone."""
        if not dist.is_available() or not dist.is_initialized():
            return None
        return self._given if self._given is not None else dist.group.WORLD

    @property
    def rank(self) -> int:
        """The own rank; 0 without a process group."""
        return dist.get_rank(self.source) if self.source is not None else 0

    @property
    def world_size(self) -> int:
        """How many ranks there are; 1 without a process group."""
        return dist.get_world_size(self.source) if self.source is not None else 1

    def all_gather(self, call: str, value: Any) -> list[Any]:
        """Tells all ranks what this one is about to do, and returns what each of them says, by rank. Collective.

        Args:
            call: the method and its arguments, for people; equal on all ranks.
            value: JSON can hold it.

        Raises:
            OutOfStepError: a rank calls something else, or did not come within the time limit (names it); or the group
                is broken, for example because a rank has died (names it if the store still answers).
        """
        if self.world_size == 1:
            return [json.loads(json.dumps(value))]
        with self._lock:
            return self._all_gather(call, value)

    def run_on_all(self, call: str, work: Callable[[], Answer], *, is_long: bool = False) -> list[Answer]:
        """Does this rank's part of something, and returns what each rank's part returned. Collective.

        Args:
            call: see `all_gather`.
            work: JSON can hold what it returns.
            is_long: it may take longer than `timeout_s`: it is called on another thread, while this one keeps answering
                the others, so that only a rank that does not answer is missed.

        Raises:
            CorruptCheckpointError: what is stored is damaged, as at least one rank has found, and none has failed
                otherwise.
            CheckpointError: another rank failed; names it. The own failure is raised as it is, if it is no damage.
            OutOfStepError: see `all_gather`.
        """
        running = in_background(work, "rank-group-work") if is_long else done_here(work)
        while True:
            is_done = bool(wait([running], self.timeout_s / 4).done)
            answers = self.all_gather(call, _answer(running) if is_done else {"busy": True})
            if not any("busy" in each for each in answers):
                break
        try:
            return _values(call, answers, running)
        finally:
            del running  # see `_raise_failure`

    def own_on_all(self, call: str, work: Callable[[], Got]) -> Got:
        """The same for a result that the others do not need: returns what the own part returned, whatever that is."""
        own: list[Got] = []
        self.run_on_all(call, lambda: own.append(work()))
        return own[0]

    def close(self) -> None:
        """Lets the gloo group go. Not a collective."""
        if self._group is not None and self._source is self.source:
            dist.destroy_process_group(self._group.group)
        self._group = self._source = None

    def _all_gather(self, call: str, value: Any) -> list[Any]:
        group = self._formed(call)
        body = json.dumps([call, value], separators=(",", ":")).encode()
        try:
            told = all_gather_texts(group.group, body, self._waits(group))
        except RanksMissingError as error:
            self._raise_missing(error, call)
        except RuntimeError as error:
            self._raise_lost(group.lost(), call, error)
        answers = [json.loads(each) for each in told]
        calls = [str(theirs) for theirs, _ in answers]
        if len(set(calls)) > 1:
            raise OutOfStepError(
                f"the ranks are out of step: {describe_calls(calls)}. All ranks have to call the same methods of the "
                "manager in the same order, with the same iteration; nothing was done"
            )
        return [answer for _, answer in answers]

    def _formed(self, call: str) -> WatchedGroup:
        """The gloo group; made by the first call."""
        source = self.source
        if source is None:
            raise CheckpointError("there is no process group any more: form one anew, or end its managers before it")
        if self._source is not source:
            self._group, self._source, self._broken, self._calls = None, source, "", 0
        if self._broken:
            raise OutOfStepError(f"the ranks have lost step before: {self._broken}. Form the process group anew")
        if self._group is None:
            try:
                self._group, _ = WatchedGroup.formed(source, self.timeout_s, is_part=self._given is not None)
            except RanksMissingError as error:
                self._raise_missing(error, call)
            except RuntimeError as error:
                self._raise_lost([], call, error)
        return self._group

    def _waits(self, group: WatchedGroup) -> Callable[[dist.Work | None], None]:
        def wait(work: dist.Work | None) -> None:
            self._calls += 1
            group.wait(work, f"call-{self._calls}")

        return wait

    def _raise_missing(self, error: RanksMissingError, call: str) -> NoReturn:
        self._broken = f"{error} to {call} within {self.timeout_s:g} s"
        raise OutOfStepError(
            f"{self._broken}: all ranks have to call the same methods of the manager, or its process has ended or hangs"
        )

    def _raise_lost(self, lost: Sequence[int], call: str, error: RuntimeError) -> NoReturn:
        self._broken = f"a rank was lost: {describe_lost(lost)} ({error})"
        raise OutOfStepError(f"the ranks could not agree on {call}, because {self._broken}") from error


def run_with_peers(peers: Peers, call: str, work: Callable[[], Answer]) -> list[Answer]:
    """`RankGroup.run_on_all` for the ranks of a train loop; who works for long is waited for.

    Raises:
        CheckpointError: see there.
        RuntimeError: a peer is lost.
    """
    ended = done_here(work)
    peers.barrier()
    return _values(call, peers.all_gather(_answer(ended)), ended)


class ProgramPeers:
    """A `RankGroup` as the `Peers` of a train loop: for scripts that have a training loop of their own. Collective.

    Args:
        ranks: of more than one rank.
        address: at which the other hosts reach this one.

    Raises:
        OutOfStepError: a rank does not come; as each method does.
    """

    round_number = 0

    def __init__(self, ranks: RankGroup, address: str) -> None:
        self.rank, self.world_size, self.address = ranks.rank, ranks.world_size, address
        self._ranks = ranks
        # of this object alone: the store may have keys of one before it
        self._name = str(ranks.all_gather(_POINT, secrets.token_hex(8))[0])

    def all_gather(self, value: Any) -> list[Any]:
        """See `Peers`."""
        return self._ranks.all_gather(_POINT, value)

    def rank_0_says(self, value: int) -> int:
        """See `Peers`."""
        return int(self.all_gather(int(value))[0])

    def barrier(self) -> None:
        """See `Peers`."""
        self.all_gather(None)

    def wait_for_rank_0(self, purpose: str, bound_s: float | None) -> None:  # noqa: ARG002 - the group has a bound
        """See `Peers`."""
        self.barrier()

    def mailbox(self) -> Mailbox:
        """See `Peers`: keys of the store of the program."""
        return StoreMailbox(PrefixStore(f"torchelastic.peers/{self._name}", default_store()))

    def silent_s(self) -> dict[int, float]:
        """See `Peers`."""
        return {}

    def close(self) -> None:
        """See `Peers`."""


def _answer(ended: Future[Any]) -> dict[str, Any]:
    """What the other ranks learn of this one's part."""
    failure = ended.exception()
    if failure is None:
        return {"value": ended.result()}
    is_damage = isinstance(failure, CorruptCheckpointError)
    return {"error": f"{type(failure).__name__}: {failure}"[:_MAX_TEXT], "is_damage": is_damage}


def _values(call: str, answers: Sequence[dict[str, Any]], own: Future[Any]) -> list[Any]:
    """What all ranks' parts returned; raises where one has failed."""
    failed = {rank: each for rank, each in enumerate(answers) if "error" in each}
    if failed:
        try:
            _raise_failure(call, failed, own.exception())
        finally:
            del own
    return [each["value"] for each in answers]


def _raise_failure(call: str, failed: dict[int, dict[str, Any]], failure: BaseException | None) -> NoReturn:
    """At least one rank has failed.

    No frame keeps the own failure, whose traceback has all frames: what is on the stack, a save's memory too, would
    stay until the garbage collector comes by.

    Args:
        call: at what.
        failed: what those ranks told.
        failure: the own one.
    """
    explained = "; ".join(f"rank {rank}: {each['error']}" for rank, each in list(failed.items())[:_EXPLAINED_RANKS])
    try:
        if all(each["is_damage"] for each in failed.values()):
            raise CorruptCheckpointError(explained) from failure
        if failure is not None and not isinstance(failure, CorruptCheckpointError):
            raise failure
        if len(failed) == 1:
            explained = next(iter(failed.values()))["error"]
        raise CheckpointError(f"{call} failed on {listed(list(failed))}: {explained}") from failure
    finally:
        del failure
