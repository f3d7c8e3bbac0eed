"""A stream: each sample of an epoch once, whoever reads which shard, and what is said when that cannot be."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import pickle
import resource
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.few_examples import examples
from tests.process.forked_ranks import run_ranks, values
from torchelastic.data import ElasticStream, EpochStream
from torchelastic.data.shares import SecondDeal, second_deals, units_of_rank

#: Functions of a test cannot be pickled, as they must be where worker processes are not forked: by default since 3.14.
FORKED: Any = {"multiprocessing_context": "fork"}


class Placed(Iterator[int]):
    """Knows its place, and nothing else does: a new one needs the position."""

    def __init__(self, shard: int, length: int, place: int) -> None:
        self.shard, self.length, self.place = shard, length, place

    def __next__(self) -> int:
        if self.place >= self.length:
            raise StopIteration
        self.place += 1
        return self.shard * 1000 + self.place - 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}


class Shards:
    """Sample n of shard s is 1000 s + n."""

    def __init__(self, *lengths: int, placed: bool = False, epoch: int | None = None) -> None:
        self.lengths, self.placed, self.epoch = lengths, placed, epoch

    def __call__(self, shard: int, num_shards: int, position: Any) -> Iterator[int]:
        assert num_shards == len(self.lengths)
        if self.placed:
            return Placed(shard, self.lengths[shard], position["place"] if position else 0)
        return iter(range(1000 * shard + position, 1000 * shard + self.lengths[shard]))

    def everything(self) -> list[int]:
        return [1000 * shard + number for shard, length in enumerate(self.lengths) for number in range(length)]


def plain_batches(lengths: Sequence[int], each: int) -> list[list[int]]:
    """What a batch is: so many samples of each shard that has any left, in the order of the shards."""
    batches = []
    for first in range(0, max(lengths), each):
        parts = [range(first, min(first + each, length)) for length in lengths]
        batches.append([1000 * shard + number for shard, part in enumerate(parts) for number in part])
    return batches


def make(*lengths: int, each: int = 2, placed: bool = False, **options: Any) -> ElasticStream:
    return ElasticStream(
        Shards(*lengths, placed=placed), len(lengths), global_batch_size=each * len(lengths), **options
    )


def committed(stream: ElasticStream) -> Iterator[Any]:
    for batch in stream:
        stream.commit()
        yield batch


def rest_of(stream: ElasticStream) -> list[list[int]]:
    return [batch.tolist() for batch in committed(stream)]


@pytest.fixture(params=[0, 2], ids=["in this process", "two workers"])
def workers(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


# --- what comes when ------------------------------------------------------------------------------


@pytest.mark.parametrize("placed", [True, False], ids=["places", "numbers"])
def test_batches_take_as_much_of_each_shard_until_the_last_is_over_epoch_by_epoch(workers: int, placed: bool) -> None:
    lengths = (41, 0, 60, 3)
    stream = make(*lengths, placed=placed, epochs=2, num_workers=workers)
    assert rest_of(stream) == plain_batches(lengths, 2) * 2
    assert (stream.epoch, stream.finished) == (2, True)
    assert next(stream, "end") == "end"
    stream.close()


def test_a_step_that_failed_gets_the_same_batch_again(workers: int) -> None:
    stream = make(9, 40, 5, num_workers=workers)
    found = []
    for step, batch in enumerate(stream):
        if step % 3:
            before = stream.state_dict()
            stream.rollback()
            assert stream.state_dict() == before
            assert stream.pending == ()
            assert next(stream).tolist() == batch.tolist()
        stream.commit()
        found.append(batch.tolist())
    assert found == plain_batches((9, 40, 5), 2)
    stream.close()


def test_several_batches_of_one_step_are_counted_together_over_the_end_of_an_epoch() -> None:
    stream = make(5, 2, epochs=2)
    drawn = [next(stream).tolist() for _ in range(4)]
    assert [share.global_samples for share in stream.pending] == [4, 2, 1, 4]
    assert [(share.epoch, share.number) for share in stream.pending] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert stream.epoch == 0
    stream.rollback()
    assert [next(stream).tolist() for _ in range(4)] == drawn
    stream.commit()
    assert (stream.epoch, stream.number) == (1, 1)


def test_a_stream_without_end_goes_on(workers: int) -> None:
    stream = make(3, 2, epochs=None, num_workers=workers)
    found = [batch.tolist() for batch in itertools.islice(committed(stream), 5)]
    assert found == (plain_batches((3, 2), 2) * 3)[:5]
    assert not stream.finished
    stream.close()


def test_samples_of_any_kind_become_the_same_batch_with_and_without_workers() -> None:
    def rich(shard: int, _num_shards: int, position: int) -> Iterator[dict[str, Any]]:
        for n in range(position, 7):
            yield {"x": torch.full((3,), n), "name": f"{shard}/{n}", "pair": (float(n), [n, torch.tensor(n)])}

    found = []
    for count in (0, 1, 2):
        stream = ElasticStream(rich, 3, global_batch_size=6, num_workers=count, **FORKED)
        found.append([str(batch) for batch in committed(stream)])
        stream.close()
    assert len(found[0]) == 4
    assert found[0] == found[1] == found[2]


def test_a_collate_fn_that_raises_stop_iteration_does_not_end_the_run() -> None:
    with pytest.raises(RuntimeError, match="raised StopIteration, by which samples would be skipped"):
        next(make(5, 5, collate_fn=lambda samples: next(iter(samples[9:]))))


def test_worker_processes_hand_over_more_tensors_than_there_are_descriptors() -> None:
    def tensors(_shard: int, _num_shards: int, position: int) -> Iterator[torch.Tensor]:
        return (torch.tensor([number]) for number in range(position, 4000))

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        stream = ElasticStream(tensors, 2, global_batch_size=400, num_workers=1, collate_fn=torch.cat, **FORKED)
        batches = list(committed(stream))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert torch.cat(batches).tolist() == [
        n for b in range(20) for _ in range(2) for n in range(200 * b, 200 * b + 200)
    ]


# --- state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("placed", [True, False], ids=["places", "numbers"])
def test_a_stream_goes_on_from_any_saved_place_also_with_another_batch_size(placed: bool) -> None:
    lengths = (41, 0, 27, 3)
    stream = make(*lengths, placed=placed)
    everything = sorted(Shards(*lengths).everything())
    seen: list[int] = []
    while not stream.finished:
        state = stream.state_dict()
        for each in (2, 3):
            other = make(*lengths, each=each, placed=placed)
            other.load_state_dict(state)
            assert sorted(seen + [n for batch in rest_of(other) for n in batch]) == everything
        seen += next(stream).tolist()
        stream.commit()


def test_positions_are_taken_now_and_then_and_the_way_from_there_is_read_again() -> None:
    opened: list[Any] = []

    def watched(shard: int, num_shards: int, position: Any) -> Iterator[int]:
        opened.append(position)
        return Shards(100, 100, placed=True)(shard, num_shards, position)

    stream = ElasticStream(watched, 2, global_batch_size=2)
    for _ in range(11):
        next(stream)
        stream.commit()
    assert opened == [0, 0]
    other = ElasticStream(watched, 2, global_batch_size=2)
    other.load_state_dict(stream.state_dict())
    assert next(other).tolist() == next(stream).tolist() == [11, 1011]
    assert opened[2:] == [{"place": 9}] * 2


def test_a_shard_that_stays_is_not_opened_again() -> None:
    opened: list[int] = []

    def watched(shard: int, num_shards: int, position: int) -> Iterator[int]:
        opened.append(shard)
        return Shards(50, 50)(shard, num_shards, position)

    stream = ElasticStream(watched, 2, global_batch_size=4)
    for _ in range(5):
        first = next(stream).tolist()
        stream.set_world(0, 1)
        assert next(stream).tolist() == first
        stream.commit()
    assert opened == [0, 1]


def test_a_pickled_stream_goes_on_from_the_committed_place() -> None:
    stream = make(9, 9)
    next(stream)
    stream.commit()
    assert rest_of(pickle.loads(pickle.dumps(stream))) == plain_batches((9, 9), 2)[1:]


def test_the_random_numbers_of_the_train_step_are_left_alone(workers: int) -> None:
    stream = make(9, 9, num_workers=workers)
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    next(stream)
    assert torch.equal(torch.rand(1), expected)
    stream.close()


# --- worker processes -----------------------------------------------------------------------------


def test_a_killed_worker_process_is_started_again_and_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    others = {process.pid for process in multiprocessing.active_children()}  # of tests before
    stream = make(60, 70, 50, num_workers=2)
    found: list[list[int]] = []
    with caplog.at_level(logging.WARNING):
        while not stream.finished:
            batch = next(stream)
            if len(found) == 20:
                victim = next(one for one in multiprocessing.active_children() if one.pid not in others)
                victim.kill()
                victim.join()  # where torch alone raises
            stream.commit()
            found.append(batch.tolist())
    assert found == plain_batches((60, 70, 50), 2)
    assert "died" in caplog.text
    stream.close()


def test_worker_processes_outlive_rollbacks_epochs_and_other_worlds() -> None:
    others = {process.pid for process in multiprocessing.active_children()}  # of tests before
    stream = make(7, 7, 5, epochs=3, num_workers=2)
    pids = set()
    for step, _ in enumerate(stream):
        pids |= {process.pid for process in multiprocessing.active_children()} - others
        if step % 3:
            stream.rollback()
            stream.set_world(0, 1)
            next(stream)
        stream.commit()
    assert len(pids) == 2
    stream.close()


def test_a_read_that_fails_can_be_tried_again_and_loses_nothing(workers: int) -> None:
    failed = multiprocessing.Event()

    def hiccup(shard: int, num_shards: int, position: int) -> Iterator[int]:
        for number in Shards(20, 20)(shard, num_shards, position):
            if number == 1007 and not failed.is_set():
                failed.set()
                raise OSError("the disk hiccupped")
            yield number

    stream = ElasticStream(hiccup, 2, global_batch_size=4, num_workers=workers, **FORKED)
    found = []
    while not stream.finished:
        try:
            found.append(next(stream).tolist())
        except OSError:
            stream.rollback()
        else:
            stream.commit()
    assert failed.is_set()
    assert found == plain_batches((20, 20), 2)
    stream.close()


# --- a loop that saves the loader itself ----------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_loop_of_epochs_goes_on_behind_what_it_has_trained_however_much_it_takes_ahead(ahead: int) -> None:
    lengths = (7, 0, 10)
    expected = plain_batches(lengths, 2) * 2
    for stop in range(len(expected) + 1):
        trained, state = trained_until(stop, EpochStream(make(*lengths, epochs=2), fetched_ahead=ahead), ahead)
        resumed = EpochStream(make(*lengths, epochs=2), fetched_ahead=ahead)
        resumed.load_state_dict(state)
        assert trained + trained_until(len(expected) - stop, resumed, ahead)[0] == expected, f"stopped after {stop}"


def trained_until(steps: int, loader: EpochStream, ahead: int) -> tuple[list[list[int]], dict[str, int | str]]:
    """A loop that holds so many batches, and trains an epoch's last ones when there are no more."""
    trained: list[list[int]] = []
    while len(trained) < steps:
        batches = iter(loader)
        held = [batch.tolist() for batch in itertools.islice(batches, ahead)]
        while len(trained) < steps:
            held += [batch.tolist() for batch in itertools.islice(batches, 1)]
            if not held:
                break
            trained.append(held.pop(0))
    return trained, loader.state_dict()


