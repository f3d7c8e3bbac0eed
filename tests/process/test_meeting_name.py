"""Several hosts meet at one whose name is not known yet when a launcher starts: a pod's, before it is scheduled."""

from __future__ import annotations

import logging
import socket
from typing import Any

import pytest

from torchelastic.launch.own_etcd import meeting_place

OF_NOBODY_HERE = "192.0.2.1"


def test_a_launcher_waits_for_the_name_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, asked = socket.getaddrinfo, []

    def known_at_the_third_time(host: str, *rest: Any, **more: Any) -> Any:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return plain(OF_NOBODY_HERE, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", known_at_the_third_time)
    with caplog.at_level(logging.WARNING), meeting_place("job-node-0-0.job", 29500, "job7", 30.0):
        pass
    assert asked == ["job-node-0-0.job"] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for the name job-node-0-0.job, which is not known yet, up to 30 s"
    ]


def test_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(OSError, match="not known"), meeting_place("nobody", 29500, "job7", 0.3):
        pass
