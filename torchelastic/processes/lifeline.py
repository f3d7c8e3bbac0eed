"""Other processes of this host: one that dies with its parent, a signal to a main thread, the end of any."""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Collection, Sequence

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

# Runs in a bare interpreter between fork and the command. Why each line is there:
# - the request is made first and the parent is looked at afterwards: a parent that died before the request sends no
#   signal, but has then already been replaced (by init or a subreaper);
# - an interpreter ignores SIGPIPE and SIGXFSZ, and may set LC_CTYPE (PEP 538); an exec would hand both on;
# - the CPUs are those of this thread alone, and it is the only one: whatever the command starts has them too;
# - what is to be ignored stays so in the command: only a handler is reset by an exec;
# - 126 and 127 are what a shell returns for a command that cannot be run or found.
_TRAMPOLINE = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl({PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}, 0, 0, 0):
    sys.exit("cannot tie this process to its parent: " + os.strerror(ctypes.get_errno()))
if os.getppid() != int(sys.argv[1]):
    os._exit({128 + signal.SIGKILL})
if sys.argv[3]:
    try:
        os.sched_setaffinity(0, [int(cpu) for cpu in sys.argv[3].split(",")])
    except OSError as error:
        sys.exit("cannot bind this process to CPUs %s: %s" % (sys.argv[3], error.strerror))
for ignored in {int(signal.SIGPIPE)}, {int(signal.SIGXFSZ)}:
    libc.signal(ignored, None)
for ignored in filter(None, sys.argv[2].split(",")):
    libc.signal(int(ignored), ctypes.c_void_p({int(signal.SIG_IGN)}))
with open("/proc/self/environ", "rb") as before:
    if b"\\0LC_CTYPE=" not in b"\\0" + before.read():
        os.environ.pop("LC_CTYPE", None)
try:
    os.execvp(sys.argv[4], sys.argv[4:])
except OSError as error:
    sys.stderr.write("cannot run %s: %s\\n" % (sys.argv[4], error.strerror))
    os._exit(127 if isinstance(error, FileNotFoundError) else 126)
"""


def dies_with_parent(argv: Sequence[str], ignored: Sequence[int] = (), cpus: Collection[int] = ()) -> list[str]:
    """Wrap a command so that the kernel sends it SIGKILL as soon as its parent ends (`prctl(2)`, PR_SET_PDEATHSIG).

    The wrapped command keeps its pid, environment, descriptors and signal dispositions: a small interpreter makes the
    request and then becomes the command, which costs about 20 ms at its start. The process that calls this must
    itself start the result (for example by `subprocess.Popen`), because the wrapper checks that it is still the parent.

    The kernel means the parent *thread*: the command dies when the thread that started it ends, even if its process
    lives on. So start it from the main thread, or from one that stays until the command has ended. Only the command
    itself is killed, not what it started in turn.

    A command that does not exist is not found by `Popen` any more, but ends with exit status 127 and a line on stderr
    (126 if it is not executable).

    Args:
        argv: The command and its arguments.
        ignored: Signals that the command ignores, and whatever it starts, unless they handle them.
        cpus: The CPUs that they may run on; empty: those of the caller.

    Returns:
        What to start instead. On systems other than Linux that is `argv` itself, without this protection.

    Raises:
        ValueError: `argv` is empty.
    """
    if not argv:
        raise ValueError("argv is empty: give the command to run and its arguments")
    if sys.platform != "linux":
        return list(argv)
    numbers, on = (",".join(str(int(number)) for number in sorted(each)) for each in (ignored, cpus))
    # -I: neither the current folder nor PYTHON* variables decide what `import ctypes` means; -S: no site-packages
    return [sys.executable, "-I", "-S", "-c", _TRAMPOLINE, str(os.getpid()), numbers, on, *argv]


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread of a process of this host (`tgkill(2)`).

    `os.kill` leaves to the kernel which thread takes the signal. In a stopped process that is the first one to run
    after SIGCONT: the stacks that it then dumps may show the main thread already somewhere else.

    Args:
        pid: of the process, which is also the id of its main thread.
        number: of the signal.

    Raises:
        ProcessLookupError: there is no such process.
        PermissionError: it belongs to somebody else.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        tgkill = libc.tgkill
    except AttributeError:  # a libc without it (musl, macOS): the process as a whole then
        os.kill(pid, number)
        return
    if tgkill(pid, pid, number) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))  # the subclass that belongs to the code


def end_with(pid: int) -> None:
    """Have this process killed as soon as another one of its host has ended; for a child that is of no use without it.

    Unlike `dies_with_parent` it does not matter which thread has started this process, nor whether that was the parent
    itself (`forkserver`). A daemon thread waits; where the system has no pidfd, nobody does.

    Args:
        pid: of the other one.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    except (AttributeError, OSError):  # not Linux, or before 5.3, or forbidden
        return

    def wait() -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


async def process_end(pid: int) -> None:
    """Return as soon as the process has ended (it need not be reaped yet)."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _resolve, ended)
    try:
        await ended
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
