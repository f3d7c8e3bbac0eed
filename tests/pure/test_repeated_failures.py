"""Which failures in a row are the same, and which may be somebody else's fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed import DistStoreError

from torchelastic.errors import NonRetryableException, RetryableException, UnfitStateError
from torchelastic.repeated_failures import RepeatedFailures, fingerprint, is_final, new_process_may_help
from torchelastic.sharded.mesh import HybridShard


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def of_torch() -> BaseException:
    """An error without a line of the user's below the call."""
    with pytest.raises(ValueError, match="Default process group") as caught:
        torch.distributed.get_rank()
    return caught.value.with_traceback(caught.value.__traceback__.tb_next if caught.value.__traceback__ else None)


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


def test_addresses_of_objects_do_not_make_errors_different() -> None:
    marks = {fingerprint(raised(RuntimeError(f"<Thing at 0x7f{number}>"))) for number in range(3)}
    assert len(marks) == 1
    assert None not in marks


@pytest.mark.parametrize(
    "make",
    [
        lambda: raised(RetryableException("the storage is away")),
        lambda: raised(DistStoreError("wait timeout after 30000ms")),
        lambda: raised(RuntimeError("[../gloo/transport/tcp/pair.cc:537] Read error")),
        lambda: raised(RuntimeError("the process group was aborted: another worker was lost or hangs")),
        lambda: RuntimeError("never raised"),
        of_torch,
    ],
    ids=["retryable", "store", "backend", "given up", "made by the loop", "no line of the user"],
)
def test_what_may_go_away_by_itself_or_is_not_the_users_is_never_the_same(make: Callable[[], BaseException]) -> None:
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
    assert new_process_may_help(error) is helps


def test_only_the_users_own_word_that_trying_again_cannot_help_is_final() -> None:
    assert is_final(raised(NonRetryableException("the data set is empty")))
    assert not is_final(raised(RuntimeError("the data set is empty")))
    assert not is_final(NonRetryableException("never raised"))
    assert is_final(UnfitStateError("the state is of another model")), "another process would build the same again"
    with pytest.raises(NonRetryableException) as caught:
        HybridShard(shard=2)(3)
    assert not is_final(caught.value), "of the group: another one may have a fitting size"
