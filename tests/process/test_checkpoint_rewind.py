"""A run that has ended goes on from an older checkpoint: `torchelastic checkpoint rewind`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import torchelastic
from tests.contracts.facades import Model, Streamed, weights_at
from tests.process.command_checkpoints import (
    Capture,
    add_checkpoint,
    add_local,
    add_streams,
    flip,
    lines_of,
    names,
    run,
)
from torchelastic.checkpoint import (
    BCPState,
    CheckpointError,
    DiskTier,
    DurableTier,
    EverySteps,
    KeepBest,
    KeepLast,
    MemoryTier,
    TieredCheckpointManager,
)
from torchelastic.checkpoint.api import load_latest, save
from torchelastic.checkpoint.errors import FencedError
from torchelastic.checkpoint.policy import KeepPolicy
from torchelastic.checkpoint.store import SaveId, Tier
from torchelastic.checkpoint.store.rewinds import Rewind
from torchelastic.group.peers import Alone

ALL = KeepLast(100)


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


class Trained(Streamed, torchelastic.State):
    """Weights that say of which step they are."""

    def sync(self, world_size: int, rank: int) -> None: ...

    def snapshot(self) -> object: ...

    def apply(self, snapshot: object) -> None: ...


class Life:
    """One life of a run of one worker: it goes on from the newest checkpoint, and saves each step."""

    def __init__(self, *tiers: Tier) -> None:
        self.state = Trained()
        self.manager = TieredCheckpointManager(tiers, policy=EverySteps(1), run_id="job7")
        self.manager.enter_group(Alone())
        self.began_at = self.manager.restore(self.state, Alone())
        if self.began_at is not None:
            assert torch.equal(self.state.weights, weights_at(self.began_at))

    def train(self, steps: Sequence[int]) -> None:
        for step in steps:
            self.state.weights = weights_at(step)
            self.manager.save_step(self.state, step, Alone())
            self.manager.wait()

    def end(self) -> None:
        self.manager.close()


def own_disk(folder: Path, keep: KeepPolicy) -> DiskTier:
    """Of this host alone."""
    return DiskTier(folder / "own", keep, shared=False, name="own")


def lives(*tiers: Tier, steps: Sequence[int] = ()) -> int | None:
    """A whole life; returns where it began."""
    life = Life(*tiers)
    try:
        life.train(steps)
    finally:
        life.end()
    return life.began_at


def test_a_run_goes_on_from_the_checkpoint_it_was_taken_back_to_and_then_from_what_it_has_saved_since(
    tmp_path: Path, capsys: Capture
) -> None:
    assert lives(DiskTier(tmp_path, ALL), steps=range(1, 7)) is None
    code, out, err = run(capsys, "rewind", tmp_path, "--to", 4)
    assert (code, err) == (0, "")
    assert "step-000000004" in out.splitlines()[0]
    assert "do not count any more: step-000000006" in out
    assert lives(DiskTier(tmp_path, ALL)) == 4
    assert lives(DiskTier(tmp_path, ALL)) == 4, "before it has saved anything it begins there again"
    assert lives(DiskTier(tmp_path, ALL), steps=[5]) == 4
    assert lives(DiskTier(tmp_path, ALL), steps=[6, 7]) == 5, "only what was saved before the rewind is concerned"
    assert run(capsys, "rewind", tmp_path, "--to", 6)[0] == 0, "and once more"
    assert lives(DiskTier(tmp_path, ALL)) == 6


def test_what_does_not_count_goes_with_the_first_save_and_not_before(tmp_path: Path, capsys: Capture) -> None:
    lives(DiskTier(tmp_path, ALL), steps=[1, 2, 3])
    run(capsys, "rewind", tmp_path, "--to", 1)
    lives(DiskTier(tmp_path, ALL))
    assert [one["rewound"] for one in lines_of(capsys, "ls", tmp_path)] == [True, True, False]
    lives(DiskTier(tmp_path, KeepLast(2)), steps=[2])
    assert [(one["step"], one["rewound"]) for one in lines_of(capsys, "ls", tmp_path)] == [(2, False), (1, False)]


def test_whoever_rewinds_again_before_the_run_has_saved_learns_what_the_first_one_left_out(
    tmp_path: Path, capsys: Capture
) -> None:
    lives(DiskTier(tmp_path, ALL), steps=[1, 2, 3, 4])
    run(capsys, "rewind", tmp_path, "--to", 1)
    out = run(capsys, "rewind", tmp_path, "--to", 3)[1].splitlines()
    assert "step-000000001" in out[0]
    assert out[1].startswith("still do not count since an earlier rewind, whose file you may remove: step-000000003")
    assert lives(DiskTier(tmp_path, ALL)) == 1
    min(tmp_path.glob("rewound-*"), key=lambda file: file.name).unlink()
    assert lives(DiskTier(tmp_path, ALL)) == 3


def test_the_command_prunes_them_once_there_is_a_newer_one(tmp_path: Path, capsys: Capture) -> None:
    class Unpruned(DiskTier):
        def prune(self) -> list[SaveId]:
            return []

    lives(Unpruned(tmp_path), steps=[1, 2, 3])
    run(capsys, "rewind", tmp_path, "--to", 1)
    lives(Unpruned(tmp_path), steps=[2])
    out = run(capsys, "prune", tmp_path, "--keep-last", 5)[1].splitlines()
    states = {line.split(":")[0]: line.split(": ")[1].split(" (")[0] for line in out[:-1]}
    assert sorted(states.values()) == ["kept", "kept", "removed", "removed"]
    assert [one["step"] for one in lines_of(capsys, "ls", tmp_path)] == [2, 1]


def test_a_tier_removes_none_of_them_before_there_is_a_newer_one(tmp_path: Path, capsys: Capture) -> None:
    for step in (1, 2, 3):
        add_checkpoint(tmp_path, step)
    run(capsys, "rewind", tmp_path, "--to", 1)
    tier = DiskTier(tmp_path, KeepLast(1))
    assert tier.prune() == []
    tier.close()


def test_without_its_file_everything_counts_again(tmp_path: Path, capsys: Capture) -> None:
    lives(DiskTier(tmp_path, ALL), steps=[1, 2, 3])
    out = run(capsys, "rewind", tmp_path, "--to", 2)[1]
    (file,) = tmp_path.glob("rewound-*")
    assert f"to undo it, remove {file};" in out
    assert "more than 2 steps" in file.read_text()
    file.unlink()
    assert lives(DiskTier(tmp_path, ALL)) == 3


def test_memory_that_is_newer_than_the_place_that_was_rewound_does_not_count_either(
    tmp_path: Path, tmpfs: Path, capsys: Capture
) -> None:
    def tiers() -> list[Tier]:
        return [MemoryTier(tmpfs / "run"), DiskTier(tmp_path / "run", ALL, EverySteps(2))]

    lives(*tiers(), steps=range(1, 6))
    assert [one["step"] for one in lines_of(capsys, "ls", tmpfs / "run")] == [5]
    run(capsys, "rewind", tmp_path / "run", "--to", 2)
    assert lives(*tiers(), steps=[3]) == 2
    assert lives(*tiers()) == 3
    assert [one["step"] for one in lines_of(capsys, "ls", tmpfs / "run")] == [3]


def test_where_nothing_that_counts_is_left_nobody_starts_afresh(tmp_path: Path, tmpfs: Path, capsys: Capture) -> None:
    lives(DiskTier(tmp_path / "disk", ALL), MemoryTier(tmpfs / "run"), steps=[1, 2])
    run(capsys, "rewind", tmp_path / "disk", "--to", 1)
    for folder in (tmp_path / "disk").glob("step-000000001*"):
        folder.rename(tmp_path / folder.name)
    said = r"do not count: the run was rewound, and there is no older one in .*: remove rewound-to-000000001.e2"
    with pytest.raises(CheckpointError, match=said):
        lives(DiskTier(tmp_path / "disk", ALL), MemoryTier(tmpfs / "run"))
    code, _, err = run(capsys, "show", tmp_path / "disk")
    assert code == 2
    assert "rewound: remove the files rewound-to-" in err
    code, _, err = run(capsys, "rewind", tmp_path / "disk", "--to", 2)
    assert code == 2
    assert "since an earlier rewind, whose file you may remove, these do not: step-000000002" in err


def test_managers_of_0_1_and_the_other_commands_take_the_same_one(tmp_path: Path, capsys: Capture) -> None:
    place = tmp_path / "run"
    lives(DiskTier(place, ALL), steps=[1, 2, 3])
    run(capsys, "rewind", place, "--to", 2)
    manager, state = TieredCheckpointManager([DiskTier(place, ALL)], run_id="job7"), Streamed()
    loaded = load_latest(manager, state)
    manager.close()
    assert loaded is not None
    assert torch.equal(state.weights, weights_at(2))
    assert lines_of(capsys, "show", place)[0]["step"] == 2
    assert "rewound, does not count" in run(capsys, "ls", place)[1].splitlines()[1]
    code, out, _ = run(capsys, "prune", place, "--keep-last", 1)
    assert code == 0
    assert [line.split(":")[1].split()[0] for line in out.splitlines()[:3]] == ["removed", "kept", "kept"]
    lives(DiskTier(place, ALL), steps=[3])
    run(capsys, "prune", place, "--keep-last", 1)
    assert [name for name in names(place) if name.startswith("step")] == [
        one["name"] for one in lines_of(capsys, "ls", place)
    ]
    assert lines_of(capsys, "ls", place)[0]["rewound"] is False


def test_object_storage_is_rewound_too_and_a_writer_that_lives_all_the_same_is_refused(
    tmp_path: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"memory://{tmp_path.name}/run"
    lives(DurableTier(url, ALL), steps=[1, 2, 3])
    life = Life(DurableTier(url, ALL))
    code, out, _ = run(capsys, "rewind", url, "--to", 2)
    assert code == 0, out
    assert f"to undo it, remove {url}/rewound-to-000000002" in out
    life.train([4])
    life.end()
    assert "was replaced by" in caplog.text
    assert "torchelastic checkpoint rewind" in caplog.text
    assert [(one["step"], one["rewound"]) for one in lines_of(capsys, "ls", url)] == [(3, True), (2, False), (1, False)]
    assert lives(DurableTier(url, ALL), steps=[3]) == 2
    assert lives(DurableTier(url, ALL)) == 3


def test_the_folder_of_a_run_that_is_alive_is_not_rewound(tmp_path: Path, capsys: Capture) -> None:
    lives(DiskTier(tmp_path, ALL), steps=[1, 2])
    program = f"""
