"""Contract: what one good copy has is never lost, whatever becomes of the others, and is made whole again.

Every way to keep two copies, every damage, in every place: the newest checkpoint of which every shard is good somewhere
is loaded on all ranks with the values that were saved; afterwards the damaged place is whole again, or a warning names
it. Where no good copy is left it is the next older checkpoint, and a line says how many steps that costs; or, without
one, an error or a warning that names what is damaged. `test_damage` is for what lies in one place only.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.copies_ranks import (
    FACADES,
    NEWER,
    OLDER,
    Fault,
    lengths_of,
    read_after_a_bad_sector,
    resume_after,
    resume_without_room,
    save_beside,
    save_steps,
)
from tests.contracts.damages import FOLDER_DAMAGES, HARMLESS, HIDDEN, MANIFEST_DAMAGES, SHARD_DAMAGES, Stored
from tests.few_examples import one_of_each, some_daily
from tests.process.forked_ranks import run_ranks, values

#: Damages after which no file is there.
GONE = ("deleted", "a folder", "a link to nowhere", *FOLDER_DAMAGES)
#: Whose copies are damaged.
WHOSE = ("own", "copy", "both", "all but one")
CASES = [(name, keep, whose) for name, facade in FACADES.items() for keep in facade.keeps for whose in WHOSE]
#: Of every other kind of checkpoint one of these, from kind to kind another one.
DAILY = one_of_each([case for case in CASES if [*FACADES].index(case[0]) % 2], WHOSE[1:] + WHOSE[:1])
OTHER_WORLDS = [(name, world) for name, facade in FACADES.items() for world in facade.world_sizes[1:]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """What was saved by a façade that keeps so many checkpoints, and beside it, an older one."""

    @cache
    def save(name: str, keep: int) -> Path:
        root, ranks = tmp_path_factory.mktemp("saved"), FACADES[name].world_sizes[0]
        values(run_ranks(save_steps, name, root / "older", keep, [OLDER], ranks=ranks))
        values(run_ranks(save_steps, name, root / "saved", keep, [OLDER, NEWER], ranks=ranks))
        return root

    return save


def faults_in(stored: Stored, older: Stored, whose: str) -> list[Fault]:
    """Every damage of one shard, and of a manifest; "all but one": of the first copy of every shard."""
    victim = 1 if len(stored.shards) > 1 else 0
    chosen = {"own": slice(0, 1), "copy": slice(1, None), "both": slice(None), "all but one": slice(0, 1)}[whose]
    shards = stored.shards if whose == "all but one" else {victim: stored.shards[victim]}
    files = [path for copies in shards.values() for path in copies[chosen]]
    others = [_others(path, stored, older) for path in files]
    manifests = sorted(stored.manifests, key=lambda path: path.parts[0] != f"host-{victim}")[chosen]
    of_manifests = [(manifest, older.manifests[0]) for manifest in manifests]
    folders = [manifest.parent for manifest in manifests if manifest.parts[0] != "store"]
    of_folders = of_manifests[: len(folders)]
    impossible = ("another rank's",) if len(stored.shards) == 1 else ()
    return [
        *(Fault(f"{whose}: {damage}", damage, files, others) for damage in SHARD_DAMAGES if damage not in impossible),
        *(Fault(f"{whose}: {damage}", damage, manifests, of_manifests) for damage in MANIFEST_DAMAGES),
        *(Fault(f"{whose}: {damage}", damage, folders, of_folders) for damage in FOLDER_DAMAGES if folders),
    ]


def _others(path: Path, stored: Stored, older: Stored) -> tuple[Path, Path]:
    """What of another rank, and of another save, has its place in a file's folder."""
    shard = int(path.name.split("-")[1])
    return stored.shards[(shard + 1) % len(stored.shards)][0], older.shards[shard][0]


def judged(fault: Fault, told: list[dict[str, Any]], is_left: bool, is_older_left: bool, seen: list[bool]) -> str:
    """What is wrong with what the ranks have told; "" if nothing is.

    Args:
        fault: what was done.
        told: by the ranks; see `resume_after`.
        is_left: whether a good copy of all is left.
        is_older_left: whether an older checkpoint is.
        seen: of the files of the fault, whether the ranks can see what has become of it.
    """
    for one in told:
        assert one["is_hurt"] == [fault.damage not in HARMLESS] * len(fault.files), f"{fault.name} did not happen"
    steps = {one.get("value") for one in told}
    text = "\n".join([*(one.get("error", "") for one in told), *(text for one in told for text in one["warnings"])])
    folder = next(part for part in fault.files[0].parts if part.startswith("step-"))
    if any("AssertionError" in one.get("kinds", []) for one in told):
        return "other values"
    if any("error" in one and "CheckpointError" not in one["kinds"] for one in told):
        return "an error of another kind"
    if len(steps) != 1:
        return "the ranks do not agree"
    if steps == {NEWER}:
        for file, is_whole, is_seen in zip(fault.files, told[0]["whole"], seen, strict=True):
            is_named = f"{file.parent}/" in text or any(
                folder in line and (file.name in line or file.stem in line or f"{_rank_in(file)} of {folder}" in line)
                for line in text.splitlines()
            )
            if not is_whole and is_seen and not is_named:
                return f"{file} is not whole again, and nobody says so"
        return ""
    if is_left:
        return "a good copy was left, and it is not loaded"
    if folder not in text:
        return "nobody names what is damaged"
    if steps == {OLDER} and fault.damage in set(FOLDER_DAMAGES) - {
        "folder of empty files"
    }:  # what was there nobody can look up
        return ""
    if steps == {OLDER}:
        return (
            ""
            if re.search(r"\b[1-9] (step\(s\) are|newer one\(s\): what came after it is) trained again", text)
            else "nobody says what it costs"
        )
    if is_older_left and not any("error" in one for one in told):
        return "an older one was left"
    return ""


