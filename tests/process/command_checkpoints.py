"""Checkpoints of every kind, and `torchelastic checkpoint` in this process, for its tests."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from torchelastic.checkpoint import FileSystemCheckpointManager
from torchelastic.checkpoint.command.main import main
from torchelastic.checkpoint.compat.nvrx.local.names import header_meta
from torchelastic.checkpoint.shards import ShardOf, save_tree
from torchelastic.checkpoint.store import DiskTier, Manifest, SaveId, SealedShard
from torchelastic.checkpoint.store.reading import record_in
from torchelastic.checkpoint.store.save_id import ShardId, shard_file_name
from torchelastic.checkpoint.store.writing import write_manifest

Capture = pytest.CaptureFixture[str]


def add_checkpoint(root: Path, step: int, metrics: Mapping[str, float] | None = None) -> Path:
    """A checkpoint of two ranks: each holds one half of `w`, rank 0 the plain values too."""
    name = SaveId(epoch=1, round=2, generation=step, step=step)
    tier = DiskTier(root)
    root.mkdir(parents=True, exist_ok=True)
    records = []
    for rank in range(2):
        part = ShardOf(torch.full((2, 3), float(step + rank)), (4, 3), (2 * rank, 0))
        state = {"w": part, "lr": 0.1, "rng": list(range(100))}
        save_tree(root / "part", state, meta={"rank": rank})
        records.append(tier.put(SealedShard(name, rank, 2, memoryview((root / "part").read_bytes()))))
        (root / "part").unlink()
    manifest = Manifest(name, "job7", 2, tuple(records), metrics=dict(metrics or {}), saved_s=1000.0 + step)
    tier.commit(manifest)
    return root / name.folder_name


def add_streams(root: Path, count: int) -> None:
    manager = FileSystemCheckpointManager(root)
    for number in range(count):
        checkpoint = manager.create_checkpoint()
        for key in ("default", "metrics"):
            with checkpoint.open_output_stream(key) as stream:
                torch.save({"n": number, "w": torch.ones(300)}, stream)
        checkpoint.commit()


def add_local(
    root: Path, generation: int, ranks: int = 2, holders: int | None = None, states: Sequence[Any] = ()
) -> list[Path]:
    """A save of `LocalCheckpointManager`, here of a state of its own on each rank; on the host of the first ranks."""
    states = states or [{"mine": torch.tensor([rank])} for rank in range(ranks)]
    save = SaveId(1, 1, generation, 10 * generation, f"{generation:08x}")
    folder = root / "session" / save.folder_name
    folder.mkdir(parents=True)
    paths = [folder / shard_file_name(rank, ranks) for rank in range(ranks)]
    for rank, path in enumerate(paths):
        save_tree(path, states[rank], meta=header_meta(ShardId(save, rank, ranks), "session"))
    records = tuple(record_in(path, rank) for rank, path in enumerate(paths))
    write_manifest(folder, Manifest(save, "session", ranks, records, saved_s=1000.0 + generation))
    for path in paths[holders:] if holders is not None else ():
        path.unlink()
    return paths[:holders]


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def run(capsys: Capture, *words: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out, said.err


def lines_of(capsys: Capture, *words: object) -> list[dict[str, Any]]:
    code, out, _ = run(capsys, *words, "--json")
    assert code == 0
    return [json.loads(line) for line in out.splitlines()]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


class Harmful:
    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.target,)
