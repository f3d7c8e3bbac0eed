"""What the processes of one program tell each other of their containers."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

from torchelastic.checkpoint.compat.flashpoint.registry import ContainerRegistry

BASE = Path("/dev/shm/jobs/145")


def test_what_one_process_opens_and_joins_the_others_know() -> None:
    trainer = ContainerRegistry()
    trainer.add(BASE / "first")
    sent = pickle.dumps(trainer)
    child = os.fork()
    if child == 0:
        try:
            helper = pickle.loads(sent)
            helper.add(BASE / "a container with a long name")
            helper.join("first", "group", 7)
            helper.forget("a container with a long name")
            helper.add(BASE / "second")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert trainer.joined("first") == ("group", 7)
    assert trainer.names() == ["first", "second"]
    assert (trainer.root_of("first"), trainer.root_of("second")) == (BASE / "first", BASE / "second")
    assert trainer.joined("third") == ("", 0)
    assert trainer.root_of("third") is None


def test_a_helper_whose_program_has_ended_goes_on_and_nothing_is_left_of_it() -> None:
    trainer = ContainerRegistry()
    trainer.join("145", "group", 3)
    orphan = pickle.loads(pickle.dumps(trainer))
    folder = trainer._folder
    del trainer
    assert not folder.exists()
    assert (orphan.names(), orphan.joined("145")) == ([], ("", 0))
    orphan.add(BASE)
    assert orphan.root_of("145") == BASE
    orphan.forget("145")
    assert orphan.names() == []
    folder.rmdir()
