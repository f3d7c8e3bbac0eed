"""All ranks tell each other what they are about to do, so that those who are not in step are named and nobody hangs.

Everything travels as JSON in tensors of bytes, in a gloo group of its own: never a pickle, and never mixed up with the
collectives of training.
"""

from __future__ import annotations

import json
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.local.errors import OutOfStepError

#: What every rank sends at once; what does not fit follows in a second round.
FRAME_BYTES = 1024
_INLINE_BYTES = 640
_POLL_S = 0.0002
_SLOW_POLL_S = 0.01
#: A rank that waits longer than this says so in the store, for those who ask who is missing.
_MARK_AFTER_S = 1.0
#: How often it asks the store whether another rank has noticed a loss: gloo notices only on the ranks next to the lost.
_ASK_S = 1.0
#: For how long a rank that has noticed a loss waits for reports of the others, to name the one that does not report.
#: Longer than a save tries to reach a lost peer.
_NAMING_S = 10.0
_NAMED_RANKS = 8
#: In place of a rank in a key: a rank has noticed that another one was lost.
_SEEN = "seen"

#: How many gloo groups were made for each group of the program: part of the key under which its ranks meet.
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def listed(ranks: Sequence[int]) -> str:
    """Ranks for people.

    >>> listed([1]), listed([0, 3])
    ('rank 1', 'ranks 0, 3')
    """
    names = ", ".join(map(str, ranks[:_NAMED_RANKS])) + (", .." if len(ranks) > _NAMED_RANKS else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {names}"


def describe_calls(calls: Sequence[str]) -> str:
    """Says which ranks call what, the fewest first.

    >>> describe_calls(["save(5)", "load()", "save(5)"])
    'rank 1 calls load(); ranks 0, 2 call save(5)'
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks_of.setdefault(call, []).append(rank)
    by_number = sorted(ranks_of.items(), key=lambda item: (len(item[1]), item[0]))
    return "; ".join(f"{listed(ranks)} call{'s' if len(ranks) == 1 else ''} {call}" for call, ranks in by_number)


class RollCall:
    """The meetings of one manager. Used by one thread; nothing happens before the first `gather`.

    Args:
        process_group: whose ranks meet; None: the default group, as it is at each call (it may be formed anew between).
        timeout_s: for how long a rank is waited for.
        clock: monotonic seconds.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        timeout_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._given, self._timeout_s, self._clock, self._sleep = process_group, timeout_s, clock, sleep
        self._source: dist.ProcessGroup | None = None
        self._group: dist.ProcessGroup | None = None
        self._round = 0
        self._broken = self._nonce = self._own_nonce = ""  # the nonce is rank 0's own one

    @property
    def source(self) -> dist.ProcessGroup | None:
        """The group of the program whose ranks meet; None if this process is alone."""
        if not dist.is_available() or not dist.is_initialized():
            return None
        return self._given if self._given is not None else dist.group.WORLD

    @property
    def rank(self) -> int:
        """The own rank; 0 without a process group."""
        return dist.get_rank(self.source) if self.source is not None else 0

    @property
    def world_size(self) -> int:
        """How many ranks meet; 1 without a process group."""
        return dist.get_world_size(self.source) if self.source is not None else 1

    def gather(self, call: str, payload: Any) -> list[Any]:
        """Tells all ranks what this one is about to do, and returns what each of them says, by rank. Collective.

        Args:
            call: the method and its arguments, for people; equal on all ranks.
            payload: JSON can hold it.

        Raises:
            OutOfStepError: a rank calls something else, or did not come within the time limit (names it); or the group
                is broken, for example because a rank has died (names it if the store still answers).
        """
        if self.world_size == 1:
            return [json.loads(json.dumps(payload))]
        group = self._meet(call)
        body = json.dumps(payload, separators=(",", ":")).encode()
        inline = body if len(body) <= _INLINE_BYTES else b""
        frame = json.dumps([call[:200], len(body), self._own_nonce]).encode() + b"\n" + inline
        frames = [data.partition(b"\n") for data in self._all_gather(group, frame, FRAME_BYTES, call)]
        heads = [json.loads(head) for head, _, _ in frames]
        calls = [str(head[0]) for head in heads]
        if len(set(calls)) > 1:
            raise OutOfStepError(
                f"the ranks are out of step: {describe_calls(calls)}. All ranks have to call the same methods of the "
                "manager in the same order, with the same iteration; nothing was done"
            )
        self._nonce = self._nonce or str(heads[0][2])  # the store may have keys of a former group of this name
        sizes = [int(head[1]) for head in heads]
        if max(sizes) <= _INLINE_BYTES:
            return [json.loads(answer) for _, _, answer in frames]
        return [json.loads(data) for data in self._all_gather(group, body, max(sizes), call)]

    def close(self) -> None:
        """Lets the gloo group go. Not a collective."""
        if self._group is not None and self._source is self.source:
            dist.destroy_process_group(self._group)
        self._group = self._source = None

    def _meet(self, call: str) -> dist.ProcessGroup:
        """The gloo group; made when the ranks meet for the first time."""
        source = self.source
        if source is None:
            raise CheckpointError("there is no process group any more: form one anew, or end its managers before it")
        if self._source is not source:
            self._group, self._source, self._broken, self._round = None, source, "", 0
            self._nonce, self._own_nonce = "", secrets.token_hex(4)
        if self._broken:
            raise OutOfStepError(f"the ranks have lost step before: {self._broken}. Form the process group anew")
        if self._group is None:
            _meetings[source] = _meetings.get(source, 0) + 1
            self._wait_for_all(source, f"meeting-{_meetings[source]}", call)
            ranks = dist.get_process_group_ranks(source)
            self._group = dist.new_group(
                ranks,
                timeout=timedelta(seconds=2 * self._timeout_s + 1),  # not before `_wait` has named who is missing
                backend="gloo",
                use_local_synchronization=self._given is not None,
            )
        return self._group

    def _wait_for_all(self, group: dist.ProcessGroup, meeting: str, call: str) -> None:
        """Waits in the store, where a rank that does not come can be named."""
        store, ranks = c10d._get_default_store(), range(dist.get_world_size(group))
        store.set(_key(group, meeting, dist.get_rank(group)), "1")
        deadline_s = self._clock() + self._timeout_s
        while missing := [rank for rank in ranks if not store.check([_key(group, meeting, rank)])]:
            if self._clock() >= deadline_s:
                self._raise_missing(missing, call)
            self._sleep(_SLOW_POLL_S)

    def _all_gather(self, group: dist.ProcessGroup, data: bytes, size_bytes: int, call: str) -> list[bytes]:
        own = torch.zeros(size_bytes + 8, dtype=torch.uint8)
        own[:8] = torch.frombuffer(bytearray(len(data).to_bytes(8, "little")), dtype=torch.uint8)
        own[8 : 8 + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        self._round += 1
        try:
            work = dist.all_gather(gathered, own, group, async_op=True)
            if work is None:
                raise ValueError("this rank is not in the manager's process_group: make it on the members only")
            self._wait(group, work, call)
        except RuntimeError as error:
            self._broken = f"a rank was lost: {self._lost(group)} ({error})"
            raise OutOfStepError(f"the ranks could not agree on {call}, because {self._broken}") from error
        answers = [tensor.numpy().tobytes() for tensor in gathered]
        return [answer[8 : 8 + int.from_bytes(answer[:8], "little")] for answer in answers]

    def _wait(self, group: dist.ProcessGroup, work: dist.Work, call: str) -> None:
        start_s, ask_s = self._clock(), min(_MARK_AFTER_S, self._timeout_s / 2)
        meeting = f"{group.group_name}-round-{self._round}"
        while not work.is_completed():
            waited_s = self._clock() - start_s
            if waited_s >= ask_s:
                ask_s = waited_s + _ASK_S
                store = c10d._get_default_store()
                store.set(_key(group, meeting, dist.get_rank(group)), "1")
                if self._nonce and store.check([_key(group, self._loss, _SEEN)]):
                    raise RuntimeError("another rank has lost its connection to it")
            if waited_s >= self._timeout_s:
                self._raise_missing(_unmarked(group, meeting), call)
            self._sleep(_POLL_S if waited_s < 0.1 else _SLOW_POLL_S)
        work.wait()  # raises what went wrong

    @property
    def _loss(self) -> str:
        """The meeting of those that are left when a rank is lost; there is one at most for each group."""
        return f"loss-{self._nonce}"

    def _lost(self, group: dist.ProcessGroup) -> str:
        """Notifies the other ranks of a loss, and names the lost rank: the one that does not report in `_NAMING_S`.

        What a rank reported while it waited does not count: it may be the lost one.
        """
        deadline_s = self._clock() + min(_NAMING_S, self._timeout_s)
        try:
            store = c10d._get_default_store()
            for who in (_SEEN, dist.get_rank(group)):
                store.set(_key(group, self._loss, who), "1")
            while len(missing := _unmarked(group, self._loss)) > 1 and self._clock() < deadline_s:
                self._sleep(_SLOW_POLL_S)
        except RuntimeError:
            missing = []  # the store was lost with it
        if not missing:
            return "which one is not known"
        return listed(missing) if len(missing) == 1 else f"at least one of {listed(missing)}"

    def _raise_missing(self, missing: Sequence[int], call: str) -> None:
        who = listed(missing) if missing else "another rank"
        self._broken = f"{who} did not come to {call} within {self._timeout_s:g} s"
        raise OutOfStepError(
            f"{self._broken}: all ranks have to call the same methods of the manager, or its process has ended or hangs"
        )


def _unmarked(group: dist.ProcessGroup, meeting: str) -> list[int]:
    """The ranks that the store has nothing of. Raises: RuntimeError if the store is lost."""
    store = c10d._get_default_store()
    return [rank for rank in range(dist.get_world_size(group)) if not store.check([_key(group, meeting, rank)])]


def _key(group: dist.ProcessGroup, meeting: str, who: int | str) -> str:
    return f"torchelastic.checkpoint.local/{group.group_name}/{meeting}/{who}"
