"""What the processes of one program tell each other of their containers."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

from torchelastic.checkpoint.memory.registry import ContainerRegistry, KnownContainer

BASE = Path("/dev/shm/jobs/145")


def in_a_fork(work: Callable[[], bytes]) -> bytes:
    """What another process returns, which has ended then."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, work())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


def test_what_one_process_opens_and_joins_the_others_know() -> None:
    trainer = ContainerRegistry()
    trainer.add(BASE / "first")
    sent = pickle.dumps(trainer)

    def help_it() -> bytes:
        helper = pickle.loads(sent)
        helper.add(BASE / "a container with a long name")
        helper.join(BASE / "first", "group", 7)
        helper.forget("a container with a long name")
        helper.add(BASE / "second")
        return b"done"

    assert in_a_fork(help_it) == b"done"
    assert trainer.joined("first") == ("group", 7)
    assert trainer.known() == {
        "first": KnownContainer(str(BASE / "first"), "group", 7),
        "second": KnownContainer(str(BASE / "second")),
    }
    assert trainer.root_of("second") == BASE / "second"
    assert trainer.joined("third") == ("", 0)


def test_a_process_whose_sender_has_ended_goes_on_with_what_was_sent() -> None:
    def send() -> bytes:
        registry = ContainerRegistry()
        registry.join(BASE, "group", 3)
        return pickle.dumps(registry)

    orphan = pickle.loads(in_a_fork(send))
    assert orphan.known() == {"145": KnownContainer(str(BASE), "group", 3)}
    orphan.forget("145")
    assert orphan.known() == {}


def test_a_file_that_has_the_number_by_now_is_left_alone(tmp_path: Path) -> None:
    state = ContainerRegistry().__getstate__()
    other = tmp_path / "other"
    other.write_bytes(b"not ours")
    restored = ContainerRegistry.__new__(ContainerRegistry)
    restored.__setstate__({**state, "where": str(other)})
    restored.add(BASE)
    assert other.read_bytes() == b"not ours"
    assert restored.root_of("145") == BASE


def test_nothing_is_left_open_or_on_a_disk() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    first = ContainerRegistry()
    second = pickle.loads(pickle.dumps(first))
    second.add(BASE)
    assert first.root_of("145") == BASE
    del first, second
    assert len(list(Path("/proc/self/fd").iterdir())) == before
