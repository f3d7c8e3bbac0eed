"""Optimizers that keep plain tensors of their own shard: they stay with it, whatever shape they have by chance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.contracts.coded_momentum import Coded
from tests.older_torch import needs_fsdp2_on_cpus
from tests.process.local_ranks import Crew, succeeded
from tests.process.tiered_work import close, join, make_tiers
from torchelastic.checkpoint import TieredCheckpointManager
from torchelastic.errors import NonRetryableException
from torchelastic.group.peers import Peers
from torchelastic.sharded import ShardedState

pytestmark = needs_fsdp2_on_cpus
CREW_SIZE = 2


class Scaled(torch.optim.SGD):
    """Scales each shard by the largest gradient that it has seen, and counts."""

    def __init__(self, parameters: Any, *, has_shape_of_parameter: bool) -> None:
        super().__init__(parameters, lr=0.1)
        self._has_shape = has_shape_of_parameter

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state, local = self.state[parameter], parameter.grad.to_local()
            if not state:
                state["largest"] = torch.zeros(parameter.shape if self._has_shape else ())
                state["count"] = torch.zeros(())
            state["count"] += 1
            state["largest"].clamp_(min=float(local.abs().max()) if local.numel() else 0.0)
            parameter.to_local().sub_(0.1 * local / (1 + state["largest"].flatten()[0]))


def new_state(has_shape_of_parameter: bool) -> ShardedState:
    def build(mesh: DeviceMesh) -> tuple[Any, ...]:
        model = torch.nn.Linear(6, 4)
        fully_shard(model, mesh=mesh)
        return model, Scaled(model.parameters(), has_shape_of_parameter=has_shape_of_parameter)

    return ShardedState(build, replicas=1)


def train(state: ShardedState, steps: int) -> None:
    for _ in range(steps):
        state.snapshot()
        state.model(torch.ones(2, 6)).square().matmul(torch.arange(1.0, 5.0)).sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.commit()
        state._copies.wait_until_received()


def held(state: ShardedState) -> list[float]:
    """Of this rank: its part of the weights, and its plain tensors."""
    found = []
    for parameter in state.optimizer.param_groups[0]["params"]:
        kept = state.optimizer.state[parameter]
        found += [*parameter.to_local().flatten().tolist(), float(kept["count"]), *kept["largest"].flatten().tolist()]
        assert not isinstance(kept["largest"], DTensor)
    return found


def manager_of(folder: str, peers: Peers) -> TieredCheckpointManager:
    manager = TieredCheckpointManager(make_tiers("disk", folder), run_id="test", patience_s=20.0)
    manager.enter_group(peers)
    return manager


def restarted(has_shape: bool, steps: int, folder: str) -> tuple[list[float], list[float], list[float]]:
    """What this rank has at the save, after the restart, and one step later."""
    peers = join()
    manager = manager_of(folder, peers)
    state = new_state(has_shape)
    state.sync()
    train(state, steps)
    manager.save_step(state, steps, peers)
    assert manager.wait(20)
    assert not manager.failures
    before = held(state)
    again = new_state(has_shape)
    assert manager.restore(again, peers) == steps
    again.sync()
    close(manager)
    after = held(again)
    train(again, 1)
    return before, after, held(again)


@pytest.mark.parametrize("steps", [1, 4])  # before the ranks have compared anything, and after that
@pytest.mark.parametrize("has_shape", [False, True])
def test_a_restart_gives_each_rank_its_own(crew: Crew, has_shape: bool, steps: int, tmp_path: Path) -> None:
    first, second = succeeded(crew.run(restarted, has_shape, steps, str(tmp_path), ranks=2))
    for before, after, later in (first, second):
        assert before == after
        assert later != before
    assert first[0] != second[0], "the scales are equal: the test shows nothing"


def restored_alone(folder: str) -> str:
    peers = join()
    manager = manager_of(folder, peers)
    state = new_state(False)
    manager.restore(state, peers)
    try:
        state.sync()
    except NonRetryableException as error:
        return str(error)
    finally:
        manager.close()
    return ""


def test_at_another_world_size_they_are_refused_by_name(crew: Crew, tmp_path: Path) -> None:
    succeeded(crew.run(restarted, False, 4, str(tmp_path), ranks=2))
    (told,) = succeeded(crew.run(restored_alone, str(tmp_path), ranks=1))
    assert "plain tensors that differ from rank to rank (0/bias/largest, 0/weight/largest)" in told
    assert "Start as many workers as before" in told


def lost_and_back(has_shape: bool) -> tuple[list[float], list[float]]:
    """Rank 1 is lost, and one that knows nothing takes its place."""
    state = new_state(has_shape)
    state.sync()
    train(state, 3)
    before = held(state)
    if dist.get_rank() == 1:
        state = new_state(has_shape)
    state.sync()
    return before, held(state)


@pytest.mark.parametrize("has_shape", [False, True])
def test_who_takes_a_lost_ranks_place_gets_what_was_its_own(crew: Crew, has_shape: bool) -> None:
    for before, after in succeeded(crew.run(lost_and_back, has_shape, ranks=2)):
        assert before == after


def trained_with_coded_momentum() -> str:
    def build(mesh: DeviceMesh) -> tuple[Any, ...]:
        model = torch.nn.Linear(6, 4)
        fully_shard(model, mesh=mesh)
        return model, LocalCodes(model.parameters(), lr=0.1)

    state = ShardedState(build)
    state.sync()
    try:
        train(state, 2)
    except NonRetryableException as error:
        return f"step {state.step}: {error}"
    return ""


class LocalCodes(torch.optim.SGD):
    """Keeps its shard's momentum in 8 bits."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            codes = parameter.grad.to_local().to(torch.int8)
            self.state[parameter]["momentum"] = Coded(codes, torch.ones(()), has_sign=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_state_that_is_made_of_other_tensors_is_refused_after_the_first_steps(crew: Crew, ranks: int) -> None:
    for told in succeeded(crew.run(trained_with_coded_momentum, ranks=ranks)):
        assert "the optimizer's state holds a Coded (0/weight/momentum), a tensor that is made of others" in told
        assert told.startswith("step 1: ")
