"""Metadata services of clouds, by real HTTP; and servers that hang or talk nonsense."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.process.deadline_clocks import NOON_S, PATIENCE_S, Clocks
from tests.process.metadata_servers import Cloud, hanging, saying
from tests.waiting import wait_until
from torchelastic.lifetime import close_all, detect, nearest
from torchelastic.lifetime.sources import AwsSpot, AzureScheduledEvents, GcpPreemption, Poller
from torchelastic.lifetime.sources.clouds import MetadataSource
from torchelastic.lifetime.sources.metadata import NoAnswerError, open_url, request

Make = Callable[..., MetadataSource]
CLOUDS: list[Make] = [AwsSpot, GcpPreemption, AzureScheduledEvents]
each_cloud = pytest.mark.parametrize("make", CLOUDS, ids=["aws", "gcp", "azure"])


def source(make: Make, endpoint: str, clocks: Clocks, **more: object) -> MetadataSource:
    return make(endpoint, clock=clocks.clock, wall_clock=clocks.wall_clock, **more)


def spot_notice(date: str = "2026-11-21T12:01:30Z") -> dict[str, str]:
    return {"spot/instance-action": f'{{"action": "terminate", "time": "{date}"}}'}


@each_cloud
def test_a_quiet_cloud_is_no_deadline_and_is_asked_again(make: Make, cloud: Cloud, clocks: Clocks) -> None:
    quiet = source(make, cloud.endpoint, clocks)
    assert quiet.poll() in (2.0, 5.0)
    assert quiet.is_present
    assert quiet.remaining_s(clocks.now_s) is None
    assert f"{cloud.endpoint} is asked every" in quiet.reason


def test_a_spot_notice_counts_by_the_clock_of_aws(cloud: Cloud, clocks: Clocks) -> None:
    clocks.wall_s += 600.0  # the clock of this host is wrong
    aws = source(AwsSpot, cloud.endpoint, clocks)
    aws.poll()
    cloud.aws = spot_notice()
    aws.poll()
    assert aws.remaining_s(clocks.now_s) == 89.0
    assert aws.reason == "EC2 will terminate this spot instance at 2026-11-21T12:01:30Z"


def test_what_was_read_once_does_not_move_with_the_clocks(cloud: Cloud, clocks: Clocks) -> None:
    aws = source(AwsSpot, cloud.endpoint, clocks)
    cloud.aws = spot_notice()
    aws.poll()
    cloud.wall_s = NOON_S + 3600.0
    clocks.now_s += 5.0
    aws.poll()
    assert aws.remaining_s(clocks.now_s) == 84.0
    cloud.aws = spot_notice("2026-11-21T13:00:30Z")  # another date is read anew
    aws.poll()
    assert aws.remaining_s(clocks.now_s) == 29.0


def test_a_rebalance_recommendation_is_told_and_is_no_deadline(
    cloud: Cloud, clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    cloud.aws = {"events/recommendations/rebalance": '{"noticeTime": "2026-11-21T12:00:00Z"}'}
    advised, leaving = (source(AwsSpot, cloud.endpoint, clocks, rebalance_lead_s=lead_s) for lead_s in (None, 600.0))
    advised.poll()
    assert advised.remaining_s(clocks.now_s) is None
    assert [notice.kind for notice in advised.notices] == ["advice"]
    assert "elevated risk of interruption" in caplog.text
    leaving.poll()
    assert leaving.remaining_s(clocks.now_s) == 600.0


def test_a_token_is_asked_for_once_and_again_when_it_no_longer_counts(cloud: Cloud, clocks: Clocks) -> None:
    aws = source(AwsSpot, cloud.endpoint, clocks)
    aws.poll()
    aws.poll()
    assert cloud.requests.count("PUT /latest/api/token") == 1
    cloud.tokens.clear()
    cloud.aws = spot_notice()
    aws.poll()  # refused
    assert aws.remaining_s(clocks.now_s) is None
    aws.poll()
    assert aws.remaining_s(clocks.now_s) == 89.0
    clocks.now_s += 6 * 3600.0
    aws.poll()
    assert cloud.requests.count("PUT /latest/api/token") == 3


def test_no_token_comes_into_the_log(cloud: Cloud, clocks: Clocks, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        aws = source(AwsSpot, cloud.endpoint, clocks)
        aws.poll()
        cloud.tokens, token = set(), cloud.tokens.pop()
        for _ in range(3):
            cloud.is_down = True
            aws.poll()
    assert "retrying" in caplog.text
    assert token not in caplog.text


def test_gcp_gives_half_a_minute_from_when_it_may_have_begun(cloud: Cloud, clocks: Clocks) -> None:
    gcp = source(GcpPreemption, cloud.endpoint, clocks)
    gcp.poll()
    clocks.pass_s(1.5)
    cloud.gcp["preempted"] = "TRUE"
    gcp.poll()
    assert gcp.remaining_s(clocks.now_s) == 28.5
    clocks.pass_s(2.0)
    gcp.poll()
    assert gcp.remaining_s(clocks.now_s) == 26.5


def test_gcp_maintenance_may_be_called_off(cloud: Cloud, clocks: Clocks) -> None:
    gcp = source(GcpPreemption, cloud.endpoint, clocks, maintenance_lead_s=3600.0)
    cloud.gcp["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    gcp.poll()
    assert gcp.remaining_s(clocks.now_s) == 3600.0
    cloud.gcp["maintenance-event"] = "NONE"
    gcp.poll()
    assert gcp.remaining_s(clocks.now_s) is None


def test_azure_events_count_for_this_machine_only_and_may_be_withdrawn(cloud: Cloud, clocks: Clocks) -> None:
    azure = source(AzureScheduledEvents, cloud.endpoint, clocks)
    event = {"EventType": "Preempt", "EventStatus": "Scheduled", "NotBefore": "Sat, 21 Nov 2026 12:00:31 GMT"}
    cloud.azure_events = [{**event, "Resources": ["gpu_4"]}]
    azure.poll()
    assert azure.remaining_s(clocks.now_s) is None
    cloud.azure_events.append({**event, "Resources": ["gpu_3"]})
    azure.poll()
    assert azure.remaining_s(clocks.now_s) == 30.0
    cloud.azure_events = [{**event, "EventStatus": "Started", "NotBefore": "", "Resources": ["gpu_3"]}]
    azure.poll()
    assert azure.remaining_s(clocks.now_s) == 0.0
    cloud.azure_events = []
    azure.poll()
    assert azure.remaining_s(clocks.now_s) is None


@each_cloud
def test_an_absent_service_is_found_out_once_and_quietly(
    make: Make, clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    def refused(asks: object, timeout_s: float) -> object:
        asked.append("once more")
        return open_url(request("http://127.0.0.1:1", {}), timeout_s)

    absent = source(make, "http://127.0.0.1:1", clocks, opener=refused)
    assert [absent.poll(), absent.poll(), absent.poll()] == [0.5, 1.0, None]
    assert len(asked) == 3
    assert not absent.is_present
    assert not caplog.records


@pytest.mark.long
def test_a_cloud_that_is_named_and_comes_up_after_the_first_seconds_is_heard_of_all_the_same(cloud: Cloud) -> None:
    """By the clock, and through what `IterManager` and `train(lifetime=)` call."""
    cloud.is_down = True
    variables = {"TORCHELASTIC_METADATA": "gcp", "TORCHELASTIC_METADATA_ENDPOINT": cloud.endpoint}
    found = detect({**variables, "TORCHELASTIC_DEADLINE_SIGNALS": "none"})
    try:
        wait_until(lambda: len(cloud.requests) > 3)  # after three it was given up, for good
        cloud.gcp["preempted"] = "TRUE"
        cloud.is_down = False
        together = nearest(found)
        wait_until(lambda: together.remaining_s(time.monotonic()) is not None)
    finally:
        close_all(found)


@each_cloud
def test_a_service_that_hangs_is_given_up(make: Make, clocks: Clocks) -> None:
    def hurried(asks: object, timeout_s: float) -> object:
        assert timeout_s == 1.0
        return open_url(asks, 0.05)  # type: ignore[arg-type]

    with hanging() as server:
        absent = source(make, server.endpoint, clocks, opener=hurried)
        assert [absent.poll(), absent.poll(), absent.poll()] == [0.5, 1.0, None]


def test_while_a_service_hangs_the_training_thread_does_not() -> None:
    with hanging() as server:
        aws = AwsSpot(server.endpoint)
        poller = Poller()
        poller.add(aws.poll)
        assert server.was_asked.wait(PATIENCE_S)
        assert aws.remaining_s(0.0) is None
        assert "announces nothing" in aws.reason
        poller.remove(aws.poll)
    wait_until(lambda: poller.thread is None)


HTML = b"HTTP/1.1 200 OK\r\nContent-Length: 26\r\n\r\n<html>Please log in</html>"


@each_cloud
@pytest.mark.parametrize(
    "answer",
    [
        HTML,
        b"220 mail.example.com ESMTP\r\n",
        b"\x00\xff\xfe" * 100,
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhalf of it",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/login\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 999 So what\r\n\r\n",
        b"",
    ],
    ids=["html", "smtp", "binary", "torn", "redirection", "status", "nothing"],
)
def test_a_service_that_talks_nonsense_is_none(
    make: Make, answer: bytes, clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    with saying(answer) as endpoint:
        absent = source(make, endpoint, clocks)
        assert [absent.poll(), absent.poll(), absent.poll()] == [0.5, 1.0, None]
    assert absent.remaining_s(clocks.now_s) is None
    assert not caplog.records


@each_cloud
def test_an_answer_without_end_is_cut_short(make: Make, clocks: Clocks) -> None:
    with saying(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1024, again=True) as endpoint:
        absent = source(make, endpoint, clocks)
        assert [absent.poll(), absent.poll(), absent.poll()] == [0.5, 1.0, None]


def test_an_answer_that_drips_is_cut_short() -> None:
    with (
        saying(b"HTTP/1.1 200 OK\r\n\r\nx", again=True, slowly=True) as endpoint,
        pytest.raises(NoAnswerError, match="does not end"),
    ):
        open_url(request(endpoint, {}), 0.1)


def test_nonsense_from_a_service_that_was_there_takes_nothing_back(
    cloud: Cloud, clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    aws = source(AwsSpot, cloud.endpoint, clocks)
    cloud.aws = spot_notice()
    aws.poll()
    caplog.clear()
    cloud.aws = {"spot/instance-action": "<html>"}
    pauses = [aws.poll() for _ in range(9)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert aws.remaining_s(clocks.now_s) == 89.0
    (record,) = caplog.records
    assert "no valid answer; retrying" in record.getMessage()
    cloud.aws = {}
    assert aws.poll() == 5.0
    assert aws.remaining_s(clocks.now_s) is None


def test_a_proxy_is_not_asked_about_this_machine(cloud: Cloud) -> None:
    code = (
        "import sys; from torchelastic.lifetime.sources import GcpPreemption; print(GcpPreemption(sys.argv[1]).poll())"
    )
    environment = {**os.environ, "http_proxy": "http://127.0.0.1:1", "no_proxy": ""}
    command = [sys.executable, "-c", code, cloud.endpoint]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S * 3)
    assert done.stdout == "2.0\n", done.stderr


def test_nobody_is_sent_on_to_another_server(cloud: Cloud) -> None:
    answer = f"HTTP/1.1 302 Found\r\nLocation: {cloud.endpoint}/login\r\nContent-Length: 0\r\n\r\n"
    with saying(answer.encode()) as endpoint:
        assert open_url(request(endpoint, {}), PATIENCE_S).status == 302
    assert not cloud.requests
