"""Requests, what ranks conclude from a round, and requests on their way to a worker: without a worker."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from torchelastic.checkpoint.async_ckpt import AsyncCheckpointError, AsyncRequest
from torchelastic.checkpoint.compat.nvrx.async_ckpt.call_agreement import CallVerdict, decode, encode
from torchelastic.checkpoint.compat.nvrx.async_ckpt.executors import failed
from torchelastic.checkpoint.compat.nvrx.async_ckpt.request import CollectiveFinalize
from torchelastic.checkpoint.compat.nvrx.async_ckpt.shipping import MemoryPool, Parcel, pack, unpack

RUNNING: Future[float] = Future()
DONE: Future[float] = Future()
DONE.set_result(1.0)
FAILED = failed(ValueError("no"))


def keep(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


def test_the_seven_fields_are_those_of_nvrx() -> None:
    assert AsyncRequest._fields == (
        "async_fn",
        "async_fn_args",
        "finalize_fns",
        "async_fn_kwargs",
        "preload_fn",
        "is_frozen",
        "call_idx",
    )
    assert AsyncRequest(None, (), [])[3:] == (None, None, False, 0)


def test_everything_is_done_in_order_without_a_queue() -> None:
    done: list[Any] = []
    request = AsyncRequest(lambda *args, **kwargs: done.append((args, kwargs)), (1, 2), [lambda: done.append("first")])
    request.add_finalize_fn(lambda: done.append("second"))
    request.execute_sync()
    assert done == [((1, 2), {}), "first", "second"]


def test_a_failure_is_finalised_by_nobody_and_has_the_original_as_cause() -> None:
    done: list[str] = []
    original = KeyError("disk")

    def work() -> None:
        raise original

    with pytest.raises(AsyncCheckpointError, match=r"call 0 failed on rank 0: KeyError: 'disk'") as caught:
        AsyncRequest(work, (), [lambda: done.append("finalised")]).execute_sync()
    assert caught.value.__cause__ is original
    assert (caught.value.rank, caught.value.call_idx, done) == (0, 0, [])


def test_a_frozen_request_takes_no_more_finalize_functions() -> None:
    request = AsyncRequest(None, (), [])
    frozen = request.freeze()
    assert (request.is_frozen, frozen.is_frozen) == (False, True)
    with pytest.raises(RuntimeError, match="takes no more finalize functions"):
        frozen.add_finalize_fn(lambda: None)


def test_what_is_staged_takes_the_place_of_the_second_argument() -> None:
    assert AsyncRequest(keep, (1, 2, 3), [], preload_fn=lambda: "staged").staged_args() == (1, "staged", 3)


@pytest.mark.parametrize("args", [(), (1,)])
def test_something_staged_that_has_no_place_is_refused(args: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"takes the place of async_fn_args\[1\]"):
        AsyncRequest(keep, args, [], preload_fn=lambda: "staged").check()


def verdict(*said: tuple[int, Future[float]]) -> CallVerdict:
    rows = [encode(index, work, rank, len(said)) for rank, (index, work) in enumerate(said)]
    return decode([max(column) for column in zip(*rows, strict=True)], len(said))


def test_what_the_ranks_conclude() -> None:
    assert verdict((1, DONE), (1, DONE)) == CallVerdict(True, True, None)
    assert verdict((1, DONE), (1, RUNNING)) == CallVerdict(True, False, None)
    assert verdict((1, DONE), (1, FAILED)) == CallVerdict(True, False, 1)
    assert verdict((1, RUNNING), (1, RUNNING), (1, FAILED), (1, FAILED)) == CallVerdict(True, False, 2)
    assert verdict((1, FAILED), (1, RUNNING)) == CallVerdict(True, False, 0)


def there_and_back(*args: Any) -> tuple[Parcel, tuple[Any, ...]]:
    parcel = pack(AsyncRequest(keep, args, [lambda: None]), MemoryPool(reuse=False))
    return parcel, unpack(parcel).async_fn_args


def test_tensors_arrive_with_their_bits_shapes_and_types() -> None:
    sent = [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.tensor(7, dtype=torch.int16),
        torch.randn(5).to(torch.bfloat16),
        torch.randn(5).to(torch.float8_e4m3fn),
        torch.empty(0, 3),
        torch.nn.Parameter(torch.ones(2)),
        torch.tensor([[0.0, 1.0]]).to_sparse(),
        torch.tensor([1 + 2j]).conj(),
        torch.arange(9)[2:5],
    ]
    _, arrived = there_and_back(*sent)
    for before, after in zip(sent, arrived, strict=True):
        assert (type(after), after.dtype, after.shape) == (type(before), before.dtype, before.shape)
        assert torch.equal(before.to_dense().to(torch.complex64), after.to_dense().to(torch.complex64))


def test_tensors_that_share_storage_still_do_and_are_copied_once() -> None:
    live = torch.zeros(1000)
    parcel, (whole, part) = there_and_back(live, live[500:])
    assert parcel.memory is not None
    assert parcel.memory.size_bytes < 2 * live.nbytes
    whole += 1
    assert part.sum() == 500


@pytest.mark.parametrize("alone", [False, True])
def test_what_ranks_finalise_together_has_something_in_its_place_for_one_alone(alone: bool) -> None:
    done: list[str] = []
    both = CollectiveFinalize(lambda: done.append("together"), lambda: done.append("alone"))
    request = AsyncRequest(None, (), [both, lambda: done.append("own")])
    assert request.work() >= 0.0, "there is nothing to do"
    assert request.execute_finalize_fns(alone=alone) == 0
    assert done == ["alone" if alone else "together", "own"]
