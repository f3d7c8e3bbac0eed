from __future__ import annotations

import numpy as np
import pytest

from torchelastic.checkpoint.local.names import check_iteration, check_session_id
from torchelastic.checkpoint.store.save_id import SaveId, ShardId, file_name_of, find_shard

SHARD = ShardId(SaveId(epoch=0, round=0, generation=3, step=10, nonce="9f3a12cd"), 1, 4)
NAME = "step-000000010.e0.r0.g3.9f3a12cd.shard-00001-of-00004.shard"


def test_a_name_says_all_and_is_read_back() -> None:
    assert file_name_of(SHARD) == NAME
    assert find_shard(NAME) == SHARD
    large = ShardId(SaveId(0, 0, 10**9, 10**11, "0" * 8), 12345, 200000)
    assert find_shard(file_name_of(large)) == large


@pytest.mark.parametrize(
    "name",
    [
        "",
        "iter_0000010_0000_local.pt",
        ".tmp-1-2",
        "shard-00001-of-00004.shard",
        "step-000000010.e0.r0.g3.shard-00001-of-00004.shard",
        NAME.replace("00001-of", "00004-of"),
        "../" + NAME,
        NAME + "\n",
        NAME.replace("00001-of", "000001-of"),
        NAME.replace("9f3a", "9F3A"),
    ],
)
def test_nothing_else_is_taken_for_a_name(name: str) -> None:
    assert find_shard(name) is None


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
