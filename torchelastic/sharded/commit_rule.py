"""Pure: after a group has ended in the middle of a step, which state of the run the ranks that are left go on from.

**One step of a sharded run.** All ranks compute gradients, in collectives of all. Before its optimizer begins, each
rank takes part in one more collective, the *vote*: nobody leaves it before everybody has entered it, and who enters it
has all its gradients, reduced. Then each optimizer changes the rank's own parts, without a message.

So when a group ends, each of its ranks is in one of four phases (`Phase`):

* UNTOUCHED: it has not entered the vote. Its live state is that before the step, k.
* READY: it has entered the vote, and its optimizer has not begun. Its live state is k, and it can compute k + 1 alone.
* DONE: its optimizer has ended. Its live state is k + 1. (After the step has committed it is UNTOUCHED at k + 1.)
* NONE: its optimizer was interrupted in the middle by an error, or it was killed, and it has no live state.

**Claim.** If any rank is DONE at k + 1, no other rank is UNTOUCHED at k. *Proof.* A rank's optimizer begins after the
vote has ended for it, so after every rank has entered the vote; from then on none of them is UNTOUCHED at k.

**Rule.** A state counts as whole if its parts, taken together over the live states and the copies of all ranks that are
left, cover every tensor. The latest whole state is taken. For k + 1, READY ranks count as if they were DONE, provided
that some rank is DONE: they then let their optimizers step before anything is sent.

*Cases*, where a live state is missing after the loss of a rank, unless another rank has the same parts (a replica):

1. Nobody is DONE, nothing is missing: k. The step is repeated, nothing is lost.
2. Somebody is DONE, so all others are READY or NONE (claim); nothing of k + 1 is missing: k + 1. Nothing is repeated.
   What is small and alike on all ranks comes from a rank that has committed k + 1, if there is one.
3. Something of the live states is missing: the latest copy whose parts all exist, c <= k. With `every=1` that is k, or
   k - 1 if the copy of k was still being sent. Steps c + 1 .. k are repeated, with their samples.
4. No copy is whole either: the latest checkpoint; without one the run ends with an error that names what is missing.

A checkpoint is read only where the rendezvous knows of nobody with progress, or of one that has waited as a spare while
others trained. So what was read counts by its step: the spare's copies may be whole, and of long ago.

Some ranks may already have committed k + 1 and begun the next step while others have not: they are UNTOUCHED at k + 1,
which is the same state as DONE at k + 1, and the claim holds for them too.

A group that ends while its ranks are brought in sync leaves more than one live state; see `ShardedState.sync`: each
rank keeps what it had until it knows that all have what they need.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torchelastic.checkpoint.format.regions import Region
from torchelastic.sharded.offers import STORED, Offer, Phase, Version, missing_parts


@dataclass(frozen=True)
class ChosenState:
    """From which state the ranks go on.

    Attributes:
        version: of the state.
        holds: for each rank, which of its holdings are of this state.
        completing: ranks that must let their optimizers step first: their live state becomes this one then.
        source: the first rank that has what goes with the parts, for those that do not.
    """

    version: Version
    holds: tuple[tuple[int, ...], ...]
    completing: frozenset[int]
    source: int


@dataclass(frozen=True)
class NoWholeState:
    """No state is whole.

    Attributes:
        newest: the latest of which there are parts; None: every rank is new.
        missing: of that one, what nobody holds.
    """

    newest: Version | None
    missing: dict[str, tuple[Region, ...]]


def choose(offers: Sequence[Offer], wanted: Collection[str]) -> ChosenState | NoWholeState:
    """Apply the rule above.

    Args:
        offers: of all ranks of the new group.
        wanted: names of tensors without which no state is whole: those of the parameters.

    Returns:
        The choice, the same on every rank.
    """
    newest: NoWholeState | None = None
    first: ChosenState | None = None
    for version in sorted({one.version for offer in offers for one in offer.holdings}, reverse=True):
        is_stored = version.generation == STORED
        if first is not None and not (is_stored and version.step > first.version.step):
            continue
        completing = _completing(offers, version)
        holds = tuple(
            tuple(
                number
                for number, holding in enumerate(offer.holdings)
                if holding.version == version or (holding.is_live and rank in completing)
            )
            for rank, offer in enumerate(offers)
        )
        missing = missing_parts(wanted, offers, holds)
        source = None if missing else _source(offers, holds, completing)
        if source is not None:
            first = ChosenState(version, holds, completing, source)
        newest = newest or NoWholeState(version, missing)
    return first or newest or NoWholeState(None, {})


def _source(offers: Sequence[Offer], holds: Sequence[Sequence[int]], completing: Collection[int]) -> int | None:
    """The first rank that has what goes with the parts.

    Rather one that has committed the step than one whose step has failed after its optimizer: what the user's code does
    after that (a scheduler's step, a list of losses) may be missing there.
    """
    having = [
        (offer.phase is Phase.DONE and offer.holdings[number].is_live, rank)
        for rank, (offer, numbers) in enumerate(zip(offers, holds, strict=True))
        for number in numbers
        if rank not in completing and offer.holdings[number].has_companions
    ]
    return min(having)[1] if having else None


def next_version(version: Version, generation: int, token: int) -> Version:
    """Of the state after one more step, computed in the group of this generation and token."""
    return Version(generation, version.step + 1, token)


def whole_in_copies(offers: Sequence[Offer], wanted: Collection[str]) -> Version | None:
    """The latest state that is whole in the copies alone; None: there is none. Arguments as for `choose`."""
    for version in sorted({each.version for offer in offers for each in offer.holdings if each.is_copy}, reverse=True):
        holds = [
            [number for number, each in enumerate(offer.holdings) if each.is_copy and each.version == version]
            for offer in offers
        ]
        if not missing_parts(wanted, offers, holds):
            return version
    return None


def _completing(offers: Sequence[Offer], version: Version) -> frozenset[int]:
    """READY ranks whose next state this is, if somebody has computed it.

    The generation and token are those of the group that has voted: a rank of it is DONE, or has committed it.
    """
    has_been_computed = any(
        offer.live is not None and offer.live.version == version and offer.phase in (Phase.DONE, Phase.UNTOUCHED)
        for offer in offers
    )
    if not has_been_computed:
        return frozenset()
    return frozenset(
        rank
        for rank, offer in enumerate(offers)
        if offer.phase is Phase.READY
        and offer.live is not None
        and (offer.generation, offer.live.version.step + 1) == (version.generation, version.step)
    )
