"""What users of 0.1 may rely on in CoordinatorP2P and its rendezvous, with a real etcd and a private agent."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchelastic
from torchelastic.p2p import CoordinatorP2P
from torchelastic.p2p.last_group import LastGroup
from torchelastic.rendezvous import (
    EtcdServer,
    RendezvousClosedException,
    RendezvousHandler,
    RendezvousNonRetryableError,
    RendezvousTimeoutException,
)


class Counter(torchelastic.State):
    """Notes in which group each hook was called."""

    def __init__(self) -> None:
        self.count = 0
        self.ranks: list[tuple[str, int]] = []

    def sync(self, world_size: int, rank: int) -> None:
        assert (dist.get_world_size(), dist.get_rank()) == (world_size, rank)
        self.ranks.append(("sync", rank))

    def snapshot(self) -> int:
        return self.count

    def apply(self, snapshot: int) -> None:
        self.ranks.append(("apply", dist.get_rank()))
        self.count = snapshot


def count_to(limit: int, fail_at: int | None = None) -> Any:
    pending = [fail_at]

    def step(state: Counter) -> torchelastic.SimpleWorkerStats:
        if state.count == limit:
            raise StopIteration
        state.count += 1
        if state.count == pending[0]:
            pending[0] = None
            raise RuntimeError("once")
        return torchelastic.SimpleWorkerStats(2.0)

    return step


def url(etcd: EtcdServer, run_id: str, query: str = "min_workers=1&max_workers=1") -> str:
    return f"etcd://{etcd.endpoint}/{run_id}?{query}"


def test_a_worker_of_0_1_trains_alone_fails_once_and_ends(etcd: EtcdServer, run_id: str) -> None:
    coordinator = CoordinatorP2P("gloo", url(etcd, run_id), 1, 60000)
    assert (coordinator.rank, coordinator.world_size, coordinator.stop_training) == (-1, 0, False)
    assert coordinator.process_group_timeout == 60000
    state = torchelastic.train(coordinator, count_to(5, fail_at=3), Counter())
    assert isinstance(state, Counter)
    assert state.count == 5
    assert state.ranks == [("sync", 0), ("apply", 0), ("sync", 0)]
    assert coordinator.stop_training
    assert isinstance(dist.group.WORLD, LastGroup), "nothing else of the groups is left"
    dist.destroy_process_group()
    assert pickle.loads(pickle.dumps(state)).count == 5


def test_progress_is_compared_every_so_many_steps_and_not_before(
    etcd: EtcdServer, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CoordinatorP2P, "MONITOR_PROGRESS_FREQ", 4)
    coordinator = CoordinatorP2P("gloo", url(etcd, run_id), 1)
    known: list[bool] = []

    def step(state: Counter) -> torchelastic.SimpleWorkerStats:
        known.append(hasattr(coordinator, "last_relative_prog_rate"))
        stats: torchelastic.SimpleWorkerStats = count_to(6)(state)
        return stats

    torchelastic.train(coordinator, step, Counter())
    assert known[:5] == [False, False, False, False, True]
    assert coordinator.last_relative_prog_rate == 1.0
    assert coordinator.is_worker_straggler is False


def test_methods_are_called_on_the_class_with_the_state_that_train_returns(
    etcd: EtcdServer, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(CoordinatorP2P, "monitor_progress", lambda self, state, stats: seen.append(state))
    monkeypatch.setattr(CoordinatorP2P, "should_rendezvous", lambda self, state: seen.append(state))
    state = torchelastic.train(CoordinatorP2P("gloo", url(etcd, run_id), 1), count_to(2), Counter())
    assert len(seen) == 4
    assert all(value is state for value in seen)


def test_a_user_exception_keeps_its_type(etcd: EtcdServer, run_id: str) -> None:
    def step(state: Counter) -> None:
        raise KeyError("mine")

    coordinator = CoordinatorP2P("gloo", url(etcd, run_id), 1)
    with pytest.raises(KeyError, match="mine"):
        torchelastic.train(coordinator, step, Counter())
    coordinator._groups.destroy()  # the process would have ended
    coordinator.rendezvous.close()


def test_a_closed_run_is_closed_for_the_handler_and_for_who_comes_later(etcd: EtcdServer, run_id: str) -> None:
    handler: Any = torch.distributed.rendezvous(url(etcd, run_id))  # type: ignore[attr-defined]  # torch exports it without saying so
    assert isinstance(handler, RendezvousHandler)
    store, rank, world_size = handler.next_rendezvous()
    assert (rank, world_size, handler.num_nodes_waiting(), handler.is_closed()) == (0, 1, 0, False)
    store.set("key", "value")
    assert store.get("key") == b"value"
    handler.set_closed()
    handler.wait_closed()
    handler.set_closed()
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedException):
        handler.next_rendezvous()
    handler.close()
    late: Any = torch.distributed.rendezvous(url(etcd, run_id))  # type: ignore[attr-defined]  # as above
    with pytest.raises(RendezvousNonRetryableError, match="already closed"):
        late.next_rendezvous()


def test_too_few_workers_are_a_timeout_that_says_what_to_do(etcd: EtcdServer, run_id: str) -> None:
    coordinator = CoordinatorP2P("gloo", url(etcd, run_id, "min_workers=2&timeout=1"), 2)
    with pytest.raises(torchelastic.NonRetryableException, match="min_workers=2") as caught:
        torchelastic.train(coordinator, count_to(1), Counter())
    assert isinstance(caught.value.__cause__, RendezvousTimeoutException)


class AloneHandler(RendezvousHandler):
    """A rendezvous of somebody's own, with the four methods of 0.1 and nothing else."""

    def __init__(self) -> None:
        self.rounds = 0
        self.closed = False

    def next_rendezvous(self) -> tuple[Any, int, int]:
        if self.closed:
            raise RendezvousClosedException
        self.rounds += 1
        store = dist.PrefixStore(f"{self.rounds}", dist.HashStore())  # type: ignore[attr-defined]  # torch exports them without saying so
        store.set_timeout(timedelta(seconds=5))
        return store, 0, 1

    def is_closed(self) -> bool:
        return self.closed

    def set_closed(self) -> None:
        self.closed = True

    def num_nodes_waiting(self) -> int:
        return 0


def test_a_rendezvous_of_ones_own_is_enough() -> None:
    handler = AloneHandler()
    dist.register_rendezvous_handler("alone", lambda url, **_: handler)  # type: ignore[attr-defined, no-untyped-call]  # as above
    coordinator = CoordinatorP2P("gloo", "alone://here", 1)
    state = torchelastic.train(coordinator, count_to(4, fail_at=2), Counter())
    assert isinstance(state, Counter)
    assert (state.count, handler.rounds, handler.closed) == (4, 2, True)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"c10d_backend": "carrier-pigeon"}, "carrier-pigeon"),
        ({"init_method": "etcd://h/1?min_workers=2&max_workers=1"}, "raise max or lower min"),
        ({"init_method": "etcd://h/1?min_workers=1&colour=red"}, "colour"),
        ({"max_num_trainers": 0}, "max_num_trainers=0"),
    ],
)
def test_a_coordinator_that_cannot_work_says_so_at_once(
    arguments: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_INIT_METHOD", raising=False)
    options: dict[str, Any] = {"c10d_backend": "gloo", "init_method": "etcd://h/1?min_workers=1", **arguments}
    with pytest.raises(ValueError, match=match):
        CoordinatorP2P(**options)
