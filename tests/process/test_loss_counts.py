"""Losses that are no mean over samples: the same weights at any number of ranks, and one error where that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import torchelastic
from tests.older_torch import needs_fsdp2_on_cpus
from tests.process.forked_ranks import run_ranks, values
from tests.process.pairs import dies_at_reduction, survivor_of
from torchelastic.data import ElasticBatchSampler, ElasticLoader
from torchelastic.errors import UnfitError
from torchelastic.sharded import ShardedState

SAMPLES, BATCH, LENGTH, WORDS, IGNORED = 44, 12, 6, 5, -100  # the last batch of an epoch has 8
State = torchelastic.ModelState | ShardedState


class Tokens(torch.utils.data.TensorDataset):
    """Sequences of 1 to `LENGTH` tokens, and some of none: those at `empty`."""

    def __init__(self, empty: Sequence[int] = ()) -> None:
        random = torch.Generator().manual_seed(5)
        words = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=random)
        lengths = torch.randint(1, LENGTH + 1, (SAMPLES, 1), generator=random)
        lengths[list(empty)] = 0
        words[torch.arange(LENGTH).expand(SAMPLES, LENGTH) >= lengths] = IGNORED
        super().__init__(torch.randn(SAMPLES, LENGTH, 4, generator=random, dtype=torch.float64), words)


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, WORDS))
    return model.double()


def losses(state: State, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, words = batch
    found = cross_entropy(state.model(inputs).flatten(0, 1), words.flatten(), ignore_index=IGNORED, reduction="sum")
    return found, (words != IGNORED).sum()


def whole(state: State, loader: Any) -> None:
    state.backward(*losses(state, next(loader)))


def in_pieces(state: State, loader: Any) -> None:
    """One global batch, cut into micro batches: of one sample, and the rest."""
    batch = next(loader)
    with state.no_sync():
        state.backward(*losses(state, [part[:1] for part in batch]))
    state.backward(*losses(state, [part[1:] for part in batch]))


def two_batches(state: State, loader: Any) -> None:
    """The last one of an epoch is smaller."""
    batches = [next(loader), next(loader)]
    with state.no_sync():
        state.backward(*losses(state, batches[0]))
    state.backward(*losses(state, batches[1]))


def reduced_twice(state: State, loader: Any) -> None:
    """As people accumulate who do not know of `no_sync`, and as DDP decides that goes by the forward pass."""
    batches = [next(loader), next(loader)]
    first = losses(state, batches[0])
    with state.no_sync():
        state.backward(*first)
    state.backward(*losses(state, batches[1]))


def as_a_sum(state: State, loader: Any) -> None:
    """The counts of all ranks are 1 altogether."""
    found, _ = losses(state, next(loader))
    state.backward(found, state.sampler.weight)


def skipped_by_a_scaler(state: State, loader: Any) -> None:
    """The first of two losses has no optimizer.step(), as where a GradScaler has found infinite gradients."""
    batch = next(loader)
    found, count = losses(state, batch)
    state.backward(found * 100, count / 2)
    state.optimizer.zero_grad()
    state.backward(*losses(state, batch))


def trained(
    step: Callable[[State, Any], None],
    empty: Sequence[int] = (),
    batch: int = BATCH,
    clips_at: float = 0.5,
    **options: Any,
) -> list[list[float]]:
    """Four steps over one epoch; returns the weights."""
    torch.set_num_threads(1)
    dataset, model = Tokens(empty), make_model()
    sampler = ElasticBatchSampler(dataset, batch, seed=3, epochs=2)
    loader = ElasticLoader(dataset, sampler)
    state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.5), sampler=sampler, **options)
    ranked = dist.is_initialized()
    state.sync(dist.get_world_size() if ranked else 1, dist.get_rank() if ranked else 0)
    for _ in range(4):
        state.snapshot()
        state.optimizer.zero_grad()
        step(state, loader)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clips_at)  # sees what is divided already
        state.optimizer.step()
        state.commit()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def expected(
    batches: int, empty: Sequence[int] = (), size: int = BATCH, clips_at: float = 0.5, reduction: str = "mean"
) -> list[list[float]]:
    """What plain torch makes of the global batches, each step of so many of them."""
    dataset, model = Tokens(empty), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sampler = ElasticBatchSampler(dataset, size, seed=3, epochs=2)
    for _ in range(4):
        indices = [index for _ in range(batches) for index in sampler.consume().indices]
        sampler.commit()
        inputs, words = dataset.tensors[0][indices], dataset.tensors[1][indices]
        optimizer.zero_grad()
        logits = model(inputs).flatten(0, 1)
        cross_entropy(logits, words.flatten(), ignore_index=IGNORED, reduction=reduction).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        torch.nn.utils.clip_grad_norm_(model.parameters(), clips_at)
        optimizer.step()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def check(found: Sequence[list[list[float]]], right: list[list[float]]) -> None:
    for weights in found:
        for one, other in zip(weights, right, strict=True):
            assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("step", "batches"),
    [(whole, 1), (in_pieces, 1), (two_batches, 2), (reduced_twice, 2), (skipped_by_a_scaler, 1)],
    ids=["whole", "in pieces", "two batches", "reduced twice", "skipped by a scaler"],
)
def test_a_mean_over_tokens_is_that_of_the_global_batch(
    step: Callable[[State, Any], None], batches: int, ranks: int
) -> None:
    check(values(run_ranks(trained, step, ranks=ranks)), expected(batches))


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_sum_is_that_over_the_global_batch(ranks: int) -> None:
    found = values(run_ranks(trained, as_a_sum, (), 6, 1e9, ranks=ranks))
    check(found, expected(1, (), 6, clips_at=1e9, reduction="sum"))


def nan_where_nothing_counts(state: State, loader: Any) -> None:
    """A mean over no token at all is none; and what is padding may be anything."""
    found, count = losses(state, next(loader))
    shares = state.sampler.pending
    is_padding = not shares[0].local_samples
    state.backward(found * (found.detach() / found.detach() if count and not is_padding else torch.nan), count)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("step", [whole, nan_where_nothing_counts])
def test_a_rank_of_whose_samples_nothing_counts_and_one_without_any_contribute_nothing(
    step: Callable[[State, Any], None], ranks: int
) -> None:
    """Two samples in a global batch, of which one has no token now and then; rank 2 has padding."""
    sampler = ElasticBatchSampler(SAMPLES, 2, seed=3)
    empty = [sampler._batch((0, number))[1] for number in (0, 2)]
    check(values(run_ranks(trained, step, empty, 2, ranks=ranks)), expected(1, empty, 2))


def in_shards(state: State, loader: Any) -> None:
    assert isinstance(state, torchelastic.ModelState)
    for batch in state.shards(loader):
        state.backward(*losses(state, batch))


def test_with_logical_shards_they_are_so_bit_for_bit() -> None:
    """Also where a shard has no token, and where a rank has no shard."""
    empty, size = tuple(range(0, SAMPLES, 3)), 3
    runs = [run_ranks(_in_three_shards, empty, size, ranks=ranks) for ranks in (1, 2, 4)]
    found = [weights for run in runs for weights in values(run)]
    assert all(weights == found[0] for weights in found)
    check(found[:1], expected(1, empty, size))


def _in_three_shards(empty: Sequence[int], size: int) -> list[list[float]]:
    return trained(in_shards, empty, size, logical_shards=3)


# --- what is no count, or no one way ----------------------------------------------------------------------------------


def no_count(state: State, loader: Any) -> None:
    loss, _ = losses(state, next(loader))
    state.backward(loss, 0)


def negative_on_one_rank(state: State, loader: Any) -> None:
    loss, count = losses(state, next(loader))
    state.backward(loss, -3 if state._own.counts.rank == 0 else count)


def not_finite(state: State, loader: Any) -> None:
    state.backward(losses(state, next(loader))[0], float("nan"))


def in_two_ways(state: State, loader: Any) -> None:
    batch = next(loader)
    losses(state, batch)[0].mean().backward()  # type: ignore[no-untyped-call]  # torch has no types here
    state.backward(*losses(state, batch))


def in_two_ways_the_other_way_round(state: State, loader: Any) -> None:
    batch = next(loader)
    state.backward(*losses(state, batch))
    losses(state, batch)[0].backward()  # type: ignore[no-untyped-call]  # as above


def in_another_way_on_one_rank(state: State, loader: Any) -> None:
    if state.step and state._own.counts.rank == 0:  # in the first step nobody knows that there are counts
        losses(state, next(loader))[0].backward()  # type: ignore[no-untyped-call]  # as above
    else:
        whole(state, loader)


def all_under_no_sync(state: State, loader: Any) -> None:
    with state.no_sync():
        whole(state, loader)


def no_sum(state: State, loader: Any) -> None:
    state.backward(state.model(next(loader)[0]), 5)


def no_number(state: State, loader: Any) -> None:
    state.backward(losses(state, next(loader))[0], torch.ones(3))


WRONG: dict[Callable[[State, Any], None], str] = {
    no_count: "divides by the count of the global batch, and that is 0",
    negative_on_one_rank: "count",
    not_finite: "got the count nan",
    in_two_ways: "use the same for all losses of a step",
    in_two_ways_the_other_way_round: "use the same for all losses of a step",
    all_under_no_sync: "put all but the last there",
    no_sum: "give the sum as a tensor of one number",
    no_number: "give one number",
}


def refused(step: Callable[[State, Any], None]) -> str:
    try:
        trained(step)
    except UnfitError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("step", WRONG, ids=lambda step: step.__name__)
def test_what_cannot_be_divided_is_one_clear_error_on_every_rank(
    step: Callable[[State, Any], None], ranks: int
) -> None:
    for said in values(run_ranks(refused, step, ranks=ranks)):
        assert WRONG[step] in said


def test_a_rank_that_goes_the_other_way_ends_all_with_one_clear_error() -> None:
    for said in values(run_ranks(refused, in_another_way_on_one_rank, ranks=2)):
        assert "use the same for all losses of a step, on all ranks" in said


# --- a worker is lost, one comes --------------------------------------------------------------------------------------


def survives(folder: Path, salvage: str) -> dict[str, Any]:
    """Rank 0's step fails in the reduction, and is done again by itself alone."""
    state, loader = _salvaging(salvage)
    state.sync(2, 0)
    state._gradients._source._most = 1  # type: ignore[union-attr]  # as after a step
    snapshot = state.snapshot()
    failed = False
    try:
        whole(state, loader)
    except RuntimeError:
        failed = True
    state.apply(snapshot)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder / 'alone'}", rank=0, world_size=1)
    state.sync(1, 0)
    state.snapshot()
    whole(state, loader)
    state.optimizer.step()
    state.commit()
    kept = tuple(state.salvaged or ())
    return {"failed": failed, "kept": kept, "weights": [one.flatten().tolist() for one in state.module.parameters()]}


