"""Contract: files have the modes that the umask says, as those of `torch.save`, and others of the group go on there."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.facades import FACADES, outcome
from tests.contracts.faults import in_child, warm_up


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user can reach; those of pytest are its user's alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder


def under(umask: int, action: Callable[[], Any], user: int | None = None) -> Callable[[], Any]:
    """The action under a umask, and as another user of the same group."""

    def acted() -> Any:
        os.umask(umask)
        if user is not None:
            os.setgroups([])
            os.setuid(user)
        return outcome(action)

    return acted


@pytest.mark.parametrize("name", FACADES)
@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_files_and_folders_have_the_modes_of_the_umask(name: str, umask: int, tmp_path: Path) -> None:
    facade, folder = FACADES[name], tmp_path / "saved"
    in_child(under(umask, lambda: facade.save(folder, 1)))
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
    assert any(path.is_file() for path in modes)
    wrong = {
        str(path.relative_to(folder)): oct(mode)
        for path, mode in modes.items()
        if mode != (0o777 if path.is_dir() else 0o666) & ~umask
    }
    assert not wrong


@pytest.mark.parametrize("name", FACADES)
def test_a_colleague_of_the_group_resumes_and_goes_on(name: str, shared: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can be two users: `sudo .venv/bin/python -m pytest tests/contracts/test_file_modes.py`")
    facade, folder = FACADES[name], shared / "saved"
    warm_up([lambda: facade.save(shared / "trial", 1), lambda: facade.resume(shared / "trial")])
    assert "error" not in in_child(under(0o002, lambda: facade.save(folder, 1))).value
    assert in_child(under(0o002, lambda: facade.resume(folder), user=4711)).value.get("value") == 1
    second = in_child(under(0o002, lambda: facade.save(folder, 2), user=4711)).value
    assert "error" not in second, second
    assert in_child(under(0o002, lambda: facade.resume(folder))).value.get("value") == 2
    third = in_child(under(0o002, lambda: facade.save(folder, 3))).value
    assert "error" not in third, "the first user, too"
