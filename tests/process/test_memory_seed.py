"""The code of ML Flashpoint's user guide, with our import lines, on several ranks and hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.older_torch import needs_helper_process
from torchelastic.network.ports import unused_ports

pytestmark = needs_helper_process

GUIDE = Path(__file__).with_name("flashpoint_guide.py")
GUARD = 'if __name__ == "__main__":'

#: After a restart: every rank reads what was saved, and says whether it came from memory.
AGAIN = """
if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    writer, loader, reader = initialize()
    state_dict = {"weight": torch.zeros(2, 3), "step": 0}
    latest = recover(state_dict, CheckpointContainerId(sys.argv[1]), loader, reader, sys.argv[2])
    assert torch.equal(state_dict["weight"], torch.arange(6.0).reshape(2, 3)) and state_dict["step"] == 20
    print("recovered from", latest.name if latest else "long-term storage", flush=True)
    assert loader.wait_for_replicas(30.0)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


def scripts(folder: Path) -> tuple[Path, Path]:
    """The guide, and what is run after a restart."""
    first, again, guide = folder / "guide.py", folder / "again.py", GUIDE.read_text(encoding="utf-8")
    first.write_text(guide)
    again.write_text(guide.partition(GUARD)[0] + AGAIN)
    return first, again


def run(script: Path, bases: Sequence[Path], long_term: Path) -> list[str]:
    """One rank per base; ranks with equal bases are on one host. Returns what each has printed."""
    (port,) = unused_ports("127.0.0.1")
    ranks = []
    for rank, base in enumerate(bases):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(bases)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_FAILURE_DOMAIN": base.parent.name,
        }
        command = [sys.executable, str(script), str(base), str(long_term)]
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    said = [process.communicate(timeout=110) for process in ranks]
    for process, (_, errors) in zip(ranks, said, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [output for output, _ in said]


def hosts(root: Path, number: int) -> list[Path]:
    return [root / f"host-{name}" / "job-145" for name in "abc"[:number]]


def shards(base: Path) -> set[str]:
    return {path.name for path in base.glob("step-000000021.*/shard-*.shard")}


@pytest.mark.long
@pytest.mark.parametrize("number", [2, 3])
def test_what_a_lost_host_had_comes_back_from_its_peer(root: Path, tmp_path: Path, number: int) -> None:
    first, again = scripts(tmp_path)
    bases = hosts(root, number)
    run(first, bases, tmp_path / "long-term")
    everything = set().union(*map(shards, bases))
    assert everything
    # with two hosts one after the other: the replicas were made again in between
    for lost in bases if number == 2 else bases[1:2]:
        shutil.rmtree(lost)
        assert set().union(*map(shards, bases)) == everything
        assert run(again, bases, tmp_path / "long-term") == ["recovered from step-21_ckpt\n"] * number
        assert len([*lost.glob("step-000000021.*/manifest.json")]) == 1


@pytest.mark.long
def test_without_anything_in_memory_the_long_term_checkpoint_is_loaded(root: Path, tmp_path: Path) -> None:
    first, again = scripts(tmp_path)
    (base,) = hosts(root, 1)
    run(first, [base], tmp_path / "long-term")
    shutil.rmtree(base)
    assert run(again, [base], tmp_path / "long-term") == ["recovered from long-term storage\n"]
