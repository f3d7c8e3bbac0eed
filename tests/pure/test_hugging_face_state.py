"""What a rank writes, what a Trainer resumes from: decisions, on values and small folders."""

from __future__ import annotations

import datetime
import enum
import json
import math
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.adapters.hugging_face.rank_state import (
    LEADING,
    REPLICATED,
    RankState,
    belongs_to,
    own_part,
    part_from,
    portion_of,
    replicated_bytes,
    rng_state,
    set_rng_state,
    split_model,
    tensors_of,
)
from torchelastic.adapters.hugging_face.resume import (
    Durable,
    best_of_all,
    durable_checkpoints,
    rng_file,
    step_to_compare,
    trainer_rng,
)
from torchelastic.adapters.memory_tier import takes_memory
from torchelastic.adapters.values import json_like
from torchelastic.checkpoint.errors import CorruptCheckpointError


@given(st.dictionaries(st.text(min_size=1), st.integers(0, 1000)), st.integers(1, 9))
def test_portions_are_all_of_it_once_and_no_rank_has_much_more(sizes_bytes: dict[str, int], ranks: int) -> None:
    portions = [portion_of(rank, ranks, sizes_bytes) for rank in range(ranks)]
    assert sorted(name for portion in portions for name in portion) == sorted(sizes_bytes)
    loads = [sum(max(1, sizes_bytes[name]) for name in portion) for portion in portions]
    assert max(loads) <= sum(loads) / ranks + max([1, *sizes_bytes.values()])


def share() -> RankState:
    tied = torch.ones(2, 3)
    return RankState(
        {"parameters": {"a": tied, "b": tied}, "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "lr": 0.1}},
        {"scheduler": {"best": math.inf, "pair": (1, 2)}, "scaler": None},
        {"numpy": np.arange(3, dtype=np.uint32)},
    )


def test_a_share_is_put_together_from_what_the_ranks_wrote() -> None:
    zero, one = tensors_of(share(), 0), tensors_of(share(), 1)
    assert set(one) == {name for name in zero if name.startswith("replicated/")} | {
        name.replace("rank-0", "rank-1") for name in zero if name.startswith("rank-0")
    }, "what belongs to rank 0 is written by it alone"
    assert list(replicated_bytes(zero).values()) == list(replicated_bytes(one).values()) == [4, 24]
    merged = {**zero, **one}
    replicated, leading = part_from(merged, REPLICATED), part_from(merged, LEADING)
    assert replicated["parameters"]["a"] is replicated["parameters"]["b"]
    assert (replicated["optimizer"]["state"][0]["step"].item(), replicated["optimizer"]["lr"]) == (3.0, 0.1)
    assert leading == {"scheduler": {"best": math.inf, "pair": (1, 2)}, "scaler": None}
    assert part_from(merged, own_part(1))["numpy"].tolist() == [0, 1, 2]
    assert not belongs_to("rank-10/numpy", own_part(1))


def test_a_damaged_description_is_named() -> None:
    tensors = tensors_of(share(), 0)
    tensors["leading.json"] = torch.full((5,), 200, dtype=torch.uint8)
    with pytest.raises(CorruptCheckpointError, match="'leading'"):
        part_from(tensors, LEADING)


def test_buffers_are_told_from_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2))
    parameters, others = split_model(model)
    assert list(parameters) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(others) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]


def test_random_numbers_come_again() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    state = rng_state()
    first = draw()
    stored = part_from(tensors_of(RankState(None, None, state), 0), own_part(0))
    set_rng_state(stored)
    assert draw() == first
    converted = trainer_rng(stored, is_distributed=False)
    random.setstate(converted["python"])
    np.random.set_state(converted["numpy"])
    torch.random.set_rng_state(converted["cpu"])
    assert draw() == first


@pytest.mark.parametrize(("is_distributed", "cuda"), [(True, ["0", "1"]), (False, "1")])
def test_a_trainer_has_one_device_or_all_of_them(is_distributed: bool, cuda: Any) -> None:
    state = {"python": (), "numpy": (), "torch": 0, "cuda": ["0", "1"], "cuda_device": 1}
    assert trainer_rng(state, is_distributed=is_distributed)["cuda"] == cuda
    assert [rng_file(1, 1), rng_file(1, 2)] == ["rng_state.pth", "rng_state_1.pth"]


FULL5, FULL9, BARE12 = Durable(True, 5), Durable(True, 9), Durable(False, 12)


