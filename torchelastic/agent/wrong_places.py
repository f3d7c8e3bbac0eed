"""Which places of this host were found to compute wrong, kept in the store for as long as the run is.

A process that is started again there would compute on the same core or GPU.
"""

from __future__ import annotations

import asyncio
import json
import logging

from torchelastic.agent.host_events import Event, WorkerComputesWrong
from torchelastic.foreign_json import RecordError, checked, decode_object
from torchelastic.rendezvous.records import MAX_VALUE_BYTES, Keys
from torchelastic.rendezvous.store import CoordinationStore, StoreError
from torchelastic.rendezvous.wire import FoundWrong

log = logging.getLogger(__name__)

#: Between two attempts to write to a store that does not answer.
AGAIN_S = 1.0


class WrongPlaces:
    """Use it on the agent's event loop.

    Args:
        store: of the run.
        keys: of the run.
        host: this one's name.
    """

    def __init__(self, store: CoordinationStore, keys: Keys, host: str) -> None:
        self._store, self._prefix = store, keys.wrong_of_host(host)
        self._tasks: set[asyncio.Task[None]] = set()

    async def read(self) -> dict[int, str]:
        """What was found of this host's workers, by their numbers."""
        try:
            found = await asyncio.get_running_loop().run_in_executor(None, self._store.list_prefix, self._prefix)
        except StoreError as error:
            log.warning("whether workers of this host were found to compute wrong is not known: %s", error)
            return {}
        places: dict[int, str] = {}
        for item in found.items:
            number = item.key.removeprefix(self._prefix)
            try:
                document = decode_object(item.key, item.value, most_bytes=MAX_VALUE_BYTES)
                record = checked(item.key, document, FoundWrong)
            except RecordError as error:
                log.warning("%s", error)
                continue
            if number.isdecimal():
                places[int(number)] = record.why
        return places

    def on_event(self, event: Event) -> None:
        """Remember a place that was found to compute wrong."""
        if isinstance(event, WorkerComputesWrong) and event.local_rank is not None:
            task = asyncio.ensure_future(self._write(f"{self._prefix}{event.local_rank}", event.found))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def until_written(self) -> None:
        """Wait until the store has all."""
        await asyncio.gather(*self._tasks)

    async def _write(self, key: str, found: FoundWrong) -> None:
        value = json.dumps({"step": found.step, "why": found.why}, separators=(",", ":")).encode()
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(None, self._store.put, key, value)
            except StoreError as error:
                log.info("what was found of %s is not in etcd yet: %s", key, error)
                await asyncio.sleep(AGAIN_S)
            else:
                return
