"""How the ranks of a group come to publish the same checkpoint, or none: notes in a mailbox, in the background.

For each tier of each save every rank leaves a note: the record of the shard that it has stored, or why it has none.
Rank 0 reads them all and leaves the verdict: the manifest, or why there is none. So each rank reads one note per tier
and only rank 0 as many as there are ranks; nobody takes part in a collective, and nobody waits longer than the bound.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.store.manifest import Manifest, ShardRecord, decode_manifest, encode_manifest
from torchelastic.checkpoint.store.save_id import SaveId
from torchelastic.checkpoint.store.tier import TierContext
from torchelastic.checkpoint.tiered.peers import Mailbox

#: How often a note is looked for that is not there yet: soon at first, then ever more rarely.
FIRST_LOOK_S = 0.002
LAST_LOOK_S = 0.25


class GivenUpError(CheckpointError):
    """A checkpoint is not published in a tier: names the rank and the reason."""


class NotPublishedError(GivenUpError):
    """Rank 0 says that it is not published."""


@dataclass
class Patience:
    """Until when a save may wait for other ranks; shortened when its group has ended. Any thread may look at it.

    Attributes:
        timeout_s: for each note that is waited for.
        until_s: nothing is waited for after that, by the clock.
    """

    timeout_s: float
    until_s: float = float("inf")
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def shorten(self, grace_s: float) -> None:
        """The group has ended: whoever is not done soon may be gone."""
        self.until_s = min(self.until_s, self.monotonic() + grace_s)


class GroupAgreement:
    """The notes of one rank of one group; used on the background thread.

    Args:
        context: who writes.
        mailbox: of the group.
        patience: how long to wait for others.
    """

    def __init__(self, context: TierContext, mailbox: Mailbox, patience: Patience) -> None:
        self.context = context
        self.patience = patience
        self._mailbox = mailbox
        self._dropped_later: list[str] = []
        self._last: SaveId | None = None

    def choose_tiers(self, name: SaveId, chosen: list[str] | None) -> list[str]:
        """Which tiers take part: rank 0 says it, the others hear it. Raises: GivenUpError."""
        key = f"{name}/tiers"
        if chosen is not None:
            self._post(key, json.dumps(chosen).encode())
            self._dropped_later.append(key)
            return chosen
        return [str(tier) for tier in json.loads(self._wait(key, 0))]

    def stored(self, name: SaveId, tier: str, record: ShardRecord | None, why_not: str = "") -> None:
        """This rank has stored its shard, or could not."""
        words = {"why_not": why_not} if record is None else {"record": asdict(record)}
        self._post(f"{name}/{tier}/{self.context.rank}", json.dumps(words).encode())

    def gather(self, name: SaveId, tier: str, metrics: Mapping[str, float], saved_s: float) -> Manifest:
        """On rank 0: the manifest, once all have stored. Raises: GivenUpError if one has not."""
        records, refusals = [], []
        for rank in range(self.context.world_size):  # all of them: nobody writes any more when this one gives up
            key = f"{name}/{tier}/{rank}"
            words = json.loads(self._wait(key, rank))
            self._mailbox.drop(key)
            if "record" in words:
                records.append(ShardRecord(**words["record"]))
            else:
                refusals.append(str(words["why_not"]))
        if refusals:
            raise GivenUpError("; ".join(refusals))
        self._drop_old_notes(name)
        return Manifest(name, self.context.run_id, self.context.world_size, tuple(records), metrics, saved_s)

    def publish(self, name: SaveId, tier: str, manifest: Manifest | None, why_not: str = "") -> None:
        """On rank 0: the verdict."""
        words = {"why_not": why_not} if manifest is None else {"manifest": encode_manifest(manifest).decode()}
        key = f"{name}/{tier}"
        self._post(key, json.dumps(words).encode())
        self._dropped_later.append(key)

    def hear(self, name: SaveId, tier: str) -> Manifest:
        """On the other ranks: the verdict of rank 0.

        Raises:
            NotPublishedError: it is not published.
            GivenUpError: there is no verdict.
        """
        # rank 0 may wait for others as long as this rank waits for it
        words = json.loads(self._wait(f"{name}/{tier}", 0, 2 * self.patience.timeout_s))
        if "manifest" not in words:
            raise NotPublishedError(words["why_not"])
        return decode_manifest(words["manifest"].encode())

    def done(self, name: SaveId) -> None:
        """This rank is done with a save, however it ended, and needs none of its notes any more."""
        if self.context.rank != 0:
            self._post(f"{name}/done/{self.context.rank}", b"1")
        else:
            self._last = name
            self._dropped_later += [f"{name}/done/{rank}" for rank in range(1, self.context.world_size)]

    def see_off(self, grace_s: float) -> None:
        """At the end of a run: rank 0 has the mailbox in its process, so it goes last. Raises: GivenUpError."""
        last, self._last = self._last, None
        if self.context.rank == 0 and last is not None:
            for rank in range(1, self.context.world_size):
                self._wait(f"{last}/done/{rank}", rank, grace_s)

    def _post(self, key: str, words: bytes) -> None:
        try:
            self._mailbox.post(key, words)
        except RuntimeError as error:
            raise GivenUpError(f"the group has ended: rank 0 cannot be reached any more ({error})") from error

    def _wait(self, key: str, rank: int, timeout_s: float | None = None) -> bytes:
        patience, pause_s = self.patience, FIRST_LOOK_S
        timeout_s = patience.timeout_s if timeout_s is None else timeout_s
        until_s = patience.monotonic() + timeout_s
        while True:
            try:
                words = self._mailbox.look(key)
            except RuntimeError as error:
                raise GivenUpError(f"the group has ended: rank 0 cannot be reached any more ({error})") from error
            if words is not None:
                return words
            now_s = patience.monotonic()
            if now_s >= patience.until_s:
                raise GivenUpError(f"the group has ended before rank {rank} had stored or decided anything")
            if now_s >= until_s:
                raise GivenUpError(f"rank {rank} has neither stored nor decided anything for {timeout_s:g} s")
            patience.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_LOOK_S)

    def _drop_old_notes(self, name: SaveId) -> None:
        """All ranks have stored something of this checkpoint, so they are done with those before it."""
        old = [key for key in self._dropped_later if not key.startswith(f"{name}/")]
        for key in old:
            self._mailbox.drop(key)
        self._dropped_later = [key for key in self._dropped_later if key not in set(old)]
