"""Finds every source of a deadline that applies to this process."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from torchelastic.lifetime.deadline import Deadline, automatic_deadlines
from torchelastic.lifetime.grace import is_grace_known, term_grace_s
from torchelastic.lifetime.sources.clouds import AwsSpot, AzureScheduledEvents, GcpPreemption, MetadataSource
from torchelastic.lifetime.sources.files import PreStopFile, TerminationFile, WatchedFile
from torchelastic.lifetime.sources.metadata import LINK_LOCAL, Opener, open_url
from torchelastic.lifetime.sources.notice import Clocks, Notices
from torchelastic.lifetime.sources.poller import Poller
from torchelastic.lifetime.sources.signals import (
    FROM_SCHEDULER,
    USER_GRACE_S,
    SignalNotices,
    notices_instead_of_default,
    parse_signals,
    signals_with_grace,
)
from torchelastic.lifetime.sources.slurm import Runner, SlurmDeadline, run_command

log = logging.getLogger(__name__)

#: A file that holds the Unix seconds at which this instance ends, and may change.
TERMINATION_FILE_VARIABLE = "TORCHELASTIC_TERMINATION_FILE"
#: A file that a preStop hook touches.
PRE_STOP_VARIABLE = "TORCHELASTIC_PRESTOP_FILE"
#: Which signals are notices: see `signals.parse_signals`.
SIGNALS_VARIABLE = "TORCHELASTIC_DEADLINE_SIGNALS"
#: Which metadata services to poll: `aws`, `gcp`, `azure`, separated by commas, or `none`.
METADATA_VARIABLE = "TORCHELASTIC_METADATA"
#: Their endpoint, instead of the link-local address.
ENDPOINT_VARIABLE = "TORCHELASTIC_METADATA_ENDPOINT"
_MACHINE = Path("/sys/class/dmi/id")
_MACHINE_FILES = ("sys_vendor", "product_name", "bios_vendor", "bios_version", "board_vendor", "chassis_asset_tag")
#: What every virtual machine of Azure has as its asset tag (cloud-init's datasource goes by it too).
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
_CLOUDS: dict[str, type[AwsSpot | GcpPreemption | AzureScheduledEvents]] = {
    "aws": AwsSpot,
    "gcp": GcpPreemption,
    "azure": AzureScheduledEvents,
}


def read_machine(folder: Path = _MACHINE) -> str:
    """The firmware's description of the machine; "" where it cannot be read."""
    found = []
    for name in _MACHINE_FILES:
        try:
            found.append((folder / name).read_text(errors="replace").strip())
        except OSError:
            continue
    return "\n".join(found)


def clouds_of(machine: str) -> dict[str, bool]:
    """The clouds that a machine may be of (see `read_machine`), each with whether it surely is; only they are polled.

    >>> clouds_of("Amazon EC2"), clouds_of("Dell Inc.")
    ({'aws': True}, {})
    """
    text = machine.lower()
    found = {}
    if "amazon" in text:
        found["aws"] = True
    if "google compute engine" in text:
        found["gcp"] = True
    if _AZURE_TAG in text:
        found["azure"] = True
    elif "microsoft corporation" in text:
        found["azure"] = False  # or somebody's own Hyper-V
    return found


def parse_clouds(text: str) -> dict[str, bool]:
    """The same from `TORCHELASTIC_METADATA`. Raises ValueError: it names something else."""
    names = [name.strip().lower() for name in text.split(",")]
    if names == ["none"]:
        return {}
    unknown = [name for name in names if name not in _CLOUDS]
    if unknown:
        raise ValueError(f"{METADATA_VARIABLE} is {text!r}: give {', '.join(_CLOUDS)}, separated by commas, or none")
    return dict.fromkeys(names, True)


