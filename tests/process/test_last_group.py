"""What `torch.distributed` does after `train()`: in the group of those that have finished, and in none."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from tests.process.forked_ranks import run_ranks, values
from torchelastic.p2p import last_group
from torchelastic.p2p.groups import ProcessGroups
from torchelastic.p2p.last_group import Rollcall
from torchelastic.torch_internals.c10d_types import TCPStore

T = TypeVar("T")


def round_store(folder: str) -> TCPStore:
    """A store as that of a round: rank 0 serves it, and each has a connection of its own."""
    rank, file = int(os.environ["RANK"]), Path(folder, "port")
    if rank == 0:
        served = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        _served.append(served)
        file.with_suffix(".new").write_text(str(served.port))
        file.with_suffix(".new").rename(file)
    dist.barrier()
    dist.destroy_process_group()
    return TCPStore("127.0.0.1", int(file.read_text()), None, False, timedelta(seconds=20), wait_for_workers=False)


_served: list[TCPStore] = []


def formed(folder: str) -> tuple[int, int]:
    """Form the last group of all ranks; own rank and size, as the environment has them."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    groups = ProcessGroups("gloo", timedelta(seconds=20))
    last_group.form(groups, round_store(folder), rank, size, timedelta(seconds=20))
    return rank, size


def does_what_scripts_do_at_their_end(folder: str) -> list[Any]:
    formed(folder)
    total = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, f"rank {dist.get_rank()}")
    dist.barrier(dist.new_group([0, 1]))
    dist.barrier()
    seen = [dist.get_rank(), dist.get_world_size(), total.item(), gathered, dist.get_backend()]
    dist.destroy_process_group()
    return [*seen, dist.is_initialized()]


def test_collectives_barriers_ranks_and_groups_of_ones_own_are_those_of_the_run(tmp_path: Path) -> None:
    every = ["rank 0", "rank 1", "rank 2"]
    ended = values(run_ranks(does_what_scripts_do_at_their_end, str(tmp_path), ranks=3))
    assert ended == [[rank, 3, 6.0, every, "gloo", False] for rank in range(3)]


def goes_on_without_one(folder: str, lost: int) -> list[str]:
    last_group.SILENT_AFTER_S = 2.0
    rank, _ = formed(folder)
    if rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    Path(folder, f"came-{rank}").touch()
    dist.barrier()  # the others have come to the first one, at least
    came = sorted(path.name for path in Path(folder).glob("came-*"))
    with pytest.raises(RuntimeError, match=r"after train\(\).*put what all ranks compute together into the step"):
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    return came


def test_when_one_is_killed_barriers_go_on_without_it_and_collectives_raise(tmp_path: Path) -> None:
    first, second, killed = run_ranks(goes_on_without_one, str(tmp_path), 2, ranks=3, others_go_on=True)
    assert killed.was_killed
    assert values([first, second]) == [["came-0", "came-1"]] * 2


def test_when_rank_0_is_killed_nobody_hangs(tmp_path: Path) -> None:
    killed, *others = run_ranks(goes_on_without_one, str(tmp_path), 0, ranks=3, others_go_on=True)
    assert killed.was_killed
    assert all("came-" in " ".join(came) for came in values(others))


def comes_or_not(folder: str) -> list[Any]:
    last_group.FORMING_S = 2.0
    rank = int(os.environ["RANK"])
    store = round_store(folder)
    if rank == 1:
        return []
    last_group.form(ProcessGroups("gloo", timedelta(seconds=20)), store, rank, 3, timedelta(seconds=20))
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.barrier()
    return [dist.get_rank(), dist.get_world_size(), total.item()]


def test_who_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    assert values(run_ranks(comes_or_not, str(tmp_path), ranks=3)) == [[0, 2, 2.0], [], [1, 2, 2.0]]


def is_in_no_group(rank: int) -> list[Any]:
    groups = ProcessGroups("gloo", timedelta(seconds=20))
    last_group.be_absent(groups, rank, 4, "this worker has left the run")
    seen = [dist.is_initialized(), dist.get_rank(), dist.get_world_size()]
    with pytest.raises(RuntimeError, match=r"after train\(\): this worker has left the run; put what all"):
        dist.all_reduce(torch.ones(1))
    if rank < 0:
        dist.barrier()
    else:
        with pytest.raises(RuntimeError, match=r"no process group after train\(\)"):
            dist.barrier()
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize(("rank", "size"), [(-1, -1), (2, 4)])
def test_who_is_in_none_is_not_taken_for_rank_0(rank: int, size: int) -> None:
    assert values(run_ranks(is_in_no_group, rank)) == [[True, rank, size]]


def makes_a_group_of_its_own(folder: str) -> list[Any]:
    formed(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/own", rank=int(os.environ["RANK"]), world_size=2)
    kind = type(dist.group.WORLD)
    dist.barrier()
    return [kind is last_group.LastGroup, dist.get_world_size()]


def test_a_script_that_makes_a_group_of_its_own_may(tmp_path: Path) -> None:
    assert values(run_ranks(makes_a_group_of_its_own, str(tmp_path), ranks=2)) == [[False, 2]] * 2


# --- where those wait that are left ----------------------------------------------------------------------------------


class Keys:
    """A store in a dict, as a connection that may break."""

    def __init__(self, **keys: str) -> None:
        self.keys = {name.replace("_", "/"): value for name, value in keys.items()}
        self.is_broken = False

    def ask(self, what: Callable[[Any], T]) -> T:
        if self.is_broken:
            raise RuntimeError("the connection is gone")
        return what(self)

    def set(self, key: str, value: str) -> None:
        self.keys[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.keys for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.keys[key].encode() for key in keys]


def rollcall(keys: Any, silent_s: dict[int, float], timeout_s: float = 60.0) -> Rollcall:
    return Rollcall(keys, [0, 1, 2], 0, lambda: silent_s, timeout_s)


def test_a_later_barrier_counts_as_this_one_and_who_was_there_may_end() -> None:
    keys = Keys(last_barrier_1="7", last_barrier_2="3")
    assert rollcall(keys, {1: 99.0, 2: 0.0}).wait(3) == []


def test_only_who_is_silent_is_passed_over() -> None:
    keys = Keys(last_barrier_1="3", last_barrier_2="2")
    assert rollcall(keys, {2: last_group.SILENT_AFTER_S}).wait(3) == [2]
    with pytest.raises(RuntimeError, match=r"rank 2 did not come to a barrier after train\(\)"):
        rollcall(keys, {2: 1.0}, timeout_s=0.0).wait(3)


def test_without_the_store_rank_0_has_ended() -> None:
    keys = Keys()
    keys.is_broken = True
    assert rollcall(keys, {}).wait(1) == [0]
