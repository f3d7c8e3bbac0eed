"""What a decision costs the leader: all members of a broken round ask for the next one, and it is formed.

    python -m benchmarks.leader [--members 128,1000,10000] [--runs 5]

The leader's own code (`rendezvous.view`, `rendezvous.protocol`, JSON included) without a store: per event when they
come one at a time and when twelve come at once, as they do while a decision is made. The floor is reading the same
records as JSON. Prints one JSON line per size.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

from benchmarks.environment import print_result, summary
from torchelastic.rendezvous.protocol import Publish, advance
from torchelastic.rendezvous.records import Member, Round, RoundState, decode_member, encode_member, encode_round
from torchelastic.rendezvous.view import MembersChanged, RoundPublished, Settings, Tick, View, absorb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", default="128,1000,10000")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    for count in map(int, options.members.split(",")):
        names = [f"node-{number:05d}.cluster-0-9b7f2c1d1" for number in range(count)]
        members = [Member(name, name[:10], "h:1", 1, arrival=number) for number, name in enumerate(names)]
        values = [encode_member(replace(member, ready_for=2)) for member in members]
        floor = summary([1e6 * read(values) / count for _ in range(options.runs)])
        rounds_ms = {size: [1e3 * form(members, values, size) for _ in range(options.runs)] for size in (1, 12)}
        print_result(
            "leader",
            members=count,
            json_us_per_event=floor,
            round_ms_one_at_a_time=summary(rounds_ms[1]),
            round_ms_twelve_at_once=summary(rounds_ms[12]),
        )


def read(values: list[bytes]) -> float:
    began_s = time.perf_counter()
    for value in values:
        json.loads(value)
    return time.perf_counter() - began_s


def form(members: list[Member], values: list[bytes], size: int) -> float:
    roster = tuple(member.member_id for member in members)
    view = View(Settings(1, len(members)))
    view = absorb(view, MembersChanged(tuple(members)), 0.0)
    view = absorb(view, RoundPublished(Round(1, RoundState.BROKEN, roster, "h:1")), 0.0)
    began_s = time.perf_counter()
    for start in range(0, len(members), size):
        present = tuple(
            decode_member(f"/m/{member.member_id}", value, member.arrival)
            for member, value in zip(members[start : start + size], values[start : start + size], strict=True)
        )
        view = absorb(view, MembersChanged(present), 0.0)
        view, actions = advance(view, Tick(), 0.0)
    (action,) = actions
    assert isinstance(action, Publish)
    assert len(action.round.roster) == len(members)
    encode_round(action.round)
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
