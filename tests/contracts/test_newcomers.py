"""What a worker that joins gets: all that its source has, proved by a census of both."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch.distributed as dist

from tests.contracts.census import Census, census_of, differences
from tests.contracts.training_states import CHANGES, world
from tests.process.forked_ranks import run_ranks, values

#: Not sent. Each of these fails when it is, so that it is taken from this list.
NOT_SENT = {
    "attribute": "LOCAL, and told: nobody knows whether a plain attribute is a rank's own",
    "attribute that is a list": "the same",
    "attribute that is new": "the same",
    "hook": "LOCAL: code is not sent, a worker that joins has registered its own",
    "extra: an object without state": "told at the start: an object with an empty state_dict says that it has nothing",
}
#: Not sent yet, though all ranks have the same.
HOLES = [
    "another parameter, which is trained",
    *("buffer that was None", "buffer of another type", "buffer that becomes None", "buffer resized"),
    *("buffer of another size", "buffer that is gone", "buffer that is new", "buffer that is not persistent"),
    *("a group of parameters", "order of the optimizer's parameters", "a group of the model's parameters"),
    "a parameter more in a group",
]
#: What is each rank's own: random numbers, gradients, and whether an optimizer has stepped in this process.
OWN = re.compile(r"^random\.|\.grad(\.|$)|^optimizer\._opt_called$")


def joined(change: str) -> tuple[Census, Census]:
    """Of each rank, before the change and after the sync: rank 0 has trained, and rank 1 joins."""
    rank = dist.get_rank()
    one = world(seed=rank + 1, is_alone=rank == 0)
    for _ in range(0 if rank else 2):
        one.train()
    before = census_of(**one.roots)
    if rank == 0:
        CHANGES[change](one)
        assert differences(before, census_of(**one.roots)) or change == "nothing"
    one.state.sync()
    return before, census_of(**one.roots)


def cases() -> list[Any]:
    marks = {
        name: [pytest.mark.xfail(strict=True, reason=reason)]
        for name, reason in (NOT_SENT | dict.fromkeys(HOLES, "not yet")).items()
    }
    return [pytest.param(name, marks=marks.get(name, []), id=name) for name in CHANGES]


@pytest.mark.parametrize("change", cases())
def test_a_worker_that_joins_has_what_its_source_has(change: str) -> None:
    (_, source), (before, newcomer) = values(run_ranks(joined, change, ranks=2))
    assert differences(source, before)
    found = differences(source, newcomer)
    assert {path: text for path, text in found.items() if not OWN.search(path)} == {}
