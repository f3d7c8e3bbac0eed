"""The course of every life in a journal: what `stretches` draws. One pass over the events, and none is kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torchelastic.ledger.accounts import Account
from torchelastic.ledger.book import Book
from torchelastic.ledger.events import Counted, End, Event, Failure, Join, Loss, Restore, Save
from torchelastic.ledger.journal import Journal
from torchelastic.ledger.life import Life
from torchelastic.report.stretches import Move, Span, Story

#: What these tell may change what other workers' time was.
_ABOUT_OTHERS = (Failure, End, Loss, Restore)


def stories_of(journal: Journal, final: Book) -> dict[str, Story]:
    """By worker.

    Args:
        journal: as it was found.
        final: its book in the end, with what other journals tell of it.
    """
    teller = _Teller(journal.before)
    for event in journal.events:
        teller.take(event)
    teller.finish(final)
    for story in teller.stories.values():
        story.spans.sort(key=lambda span: span.to_ns)
        story.moves.sort(key=lambda move: move.at_ns)
    return dict(teller.stories)


class _Teller:
    """Follows a book from event to event."""

    def __init__(self, before: Book) -> None:
        self.stories: dict[str, Story] = defaultdict(Story)
        self._book = before
        #: since when a worker forms a group anew
        self._forms_since_ns: dict[str, int] = {}
        self._first_join_ns: dict[str, int] = {}
        self._detected: dict[tuple[str, int], int] = {}
        for life in before.lives.values():
            self.stories[life.worker].tallies.append(life.tally)

    def take(self, event: Event) -> None:
        before, self._book = self._book, self._book.after(event)
        life = self._book.lives.get(event.worker)
        if life is not None and isinstance(event, Counted):
            self.stories[event.worker].tallies.append(life.tally)
        if life is not None:
            self._spans(event, life)
        if isinstance(event, _ABOUT_OTHERS):
            self._lost(before.lives, event.at_ns)
            self._noticed(before)

    def finish(self, final: Book) -> None:
        """Last: what is known of failures by now, from other hosts, too; and how long each took to start."""
        self._book = final
        self._noticed(Book())
        for life in final.lives.values():
            ready_ns = life.tally.started_ns + life.tally.totals[Account.START_UP]
            spans = self.stories[life.worker].spans
            spans.append(Span(life.started_ns, ready_ns, Account.START_UP))
            if life.worker in self._first_join_ns:
                spans.append(Span(ready_ns, self._first_join_ns[life.worker], Account.IDLE))

    def _spans(self, event: Event, life: Life) -> None:
        spans = self.stories[event.worker].spans
        if isinstance(event, Failure):
            spans.append(Span(event.at_ns - event.replayed_ns, event.at_ns, Account.REPLAYED))
            self._forms_since_ns[event.worker] = event.at_ns
        elif isinstance(event, Join) and event.is_first:
            self._first_join_ns[event.worker] = event.at_ns
        elif isinstance(event, Join):  # after an agreed stop it is not told when it began
            since_ns = self._forms_since_ns.pop(event.worker, life.started_ns)
            spans.append(Span(since_ns, event.at_ns, Account.RE_FORM))
        elif isinstance(event, Restore):
            spans.append(Span(event.at_ns - event.took_ns, event.at_ns, Account.RESTORE))
        elif isinstance(event, Save):
            spans.append(Span(event.at_ns - event.stall_ns, event.at_ns, Account.SAVE_STALL))

    def _lost(self, before: Mapping[str, Life], at_ns: int) -> None:
        for life in self._book.lives.values():
            known = before.get(life.worker)
            if known is not None and life.lost_ns > known.lost_ns:
                lost_ns = life.lost_ns - known.lost_ns
                self.stories[life.worker].moves.append(Move(at_ns, lost_ns, Account.PRODUCTIVE, Account.REPLAYED))

    def _noticed(self, before: Book) -> None:
        if self._book.noticed is before.noticed:
            return
        for one in self._book.noticed:
            place = (one.failure.worker, one.failure.at_ns)
            more_ns = one.detect_ns - self._detected.get(place, 0)
            if more_ns > 0:
                self._detected[place] = one.detect_ns
                move = Move(one.failure.at_ns, more_ns, Account.REPLAYED, Account.DETECT)
                self.stories[one.failure.worker].moves.append(move)
