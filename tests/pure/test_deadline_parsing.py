"""What schedulers, clouds and files say, as values; and what it means in monotonic time."""

from __future__ import annotations

import signal

import pytest

from torchelastic.lifetime import Deadline
from torchelastic.lifetime.grace import term_grace_s
from torchelastic.lifetime.sources.clouds import (
    parse_instance_action,
    parse_maintenance,
    parse_preempted,
    parse_rebalance,
    parse_scheduled_events,
    pause_s,
)
from torchelastic.lifetime.sources.detection import clouds_of
from torchelastic.lifetime.sources.files import parse_termination, pre_stop_notice
from torchelastic.lifetime.sources.metadata import Answer, http_seconds, iso_seconds, request
from torchelastic.lifetime.sources.notice import Event, InvalidAnswerError, Notice, Notices
from torchelastic.lifetime.sources.signals import parse_signals, signal_notice
from torchelastic.lifetime.sources.slurm import parse_end_time

NOON_S = 1_795_262_400.0  # Sat, 21 Nov 2026 12:00:00 GMT
HTML = "<html><body>Welcome to this hotel's network</body></html>"


def azure_event(kind: str = "Preempt", status: str = "Scheduled", machine: str = "gpu_3", before: str = "") -> str:
    return (
        f'{{"DocumentIncarnation": 2, "Events": [{{"EventId": "A", "EventType": "{kind}", "ResourceType": '
        f'"VirtualMachine", "Resources": ["other", "{machine}"], "EventStatus": "{status}", '
        f'"NotBefore": "{before}"}}]}}'
    )


# --- dates ------------------------------------------------------------------------------------------------------------


def test_dates_of_both_sorts_are_unix_seconds() -> None:
    assert iso_seconds("2026-11-21T12:00:00Z") == NOON_S
    assert http_seconds("Sat, 21 Nov 2026 12:00:00 GMT") == NOON_S


@pytest.mark.parametrize("text", ["", "soon", "2026-11-21", "2026-11-21T12:00:00", "2026-13-41T12:00:00Z", HTML])
def test_what_is_no_date_is_an_error_that_shows_it(text: str) -> None:
    with pytest.raises(InvalidAnswerError, match="no date"):
        iso_seconds(text)
    with pytest.raises(InvalidAnswerError, match="no date"):
        http_seconds(text)


def test_the_clock_of_the_service_counts_if_it_tells_it() -> None:
    assert Answer(200, "", {"date": "Sat, 21 Nov 2026 12:00:00 GMT"}).platform_s(5.0) == NOON_S
    assert Answer(200, "", {"date": "yesterday"}).platform_s(5.0) == 5.0
    assert Answer(200).platform_s(5.0) == 5.0


def test_a_notice_never_gives_more_than_the_platform_says_it_does() -> None:
    event = Event("interruption", "off you go", date_s=NOON_S + 900.0, lead_s=120.0)
    notice = event.notice("it", now_s=500.0, appeared_s=495.0, platform_s=NOON_S)
    assert notice == Notice("it", "interruption", 615.0, "off you go")


def test_advice_is_no_deadline() -> None:
    notice = Event("advice", "be careful").notice("it", now_s=500.0, appeared_s=500.0, platform_s=NOON_S)
    assert notice.remaining_s(501.0) is None


# --- notices ----------------------------------------------------------------------------------------------------------


