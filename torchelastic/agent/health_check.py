"""A command of the user's that decides whether this host may take part in the run, before its workers start."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TypeVar

from torchelastic.agent.causes import LAST_LINES
from torchelastic.agent.control_sequences import plain_text
from torchelastic.agent.event_log import events_log
from torchelastic.agent.signals import signal_group
from torchelastic.log_lines import fields
from torchelastic.processes.exit_codes import COMPUTES_WRONG, describe_exit
from torchelastic.processes.lifeline import dies_with_parent, process_end
from torchelastic.rendezvous.records import MAX_TEXT, KeptOut, Keys, RecordError
from torchelastic.rendezvous.store import CoordinationStore, StoreError
from torchelastic.text import escaped

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Between two looks at whether another host was kept out.
LOOK_EVERY_S = 5.0
#: What a shell returns for a command that cannot be run, or is not there.
CANNOT_RUN = (126, 127)
#: So much of the end of its output is read.
_MOST_BYTES = 16_384
#: Of a line of its output so many characters are shown to others.
_MOST_LINE = 300


@dataclass(frozen=True)
class HealthCheck:
    """What is run on this host.

    Attributes:
        command: one line for the shell.
        timeout_s: after which it has failed.
        environment: variables: those of a worker, but for what lets it take part in the run.
    """

    command: str
    timeout_s: float
    environment: Mapping[str, str]


@dataclass(frozen=True)
class HealthFailure:
    """Why this host does not take part.

    Attributes:
        command: that has failed.
        how: in a few words.
        lines: the last of its output.
        is_unusable: it could not be run, which says nothing of the host.
    """

    command: str
    how: str
    lines: tuple[str, ...] = ()
    is_unusable: bool = False

    @property
    def because(self) -> str:
        """One line, for the other hosts."""
        line = main_line(self.lines)
        return escaped(f"its health check failed: {self.how}" + (f": {line}" if line else ""))[:MAX_TEXT]

    @property
    def exit_code(self) -> int:
        """Of the launcher."""
        return 2 if self.is_unusable else COMPUTES_WRONG

    def text(self) -> str:
        """For this host's terminal: what has happened, what it means, and what to do."""
        what = f"the health check failed: {self.how}: {self.command}"
        advice = f"repair it before it is started here again (exit code {COMPUTES_WRONG})"
        if self.is_unusable:
            advice = "give --health-check a command that can be run here"
        return "\n".join([what, *self.lines[-LAST_LINES:], f"this host is kept out of the run: {advice}"])


def main_line(lines: Sequence[str]) -> str:
    """The line that says most: the last one that begins with "error", else the last one.

    >>> main_line(["ok     clock    synchronized", "error  burn-in  core 3 computes wrong", "1 ok, 1 error", ""])
    'error burn-in core 3 computes wrong'
    >>> main_line(["checking", "no GPU", ""]), main_line([])
    ('no GPU', '')
    """
    said = [" ".join(line.split()) for line in lines if line.strip()]
    errors = [line for line in said if line.lower().startswith("error")]
    return next(reversed(errors or said), "")[:_MOST_LINE]


async def failure_of(check: HealthCheck) -> HealthFailure | None:
    """Run it; None: it has ended with 0. Cancel it to end it. On the agent's event loop, in the main thread."""
    events_log.info(
        "the health check of this host runs before its workers start, for %g s at most: %s", check.timeout_s,
        check.command, extra=fields(kind="health_check", is_over=False),
    )  # fmt: skip
    began_s = time.monotonic()
    with tempfile.TemporaryFile() as output:
        command = dies_with_parent(["/bin/sh", "-c", check.command])
        process = subprocess.Popen(
            command, env=dict(check.environment), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,  # so that it is ended together with what it has started
        )  # fmt: skip
        is_late = False
        try:
            await asyncio.wait_for(process_end(process.pid), check.timeout_s)
        except asyncio.TimeoutError:
            is_late = True
        finally:
            signal_group(process.pid, signal.SIGKILL)  # before it is reaped: its number is its own until then
            code = process.wait()
        if code == 0 and not is_late:
            took_s = time.monotonic() - began_s
            known = fields(kind="health_check", is_over=True)
            events_log.info("the health check passed after %.1f s", took_s, extra=known)
            return None
        how = f"it did not end within {check.timeout_s:g} s" if is_late else describe_exit(code)
        return HealthFailure(check.command, how, _last_lines(output), is_unusable=not is_late and code in CANNOT_RUN)


def _last_lines(output: IO[bytes]) -> tuple[str, ...]:
    output.seek(max(0, output.seek(0, os.SEEK_END) - _MOST_BYTES))
    return tuple(plain_text(line) for line in output.read().decode(errors="replace").splitlines()[-LAST_LINES:])


class Admission:
    """Whether this host may take part, and which others may not. Use it on the agent's event loop.

    Args:
        store: of the run; any thread may call it.
        keys: of the run.
        host: this host's name.
        check: what decides; None: nothing does.
        wall_s: Unix seconds.

    Attributes:
        failure: why this host may not; None: it may, or it is not known yet.
        others: the records of hosts that may not, by name, as last read.
    """

    def __init__(
        self,
        store: CoordinationStore,
        keys: Keys,
        host: str,
        check: HealthCheck | None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._keys, self._check, self._wall_s = store, keys, check, wall_s
        self._own_key, self._has_looked = keys.kept_out_of(host), False
        self._thread = ThreadPoolExecutor(1, "admission")
        self.failure: HealthFailure | None = None
        self.others: dict[str, KeptOut] = {}

    async def decide(self) -> None:
        """Run the check, and if it fails, write down for the others that this host is kept out."""
        self.failure = None if self._check is None else await failure_of(self._check)
        if self.failure is None:
            return
        value = KeptOut(self._wall_s(), self.failure.because).encode()
        try:
            await self._ask(lambda store: store.put(self._own_key, value))
        except StoreError as error:
            log.warning("the other hosts were not notified that this one is kept out: %s", error)

    async def follow(self) -> None:
        """This host takes part: say of each one that is kept out, once, that it is. Cancel it to end it."""
        while True:
            with suppress(StoreError):  # the membership says that, once
                await self._look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self) -> None:
        stored = (await self._ask(lambda store: store.list_prefix(self._keys.kept_out))).items
        if not self._has_looked and any(kv.key == self._own_key for kv in stored):
            await self._ask(lambda store: store.delete(self._own_key))  # of an earlier start: it may take part again
            stored = tuple(kv for kv in stored if kv.key != self._own_key)
        self._has_looked = True
        found = {}
        for kv in stored:
            with suppress(RecordError):  # `torchelastic status` names it
                found[escaped(kv.key.removeprefix(self._keys.kept_out))] = KeptOut.decode(kv.key, kv.value)
        for host, record in found.items():
            if self.others.get(host) != record:
                log.warning("host %s is kept out of the run: %s", host, record.because)
        self.others = found

    def others_text(self) -> str:
        """Who is kept out, for people; empty: nobody is.

        Whose names and reasons come from the store are printable.
        """
        return "; ".join(f"host {host} is kept out: {record.because}" for host, record in sorted(self.others.items()))

    async def _ask(self, call: Callable[[CoordinationStore], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, self._store)

    def close(self) -> None:
        """Ask the store nothing any more."""
        self._thread.shutdown(wait=False)
