"""A state moves between three real processes, whole, in large and small pieces, and to those only that lack it."""

from __future__ import annotations

import logging
import pickle
import threading
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import torchelastic
from tests.process.forked_ranks import run_ranks, values
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.model import transfer
from torchelastic.model.companions import copied
from torchelastic.model.transfer import pack, unpack
from torchelastic.repeated_failures import is_final

SOURCE, WORLD_SIZE = 1, 3


def tree(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    large = torch.randn(600, 500, generator=generator)
    return {
        "large": large,
        "small": [torch.randn(3, generator=generator), torch.tensor(seed), torch.empty(0)],
        "other type": {"large": large.double(), "small": torch.ones(2, dtype=torch.float64) * seed},
        "turned": torch.randn(700, 600, generator=generator).t(),
        "pixels": torch.randn(8, 8, 64, 64, generator=generator).to(memory_format=torch.channels_last),
        "tokens": torch.arange(seed, seed + 9).to(torch.int16),  # gloo has no such type, nor has NCCL
        "small again": torch.randn(5, generator=generator),
        "plain": (seed, "words", None, 2.5, np.float64(seed), Path("a")),
        "array": np.arange(seed, dtype=np.int32),
    }


def told() -> bytes:
    rank = dist.get_rank()
    where: dict[str, Any] = {"source": SOURCE, "rank": rank, "world_size": WORLD_SIZE, "device": torch.device("cpu")}
    mine = tree(seed=rank)
    received = [transfer.synchronize(mine, stale=stale, **where) for stale in ([2], [0, 2])]
    return pickle.dumps({"mine": mine, "received": received})


def assert_same(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def test_what_is_received_is_what_the_source_has() -> None:
    expected = tree(seed=SOURCE)
    plain = expected.pop("plain")
    for rank, one in enumerate(map(pickle.loads, values(run_ranks(told, ranks=WORLD_SIZE)))):
        assert_same(
            {k: v for k, v in one["mine"].items() if k != "plain"},
            {k: v for k, v in tree(seed=rank).items() if k != "plain"},
        )  # what a receiver holds stays whole
        for received, stale in zip(one["received"], ([2], [0, 2]), strict=True):
            if rank not in stale:
                assert received is None
                continue
            assert received.pop("plain") == plain
            assert_same(received, expected)


def test_a_copy_of_a_state_shares_nothing_that_can_change() -> None:
    flat: dict[str, Any] = {"epoch": 1, "name": "a"}
    nested: dict[str, Any] = {"epoch": 1, "left": [1, 2], "weights": torch.ones(2)}
    for state in (flat, nested):
        copy = copied(state)
        assert copy is not state
        assert copy.keys() == state.keys()
    copy = copied(nested)
    copy["left"].append(3)
    copy["weights"].zero_()
    assert nested["left"] == [1, 2]
    assert nested["weights"].sum() == 2


def test_what_a_newcomer_will_not_run_is_named() -> None:
    sent = pack({"extra": {"fine": 1, "host": IPv4Address(1)}})
    with pytest.raises(CheckpointError, match=r"extra\['host'\] of the state that workers send each other"):
        unpack(sent)


def begun_with_an_address() -> str:
    model = torch.nn.Linear(2, 1)
    host = IPv4Address(1)
    state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.1), extra={"host": host})
    try:
        state.sync()
    except CheckpointError as error:
        return str(error)
    return "nothing"


def test_a_run_does_not_begin_with_the_one_worker_that_has_nothing_to_receive() -> None:
    messages = values(run_ranks(begun_with_an_address, ranks=2))
    assert all(message.startswith("extra['host'] of the state") for message in messages), messages