@pytest.mark.parametrize(
    ("seen", "best"),
    [
        ([[]], None),
        ([[FULL5, FULL9]], FULL9),
        ([[FULL5, FULL9], [FULL5]], FULL5),  # a host that does not see it cannot load it
        ([[FULL5, BARE12]], FULL5),  # without the optimizer nothing goes on
        ([[BARE12]], BARE12),
    ],
)
def test_the_best_that_all_see_is_chosen(seen: list[list[Durable]], best: Durable | None) -> None:
    assert best_of_all(seen) == best


@pytest.mark.parametrize(
    ("memory_step", "durable", "is_taken"),
    [
        (None, None, False),
        (None, FULL9, False),
        (6, FULL5, True),
        (5, FULL5, True),
        (6, FULL9, False),
        (6, BARE12, True),
        (0, None, True),
    ],
)
def test_the_newest_is_taken_and_at_one_step_that_in_memory(
    memory_step: int | None, durable: Durable | None, is_taken: bool
) -> None:
    assert takes_memory(memory_step, step_to_compare(durable)) is is_taken


def test_that_of_the_last_step_is_taken_only_where_memory_has_nothing() -> None:
    assert [step_to_compare(FULL9, max_steps) for max_steps in (-1, 10, 9, 5)] == [9, 9, None, None]


def test_a_durable_checkpoint_counts_when_it_is_complete(tmp_path: Path) -> None:
    def put(name: str, state: str, *files: str) -> None:
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
        (tmp_path / name / "trainer_state.json").write_text(state)

    put("checkpoint-5", json.dumps({"global_step": 5}), "model.safetensors", "optimizer.pt")
    put("checkpoint-6", json.dumps({"global_step": 6}), "model-00001-of-00002.safetensors")
    put("checkpoint-7", '{"global_step": 7', "model.safetensors", "optimizer.pt")
    put("checkpoint-8", json.dumps({"global_step": 8}), "optimizer.pt")
    put("checkpoint-9", json.dumps({"global_step": 4}), "model.safetensors", "optimizer.pt")
    put("checkpoint-10-old", json.dumps({"global_step": 10}), "model.safetensors", "optimizer.pt")
    (tmp_path / "checkpoint-11").mkdir()
    assert durable_checkpoints(tmp_path) == [Durable(False, 6), Durable(True, 5)]
    assert durable_checkpoints(tmp_path / "none") == durable_checkpoints(None) == []


class Chart:
    """Of a program that draws."""

    def __repr__(self) -> str:
        return "Chart()"  # names of tests hold no addresses: all processes that share them out must find the same


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "in_json"),
    [
        (np.float32(0.1), float(np.float32(0.1))),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.longdouble(1.5), 1.5),
        (np.str_("x"), "x"),
        (np.array([[1, 2]]), [[1, 2]]),
        (torch.tensor(2.0, requires_grad=True) * 1, 2.0),
        (torch.ones(2, dtype=torch.bfloat16), [1.0, 1.0]),
        ({3: 1.0, np.int64(4): 2, True: 3, None: 4, "5": 5}, {"3": 1.0, "4": 2, "true": 3, "null": 4, "5": 5}),
        ({2, 1}, [1, 2]),
        ((1, (2,)), [1, [2]]),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (np.datetime64("2026-01-02"), "2026-01-02"),
        (Path("/x"), "/x"),
        (Decimal("1.50"), "1.50"),
        (1j, "1j"),
        (torch.float32, "torch.float32"),
        (Colour.RED, "red"),
        ([1, Chart()], [1, None]),
        ({"a": Chart(), "b": torch.empty(2, device="meta")}, {}),
    ],
    ids=str,
)
def test_what_a_trainer_has_logged_is_what_json_has_for_it(value: Any, in_json: Any) -> None:
    skipped: list[tuple[str, Any]] = []
    found = json_like({"log_history": [{"x": value}]}, lambda *what: skipped.append(what))
    assert json.loads(json.dumps(found, sort_keys=True)) == {"log_history": [{"x": in_json}]}
    assert all(place.startswith("log_history[0]['x'][") for place, _ in skipped)
    assert any(isinstance(one, Chart) for _, one in skipped) is ("Chart" in str(value))


def test_no_text_or_number_is_another_one_in_json() -> None:
    kept = {"x": [1.5, float("inf"), 2**70, "é", None, False, {"y": []}]}
    assert json_like(kept, lambda place, _: pytest.fail(place)) == kept
