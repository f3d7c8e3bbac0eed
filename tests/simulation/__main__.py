"""`python -m tests.simulation`: search for a history that breaks a promise, or show one again."""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict

from tests.simulation.invariants import InvariantError
from tests.simulation.scale import first_round_and_re_form
from tests.simulation.scenario import Report, explain, run_one_of_many, strike_with_everything


def main() -> int:
    """Exit code 1 if a promise was broken; the last lines say how to see it again."""
    options = command_parser().parse_args()
    logging.disable(logging.CRITICAL)  # the agents' warnings about faults that we make ourselves
    if options.show is not None:
        print(explain(options.show, options.hosts, options.nproc, options.run_events))
        return 1
    if options.members:
        return _large(options)
    return _search(options)


def command_parser() -> argparse.ArgumentParser:
    """What understands the words of this command."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="of the first run, others count up (default: a random one, printed)")
    parser.add_argument("--events", type=int, default=1_000_000, help="simulate so many in all (default 1000000)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so much real time")
    parser.add_argument("--hosts", type=int, default=4, help="at most so many (default 4)")
    parser.add_argument("--nproc", type=int, default=4, help="workers of each host, at most (default 4)")
    parser.add_argument("--run-events", type=int, default=5000, help="of one run, with faults (default 5000)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--show", type=int, metavar="SEED", help="run this one again and print its last events")
    parser.add_argument("--members", type=int, help="instead: one large group, its costs, every fault once")
    return parser


def _search(options: argparse.Namespace) -> int:
    first_seed = secrets.randbelow(10**9) if options.seed is None else options.seed
    began_s, totals, verbs = time.monotonic(), Counter[str](), Counter[str]()
    print(f"seed {first_seed}", flush=True)
    for seed, outcome in _runs(options, first_seed):
        if isinstance(outcome, InvariantError):
            print(outcome)
            print(
                f"see its last events: python -m tests.simulation --show {seed} --hosts {options.hosts} "
                f"--nproc {options.nproc} --run-events {options.run_events}"
            )
            return 1
        totals.update(runs=1, events=outcome.events, requests=outcome.requests, rounds=outcome.rounds)
        totals.update(spared=outcome.spared, commits=outcome.commits, simulated_s=int(outcome.simulated_s))
        verbs.update(outcome.verbs)
        if totals["events"] >= options.events or time.monotonic() - began_s > options.seconds:
            break
    seconds = round(time.monotonic() - began_s, 1)
    print(json.dumps({"seed": first_seed, **totals, "seconds": seconds, "faults": dict(verbs.most_common())}))
    return 0


def _runs(options: argparse.Namespace, first_seed: int) -> Iterator[tuple[int, Report | InvariantError]]:
    """Runs with seeds that count up, on all processes; ends what is left when the caller has seen enough."""
    seeds = iter(range(first_seed, first_seed + 10**9))
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(options.processes, mp_context=context, initializer=logging.disable, initargs=(50,))
    pending: dict[Future[Report], int] = {}
    try:
        while True:
            while len(pending) < 2 * options.processes:
                seed = next(seeds)
                run = pool.submit(run_one_of_many, seed, options.hosts, options.nproc, options.run_events)
                pending[run] = seed
            for done in wait(pending, return_when=FIRST_COMPLETED).done:
                error = done.exception()
                if error is not None and not isinstance(error, InvariantError):
                    raise error
                yield pending.pop(done), error or done.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _large(options: argparse.Namespace) -> int:
    """One large group: the cost of a round with one worker on each host and with several, then all faults."""
    for nproc in {1, options.nproc}:
        began_s = time.monotonic()
        members = options.members // nproc * nproc
        for name, cost in zip(("first round", "re-form"), first_round_and_re_form(members, nproc), strict=True):
            print(json.dumps({"what": name, **asdict(cost)}), flush=True)
        print(json.dumps({"real_seconds": round(time.monotonic() - began_s, 1)}), flush=True)
    seed = secrets.randbelow(10**9) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    began_s = time.monotonic()
    try:
        report = strike_with_everything(seed, hosts=options.members // options.nproc, nproc=options.nproc)
    except InvariantError as error:
        print(error)
        return 1
    print(json.dumps({**report.as_dict(), "real_seconds": round(time.monotonic() - began_s, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
