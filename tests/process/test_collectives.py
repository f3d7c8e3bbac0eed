"""Three real processes in a gloo group run every helper once; the tests look at what each of them got."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.process.forked_ranks import run_ranks, values
from torchelastic import distributed
from torchelastic.distributed import collectives

WORLD_SIZE = 3
SOURCE = 1
BIG_BYTES = 3 * 2**20 + 5


def net(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(5, 2).double())
    model[1].register_buffer("seen", torch.full((3,), seed))
    return model.to(memory_format=torch.channels_last)  # type: ignore[no-any-return, call-overload] # torch's stub lacks it


def flat(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def big_array() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(4).integers(0, 256, BIG_BYTES, dtype=np.uint8)


def everything(rank: int) -> dict[str, Any]:
    mine = rank == SOURCE
    collectives._CHUNK_BYTES = 2**18  # so that 3 MiB go in more chunks than are in flight
    model = net(seed=rank)
    before = [tensor.data_ptr() for tensor in flat(model)]
    distributed.broadcast_model(SOURCE, model)
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    big = big_array() if mine else None
    return {
        "rank": distributed.get_rank(),
        "is_run": distributed.is_distributed_training_run(),
        "long": distributed.broadcast_long(2**62 + 1 if mine else -rank, SOURCE),
        "bool": [distributed.broadcast_bool(mine, SOURCE), distributed.broadcast_bool(not mine, SOURCE)],
        "floats": distributed.broadcast_float_list([0.1, 1e300, -2.5] if mine else [7.0] * rank, SOURCE),
        "no floats": distributed.broadcast_float_list([] if mine else [1.0], SOURCE),
        "max": distributed.all_gather_return_max_long([5, -3, 9][rank]),
        "tie": distributed.all_gather_return_max_long([-7, -2, -2][rank]),
        "model": [tensor.detach().clone() for tensor in flat(model)],
        "in place": before == [tensor.data_ptr() for tensor in flat(model)],
        "bytes": distributed.broadcast_binary(b"\x00abc\xff" if mine else None, SOURCE),
        "ignored": distributed.broadcast_binary(b"source" if mine else b"somebody else's", SOURCE),
        "none": distributed.broadcast_binary(None, SOURCE),
        "empty": distributed.broadcast_binary(b"" if mine else None, SOURCE),
        "typed": distributed.broadcast_binary(matrix if mine else None, SOURCE),
        "strided": distributed.broadcast_binary(matrix.T if mine else None, SOURCE),
        "big": distributed.broadcast_binary(big, SOURCE),
        "tensor": distributed.convert_to_distributed_tensor(torch.tensor([rank]))[1],
    }


def told() -> bytes:
    return pickle.dumps(everything(dist.get_rank()))


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return [pickle.loads(one) for one in values(run_ranks(told, ranks=WORLD_SIZE))]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("long", 2**62 + 1),
        ("bool", [True, False]),
        ("floats", [0.1, 1e300, -2.5]),
        ("no floats", []),
        ("max", (2, 9)),
        ("tie", (1, -2)),
        ("none", None),
    ],
)
def test_values_are_the_sources_exactly_on_every_rank(
    results: list[dict[str, Any]], what: str, expected: object
) -> None:
    assert [result[what] for result in results] == [expected] * WORLD_SIZE


def test_a_models_parameters_and_buffers_are_the_sources_and_stay_where_they_were(
    results: list[dict[str, Any]],
) -> None:
    expected = flat(net(seed=SOURCE))
    for result in results:
        assert len(result["model"]) == len(expected)
        assert all(torch.equal(got, wanted) for got, wanted in zip(result["model"], expected, strict=True))
        assert result["in place"]


def test_a_world_of_one_gets_its_own_values_back_without_a_process_group() -> None:
    assert not dist.is_initialized()
    assert not distributed.is_distributed_training_run()
    assert distributed.get_rank() == 0
    assert distributed.broadcast_long(5, 0) == 5
    assert distributed.broadcast_bool(True, 0) is True
    assert distributed.broadcast_float_list([0.5], 0) == [0.5]
    assert distributed.all_gather_return_max_long(-4) == (0, -4)
    model = net(seed=3)
    distributed.broadcast_model(0, model)
    assert all(torch.equal(a, b) for a, b in zip(flat(model), flat(net(seed=3)), strict=True))
    assert distributed.broadcast_binary(None, 0) is None
    tensor = torch.tensor([1.0])
    moved, origin = distributed.convert_to_distributed_tensor(tensor)
    assert moved is tensor
    assert distributed.convert_to_normal_tensor(moved, origin) is tensor


def test_the_sources_bytes_are_not_copied(recwarn: pytest.WarningsRecorder) -> None:
    data = b"some bytes"
    view = distributed.broadcast_binary(data, 0)
    assert view is not None
    assert view.tobytes() == data
    assert np.shares_memory(view, np.frombuffer(data, dtype=np.uint8))
    assert not view.flags.writeable
    tensor = collectives._tensor_over(view)
    assert tensor.data_ptr() == view.__array_interface__["data"][0]
    array = np.arange(4)
    view = distributed.broadcast_binary(array, 0)
    assert view is not None
    assert np.shares_memory(view, array)
    assert not view.flags.writeable
    assert array.flags.writeable, "the caller's array stays as it was"
    assert len(recwarn) == 0, "torch warns about read-only memory unless it is told that this is fine"


@pytest.mark.parametrize("room", ["metrics", "data", "distributed"])
def test_importing_a_room_does_not_import_torch(room: str) -> None:
    script = f"import sys, torchelastic.{room} as room; print('torch' in sys.modules, sorted(room.__all__)[0])"
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, cwd=root, check=True
    )
    assert run.stdout.startswith("False")


@pytest.mark.parametrize("room", ["metrics", "data", "distributed"])
def test_every_exported_name_of_a_room_exists(room: str) -> None:
    module = __import__(f"torchelastic.{room}", fromlist=["__all__"])
    assert all(getattr(module, name).__name__ == name for name in module.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        module.nonsense  # noqa: B018 - looking it up is the test