def _salvaging(salvage: str) -> tuple[torchelastic.ModelState, ElasticLoader]:
    model, dataset = make_model(), Tokens()
    sampler = ElasticBatchSampler(dataset, BATCH, seed=3, epochs=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = torchelastic.ModelState(model, optimizer, sampler=sampler, salvage=salvage)
    return state, ElasticLoader(dataset, sampler)


def discards(folder: Path) -> dict[str, Any]:
    return survives(folder, "discard")


def drops(folder: Path) -> dict[str, Any]:
    return survives(folder, "drop")


def recomputes(folder: Path) -> dict[str, Any]:
    return survives(folder, "recompute")


def dies(_folder: Path, salvage: str) -> None:
    state, loader = _salvaging(salvage)
    state.sync(2, 1)
    dies_at_reduction(1)  # of the tally
    whole(state, loader)


def dies_discarding(folder: Path) -> None:
    dies(folder, "discard")


def dies_dropping(folder: Path) -> None:
    dies(folder, "drop")


def dies_recomputing(folder: Path) -> None:
    dies(folder, "recompute")


@pytest.mark.parametrize(
    ("survivor", "victim", "kept", "samples"),
    [
        (discards, dies_discarding, (), BATCH),
        (drops, dies_dropping, (0, 6, 0, 6), BATCH // 2),
        (recomputes, dies_recomputing, (0, 6, 6, 0), BATCH),
    ],
    ids=["discard", "drop", "recompute"],
)
def test_a_step_that_is_salvaged_divides_by_the_count_of_what_it_has_trained(
    tmp_path: Path, survivor: Any, victim: Any, kept: tuple[int, ...], samples: int
) -> None:
    found = survivor_of(tmp_path, survivor, victim)
    assert found["failed"]
    assert found["kept"] == kept
    dataset, model = Tokens(), make_model()
    indices = list(ElasticBatchSampler(dataset, BATCH, seed=3).consume().indices[:samples])
    inputs, words = dataset.tensors[0][indices], dataset.tensors[1][indices]
    cross_entropy(model(inputs).flatten(0, 1), words.flatten(), ignore_index=IGNORED).backward()  # type: ignore[no-untyped-call]  # as above
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    check([found["weights"]], [parameter.flatten().tolist() for parameter in model.parameters()])


def grown(folder: Path) -> tuple[int, list[list[float]]]:
    """Rank 0 trains a step alone; then a newcomer joins it for one, which has never given a count, and leaves again."""
    rank = dist.get_rank()
    dist.barrier()  # all are connected
    dist.destroy_process_group()
    state, loader = _salvaging("discard")

    def step() -> None:
        state.snapshot()
        state.optimizer.zero_grad()
        whole(state, loader)
        state.optimizer.step()
        state.commit()

    if rank == 0:
        state.sync(1, 0)
        step()
    dist.init_process_group("gloo", init_method=f"file://{folder / 'two'}", rank=rank, world_size=2)
    state.sync(2, rank)
    are_used = state._own.counts.are_used
    step()
    dist.destroy_process_group()
    if rank == 0:
        state.sync(1, 0)
        step()
    assert are_used, "a newcomer does not know that the others exchange counts"
    return state.step, [one.flatten().tolist() for one in state.module.parameters()]


def test_a_newcomer_counts_from_its_first_step_on(tmp_path: Path) -> None:
    (steps, weights), (behind, _) = values(run_ranks(grown, tmp_path, ranks=2))
    assert (steps, behind) == (3, 2)
    dataset, model = Tokens(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sampler = ElasticBatchSampler(dataset, BATCH, seed=3)
    for _ in range(3):
        indices = list(sampler.consume().indices)
        optimizer.zero_grad()
        inputs, words = dataset.tensors[0][indices], dataset.tensors[1][indices]
        cross_entropy(model(inputs).flatten(0, 1), words.flatten(), ignore_index=IGNORED).backward()  # type: ignore[no-untyped-call]  # as above
        optimizer.step()
    check([weights], [parameter.flatten().tolist() for parameter in model.parameters()])


# --- sharded models ---------------------------------------------------------------------------------------------------


def build(mesh: DeviceMesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = make_model()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def trained_in_shards(
    step: Callable[[State, Any], None], empty: Sequence[int] = (), batch: int = BATCH
) -> list[list[float]] | str:
    """The same with a ShardedState; returns the weights, or what was raised."""
    dataset = Tokens(empty)
    sampler = ElasticBatchSampler(dataset, batch, seed=3, epochs=2)
    loader, state = ElasticLoader(dataset, sampler), ShardedState(build, replicas=0, sampler=sampler)
    state.sync()
    for _ in range(4):
        state.snapshot()
        state.optimizer.zero_grad()
        try:
            step(state, loader)
            if step is not in_another_way_on_one_rank:  # which would have other collectives now
                torch.nn.utils.clip_grad_norm_(state.model.parameters(), 0.5)
            state.optimizer.step()
        except UnfitError as error:
            return str(error)
        state.commit()
    parameters: list[Any] = list(state.model.parameters())
    return [parameter.full_tensor().flatten().tolist() for parameter in parameters]


@needs_fsdp2_on_cpus
@pytest.mark.parametrize(
    ("step", "batches"), [(whole, 1), (in_pieces, 1), (two_batches, 2)], ids=["whole", "pieces", "two"]
)
def test_a_mean_over_tokens_is_that_of_the_global_batch_with_a_sharded_model(
    step: Callable[[State, Any], None], batches: int
) -> None:
    check(values(run_ranks(trained_in_shards, step, ranks=2)), expected(batches))


@needs_fsdp2_on_cpus
def test_padding_counts_nothing_with_a_sharded_model() -> None:
    empty = [ElasticBatchSampler(SAMPLES, 2, seed=3)._batch((0, number))[1] for number in (0, 2)]
    check(values(run_ranks(trained_in_shards, whole, empty, 2, ranks=3)), expected(1, empty, 2))


@needs_fsdp2_on_cpus
@pytest.mark.parametrize("step", [no_count, negative_on_one_rank, in_two_ways, all_under_no_sync, no_sum])
def test_what_cannot_be_divided_is_one_clear_error_with_a_sharded_model(step: Callable[[State, Any], None]) -> None:
    for said in values(run_ranks(trained_in_shards, step, ranks=2)):
        assert WRONG[step] in said


@needs_fsdp2_on_cpus
def test_a_rank_that_goes_the_other_way_ends_all_with_one_clear_error_with_a_sharded_model() -> None:
    for said in values(run_ranks(trained_in_shards, in_another_way_on_one_rank, ranks=2)):
        assert "use the same for all losses of a step, on all ranks" in said