def _rank_in(file: Path) -> str:
    return f"the shard of rank {int(file.name.split('-')[1])}" if file.suffix == ".shard" else "nobody"


def _is_seen(fault: Fault, file: Path, *, is_same_world: bool) -> bool:
    """Whether a job that starts can see it without a look at every byte.

    Which copies another number of ranks had on a host nobody knows: such a job lays its copies out anew. A folder of an
    object store without a manifest is what a job leaves that was stopped while it uploaded, and no checkpoint: nobody
    can tell that there was one.
    """
    if file.parts[0] == "store" and fault.damage in ("manifest deleted", "manifest empty"):
        return False
    if fault.damage in GONE and file.parts[0].startswith("host-") and not is_same_world:
        return False
    return fault.damage not in HIDDEN and fault.damage not in HARMLESS


def wrong(name: str, keep: int, root: Path, whose: str, world: int) -> list[str]:
    """What is wrong with a façade after each damage, in words."""
    stored, older = Stored.newest(root / "saved"), Stored.newest(root / "older")
    saved_by = FACADES[name].world_sizes[0]
    hosts = {f"host-{host}" for host in range(max(world, saved_by))} if world >= saved_by else {"host-0"}
    faults = faults_in(stored, older, whose)
    arguments = name, root / "saved", root / "older", saved_by, faults, lengths_of(root / "saved", stored)
    told = values(run_ranks(resume_after, *arguments, ranks=world))
    shutil.rmtree(root / "now", ignore_errors=True)

    def is_there(path: Path) -> bool:
        return not path.parts[0].startswith("host-") or path.parts[0] in hosts

    found = []
    for number, fault in enumerate(faults):
        bad = set() if fault.damage in HARMLESS else set(fault.files)
        places = list(stored.shards.values()) if fault.damage in SHARD_DAMAGES else []
        places = places or [stored.manifests, *stored.shards.values()]
        is_left = all(any(is_there(path) and bad.isdisjoint([path, path.parent]) for path in each) for each in places)
        each = [one[number] for one in told]
        seen = [is_there(path) and _is_seen(fault, path, is_same_world=world == saved_by) for path in fault.files]
        verdict = judged(fault, each, is_left, keep > 1, seen)
        if verdict:
            shown = [{key: one.get(key) for key in ("value", "error", "warnings", "whole")} for one in each]
            found.append(f"{fault.name}: {verdict}: {shown}")
    return found


@pytest.mark.parametrize(("name", "keep", "whose"), some_daily(CASES, DAILY.__contains__))
def test_one_good_copy_is_enough_and_what_is_damaged_is_made_whole_or_named(
    name: str, keep: int, whose: str, saved: Callable[[str, int], Path]
) -> None:
    found = wrong(name, keep, saved(name, keep), whose, FACADES[name].world_sizes[0])
    assert not found, "\n".join(found)


def test_a_shard_for_which_a_host_has_no_room_is_read_where_it_is(tmp_path: Path) -> None:
    values(run_ranks(save_steps, "local", tmp_path, 1, [NEWER], ranks=2))
    (own,) = tmp_path.glob("host-1/step-*/shard-00001-of-00002.shard")
    own.unlink()
    first, second = values(run_ranks(resume_without_room, tmp_path, ranks=2))
    assert (first.get("value"), second.get("value")) == ([NEWER, NEWER], [NEWER, NEWER + 100]), (first, second)
    assert second["refused"], "it had room"
    assert any("cannot be kept on this host, and is read where it is" in text for text in second["warnings"])


def test_a_disk_that_goes_bad_after_the_checkpoint_was_found_costs_the_copy_there(tmp_path: Path) -> None:
    values(run_ranks(save_steps, "memory", tmp_path, 1, [NEWER], ranks=2))
    told = values(run_ranks(read_after_a_bad_sector, tmp_path, ranks=2))
    assert ["error" in one for one in told] == [False, False], told
    assert [one["is_equal"] for one in told] == [True, True]
    assert told[1]["met"], "nobody read there"


@pytest.mark.parametrize("obstacle", ["another user's folder", "bad disk"])
def test_a_save_that_cannot_be_removed_keeps_no_other_from_being_removed(tmp_path: Path, obstacle: str) -> None:
    values(run_ranks(save_steps, "local", tmp_path, 5, [1, 2, 3]))
    (told,) = values(run_ranks(save_beside, tmp_path, obstacle))
    assert told["left"] == ["step-000000001", "step-000000004"]
    is_tried = any("could not be removed" in text for text in told["warnings"])
    assert is_tried == (obstacle == "bad disk"), "what another user has is left alone without a word"


@pytest.mark.long
@pytest.mark.parametrize("whose", WHOSE)
@pytest.mark.parametrize(("name", "world"), OTHER_WORLDS)
def test_the_same_for_another_number_of_ranks(
    name: str, world: int, whose: str, saved: Callable[[str, int], Path]
) -> None:
    keep = FACADES[name].keeps[-1]
    found = wrong(name, keep, saved(name, keep), whose, world)
    assert not found, "\n".join(found)
