"""Who receives whose shard: never the own host, and as many hosts as were asked for and are there."""

from __future__ import annotations

import pytest

from torchelastic.checkpoint.replication import partners


@pytest.mark.parametrize(
    ("hosts", "copies", "expected"),
    [
        ("ab", 1, 1),
        ("aabb", 1, 1),
        ("aabbcc", 2, 2),
        ("aaab", 1, 1),  # no cliques: one host has more than half of the ranks
        ("abc", 1, 1),
        ("aaa", 1, 0),
        ("ab", 3, 1),
        ("a", 2, 0),
    ],
)
def test_each_shard_lies_on_as_many_other_hosts_as_there_can_be(hosts: str, copies: int, expected: int) -> None:
    for rank, host in enumerate(hosts):
        others = [hosts[other] for other in partners(list(hosts), rank, copies)]
        assert host not in others
        assert len(set(others)) == len(others)
        assert len(others) >= expected