def test_an_epoch_that_is_left_early_goes_on_with_what_was_not_trained() -> None:
    loader = EpochStream(make(9), fetched_ahead=1)
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [batch.tolist() for batch in loader] == [[4, 5], [6, 7], [8]]
    assert list(loader) == [], "Lightning looks, before it sees that its epochs are over"
    with pytest.raises(RuntimeError, match="all 1 epochs of the stream are over"):
        next(iter(loader))
    with pytest.raises(ValueError, match="fetched_ahead is 0 or 1"):
        EpochStream(make(9), fetched_ahead=2)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ElasticStream(Shards(1, 1), 2, global_batch_size=5), "=5 must be a multiple of logical_shards=2"),
        (lambda: ElasticStream(Shards(), 0, global_batch_size=5), "start at 1"),
        (lambda: ElasticStream([1, 2], 2, global_batch_size=2), r"a list is no source: .*from_datasets"),  # type: ignore[arg-type]
        (lambda: make(1, 1, num_workers=-1), "num_workers starts at 0"),
        (lambda: make(1, 1, prefetch_batches=0), "prefetch_batches at 1"),
        (lambda: make(1, 1).set_world(0, 3), "3 ranks share 2 logical shards"),
        (lambda: make(1, 1).set_world(2, 2), "rank 2 is not in a world of 2"),
        (lambda: make(1, 1).set_world(0, 2), "shared by 2 ranks, but the default process group has 1"),
        (lambda: make(1, 1).load_state_dict({"epoch": 0}), "not the state of an ElasticStream"),
        (lambda: next(make(0, 0)), "none of the 2 logical shards has a sample in epoch 0"),
    ],
)
def test_what_does_not_go_together_is_named(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


class Unkeepable(Placed):
    def state_dict(self) -> Any:
        return {"seen": {1, 2}}


def test_a_position_that_cannot_be_kept_is_named(workers: int) -> None:
    def unkeepable(shard: int, _num_shards: int, _position: Any) -> Unkeepable:
        return Unkeepable(shard, 99, 0)

    stream = ElasticStream(unkeepable, 2, global_batch_size=2, num_workers=workers, **FORKED)
    with pytest.raises(ValueError, match=r"position of shard 0 cannot be kept: .* Unkeepable holds a set; it may hold"):
        rest_of(stream)
    stream.close()


def state_after(batches: int, *lengths: int) -> dict[str, int | str]:
    stream = make(*lengths)
    for _ in range(batches):
        next(stream)
        stream.commit()
    return stream.state_dict()


def test_an_iterator_that_gives_other_samples_after_a_move_is_named() -> None:
    def shuffled(shard: int, num_shards: int, position: int) -> Iterator[int]:
        numbers = list(Shards(40, 40)(shard, num_shards, 0))
        return iter((numbers if shard == 0 else numbers[::-1])[position:])  # one shard is what it was

    stream = ElasticStream(shuffled, 2, global_batch_size=4)
    stream.load_state_dict(state_after(3, 40, 40))
    with pytest.raises(ValueError, match=r"(?s)shard 1 gives another sample behind its position 2 .*seed what is shuf"):
        next(stream)


@pytest.mark.parametrize("left", [0, 5, 20, 22])
def test_a_source_that_ends_before_its_position_is_named(left: int) -> None:
    stream = make(40, left)
    stream.load_state_dict(state_after(11, 40, 40))
    with pytest.raises(ValueError, match=r"shard 1 ends before its position: 22 samples of it were trained"):
        next(stream)


# --- several ranks --------------------------------------------------------------------------------


def drawn_by_rank(
    lengths: Sequence[int], state: dict[str, int | str] | None, steps: int, placed: bool, **options: int
) -> Any:
    """On each rank: what some steps gave, of which every third was drawn twice, and the state behind them."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    stream = make(*lengths, placed=placed, epochs=2, **options)
    if state is not None:
        stream.load_state_dict(state)
    stream.set_world(rank, world)
    found = []
    for step, batch in enumerate(itertools.islice(stream, steps)):
        (share,) = stream.pending
        if step % 3 == 2:
            stream.rollback()
            assert next(stream).tolist() == batch.tolist()
        units = stream.pending_units()
        assert options or {shard for shard, _ in units} <= set(units_of_rank(len(lengths), rank, world))
        assert set(dict(units)) <= set(stream.present_units)
        found.append((batch.tolist(), share.local_samples, share.global_samples, stream.weight))
        stream.commit()
    return found, stream.state_dict()


@pytest.mark.parametrize("placed", [True, False], ids=["places", "numbers"])
def test_any_number_of_ranks_share_the_same_batches_and_one_takes_over_where_another_stopped(placed: bool) -> None:
    lengths = (9, 0, 31, 4, 22)
    expected = plain_batches(lengths, 2) * 2
    state, step = None, 0
    for world in (3, 1, 4, 2, 5):
        answers = values(run_ranks(drawn_by_rank, lengths, state, 7, placed, ranks=world))
        assert len({str(after) for _, after in answers}) == 1, "every rank knows the place of every shard"
        for shares in zip(*(found for found, _ in answers), strict=True):
            counted = [n for batch, local, _, _ in shares if local for n in batch]
            assert counted == expected[step], f"step {step} of {world} ranks"
            for batch, local, total, weight in shares:
                assert total == len(expected[step])
                assert weight == local / total
                assert len(batch) == local or (not local and 1 <= len(batch) <= 2), "none of its own: a copy"
            step += 1
        state = answers[0][1]
    assert step == len(expected)


def computed_again_with_enough() -> tuple[list[int], tuple[tuple[int, int, int], ...], int]:
    """Rank 0 has kept shard 0 of a step; the rest, a sample of shard 1 and one of shard 3, is one rank's."""
    rank = dist.get_rank()
    stream = make(3, 3, 0, 1, each=1, min_local_batch=2)
    stream.set_world(rank, 2)
    next(stream)
    stream.rollback()
    stream.deal_again(second_deals([{0}, set()], stream.present_units, "recompute")[rank])
    batch = next(stream).tolist()
    (share,) = stream.pending
    stream.commit()
    assert stream.present_units == (0, 1)
    return batch, share.carried, share.local_samples


def test_a_part_of_a_step_that_is_computed_again_is_no_single_sample_either() -> None:
    (first, carried, of_first), (second, _, of_second) = values(run_ranks(computed_again_with_enough, ranks=2))
    assert carried == ((0, 0, 1),)
    assert (of_first, of_second) == (0, 2)
    assert len(first) == 2, "padding"
    assert second == [1000, 3000]


def drawn_with_enough(lengths: Sequence[int], state: dict[str, int | str] | None, each: int, workers: int) -> Any:
    return drawn_by_rank(lengths, state, 4, placed=True, each=each, min_local_batch=2, num_workers=workers)


@pytest.mark.parametrize(("each", "workers"), [(1, 0), (2, 0), (2, 1)])
def test_no_rank_has_a_single_sample_where_the_batch_has_more_also_near_the_end_of_an_epoch(
    each: int, workers: int
) -> None:
    lengths = (5, 0, 9, 4, 7, 8)
    expected = plain_batches(lengths, each) * 2
    state, step = None, 0
    for world in (3, 1, 4, 2, 6):
        answers = values(run_ranks(drawn_with_enough, lengths, state, each, workers, ranks=world))
        assert len({str(after) for _, after in answers}) == 1, "every rank knows the place of every shard"
        for shares in zip(*(found for found, _ in answers), strict=True):
            counted = [n for batch, local, _, _ in shares if local for n in batch]
            assert counted == expected[step], f"step {step} of {world} ranks"
            for batch, local, total, _ in shares:
                assert total == len(expected[step])
                assert len(batch) >= min(2, total), "too few, or too little padding"
                assert not local or len(batch) == local
            step += 1
        state = answers[0][1]
    assert any(len(one) < len(lengths) * each for one in expected[:step]), "no batch was a smaller one"
    assert step == len(expected)


def second_attempt(mode: str) -> Any:
    """The batch of a first attempt was drawn by both ranks; rank 0 keeps what it has computed, the rest is lost."""
    rank = dist.get_rank()
    stream = make(9, 9, 9, 1)
    stream.set_world(rank, 2)
    for _ in range(2):
        next(stream)
        stream.commit()
    first = next(stream).tolist()
    stream.set_world(rank, 2)
    carried = ((0, 1), ())[rank]
    if mode == "recompute":
        stream.deal_again(SecondDeal(compute=((), (2,))[rank], carried=carried))
    else:
        stream.deal_again(SecondDeal(carried=carried, postponed=(2,)))
    again = next(stream).tolist()
    (share,) = stream.pending
    answer = share.pieces, share.carried, share.global_samples, stream.weight
    stream.commit()
    rest = []
    for batch in stream:
        rest.append(batch.tolist() if stream.weight else [])
        stream.commit()
    return first, again, answer, rest


def test_what_is_left_of_a_lost_rank_is_read_by_another_one_and_nothing_of_it_twice() -> None:
    (first, _, kept, rest), (lost, again, read, others) = values(run_ranks(second_attempt, "recompute", ranks=2))
    assert (first, lost, again) == ([4, 5, 1004, 1005], [2004, 2005], [2004, 2005])
    assert kept == ((), ((0, 4, 2), (1, 4, 2)), 6, 0.0)
    assert read == (((2, 4, 2),), (), 6, 2 / 6)
    assert [a + b for a, b in zip(rest, others, strict=True)] == plain_batches((9, 9, 9, 1), 2)[3:]


def test_what_is_dropped_comes_in_the_batches_after_it() -> None:
    (_, padding, kept, rest), (_, _, read, others) = values(run_ranks(second_attempt, "drop", ranks=2))
    assert len(padding) == 2
    assert kept == ((), ((0, 4, 2), (1, 4, 2)), 4, 0.0)
    assert read == ((), (), 4, 0.0)
    assert [n for batch in others for n in batch] == [2004, 2005, 2006, 2007, 2008]
    assert sorted(n for batch in rest for n in batch) == [6, 7, 8, 1006, 1007, 1008]


def out_of_step() -> str:
    stream = make(9, 9)
    stream.set_world(dist.get_rank(), 2)
    if dist.get_rank() == 0:
        stream.load_state_dict(state_after(1, 9, 9))
    with pytest.raises(RuntimeError) as caught:
        next(stream)
    return str(caught.value)


def test_ranks_that_are_not_at_the_same_batch_are_told() -> None:
    for text in values(run_ranks(out_of_step, ranks=2)):
        assert "not at the same batch" in text


def late_ranks() -> str:
    stream = make(9)
    stream.load_state_dict(state_after(1, 9))
    stream.set_world(dist.get_rank(), 2)
    batch, weight = next(stream).tolist(), stream.weight
    return f"{batch} {weight:g}"


def test_ranks_beyond_the_shards_that_come_in_the_middle_of_a_run_have_nothing_to_read() -> None:
    assert values(run_ranks(late_ranks, ranks=2)) == ["[2, 3] 1", "[0, 1] 0"]


@settings(max_examples=examples(60), deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any),
    each=st.integers(1, 4),
    placed=st.booleans(),
    events=st.lists(st.sampled_from(["commit", "commit", "rollback", "resume", "accumulate"]), max_size=40),
)
def test_whatever_happens_each_sample_of_each_epoch_is_committed_once(
    lengths: list[int], each: int, placed: bool, events: list[str]
) -> None:
    stream = make(*lengths, each=each, placed=placed, epochs=2)
    found: list[int] = []
    pending: list[int] = []
    for event in itertools.chain(events, itertools.repeat("commit")):
        batch = next(stream, None)
        if batch is None and not pending:
            break
        pending += [] if batch is None else batch.tolist()
        if event == "commit":
            stream.commit()
            found += pending
        elif event == "resume":
            state = stream.state_dict()
            stream = make(*lengths, each=each, placed=placed, epochs=2)
            stream.load_state_dict(state)
        elif event == "rollback":
            stream.rollback()
        if event != "accumulate":
            pending = []
    assert found == [n for batch in plain_batches(lengths, each) * 2 for n in batch]
