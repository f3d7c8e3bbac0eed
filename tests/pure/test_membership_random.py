"""Random histories of members and a leader: the invariants hold after every event, and in the end there is a round.

The simulator of whole clusters is yet to come; this one checks the decision alone, with a store that never fails.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.few_examples import examples
from tests.simulation.invariants import check_invariants
from torchelastic.rendezvous.protocol import Publish, Wake, advance
from torchelastic.rendezvous.records import Member, Round, RoundState, StateStatus
from torchelastic.rendezvous.view import Event, MembersChanged, RoundPublished, Settings, Tick, View


@dataclass
class Process:
    """A worker as the protocol sees it: its record, and what it has heard of."""

    record: Member
    in_round: int = 0


class World:
    """A leader, its members, and a list of all rounds that were ever published."""

    def __init__(self, minimum: int, maximum: int, multiple_of: int) -> None:
        sizes = Settings(minimum, maximum, last_call_s=3.0, admission_delay_s=0.1, multiple_of=multiple_of)
        self.view = View(sizes)
        self.now_s = 0.0
        self.processes: dict[str, Process] = {}
        self.rounds: list[Round] = []
        self.count = 0

    # --- verbs --------------------------------------------------------------------------------------------------------

    def join(self) -> None:
        self.count += 1
        record = Member(
            f"m{self.count}", f"h{self.count % 2}", f"s:{self.count}", self.view.round.number + 1, arrival=self.count
        )
        self.processes[record.member_id] = Process(record)
        self.feed(MembersChanged((record,)))

    def die(self, name: str) -> None:
        record = replace(self.processes.pop(name).record, departed=True)
        self.feed(MembersChanged((record,)))

    def ask(self, name: str, *, failed: bool) -> None:
        process = self.processes[name]
        record = replace(process.record, ready_for=self.view.round.number + 1, failed=failed)
        process.record = record
        self.feed(MembersChanged((record,)))

    def step(self) -> None:
        """All members of a round that runs commit a step."""
        if self.view.round.state in (RoundState.RUNNING, RoundState.GATHERING):
            for name in self.view.round.roster:
                process = self.processes.get(name)
                if process is not None and process.in_round == self.view.round.number:
                    worth = max(process.record.step, self.view.round.step) + 1
                    process.record = replace(process.record, step=worth, state_status=StateStatus.COMPLETE)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.feed(Tick())

    def feed(self, event: Event) -> None:
        self.view, actions = advance(self.view, event, self.now_s)
        published = 0
        while actions and not isinstance(actions[0], Wake):
            (action,) = actions
            assert isinstance(action, Publish)
            self.take(action.round)
            self.view, actions = advance(self.view, RoundPublished(action.round), self.now_s)
            check_invariants(self.view)
            published += 1
            assert published < 10, "the leader never comes to rest"

    def take(self, new: Round) -> None:
        """Check a round against the one before, then let its members hear of it."""
        old = self.view.round
        assert old.state is not RoundState.CLOSED, "a closed run stays closed"
        assert new.number in (old.number, old.number + 1)
        if new.number > old.number:
            waited_for = [name for name in old.roster if name in self.processes and name not in new.roster]
            ready = [n for n in waited_for if self.processes[n].record.ready_for > old.number]
            assert set(ready) == set(new.spared), f"survivors that were ready are left out: {ready}"
            more = self.view.settings.whole(len(new.roster) + len(ready))
            assert more == len(new.roster), f"{ready} are left out, and {more} could train"
            assert set(waited_for) <= {*new.evicted, *new.spared}
            best = max(self.processes[name].record.progress for name in new.roster)
            assert self.processes[new.roster[0]].record.progress == best, "rank 0 is not a source"
            for name in new.roster:
                process = self.processes[name]
                assert process.record.ready_for > process.in_round, "a member is put in a round that it did not ask for"
                process.in_round = new.number
        else:
            assert new.roster == old.roster
        self.rounds.append(new)

    def settle(self) -> None:
        """Faults are over: whoever is asked to does what a live worker does."""
        for _ in range(12):
            for name in [n for n in self.view.round.evicted if n in self.processes]:
                self.die(name)  # its agent ends it
            for name in list(self.processes):
                in_present = name in self.view.round.roster
                asked = self.view.round.state in (RoundState.BROKEN, RoundState.GATHERING)
                if in_present and asked and self.processes[name].record.ready_for <= self.view.round.number:
                    self.ask(name, failed=self.view.round.state is RoundState.BROKEN)
            self.pass_time(5.0)


actions = st.lists(
    st.tuples(st.sampled_from(["join", "die", "ask", "fail", "step", "time"]), st.integers(0, 9)), max_size=60
)


@settings(max_examples=examples(400), deadline=None)
@given(st.integers(1, 3), st.integers(0, 3), st.integers(1, 3), actions)
# a second one is evicted, and the first has still not asked again
@example(1, 1, 2, [*[("join", 0)] * 4, ("die", 0), ("time", 8), ("ask", 1), ("time", 8)])
def test_any_history_keeps_the_invariants_and_ends_in_a_running_round(
    minimum: int, extra: int, multiple_of: int, history: list[tuple[str, int]]
) -> None:
    assume(Settings(minimum, minimum + extra, multiple_of=multiple_of).usable(minimum + extra))
    world = World(minimum, minimum + extra, multiple_of)
    for verb, number in history:
        names = sorted(world.processes)
        if verb == "join":
            world.join()
        elif verb == "step":
            world.step()
        elif verb == "time":
            world.pass_time(number * 2.0)
        elif names:
            name = names[number % len(names)]
            if verb == "die":
                world.die(name)
            else:
                world.ask(name, failed=verb == "fail")
    world.settle()
    size = world.view.settings.usable(len(world.processes))
    if size:
        assert world.view.round.state is RoundState.RUNNING
        assert len(world.view.round.roster) == size
    else:
        assert world.view.round.state is not RoundState.RUNNING
