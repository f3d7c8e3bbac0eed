"""A process group whose waits are bounded, and name who is missing.

gloo and nccl say at best that a connection was lost. So a rank that waits for long reports in the store of the program;
who has not reported when the time is over, or when a connection breaks, is the one that is missing.
"""

from __future__ import annotations

import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from torchelastic.group import under_way
from torchelastic.group.backends import device_names
from torchelastic.text import listed
from torchelastic.torch_internals.process_groups import default_store

_POLL_S = 0.0002
_SLOW_POLL_S = 0.01
_SLOW_AFTER_S = 0.1
#: A rank that waits longer than this reports in the store, and asks it as often whether another rank has noticed a
#: loss: gloo notices only on the ranks next to the lost one.
_REPORT_AFTER_S = 1.0
#: For how long a rank that has noticed a loss waits for reports of the others, to name the one that does not report.
#: Longer than a save tries to reach a lost peer.
_NAMING_S = 10.0
#: Where the ranks that are left report when one is lost; that is at most once for each group.
_LOSS = "loss"
#: In place of a rank: a rank has noticed that another one was lost.
_NOTICED = "noticed"

#: How many gloo groups were made for each group of the program: part of the key under which its ranks find each other.
_formations: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class RanksMissingError(RuntimeError):
    """Ranks did not come to a collective within the time limit.

    Attributes:
        ranks: which, in the group; empty if they cannot be told.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"{listed(ranks) if ranks else 'another rank'} did not come")
        self.ranks = list(ranks)


class WatchedGroup:
    """The waits of one user of a process group. Used by one thread at a time.

    Args:
        group: whose collectives are waited for.
        timeout_s: for how long a rank is waited for.
        user: tells the users of one group apart, in the store.
        clock: monotonic seconds.

    Attributes:
        group: as given.
        rank: the own rank in it.
        world_size: how many ranks it has.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout_s: float,
        user: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.group, self._timeout_s, self._user, self._clock = group, timeout_s, user, clock
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    @classmethod
    def formed(
        cls, source: dist.ProcessGroup, timeout_s: float, *, is_part: bool = False, value: int = 0
    ) -> tuple[WatchedGroup, list[int]]:
        """Makes a gloo group of its own, never mixed up with the collectives of training. Collective.

        Args:
            source: whose ranks belong to it.
            timeout_s: for how long a rank is waited for.
            is_part: whether only the ranks of `source` call this, not all ranks of the program.
            value: for the others.

        Returns:
            The group, and the value of each rank.

        Raises:
            RanksMissingError: a rank did not come within the time limit.
            RuntimeError: the group could not be formed, for example because a rank has died.
        """
        number = _formations[source] = _formations.get(source, 0) + 1
        of_source = cls(source, timeout_s, "forming")
        of_source._wait_for_reports(f"group-{number}")
        group = dist.new_group(
            dist.get_process_group_ranks(source),
            timeout=timedelta(seconds=2 * timeout_s + 1),  # not before `wait` has named who is missing
            backend="gloo",
            use_local_synchronization=is_part,
        )
        formed = cls(group, timeout_s, "own")
        # the store may have keys of a former group of this name
        own = torch.tensor([secrets.randbits(32), value])
        told = [torch.empty_like(own) for _ in range(formed.world_size)]
        formed.wait(dist.all_gather(told, own, group, async_op=True), "formed")
        formed._user = f"own-{int(told[0][0]):x}"
        return formed, [int(each[1]) for each in told]

    @property
    def device(self) -> torch.device:
        """Of tensors that the group can send."""
        kinds = list(device_names(self.group))  # nccl alone sends no CPU tensors
        return torch.device("cpu" if "cpu" in kinds else kinds[0])  # without an index: this process's current device

    def wait(self, work: dist.Work | None, call: str) -> None:
        """Waits for a collective of the group.

        Args:
            work: what it returned.
            call: which one; no other one of this user and group has this name.

        Raises:
            RanksMissingError: it is not over within the time limit.
            RuntimeError: the group is broken: see `lost`.
            ValueError: this process is not in the group.
        """
        if work is None:  # what torch returns to ranks outside the group
            raise ValueError("this rank is not in the process_group: give it a group that it belongs to")
        try:
            self._wait_in_slices(work, call)
        except BaseException:  # Ctrl-C too
            under_way.hold(work)
            raise
        work.wait()  # raises what went wrong

    def _wait_in_slices(self, work: dist.Work, call: str) -> None:
        """Waits until it has ended, well or not; raises as `wait`, of which this is the greater part."""
        start_s, report_s = self._clock(), min(_REPORT_AFTER_S, self._timeout_s / 2)
        while not work.is_completed():
            waited_s = self._clock() - start_s
            if waited_s >= report_s:
                report_s = waited_s + _REPORT_AFTER_S
                self._report(call)
                if self._has_report(_LOSS, _NOTICED):
                    raise RuntimeError("another rank has lost its connection to it")
            if waited_s >= self._timeout_s:
                raise RanksMissingError(self._without_report(call))
            time.sleep(_POLL_S if waited_s < _SLOW_AFTER_S else _SLOW_POLL_S)

    def lost(self) -> list[int]:
        """Who is lost, after a collective has broken: whoever does not report soon; the other ranks learn of it.

        What a rank reported while it waited does not count: it may be the lost one.

        Returns:
            One rank; or several, if it is at least one of them; or none, if it is not known.
        """
        deadline_s = self._clock() + min(_NAMING_S, self._timeout_s)
        try:
            for who in (_NOTICED, self.rank):
                self._report(_LOSS, who)
            while len(missing := self._without_report(_LOSS)) > 1 and self._clock() < deadline_s:
                time.sleep(_SLOW_POLL_S)
        except RuntimeError:
            return []  # the store was lost with it
        return missing

    def _wait_for_reports(self, call: str) -> None:
        """Has all ranks come, before there is a group in which to wait for them."""
        self._report(call)
        deadline_s = self._clock() + self._timeout_s
        while missing := self._without_report(call):
            if self._clock() >= deadline_s:
                raise RanksMissingError(missing)
            time.sleep(_SLOW_POLL_S)

    def _report(self, call: str, who: int | str | None = None) -> None:
        default_store().set(self._key(call, self.rank if who is None else who), "1")

    def _has_report(self, call: str, who: int | str) -> bool:
        return default_store().check([self._key(call, who)])

    def _without_report(self, call: str) -> list[int]:
        return [rank for rank in range(self.world_size) if not self._has_report(call, rank)]

    def _key(self, call: str, who: int | str) -> str:
        return f"torchelastic.group/{self.group.group_name}/{self._user}/{call}/{who}"


def describe_lost(ranks: Sequence[int]) -> str:
    """Says who was lost.

    Args:
        ranks: what `WatchedGroup.lost` has returned.
    """
    if not ranks:
        return "which one is not known"
    return listed(ranks) if len(ranks) == 1 else f"at least one of {listed(ranks)}"
