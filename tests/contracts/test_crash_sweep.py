"""Contract: whatever happens to a save at any of its calls to the disk, the checkpoint before is there, or the new one.

A job saves step 1. Another one saves step 2, and is killed at its n-th call, or that call says that the disk is full;
for every n. The job after it finds one of the two, bit for bit, and saves step 3.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.facades import FACADES, Facade, outcome
from tests.contracts.faults import Fault, in_child, numbers, warm_up, with_fault
from torchelastic.checkpoint import CheckpointError
from torchelastic.checkpoint.shards import ShardReader

#: Which share most of their code with one of the others; and those with the most calls.
LONG = ("private disk", "memory tier", "training-memory", "training-durable", "memory", "training", "local")
EACH = [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in FACADES]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder without a slow disk below it, where there is one: what a fault leaves does not depend on the disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@dataclass(frozen=True)
class Swept:
    """What one fault has left.

    Attributes:
        was_killed: the job that saved step 2.
        told: what that job said of its save; None if it was killed.
        found: by the next job.
        then: by the one after that, which had another save before it.
        hidden: files that no reader looks at, at the end.
        torn: shards that have their names and are not whole, before the next job has looked.
    """

    was_killed: bool
    told: Any
    found: Any
    then: Any
    hidden: int
    torn: list[str]


def torn_shards(folder: Path) -> list[str]:
    """The shards that a reader would look at and that are not what they should be."""
    torn = []
    for path in folder.rglob("*.shard"):
        try:
            with ShardReader(path) as shard:
                shard.verify()
        except CheckpointError:
            torn.append(str(path.relative_to(folder)))
    return [name for name in torn if "/.tmp-" not in f"/{name}"]


def sweep(facade: Facade, fault: Fault, place: Path) -> list[Swept]:
    """One fault after the other, until a save has no more calls; each with a copy of what was there before."""
    base, swept = place / "base", []
    warm_up([lambda: facade.save(place / "trial", 1), lambda: facade.resume(place / "trial")])
    assert not in_child(lambda: facade.save(base, 1)).was_killed
    for number in numbers():
        folder = Path(shutil.copytree(base, place / "copy", symlinks=True))
        ended = in_child(with_fault(lambda folder=folder: outcome(lambda: facade.save(folder, 2)), fault, number))  # type: ignore[misc]
        told, has_struck = ended.value or (None, True)
        torn = torn_shards(folder)
        (found, _, then) = in_child(
            lambda folder=folder: [  # type: ignore[misc]
                outcome(lambda: facade.resume(folder)),
                facade.save(folder, 3),
                outcome(lambda: facade.resume(folder)),
            ]
        ).value
        hidden = len([path for path in folder.rglob("*") if path.name.startswith(".tmp-")])
        swept.append(Swept(ended.was_killed, told, found, then, hidden, torn))
        shutil.rmtree(folder)
        if not has_struck:
            return swept
    raise AssertionError("the save has no end")


@pytest.mark.parametrize("name", EACH)
def test_a_save_that_is_killed_at_any_call_leaves_the_checkpoint_before_or_the_new_one(name: str, place: Path) -> None:
    swept = sweep(FACADES[name], "kill", place)
    found = [one.found.get("value") for one in swept]
    assert len(swept) > 8
    assert [one.was_killed for one in swept] == [True] * (len(swept) - 1) + [False]
    # in this order but for a call or two: threads beside the save change the disk as well, not always at the same time
    assert (found[0], found[-1]) == (1, 2)
    assert set(found) == {1, 2}
    assert [one.then.get("value") for one in swept] == [3] * len(swept)
    warned = [text for one in swept for text in one.found["warnings"]]
    assert not [text for text in warned if "damaged" in text], "what is published is whole"
    if "durable" not in name:  # an object store has no rename: what has no manifest is no checkpoint there
        assert [one.torn for one in swept] == [[]] * len(swept), "also where no reader would say so"
    left = swept[-1].hidden  # by a job that was not disturbed, such as slots that are used again
    assert max(one.hidden for one in swept) <= left, "left-overs of the dead are removed"


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in FACADES])
def test_a_disk_that_is_full_at_any_call_costs_that_save_and_no_other(name: str, place: Path) -> None:
    swept = sweep(FACADES[name], "full", place)
    assert len(swept) > 3
    for one in swept:
        assert one.told is not None
        assert "value" in one.told or {"OSError", "ReplicationError"} & set(one.told["kinds"]), one.told
        assert "value" in one.told or "No space left" in one.told["error"], one.told
        assert one.found.get("value") in ((2,) if "value" in one.told else (1, 2)), one
        assert one.then.get("value") == 3
    assert any("error" in one.told for one in swept)
    assert max(one.hidden for one in swept) <= swept[-1].hidden
