"""Lives of the transformer example, for test_transformer_slurm.py: in this process, and as ranks of a group.

As a script it kills processes at calls that a save makes to the disk; see `main`.
"""

from __future__ import annotations

import importlib
import io
import itertools
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples.transformer_slurm import train
from examples.transformer_slurm.loss_log import read_losses
from examples.transformer_slurm.make_dataset import write_parquet
from tests.process.training_state_jobs import run
from torchelastic.checkpoint.shards.disk import REAL_DISK, Disk
from torchelastic.testing.disk_faults import FaultyDisk, kill_at

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "transformer_slurm"
EXPERIMENT = "test"
WORDS = ("save", "resume", "rank", "epoch", "tensor", "shard", "limit", "queue", "the", "of", "a", "is")
LATEST = ("--resume-from-checkpoint", "latest")
PARTS = ("--use-torch-distributed-ckpt",)
TINY = ["--dim", "16", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--hidden", "32"]


def dataset(folder: Path, documents: int = 24) -> Path:
    """A small parquet file of several row groups; documents of different lengths, one of them empty."""
    path = folder / "text.parquet"
    if not path.exists():
        words = itertools.cycle(WORDS)
        texts = [" ".join(itertools.islice(words, (7 * number) % 40)) + str(number) for number in range(documents)]
        texts[3] = ""
        write_parquet(path, texts, rows_per_group=5)
    return path


def command(folder: Path, name: str, steps: int, *more: str) -> list[str]:
    """The arguments of a tiny run, which saves every third step and logs its losses."""
    return [
        *("--dataset", str(dataset(folder)), "--checkpoint-dir", str(folder / name), "--experiment_name", EXPERIMENT),
        *("--sequence-length", "12", "--batch-size", "2", "--vocabulary", "280", "--learning-rate", "3e-3"),
        *("--training-steps", str(steps), "--checkpoint-frequency", "3", "--logging-frequency", "2"),
        *(*TINY, "--log-loss-to-csv", *more),
    ]


def life(arguments: list[str], disk: Disk = REAL_DISK) -> tuple[int, str, str]:
    """Exit code and output of `train.py`, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = train.main(arguments, disk=disk)
    return code, out.getvalue(), err.getvalue()


def losses(folder: Path, name: str) -> dict[int, float]:
    """What the run has logged, each step once."""
    path = folder / name / EXPERIMENT / f"{EXPERIMENT}_loss_log.csv"
    found = read_losses(path)
    assert len(path.read_text().splitlines()) == 1 + len(found), path.read_text()
    return found


def found(folder: Path, name: str) -> list[str]:
    """The names of the checkpoints."""
    return sorted(path.name for path in (folder / name / EXPERIMENT).glob("ckpt_*"))


def finish(arguments: list[str]) -> str:
    """What a life that ends well says."""
    code, out, err = life(arguments)
    assert code == 0, err
    return out


def fail(arguments: list[str]) -> str:
    """What a life that fails says; it is one line."""
    code, _, err = life(arguments)
    assert code == 1
    (line,) = [line for line in err.splitlines() if line.startswith("train.py: error:")]
    return line


def experiment(folder: Path, name: str) -> Path:
    return folder / name / EXPERIMENT


def torn(path: Path, how: str) -> None:
    """Damages a checkpoint of either sort."""
    shard = path if path.is_file() else next(path.glob("shard-*"))
    if how == "cut":
        with shard.open("r+b") as file:
            file.truncate(shard.stat().st_size // 2)
    elif how == "flipped":
        data = bytearray(shard.read_bytes())
        data[-70] ^= 1
        shard.write_bytes(data)
    elif path.is_dir():
        (path / "manifest.json").unlink()
    else:
        shard.write_bytes(b"")


def calls_of(arguments: list[str], killed_at: int | None) -> int:
    """One life, which may kill itself at that call of its disk; how many calls the disk got."""
    disk = FaultyDisk(*([] if killed_at is None else [kill_at(killed_at)]))
    code, _, err = life(arguments, disk)
    assert code == 0, err
    return len(disk.calls)


def main(ranks: int, every: int, scratch: Path, *more: str) -> None:
    """Kills a rank at every `every`-th call that its disk gets in a life; prints how the losses after it compare."""
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # DDP does, which takes a second in each child
    dataset(scratch)
    distributed = ["--distributed"] if ranks > 1 else []

    def run_life(name: str, trial: str, killed: tuple[int, int] | None, *also: str) -> tuple[list[int], list[Any]]:
        arguments = command(scratch, name, 7, *distributed, *more, *also)

        def work() -> int:
            rank = dist.get_rank() if dist.is_initialized() else 0
            return calls_of(arguments, killed[1] if killed is not None and killed[0] == rank else None)

        return run(ranks, scratch / trial, work)

    statuses, calls = run_life("whole", "life", None)
    assert statuses == [0] * ranks, statuses
    whole, outcomes = losses(scratch, "whole"), []
    for rank in range(ranks):
        for call in range(1 + rank % every, calls[rank], every):
            name = f"killed{rank}-{call}"
            killed, _ = run_life(name, f"trial-{name}", (rank, call))
            after, _ = run_life(name, f"after-{name}", None, "--resume-from-checkpoint", "latest")
            outcomes.append(
                {
                    "killed": [rank, call],
                    "statuses": killed,
                    "after": after,
                    "equal": losses(scratch, name) == whole,
                    "left": [path.name for path in (scratch / name / EXPERIMENT).glob(".tmp*")],
                }
            )
    print(json.dumps({"steps": len(whole), "outcomes": outcomes}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
