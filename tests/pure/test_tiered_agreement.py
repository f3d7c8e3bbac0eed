"""How the ranks agree by notes: every reason for a checkpoint not to be published reaches everybody."""

from __future__ import annotations

import pytest

from torchelastic.checkpoint.engine.save_agreement import SaveAgreement, SupersededError
from torchelastic.checkpoint.errors import NotPublishedError, OutOfStepError
from torchelastic.checkpoint.store import SaveId, ShardRecord, TierContext
from torchelastic.checkpoint.store.save_id import shard_file_name
from torchelastic.group.notes import Drawer, Notes
from torchelastic.testing.clock import FakeClock

NAME = SaveId(1, 2, 3, 4)


class Rig:
    """A group of ranks around one mailbox, with a clock that only waiting moves."""

    def __init__(self, world_size: int) -> None:
        self.clock, self.region = FakeClock(0.0), Drawer()
        self.ranks = [
            SaveAgreement(
                TierContext("run", 1, 2, rank, world_size),
                Notes(self.region, 10.0, monotonic=self.clock, sleep=self.clock.sleep),
            )
            for rank in range(world_size)
        ]

    def store(self, rank: int, name: SaveId = NAME) -> None:
        self.ranks[rank].stored(name, "disk", record(rank, len(self.ranks)))


def record(rank: int, world_size: int) -> ShardRecord:
    return ShardRecord(rank, shard_file_name(rank, world_size), 100 + rank, f"{rank:032x}")


def test_all_ranks_get_the_manifest_of_all_shards() -> None:
    rig = Rig(3)
    for rank in (2, 0, 1):
        rig.store(rank)
    manifest = rig.ranks[0].gather(NAME, "disk", {"loss": 1.5}, 7.0)
    rig.ranks[0].publish(NAME, "disk", manifest)
    assert manifest.shards == tuple(record(rank, 3) for rank in range(3))
    assert (manifest.metrics["loss"], manifest.saved_s, manifest.run_id) == (1.5, 7.0, "run")
    assert [rig.ranks[rank].verdict(NAME, "disk") for rank in (1, 2)] == [manifest] * 2


def test_rank_0_names_who_has_not_stored() -> None:
    rig = Rig(3)
    rig.store(0)
    rig.store(2)
    with pytest.raises(OutOfStepError, match="rank 1 has neither stored nor decided anything for 10 s"):
        rig.ranks[0].gather(NAME, "disk", {}, 0.0)
    assert 10.0 <= rig.clock() < 11.0


def test_a_rank_that_is_lost_is_not_waited_for_and_what_it_had_said_counts() -> None:
    rig = Rig(3)
    for rank in (0, 1):
        rig.store(rank)
    rig.ranks[0].lose([1, 2])
    with pytest.raises(OutOfStepError, match="rank 2 gives no sign of life any more"):
        rig.ranks[0].gather(NAME, "disk", {}, 0.0)
    assert rig.clock() < 1.0


def test_why_a_rank_could_not_store_is_what_all_are_told() -> None:
    rig = Rig(2)
    rig.store(0)
    rig.ranks[1].stored(NAME, "disk", None, "the disk is full")
    with pytest.raises(NotPublishedError, match="the disk is full"):
        rig.ranks[0].gather(NAME, "disk", {}, 0.0)
    rig.ranks[0].abort(NAME, "disk", NotPublishedError("the disk is full"))
    with pytest.raises(NotPublishedError, match="the disk is full"):
        rig.ranks[1].verdict(NAME, "disk")


def test_who_hears_no_verdict_waits_longer_than_rank_0_and_knows_that_there_was_none() -> None:
    rig = Rig(2)
    with pytest.raises(OutOfStepError, match="rank 0") as caught:
        rig.ranks[1].verdict(NAME, "disk")
    assert not isinstance(caught.value, NotPublishedError)
    assert rig.clock() >= 20.0


def test_when_the_group_has_ended_only_the_grace_is_waited() -> None:
    rig = Rig(2)
    rig.store(0)
    rig.ranks[0].end(1.0)
    with pytest.raises(OutOfStepError, match="the group has ended before rank 1"):
        rig.ranks[0].gather(NAME, "disk", {}, 0.0)
    assert rig.clock() < 2.0


def test_a_mailbox_that_is_gone_is_the_end_of_the_group_with_its_reason() -> None:
    class Gone(Drawer):
        def look(self, key: str) -> bytes | None:
            raise RuntimeError("connection reset by peer")

        def post(self, key: str, words: bytes) -> None:
            raise RuntimeError("connection reset by peer")

    agreement = SaveAgreement(TierContext("run", 1, 2, 1, 2), Notes(Gone(), 10.0))
    for attempt in (lambda: agreement.verdict(NAME, "disk"), lambda: agreement.done()):
        with pytest.raises(OutOfStepError, match=r"rank 0 cannot be reached any more .*connection reset"):
            attempt()


