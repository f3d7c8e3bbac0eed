"""A release of etcd that its makers advise against is named to who uses it, by its makers' bounds, once."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import pytest

from torchelastic.agent.etcd_opening import connect, say_if_unfit
from torchelastic.rendezvous.credentials import Credentials
from torchelastic.rendezvous.etcd_versions import is_inconsistent, numbers_of
from torchelastic.rendezvous.server import EtcdServer, find_etcd_binary
from torchelastic.rendezvous.url import parse_url


@pytest.fixture(autouse=True)
def _nothing_was_said_before() -> None:
    say_if_unfit.cache_clear()


def test_a_shared_etcd_of_such_a_release_is_warned_of_once_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    for version in ("3.5.1", "3.5.1", "3.5.3", "3.4.23", "3.6.0", ""):
        say_if_unfit("10.0.0.3:2379", version, is_own=False)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "etcd at 10.0.0.3:2379 is 3.5.1" in record.getMessage()
    assert "use 3.5.3 or newer, or 3.4" in record.getMessage()


def test_that_of_a_launcher_alone_is_no_reason_to_worry(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    say_if_unfit("127.0.0.1:4000", "3.5.1", is_own=True)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "thrown away with the run" in record.getMessage()


def test_a_real_etcd_tells_its_version_once_with_each_connection(tmp_path: Path) -> None:
    binary = find_etcd_binary()
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    told: list[tuple[str, str]] = []
    with EtcdServer(data_dir=tmp_path / "data", binary=binary) as server:
        url = parse_url(f"etcd://{server.endpoint}/job?min_workers=1&max_workers=1")
        store = connect(url, Credentials(), lambda endpoint, version: told.append((endpoint, version)))
        store.get("/key")
        store.get("/key")
        store.close()
        assert [endpoint for endpoint, _ in told] == [server.endpoint]
    assert numbers_of(told[0][1]) == numbers_of(version) != ()
    assert is_inconsistent(told[0][1]) == is_inconsistent(version)
