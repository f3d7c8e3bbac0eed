"""What a newcomer costs the others: from their last step without it to the next committed step with it.

    python -m benchmarks.join [--models 1M,25M] [--joins 7] [--workers 4]

Three workers train; a fourth process, which has imported torch and built its model, asks in, gets the state from one
of them and trains on with them. Then it is killed, and the next one comes.

* stop: from the last committed step of the three (the first of them to have it) to the next one of all four (the last
  to have it), less one undisturbed step of four. What remains without the transfer has to be below 150 ms.
* transfer: from the source's first byte to the newcomer's last, with all that `ModelState` does for it (taking the
  state apart and putting it together). Beside it, in the same group, some steps later, the same number of bytes in one
  piece: by one broadcast from rank 0 to all, and by one message from rank 0 to the newcomer's rank alone, into memory
  that was used before and into fresh memory, whose pages the kernel has to make. (A newcomer needs fresh memory: what
  it holds stays whole until all has arrived.) Target: at least 80 % of the speed of the broadcast.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.environment import print_result, summary
from benchmarks.job.controller import Job

#: Ways to move the same bytes, measured in the same group; see `benchmarks.job.training`.
PLAIN = ("broadcast", "message", "message_into_fresh_memory")
STEPS_BEFORE = 5
STEPS_AFTER = 8
TARGETS = {"stop_without_transfer_ms": 150, "speed_to_broadcast": 0.8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="1M,25M")
    parser.add_argument("--joins", type=int, default=7)
    parser.add_argument("--workers", type=int, default=4, help="with the newcomer")
    parser.add_argument("--step-ms", type=float, default=20.0, help="what a step sleeps besides computing")
    options = parser.parse_args()
    for model in options.models.split(","):
        joins, parameters = run(model, options)
        print_result(
            "join",
            model=model,
            parameters=parameters,
            workers=options.workers,
            **{name: summary([join[name] for join in joins]) for name in joins[0]},
            targets=TARGETS,
        )


def run(model: str, options: argparse.Namespace) -> tuple[list[dict[str, float]], int]:
    spares = min(options.joins, 5)
    with tempfile.TemporaryDirectory() as folder:
        job_options = {"model": model, "step_ms": options.step_ms, "probe": "transfer"}
        with Job(Path(folder), workers=options.workers, spares=spares, **job_options) as job:
            job.warm_up()
            job.allow("join", options.workers)
            joins: list[dict[str, float]] = []
            job.wait_full(steps=STEPS_BEFORE)
            while len(joins) < options.joins:
                job.wait_recovered(job.kill(options.workers - 1))
                job.wait_until(lambda: job.full_group(STEPS_BEFORE, options.workers - 1), "the group without it")
                if not job.warm_spares():
                    job.warm_up()
                job.allow("join", 1)
                joins.append(_figures(job, job.wait_full(steps=STEPS_AFTER)))
            return joins, int(job.read.of("warm")[0]["parameters"])


def _figures(job: Job, number: int) -> dict[str, float]:
    """What the join that began round `number` has cost."""
    first_steps = job.read.of("committed", round=number, number=0)
    newcomer = job.read.of("transfer", round=number, role="stale")[-1]
    old = {event["pid"] for event in first_steps} - {newcomer["pid"]}
    began_s = min(event["t"] for event in first_steps)
    lasts = [max(e["t"] for e in job.read.of("committed", pid=pid) if e["t"] < began_s) for pid in old]
    ended_s = max(event["t"] for event in first_steps)
    plain_ms = statistics.median(e["ms"] for e in job.read.of("committed", round=number) if e["number"] > 4)
    source = job.read.of("transfer", round=number, role="source")[-1]
    transfer_ms = 1000 * (newcomer["ended"] - source["began"])
    plain = {name: job.read.of(name, round=number) for name in PLAIN}
    plain_ways_ms = {
        name: statistics.median(_spans_ms(events, ranks=job.workers if name == "broadcast" else 2))
        for name, events in plain.items()
    }
    stop_ms = 1000 * (ended_s - min(lasts)) - plain_ms
    return {
        "stop_ms": stop_ms,
        "stop_without_transfer_ms": stop_ms - transfer_ms,
        "transfer_ms": transfer_ms,
        "megabytes": plain["broadcast"][0]["bytes"] / 1e6,
        **{f"{name}_ms": ms for name, ms in plain_ways_ms.items()},
        **{f"speed_to_{name}": ms / transfer_ms for name, ms in plain_ways_ms.items()},
        "undisturbed_step_ms": plain_ms,
    }


def _spans_ms(events: list[dict[str, Any]], ranks: int) -> list[float]:
    """Of each repetition, from the first rank's beginning to the last one's end; its events follow each other."""
    groups = [events[start : start + ranks] for start in range(0, len(events), ranks)]
    return [1000 * (max(e["ended"] for e in group) - min(e["began"] for e in group)) for group in groups]


if __name__ == "__main__":
    main()
