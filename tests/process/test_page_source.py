"""Where the live page listens, and where what it shows comes from."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import time
import types
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.process.page_clients import TOKEN, get
from tests.pure.status_runs import NOW_S, a_host
from torchelastic.agent.showing import Showing
from torchelastic.agent.supervisor import Supervisor
from torchelastic.agent.worker import Worker
from torchelastic.launch.options import UsageError
from torchelastic.launch.page import opened_page
from torchelastic.ledger.events import Save
from torchelastic.ledger.host_ledger import HostLedger
from torchelastic.page.document import About, document_of
from torchelastic.page.listening import PageOptions, listening
from torchelastic.page.logs import Logs
from torchelastic.page.source import RunSource
from torchelastic.rendezvous.memory import MemoryStore
from torchelastic.rendezvous.records import Keys, Member, Round, RoundState, encode_member, encode_round
from torchelastic.rendezvous.store import StoreUnavailableError
from torchelastic.rendezvous.url import parse_url
from torchelastic.status.host import HostView
from torchelastic.status.reading import StatusReader
from torchelastic.status.run_status import HostStatus, RunStatus, combined

# --- where it listens -------------------------------------------------------------------------------------------------


def test_another_address_than_loopback_wants_a_token(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--page-token-file"):
        listening("0.0.0.0:0", None, is_seen=False)
    seen = listening("0.0.0.0:0", None, is_seen=True)
    assert seen.token is not None
    assert seen.url_to_open == f"{seen.url}#token={seen.token}"
    path = tmp_path / "token"
    first = listening("0.0.0.0:0", path, is_seen=False)
    second = listening("0", path, is_seen=False)
    assert first.token == second.token == path.read_text().strip()
    assert path.stat().st_mode & 0o777 == 0o600
    assert "token" not in first.url_to_open, "who has the file knows it"
    for one in (seen, first, second):
        one.socket.close()


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
            listening("0", path, is_seen=False)
        assert content not in str(error.value)


def test_an_address_that_cannot_be_had_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
            listening(str(port), None, is_seen=False)
    with pytest.raises(OSError, match=r"no\.such\.host\.invalid"):
        listening("no.such.host.invalid:0", None, is_seen=False)


def opened(stack: contextlib.ExitStack, **options: Any) -> PageOptions | None:
    usual = {"page": None, "page_token_file": None, "standalone": False}
    return opened_page(argparse.Namespace(**{**usual, **options}), stack)


def test_the_page_is_off_unless_it_is_asked_for_and_on_loopback_for_a_run_on_one_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with contextlib.ExitStack() as stack:
        assert opened(stack) is None
        assert opened(stack, standalone=True, page="off") is None
        assert capsys.readouterr().err == ""
        page = opened(stack, standalone=True)
        assert page is not None
        assert page.url.startswith("http://127.0.0.1:")
        assert capsys.readouterr().err == f"live page: {page.url}\n"
        with pytest.raises(UsageError, match="cannot listen"):
            opened(stack, page=page.url.split("/")[2])
    assert page.socket.fileno() == -1


def test_a_page_for_other_hosts_wants_a_file_for_its_token_where_nobody_sees_what_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        with pytest.raises(UsageError, match="--page-token-file"):
            opened(stack, page="0.0.0.0:0")
        with pytest.raises(UsageError, match="--page "):
            opened(stack, page_token_file=tmp_path / "token")
        assert opened(stack, page="0.0.0.0:0", page_token_file=tmp_path / "token") is not None
        assert (tmp_path / "token").read_text().strip() not in capsys.readouterr().err
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        page = opened(stack, page="0.0.0.0:0")
        assert page is not None
        assert f"#token={page.token}" in capsys.readouterr().err


# --- where pictures come from -----------------------------------------------------------------------------------------


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

    source = RunSource(Reader(store, url), "job7", own, About("node-1"), Logs(), clock=lambda: now_s[0])
    document = source.read().document
    assert (document["round"]["number"], document["step"], document["page"]["etcd_away_s"]) == (4, 1200, 0.0)
    away[0], now_s[0], step[0] = True, NOW_S + 7, 1300
    document = source.read().document
    assert (document["round"]["number"], document["step"], document["page"]["etcd_away_s"]) == (4, 1300, NOW_S + 7)
    away[0], now_s[0] = False, NOW_S + 9
    until_s = time.monotonic() + 10
    while source.read().document["page"]["etcd_away_s"]:
        assert time.monotonic() < until_s


def test_an_agent_shows_more_events_of_its_host_than_it_tells_etcd_and_its_workers_logs(tmp_path: Path) -> None:
    url = parse_url("etcd://etcd:2379/job7?min_workers=1&max_workers=4")
    view = HostView("node-1", "0badcafe")
    for step in range(40):
        view.write(Save(at_ns=time.monotonic_ns(), worker="node-1/0.0", step=step), HostLedger())
    assert [line.step for line in view.status(HostLedger()).events] == list(range(20, 40))
    (tmp_path / "worker_0.0.log").write_text("first life\n")
    worker = Worker(0, restarts=1, log_paths={life: tmp_path / f"worker_0.{life}.log" for life in range(2)})
    supervisor = types.SimpleNamespace(workers=[worker, Worker(1)])

    async def show() -> tuple[dict[str, Any], bytes]:
        options = listening("0", None, is_seen=False)
        showing = Showing(
            options, MemoryStore(), url, host="node-1", status=lambda: view.status(HostLedger()), events=view.lines,
            supervisor=cast(Supervisor, supervisor),
        )  # fmt: skip
        showing.start()
        status = await asyncio.to_thread(lambda: json.load(get(options, "/status.json")))
        log = await asyncio.to_thread(lambda: get(options, "/log/0.0").read())
        assert (await asyncio.to_thread(lambda: get(options, "/log/1.0").status)) == 404
        await showing.stop()
        return status, log

    status, log = asyncio.run(show())
    assert [event["step"] for event in status["events"]] == list(range(40))
    assert log == b"first life\n"


def test_a_run_of_which_nothing_is_known_yet_has_a_picture() -> None:
    status = combined("job7", NOW_S, Round(), (), ())
    document = document_of(status, About("node-1"))
    assert document["workers"] == document["events"] == {}
