"""Where the survivors of a kill are while their recovery takes long: their Python stacks."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from benchmarks.job.controller import Job, Kill
from torchelastic.agent.supervisor import DUMP_STACK_SIGNAL
from torchelastic.processes import signal_main_thread

#: The survivors are asked so long after the signal that killed the other one.
ASK_AFTER_S = (1.0, 5.0)
#: How long the last answers may take on their way through the agent.
SETTLE_S = 0.5
#: Innermost frames that are kept of each thread.
FRAMES = 12

# as faulthandler writes them; the frames of a traceback have a comma after the line number
_THREAD = re.compile(r"(?:Current thread|Thread) 0x")
_FRAME = re.compile(r' +File ".*", line (?:\d+|\?\?\?) in ')
#: The outermost frames of every thread and of every module.
_COMMON = re.compile(r'.*(?:threading\.py", line \d+ in (?:run|_bootstrap|_bootstrap_inner)|"<frozen runpy>", .*)')
_WORKER = re.compile(r"\[worker (\d+)\] (.*)")


@dataclass(frozen=True)
class Dump:
    """The stacks of one survivor, asked for once.

    Attributes:
        rank: of the survivor, in the group that lost a member.
        after_s: seconds from the kill until it was asked.
        lines: all its Python threads, the innermost frames first; empty: it has not answered.
    """

    rank: int
    after_s: float
    lines: list[str]

    def document(self) -> dict[str, Any]:
        return asdict(self)


def lines_of_workers(text: str) -> dict[int, list[str]]:
    """The stack lines in the agent's output, by the number of the worker on this host.

    Each thread is cut to its `FRAMES` innermost frames, without those of the interpreter's own that every thread has.
    """
    lines: defaultdict[int, list[str]] = defaultdict(list)
    frames: defaultdict[int, int] = defaultdict(int)
    for match in map(_WORKER.fullmatch, text.splitlines()):
        if match is None:
            continue
        worker, line = int(match[1]), match[2]
        if _THREAD.match(line):
            frames[worker] = 0
            lines[worker].append(line)
        elif _FRAME.match(line) and not _COMMON.fullmatch(line):
            frames[worker] += 1
            if frames[worker] <= FRAMES:
                lines[worker].append(line)
    return dict(lines)


class StackWitness:
    """Asks the survivors of one kill for their stacks when their recovery takes long.

    Only survivors are asked: they have a coordinator, which has registered the signal; a process that still imports
    would die of it.
    """

    def __init__(self, job: Job, kill: Kill) -> None:
        self._job, self._kill = job, kill
        self._due_s = list(ASK_AFTER_S)
        self._asked: list[tuple[float, int, Mapping[int, int]]] = []  # after s, offset in bytes, rank by worker

    def look(self) -> None:
        """Ask if it is time; to be called again and again until the recovery is over."""
        after_s = time.monotonic() - self._kill.killed_s
        if self._due_s and after_s >= self._due_s[0]:
            self._due_s.pop(0)
            offset_bytes = self._job.agent_log.stat().st_size
            ranks = {}
            for pid in self._kill.survivors:
                try:
                    worker = int(psutil.Process(pid).environ()["LOCAL_RANK"])
                    signal_main_thread(pid, DUMP_STACK_SIGNAL)
                except (psutil.Error, OSError, KeyError):
                    continue  # it has ended
                ranks[worker] = self._kill.ranks[pid]
            self._asked.append((after_s, offset_bytes, ranks))

    def dumps(self) -> list[Dump]:
        """What was answered; empty if nobody was asked. Waits `SETTLE_S` for the last answers."""
        if not self._asked:
            return []
        time.sleep(SETTLE_S)
        log = self._job.agent_log.read_bytes()
        ends = [offset_bytes for _, offset_bytes, _ in self._asked[1:]] + [len(log)]
        dumps = []
        for (after_s, begin, ranks), end in zip(self._asked, ends, strict=True):
            lines = lines_of_workers(log[begin:end].decode(errors="replace"))
            dumps += [Dump(rank, round(after_s, 2), lines.get(worker, [])) for worker, rank in sorted(ranks.items())]
        return dumps
