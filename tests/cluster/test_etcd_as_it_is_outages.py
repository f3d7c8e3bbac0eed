"""etcd is away, silent or slow for a while: membership is frozen and nobody is lost by it; afterwards changes go on.

Workers are records here, see light_hosts.py; test_etcd_outage.py has the same with training.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.harness import RunRecords, resume
from tests.cluster.light_hosts import (
    TTL_S,
    LightHost,
    assert_nothing_happened,
    form,
    lose_one_and_go_on,
    play,
    until_all_run,
)
from tests.cluster.proxy import Proxy
from tests.waiting import pause, until
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.rendezvous.view import COME_BACK_S, Settings

#: Until every host has a session again: pauses between two grow up to 1.5 s; a call to a silent etcd ends after 5 s.
BACK_S = 10.0
SETTINGS = Settings(2, 3, last_call_s=30.0, ttl_s=TTL_S)


def hosts_of(endpoint: tuple[str, int], records: RunRecords, settings: Settings = SETTINGS) -> list[LightHost]:
    make = partial(LightHost, [endpoint], records.keys, settings)
    return [make(f"host-{number}") for number in range(3)]


def contact_after(hosts: list[LightHost], time_s: float) -> bool:
    """Whether etcd has answered every host since."""
    return all(host.contacts_s and host.contacts_s[-1] > time_s for host in hosts)


# --- down -------------------------------------------------------------------------------------------------------------


def test_an_etcd_that_is_down_for_longer_than_the_ttl_costs_no_round_and_changes_go_on_within_10_s_of_its_return(
    own_etcd: EtcdServer, run_id: str
) -> None:
    records = RunRecords(own_etcd.endpoint, run_id)

    async def scenario(hosts: list[LightHost]) -> None:
        round_ = await form(hosts)
        await asyncio.to_thread(own_etcd.kill)
        down_s = time.monotonic()
        await asyncio.sleep(1.25 * TTL_S)
        assert not any(host.contacts_s[-1] > down_s for host in hosts), "etcd was not down"
        await asyncio.to_thread(own_etcd.restart)
        back_s = time.monotonic()
        await until(lambda: contact_after(hosts, back_s), BACK_S, "all are back")
        await asyncio.sleep(TTL_S)  # whom etcd holds for lost by then it would have said
        assert_nothing_happened(hosts, round_)
        await lose_one_and_go_on(hosts, BACK_S)

    play(lambda: hosts_of((own_etcd.host, own_etcd.port), records), scenario)


def test_what_happened_during_an_outage_counts_within_10_s_of_its_end(own_etcd: EtcdServer, run_id: str) -> None:
    records = RunRecords(own_etcd.endpoint, run_id)

    async def scenario(hosts: list[LightHost]) -> None:
        round_ = await form(hosts)
        await asyncio.to_thread(own_etcd.kill)
        hosts[1].lose("w1")
        hosts[2].ask("newcomer")
        await asyncio.sleep(1.0)
        assert_nothing_happened(hosts, round_)
        await asyncio.to_thread(own_etcd.restart)
        after = await until_all_run(hosts, 3, BACK_S, after=1)
        assert set(after.roster) == {"w0", "w2", "newcomer"}

    play(lambda: hosts_of((own_etcd.host, own_etcd.port), records), scenario)


# --- up, and out of reach of everybody --------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_etcd_that_hangs_for_longer_than_the_ttl_costs_no_round_and_changes_go_on_within_18_s_of_its_return(
    own_etcd: EtcdServer, run_id: str
) -> None:
    records = RunRecords(own_etcd.endpoint, run_id)

    async def scenario(hosts: list[LightHost]) -> None:
        round_ = await form(hosts)
        hung_s = pause([own_etcd.pid])
        await asyncio.sleep(2 * TTL_S)
        back_s = resume([own_etcd.pid])
        assert not any(host.contacts_s[-1] > hung_s for host in hosts), "etcd did not hang"
        await until(lambda: contact_after(hosts, back_s), BACK_S, "all are back")
        await asyncio.sleep(TTL_S)
        assert_nothing_happened(hosts, round_)
        await lose_one_and_go_on(hosts, COME_BACK_S + BACK_S)

    play(lambda: hosts_of((own_etcd.host, own_etcd.port), records), scenario)


@pytest.mark.slow
def test_an_etcd_that_hangs_until_all_leases_but_the_leaders_are_over_costs_no_round(
    own_etcd: EtcdServer, run_id: str
) -> None:
    records = RunRecords(own_etcd.endpoint, run_id)
    settings = replace(SETTINGS, ttl_s=6.0)  # a sign of life every 2 s

    async def scenario(hosts: list[LightHost]) -> None:
        leader, *others = hosts
        await leader.start()
        await until(lambda: leader.leads, BACK_S, "it leads")
        await asyncio.sleep(0.6)
        await asyncio.gather(*(host.start() for host in others))
        round_ = await form(hosts)

        def ages_s() -> list[float]:
            return [time.monotonic() - host.contacts_s[-1] for host in hosts]

        # the leader's sign of life is new, those of the others are not
        await until(lambda: ages_s()[0] < 0.1 and min(ages_s()[1:]) > 1.0, 30.0, "the right moment", ages_s)
        pause([own_etcd.pid])
        await asyncio.sleep(5.4)  # 6 s after the leader's sign, 6.4 s and more after those of the others
        back_s = resume([own_etcd.pid])
        await until(lambda: contact_after(hosts, back_s), BACK_S, "all are back")
        leases = [records.history(records.keys.member(f"w{number}"))[-1].create_revision for number in range(3)]
        assert leases[0] < min(leases[1:]), "the others' leases were not lost"
        await asyncio.sleep(TTL_S)
        assert_nothing_happened(hosts, round_)

    play(lambda: hosts_of((own_etcd.host, own_etcd.port), records, settings), scenario, start=0)


@pytest.mark.slow
def test_a_network_that_keeps_all_hosts_from_etcd_for_longer_than_the_ttl_costs_no_round(
    etcd: EtcdServer, run_id: str
) -> None:
    records = RunRecords(etcd.endpoint, run_id)

    async def scenario(hosts: list[LightHost]) -> None:
        round_ = await form(hosts)
        for proxy in proxies:
            await asyncio.to_thread(proxy.cut)
        await until(lambda: not records.members(), 3 * TTL_S + 1, "etcd takes all of them for lost")
        back_s = time.monotonic()
        proxies[0].heal()
        await until(lambda: hosts[0].leads, BACK_S, "the first is back, and leads")
        for proxy in proxies[1:]:
            proxy.heal()
        await until(lambda: contact_after(hosts, back_s) and len(records.members()) == 3, BACK_S, "all are back")
        await asyncio.sleep(TTL_S)
        assert_nothing_happened(hosts, round_)
        await lose_one_and_go_on(hosts, COME_BACK_S + BACK_S)

    with Proxy((etcd.host, etcd.port)) as first, Proxy((etcd.host, etcd.port)) as second:
        proxies = [first, second]
        make = partial(LightHost, run_keys=records.keys, settings=SETTINGS)
        ways = [first, second, second]
        play(lambda: [make([way.endpoint], name=f"host-{n}") for n, way in enumerate(ways)], scenario)


# --- slow -------------------------------------------------------------------------------------------------------------

#: Attaching strace stops etcd for up to 2 s on a busy machine.
SLOW_TTL_S = 5.0
SLOW_SETTINGS = Settings(1, 3, last_call_s=30.0, ttl_s=SLOW_TTL_S)
STRACE = shutil.which("strace")
needs_strace = pytest.mark.skipif(
    STRACE is None,
    reason="no strace to make fdatasync slow: `apt-get install strace` and, unless root, kernel.yama.ptrace_scope=0",
)


@contextmanager
def slow_disk(etcd: EtcdServer, latency_s: float) -> Iterator[None]:
    """Every fdatasync of this etcd takes that much longer, as on a disk that others use."""
    assert STRACE is not None
    inject = f"inject=fdatasync:delay_exit={int(latency_s * 1e6)}"
    command = [STRACE, "-f", "-o", "/dev/null", "-e", "trace=fdatasync", "-e", inject, "-p", str(etcd.pid)]
    strace = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        assert strace.stderr is not None
        assert b"attached" in (complaint := strace.stderr.readline()), complaint.decode()
        yield
    finally:
        strace.send_signal(signal.SIGINT)  # it detaches
        _, complaint = strace.communicate(timeout=30)
        assert strace.returncode in (0, 130, -signal.SIGINT), complaint.decode()


def slow_syncs(etcd: EtcdServer, above_s: float) -> int:
    """How many syncs of its log took longer than that, by etcd's own count; one of the bounds of its histogram."""
    with urllib.request.urlopen(f"http://{etcd.endpoint}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    name = "etcd_disk_wal_fsync_duration_seconds"
    fast = next(line for line in lines if line.startswith(f'{name}_bucket{{le="{above_s:g}"}}'))
    total = next(line for line in lines if line.startswith(f"{name}_count"))
    return int(total.split()[-1]) - int(fast.split()[-1])


@pytest.mark.long
@needs_strace
def test_a_disk_whose_every_sync_takes_1_s_costs_no_round_and_a_loss_is_made_good_within_20_s(
    tmp_path: Path, run_id: str
) -> None:
    async def scenario(hosts: list[LightHost]) -> None:
        round_ = await form(hosts)
        with slow_disk(etcd, 1.0):
            slow_s = time.monotonic()
            await asyncio.sleep(SLOW_TTL_S)
            assert contact_after(hosts, slow_s), "signs of life need no disk"
            assert_nothing_happened(hosts, round_)
            hosts[-1].lose("w2")
            await until_all_run(hosts, 2, 20.0, after=1)
            assert slow_syncs(etcd, above_s=0.512) >= 2, "the disk was not slow"
        await lose_one_and_go_on(hosts[:2], BACK_S)

    with EtcdServer(data_dir=tmp_path / "data") as etcd:
        records = RunRecords(etcd.endpoint, run_id)
        play(lambda: hosts_of((etcd.host, etcd.port), records, SLOW_SETTINGS), scenario)


@pytest.mark.slow
@needs_strace
def test_a_disk_that_is_slower_than_every_time_out_costs_no_round_and_changes_go_on_within_20_s_of_its_recovery(
    tmp_path: Path, run_id: str
) -> None:
    settings = replace(SLOW_SETTINGS, ttl_s=30.0)  # no lease ends, though nothing is answered

    async def scenario(hosts: list[LightHost]) -> None:
        round_ = await form(hosts)
        with slow_disk(etcd, 7.0):
            hosts[-1].lose("w2")  # to be written: the write times out, again and again
            await asyncio.sleep(15.0)
            assert slow_syncs(etcd, above_s=4.096) >= 1, "the disk was not slow"
        after = await until_all_run(hosts, 2, 20.0, after=1)
        assert (after.number, set(after.roster)) == (2, set(round_.roster) - {"w2"}), "the slow disk cost a round"
        ages = [(word["number"], word["edition"]) for word in map(json.loads, values_of(records))]
        assert ages == sorted(set(ages)), "a round was written twice"
        await lose_one_and_go_on(hosts[:2], BACK_S)

    with EtcdServer(data_dir=tmp_path / "data") as etcd:
        records = RunRecords(etcd.endpoint, run_id)
        play(lambda: hosts_of((etcd.host, etcd.port), records, settings), scenario)


def values_of(records: RunRecords) -> list[str]:
    """Every round that was ever written."""
    return [one.value for one in records.history(records.keys.round)]