def test_the_nearest_notice_counts_until_it_is_taken_back(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices("cloud", "nothing is announced")
    assert isinstance(notices, Deadline)
    assert (notices.remaining_s(0.0), notices.reason) == (None, "nothing is announced")
    later, sooner = Notice("cloud", "end", 90.0, "at night"), Notice("cloud", "interruption", 30.0, "at noon")
    notices.tell([later, sooner, Notice("cloud", "advice", None, "an umbrella")])
    assert (notices.remaining_s(10.0), notices.reason) == (20.0, "at noon")
    notices.tell([later, sooner])
    notices.tell([later])
    assert (notices.remaining_s(10.0), notices.reason) == (80.0, "at night")
    assert [record.getMessage() for record in caplog.records] == [
        "cloud: at night",
        "cloud: at noon",
        "cloud: an umbrella",
        "cloud: no longer: an umbrella",
        "cloud: no longer: at noon",
    ]


def test_at_any_moment_is_nearer_than_every_date() -> None:
    notices = Notices("cloud", "nothing")
    notices.tell([Notice("cloud", "end", -50.0, "over"), Notice("cloud", "maintenance", None, "now")])
    assert notices.reason == "now"


# --- clouds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["stop", "terminate"])
def test_ec2_says_when_it_takes_a_spot_instance(action: str) -> None:
    event = parse_instance_action(f'{{"action": "{action}", "time": "2026-11-21T12:00:00Z"}}')
    assert (event.kind, event.date_s, event.lead_s) == ("interruption", NOON_S, 120.0)
    assert action in event.reason


def test_ec2_hibernates_without_warning() -> None:
    event = parse_instance_action('{"action": "hibernate", "time": "2026-11-21T12:00:00Z"}')
    assert (event.kind, event.date_s, event.lead_s) == ("interruption", None, None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        HTML,
        "[]",
        "null",
        "7",
        "{}",
        '{"action": "terminate"}',
        '{"action": "dance", "time": "2026-11-21T12:00:00Z"}',
        '{"action": 1, "time": 2}',
        '{"action": "stop", "time": "soon"}',
        "[" * 100_000,
        "9" * 10_000,
    ],
)
def test_nonsense_from_ec2_is_one_sort_of_error(text: str) -> None:
    with pytest.raises(InvalidAnswerError):
        parse_instance_action(text)
    with pytest.raises(InvalidAnswerError):
        parse_rebalance(text, None)


def test_gcp_maintenance_counts_only_if_it_stops_the_machine() -> None:
    assert parse_maintenance("NONE") is None
    assert parse_maintenance("MIGRATE_ON_HOST_MAINTENANCE") is None
    event = parse_maintenance("TERMINATE_ON_HOST_MAINTENANCE", 3600.0)
    assert event is not None
    assert (event.kind, event.lead_s) == ("maintenance", 3600.0)


@pytest.mark.parametrize("text", ["", "PERHAPS", HTML])
def test_nonsense_from_gcp_is_an_error(text: str) -> None:
    with pytest.raises(InvalidAnswerError):
        parse_preempted(text)
    with pytest.raises(InvalidAnswerError):
        parse_maintenance(text)


@pytest.mark.parametrize(
    ("kind", "means"),
    [
        ("Preempt", "interruption"),
        ("Terminate", "interruption"),
        ("Reboot", "maintenance"),
        ("Redeploy", "maintenance"),
        ("Freeze", "advice"),
    ],
)
def test_azure_says_what_it_will_do_and_when(kind: str, means: str) -> None:
    (event,) = parse_scheduled_events(azure_event(kind, before="Sat, 21 Nov 2026 12:00:00 GMT"), "GPU_3")
    assert (event.kind, event.date_s, event.lead_s) == (means, NOON_S, None)


@pytest.mark.parametrize(
    "text",
    [
        '{"DocumentIncarnation": 1, "Events": []}',
        azure_event(machine="gpu_4"),
        azure_event(status="Completed"),
        azure_event(status="Canceled"),
        azure_event("Serenade"),
    ],
)
def test_azure_events_of_others_and_those_that_are_over_are_none_of_ours(text: str) -> None:
    assert parse_scheduled_events(text, "gpu_3") == []


def test_every_event_is_ours_if_our_name_is_not_known() -> None:
    assert len(parse_scheduled_events(azure_event(machine="gpu_4"), "")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        HTML,
        "[]",
        "{}",
        '{"Events": 3}',
        '{"Events": [3]}',
        '{"Events": [{}]}',
        '{"Events": [{"EventType": [], "EventStatus": "Scheduled", "Resources": []}]}',
        azure_event(before="soon"),
        "[" * 100_000,
        "9" * 10_000,
    ],
)
def test_nonsense_from_azure_is_one_sort_of_error(text: str) -> None:
    with pytest.raises(InvalidAnswerError):
        parse_scheduled_events(text, "gpu_3")


def test_the_pauses_after_failures_grow_up_to_a_minute() -> None:
    assert [pause_s(failures) for failures in (1, 2, 3, 7, 8, 5000)] == [0.5, 1.0, 2.0, 32.0, 60.0, 60.0]


def test_a_service_is_asked_over_http_only() -> None:
    with pytest.raises(ValueError, match="begins with http://"):
        request("file:///etc/passwd", {})


