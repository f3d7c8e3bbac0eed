from __future__ import annotations

import numpy as np
import pytest

from torchelastic.checkpoint.local.names import check_iteration, check_session_id, described
from torchelastic.checkpoint.store.save_id import SaveId, ShardId


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


def test_a_shard_has_a_name_for_people() -> None:
    shard = ShardId(SaveId(1, 1, 0, 20, "9f3a12cd"), 3, 4)
    assert described(shard) == "the shard of rank 3 of step-000000020.e1.r1.g0.9f3a12cd"
