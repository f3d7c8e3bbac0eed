"""The usage document of torchelastic 0.1: its snippets run as they are."""

from __future__ import annotations

from typing import Any

import torchelastic
from torchelastic.distributed import broadcast_long
from torchelastic.rendezvous.server import EtcdServer

ROLLBACK = """
snapshot = state.snapshot()
try:
    train_step(state)
except RuntimeError:
    state.apply(snapshot)
    state.sync()
"""

MAIN = """
import torchelastic
from torchelastic.p2p import CoordinatorP2P

if __name__ == "__main__":
        min_workers = 1
        max_workers = 1
        run_id = 1234
        etcd_endpoint = "localhost:2379"

        state = MyState()

        coordinator = CoordinatorP2P(
            c10d_backend="gloo",
            init_method=f"etcd://{etcd_endpoint}/{run_id}?min_workers={min_workers}&max_workers={max_workers}",
            max_num_trainers=max_workers,
            process_group_timeout=60000,
        )

        torchelastic.train(coordinator, train_step, state)
"""


class MyState(torchelastic.State):
    """What the document asks for: both pairs of methods, and `sync` from rank 0."""

    def __init__(self) -> None:
        self.count = 0
        self.syncs = 0

    def sync(self) -> None:
        self.count = broadcast_long(self.count, 0)
        self.syncs += 1

    def snapshot(self) -> int:
        return self.count

    def apply(self, snapshot: int) -> None:
        self.count = snapshot


class Steps:
    """A train step that fails half-way through its third call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, state: MyState) -> None:
        if state.count == 5:
            raise StopIteration
        self.calls += 1
        state.count += 1
        if self.calls == 3:
            raise RuntimeError("a peer was lost")


def test_the_rollback_of_the_document_runs_as_it_is() -> None:
    state, train_step = MyState(), Steps()
    for _ in range(6):
        exec(ROLLBACK, {"state": state, "train_step": train_step})
    assert (state.count, state.syncs, train_step.calls) == (5, 1, 6)


def test_the_main_of_the_document_runs_as_it_is_and_rolls_back(etcd: EtcdServer, run_id: str) -> None:
    train_step = Steps()
    names: dict[str, Any] = {"__name__": "__main__", "MyState": MyState, "train_step": train_step}
    # etcd's address and the run's id are the reader's own
    exec(MAIN.replace("localhost:2379", etcd.endpoint).replace("1234", f'"{run_id}"'), names)
    assert (names["state"].count, train_step.calls) == (5, 6)
    assert names["state"].syncs == 2  # the first group, and the one after the failure
    assert names["coordinator"].stop_training
