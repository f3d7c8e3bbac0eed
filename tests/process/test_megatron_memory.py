"""Megatron's real package, real gloo groups, simulated hosts: each has a failure domain and a folder of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.process.local_ranks import Crew, crew_of, succeeded
from tests.process.memory_saves import same

pytest.importorskip("megatron", reason="megatron-core is not installed")

from tests.process import megatron_ranks as work
from torchelastic.adapters.megatron.loading import HAS_FLATTENED_RANGES

TWO, THREE = "ab", "abc"


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Three processes for all tests."""
    with crew_of(3) as crew:
        crew.run(work.warm_up, ranks=3)
        yield crew


# A model


@pytest.fixture(scope="module")
def killed() -> Iterator[tuple[str, dict[str, dict[str, torch.Tensor]]]]:
    """Two ranks saved a GPTModel through each kind of queue, trained on, and were killed during the next save."""
    kinds = ("temporal", "persistent", "thread")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        with crew_of(2) as doomed:
            doomed.run(work.warm_up, ranks=2)
            answers = {kind: succeeded(doomed.run(work.save_and_train_on, folder, kind, ranks=2)) for kind in kinds}
        yield folder, {kind: work.whole(of_ranks) for kind, of_ranks in answers.items()}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["temporal", "persistent", "thread"])
def test_a_killed_job_goes_on_with_the_values_at_the_call(crew: Crew, killed: Any, kind: str) -> None:
    folder, saved = killed
    answers = succeeded(crew.run(work.load_gpt, f"{folder}/{kind}", ranks=2))
    assert [Path(answer.latest).name for answer in answers] == ["step-1_ckpt"] * 2
    assert same(work.whole([answer.shards for answer in answers]), saved[kind])
    for rank, answer in enumerate(answers):
        assert answer.state["iteration"] == 1
        assert same(answer.state["args"], {"seed": [1, 2], "mean": torch.full((3,), 1.0)})
        assert answer.state["rng"]["rank"] == rank
        assert {"step-1_ckpt/common.pt", "step-1_ckpt/metadata.json"} <= set(answer.files)


# Every kind of state


@pytest.mark.long
@pytest.mark.parametrize("is_fully_parallel", [False, True], ids=["plain", "fully-parallel"])
@pytest.mark.parametrize("hosts", [TWO, THREE])
def test_a_replaced_host_is_served_everything(crew: Crew, root: Path, hosts: str, is_fully_parallel: bool) -> None:
    ranks = len(hosts)
    succeeded(crew.run(work.save_plain, root, hosts, [1.0, 2.0], is_fully_parallel, ranks=ranks))
    expected = succeeded(crew.run(work.expected_plain, 2.0, ranks=ranks))
    work.wipe(root, hosts[-1])
    found = succeeded(crew.run(work.load_plain, root, hosts, is_fully_parallel, ranks=ranks))
    for answer, state in zip(found, expected, strict=True):
        assert Path(answer.latest).name == "step-2_ckpt"
        assert same(answer.state, state), (answer.state, state)
        assert {"step-2_ckpt/common.pt", "step-2_ckpt/metadata.json"} <= set(answer.files)


#: How ML Flashpoint's guide loads, with our import line.
GUIDE = """
from megatron.core import dist_checkpointing as mcore_dist_checkpointing
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from torchelastic.adapters.megatron import MegatronAsyncSaveStrategy, MegatronLoadStrategy

load_strategy = MegatronLoadStrategy(
    replication_manager=replication_manager,
    checkpoint_loader=checkpoint_loader,
)

latest_saved_checkpoint_id = checkpoint_loader.get_latest_complete_checkpoint(checkpoint_base_container)

if latest_saved_checkpoint_id:
    state_dict = mcore_dist_checkpointing.load(
        sharded_state_dict=sharded_state_dict,
        checkpoint_dir=str(latest_saved_checkpoint_id),
        sharded_strategy=load_strategy,
        common_strategy=TorchCommonLoadStrategy(),
    )
else:
    state_dict = mcore_dist_checkpointing.load(
        sharded_state_dict=sharded_state_dict,
        checkpoint_dir=str(long_term_storage_path),
        sharded_strategy=regular_megatron_load_strategy,
        common_strategy=TorchCommonLoadStrategy(),
    )
"""


