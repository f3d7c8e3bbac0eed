from __future__ import annotations

import numpy as np
import pytest

from torchelastic.checkpoint.local.names import LocalSave, Shard, check_iteration, check_session_id

SAVE = LocalSave(generation=3, iteration=10, world_size=4, token="9f3a12cd")


def test_a_name_says_all_and_is_read_back() -> None:
    name = SAVE.shard(1).file_name
    assert name == "iter_0000010_0001_of_0004_gen_00000003_9f3a12cd_local.shard"
    assert Shard.parse(name) == SAVE.shard(1)


def test_large_numbers_are_read_back_too() -> None:
    shard = LocalSave(10**9, 10**11, 20000, "0" * 8).shard(12345)
    assert Shard.parse(shard.file_name) == shard


@pytest.mark.parametrize(
    "name",
    [
        "",
        "iter_0000010_0000_local.pt",
        ".tmp-1-2",
        SAVE.shard(4).file_name,
        "../" + SAVE.shard(1).file_name,
        SAVE.shard(1).file_name + "\n",
        SAVE.shard(1).file_name.replace("0001_of", "00001_of"),
        SAVE.shard(1).file_name.replace("9f3a", "9F3A"),
    ],
)
def test_nothing_else_is_taken_for_a_name(name: str) -> None:
    assert Shard.parse(name) is None


def test_the_newest_save_is_the_one_saved_last_not_the_one_with_the_largest_iteration() -> None:
    stale, new = LocalSave(7, 10, 4, "f" * 8), LocalSave(8, 5, 4, "0" * 8)
    assert max(stale, new) == new


def test_a_session_is_a_folder_name() -> None:
    for session in ("", "job-17", "a.b_c:d@1", "job 7"):
        assert check_session_id(session) == session
    for session in ("..", ".hidden", "a/b", " a", "a ", "a\nb", "x" * 200):
        with pytest.raises(ValueError, match="session_id"):
            check_session_id(session)


def test_an_iteration_is_a_whole_number_from_0_on() -> None:
    assert check_iteration(0) == 0
    assert type(check_iteration(np.int64(3))) is int
    for wrong in (True, 1.0, "1", None):
        with pytest.raises(TypeError, match="whole number"):
            check_iteration(wrong)  # type: ignore[arg-type]
    for number in (-1, 10**12):
        with pytest.raises(ValueError, match="iteration is"):
            check_iteration(number)
