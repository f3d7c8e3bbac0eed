"""Finds every source of a deadline that applies to this process."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from torchelastic.checkpoint.policy.arguments import real_number
from torchelastic.lifetime.deadline import CapacityBlock, Deadline, DeadlineAt, automatic_deadlines
from torchelastic.lifetime.sources.aws import AwsSpot
from torchelastic.lifetime.sources.azure import AzureScheduledEvents
from torchelastic.lifetime.sources.files import PreStopFile, TerminationFile, WatchedFile
from torchelastic.lifetime.sources.gcp import GcpPreemption
from torchelastic.lifetime.sources.metadata import LINK_LOCAL, MetadataSource, Opener, Options, open_url
from torchelastic.lifetime.sources.notice import Notices
from torchelastic.lifetime.sources.poller import Poller
from torchelastic.lifetime.sources.signals import (
    FROM_SCHEDULER,
    TERM_GRACE_S,
    USER_GRACE_S,
    SignalNotices,
    notices_instead_of_default,
    parse_signals,
    signals_with_grace,
)
from torchelastic.lifetime.sources.slurm import Runner, SlurmDeadline, run_command

log = logging.getLogger(__name__)

#: Unix seconds at which this instance ends.
TERMINATION_TIME_VARIABLE = "TORCHELASTIC_TERMINATION_TIME"
#: A file that holds them, and may change.
TERMINATION_FILE_VARIABLE = "TORCHELASTIC_TERMINATION_FILE"
#: A file that a preStop hook touches.
PRE_STOP_VARIABLE = "TORCHELASTIC_PRESTOP_FILE"
#: Seconds from SIGTERM, or from the preStop hook, to SIGKILL.
GRACE_VARIABLE = "TORCHELASTIC_TERM_GRACE_S"
#: Which signals are notices: see `signals.parse_signals`.
SIGNALS_VARIABLE = "TORCHELASTIC_DEADLINE_SIGNALS"
#: Which clouds to ask: `aws`, `gcp`, `azure`, several with commas, or `none`.
METADATA_VARIABLE = "TORCHELASTIC_METADATA"
#: Where to ask them, instead of the link-local address.
ENDPOINT_VARIABLE = "TORCHELASTIC_METADATA_ENDPOINT"

#: A launcher ends workers so long after the signal that it passes on: torchrun (torch 2.13) and `torchelastic run`.
LAUNCHER_GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_MACHINE = Path("/sys/class/dmi/id")
_MACHINE_FILES = ("sys_vendor", "product_name", "bios_vendor", "bios_version", "board_vendor", "chassis_asset_tag")
#: What every virtual machine of Azure has as its asset tag (cloud-init's datasource goes by it too).
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
_CLOUDS = ("aws", "gcp", "azure")


def read_machine(folder: Path = _MACHINE) -> str:
    """What the firmware says about the machine; "" where it cannot be read."""
    found = []
    for name in _MACHINE_FILES:
        try:
            found.append((folder / name).read_text(errors="replace").strip())
        except OSError:
            continue
    return "\n".join(found)


def clouds_of(machine: str) -> dict[str, bool]:
    """The clouds whose metadata service is to be asked, with whether it is surely that one.

    Nobody is asked on a machine that says nothing of the kind.

    Args:
        machine: see `read_machine`.

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
        raise ValueError(f"{METADATA_VARIABLE} is {text!r}: give {', '.join(_CLOUDS)}, several with commas, or none")
    return dict.fromkeys(names, True)


def term_grace_s(environment: Mapping[str, str]) -> float:
    """Seconds from SIGTERM to SIGKILL: as the user says, as the launcher gives it, else 30.

    Raises:
        ValueError: TORCHELASTIC_TERM_GRACE_S is no number of seconds.
    """
    text = environment.get(GRACE_VARIABLE, "").strip()
    remedy = "give seconds, for example a pod's terminationGracePeriodSeconds"
    if text:
        try:
            number = float(text)
        except ValueError:
            raise ValueError(f"{GRACE_VARIABLE} is {text!r}, which is no number: {remedy}") from None
        return real_number(GRACE_VARIABLE, number, remedy=remedy)
    launchers = environment.get(LAUNCHER_GRACE_VARIABLE, "").strip()
    return float(launchers) if launchers.isdecimal() else TERM_GRACE_S