@pytest.mark.long
def test_the_snippet_of_the_guide_loads_from_memory_or_from_long_term_storage(crew: Crew, root: Path) -> None:
    succeeded(crew.run(work.save_plain, root, TWO, [1.0], ranks=2))
    expected = succeeded(crew.run(work.expected_plain, 1.0, ranks=2))
    succeeded(crew.run(work.save_long_term, root, ranks=2))
    for is_there in (True, False):
        found = succeeded(crew.run(work.load_as_the_guide_says, root, TWO, GUIDE, is_there, ranks=2))
        assert [bool(answer.latest) for answer in found] == [is_there] * 2
        for answer, state in zip(found, expected, strict=True):
            assert same(answer.state, state)


def test_megatrons_own_save_reaches_every_host_too(crew: Crew, root: Path) -> None:
    succeeded(crew.run(work.save_as_megatron_does, root, TWO, "temporal", ranks=2))
    work.wipe(root, "a")
    found = succeeded(crew.run(work.load_plain, root, TWO, ranks=2))
    expected = succeeded(crew.run(work.expected_plain, 1.0, ranks=2))
    for answer, state in zip(found, expected, strict=True):
        assert same(answer.state, {**state, "content_metadata": {"kind": "test"}})


NO_FLATTENED_RANGES = (
    "megatron-core 0.16 has no flattened ranges: `pip install --no-deps megatron-core==0.15.3` in an environment of "
    "its own, then `pytest tests/process/test_megatron_memory.py` there"
)


@pytest.mark.skipif(not HAS_FLATTENED_RANGES, reason=NO_FLATTENED_RANGES)
def test_flattened_ranges_are_loaded_with_another_grid(crew: Crew, root: Path) -> None:
    answers = succeeded(crew.run(work.flattened, root, TWO, ranks=2))
    assert same(torch.cat(answers), torch.arange(24.0))


# What goes wrong


@pytest.mark.long
@pytest.mark.parametrize("kind", ["temporal", "persistent"])
def test_a_save_that_cannot_be_made_is_left_out_and_the_queue_goes_on(crew: Crew, root: Path, kind: str) -> None:
    after = [("step-1_ckpt", 1.0), ("step-1_ckpt", 1.0), ("step-1_ckpt", 1.0), ("step-4_ckpt", 4.0)]
    assert succeeded(crew.run(work.live, root, TWO, kind, ranks=2)) == [after] * 2


def test_an_error_of_one_rank_is_raised_on_all(crew: Crew, root: Path) -> None:
    first, second = succeeded(crew.run(work.program_errors, root, TWO, ranks=2))
    assert "CheckpointError: plan step-1_ckpt failed on rank 1: " in first[0]
    assert "`data` attr is None" in first[0]
    assert "`data` attr is None" in second[0]
    for answer in (first, second):
        assert "save_strategy is a object: give a MegatronAsyncSaveStrategy" in answer[1]
        assert "ValueError" in answer[2], answer[2]
        assert "Invalid access pattern" in answer[3]
        assert answer[4].endswith("step-1_ckpt")


def test_objects_run_nothing_unless_the_user_says_so(crew: Crew, root: Path) -> None:
    for answer in succeeded(crew.run(work.pickled_objects, root, TWO, ranks=2)):
        assert "allow_pickles=True to the MemoryStorageWriter" in answer["refused"]
        assert "allow_pickles=True" in answer["safe"]
        assert answer["trusting"]
        assert "without running code in it" in answer["common"]
        assert answer["megatrons"], "with the variable set, Megatron's own strategy runs it"
        assert "/nowhere/common.pt does not exist" in answer["nowhere"]


# Looking


def test_a_checkpoint_tells_what_is_in_it(crew: Crew, root: Path) -> None:
    succeeded(crew.run(work.save_as_megatron_does, root, TWO, "thread", ranks=2))
    for answer in succeeded(crew.run(work.look_into, root, TWO, ranks=2)):
        assert answer["tensors"] == {
            "rows": ((4, 3), torch.float32),
            "half": ((2, 6), torch.bfloat16),
            "whole": ((5,), torch.float32),
            "layers": ((4, 2), torch.float32),
            "glu.w": ((4, 3), torch.float32),
            "glu.v": ((4, 3), torch.float32),
        }
        objects = ["copied/shard_0_1", "object/shard_0_2", "object/shard_1_2"]
        assert answer["all"] == sorted([*answer["tensors"], *objects])
        assert answer["content"] == {"kind": "test"}
        by_hand, by_load, version, shape, key = answer["refused"]
        assert "'x', and this strategy loads 'other'" in by_hand
        assert "saved with backend 'torchelastic', and this strategy loads 'other'" in by_load
        assert "has version 2 of 'torchelastic', and this strategy reads up to 1" in version
        assert "Global shape mismatch" in shape
        assert "nowhere" in key
        assert answer["unexpected"] == sorted({*answer["tensors"], "copied", "object"} - {"rows"})
