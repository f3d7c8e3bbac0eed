"""What the live page answers: decisions about requests, without a socket."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.observe.page.access import Access, checked_token, new_token
from torchelastic.observe.page.http_request import HttpError, PageRequest, Wanted, parsed, wanted

FILES = {"index.html": 0, "page.js": 0}
TOKEN = "a-token-of-some-length"


def a_request(line: str, *headers: str) -> PageRequest:
    return parsed("\r\n".join([line, *(headers or ["Host: localhost:8080"])]).encode("latin-1"))


def refused(call: Any, *arguments: Any) -> HttpError:
    with pytest.raises(HttpError) as caught:
        call(*arguments)
    return caught.value


# --- heads ------------------------------------------------------------------------------------------------------------


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
        "GET / HTTP/1.1\r\nAuthorization: a\r\nAuthorization: b",
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused(head: str) -> None:
    assert refused(parsed, head.encode("latin-1")).status == 400


@given(st.binary(max_size=300))
def test_any_bytes_are_a_request_or_are_refused(head: bytes) -> None:
    for tried in (head, b"GET /" + head + b" HTTP/1.1", b"GET / HTTP/1.1\r\n" + head):
        try:
            status, path = 200, parsed(tried).path
        except HttpError as error:
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
        ("/events?more", Wanted("events")),
    ],
)
def test_these_things_can_be_asked_for(path: str, expected: Wanted) -> None:
    assert wanted(a_request(f"GET {path} HTTP/1.1"), FILES) == expected


@pytest.mark.parametrize(
    "path",
    [
        "/nothing", "/../etc/passwd", "/%2e%2e/etc/passwd", "//etc/passwd", "/page.js/", "/./page.js", "/page.js%00",
        "/Events",
    ],
)  # fmt: skip
def test_nothing_else_can(path: str) -> None:
    assert refused(wanted, a_request(f"GET {path} HTTP/1.1"), FILES).status == 404


# --- who may ----------------------------------------------------------------------------------------------------------

ACCESS = Access(TOKEN, {"node-1"})


def check(*, host: str | None = "localhost:80", secret: bool = True, **headers: str) -> int:
    """The answer to somebody who has the token, unless it is said what is sent."""
    told = {"authorization": f"Bearer {TOKEN}", **({"host": host} if host else {})}
    told |= {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        ACCESS.check(PageRequest("/", told), Wanted("events" if secret else "file"))
    except HttpError as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:1",
        "127.0.0.1:80",
        "[::1]:80",
        "[::1]",
        "10.1.2.3:80",
        "node-1:80",
        "Node-1.",
    ],
)
def test_this_host_goes_by_these_names(host: str) -> None:
    assert check(host=host, secret=False) == check(host=host) == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example"])
def test_a_name_that_somebody_has_made_to_point_here_is_refused(host: str) -> None:
    assert check(host=host) == check(host=host, secret=False) == 403


@pytest.mark.parametrize("host", [None, "", "a b", "a:b:c", "localhost:80:80", "localhost/x", "[::1", "a@localhost"])
def test_without_a_host_nothing_is_answered(host: str | None) -> None:
    assert check(host=host) == 400


def test_a_page_of_another_site_gets_nothing_of_the_run() -> None:
    assert check(sec_fetch_site="cross-site") == check(sec_fetch_site="same-site") == 403
    assert check(sec_fetch_site="same-origin") == check(sec_fetch_site="none") == 200
    assert check(sec_fetch_site="cross-site", secret=False) == 200, "a link to the page may be clicked"


def test_it_is_for_whoever_has_the_token() -> None:
    assert check(authorization=f"Bearer {TOKEN}") == 200
    assert check(authorization=f"bearer  {TOKEN} ") == 200
    wrong = ["", f"Basic {TOKEN}", TOKEN, "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer \xff"]
    assert {check(authorization=text) for text in wrong} == {401}
    assert check(authorization="", secret=False) == 200, "the page itself, which asks for the token"


def test_a_refusal_does_not_repeat_what_was_sent_and_access_does_not_show_its_token() -> None:
    error = refused(a_request, "GET / HTTP/1.1", "<script>")
    assert "<" not in str(error)
    assert TOKEN not in repr(ACCESS)


def test_tokens_are_long_and_checked() -> None:
    assert len({new_token() for _ in range(100)}) == 100
    assert checked_token(f"{new_token()}\n")
    for text in ("", "short", "with a space in the middle", "x" * 513, "zwölf-zeichen-und-mehr"):
        with pytest.raises(ValueError, match="letters, digits"):
            checked_token(text)
