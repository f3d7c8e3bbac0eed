"""What a rendezvous URL may say, and how clear the error is where it says something else."""

from __future__ import annotations

import math
import traceback

import pytest

from torchelastic.p2p.options import open_rendezvous, smallest_group
from torchelastic.rendezvous.handler import EtcdRendezvousHandler
from torchelastic.rendezvous.url import RendezvousUrlError, parse_url


def test_every_part_is_read() -> None:
    url = parse_url(
        "etcd://a:1,b,[::1]:3/job-7?min_workers=2&max_workers=4&timeout=60&last_call_timeout=5&ttl=3&etcd_prefix=/x/"
    )
    assert url.endpoints == (("a", 1), ("b", 2379), ("::1", 3))
    assert (url.run_id, url.root) == ("job-7", "/x/job-7")
    assert (url.min_workers, url.max_workers) == (2, 4)
    assert (url.timeout_s, url.last_call_timeout_s, url.ttl_s) == (60.0, 5.0, 3.0)


def test_ipv6_addresses_beside_others_are_taken_by_whatever_opens_the_rendezvous() -> None:
    # `urlsplit` refuses them since Python 3.14, and in later patch releases of the ones before
    handler = open_rendezvous("etcd://u:p%5B@[::1]:1,[fe80::2],h:3/job?min_workers=1")
    assert isinstance(handler, EtcdRendezvousHandler)
    assert handler.url.endpoints == (("::1", 1), ("fe80::2", 2379), ("h", 3))
    assert (handler.url.access.user, handler.url.access.password) == ("u", "p[")


def test_the_smallest_group_is_a_multiple_wherever_it_is_asked_for() -> None:
    text = "etcd://h/1?min_workers=3&max_workers=9&multiple_of=4"
    assert parse_url(text).multiple_of == 4
    assert parse_url("etcd://h/1?min_workers=3").multiple_of == 1
    assert smallest_group(text) == 4
    assert smallest_group("solo://") == 1


def test_the_time_without_contact_to_etcd_may_be_unlimited_and_no_other() -> None:
    assert parse_url("etcd://h/1?min_workers=1").orphan_timeout_s == 300.0
    assert parse_url("etcd://h/1?min_workers=1&orphan_timeout=7.5").orphan_timeout_s == 7.5
    unlimited = parse_url("etcd://h/1?min_workers=1&orphan_timeout=unlimited")
    assert math.isinf(unlimited.orphan_timeout_s)
    assert "orphan_timeout=unlimited" in str(unlimited)
    assert parse_url(str(unlimited)) == unlimited
    for wrong in ("0", "-1", "inf", "nan", "for ever"):
        with pytest.raises(RendezvousUrlError, match=r"orphan_timeout=.* or the word unlimited"):
            parse_url(f"etcd://h/1?min_workers=1&orphan_timeout={wrong}")
    with pytest.raises(RendezvousUrlError, match="timeout='unlimited'"):
        parse_url("etcd://h/1?min_workers=1&timeout=unlimited")


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
        ("etcd://h/1?min_workers=1&multiple_of=0", "multiple_of='0' must be a whole number of at least 1"),
        ("etcd://h/1?min_workers=1&multiple_of=-2", "multiple_of='-2' must be a whole number"),
        ("etcd://h/1?min_workers=1&multiple_of=1.5", "multiple_of='1.5' must be a whole number"),
        (
            "etcd://h/1?min_workers=5&max_workers=7&multiple_of=4",
            "no multiple of it lies between min_workers=5 and max",
        ),
        ("etcd://h/1?min_workers=1&max_workers=3&multiple_of=4", "no group could ever be formed; raise max_workers"),
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


# Access to etcd -------------------------------------------------------------------------------------------------------


def test_a_password_comes_in_by_the_url_and_does_not_come_out_again() -> None:
    url = parse_url("etcd://tr%40iner:h%3Aunt%40er%2F2@h:1,g:2/run?min_workers=1")
    assert (url.access.user, url.access.password) == ("tr@iner", "h:unt@er/2")
    assert url.endpoints == (("h", 1), ("g", 2))
    for text in (str(url), repr(url), url.endpoints_text):
        assert "unt" not in text
    assert "user=tr%40iner" in str(url)
    assert parse_url("etcd://u:p@ss@h/run?min_workers=1").access.password == "p@ss"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("http://u:hunter2@h/1?min_workers=1", "scheme is 'http'"),
        ("etcd://u:hunter2@h?min_workers=1", r"'etcd://u:\*\*\*@h\?min_workers=1' names no run"),
        ("etcd://u:hunter2@h:99999/1?min_workers=1", "99999"),
        ("etcd://u:hunter2@h:x/1?min_workers=1", "'h:x' is no HOST"),
        ("etcd://u:hunter2@h/1?min_workers=1&colour=red", "colour"),
        ("etcd://u:hunter2@h/1?min_workers=1&min_workers=2", "twice"),
        ("etcd://h/1?min_workers=1&password=hunter2", "use password_file"),
        ("etcd://h/1?min_workers=1&passwd=hunter2", "unknown parameter 'passwd'"),
        ("etcd://h/1?min_workers=1&PASSWORD=hunter2&x=1", "unknown parameter 'PASSWORD'"),
        ("etcd://u:hun/ter2@h/1?min_workers=1", "'@' where none can be.*%2F"),
        ("etcd://u:hun#ter2@h/1?min_workers=1", "'@' where none can be.*%23"),
        ("etcd://u:hun?ter2@h/1?min_workers=1", "'@' where none can be.*%3F"),
        ("etcd://u:12/hunter2@h/1?min_workers=1", "'@' where none can be"),
        ("etcd://u:a@b/hunter2@h/1?min_workers=1", "'@' where none can be"),
        ("etcd:u:hunter2@h/1?min_workers=1", "'@' where none can be"),
        ("u:hunter2@h/1?min_workers=1", "'@' where none can be"),
        ("etcd://u:hun[ter2@h/1?min_workers=1", "cannot be read.*%5B"),
        ("etcd://u:hunter2\u2100@h/1?min_workers=1", "cannot be read"),
        ("etcd://:hunter2@h/1?min_workers=1", "no user before its '@'"),
        ("etcd://u:hunter2@h/1?min_workers=1&user=v", "two users, 'u' and 'v'"),
        ("etcd://u:hunter2@h/1?min_workers=1&protocol=ftp", "protocol='ftp' must be http or https"),
    ],
)
def test_no_error_repeats_a_password(text: str, names: str) -> None:
    with pytest.raises(RendezvousUrlError, match=names) as caught:
        parse_url(text)
    told = "".join(traceback.format_exception(caught.value))
    assert not any(part in told for part in ("hunter", "hun/", "hun[", "hun#", "hun?", "ter2"))


@pytest.mark.parametrize(
    ("endpoints", "is_here"), [("localhost:1", True), ("127.0.0.1:1,[::1]:2", True), ("localhost:1,h:2", False)]
)
def test_only_loopback_is_this_host_alone(endpoints: str, is_here: bool) -> None:
    assert parse_url(f"etcd://{endpoints}/job?min_workers=1&max_workers=1").is_on_this_host is is_here
