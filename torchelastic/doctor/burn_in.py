"""The same work on every core and GPU for some time: starts `burn_in_party`, and gathers what each has computed."""

from __future__ import annotations

import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from torchelastic.checkpoint.store.host_memory.room import cgroup_available_bytes
from torchelastic.doctor.burn_in_rules import (
    BurnInFacts,
    Party,
    ResultSeen,
    Task,
    judge_burn_in,
    kinds_of_cores,
    why_too_little,
)
from torchelastic.doctor.findings import Finding
from torchelastic.foreign_json import RecordError, converted, decode_json
from torchelastic.processes.cpus import listed_cpus
from torchelastic.processes.exit_codes import describe_exit
from torchelastic.processes.lifeline import dies_with_parent
from torchelastic.rendezvous.credentials import PASSWORD_VARIABLE

#: Of one task so many different results of a party are told apart: who has more computes wrong anyway.
MOST_RESULTS = 100
#: Between two lines about the progress.
TELL_EVERY_S = 1.0
_PROGRAM = "from torchelastic.doctor.burn_in_party import main; main({until_s!r}, float({rounds!r}), {cores!r})"
#: One thread for each core; and what CUDA's matrix products need to be the same each time.
_VARIABLES = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}  # fmt: skip
_MOST_LINE_BYTES = 1 << 20

#: Called with how many rounds are done on how many cores and GPUs, and for how many seconds it has been going on.
Tell = Callable[[int, int, float], None]


@dataclass(frozen=True)
class _Line:
    """What `burn_in_party` writes; which fields there are depends on what it is about."""

    parties: tuple[str, ...] = ()
    party: str = ""
    kind: str = ""
    pattern: int = 0
    results: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""
    exit_code: int = 0


class _Gathered:
    """What was read so far."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self._kinds = dict(kinds)
        self._failures: dict[str, str] = {}
        self.rounds: dict[str, int] = {}
        self._results: dict[str, dict[Task, dict[str, ResultSeen]]] = {}

    def take(self, text: bytes) -> None:
        """A line; raises RecordError if it is none."""
        line = converted("burn-in", decode_json("burn-in", text, most_bytes=_MOST_LINE_BYTES), _Line)
        for party in filter(None, (*line.parties, line.party)):
            self.rounds.setdefault(party, 0)
        if line.kind:
            self._kinds[line.party] = line.kind
        if line.failure or line.exit_code:
            self._failures.setdefault(line.party, line.failure or describe_exit(line.exit_code))
        for work, result in line.results.items():
            seen = self._results.setdefault(line.party, {}).setdefault((work, line.pattern), {})
            known = result if result in seen or len(seen) < MOST_RESULTS else "others"
            before = seen.get(known, ResultSeen(0, self.rounds[line.party]))
            seen[known] = ResultSeen(before.count + 1, before.first_round)
        if line.results:
            self.rounds[line.party] += 1

    def parties(self) -> tuple[Party, ...]:
        """As facts; whose kind is not known is one of its own."""
        return tuple(
            Party(name, self._kinds.get(name, name), rounds, self._results.get(name, {}), self._failures.get(name, ""))
            for name, rounds in self.rounds.items()
        )


def burn_in(
    for_s: float, tell: Tell = lambda _rounds, _parties, _since_s: None, *, rounds: float = math.inf
) -> BurnInFacts:
    """Have every core that this process may use, and every GPU that it sees, compute for some time.

    Args:
        for_s: seconds until all has ended.
        tell: see `Tell`; called about once a second.
        rounds: it ends before, when each has done so many.
    """
    began_s = time.monotonic()
    cores = sorted(os.sched_getaffinity(0))
    too_little = why_too_little(len(cores), available_bytes())
    if too_little:
        return BurnInFacts(for_s, failure=too_little)
    gathered = _Gathered({f"core {core}": kind for core, kind in _kinds(cores).items()})
    told_s = began_s
    program = _PROGRAM.format(until_s=began_s + for_s, rounds=str(rounds), cores=cores)
    with _started(program) as (child, errors):
        for line in _lines(child, began_s + for_s):
            with suppress(RecordError):  # something else that an import has written
                gathered.take(line)
            if time.monotonic() - told_s >= TELL_EVERY_S:
                told_s = time.monotonic()
                tell(sum(gathered.rounds.values()), len(gathered.rounds), told_s - began_s)
        code = child.poll()
        errors.seek(0)
        last = errors.read()[-4000:].decode(errors="replace").strip().rpartition("\n")[2]
    failure = last or describe_exit(code) if code and not gathered.rounds else ""
    return BurnInFacts(for_s, gathered.parties(), failure)


@contextmanager
def _started(program: str) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """The child with all that it forks, and what they write to standard error; it is ended with all of them."""
    environment = {name: value for name, value in os.environ.items() if name != PASSWORD_VARIABLE} | _VARIABLES
    command = dies_with_parent([sys.executable, "-c", program])
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        try:
            yield child, errors
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


def _lines(child: subprocess.Popen[bytes], until_s: float) -> Iterator[bytes]:
    """The lines that a child writes, until all that write them have ended or the time is over."""
    assert child.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while (left_s := until_s - time.monotonic()) > 0:
            if not selector.select(left_s):
                continue
            data = os.read(child.stdout.fileno(), 1 << 16)
            if not data:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, until_s - time.monotonic()))
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from lines


def available_bytes() -> int:
    """What this process may allocate, by the host and by its control groups."""
    limit_bytes = cgroup_available_bytes()
    free_bytes = int(psutil.virtual_memory().available)
    return free_bytes if limit_bytes is None else min(free_bytes, limit_bytes)


def _kinds(cores: Sequence[int]) -> Mapping[int, str]:
    """What kind each core is of, as far as the kernel says so."""
    devices = Path("/sys/devices")
    marks = {}
    for core in cores:
        capacity = _text(devices / "system" / "cpu" / f"cpu{core}" / "cpu_capacity")
        hybrid = [kind for kind in ("cpu_core", "cpu_atom") if core in listed_cpus(_text(devices / kind / "cpus"))]
        marks[core] = ", ".join([*([f"capacity {capacity}"] if capacity else []), *hybrid])
    found = kinds_of_cores(_text(Path("/proc/cpuinfo")), marks)
    return {core: found.get(core, "") or "a core" for core in cores}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def check(for_s: float, tell: Tell) -> Sequence[Finding]:
    """Try this host's cores and GPUs."""
    return judge_burn_in(burn_in(for_s, tell))
