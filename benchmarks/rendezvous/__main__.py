"""What one round of N members costs, beside torch's own rendezvous handlers in the same run; one JSON line for each N.

    python -m benchmarks.rendezvous [--members 2,8,32,128,256,512] [--runs 5] [--peers c10d,etcd-v2]

A real etcd whose writes are forced to disk, and N light-weight members: each is a host of its own (lease, own key, two
watches, one member), many in each of a few processes, where they share one connection to etcd. Measured from the
release of all members to the moment the last one has heard of the running round:

* first: all ask for the first round at once. Before that each host has registered, each peer has its handler.
* again: all ask for the next round at once, because a step failed.
* replace: one member ends, the others hear of it and ask for the next round, and another one comes in its place.

The peers do `first` and `again` (they leave and join again); how one of them would hear of a loss is not measured.
Their store is a c10d TCPStore in memory, or the etcd of the same kind with its v2 API (needs python-etcd). In each run
the peers come right after us. Where a peer needs more than `--limit-s` for a round, that is said, and it is not asked
for larger N. Target: faster at every N, ten times at N >= 128, requests linear in N.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.environment import print_result, summary
from benchmarks.rendezvous import floor, members, peers
from benchmarks.rendezvous.crowd import Answer, Crowd, TooSlowError, elapsed_ms, shares
from torchelastic.rendezvous.server import EtcdServer

START_LIMIT_S = 180.0
#: After the last answer, until the last event on its way to somebody who does not wait for it has been counted.
SETTLE_S = 0.2
#: For the question from which N on the bytes of the rosters matter.
NETWORK_BYTES_PER_S = 10e9 / 8
COUNTED = ("requests", "events", "put_bytes", "delivered_bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=_numbers, default=_numbers("2,8,32,128,256,512"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--peers", default="c10d,etcd-v2", help="empty: none")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=60.0, help="for one round of a peer")
    options = parser.parse_args()
    print_result("rendezvous_floor", **measure_floor())
    gave_up: dict[str, str] = {}
    for name in filter(None, options.peers.split(",")):
        if name == "etcd-v2" and importlib.util.find_spec("etcd") is None:
            gave_up[name] = "python-etcd is not installed: `pip install python-etcd` into a folder on PYTHONPATH"
    for count in options.members:
        print_result(
            "rendezvous", members=count, processes=min(count, options.processes), **measure(count, options, gave_up)
        )


def _numbers(text: str) -> list[int]:
    return sorted(int(number) for number in text.split(","))


def measure_floor() -> dict[str, Any]:
    """One put, and one put until a watch has told of it."""
    with running_etcd() as etcd, Crowd(floor.serve, [(etcd.endpoint,)]) as crowd:
        (answer,) = crowd.ask("measure", START_LIMIT_S)
    return {name: summary(values, 3) for name, values in answer.items()}


def measure(count: int, options: argparse.Namespace, gave_up: dict[str, str]) -> dict[str, Any]:
    """All runs at one N, ours and the peers' by turns.

    Args:
        count: members.
        options: the command line.
        gave_up: which peers are not asked any more, and why; more may come.
    """
    ours = _Figures()
    theirs = {name: _Figures() for name in filter(None, options.peers.split(","))}
    for _ in range(options.runs):
        run_ours(ours, count, options.processes)
        for name in [name for name in theirs if name not in gave_up]:
            try:
                run_peer(theirs[name], name, count, options)
            except TooSlowError as error:
                gave_up[name] = f"a round of {count} members: {error}"
    return {
        "ours": ours.document(count) | _bytes_on_the_network(ours),
        "peers": {
            name: figures.document(count) | ({"gave_up": gave_up[name]} if name in gave_up else {})
            for name, figures in theirs.items()
        },
        "ratios": {name: _ratios(figures, ours) for name, figures in theirs.items()},
    }


class _Figures:
    """What several runs at one N have given."""

    def __init__(self) -> None:
        self.times_ms: defaultdict[str, list[float]] = defaultdict(list)
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.largest_value_bytes = 0
        self.limits_s: dict[str, float] = {}

    def add(self, what: str, time_ms: float, counts: Sequence[Answer]) -> None:
        self.times_ms[what].append(time_ms)
        for part in counts:
            self.largest_value_bytes = max(self.largest_value_bytes, part.pop("largest_value_bytes", 0))
            self.counts[what].update(part)

    def per_round(self, what: str, name: str) -> float:
        return self.counts[what][name] / len(self.times_ms[what])

    def document(self, members: int) -> dict[str, Any]:
        """Times as medians, traffic as means per round."""
        document: dict[str, Any] = {f"{what}_ms": summary(times, 1) for what, times in self.times_ms.items()}
        for what in self.times_ms:
            per_round = {name: round(self.per_round(what, name), 1) for name in COUNTED if self.counts[what][name]}
            for name in ("requests", "events"):
                if name in per_round:
                    per_round[f"{name}_per_member"] = round(per_round[name] / members, 2)
            document[f"{what}_traffic"] = per_round
        if self.largest_value_bytes:
            document["largest_value_bytes"] = self.largest_value_bytes
        return document


def _ratios(theirs: _Figures, ours: _Figures) -> dict[str, Any]:
    """How many times longer the peer takes; a lower bound where it did not end in time."""
    ratios: dict[str, Any] = {}
    for what in ("first", "again"):
        own = summary(ours.times_ms[what])["median"]
        if what in theirs.limits_s:
            ratios[what] = f"> {1000 * theirs.limits_s[what] / own:.0f}"
        elif theirs.times_ms[what]:
            ratios[what] = round(summary(theirs.times_ms[what])["median"] / own, 1)
    return ratios


def _bytes_on_the_network(ours: _Figures) -> dict[str, Any]:
    """How long etcd's network link is busy with the delivery of one re-form: the part of a round that is N squared."""
    seconds = ours.per_round("again", "delivered_bytes") / NETWORK_BYTES_PER_S
    return {"again_delivery_at_10_gbit_ms": round(1000 * seconds, 2)}