# --- which cloud ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "clouds"),
    [
        ("Amazon EC2\np5.48xlarge\n1.0", {"aws": True}),
        ("Xen\nHVM domU\nXen\n4.11.amazon", {"aws": True}),
        ("Google\nGoogle Compute Engine", {"gcp": True}),
        ("Microsoft Corporation\nVirtual Machine\n7783-7084-3265-9085-8269-3286-77", {"azure": True}),
        ("Microsoft Corporation\nVirtual Machine", {"azure": False}),
        ("Supermicro\nSYS-821GE", {}),
        ("Google\nEve", {}),  # a laptop
        ("", {}),
    ],
)
def test_the_firmware_says_which_cloud_it_is(machine: str, clouds: dict[str, bool]) -> None:
    assert clouds_of(machine) == clouds


# --- SLURM ------------------------------------------------------------------------------------------------------------


def test_squeue_tells_the_end_in_unix_seconds_or_in_local_time() -> None:
    assert parse_end_time("42 1795262400\n", "42") == NOON_S
    local = parse_end_time("42 2026-11-21T12:00:00", "42")
    assert local is not None
    assert abs(local - NOON_S) <= 14 * 3600.0


@pytest.mark.parametrize("output", ["", "43 1795262400", "42 tomorrow", "42 12", "42", "42 99999999999999", HTML])
def test_nonsense_from_squeue_is_an_error(output: str) -> None:
    with pytest.raises(InvalidAnswerError, match="squeue"):
        parse_end_time(output, "42")


# --- signals ----------------------------------------------------------------------------------------------------------


def test_signals_have_the_grace_that_they_are_given() -> None:
    assert parse_signals("SIGTERM, SIGUSR1 ,SIGINT=5", 45.0) == {
        signal.SIGTERM: 45.0,
        signal.SIGUSR1: 60.0,
        signal.SIGINT: 5.0,
    }
    assert parse_signals("none") == {}


@pytest.mark.parametrize("text", ["TERM", "SIGTERM=soon", "SIGTERM=-1", "SIGTERM=nan", "SIGTERM=inf", "", "SIGTERM,,"])
def test_a_signal_that_is_none_is_an_error_that_shows_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match="like SIGTERM=30,SIGUSR1=60"):
        parse_signals(text)


def test_sigkill_cannot_be_a_notice() -> None:
    with pytest.raises(ValueError, match="SIGKILL cannot be handled: take SIGTERM"):
        parse_signals("SIGKILL=3")


@pytest.mark.parametrize("known_end_s", [None, 1901.0, 50_000.0])
def test_a_signal_far_from_every_known_end_was_sent_by_somebody(known_end_s: float | None) -> None:
    notice = signal_notice("it", signal.SIGUSR1, 1000.0, 60.0, known_end_s)
    assert notice == Notice("it", "signal", 1060.0, "SIGUSR1, 60 s of grace")


def test_sigterm_always_means_itself() -> None:
    notice = signal_notice("it", signal.SIGTERM, 1000.0, 30.0, 1010.0)
    assert notice is not None
    assert notice.at_s == 1030.0


@pytest.mark.parametrize("text", ["a while", "-3", "nan", "inf"])
def test_a_grace_that_is_none_is_an_error_that_names_the_variable(text: str) -> None:
    with pytest.raises(ValueError, match=r"TORCHELASTIC_TERM_GRACE_S is .*give seconds"):
        term_grace_s({"TORCHELASTIC_TERM_GRACE_S": text})


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_termination_file_holds_unix_seconds_or_nothing() -> None:
    assert parse_termination(" 1795262400.5\n", path="f", wall_s=NOON_S, stale_s=0.0) == NOON_S + 0.5
    assert parse_termination("\n", path="f", wall_s=NOON_S, stale_s=0.0) is None


@pytest.mark.parametrize("text", ["tomorrow", "nan", "inf", "-7", "1795262400000", "2026-11-21T12:00:00Z"])
def test_garbage_in_a_termination_file_is_an_error_that_names_the_file_and_the_remedy(text: str) -> None:
    with pytest.raises(ValueError, match=r"/run/end holds .*write Unix seconds"):
        parse_termination(text, path="/run/end", wall_s=NOON_S, stale_s=0.0)


def test_the_grace_of_a_pod_begins_with_its_hook() -> None:
    notice = pre_stop_notice("it", "/tmp/bye", 4.0, 30.0, 500.0)
    assert notice == Notice("it", "interruption", 526.0, "preStop has touched /tmp/bye, 30 s of grace")
    set_back = pre_stop_notice("it", "/tmp/bye", -4.0, 30.0, 500.0)
    assert set_back is not None
    assert set_back.at_s == 530.0
