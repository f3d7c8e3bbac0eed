"""What a survivor makes of a step whose reduction failed: weights, buffers and random numbers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchelastic
from tests.process.forked_ranks import run_ranks
from tests.process.pairs import dies_at_reduction, survivor_of
from torchelastic.data import ElasticBatchSampler, ElasticLoader
from torchelastic.data.shares import MODES
from torchelastic.model.step_kind import kind_text
from torchelastic.repeated_failures import is_final

SAMPLES, BATCH = 16, 8


def make_state(salvage: str) -> tuple[torchelastic.ModelState, ElasticLoader]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5)).double()
    sampler = ElasticBatchSampler(SAMPLES, BATCH, shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = torchelastic.ModelState(model, optimizer, sampler=sampler, salvage=salvage)
    inputs = torch.arange(SAMPLES * 4, dtype=torch.float64).reshape(SAMPLES, 4).sin()
    return state, ElasticLoader(torch.utils.data.TensorDataset(inputs), sampler)


def compute(state: torchelastic.ModelState, loader: ElasticLoader) -> tuple[int, ...]:
    (inputs,) = next(loader)
    state.optimizer.zero_grad()
    state.model(inputs).square().mean().backward()
    state.optimizer.step()
    loaded: tuple[int, ...] = state.sampler.pending[0].indices
    return loaded


def picture(state: torchelastic.ModelState) -> dict[str, Any]:
    return {
        "weights": [parameter.detach().clone() for parameter in state.module.parameters()],
        "buffers": [buffer.clone() for buffer in state.module.buffers()],
        "random": torch.get_rng_state(),
        "step": state.step,
        "threads": torch.get_num_threads(),
    }


def has_seen_steps_of(state: torchelastic.ModelState, reductions: int) -> None:
    """As after a committed step, which would change what is compared here."""
    state._gradients._source._most = reductions  # type: ignore[union-attr]


def salvages(folder: Path, salvage: str, reductions: int = 1) -> dict[str, Any]:
    """Rank 0: its step fails in the reduction and is done again by itself alone."""
    state, loader = make_state(salvage)
    state.sync(2, 0)
    has_seen_steps_of(state, reductions)
    snapshot = state.snapshot()
    try:
        compute(state, loader)
    except RuntimeError:
        failed = True
    after_first = {"buffers": [b.clone() for b in state.module.buffers()], "random": torch.get_rng_state()}
    state.apply(snapshot)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder / 'alone'}", rank=0, world_size=1)
    state.sync(1, 0)
    state.snapshot()
    computed = compute(state, loader)
    state.commit()
    return {
        **picture(state),
        "failed": failed,
        "computed": computed,
        "after first": after_first,
        "postponed": state.sampler.postponed,
        "salvaged": tuple(state.salvaged or ()),
    }


def drops(folder: Path) -> dict[str, Any]:
    return salvages(folder, "drop")


def recomputes(folder: Path) -> dict[str, Any]:
    return salvages(folder, "recompute")


def salvages_several(folder: Path) -> dict[str, Any]:
    return salvages(folder, "recompute", reductions=2)


def victim(_folder: Path, salvage: str = "drop") -> None:
    state, loader = make_state(salvage)
    state.sync(2, 1)
    dies_at_reduction(1)
    compute(state, loader)


def one_step_on_the_first_half() -> dict[str, Any]:
    state, _ = make_state("discard")
    state.sync(1, 0)
    inputs = torch.arange(SAMPLES * 4, dtype=torch.float64).reshape(SAMPLES, 4).sin()[: BATCH // 2]
    state.model(inputs).square().mean().backward()
    state.optimizer.step()
    return picture(state)


def test_drop_commits_what_the_survivor_has_computed(tmp_path: Path) -> None:
    found = survivor_of(tmp_path, drops, victim)
    expected = one_step_on_the_first_half()
    assert found["failed"]
    assert found["computed"] == ()
    assert found["postponed"] == (4, 5, 6, 7)
    assert found["salvaged"] == (0, 4, 0, 4)
    assert found["step"] == 1
    for one, other in zip(found["weights"], expected["weights"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
    assert found["threads"] == expected["threads"], "results are bit-identical only for equal numbers of threads"
    for one, other in zip(found["buffers"], expected["buffers"], strict=True):
        assert torch.equal(one, other), "running statistics of padding"
    assert torch.equal(found["random"], found["after first"]["random"]), "random numbers of padding"


def test_recompute_adds_what_the_lost_one_would_have_computed(tmp_path: Path) -> None:
    found = survivor_of(tmp_path, recomputes, partial(victim, salvage="recompute"))
    assert found["computed"] == (4, 5, 6, 7)
    assert found["postponed"] == ()
    assert found["salvaged"] == (0, 4, 4, 0)
    for one, other in zip(found["buffers"], found["after first"]["buffers"], strict=True):
        assert torch.equal(one, other)


def test_gradients_of_a_step_that_has_more_reductions_to_come_are_not_kept(tmp_path: Path) -> None:
    found = survivor_of(tmp_path, salvages_several, partial(victim, salvage="recompute"))
    assert found["computed"] == tuple(range(BATCH)), "the step is repeated as a whole"
    assert found["salvaged"] == ()


def syncs(options: list[dict[str, Any]]) -> str:
    """What a rank says that was given these options of its state, one for each rank."""
    rank = dist.get_rank()
    module, sampler = torch.nn.Linear(4, 2), ElasticBatchSampler(SAMPLES, BATCH)
    state = torchelastic.ModelState(
        module, torch.optim.SGD(module.parameters(), lr=0.1), sampler=sampler, **options[rank]
    )
    try:
        state.sync(len(options), rank)
    except torchelastic.NonRetryableException as error:
        return f"{error}{', for good' if is_final(error) else ''}"
    except RuntimeError:
        return "another is gone"
    return ""


@pytest.mark.parametrize("other", [{"logical_shards": 4}, {"salvage": "drop"}], ids=str)
def test_a_worker_with_other_shards_or_mode_than_the_source_says_so_and_ends_for_good(other: dict[str, Any]) -> None:
    ends = run_ranks(syncs, [{"salvage": "recompute"}, other], ranks=2)
    said = kind_text((other.get("logical_shards", 0), MODES.index(other.get("salvage", "discard")), 0))
    assert ends[1].value == (
        f"this worker's ModelState has {said}, and that of rank 0, which the others go by, logical_shards=None, "
        "salvage='recompute': start every worker with the same, for good"
    )


def test_a_step_of_several_batches_is_repeated_as_a_whole() -> None:
    state, loader = make_state("drop")
    state.sync(1, 0)
    snapshot = state.snapshot()
    next(loader)
    next(loader)
    state.apply(snapshot)
    state.sync(1, 0)
    assert state.salvaged is None
    assert state.sampler.shares(0).counted.local_samples == BATCH


@pytest.mark.parametrize("salvage", ["drop", "recompute"])
def test_a_state_that_salvages_pickles(salvage: str) -> None:
    import pickle

    state, _ = make_state(salvage)
    state.sync(1, 0)
    copy = pickle.loads(pickle.dumps(state))
    assert copy.model.module is copy.module
    copy.sync(1, 0)
