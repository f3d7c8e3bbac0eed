"""What the live page answers: decisions about requests, without a socket."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.page.access import Access, checked_token, is_loopback, new_token
from torchelastic.page.requests import MOST_LINES, USUAL_LINES, PageRequest, Refused, Wanted, parsed, wanted

FILES = {"index.html": 0, "page.js": 0}
TOKEN = "a-token-of-some-length"
OWN_UID = 1000


def a_request(line: str, *headers: str) -> PageRequest:
    return parsed("\r\n".join([line, *(headers or ["Host: localhost:8080"])]).encode("latin-1"))


def refused(call: Any, *arguments: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        call(*arguments)
    return caught.value


# --- heads ------------------------------------------------------------------------------------------------------------


def test_a_request_is_taken_apart() -> None:
    request = a_request("GET /log/0.1?tail=5&tail=7#x HTTP/1.1", "Host: a", 'If-None-Match:  "v" ')
    assert request == PageRequest("/log/0.1", {"tail": "7"}, {"host": "a", "if-none-match": '"v"'})


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "CONNECT", "TRACE", "get"])
def test_whatever_is_no_get_is_told_so(method: str) -> None:
    error = refused(a_request, f"{method} / HTTP/1.1")
    assert (error.status, error.headers["Allow"]) == (405, "GET")


@pytest.mark.parametrize(
    "head",
    [
        "GET", "GET /", "GET / HTTP/2", "GET http://a/ HTTP/1.1", "GET  / HTTP/1.1", "GET /\x00 HTTP/1.1",
        "GET / HTTP/1.1\r\nHost : a", "GET / HTTP/1.1\r\n folded: a", "GET / HTTP/1.1\r\nHost: a\r\nhost: b",
        "GET / HTTP/1.1\r\nno header", "GET / HTTP/1.1\nHost: a", "GET /%ff HTTP/1.1\r\nHost: a",
        "GET / HTTP/1.1\r\nContent-Length: 5", "GET / HTTP/1.1\r\nTransfer-Encoding: chunked",
        "GET /?" + "&".join(["a=1"] * 50) + " HTTP/1.1", "GET / HTTP/1.1\r\nAuthorization: a\r\nAuthorization: b",
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused(head: str) -> None:
    assert refused(parsed, head.encode("latin-1")).status == 400


@given(st.binary(max_size=300))
def test_any_bytes_are_a_request_or_are_refused(head: bytes) -> None:
    for tried in (head, b"GET /" + head + b" HTTP/1.1", b"GET / HTTP/1.1\r\n" + head):
        try:
            status, path = 200, parsed(tried).path
        except Refused as error:
            status, path = error.status, "/"
        assert status in (200, 400, 405)
        assert path.startswith("/")


# --- what is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", Wanted("file", "index.html")),
        ("/page.js", Wanted("file", "page.js")),
        ("/status.json", Wanted("status")),
        ("/events", Wanted("events")),
        ("/log/0.1", Wanted("log", "0.1", USUAL_LINES)),
        ("/log/12.0?tail=3", Wanted("log", "12.0", 3)),
        ("/log/12.0?tail=0", Wanted("log", "12.0", 1)),
        ("/log/12.0?tail=999999999", Wanted("log", "12.0", MOST_LINES)),
    ],
)
def test_these_things_can_be_asked_for(path: str, expected: Wanted) -> None:
    assert wanted(a_request(f"GET {path} HTTP/1.1"), FILES) == expected


@pytest.mark.parametrize(
    "path",
    [
        "/nothing", "/log", "/log/", "/log/0", "/log/../0.1", "/log/..%2f0.1", "/log/0.1%00", "/log/0.1/", "/log//0.1",
        "/../etc/passwd", "/%2e%2e/etc/passwd", "//etc/passwd", "/page.js/", "/./page.js", "/log/%2Fetc%2Fpasswd",
        "/log/0.1.log", "/log/-1.0", "/log/0.1%0a", "/log/%D9%A0.1", "/Events",
    ],
)  # fmt: skip
def test_nothing_else_can(path: str) -> None:
    assert refused(wanted, a_request(f"GET {path} HTTP/1.1"), FILES).status == 404


@pytest.mark.parametrize("tail", ["-1", "all", "", "1e3", "٣", "1" * 40])
def test_a_tail_is_a_number(tail: str) -> None:
    assert refused(wanted, PageRequest("/log/0.1", {"tail": tail}), FILES).status == 400


def test_only_the_pages_own_files_are_no_secret() -> None:
    assert [Wanted(kind).is_secret for kind in ("file", "status", "events", "log")] == [False, True, True, True]


# --- who may ----------------------------------------------------------------------------------------------------------

OPEN, SHUT = Access(None, {"node-1"}, OWN_UID), Access(TOKEN, {"node-1"}, OWN_UID)


def check(
    access: Access, *, host: str | None = "localhost:80", secret: bool = True, uid: int | None = OWN_UID, **headers: str
) -> int:
    told = {name.replace("_", "-"): value for name, value in headers.items()} | ({"host": host} if host else {})
    try:
        access.check(PageRequest("/", {}, told), Wanted("events" if secret else "file"), uid)
    except Refused as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:80", "[::1]", "10.1.2.3:80", "node-1:80", "Node-1."]
)
def test_this_host_goes_by_these_names(host: str) -> None:
    assert check(OPEN, host=host, secret=False) == check(OPEN, host=host) == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "node-1.evil.example", "localhost.evil.example"])
def test_a_name_that_somebody_has_made_to_point_here_is_refused(host: str) -> None:
    assert check(OPEN, host=host) == check(OPEN, host=host, secret=False) == 403


def test_with_a_token_longer_names_of_this_host_are_taken_but_no_others() -> None:
    right = f"Bearer {TOKEN}"
    assert check(SHUT, host="node-1.cluster:80", authorization=right) == 200
    assert check(SHUT, host="evil.example", authorization=right) == 403


@pytest.mark.parametrize("host", [None, "", "a b", "a:b:c", "localhost:80:80", "localhost/x", "[::1", "a@localhost"])
def test_without_a_host_nothing_is_answered(host: str | None) -> None:
    assert check(OPEN, host=host) == 400


def test_a_page_of_another_site_gets_nothing_of_the_run() -> None:
    assert check(OPEN, sec_fetch_site="cross-site") == check(OPEN, sec_fetch_site="same-site") == 403
    assert check(OPEN, sec_fetch_site="same-origin") == check(OPEN, sec_fetch_site="none") == 200
    assert check(OPEN, sec_fetch_site="cross-site", secret=False) == 200, "a link to the page may be clicked"


def test_without_a_token_the_page_is_for_this_user_and_root() -> None:
    assert [check(OPEN, uid=uid) for uid in (OWN_UID, 0, 1001, None)] == [200, 200, 403, 403]
    assert check(OPEN, uid=None, secret=False) == 200


def test_with_one_it_is_for_whoever_has_it() -> None:
    assert check(SHUT, uid=None, authorization=f"Bearer {TOKEN}") == 200
    assert check(SHUT, uid=None, authorization=f"bearer  {TOKEN} ") == 200
    wrong = ["", f"Basic {TOKEN}", TOKEN, "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer \xff"]
    assert {check(SHUT, uid=0, authorization=text) for text in wrong} == {401}
    assert check(SHUT, uid=0) == 401, "root too"
    assert check(SHUT, secret=False) == 200, "the page itself, which asks for the token"


def test_a_refusal_does_not_repeat_what_was_sent_and_access_does_not_show_its_token() -> None:
    error = refused(a_request, "GET / HTTP/1.1", "<script>")
    assert "<" not in str(error)
    assert TOKEN not in repr(SHUT)


def test_tokens_are_long_and_checked() -> None:
    assert len({new_token() for _ in range(100)}) == 100
    assert checked_token(f"{new_token()}\n")
    for text in ("", "short", "with a space in the middle", "x" * 513, "zwölf-zeichen-und-mehr"):
        with pytest.raises(ValueError, match="letters, digits"):
            checked_token(text)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost", ""])
def test_only_loopback_is_loopback(address: str) -> None:
    assert not is_loopback(address)
    assert is_loopback("127.1.2.3")
