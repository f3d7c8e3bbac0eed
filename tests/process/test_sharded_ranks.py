"""Two ranks: what they do not go on from is given up first; who was interrupted completes the step of the others."""

from __future__ import annotations

import threading
from typing import Any, cast
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.older_torch import needs_fsdp2_on_cpus
from tests.process.local_ranks import Crew, succeeded
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.copying import PendingCopy
from torchelastic.checkpoint.format.header import Entry
from torchelastic.checkpoint.format.regions import Region
from torchelastic.sharded import HybridShard, ShardedState, handover
from torchelastic.sharded.copies import Copies, Partners
from torchelastic.sharded.offers import Version
from torchelastic.sharded.transfers import move

CREW_SIZE = 2


def build(mesh: DeviceMesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(6, 4)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(state: ShardedState) -> Any:
    snapshot = state.snapshot()
    state.model(torch.ones(2, 6)).sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    return snapshot


def weights_of(state: ShardedState) -> list[float]:
    whole = [parameter.full_tensor() for parameter in state.model.parameters() if isinstance(parameter, DTensor)]
    return torch.cat([tensor.detach().reshape(-1) for tensor in whole]).tolist()


def local_sizes(model: torch.nn.Module) -> list[int]:
    return [parameter._local_tensor.numel() for parameter in model.parameters() if isinstance(parameter, DTensor)]


def gone_back(fails_once: bool) -> tuple[int, list[float], list[float], list[list[int]]]:
    """Rank 0 loses its live state in the fourth step: both go back to copies.

    Returns:
        The step gone back to, the weights of then and of now, and what each move of parts found of the live state.
    """
    state = ShardedState(build, replicas=1)
    state.sync()
    history = []
    for _ in range(3):
        step(state)
        state.commit()
        history.append(weights_of(state))
        state._copies.wait_until_received()

    def interrupts(*_: Any) -> None:
        raise RuntimeError("out of memory")

    if dist.get_rank() == 0:
        state.optimizer.register_step_pre_hook(interrupts)
    snapshot = state.snapshot()
    try:
        step(state)
    except RuntimeError:
        assert dist.get_rank() == 0
    state.apply(snapshot)
    model, found = state.model, []

    def watched(*arguments: Any, **options: Any) -> int:
        found.append(local_sizes(model))
        if fails_once and len(found) == 1:
            raise RuntimeError("a peer is gone")
        return int(move(*arguments, **options))

    with mock.patch.object(handover, "move", watched):
        if fails_once:
            with pytest.raises(RuntimeError, match="a peer is gone"):
                state.sync()
            state.apply(state.snapshot())
        state.sync()
    return state.step, history[state.step - 1], weights_of(state), found


@pytest.mark.parametrize("fails_once", [False, True])
@needs_fsdp2_on_cpus
def test_a_live_state_that_is_not_gone_on_from_is_given_up_before_the_parts_come(crew: Crew, fails_once: bool) -> None:
    for reached, before, after, found in succeeded(crew.run(gone_back, fails_once, ranks=2)):
        assert reached == 3
        assert after == before, "the weights are not those of the copy"
        assert found == [[0, 0]] * (1 + fails_once), "the live state was held while the parts came"


def handed_over_without_memory() -> int:
    """The copies that are made because a rank leaves fail; returns the step that both can go on from."""
    state = ShardedState(build, replicas=1, every=100)
    state.sync()
    for _ in range(2):
        step(state)
        state.commit()
    with mock.patch("torchelastic.sharded.copies._exchanged", side_effect=CheckpointError("there is no memory")):
        state.hand_over(leaving=dist.get_rank() == 0)
    return state.step


@needs_fsdp2_on_cpus
def test_where_copies_have_no_memory_a_rank_that_leaves_does_not_end_the_others(crew: Crew) -> None:
    assert succeeded(crew.run(handed_over_without_memory, ranks=2)) == [2, 2]


def grown_bytes(changes: int) -> tuple[int, int]:
    """How much this process has grown from the second new group to the last one; and the bytes of its parts."""

    def build_large(mesh: DeviceMesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        with torch.device("meta"):
            model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(12)))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    state, sizes = ShardedState(build_large, replicas=0), []
    for _ in range(changes):
        state.sync()
        sizes.append(psutil.Process().memory_info().rss)
        state.snapshot()
        state.model(torch.ones(1, 1024)).sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.commit()
    return sizes[-1] - sizes[1], sum(tensor.nbytes for tensor in state._live.present.tensors().values())


