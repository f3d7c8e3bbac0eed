"""Which failures in a row are the same, and which may be somebody else's fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed import DistStoreError

from torchelastic.error_text import without_particulars
from torchelastic.errors import NonRetryableException, RetryableException, UnfitStateError
from torchelastic.repeated_failures import RepeatedFailures, fingerprint, is_final, new_process_may_help
from torchelastic.sharded.mesh import HybridShard


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def of_torch() -> BaseException:
    """An error without a line of the user's, as in a sync."""
    with pytest.raises(ValueError, match="Default process group") as caught:
        torch.distributed.get_rank()
    return caught.value.with_traceback(caught.value.__traceback__.tb_next if caught.value.__traceback__ else None)


def test_an_error_without_a_line_of_the_users_is_the_same_too_and_a_new_process_may_be_free_of_it() -> None:
    failures = RepeatedFailures()
    assert [failures.failed(of_torch(), in_user_code=True) for _ in range(3)] == [1, 2, 3]
    assert new_process_may_help(of_torch())


def test_the_same_error_in_the_same_place_is_counted_until_a_step_commits() -> None:
    failures = RepeatedFailures()
    assert [failures.failed(raised(RuntimeError("a")), in_user_code=True) for _ in range(3)] == [1, 2, 3]
    assert failures.failed(raised(RuntimeError("b")), in_user_code=True) == 1, "another message"
    assert failures.failed(raised(TypeError("a")), in_user_code=True) == 1, "another type"
    assert (failures.count, str(failures.last_error)) == (5, "a")
    failures.committed()
    assert (failures.count, failures.last_error) == (0, None)
    failures.committed()
    assert failures.failed(raised(RuntimeError("a")), in_user_code=True) == 1


def test_errors_of_others_between_two_attempts_do_not_hide_that_they_are_the_same() -> None:
    failures = RepeatedFailures()
    times = []
    for _ in range(3):
        times.append(failures.failed(raised(RuntimeError("mine")), in_user_code=True))
        times.append(failures.failed(raised(RuntimeError("Connection closed by peer")), in_user_code=True))
    assert times == [1, 0, 2, 0, 3, 0]


@pytest.mark.parametrize(
    "texts",
    [
        ("<Thing at 0x7f1>", "<Thing at 0x7fab>"),
        ("DataLoader worker (pid(s) 29008) exited unexpectedly", "DataLoader worker (pid(s) 8) exited unexpectedly"),
        ("no answer at 2026-11-29 14:01:03.25+01:00", "no answer at 2026-11-29 14:02:59+01:00"),
        ("no answer after 1764424863123456789 ns", "no answer after 1764424863123456790 ns"),
        ("cannot read '/tmp/part-abcdef'", "cannot read '/var/tmp/part-fedcba'"),
        ("GET s3://bucket/ab?signature=xy: SlowDown", "GET s3://bucket/cd?signature=zz: SlowDown"),
        ("request 3f2a-77 to 10.0.0.3:2379 was refused", "request 9c0b-12 to 10.0.0.4:50051 was refused"),
    ],
    ids=["address", "pids", "date", "nanoseconds", "path", "url", "request"],
)
def test_what_differs_each_time_does_not_make_errors_different(texts: tuple[str, str]) -> None:
    marks = {fingerprint(raised(RuntimeError(text))) for text in texts}
    assert len(marks) == 1
    assert None not in marks


def test_a_text_of_a_megabyte_is_compared_in_no_time() -> None:
    assert without_particulars("x" * 2**20 + " at 0x7f" + "a/" * 2**10) == "x" * 2**20 + " at #/" + "a/" * (2**10 - 1)


def test_other_words_make_errors_different() -> None:
    texts = "no answer of alice", "no answer of bob", "cannot read /tmp/a: no room", "cannot read /tmp/a: no file"
    assert len({fingerprint(raised(RuntimeError(text))) for text in texts}) == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: raised(RetryableException("the storage is away")),
        lambda: raised(DistStoreError("wait timeout after 30000ms")),
        lambda: raised(RuntimeError("[../gloo/transport/tcp/pair.cc:537] Read error")),
        lambda: raised(RuntimeError("the process group was aborted: another worker was lost or hangs")),
        lambda: RuntimeError("never raised"),
    ],
    ids=["retryable", "store", "backend", "given up", "made by the loop"],
)
def test_what_may_go_away_by_itself_is_never_the_same(make: Callable[[], BaseException]) -> None:
    failures = RepeatedFailures()
    assert [failures.failed(make(), in_user_code=True) for _ in range(4)] == [0] * 4
    assert failures.count == 4


@pytest.mark.parametrize(
    ("error", "helps"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("shapes do not fit"), False),
    ],
)
def test_a_new_process_may_be_free_of_an_error_of_the_accelerator(error: BaseException, helps: bool) -> None:
    assert new_process_may_help(raised(error)) is helps


def test_only_the_users_own_word_that_trying_again_cannot_help_is_final() -> None:
    assert is_final(raised(NonRetryableException("the data set is empty")))
    assert not is_final(raised(RuntimeError("the data set is empty")))
    assert not is_final(NonRetryableException("never raised"))
    assert is_final(UnfitStateError("the state is of another model")), "another process would build the same again"
    with pytest.raises(NonRetryableException) as caught:
        HybridShard(shard=2)(3)
    assert not is_final(caught.value), "of the group: another one may have a fitting size"