import sys
from torchelastic.checkpoint import DiskTier
tier = DiskTier({str(tmp_path)!r})
tier.claim("job7", "the worker", tier.known_epoch("job7") + 1)
print("claimed", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as alive:
        assert alive.stdout is not None
        assert alive.stdout.readline() == "claimed\n"
        code, out, err = run(capsys, "rewind", tmp_path, "--to", 1)
        assert (code, out) == (2, "")
        assert f"process {alive.pid}" in err
        assert not list(tmp_path.glob("rewound-*"))
    assert run(capsys, "rewind", tmp_path, "--to", 1)[0] == 0


@pytest.mark.parametrize("place", ["folder", "url"])
def test_a_copy_without_hidden_files_counts_what_is_saved_there(tmp_path: Path, place: str, capsys: Capture) -> None:
    def tier(name: str) -> Tier:
        folder = tmp_path / name
        return DiskTier(folder, KeepLast(3)) if place == "folder" else DurableTier(folder.as_uri(), KeepLast(3))

    lives(tier("first"), steps=[1, 2, 3])
    for _ in range(3):
        lives(tier("first"))  # starts that saved nothing, of which no name tells
    assert run(capsys, "rewind", tmp_path / "first", "--to", 2)[0] == 0
    (tmp_path / "copy").mkdir()
    for one in (tmp_path / "first").glob("[!.]*"):
        (shutil.copytree if one.is_dir() else shutil.copy)(one, tmp_path / "copy" / one.name)
    assert lives(tier("copy"), steps=[3, 4, 5]) == 2
    assert lives(tier("copy")) == 5


def test_a_copy_of_one_checkpoint_is_where_another_run_begins(tmp_path: Path) -> None:
    lives(DiskTier(tmp_path / "first", ALL), steps=[1, 2, 3])
    (one,) = (tmp_path / "first").glob("step-000000002.*")
    shutil.copytree(one, tmp_path / "other" / one.name)
    assert lives(DiskTier(tmp_path / "other", ALL), steps=[3, 4]) == 2
    assert lives(DiskTier(tmp_path / "other", ALL)) == 4
    assert lives(DiskTier(tmp_path / "first", ALL)) == 3


def test_every_place_of_the_run_keeps_what_counts_and_removes_what_does_not(tmp_path: Path, capsys: Capture) -> None:
    def tiers() -> list[Tier]:
        url = (tmp_path / "durable").as_uri()
        return [DiskTier(tmp_path / "disk", ALL), DurableTier(url, KeepLast(2)), own_disk(tmp_path, KeepLast(2))]

    lives(*tiers(), steps=[1, 2, 3, 4])
    run(capsys, "rewind", tmp_path / "disk", "--to", 3)
    lives(*tiers(), steps=[4])
    for name in ("durable", "own"):
        assert [(one["step"], one["rewound"]) for one in lines_of(capsys, "ls", tmp_path / name)] == [
            (4, False),
            (3, False),
        ]
        assert list((tmp_path / name).glob("rewound-*")), "the place that was rewound may be lost"


def test_a_place_without_room_for_the_file_removes_what_does_not_count_all_the_same(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives(DiskTier(tmp_path / "disk", ALL), own_disk(tmp_path, ALL), steps=[1, 2, 3])
    run(capsys, "rewind", tmp_path / "disk", "--to", 1)

    def full(rewind: Rewind) -> None:
        raise CheckpointError(f"there is no room for {rewind.file_name}")

    own = own_disk(tmp_path, ALL)
    monkeypatch.setattr(own, "keep_rewind", full)
    lives(DiskTier(tmp_path / "disk", ALL), own, steps=[2])
    assert [one["step"] for one in lines_of(capsys, "ls", tmp_path / "own")] == [2, 1]


@pytest.mark.parametrize("private", [False, True])
def test_a_run_that_has_resumed_and_not_saved_yet_saves_nothing_after_a_rewind(
    tmp_path: Path, private: bool, capsys: Capture
) -> None:
    def job() -> tuple[Model, BCPState]:
        model = Model(weights_at(0))
        tier = own_disk(tmp_path, ALL) if private else DiskTier(tmp_path / "own", ALL)
        return model, BCPState(model, None, tiers=[tier], run_id="job7")

    model, state = job()
    for step in (1, 2, 3):
        model.weights.data.copy_(weights_at(step))
        state.save()
    state.close()
    model, state = job()
    assert state.maybe_resume_from_ckpt() is not None
    out = run(capsys, "rewind", tmp_path / "own", "--to", 2)[1]
    assert "a BCPState counts its saves" in out
    with pytest.raises(FencedError, match=r"was rewound \(rewound-to-000000002\S+ after this job had resumed"):
        state.save()
    state.close()
    for step in (2, 4):
        model, state = job()
        assert state.maybe_resume_from_ckpt() is not None
        assert torch.equal(model.weights.data, weights_at(step))
        model.weights.data.copy_(weights_at(4))
        state.save()
        state.close()


def test_a_manager_that_has_loaded_before_a_rewind_saves_nothing(tmp_path: Path, capsys: Capture) -> None:
    lives(DiskTier(tmp_path, ALL), steps=[1, 2])
    manager = TieredCheckpointManager([DiskTier(tmp_path, ALL)], run_id="job7")
    load_latest(manager, Streamed())
    run(capsys, "rewind", tmp_path, "--to", 1)
    with pytest.raises(CheckpointError, match="after this job had resumed"):
        save(manager, Streamed())
    manager.close()


def test_who_names_a_place_with_more_steps_than_there_are_learns_that_nothing_here_is_left_out(
    tmp_path: Path, capsys: Capture
) -> None:
    lives(DiskTier(tmp_path, ALL), steps=[1, 2])
    out = run(capsys, "rewind", tmp_path, "--to", 8)[1].splitlines()
    assert out[0].endswith("goes on from step 2, or a newer one of at most 8 that lies elsewhere")
    assert out[1] == "none here has more than 8, so none here is left out"


def test_a_damaged_one_that_was_taken_back_to_does_not_hide_how_to_undo_it(tmp_path: Path, capsys: Capture) -> None:
    lives(DiskTier(tmp_path, ALL), steps=[1, 2])
    run(capsys, "rewind", tmp_path, "--to", 1)
    (shard,) = tmp_path.glob("step-000000001*/*.shard")
    flip(shard, shard.stat().st_size - 100)
    with pytest.raises(CheckpointError, match=r"or remove rewound-to-000000001.e2, wherever it lies, to have newer"):
        lives(DiskTier(tmp_path, ALL))


def test_a_dry_run_changes_nothing(tmp_path: Path, capsys: Capture) -> None:
    add_checkpoint(tmp_path, 1)
    add_checkpoint(tmp_path, 2)
    before = sorted(tmp_path.rglob("*"))
    code, out, _ = run(capsys, "rewind", tmp_path, "--to", 1, "--dry-run")
    assert code == 0
    assert out.splitlines() == [
        "step-000000001.e1.r2.g1 would be the newest here: the run goes on from step 1",
        "would not count any more: step-000000002.e1.r2.g2",
    ]
    assert sorted(tmp_path.rglob("*")) == before


def test_what_cannot_be_rewound_is_refused_by_name(tmp_path: Path, capsys: Capture) -> None:
    one = add_checkpoint(tmp_path / "tiers", 5)
    add_streams(tmp_path / "streams", 2)
    add_local(tmp_path / "local", 4)
    for path, step, said in (
        (tmp_path / "tiers", 4, "has at most 4 steps, nothing is changed; those that count have 5"),
        (one, 5, "is a checkpoint itself"),
        (tmp_path / "streams", 0, "holds checkpoints of FileSystemCheckpointManager, which knows of no rewind"),
        (tmp_path / "streams", 0, f"and move these to another folder: {tmp_path / 'streams' / '1'}"),
        (tmp_path / "local", 30, "of LocalCheckpointManager, which knows of no rewind"),
        (tmp_path / "local", 30, "none of at most step 30; there are steps 40"),
        (tmp_path / "nothing", 1, "does not exist"),
    ):
        code, out, err = run(capsys, "rewind", path, "--to", step)
        assert (code, out) == (2, ""), path
        assert said in err
    assert not list(tmp_path.rglob("rewound-*"))


def test_steps_may_be_those_of_a_framework_which_counts_others(tmp_path: Path, capsys: Capture) -> None:
    for step in (4, 8, 12):  # a framework that evaluates after each second step of its own
        add_checkpoint(tmp_path, step, {"global_step": step / 2})
    assert run(capsys, "ls", tmp_path)[1].splitlines()[1].endswith("complete  global_step 6")
    code, _, err = run(capsys, "rewind", tmp_path, "--to", 5, "--by", "loss")
    assert code == 2
    assert "says its loss, nothing is changed; they say global_step" in err
    code, _, err = run(capsys, "rewind", tmp_path, "--to", 1, "--by", "global_step")
    assert code == 2
    assert "has at most global_step 1, nothing is changed; those that count have 2, 4, 6" in err
    assert not list(tmp_path.glob("rewound-*"))
    out = run(capsys, "rewind", tmp_path, "--to", 5, "--by", "global_step")[1].splitlines()
    assert out[0].endswith("goes on from step 8 (global_step 4)")
    assert "step-000000012" in out[1]
    assert [file.name for file in tmp_path.glob("rewound-*")] == ["rewound-to-000000008.e2"]


def test_a_run_saves_the_numbers_in_extra_as_metrics_and_keeps_the_best(tmp_path: Path, capsys: Capture) -> None:
    model = torch.nn.Linear(1, 1)
    state = torchelastic.ModelState(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        extra={"loss": 9.0, "name": "a", "good": True, "huge": 10**400},
    )
    losses = [0.5, 0.1, 0.4, 0.3]
    manager = TieredCheckpointManager(
        [DiskTier(tmp_path, KeepLast(1) | KeepBest("loss"))], policy=EverySteps(1), run_id="j"
    )

    def train_step(state: torchelastic.ModelState) -> None:
        manager.wait()
        if state.step == len(losses):
            raise StopIteration
        state.model(torch.ones(1, 1)).sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.extra["loss"] = losses[state.step]

    torchelastic.train(torchelastic.CoordinatorP2P("gloo"), train_step, state, checkpoint=manager)
    manager.close()
    assert [(one["step"], one["metrics"]) for one in lines_of(capsys, "ls", tmp_path)] == [
        (4, {"loss": 0.3}),
        (2, {"loss": 0.1}),
    ]


@pytest.mark.parametrize("words", [["--to", "-1"], ["--to", "soon"], []])
def test_a_step_must_be_a_number(tmp_path: Path, words: Sequence[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as error:
        run(capsys, "rewind", tmp_path, *words)
    assert error.value.code == 2