# --- one run ----------------------------------------------------------------------------------------------------------


@contextmanager
def running_etcd(options: Sequence[str] = ()) -> Iterator[EtcdServer]:
    """A fresh etcd that forces its writes to disk, as one in production does."""
    with tempfile.TemporaryDirectory() as folder, EtcdServer(Path(folder) / "data", options=options) as etcd:
        yield etcd


def run_ours(figures: _Figures, count: int, processes: int) -> None:
    """A new etcd and new processes; one round of each kind."""
    parts = shares(count, processes)
    with running_etcd() as etcd, Crowd(members.serve, [(etcd.endpoint, part, count) for part in parts]) as crowd:

        def note(what: str, answers: list[Answer]) -> None:
            time.sleep(SETTLE_S)
            figures.add(what, elapsed_ms(answers), crowd.ask("counts", START_LIMIT_S))

        note("start", crowd.ask("start", START_LIMIT_S))
        note("first", crowd.ask("first", START_LIMIT_S))
        note("again", crowd.ask("again", START_LIMIT_S))
        note("replace", crowd.ask("survive", START_LIMIT_S, last="replace"))


def run_peer(figures: _Figures, name: str, count: int, options: argparse.Namespace) -> None:
    """A new store and new processes; raises TooSlowError if a round takes longer than the limit."""
    parts = shares(count, options.processes)
    with _peers_store(name) as port:
        arguments = [(name, port, part, count, options.limit_s) for part in parts]
        with Crowd(peers.serve, arguments) as crowd:
            crowd.ask("load", START_LIMIT_S)
            crowd.ask("host", START_LIMIT_S)
            _without_errors(crowd.ask("start", START_LIMIT_S))
            crowd.ask("counts", START_LIMIT_S)
            for what in ("first", "again"):
                try:
                    answers = _without_errors(crowd.ask("round", options.limit_s))
                except TooSlowError:
                    figures.limits_s[what] = options.limit_s
                    raise
                figures.add(what, elapsed_ms(answers), crowd.ask("counts", START_LIMIT_S))


def _without_errors(answers: list[Answer]) -> list[Answer]:
    errors = [error for answer in answers for error in answer["errors"]]
    if errors:
        raise RuntimeError(f"{len(errors)} peers failed; the first: {errors[0]}")
    return answers


@contextmanager
def _peers_store(name: str) -> Iterator[int]:
    if name == "c10d":  # node 0 serves it
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        yield port
        return
    with running_etcd(("--enable-v2",)) as etcd:
        yield etcd.port


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # for the peers' processes
    main()
