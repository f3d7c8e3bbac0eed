from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.staging import (
    ABANDONED_AFTER_S,
    Owner,
    decode_staging_name,
    encode_staging_name,
    is_abandoned,
)

HERE = Owner("node-7.example.com", "0123456789ab", 4711)
NEIGHBOUR = Owner("node-7.example.com", "0123456789ab", 4712)
OTHER_HOST = Owner("node-8.example.com", "ba9876543210", 4711)
OTHER_CONTAINER = Owner("node-7.example.com", "cccccccccccc", 4711)
LONG_S = ABANDONED_AFTER_S + 1


@given(
    st.builds(
        Owner,
        st.from_regex(r"[A-Za-z0-9.-]{1,64}", fullmatch=True),
        st.from_regex(r"[0-9a-f]{12}", fullmatch=True),
        st.integers(1, 4_194_304),
    )
)
def test_the_name_of_a_staging_folder_tells_its_owner(owner: Owner) -> None:
    assert decode_staging_name(encode_staging_name(owner, "0" * 16)) == owner


@pytest.mark.parametrize("name", ["7", "default", ".tmp", ".tmp-mine", ".tmp-1-x-y-z", "tmp-1", ".nfs0001"])
def test_names_of_other_things_belong_to_nobody(name: str) -> None:
    assert decode_staging_name(name) is None


@pytest.mark.parametrize("owner", [OTHER_HOST, OTHER_CONTAINER])
def test_a_process_number_of_elsewhere_proves_nothing(owner: Owner) -> None:
    assert not is_abandoned(owner, HERE, process_lives=False, idle_s=ABANDONED_AFTER_S)


@pytest.mark.parametrize("owner", [OTHER_HOST, OTHER_CONTAINER, NEIGHBOUR])
def test_a_folder_that_nobody_touched_for_a_day_is_abandoned(owner: Owner) -> None:
    assert is_abandoned(owner, HERE, process_lives=True, idle_s=LONG_S)
