"""A signal goes to the main thread, also of a process that is stopped, or it is said why not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torchelastic.processes import signal_main_thread

# another thread would take the signal with it as well: that the main thread gets it is not a matter of luck
SCRIPT = """
import faulthandler, os, signal, threading, time
faulthandler.register(signal.SIGUSR1, all_threads=True)
for _ in range(3):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("ready", flush=True)

def hangs():
    os.kill(os.getpid(), signal.SIGSTOP)

hangs()
"""


def pending(pid: int, which: str) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines())
    return int(fields[which], 16)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; run it on Linux")
def test_a_stopped_process_dumps_where_its_main_thread_was_stopped() -> None:
    child = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        signal_main_thread(child.pid, signal.SIGUSR1)
        bit = 1 << (signal.SIGUSR1 - 1)
        assert pending(child.pid, "SigPnd") & bit, "not pending for the main thread"
        assert not pending(child.pid, "ShdPnd") & bit, "pending for any thread"
        os.kill(child.pid, signal.SIGCONT)
        _, dump = child.communicate(timeout=20)
    finally:
        child.kill()
        child.wait()
    assert "in hangs" in dump


def test_a_process_that_is_gone_is_an_error() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(ProcessLookupError):
        signal_main_thread(child.pid, signal.SIGUSR1)
