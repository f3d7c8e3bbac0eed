"""Deadlines: simulated ones under our rule and under those of the peers, then real ones of a real job.

    python -m benchmarks.deadlines [--jobs 20] [--deadlines 20] [--seed 1] [--reserve-s 1] [--shortest-s 5] ..

First a table: jobs of several lives whose steps, saves and ends are the same for `IterManager`, and for models of the
rules of velastic and PyRecover (`benchmarks.deadline_traces`, `deadline_rules`). Missed: the share of lives that ended
with trained steps that were not saved (after a SIGTERM that does not say how much time is left: without a save since).
Wasted: the share of all time in which nothing was trained that is kept, the start-up included. `--jobs 0`: no table.

Then two ranks train, hear of their end, save and stop; at the deadline they are killed. `--deadlines 0`: not that. One
job, life after life, each from the checkpoint of the last one (`BCPState`). When both ranks are at work, a file says
when they will be killed, in 5 to 15 s; nothing else does. A deadline is met if the save was durable before it, and the
checkpoint that is found when the job is gone holds every step that was trained. Prints one JSON line; every miss is in
it with the numbers of its decision. `killed_after_the_save`: the interpreter was still busy with its own end, which
takes seconds where the cores are busy. Ends with 1 if fewer than 99 in 100 were met: of 20, if one was not.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.deadline_job import build
from benchmarks.deadline_traces import LIVES, TRACES, table
from benchmarks.environment import print_result, summary
from torchelastic.checkpoint import BCPState
from torchelastic.lifetime import STOPPED_EARLY
from torchelastic.lifetime.sources.detection import METADATA_VARIABLE, TERMINATION_FILE_VARIABLE

RANKS = 2
#: How long the ranks may take until they are at work.
START_S = 120.0
#: The share of deadlines that is to be met.
TARGET = 0.99


@dataclass(frozen=True)
class Attempt:
    """One deadline.

    Attributes:
        number: of the life, from 1 on.
        life_s: from when its end was told until it was killed.
        exit_codes: of the ranks; -9: it was killed.
        ended_before_s: seconds before the deadline at which both ranks had ended by themselves; None: one was killed.
        saved: steps in the checkpoint that was found then; None: there was none.
        said: by the first rank, when it had saved; None: it had not come so far.
    """

    number: int
    life_s: float
    exit_codes: tuple[int, ...]
    ended_before_s: float | None
    saved: int | None
    said: dict[str, Any] | None

    @property
    def is_met(self) -> bool:
        """Whether nothing was lost."""
        said = self.said
        return said is not None and said["given_up_s"] > 0.0 and said["done"] == self.saved

    @property
    def problem(self) -> str:
        """What was not as it should be; "" if it was."""
        if self.said is None:
            return "no save was done when it was killed"
        if self.said["done"] != self.saved:
            return f"{self.said['done']} steps were trained, and the checkpoint holds {self.saved}"
        if not self.is_met:
            return "the save was done at the deadline or later"
        return "" if set(self.exit_codes) == {STOPPED_EARLY} else f"saved, but ended with {list(self.exit_codes)}"


def live(folder: Path, number: int, life_s: float, seed: int, reserve_s: float) -> Attempt:
    """One life of the job; at its end nothing of it is left."""
    life = folder / f"life-{number}"
    life.mkdir()
    environment = {**os.environ, TERMINATION_FILE_VARIABLE: str(life / "end"), METADATA_VARIABLE: "none"}
    words = [sys.executable, "-m", "benchmarks.deadline_job", str(folder)]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(RANKS), str(seed), str(reserve_s), str(life)],
            env=environment,
            stderr=(life / f"stderr-{rank}").open("wb"),
        )
        for rank in range(RANKS)
    ]
    try:
        _wait(ranks, lambda: all((life / f"ready-{rank}").exists() for rank in range(RANKS)), life)
        end_s = time.monotonic() + life_s
        (life / "end.new").write_text(f"{time.time() + life_s:.3f}\n")
        (life / "end.new").rename(life / "end")
        while time.monotonic() < end_s and any(rank.poll() is None for rank in ranks):
            time.sleep(0.005)
        ended_before_s = end_s - time.monotonic()
    finally:
        for rank in ranks:
            rank.kill()
    codes = tuple(rank.wait() for rank in ranks)
    has_ended = ended_before_s > 0.0 and -9 not in codes
    said = json.loads((life / "said").read_text()) if (life / "said").exists() else None
    return Attempt(number, life_s, codes, ended_before_s if has_ended else None, saved_steps(folder), said)


def saved_steps(folder: Path) -> int | None:
    """The steps in the newest checkpoint, which is read as the next life would."""
    model, optimizer = build()
    state = BCPState(model, optimizer, "ddp", lambda: {}, folder / "checkpoint")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it was saved by two ranks, and is read by one
        extra = state.maybe_resume_from_ckpt()
    state.close()
    return None if extra is None else int(extra["done"])


def _wait(ranks: Sequence[subprocess.Popen[bytes]], is_ready: Callable[[], bool], life: Path) -> None:
    limit_s = time.monotonic() + START_S
    while not is_ready():
        if time.monotonic() > limit_s or any(rank.poll() is not None for rank in ranks):
            texts = [(life / f"stderr-{number}").read_text()[-3000:] for number in range(len(ranks))]
            raise SystemExit("the job does not start:\n" + "\n".join(texts))
        time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20, help="simulated jobs of each sort; 0: none")
    parser.add_argument(
        "--trace", choices=list(TRACES), action="append", help="simulate only this one; may be repeated"
    )
    parser.add_argument("--deadlines", type=int, default=20, help="real ones; 0: none")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, which is printed")
    parser.add_argument("--reserve-s", type=float, default=1.0)
    parser.add_argument("--shortest-s", type=float, default=5.0)
    parser.add_argument("--longest-s", type=float, default=15.0)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    if options.jobs:
        logging.getLogger("torchelastic").setLevel(logging.CRITICAL)  # each decision is a warning
        print(f"{options.jobs} jobs of {LIVES} lives each, seed {seed}\n")
        for line in table(options.jobs, seed, names=options.trace or tuple(TRACES)):
            print(line, flush=True)
    return real(options, seed) if options.deadlines else 0


def real(options: argparse.Namespace, seed: int) -> int:
    """The job that is killed, life after life; returns the exit code."""
    draw = random.Random(seed)
    lives = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(1, options.deadlines + 1):
            life_s = draw.uniform(options.shortest_s, options.longest_s)
            life = live(Path(name), number, life_s, seed + number, options.reserve_s)
            lives.append(life)
            given_up = "" if life.said is None else f", {life.said['given_up_s']:.2f} s given up"
            print(f"deadline {number}: {life_s:.1f} s{given_up}; {life.problem or 'met'}", file=sys.stderr)
    met = [life for life in lives if life.is_met]
    given_up_s = [life.said["given_up_s"] for life in met if life.said is not None]
    print_result(
        "deadlines",
        seed=seed,
        ranks=RANKS,
        reserve_s=options.reserve_s,
        deadlines=len(lives),
        met=len(met),
        missed=[{"problem": life.problem, **asdict(life)} for life in lives if not life.is_met],
        killed_after_the_save=sum(life.ended_before_s is None for life in met),
        given_up_s=summary(given_up_s) if given_up_s else None,
        save_s=summary([life.said["save_s"] for life in lives if life.said is not None]) if met else None,
        steps=lives[-1].saved,
    )
    return 0 if len(met) >= TARGET * len(lives) else 1


if __name__ == "__main__":
    sys.exit(main())
