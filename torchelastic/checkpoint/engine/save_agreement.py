"""Pure: how the ranks of a group come to publish the same checkpoint, or none: notes, in the background.

For each tier of each save every rank leaves a note: the record of the shard that it has stored, or why it has none.
Rank 0 reads them all and leaves the verdict: the manifest, or why there is none. So each rank reads one note per tier
and only rank 0 as many as there are ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from torchelastic.checkpoint.errors import NotPublishedError
from torchelastic.checkpoint.store.manifest import Manifest, ShardRecord, decode_manifest, encode_manifest
from torchelastic.checkpoint.store.save_id import SaveId
from torchelastic.checkpoint.store.tier import TierContext
from torchelastic.group.notes import Notes

#: The note that says which tiers take part; no tier has this name.
_CHOICE = "which tiers"


class SupersededError(NotPublishedError):
    """The same of a save that a tier had not begun when a newer one came: nothing has failed."""


class SaveAgreement:
    """The notes of one rank of one group; used by the threads of the background. What waits raises `OutOfStepError`.

    Args:
        context: who writes.
        notes: of the group.
    """

    def __init__(self, context: TierContext, notes: Notes) -> None:
        self.context = context
        self._notes = notes
        self._lock = threading.Lock()
        self._posted: list[tuple[SaveId, str]] = []  # on rank 0
        self._ended = self._ended_before = 0  # so many saves

    def end(self, grace_s: float) -> None:
        """The group has ended: nobody is waited for any longer than so many seconds from now; from any thread."""
        self._notes.end(grace_s)

    def lose(self, ranks: Collection[int]) -> None:
        """These ranks are lost, and are not waited for; from any thread."""
        self._notes.lose(ranks)

    def choose_tiers(self, name: SaveId, chosen: list[str] | None) -> list[str]:
        """Which tiers take part: rank 0 says it, the others hear it. Raises: OutOfStepError."""
        if chosen is not None:
            self._post(name, _CHOICE, chosen)
            return chosen
        return [str(tier) for tier in self._notes.wait(f"{name}/{_CHOICE}", 0)]

    def stored(self, name: SaveId, tier: str, record: ShardRecord | None, why_not: str = "") -> None:
        """This rank has stored its shard, or could not; it is done with what was saved there before."""
        words = {"why_not": why_not} if record is None else {"record": asdict(record)}
        self._notes.post(f"{name}/{tier}/{self.context.rank}", words)

    def skip(self, name: SaveId, tier: str, why_not: str) -> None:
        """This rank takes no part; it may still work on what is saved there before."""
        self._notes.post(f"{name}/{tier}/{self.context.rank}", {"why_not": why_not, "declined": True})

    def begin(self, name: SaveId, tier: str) -> None:
        """A tier that works on a thread of its own comes to this save: rank 0 says it, and the others wait for that.

        Raises:
            SupersededError: rank 0 leaves it out there.
            OutOfStepError: rank 0 has not said it.
        """
        if self.context.rank == 0:
            self._post(name, f"{tier}/begins", True)
            return
        words = self._notes.wait(f"{name}/{tier}/begins", 0, 2 * self._notes.timeout_s)
        if words is not True:
            raise SupersededError(words["why_not"])

    def skip_unbegun(self, name: SaveId, tier: str, why_not: str) -> None:
        """This rank has not begun with it in this tier, and will not; nobody does if it is rank 0."""
        words = {"why_not": why_not, "declined": True, "left_out": True}
        if self.context.rank == 0:
            self._post(name, f"{tier}/begins", words)
            for rank in range(1, self.context.world_size):
                self._delete_later(name, f"{tier}/{rank}")  # nobody reads whether they have left it out too
        else:
            self._notes.post(f"{name}/{tier}/{self.context.rank}", words)

    def gather(self, name: SaveId, tier: str, metrics: Mapping[str, float], saved_s: float) -> Manifest:
        """On rank 0: the manifest, once all have stored.

        Raises:
            SupersededError: a rank had not begun it when a newer one came.
            NotPublishedError: a rank could not store its shard; says why.
            OutOfStepError: a rank has said nothing; names it.
        """
        records, not_stored = [], []
        for rank in range(self.context.world_size):  # all of them: nobody writes any more when this one gives up
            key = f"{name}/{tier}/{rank}"
            words = self._notes.wait(key, rank)
            self._notes.delete(key)
            if "record" in words:
                records.append(ShardRecord(**words["record"]))
            else:
                not_stored.append(words)
        if not any("declined" in words for words in not_stored):
            self._delete_old_notes(name, tier)
        if not_stored:
            kind = SupersededError if all("left_out" in words for words in not_stored) else NotPublishedError
            raise kind("; ".join(str(words["why_not"]) for words in not_stored))
        return Manifest(name, self.context.run_id, self.context.world_size, tuple(records), metrics, saved_s)

    def publish(self, name: SaveId, tier: str, manifest: Manifest) -> None:
        """On rank 0: the verdict."""
        self._post(name, tier, {"manifest": encode_manifest(manifest).decode()})

    def abort(self, name: SaveId, tier: str, error: Exception) -> None:
        """On rank 0: the verdict that it is not published."""
        words = {"why_not": str(error) if isinstance(error, NotPublishedError) else f"{type(error).__name__}: {error}"}
        self._post(name, tier, {**words, "left_out": True} if isinstance(error, SupersededError) else words)

    def verdict(self, name: SaveId, tier: str) -> Manifest:
        """On the other ranks: the verdict of rank 0.

        Raises:
            SupersededError: a rank had not begun it when a newer one came.
            NotPublishedError: it is not published.
            OutOfStepError: there is no verdict.
        """
        # rank 0 may wait for others as long as this rank waits for it
        words = self._notes.wait(f"{name}/{tier}", 0, 2 * self._notes.timeout_s)
        if "manifest" not in words:
            raise (SupersededError if "left_out" in words else NotPublishedError)(words["why_not"])
        return decode_manifest(words["manifest"].encode())

    def done(self) -> None:
        """This rank is done with one more save, however it ended, and needs none of its notes; on one thread."""
        self._ended += 1
        if self.context.rank != 0:
            self._notes.post(f"done/{self.context.rank}", self._ended)

    def wait_for_ranks(self, grace_s: float) -> None:
        """At the end of a run: rank 0 has the notes in its process, so it goes last. Raises: OutOfStepError."""
        ended_before, self._ended_before = self._ended_before, self._ended
        if self.context.rank == 0 and self._ended > ended_before:
            for rank in range(1, self.context.world_size):
                self._notes.wait(f"done/{rank}", rank, grace_s, at_least=self._ended)

    def _post(self, name: SaveId, what: str, value: Any) -> None:
        self._notes.post(f"{name}/{what}", value)
        self._delete_later(name, what)

    def _delete_later(self, name: SaveId, what: str) -> None:
        with self._lock:
            self._posted.append((name, what))

    def _delete_old_notes(self, name: SaveId, tier: str) -> None:
        """All ranks have stored this checkpoint in this tier, or failed to: there they are done with older ones."""
        with self._lock:
            ranks = range(1, self.context.world_size)
            there = (_CHOICE, tier, f"{tier}/begins", *(f"{tier}/{rank}" for rank in ranks))
            old = [(save, what) for save, what in self._posted if save < name and what in there]
            self._posted = [one for one in self._posted if one not in old]
        for save, what in old:
            self._notes.delete(f"{save}/{what}")