@needs_fsdp2_on_cpus
@pytest.mark.long
def test_a_process_does_not_grow_with_the_changes_of_its_group(crew: Crew) -> None:
    for grown, parts in succeeded(crew.run(grown_bytes, 10, ranks=2)):
        # glibc would keep half of them at each change; what the tests before this one left may move the figure by one
        assert grown < 2 * parts, f"{grown / parts:.1f} times its parts in 8 changes"


def test_a_group_is_left_when_the_copy_that_counts_as_this_ranks_own_is_complete(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy from a GPU may still be running then: another rank would be given what is not there yet."""
    waited: list[threading.Thread] = []

    class Running(PendingCopy):
        def wait(self) -> None:
            waited.append(threading.current_thread())
            if threading.current_thread() is not threading.main_thread():
                raise RuntimeError("the peers are lost")

    monkeypatch.setattr("torchelastic.checkpoint.format.stage.begin_copy", lambda _places, _sources: Running())
    copies = Copies()
    copies.enter_group(Partners(cast(Any, None), (), ()), None)
    layout = {"w": Entry.of("w", "float32", (4,), Region.whole((4,)), is_shard=False)}
    copies.begin(Version(1, 3, 7), layout, {"w": torch.ones(4)}, b"")
    with pytest.raises(RuntimeError, match="lost"):
        copies.wait_until_received()
    assert [copies.finished, copies.finished] == [0, 0]
    assert [record.message.count("no new copy") for record in caplog.records] == [1], "where the group goes on"
    copies.leave_group()
    assert threading.main_thread() in waited
    assert [held.version for held in copies.held] == [Version(1, 3, 7)]


# --- a rank whose group ended before its optimizer began completes the step of the others, with the same numbers ------


def build_plainly(mesh: DeviceMesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def build_without_bias(mesh: DeviceMesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, _ = build_plainly(mesh)
    return model, torch.optim.SGD([model.get_parameter("weight")], lr=0.5)


def interrupted(
    rank_that_fails: int, sync_fails: bool = False, adds_group: bool = False
) -> tuple[int, list[float], list[float]]:
    """One step, in which this rank is interrupted after the vote or is not; returns step, weights before and after.

    With `sync_fails` the first sync after that fails on both ranks, when the step was completed already.
    """
    built = build_without_bias if adds_group else build_plainly
    state = ShardedState(built, mesh=HybridShard(1), replicas=0)  # each rank has all parts
    state.sync()
    before, snapshot = weights_of(state), state.snapshot()
    state.optimizer.param_groups[0]["lr"] = 0.01  # of this step, set in it
    if adds_group:
        state.optimizer.add_param_group({"params": [state.model.get_parameter("bias")], "lr": 0.02})
    state.model(torch.ones(1, 3)).sum().backward()
    gone = RuntimeError("the others are gone")
    if torch.distributed.get_rank() == rank_that_fails:
        with (
            mock.patch.object(Copies, "all_have_finished", side_effect=gone),
            pytest.raises(RuntimeError, match="gone"),
        ):
            state.optimizer.step()
    else:
        state.optimizer.step()
    state.apply(snapshot)
    if sync_fails:
        snapshot = state.snapshot()  # as the train loop does before it asks for a group
        with mock.patch.object(handover, "move", side_effect=gone), pytest.raises(RuntimeError, match="gone"):
            state.sync()
        state.apply(snapshot)
    state.sync()
    return state.step, before, weights_of(state)


@pytest.mark.parametrize("sync_fails", [False, True])
@pytest.mark.parametrize("rank_that_fails", [0, 1])
@needs_fsdp2_on_cpus
def test_a_step_that_others_complete_counts_with_the_rate_that_was_set_in_it(
    crew: Crew, rank_that_fails: int, sync_fails: bool
) -> None:
    for step, before, after in succeeded(crew.run(interrupted, rank_that_fails, sync_fails, ranks=2)):
        assert step == 1
        assert after == pytest.approx([value - 0.01 for value in before])


@pytest.mark.parametrize("rank_that_fails", [0, 1])
@needs_fsdp2_on_cpus
def test_a_group_that_was_added_in_a_step_that_others_complete_takes_part_in_it(
    crew: Crew, rank_that_fails: int
) -> None:
    for step, before, after in succeeded(crew.run(interrupted, rank_that_fails, False, True, ranks=2)):
        assert step == 1
        rates = [0.01] * 6 + [0.02] * 2
        assert after == pytest.approx([value - rate for value, rate in zip(before, rates, strict=True)])
