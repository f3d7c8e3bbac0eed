"""Lives of the transformer example, for test_transformer_slurm.py: in this process, and as ranks of a group."""

from __future__ import annotations

import io
import itertools
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch.distributed as dist

from examples.transformer_slurm import train
from examples.transformer_slurm.loss_log import read_losses
from examples.transformer_slurm.make_dataset import write_parquet
from torchelastic.checkpoint.format.disk import REAL_DISK, Disk
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


def calls_of(arguments: list[str], killed: tuple[int, int] | None) -> int:
    """One life of a rank, which kills itself at a call of its disk if it is meant (rank, call); how many it made."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    disk = FaultyDisk(*([kill_at(killed[1])] if killed is not None and killed[0] == rank else []))
    code, _, err = life(arguments, disk)
    assert code == 0, err
    return len(disk.calls)