def unfrozen_later() -> list[list[float]]:
    """Two ranks; a part of the model is frozen for two steps; afterwards a third step has begun in a new group."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    module[0].requires_grad_(dist.get_rank() == 1)  # a newcomer, that does not know what the source has frozen
    state = torchelastic.ModelState(module, torch.optim.SGD(module.parameters(), lr=0.1))
    state.sync()
    refused = 0
    while state.step < 4:
        torch.manual_seed(10 * state.step + dist.get_rank())
        before = state.snapshot()
        module[0].requires_grad_(state.step >= 2)
        state.optimizer.zero_grad()
        state.model(torch.randn(8, 4)).square().mean().backward()
        try:
            state.optimizer.step()
        except torchelastic.RetryableException:
            refused += 1
            state.apply(before)
            state.sync()
        else:
            state.commit()
    assert refused == 1
    return [parameter.flatten().tolist() for parameter in module.parameters()]


class FixedNorm(torch.nn.BatchNorm1d):
    """Statistics that `train()` does not set free."""

    def train(self, mode: bool = True) -> FixedNorm:
        return self


def modes_after_a_join() -> tuple[list[tuple[str, bool]], list[bool]]:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), FixedNorm(4), torch.nn.Linear(4, 1))
    if dist.get_rank() == 0:  # the source has frozen a part in the run
        module[1].training = False
        module[2].requires_grad_(False)
    else:
        module[0].eval()
    state = torchelastic.ModelState(module, torch.optim.SGD(module.parameters(), lr=0.1))
    state.sync()
    modes = [(name, one.training) for name, one in module.named_modules()]
    return modes, [parameter.requires_grad for parameter in module.parameters()]


def test_a_worker_that_joins_has_the_modes_of_the_source() -> None:
    found = values(run_ranks(modes_after_a_join, ranks=2))
    assert found == [([("", True), ("0", True), ("1", False), ("2", True)], [True] * 4 + [False] * 2)] * 2


def test_parameters_that_are_unfrozen_in_a_run_are_averaged_too() -> None:
    first, second = values(run_ranks(unfrozen_later, ranks=2))
    assert first == second


class Thawing:
    """As scripts do it: a part that is still frozen is thawed, and gets a group of its own, from a step on."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        self.module[0].requires_grad_(False)
        self.state = torchelastic.ModelState(self.module, torch.optim.Adam(self.module[1].parameters(), lr=0.1))

    def step(self) -> bool:
        """Whether it was committed; else it was refused and undone."""
        state = self.state
        before = state.snapshot()
        if state.step >= 2 and not self.module[0].weight.requires_grad:
            self.module[0].requires_grad_(True)
            state.optimizer.add_param_group({"params": list(self.module[0].parameters()), "lr": 0.01})
        state.optimizer.zero_grad()
        state.model(torch.ones(2, 4) * (state.step + 1)).square().mean().backward()
        try:
            state.optimizer.step()
        except torchelastic.RetryableException:
            state.apply(before)
            return False
        state.commit()
        return True

    def until(self, end: int) -> tuple[list[float], int]:
        """The weights in the end, and the number of groups."""
        while self.state.step < end:
            assert self.step()
        weights = torch.cat([parameter.detach().flatten() for parameter in self.module.parameters()])
        return weights.tolist(), len(self.state.optimizer.param_groups)


def in_group(folder: Path, ranks: int) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/{ranks}", rank=rank, world_size=ranks)


def joined_as_a_part_is_thawed(folder: Path) -> tuple[list[float], int]:
    rank = dist.get_rank()
    one = Thawing()
    if rank < 2:
        in_group(folder, 2)
        one.state.sync()
        assert [one.step() for _ in range(3)] == [True, True, False]
    in_group(folder, 3)
    one.state.sync()
    return one.until(4)


def test_a_step_that_thaws_a_part_is_undone_as_a_whole_before_it_is_repeated(tmp_path: Path) -> None:
    """Were the flags left, the second attempt would take the part for thawed, and add no group for it."""
    undisturbed = Thawing()
    undisturbed.state.sync(1, 0)
    expected, groups = undisturbed.until(4)
    assert groups == 2
    for weights, groups in values(run_ranks(joined_as_a_part_is_thawed, tmp_path, ranks=3)):
        assert groups == 2
        assert weights == pytest.approx(expected, abs=1e-6)


class Locked(torch.optim.SGD):
    """Has a lock in its state, which nothing can send, from its first step on."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "lock": threading.Lock()} if self.state else state


def joined_by_one_that_cannot_receive() -> tuple[list[str], str | None, bool]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchelastic").addHandler(handler)
    rank = dist.get_rank()
    module = torch.nn.Linear(2, 1)
    state = torchelastic.ModelState(module, Locked(module.parameters(), lr=0.1, momentum=0.9))
    if rank == 0:
        state.sync(1, 0)
        for _ in range(2):
            state.snapshot()
            state.model(torch.ones(1, 2)).sum().backward()
            state.optimizer.step()
            state.commit()
    try:
        state.sync()
    except Exception as error:
        return heard, f"{type(error).__name__}: {error}", is_final(error)
    return heard, None, False


def test_who_holds_a_state_that_cannot_be_sent_says_so_early_and_is_not_ended_by_giving_it() -> None:
    source, newcomer = run_ranks(joined_by_one_that_cannot_receive, ranks=2)
    heard, error, is_over = source.value
    (line,) = [line for line in heard if "could receive this state" in line]
    assert line.startswith("step 1: no worker that joins, or is started again, could receive this state")
    assert "optimizer['lock']" in line
    assert error is None or error.startswith("RuntimeError"), "the loss of the other one, which is tried again"
    assert not is_over
    _, error, is_over = newcomer.value
    assert error.startswith("UnsendableError")
    assert "optimizer['lock'] cannot be pickled" in error
    assert is_over, "another process could not receive it either"