def test_a_save_that_all_have_stored_does_not_fail_because_its_notes_cannot_be_thrown_away() -> None:
    class GivenUp(Drawer):
        def delete(self, key: str) -> None:
            raise RuntimeError("its connection was aborted")

    notes = Notes(GivenUp(), 10.0)
    ranks = [SaveAgreement(TierContext("run", 1, 2, rank, 2), notes) for rank in (0, 1)]
    for rank, agreement in enumerate(ranks):
        agreement.stored(NAME, "disk", record(rank, 2))
    assert len(ranks[0].gather(NAME, "disk", {}, 0.0).shards) == 2


def test_rank_0_chooses_the_tiers() -> None:
    rig = Rig(2)
    assert rig.ranks[0].choose_tiers(NAME, ["memory", "disk"]) == ["memory", "disk"]
    assert rig.ranks[1].choose_tiers(NAME, None) == ["memory", "disk"]


def test_notes_do_not_pile_up() -> None:
    rig = Rig(2)
    left = []
    for generation in range(1, 6):
        name = SaveId(1, 2, generation, generation)
        rig.ranks[0].choose_tiers(name, ["disk"])
        for rank in (0, 1):
            rig.store(rank, name)
        rig.ranks[0].publish(name, "disk", rig.ranks[0].gather(name, "disk", {}, 0.0))
        rig.ranks[1].verdict(name, "disk")
        for rank in (0, 1):
            rig.ranks[rank].done()
        left.append(len(rig.region._notes))
    assert left[0] == left[-1], left


def test_at_the_end_rank_0_waits_for_the_others_to_have_heard_but_not_for_long() -> None:
    rig = Rig(2)
    rig.ranks[0].done()
    with pytest.raises(OutOfStepError, match="rank 1"):
        rig.ranks[0].wait_for_ranks(2.0)
    assert rig.clock() < 3.0
    rig.ranks[0].wait_for_ranks(2.0)
    rig.ranks[0].done()
    rig.ranks[1].done()
    rig.ranks[1].done()
    rig.ranks[0].wait_for_ranks(2.0)
    rig.ranks[1].wait_for_ranks(2.0)
    assert rig.clock() < 3.0


def test_what_rank_0_leaves_out_nobody_begins() -> None:
    rig, newer = Rig(2), SaveId(1, 2, 4, 5)
    rig.ranks[0].skip_unbegun(NAME, "disk", "a newer one has come")
    with pytest.raises(SupersededError, match="a newer one has come"):
        rig.ranks[1].begin(NAME, "disk")
    rig.ranks[0].begin(newer, "disk")
    rig.ranks[1].begin(newer, "disk")
    for rank in (0, 1):
        rig.store(rank, newer)
    rig.ranks[0].gather(newer, "disk", {}, 0.0)
    assert set(rig.region._notes) == {f"{newer}/disk/begins"}


def test_what_another_rank_leaves_out_is_published_by_none_and_is_no_failure() -> None:
    rig = Rig(3)
    rig.ranks[0].begin(NAME, "disk")
    rig.ranks[2].skip_unbegun(NAME, "disk", "a newer one has come")
    for rank in (0, 1):
        rig.store(rank)
    with pytest.raises(SupersededError, match="a newer one has come") as left_out:
        rig.ranks[0].gather(NAME, "disk", {}, 0.0)
    rig.ranks[0].abort(NAME, "disk", left_out.value)
    with pytest.raises(SupersededError, match="a newer one has come"):
        rig.ranks[1].verdict(NAME, "disk")


def test_no_notes_pile_up_where_each_save_fails_and_a_rank_that_declines_still_hears_of_the_one_before() -> None:
    class Counted(Drawer):
        def __init__(self) -> None:
            super().__init__()
            self.there: set[str] = set()

        def post(self, key: str, words: bytes) -> None:
            super().post(key, words)
            self.there.add(key)

        def delete(self, key: str) -> None:
            super().delete(key)
            self.there.discard(key)

    drawer = Counted()
    ranks = [SaveAgreement(TierContext("run", 1, 2, rank, 2), Notes(drawer, 0.1)) for rank in (0, 1)]
    names = [SaveId(1, 2, number, number) for number in range(20)]
    for name in names[:-1]:
        for rank in ranks:
            rank.choose_tiers(name, ["disk"] if rank is ranks[0] else None)
            rank.stored(name, "disk", None, "the disk is full")
        with pytest.raises(NotPublishedError):
            ranks[0].gather(name, "disk", {}, 0.0)
        ranks[0].abort(name, "disk", OSError("the disk is full"))
    assert len(drawer.there) <= 4, sorted(drawer.there)
    ranks[0].stored(names[-1], "disk", record(0, 2))
    ranks[1].skip(names[-1], "disk", "its memory is full")
    with pytest.raises(NotPublishedError, match="its memory is full"):
        ranks[0].gather(names[-1], "disk", {}, 0.0)
    with pytest.raises(NotPublishedError, match="the disk is full"):
        ranks[1].verdict(names[-2], "disk")
