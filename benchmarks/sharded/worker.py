"""One worker of the benchmark's job; started by `benchmarks.job.controller.Job`, under `torchelastic run`."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.job import tickets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where events and tickets are")
    parser.add_argument("--model", default="25M")
    parser.add_argument("--workers", type=int, default=4, help="of a full group")
    parser.add_argument("--step-ms", type=float, default=0.0, help="what a full step sleeps besides computing")
    parser.add_argument("--every", type=int, default=1, help="steps from one copy to the next")
    parser.add_argument("--hybrid", type=int, default=0, help="workers that hold one copy of the state together")
    parser.add_argument("--rounds", type=int, default=0, help="measure what copies cost, in so many rounds, and end")
    parser.add_argument("--steps", type=int, default=20, help="of each way of copying in a round")
    options = parser.parse_args()
    tickets.take(options.folder, "import")  # before the imports: they would keep a core busy for seconds
    from benchmarks.sharded.training import train

    train(options)


if __name__ == "__main__":
    main()
