"""One worker of a benchmark's job; started by `benchmarks.job.controller.Job`, under `torchelastic run`."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.job import tickets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where events and tickets are")
    parser.add_argument("--model", default="1M")
    parser.add_argument("--salvage", default="discard")
    parser.add_argument("--logical-shards", type=int)
    parser.add_argument("--step-ms", type=float, default=0.0, help="what a full step sleeps besides computing")
    parser.add_argument("--workers", type=int, default=4, help="of a full group")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--ledger", action="store_true", help="write down which samples each attempt has computed")
    parser.add_argument("--probe", choices=["all_reduce", "transfer"], help="what to measure in full groups")
    options = parser.parse_args()
    tickets.take(options.folder, "import")  # before the imports: they would keep a core busy for seconds
    from benchmarks.job.training import train

    train(options)


if __name__ == "__main__":
    main()
