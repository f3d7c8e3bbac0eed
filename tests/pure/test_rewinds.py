"""Which saves count after a run was taken back to an older one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.store.rewinds import Rewind, counts, highest_epoch, how_to_undo
from torchelastic.checkpoint.store.save_id import SaveId

NUMBERS = st.integers(0, 10**12)
REWINDS = st.builds(Rewind, epoch=NUMBERS, step=NUMBERS)


@given(st.lists(REWINDS, unique=True))
def test_their_names_say_all_of_it(rewinds: list[Rewind]) -> None:
    names = [rewind.file_name for rewind in rewinds]
    others = ["step-000000123.e1.r5.g7", ".fence.json", "rewound-to-12.e1", "rewound-to-000000012.e1.tmp"]
    assert Rewind.all_in([*others, *names]) == sorted(rewinds, reverse=True)


@given(st.lists(REWINDS), NUMBERS, NUMBERS)
def test_a_save_counts_if_none_of_them_is_about_it(rewinds: list[Rewind], epoch: int, step: int) -> None:
    about_it = [rewind for rewind in rewinds if epoch < rewind.epoch and step > rewind.step]
    assert counts(SaveId(epoch, 0, 0, step), rewinds) == (not about_it)


def test_what_the_run_saves_after_it_always_counts() -> None:
    rewind = Rewind(4, 8000)
    assert [counts(SaveId(epoch, 9, 9, 9000), [rewind]) for epoch in (3, 4, 5)] == [False, True, True]
    assert "more than 8000 steps" in rewind.text
    assert "e4 in" in rewind.text


def test_a_place_that_was_copied_knows_by_names_of_all_jobs_that_were_there() -> None:
    rewind, saves = Rewind(4, 8000).file_name, ["step-000008000.e1.r0.g2", ".tmp-step-000008000.e3.r0.g2"]
    assert [highest_epoch(names) for names in ([], saves, [rewind], [rewind, *saves])] == [0, 3, 4, 4]


def test_what_to_remove_is_what_leaves_something_out() -> None:
    rewinds, saves = [Rewind(4, 8000), Rewind(3, 7000), Rewind(2, 10)], [SaveId(2, 0, 0, 8500)]
    assert how_to_undo(rewinds, saves).startswith("remove rewound-to-000008000.e4 and rewound-to-000007000.e3, where")
    assert how_to_undo(rewinds, []) == ""
