from __future__ import annotations

import pytest

from torchelastic.data import CyclingIterator


def test_epochs_follow_each_other_from_the_start_epoch() -> None:
    asked: list[int] = []

    def epoch_items(epoch: int) -> list[str]:
        asked.append(epoch)
        return [f"{epoch}a", f"{epoch}b"]

    iterator = CyclingIterator(3, epoch_items, start_epoch=1)
    assert asked == [1]
    assert list(iterator) == ["1a", "1b", "2a", "2b"]
    assert asked == [1, 2]


@pytest.mark.parametrize("start_epoch", [2, 3])
def test_a_run_resumed_at_its_end_never_asks_for_an_epoch(start_epoch: int) -> None:
    def refuse(epoch: int) -> list[int]:
        raise AssertionError(f"epoch {epoch} does not exist")

    assert list(CyclingIterator(2, refuse, start_epoch=start_epoch)) == []


def test_a_thousand_empty_epochs_are_passed_over() -> None:
    iterator = CyclingIterator(5000, lambda epoch: [epoch] if epoch == 4999 else [])
    assert list(iterator) == [4999]


def test_an_exhausted_iterator_stays_exhausted() -> None:
    iterator = CyclingIterator(1, lambda epoch: [epoch])
    assert list(iterator) == [0]
    assert next(iterator, "nothing") == "nothing"


def test_negative_epochs_are_refused() -> None:
    with pytest.raises(ValueError, match="start_epoch=-1"):
        CyclingIterator(1, lambda epoch: [epoch], start_epoch=-1)
