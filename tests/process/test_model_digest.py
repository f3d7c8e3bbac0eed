"""The comparison after a sync: what a digest notices, and what three real processes are told of each other."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pickle
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel

import torchelastic
from tests.process.forked_ranks import run_ranks, values
from torchelastic.model.digest import PIECE_BYTES, ReplicaComparison, digest, leaves_of
from torchelastic.rendezvous.records import StateStatus

WORLD_SIZE = 3


def of(tree: Any, sample_bytes: int | None = None) -> int:
    return digest(list(leaves_of(tree)), sample_bytes)


# --- what a digest notices --------------------------------------------------------------------------------------------


DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (1024, 8), (1031, 13), (300_001,)], ids=str)
def test_a_change_of_any_single_bit_is_noticed(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randint(0, 2, shape, generator=generator).to(dtype)
    before = of({"weight": tensor})
    assert before == of({"weight": tensor.clone()})
    flat = tensor.reshape(-1).view(torch.uint8)
    chooser = random.Random(7)
    for position in {0, len(flat) - 1, *(chooser.randrange(len(flat)) for _ in range(20))}:
        bit = 1 if dtype is torch.bool else 1 << chooser.choice([0, 7])
        flat[position] ^= bit
        assert before != of({"weight": tensor}), f"bit {bit} of byte {position}"
        flat[position] ^= bit


def test_elements_that_change_places_are_noticed() -> None:
    tensor = torch.randn(1 << 16)
    before = of(tensor)
    for one, other in [(0, 1), (5, 5 + 2048), (0, -1), (3, 40_000)]:
        swapped = tensor.clone()
        swapped[[one, other]] = tensor[[other, one]]
        assert of(swapped) != before
    assert of(tensor.flip(0)) != before
    assert of(tensor.view(256, 256).t()) != before


def test_tensors_that_are_slices_or_lie_otherwise_in_memory_count_by_their_content() -> None:
    storage = torch.arange(101, dtype=torch.float32)
    assert of(storage[1:]) == of(storage[1:].clone())
    large = torch.randn(200_001)
    assert of(large[1:]) == of(large[1:].clone())
    matrix = torch.randn(33, 65)
    assert of(matrix.t()) == of(matrix.t().contiguous())
    image = torch.randn(2, 3, 5, 7)
    assert of(image) == of(image.to(memory_format=torch.channels_last))
    values = torch.randn(9, dtype=torch.complex64)
    assert of(values.conj()) == of(values.conj().resolve_conj())


def test_a_sample_reads_pieces_of_the_whole_tensor_and_its_end() -> None:
    tensor = torch.zeros(1 << 20)
    before = of(tensor, 16 * PIECE_BYTES)
    noticed = []
    for position in range(0, tensor.numel(), 4096 + 17):
        tensor[position] = 1
        noticed.append(of(tensor, 16 * PIECE_BYTES) != before)
        tensor[position] = 0
    assert 0 < sum(noticed) < len(noticed) / 4
    tensor[-1] = 1
    assert of(tensor, 16 * PIECE_BYTES) != before
    assert of(tensor + 1e-6, 16 * PIECE_BYTES) != of(tensor, 16 * PIECE_BYTES), "an optimizer changes all"


# --- three processes --------------------------------------------------------------------------------------------------


def make_state(seed: int, **options: Any) -> torchelastic.ModelState:
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.BatchNorm1d(50), torch.nn.Linear(50, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    extra = {"ema": AveragedModel(module), "own": seed}
    options = {"snapshot": "commit", **options}  # with copies of all a step that has failed is always undone
    return torchelastic.ModelState(module, optimizer, scheduler=scheduler, extra=extra, **options)


def trained(state: torchelastic.ModelState, seed: int) -> None:
    torch.manual_seed(seed)
    state.snapshot()
    state.optimizer.zero_grad()
    state.model(torch.randn(8, 40)).square().mean().backward()
    state.optimizer.step()
    state.scheduler.step()
    state.extra["ema"].update_parameters(state.module)
    state.commit()


def outcome(state: torchelastic.ModelState) -> dict[str, Any]:
    assert state.replica_comparison is not None
    return {"level": state.replica_comparison, "text": str(state.replica_comparison)}


def layer(state: torchelastic.ModelState, number: int) -> Any:
    assert isinstance(state.module, torch.nn.Sequential)
    return state.module[number]


Mischief = Callable[[torchelastic.ModelState], Any]


def touch(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.reshape(-1)[-1] += 1


MISCHIEF: dict[str, Mischief] = {
    "module": lambda state: touch(layer(state, 2).weight),
    "frozen": lambda state: layer(state, 0).bias.requires_grad_(False),
    "buffers": lambda state: touch(layer(state, 1).running_mean),
    "optimizer": lambda state: touch(state.optimizer.state[layer(state, 0).bias]["momentum_buffer"]),
    "rate": lambda state: state.optimizer.param_groups[0].update(lr=7.0),
    "scheduler": lambda state: setattr(state.scheduler, "gamma", 0.5),
    "extra": lambda state: touch(state.extra["ema"].n_averaged),
    "more": lambda state: state.extra.update(another=AveragedModel(torch.nn.Linear(2, 2))),
}


def everything(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    state = make_state(seed=rank)
    state.sync()
    results["first"] = outcome(state)
    for step in range(3):
        trained(state, seed=10 + step)
    state.sync()
    results["again"] = outcome(state)
    results["own"] = state.extra["own"]
    for name, mischief in MISCHIEF.items():
        if rank == 1:
            mischief(state)
        state.sync()
        results[name] = outcome(state) | {"trained": [one.requires_grad for one in state.module.parameters()]}
        state._status = StateStatus.COMPLETE if rank == 0 else StateStatus.INITIAL  # synchronize the others again
        state.sync()
        results[f"{name} repaired"] = outcome(state)
        state.extra.pop("another", None)
    strict = make_state(seed=rank, on_out_of_sync="raise")
    strict.sync()
    if rank == 2:
        touch(layer(strict, 0).weight)
    try:
        strict.sync()
    except torchelastic.NonRetryableException as error:
        results["raised"] = str(error)
    results["after a step that stands"] = after_a_step_that_stands(rank)
    results["beside a spare"] = a_step_that_stands_beside_a_spare(rank)
    results["gradients"] = gradients_without_and_with_exchange(rank)
    return results


def after_a_step_that_stands(rank: int) -> dict[str, Any]:
    """The step fails on every rank after the optimizer, on each at another place."""
    state = make_state(seed=0)
    state.sync()
    fail_after_the_optimizer(state, rank)
    state_status = state.status
    state.sync()
    rate, averaged = state.optimizer.param_groups[0]["lr"], int(state.extra["ema"].n_averaged)
    return {"state_status": state_status, "step": state.step, "rate": rate, "averaged": averaged, **outcome(state)}


def a_step_that_stands_beside_a_spare(rank: int) -> dict[str, Any]:
    """The second step fails on every rank after the optimizer; rank 2 has what a spare has that waited since before."""
    state = make_state(seed=0)
    state.sync()
    old = copy.deepcopy(state.state_dict())
    trained(state, seed=1)
    fail_after_the_optimizer(state, rank)
    if rank == 2:
        state.load_state_dict(old)
    before = (state.status, state.step)
    state.sync()
    return {"before": before, "step": state.step, **outcome(state)}


def a_step_that_stands_while_a_newcomer_is_killed(folder: Path) -> dict[str, Any]:
    """Rank 2 is new, and dies when it is to be sent the state of the others, whose step had failed as above."""
    rank = dist.get_rank()
    state = make_state(seed=0)
    if rank < 2:
        state.load_state_dict(state.state_dict())
        fail_after_the_optimizer(state, rank)
    else:
        vars(torchelastic.model_state)["synchronize"] = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    snapshot = state.snapshot()
    with pytest.raises(RuntimeError):
        state.sync()
    state.apply(snapshot)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder / 'two'}", rank=rank, world_size=2)
    state.sync()
    rate, averaged = state.optimizer.param_groups[0]["lr"], int(state.extra["ema"].n_averaged)
    return {"step": state.step, "rate": rate, "averaged": averaged, "text": outcome(state)["text"]}


def fail_after_the_optimizer(state: torchelastic.ModelState, rank: int) -> None:
    snapshot = state.snapshot()
    torch.manual_seed(1)
    state.model(torch.randn(8, 40)).square().mean().backward()
    state.optimizer.step()
    if rank < 2:
        state.scheduler.step()
    if rank < 1:
        state.extra["ema"].update_parameters(state.module)
    state.apply(snapshot)


def gradients_without_and_with_exchange(rank: int) -> list[torch.Tensor]:
    state = make_state(seed=0)
    state.sync()
    state.snapshot()
    torch.manual_seed(rank)
    seen = []
    for number in range(2):
        with state.no_sync() if number == 0 else contextlib.nullcontext():
            state.model(torch.randn(8, 40)).square().mean().backward()
        seen.append(layer(state, 0).weight.grad.clone())
    return seen


def told(folder: Path) -> bytes:
    rank = dist.get_rank()
    logging.basicConfig(filename=folder / f"log{rank}", level=logging.INFO, force=True)
    return pickle.dumps(everything(rank))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each rank has a log."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return [pickle.loads(one) for one in values(run_ranks(told, folder, ranks=WORLD_SIZE))]


@pytest.mark.long
def test_after_a_sync_that_brought_somebody_level_every_byte_was_compared(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["first"]["level"] == ReplicaComparison(True, {}, {})


@pytest.mark.long
def test_where_nothing_was_sent_a_sample_is_compared(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["again"]["level"] == ReplicaComparison(False, {}, {})


@pytest.mark.parametrize(
    ("name", "part", "told"),
    [
        ("module", "module", ("2.weight",)),
        ("frozen", "frozen", ("0.bias",)),
        ("optimizer", "optimizer", ("state.0.bias.momentum_buffer",)),
        ("rate", "optimizer", ("param_groups.0.lr",)),
        ("scheduler", "scheduler", ("gamma",)),
        ("extra", "extra", ("ema.n_averaged",)),
    ],
)
def test_every_rank_is_told_what_differs_and_on_whom(
    results: list[dict[str, Any]], name: str, part: str, told: tuple[str, ...]
) -> None:
    for result in results:
        level = result[name]["level"]
        assert (level.differing, level.names) == ({part: (1,)}, {part: told})
        assert not level.is_in_sync
        assert result[f"{name} repaired"]["level"].is_in_sync


def test_parameters_that_only_one_rank_has_frozen_are_thawed_there(results: list[dict[str, Any]]) -> None:
    """Else DDP would end the processes: it would reduce other gradients on each."""
    assert [result["frozen"]["trained"] for result in results] == [[True] * 6] * WORLD_SIZE


def test_ranks_that_hold_other_tensors_altogether_are_told_apart_without_a_hang(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["more"]["level"].differing == {"extra": (1,)}
        assert result["more"]["level"].names == {}


def test_buffers_may_differ(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["buffers"]["level"].differing == {"buffers": (1,)}
        assert result["buffers"]["level"].is_in_sync


def test_differences_are_logged_as_errors_on_every_rank(results: list[dict[str, Any]], folder: Path) -> None:
    for rank in range(WORLD_SIZE):
        text = (folder / f"log{rank}").read_text()
        assert "ERROR:torchelastic.model_state:step 3, after the sync: module differs on rank 1 (2.weight)" in text


def test_who_wants_an_error_gets_it_on_every_rank(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "module differs on rank 2 (0.weight)" in result["raised"]


def test_a_step_that_stands_on_ranks_that_failed_at_different_places_leaves_them_level(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        stands = result["after a step that stands"]
        assert stands["state_status"] is StateStatus.UNCOMMITTED
        assert (stands["step"], stands["rate"], stands["averaged"]) == (1, pytest.approx(0.09), 1)
        assert stands["level"].is_in_sync


def test_a_step_that_stands_leaves_them_level_also_when_a_newcomer_dies_in_that_sync(tmp_path: Path) -> None:
    *survivors, dead = run_ranks(a_step_that_stands_while_a_newcomer_is_killed, tmp_path, ranks=3, others_go_on=True)
    assert dead.was_killed
    for survivor in survivors:
        assert survivor.error is None, survivor.error
        found = (survivor.value["step"], survivor.value["rate"], survivor.value["averaged"], survivor.value["text"])
        assert found == (1, pytest.approx(0.09), 1, "all members are in sync")


def test_a_whole_state_of_an_older_step_does_not_undo_one_that_stands(results: list[dict[str, Any]]) -> None:
    together = [result["beside a spare"] for result in results]
    trained_on = (StateStatus.UNCOMMITTED, 1)
    assert [one["before"] for one in together] == [trained_on, trained_on, (StateStatus.COMPLETE, 0)]
    assert [one["step"] for one in together] == [2, 2, 2]
    assert all(one["level"].is_in_sync for one in together)


def test_gradients_are_exchanged_at_the_end_of_an_accumulation_only(results: list[dict[str, Any]]) -> None:
    (one, one_all), (other, other_all), _ = (result["gradients"] for result in results)
    assert not torch.equal(one, other)
    assert torch.equal(one_all, other_all)
