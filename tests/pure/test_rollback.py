"""That a run goes back to an older checkpoint: how far, and whose state counts then."""

from __future__ import annotations

from torchelastic.group.rollback import Rollback
from torchelastic.model.rolled_back import standing_after
from torchelastic.rendezvous.records import StateProgress, StateStatus


def test_the_oldest_of_what_ranks_want_is_gone_back_to() -> None:
    newcomer, other = Rollback(), Rollback()
    other.begin(7)
    assert newcomer.agree([newcomer.words, other.words, (5, 3)])
    assert newcomer.words == (5, 3)
    nobody = Rollback()
    assert not nobody.agree([nobody.words, (-1, 4)])
    assert nobody.words == (-1, 0)
    other.ended(3)
    assert other.words == (-1, 3)


def test_of_states_of_before_it_only_fresh_ones_are_what_they_were() -> None:
    fresh = StateProgress.of(StateStatus.INITIAL, 0)
    new, old = (StateProgress.of(StateStatus.COMPLETE, step) for step in (4, 9))
    torn = StateProgress.of(StateStatus.PARTIAL, 0)
    assert standing_after([fresh, new, old], [0, 2, 1]) == [fresh, new, torn]
    assert standing_after([old, new, fresh], [0, 0, 0]) == [old, new, fresh]