def is_grace_known(environment: Mapping[str, str]) -> bool:
    """Whether the user has said how long it is from SIGTERM to SIGKILL.

    The launcher's own variable does not count: whoever ends the launcher (`docker stop`, Kubernetes) may give less.
    """
    return bool(environment.get(GRACE_VARIABLE, "").strip())


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

    Sources that have to be asked are asked on a daemon thread, metadata services on another one; each is started if
    there are any. On the main thread
    SIGTERM becomes a notice if it still has its default action (a coordinator that is made later drains, and then
    SIGTERM is its matter); in a SLURM job SIGUSR1 does too. See docs/lifetime.md for all of it and for the variables.

    Args:
        environment: variables; default: those of this process.
        clock: monotonic seconds; the same that the deadlines are asked with.
        wall_clock: Unix seconds.
        runner: runs `squeue`.
        opener: sends HTTP requests.
        machine: says what the firmware knows of the machine.
        poller: asks the sources; None: a new one.

    Raises:
        ValueError: a variable holds something that it should not; names it, with the remedy.
    """
    variables = os.environ if environment is None else environment
    deadlines = automatic_deadlines(variables, clock=clock, wall_clock=wall_clock)
    value = variables.get(TERMINATION_TIME_VARIABLE, "")
    end = CapacityBlock.from_variable(TERMINATION_TIME_VARIABLE, value, now_s=clock(), wall_s=wall_clock())
    if end is not None:
        deadlines.append(DeadlineAt("elastic instance", end.at_s, end.reason))
    slurm = SlurmDeadline.from_environment(variables, runner=runner, clock=clock, wall_clock=wall_clock)
    files = _files(variables, clock, wall_clock)
    clouds = _clouds(variables, machine, opener, clock, wall_clock)
    graces_s = _graces_s(variables, slurm is not None)  # complains before anything is started
    asks = Poller() if poller is None else poller
    if slurm is not None:
        deadlines.append(slurm)
        slurm.when_asked_again(lambda after_s: asks.add(slurm.poll, after_s))
        _start(asks, slurm)
    for file in files:
        deadlines.append(file)
        _start(asks, file)
    # a metadata service may take its time to answer: none of the others waits for that
    asks_clouds = Poller("torchelastic-metadata") if poller is None else poller
    for cloud in clouds:
        deadlines.append(cloud)
        _start(asks_clouds, cloud)
    if graces_s:
        named = variables.get(SIGNALS_VARIABLE, "").strip()
        said = signals_with_grace(named)
        if is_grace_known(variables):
            said |= graces_s.keys() - set(FROM_SCHEDULER)
        guessed = graces_s.keys() - said
        deadlines.append(SignalNotices(graces_s, scheduler=slurm, clock=clock, gives_way=not named, guessed=guessed))
    return deadlines


def close_all(deadlines: Iterable[Deadline]) -> None:
    """End what `detect` has started: nobody is asked any more, and signals mean what they meant. On the main thread."""
    for deadline in reversed(list(deadlines)):
        if isinstance(deadline, Notices):
            deadline.close()


def _start(poller: Poller, source: SlurmDeadline | WatchedFile | MetadataSource) -> None:
    poller.add(source.poll)
    source.when_closed(lambda: poller.remove(source.poll))


def _files(
    variables: Mapping[str, str], clock: Callable[[], float], wall_clock: Callable[[], float]
) -> list[WatchedFile]:
    found: list[WatchedFile] = []
    if path := variables.get(TERMINATION_FILE_VARIABLE):
        found.append(TerminationFile(path, clock=clock, wall_clock=wall_clock))
    if path := variables.get(PRE_STOP_VARIABLE):
        grace_s, is_sure = term_grace_s(variables), is_grace_known(variables)
        found.append(PreStopFile(path, grace_s=grace_s, clock=clock, wall_clock=wall_clock, is_sure=is_sure))
    return found


def _clouds(
    variables: Mapping[str, str],
    machine: Callable[[], str],
    opener: Opener,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
) -> list[MetadataSource]:
    text = variables.get(METADATA_VARIABLE, "").strip()
    clouds = parse_clouds(text) if text else clouds_of(machine())
    everywhere = variables.get(ENDPOINT_VARIABLE, "").strip()

    def of(cloud: str) -> Options:
        return {"is_expected": clouds[cloud], "opener": opener, "clock": clock, "wall_clock": wall_clock}

    found: list[MetadataSource] = []
    # these two are what the SDKs of AWS and GCP go by
    if "aws" in clouds and variables.get("AWS_EC2_METADATA_DISABLED", "").strip().lower() != "true":
        endpoint = everywhere or variables.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "").strip() or LINK_LOCAL
        found.append(AwsSpot(endpoint, **of("aws")))
    if "gcp" in clouds:
        host = variables.get("GCE_METADATA_HOST", "").strip()
        endpoint = everywhere or (f"http://{host}" if host else LINK_LOCAL)
        found.append(GcpPreemption(endpoint, **of("gcp")))
    if "azure" in clouds:
        found.append(AzureScheduledEvents(everywhere or LINK_LOCAL, **of("azure")))
    return found


def _graces_s(variables: Mapping[str, str], is_in_slurm: bool) -> dict[signal.Signals, float]:
    """Which signals to take. Those that the user names are taken in any case, the others where nobody has a handler."""
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
    """Whether nobody but other notices has taken a signal."""
    return signal.getsignal(number) is signal.SIG_DFL or notices_instead_of_default(number) is not None