def detect(
    environment: Mapping[str, str] | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    runner: Runner = run_command,
    opener: Opener = open_url,
    machine: Callable[[], str] = read_machine,
    poller: Poller | None = None,
) -> list[Deadline]:
    """All deadlines of this process; `nearest` makes one of them, `close_all` ends them.

    Sources are polled on a daemon thread, metadata services on another one; each is started if there are any. On the
    main thread SIGTERM becomes a notice if it still has its default action (a coordinator that is made later drains,
    and then handles SIGTERM); in a SLURM job SIGUSR1 does too. See docs/lifetime.md for the variables.

    Args:
        environment: variables; default: those of this process.
        clock: monotonic seconds; the same that the deadlines are asked with.
        wall_clock: Unix seconds.
        runner: runs `squeue`.
        opener: sends HTTP requests.
        machine: returns what the firmware says about the machine.
        poller: polls the sources; None: a new one.

    Raises:
        ValueError: a variable has an invalid value; names it, with the remedy.
    """
    variables = os.environ if environment is None else environment
    clocks: Clocks = {"clock": clock, "wall_clock": wall_clock}
    deadlines = automatic_deadlines(variables, **clocks)
    slurm = SlurmDeadline.from_environment(variables, runner=runner, **clocks)
    files = _files(variables, clocks)
    clouds = _clouds(variables, machine, opener, clocks)
    graces_s = _graces_s(variables, slurm is not None)  # raises before anything is started
    poller_of_others = Poller() if poller is None else poller
    # a metadata service may take its time to answer: the other sources do not wait for that
    poller_of_clouds = Poller("torchelastic-metadata") if poller is None else poller
    if slurm is not None:
        _start(poller_of_others, slurm)
        slurm.when_asked_again(partial(poller_of_others.add, slurm.poll))
        deadlines.append(slurm)
    for file in files:
        _start(poller_of_others, file)
    for cloud in clouds:
        _start(poller_of_clouds, cloud)
    deadlines += [*files, *clouds]
    if graces_s:
        named = variables.get(SIGNALS_VARIABLE, "").strip()
        known = signals_with_grace(named)
        if is_grace_known(variables):
            known |= graces_s.keys() - set(FROM_SCHEDULER)
        guessed = graces_s.keys() - known
        deadlines.append(SignalNotices(graces_s, scheduler=slurm, clock=clock, gives_way=not named, guessed=guessed))
    return deadlines


def close_all(deadlines: Iterable[Deadline]) -> None:
    """End what `detect` has started: nothing is polled any more, signal handlers are restored. On the main thread."""
    for deadline in reversed(list(deadlines)):
        if isinstance(deadline, Notices):
            deadline.close()


def _start(poller: Poller, source: SlurmDeadline | WatchedFile | MetadataSource) -> None:
    poller.add(source.poll)
    source.when_closed(partial(poller.remove, source.poll))


def _files(variables: Mapping[str, str], clocks: Clocks) -> list[WatchedFile]:
    found: list[WatchedFile] = []
    if path := variables.get(TERMINATION_FILE_VARIABLE):
        found.append(TerminationFile(path, **clocks))
    if path := variables.get(PRE_STOP_VARIABLE):
        grace_s, is_sure = term_grace_s(variables), is_grace_known(variables)
        found.append(PreStopFile(path, grace_s=grace_s, is_sure=is_sure, **clocks))
    return found


def _clouds(
    variables: Mapping[str, str], machine: Callable[[], str], opener: Opener, clocks: Clocks
) -> list[MetadataSource]:
    named = variables.get(METADATA_VARIABLE, "").strip()
    clouds = parse_clouds(named) if named else clouds_of(machine())
    # these three are what the SDKs of AWS and GCP use
    if variables.get("AWS_EC2_METADATA_DISABLED", "").strip().lower() == "true":
        clouds.pop("aws", None)
    gcp_host = variables.get("GCE_METADATA_HOST", "").strip()
    endpoints = {
        "aws": variables.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "").strip(),
        "gcp": f"http://{gcp_host}" if gcp_host else "",
    }
    everywhere = variables.get(ENDPOINT_VARIABLE, "").strip()
    return [
        source(everywhere or endpoints.get(name) or LINK_LOCAL, is_expected=clouds[name], opener=opener, **clocks)
        for name, source in _CLOUDS.items()
        if name in clouds
    ]


def _graces_s(variables: Mapping[str, str], is_in_slurm: bool) -> dict[signal.Signals, float]:
    """The signals to handle: those that the user names, the others only without another handler."""
    grace_s = term_grace_s(variables)
    text = variables.get(SIGNALS_VARIABLE, "").strip()
    graces_s = parse_signals(text, grace_s) if text else {}
    if threading.current_thread() is not threading.main_thread():
        level = logging.WARNING if text else logging.INFO
        log.log(level, "not on the main thread: no signal becomes a notice")
        return {}
    if text:
        return graces_s
    graces_s[signal.SIGTERM] = grace_s
    if is_in_slurm:
        graces_s[signal.SIGUSR1] = USER_GRACE_S
    return {number: s for number, s in graces_s.items() if _is_free(number)}


def _is_free(number: signal.Signals) -> bool:
    """Whether only other `SignalNotices` handle a signal."""
    return signal.getsignal(number) is signal.SIG_DFL or notices_instead_of_default(number) is not None
