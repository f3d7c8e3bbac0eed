"""etcd's data is lost, set back, compacted or written by strangers: training never stops, and membership goes on.

Training itself is in the last part; before it, workers are records, see light_hosts.py.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.etcd_cluster import ask_etcd
from tests.cluster.harness import RunRecords
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
from tests.waiting import until
from torchelastic.rendezvous.etcd import EtcdStore
from torchelastic.rendezvous.records import RoundState
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.rendezvous.store import OnError, OnEvents, Watch
from torchelastic.rendezvous.view import COME_BACK_S, Settings

#: Others of this class run every day: an etcd that is away, and garbage in it.
pytestmark = pytest.mark.long

#: Until every host has found out and has registered again: pauses between two sessions grow up to 1.5 s.
BACK_S = 5.0
#: After a loss of the data nobody counts as lost for so long.
DOUBT_S = max(TTL_S, COME_BACK_S)
SETTINGS = Settings(2, 3, last_call_s=30.0, ttl_s=TTL_S)


def hosts_of(etcd: EtcdServer, records: RunRecords, count: int = 3) -> list[LightHost]:
    make = partial(LightHost, [(etcd.host, etcd.port)], records.keys, SETTINGS)
    return [make(f"host-{number}") for number in range(count)]


def round_in_store(records: RunRecords) -> dict[str, object]:
    document: dict[str, object] = json.loads(records.history(records.keys.round)[-1].value)
    return document


# --- lost, or set back ------------------------------------------------------------------------------------------------


def test_when_etcd_has_lost_its_data_the_running_round_is_put_back_within_5_s_and_nobody_in_it_notices(
    own_etcd: EtcdServer, run_id: str
) -> None:
    records = RunRecords(own_etcd.endpoint, run_id)

    async def scenario(hosts: list[LightHost]) -> None:
        round_ = await form(hosts)
        await asyncio.to_thread(own_etcd.restart, lose_data=True)
        assert records.revision() < 20, "the data was not lost"
        await until(lambda: sorted(records.members()) == ["w0", "w1", "w2"], BACK_S, "all are registered again")
        stored = round_in_store(records)
        assert stored["restored"] is True
        assert (stored["number"], stored["state"], stored["roster"]) == (1, "running", list(round_.roster))
        await asyncio.sleep(2 * TTL_S)  # nobody counts as lost afterwards either
        assert_nothing_happened(hosts, round_)
        after = await lose_one_and_go_on(hosts, DOUBT_S + BACK_S)
        assert after.number == 3
        assert round_in_store(records)["restored"] is False

    play(lambda: hosts_of(own_etcd, records), scenario)


@pytest.mark.slow
def test_a_worker_that_is_lost_together_with_etcds_data_is_missed_within_13_s(
    own_etcd: EtcdServer, run_id: str
) -> None:
    records = RunRecords(own_etcd.endpoint, run_id)

    async def scenario(hosts: list[LightHost]) -> None:
        await form(hosts)
        await asyncio.to_thread(own_etcd.kill)
        hosts[1].lose("w1")  # etcd has never heard of it, and never will of its record
        await asyncio.to_thread(own_etcd.restart, lose_data=True)
        after = await until_all_run(hosts, 2, DOUBT_S + BACK_S, after=1)
        assert set(after.roster) == {"w0", "w2"}

    play(lambda: hosts_of(own_etcd, records), scenario)


@pytest.mark.slow
def test_after_a_loss_of_the_data_newcomers_need_not_wait_for_a_group_that_is_known_to_have_ended(
    own_etcd: EtcdServer, run_id: str
) -> None:
    records = RunRecords(own_etcd.endpoint, run_id)
    settings = Settings(2, 2, ttl_s=TTL_S, orphan_timeout_s=300.0)

    async def scenario(hosts: list[LightHost]) -> None:
        (host,) = hosts
        host.ask("w0")
        host.ask("w1")
        await until_all_run(hosts, 2, BACK_S)
        host.hang("w1")
        host.ask("w0", failed=True)
        await until(lambda: host.round.state is RoundState.BROKEN, BACK_S, "the round is broken")
        host.lose("w0")
        host.lose("w1")
        await host.membership.until_written()
        assert host.round.departed == ()
        await asyncio.to_thread(own_etcd.restart, lose_data=True)
        host.ask("w2")
        host.ask("w3")
        await until_all_run(hosts, 2, DOUBT_S + BACK_S, after=1)

    play(lambda: [LightHost([(own_etcd.host, own_etcd.port)], records.keys, settings, "host")], scenario)


@pytest.mark.slow
def test_when_an_older_copy_of_etcds_data_is_put_back_the_running_round_is_too_within_5_s_and_the_dead_stay_dead(
    tmp_path: Path, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"

    async def scenario(hosts: list[LightHost]) -> None:
        await form(hosts)
        await asyncio.to_thread(etcd.kill)
        shutil.copytree(data, copy)
        await asyncio.to_thread(etcd.restart)
        await until(lambda: len(records.members()) == 3, BACK_S, "etcd serves again")
        # what the copy does not know: w2 has ended, and there have been more rounds
        round_ = await lose_one_and_go_on(hosts, BACK_S)
        assert set(round_.roster) == {"w0", "w1", "newcomer"}
        revision = records.revision()
        await asyncio.to_thread(etcd.kill)
        shutil.rmtree(data)
        copy.rename(data)
        await asyncio.to_thread(etcd.restart)
        assert records.revision() < revision, "the data was not set back"
        await until(lambda: sorted(records.members()) == ["newcomer", "w0", "w1"], BACK_S, "the living are registered")
        stored = round_in_store(records)
        assert (stored["number"], stored["roster"]) == (round_.number, list(round_.roster))
        await asyncio.sleep(2 * TTL_S)
        assert_nothing_happened(hosts, round_)
        await lose_one_and_go_on(hosts, DOUBT_S + BACK_S)

    with EtcdServer(data_dir=data) as etcd:
        records = RunRecords(etcd.endpoint, run_id)
        play(lambda: hosts_of(etcd, records), scenario)
    assert "etcd has gone back to an older copy of its data" in caplog.text


# --- compacted --------------------------------------------------------------------------------------------------------


def compact(records: RunRecords, endpoint: str) -> int:
    """Have etcd forget the whole history of its keys; returns the revision up to which."""
    revision = records.revision()
    ask_etcd(endpoint, "kv/compaction", {"revision": revision, "physical": True})
    return revision


def test_a_host_that_was_cut_off_while_history_was_compacted_knows_the_present_round_within_5_s_of_its_return(
    own_etcd: EtcdServer, run_id: str
) -> None:
    etcd, records = own_etcd, RunRecords(own_etcd.endpoint, run_id)

    async def scenario(hosts: list[LightHost]) -> None:
        *others, cut_off = hosts
        first = await form(hosts)
        known = records.revision()
        await asyncio.to_thread(proxy.cut)
        others[0].ask("newcomer")
        # the one that is cut off counts as lost when its lease is over, and the others go on
        round_ = await until_all_run(others, 3, 3 * TTL_S + BACK_S, after=first.number)
        assert set(round_.roster) == {"w0", "w1", "newcomer"}
        assert await asyncio.to_thread(compact, records, etcd.endpoint) > known
        with pytest.raises(OSError, match="400"):
            ask_etcd(etcd.endpoint, "kv/range", {"key": base64.b64encode(b"key").decode(), "revision": known})
        assert cut_off.round.number == first.number, "it was not cut off"
        proxy.heal()
        # it asks in again, and is let in
        await until_all_run(hosts, 4, BACK_S, after=round_.number)

    with Proxy((etcd.host, etcd.port)) as proxy:
        make = partial(LightHost, run_keys=records.keys, settings=replace(SETTINGS, max_workers=4, last_call_s=1.0))
        direct = [(etcd.host, etcd.port)]
        play(lambda: [make(direct, name="a"), make(direct, name="b"), make([proxy.endpoint], name="cut-off")], scenario)


class CompactingStore(EtcdStore):
    """Others write, and history is compacted, between a listing of the round and the watch that goes on from it."""

    def __init__(self, etcd: EtcdServer, records: RunRecords) -> None:
        super().__init__([(etcd.host, etcd.port)])
        self.compacted: list[int] = []
        self._endpoint, self._records = etcd.endpoint, records

    def watch(self, prefix: str, start_revision: int, on_events: OnEvents, on_error: OnError) -> Watch:
        if prefix == self._records.keys.round and not self.compacted:
            for _ in range(2):
                self.put(f"{self._records.keys.root}-elsewhere", b"something")
            self.compacted.append(compact(self._records, self._endpoint))
            assert self.compacted[0] > start_revision
        return super().watch(prefix, start_revision, on_events, on_error)


def test_history_that_is_compacted_between_a_listing_and_its_watch_costs_a_host_no_more_than_another_session(
    own_etcd: EtcdServer, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    records = RunRecords(own_etcd.endpoint, run_id)

    async def scenario(hosts: list[LightHost]) -> None:
        await form(hosts, BACK_S)
        assert isinstance(hosts[0].store, CompactingStore)
        assert len(hosts[0].store.compacted) == 1
        assert "compacted" in caplog.text
        await lose_one_and_go_on(hosts, BACK_S)

    def hosts() -> list[LightHost]:
        store = CompactingStore(own_etcd, records)
        return [LightHost([], records.keys, SETTINGS, "compacted", store), *hosts_of(own_etcd, records, 2)]

    caplog.set_level(logging.INFO)
    play(hosts, scenario)
