"""The environment of the workers that an agent starts."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from torchelastic.agent.launcher_agent import LauncherOptions
from torchelastic.lifetime.grace import LAUNCHER_GRACE_VARIABLE
from torchelastic.log_lines import FORMAT_VARIABLE
from torchelastic.observe.ledger.meter import LEDGER_VARIABLE
from torchelastic.processes.cpus import usable_cpus
from torchelastic.rendezvous import wire

#: The variables by which a worker takes part in the run: a health check must not.
TAKING_PART = frozenset({wire.SOCKET_VARIABLE, wire.INIT_METHOD_VARIABLE, LEDGER_VARIABLE})


def worker_environment(
    options: LauncherOptions, nproc: int, size: os.terminal_size | None = None, beside: int = 0
) -> dict[str, str]:
    """What the workers of this host see; `size` and `beside` as for `terminal_variables`."""
    environment = dict(os.environ)
    return (
        environment
        | terminal_variables(environment, nproc, size, beside)
        | thread_variables(environment, nproc, usable_cpus(), visible=len(os.sched_getaffinity(0)))
        | user_variables(environment, os.getuid(), is_known=_is_known_user())
        | memory_variables(environment, _huge_pages())
        | {
            wire.SOCKET_VARIABLE: str(options.socket_path),
            wire.INIT_METHOD_VARIABLE: str(options.url),
            "TORCHELASTIC_RUN_ID": options.url.run_id,
            "LOCAL_WORLD_SIZE": str(nproc),
            "ROLE_NAME": "default",  # unless --role says another
            "PYTHONUNBUFFERED": "1",
            # the stacks of a worker that crashes, or that hangs before it has a coordinator, see the supervisor
            "PYTHONFAULTHANDLER": os.environ.get("PYTHONFAULTHANDLER", "1"),
            LEDGER_VARIABLE: f"{os.getpid()}:{options.socket_path}",
            FORMAT_VARIABLE: options.log_form,
            LAUNCHER_GRACE_VARIABLE: f"{options.term_grace_s:.0f}",
            # c10d prints a page of C++ frames for each connection that breaks, which here is an everyday event
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }
    )


def thread_variables(given: Mapping[str, str], nproc: int, cores: int, *, visible: int) -> dict[str, str]:
    """How many threads each worker computes with: without it each would take all cores, and they would wait in turns.

    torchrun sets 1; here the workers share the cores that this process may use. Pure.

    Args:
        given: the launcher's environment: what it says is kept.
        nproc: how many workers the launcher has; a single one has all cores anyway, unless a quota says otherwise.
        cores: that the launcher may use.
        visible: on how many it may run, each of them for a part of the time where there is a quota.

    >>> thread_variables({}, 4, 16, visible=16), thread_variables({}, 4, 2, visible=2)
    ({'OMP_NUM_THREADS': '4'}, {'OMP_NUM_THREADS': '1'})
    >>> thread_variables({}, 1, 16, visible=16), thread_variables({}, 1, 3, visible=64)
    ({}, {'OMP_NUM_THREADS': '3'})
    """
    if (nproc == 1 and cores >= visible) or "OMP_NUM_THREADS" in given:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores // nproc))}


def user_variables(given: Mapping[str, str], uid: int, *, is_known: bool) -> dict[str, str]:
    """A name for a user who has none, as in a container that runs under a number: `getpass.getuser()` fails. Pure.

    Args:
        given: the launcher's environment: what it says is kept.
        uid: of this user.
        is_known: whether the host has a name for it.

    >>> user_variables({}, 1042, is_known=False), user_variables({"LOGNAME": "me"}, 1042, is_known=False)
    ({'USER': 'uid_1042'}, {})
    """
    has_name = is_known or any(given.get(name) for name in ("LOGNAME", "USER", "LNAME", "USERNAME"))
    return {} if has_name else {"USER": f"uid_{uid}"}


def _is_known_user() -> bool:
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return True


def memory_variables(given: Mapping[str, str], huge_pages: str) -> dict[str, str]:
    """Have torch ask for huge pages for tensors of 2 MiB and more, where the kernel gives them to whoever asks. Pure.

    Fresh memory is what a recovery of a large model waits for most: new gradient buckets are touched for the first
    time, page by page, while the kernel takes the dead process's memory apart, page by page.

    Args:
        given: the launcher's environment: what it says is kept.
        huge_pages: the kernel's setting, such as "always [madvise] never"; empty: unknown.

    >>> memory_variables({}, "always [madvise] never"), memory_variables({}, "always madvise [never]")
    ({'THP_MEM_ALLOC_ENABLE': '1'}, {})
    """
    if "[madvise]" not in huge_pages or "THP_MEM_ALLOC_ENABLE" in given:
        return {}
    return {"THP_MEM_ALLOC_ENABLE": "1"}


def _huge_pages() -> str:
    try:
        return Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return ""


def terminal_variables(
    given: Mapping[str, str], nproc: int, size: os.terminal_size | None, beside: int
) -> dict[str, str]:
    """What tells workers, whose own output are pipes, of the terminal that their lines get to. Pure.

    Args:
        given: the launcher's environment, which decides where it says something.
        nproc: how many workers the launcher has.
        size: of the terminal; None: there is none.
        beside: characters that a line of a worker begins with there.
    """
    if size is None:
        return {}
    found = {"COLUMNS": str(max(20, size.columns - beside)), "LINES": str(size.lines)}
    if not given.get("NO_COLOR"):
        found["FORCE_COLOR"] = "1"
    if nproc > 1:
        found["TTY_INTERACTIVE"] = "0"  # rich: no moving pictures of several workers on one terminal
    return {name: value for name, value in found.items() if name not in given}
