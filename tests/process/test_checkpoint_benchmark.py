"""`python -m benchmarks.checkpoint` is fair: equal threads, no removal in what is timed, loads that arrive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.checkpoint.payload import MIB, Payload
from benchmarks.checkpoint.ways import DcpAsync, DcpSave, OursAsync, OursSync, TorchSave, Way, use_threads
from torchelastic.checkpoint.shards import batches

ROOT = Path(__file__).parents[2]
SIZE_MIB = 64
ALL = [OursSync, OursAsync, TorchSave, DcpSave, DcpAsync]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads(), batches.DEFAULT_THREADS
    yield
    torch.set_num_threads(before[0])
    batches.DEFAULT_THREADS = before[1]


@pytest.fixture(scope="module")
def payload() -> Payload:
    return Payload.of(SIZE_MIB, 8)


def held_bytes(folder: Path) -> int:
    """Of all checkpoints that have a name; a slot that waits to be used again has none."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return sum(path.stat().st_size for path in files)


@pytest.mark.parametrize("kind", ALL)
def test_a_save_removes_nothing_and_what_was_tidied_away_is_the_one_before(
    kind: type[Way], payload: Payload, tmp_path: Path
) -> None:
    way = kind(tmp_path / "way", payload)
    (tmp_path / "way").mkdir(exist_ok=True)
    targets = {name: torch.zeros_like(tensor) for name, tensor in payload.tensors.items()}
    places = {name: tensor.data_ptr() for name, tensor in targets.items()}
    for number in range(3):
        payload.change()
        way.save()
        way.wait()
        assert held_bytes(tmp_path) // (SIZE_MIB * MIB) == min(2, number + 1), "the one before is still there"
        way.tidy()
        assert held_bytes(tmp_path) // (SIZE_MIB * MIB) == 1
    way.load(targets)
    assert payload.equals(targets)
    assert {name: tensor.data_ptr() for name, tensor in targets.items()} == places, "loaded into the tensors given"
    way.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_ours_copies_hashes_and_loads_on_as_many_threads_as_all_others_have(
    payload: Payload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    pools: list[int] = []

    class Watched(ThreadPoolExecutor):
        def __init__(self, max_workers: int) -> None:
            pools.append(max_workers)
            super().__init__(max_workers)

    monkeypatch.setattr(batches, "ThreadPoolExecutor", Watched)
    use_threads(threads)
    assert torch.get_num_threads() == threads
    way = OursSync(tmp_path, payload)
    way.save()
    way.tidy()
    way.load({name: torch.zeros_like(tensor) for name, tensor in payload.tensors.items()})
    way.close()
    assert set(pools) == ({threads} if threads > 1 else set())


@pytest.mark.long
def test_the_result_says_how_many_threads_there_were_and_has_one_load_for_each_kind_of_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--sizes=16x4", "--runs=1", f"--folder={tmp_path}"]
    command += ["--ways=ours_sync,ours_async,torch_save,dcp_save,dcp_async"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=True
    ).stdout
    result: dict[str, Any] = json.loads(done.splitlines()[-1])
    assert (result["benchmark"], result["threads"]) == ("checkpoint", 1)
    assert {name for name in result if "load_x" in str(result[name])} == {"ours_sync", "torch_save", "dcp_save"}
