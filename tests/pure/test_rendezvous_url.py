"""What a rendezvous URL may say, and how clear the error is where it says something else."""

from __future__ import annotations

import pytest

from torchelastic.rendezvous.url import RendezvousUrlError, parse_url


def test_every_part_is_read() -> None:
    url = parse_url(
        "etcd://a:1,b,[::1]:3/job-7?min_workers=2&max_workers=4&timeout=60&last_call_timeout=5&ttl=3&etcd_prefix=/x/"
    )
    assert url.endpoints == (("a", 1), ("b", 2379), ("::1", 3))
    assert (url.run_id, url.root) == ("job-7", "/x/job-7")
    assert (url.min_workers, url.max_workers) == (2, 4)
    assert (url.timeout_s, url.last_call_timeout_s, url.ttl_s) == (60.0, 5.0, 3.0)


def test_defaults_are_those_of_0_1() -> None:
    url = parse_url("etcd://localhost/1234?min_workers=1")
    assert (url.max_workers, url.timeout_s, url.last_call_timeout_s) == (1, 600.0, 30.0)
    assert url.endpoints == (("localhost", 2379),)


def test_text_and_value_are_the_same() -> None:
    url = parse_url("etcd://h:1,g:2/run@x:1?min_workers=1&max_workers=3&ttl=4.5&etcd_prefix=/a%20b")
    assert parse_url(str(url)) == url


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("http://h/1?min_workers=1", "scheme"),
        ("etcd://h?min_workers=1", "names no run"),
        ("etcd://h/a/b?min_workers=1", "run id"),
        ("etcd://h/1", "min_workers"),
        ("etcd://h/1?min_workers=0", "min_workers"),
        ("etcd://h/1?min_workers=two", "min_workers"),
        ("etcd://h/1?min_workers=3&max_workers=2", "raise max or lower min"),
        ("etcd://h/1?min_workers=1&colour=red", "colour"),
        ("etcd://h/1?min_workers=1&min_workers=2", "twice"),
        ("etcd://h/1?min_workers=1&timeout=-1", "timeout"),
        ("etcd://h/1?min_workers=1&timeout=nan", "timeout"),
        ("etcd://h/1?min_workers=1&ttl=1", "ttl"),
        ("etcd://h:99999/1?min_workers=1", "99999"),
        ("etcd:///1?min_workers=1", "HOST"),
        ("etcd://h:x/1?min_workers=1", "HOST:PORT"),
    ],
)
def test_a_wrong_url_gives_one_error_that_names_the_part(text: str, names: str) -> None:
    with pytest.raises(RendezvousUrlError, match=names):
        parse_url(text)
