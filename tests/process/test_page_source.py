"""Where the live page listens, and where what it shows comes from."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.memory_store import MemoryStore
from tests.process.page_clients import TOKEN
from tests.pure.status_runs import NOW_S, a_host, a_run
from tests.waiting import wait_until
from torchelastic.launch.run import opened_page
from torchelastic.observe.page.document import About
from torchelastic.observe.page.listening import PageOptions, listening
from torchelastic.observe.page.source import RunSource, with_own_host
from torchelastic.observe.status.run_status import HostStatus, RunStatus
from torchelastic.observe.status.status_format import run_to_plain
from torchelastic.observe.status.status_reader import StatusReader
from torchelastic.rendezvous.records import KeptOut, Keys, Member, Round, RoundState, encode_member, encode_round
from torchelastic.rendezvous.store import StoreUnavailableError
from torchelastic.rendezvous.url import parse_url
from torchelastic.usage import UsageError

# --- where it listens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["0", "0.0.0.0:0"])
def test_a_page_has_a_token_a_new_one_or_that_of_a_file(tmp_path: Path, at: str) -> None:
    seen = listening(at, None)
    assert seen.url_to_open == f"{seen.url}#token={seen.token}"
    path = tmp_path / "token"
    first = listening(at, path)
    second = listening(at, path)
    assert first.token == second.token == path.read_text().strip()
    assert path.stat().st_mode & 0o777 == 0o600
    assert "token" not in first.url_to_open, "who has the file knows it"
    for one in (seen, first, second):
        one.socket.close()


def test_of_two_agents_that_begin_at_once_the_second_takes_the_token_that_the_first_is_writing(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    first = threading.Timer(0.2, path.write_text, [f"{TOKEN}\n"])
    first.start()
    second = listening("0", path)
    first.join()
    assert second.token == TOKEN
    second.socket.close()


def test_a_token_that_everybody_may_read_or_that_is_none_is_refused_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "token"
    for content, mode, message in (
        (TOKEN, 0o644, "chmod 600"),
        ("guess", 0o600, "holds no token"),
        ("é" * 20, 0o600, "ASCII"),
    ):
        path.write_text(content)
        path.chmod(mode)
        with pytest.raises(ValueError, match=message) as error:
            listening("0", path)
        assert content not in str(error.value)


def test_a_token_file_that_cannot_be_had_is_one_line_with_the_option_and_what_to_do(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        for path, reason in ((tmp_path / "no" / "file", "No such file or directory"), (tmp_path, "Is a directory")):
            with pytest.raises(UsageError) as error:
                opened(stack, tmp_path, page="0", page_token_file=path)
            assert str(error.value).startswith(f"--page-token-file {path}: {reason}; name a file")
        (tmp_path / "empty").touch(mode=0o600)
        with pytest.raises(UsageError, match=r"empty holds no token: .*without the file one is made"):
            opened(stack, tmp_path, page="0", page_token_file=tmp_path / "empty")


def opened(stack: contextlib.ExitStack, folder: Path, **options: Any) -> PageOptions | None:
    words = argparse.Namespace(**{"page": None, "page_token_file": None, "standalone": False, **options})
    return opened_page(words, stack, "", folder, lambda text: print(text, file=sys.stderr))


def test_the_page_is_off_unless_it_is_asked_for_and_on_loopback_for_a_run_on_one_host(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        assert opened(stack, tmp_path) is None
        assert opened(stack, tmp_path, standalone=True, page="off") is None
        assert capsys.readouterr().err == ""
        page = opened(stack, tmp_path, standalone=True)
        assert page is not None
        assert page.url.startswith("http://127.0.0.1:")
        (file,) = tmp_path.iterdir()
        assert capsys.readouterr().err == f"live page: {page.url} (its token is in {file})\n"
        with pytest.raises(UsageError, match=r"^--page cannot listen"):
            opened(stack, tmp_path, page=page.url.split("/")[2])
    assert page.socket.fileno() == -1


@pytest.mark.parametrize("at", ["0", "0.0.0.0:0"])
def test_the_token_is_shown_on_a_terminal_and_else_is_in_a_file_for_its_owner_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at: str
) -> None:
    with contextlib.ExitStack() as stack:
        with pytest.raises(UsageError, match="--page "):
            opened(stack, tmp_path, page_token_file=tmp_path / "token")
        page = opened(stack, tmp_path, page=at)
        assert page is not None
        (file,) = tmp_path.iterdir()
        assert (file.read_text().strip(), file.stat().st_mode & 0o777) == (page.token, 0o600)
        assert page.token not in capsys.readouterr().err
        named = opened(stack, tmp_path, page=at, page_token_file=tmp_path / "token")
        assert named is not None
        assert (tmp_path / "token").read_text().strip() == named.token
        assert capsys.readouterr().err == f"live page: {named.url}\n", "who names the file knows it"
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        shown = opened(stack, tmp_path, page=at)
        assert shown is not None
        assert capsys.readouterr().err == f"live page: {shown.url}#token={shown.token}\n"
        assert len({page.token, named.token, shown.token}) == 3


# --- where pictures come from -----------------------------------------------------------------------------------------


def test_while_etcd_is_away_how_fast_the_run_is_is_told_by_the_own_host_alone() -> None:
    before = a_run(a_host("node-1", 0), a_host("node-2", 1))
    own = a_host("node-1", 0, at_s=NOW_S + 60)
    own = replace(own, workers=tuple(replace(one, steps_per_s=0.02) for one in own.workers))
    assert with_own_host(before, own, NOW_S + 1).steps_per_s > 1
    assert with_own_host(before, own, NOW_S + 60, away_s=59).steps_per_s == 0.02, "training has stopped meanwhile"


def test_the_page_knows_of_hosts_that_are_kept_out_or_have_left_what_the_status_knows() -> None:
    url = parse_url("etcd://etcd:2379/job7?min_workers=1&max_workers=4")
    store, keys = MemoryStore(), Keys(url.root)
    store.put(keys.round, encode_round(Round(4, RoundState.RUNNING, (), lost=("node-2-0-bbbbbbbb1",))))
    store.put(keys.kept_out_of("node-3"), KeptOut(NOW_S - 9, "its health check failed").encode())
    reader = StatusReader(store, url, clock=lambda: NOW_S)
    source = RunSource(reader, "job7", lambda: a_host("node-1", 0), About("node-1"), clock=lambda: NOW_S)
    shown, known = source.read(), run_to_plain(reader.read())
    assert [one["host"] for one in known["kept_out"]] == ["node-3"]
    assert "node-2" in [one["host"] for one in known["left"]]
    for name in ("kept_out", "left"):
        assert shown.status[name] == shown.document[name] == known[name], name
    noted = [one["text"] for one in shown.document["notes"]]
    assert noted[0] == "kept out of the run: node-3: its health check failed"
    assert noted[1:] == [one["text"] for one in known["notes"] if one["text"].startswith("left: node-2")]
    assert [one["text"] for one in shown.status["events"] if one["kind"] == "kept_out"] == [
        "kept out of the run: its health check failed"
    ]


def test_while_etcd_is_away_the_own_host_goes_on_and_the_page_says_since_when() -> None:
    url = parse_url("etcd://etcd:2379/job7?min_workers=1&max_workers=4")
    store, keys = MemoryStore(), Keys(url.root)
    store.put(keys.round, encode_round(Round(4, RoundState.RUNNING, ("m0",))))
    store.put(keys.member("m0"), encode_member(Member("m0", "node-1")))
    away = [False]

    class Reader(StatusReader):
        def read(self) -> RunStatus:
            if away[0]:
                raise StoreUnavailableError("etcd is away")
            return super().read()

    now_s, step = [NOW_S], [1200]

    def own() -> HostStatus:
        host = a_host("node-1", 0, at_s=now_s[0])
        return replace(host, workers=tuple(replace(one, step=step[0]) for one in host.workers))

    source = RunSource(Reader(store, url), "job7", own, About("node-1"), clock=lambda: now_s[0])
    document = source.read().document
    assert (document["round"]["number"], document["step"], document["page"]["etcd_away_s"]) == (4, 1200, 0.0)
    away[0], now_s[0], step[0] = True, NOW_S + 7, 1300
    document = source.read().document
    assert (document["round"]["number"], document["step"], document["page"]["etcd_away_s"]) == (4, 1300, NOW_S + 7)
    away[0], now_s[0] = False, NOW_S + 9
    wait_until(lambda: not source.read().document["page"]["etcd_away_s"], 10, "etcd is back")
