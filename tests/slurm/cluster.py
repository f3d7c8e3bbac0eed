"""A real SLURM of its own on this machine: controller, some nodes, own ports and keys; and what it says of its jobs.

Nothing of a SLURM that this machine may have is touched. The nodes are daemons of one host with 8 pretended CPUs each
(`slurmd -N`, which Debian's build can do).
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.waiting import wait_until
from torchelastic.network.ports import unused_ports
from torchelastic.processes import dies_with_parent

#: A busy machine takes 20 s to import torch, and a job has two runs.
PATIENCE_S = 150.0
#: Between two questions to SLURM.
POLL_S = 0.1
#: From SIGTERM to SIGKILL, when a job is cancelled or over its limit.
KILL_WAIT_S = 20
#: From the notice to the kill, when a job of the partition `batch` is preempted.
GRACE_S = 30
#: A requeued job waits until its former credential has expired: 121 s by default, 6 s with the least that SLURM takes.
CREDENTIAL_S = 5
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "scancel")
FAILURES = ("FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
INSTALL = "apt-get install --no-install-recommends slurm-wlm munge"

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.sock,cred_expire={credential_s}
CredType=cred/munge
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PropagateResourceLimits=NONE
JobRequeue=1
ReturnToService=2
KillWait={kill_wait_s}
SlurmdTimeout={silence_s}
MessageTimeout={message_s}
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs=8 RealMemory=4000 State=UNKNOWN\n"
_PARTITIONS = """\
PartitionName=batch Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}
PartitionName=urgent Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_impossible() -> str:
    """Why there can be no SLURM here; "" if there can."""
    if sys.platform != "linux":
        return "SLURM runs on Linux"
    if missing := [name for name in NEEDED if shutil.which(name, path=_path()) is None]:
        return f"there is no {', '.join(missing)} here; {INSTALL}, then `make test-slurm`"
    if os.geteuid():
        return "slurmd starts jobs as root only: run `make test-slurm` as root"
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        return f"SLURM has to find this host by its name, and {socket.gethostname()!r} is not in /etc/hosts"
    return ""


def _path() -> str:
    """Debian has the daemons in /usr/sbin, which is not everybody's."""
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"


class Place(NamedTuple):
    """Where a daemon listens."""

    host: str
    address: str
    port: int


#: What a job here would inherit and a user's would not: of another SLURM, and what coordinators that lived in this
#: process have left (the loopback as gloo's interface: two nodes would never meet).
NOT_FOR_JOBS = ("SLURM_", "SBATCH_", "TORCHELASTIC_", "GLOO_", "NCCL_")


class Slurm:
    """The daemons, which end with the process that made them, and commands about jobs.

    Args:
        folder: for configuration, state and logs. Its path must be short: it holds a socket.
        nodes: how many; they are called n1, n2, ..
    """

    #: How long a node may be silent until SLURM says that it is down.
    silence_s = 60
    #: How long the controller waits for an answer.
    message_s = 30

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder = folder
        self.names = [f"n{n}" for n in range(1, nodes + 1)]
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(NOT_FOR_JOBS)},
            "PATH": _path(),
            "SLURM_CONF": str(folder / "etc" / "slurm.conf"),
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def submit(self, script: str, *options: str, words: Sequence[str | Path] = (), **variables: str) -> str:
        """Submit a batch script and return the id of the job; its output is appended to one file.

        Args:
            script: what the first of its nodes runs with bash.
            options: of sbatch.
            words: what to submit instead: a file, and its arguments.
            variables: environment variables of the job, besides those of this process.
        """
        is_array = any(option.startswith("--array") for option in options)
        output = f"--output={self.folder}/out/{'%A_%a' if is_array else '%j'}.txt"
        command = ["sbatch", "--parsable", "--open-mode=append", output, *options, *map(str, words)]
        return self._run(*command, input=f"#!/bin/bash\n{script}\n", variables=variables).strip()

    def facts(self, job_id: str) -> dict[str, str]:
        """What `scontrol show job` says. Of an array, name one task: 7_1."""
        words = self._run("scontrol", "--oneliner", "show", "job", job_id).split()
        return {name: value for name, is_one, value in (word.partition("=") for word in words) if is_one}

    def state(self, job_id: str) -> str:
        """RUNNING, PENDING, COMPLETED, .."""
        return self.facts(job_id)["JobState"]

    def restarts(self, job_id: str) -> int:
        """How often it was requeued."""
        return int(self.facts(job_id)["Restarts"])

    def wait_until(self, job_id: str, *states: str, restarts: int = 0, within_s: float = PATIENCE_S) -> str:
        """Wait until a job that was requeued so often, or more often, is in one of these states; returns which."""
        wanted = f"job {job_id} is {' or '.join(states)}, requeued {restarts} times"

        def found() -> str:
            facts = self.facts(job_id)
            state = facts["JobState"]
            assert state in states or state not in FAILURES, f"{state}, not {wanted}:\n{self.output(job_id)}"
            return state if state in states and int(facts["Restarts"]) >= restarts else ""

        return wait_until(
            found, within_s, wanted, lambda: f"{self.facts(job_id)}\n{self.output(job_id)}", every_s=POLL_S
        )

    def is_gone(self, job_id: str) -> bool:
        """Whether nothing of it runs any more: while something does, squeue lists it (COMPLETING)."""
        return not self._run("squeue", "--noheader", "--states=RUNNING,COMPLETING", f"--jobs={job_id}")

    def cancel(self, job_id: str, *options: str) -> None:
        """End a job, or send it a signal (`--signal=USR1`)."""
        self._run("scancel", *options, job_id)

    def update(self, job_id: str, **changes: str) -> None:
        """Change a job, as `scontrol update` does: EndTime="now+20" has it end in 20 s."""
        self._run("scontrol", "update", f"JobId={job_id}", *(f"{name}={value}" for name, value in changes.items()))

    def output(self, job_id: str) -> str:
        """What all runs of a job have printed, on stdout and stderr; of an array task, 7_1."""
        path = self.folder / "out" / f"{job_id}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def _run(self, *command: str, input: str = "", variables: Mapping[str, str] | None = None) -> str:  # noqa: A002
        environment = {**self.environment, **(variables or {})}
        done = subprocess.run(
            self._at(command), input=input, env=environment, cwd=self.folder, capture_output=True, text=True,
            timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}: {done.stderr}"
        return done.stdout

    # --- daemons ------------------------------------------------------------------------------------------------------

    def _configure(self) -> None:
        for name in ("etc", "state", "spool", "log", "run", "out"):
            (self.folder / name).mkdir(mode=0o755)
        key = self.folder / "etc" / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        controller, *nodes = self._places()
        text = _CONFIGURATION.format(
            controller=f"{controller.host}({controller.address})", port=controller.port, folder=self.folder,
            credential_s=CREDENTIAL_S, kill_wait_s=KILL_WAIT_S, silence_s=self.silence_s,
            message_s=self.message_s,
        )  # fmt: skip
        for name, place in zip(self.names, nodes, strict=True):
            text += _NODE.format(name=name, host=place.host, address=place.address, port=place.port)
        (self.folder / "etc" / "slurm.conf").write_text(text + _PARTITIONS.format(grace_s=GRACE_S))
        (self.folder / "etc" / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def start(self) -> None:
        """Write the configuration, start the daemons, and return when all nodes are idle."""
        self._configure()
        run = self.folder / "run"
        self._daemon(
            "munged", "--foreground", "--force", "--num-threads=2",
            f"--key-file={self.folder}/etc/munge.key", f"--socket={run}/munge.sock", f"--pid-file={run}/munged.pid",
            f"--log-file={self.folder}/log/munged.log", f"--seed-file={run}/munged.seed",
        )  # fmt: skip
        wait_until((run / "munge.sock").exists, PATIENCE_S, "munged listens", self.logs)
        self._daemon("slurmctld", "-D", "-i")
        for name in self.names:
            (self.folder / "spool" / name).mkdir()
            self.start_node(name)
        self.wait_until_idle()

    def start_node(self, name: str) -> None:
        """Start the daemon of a node, which becomes idle a little later."""
        self._daemon("slurmd", "-D", "-N", name, node=name)

    def wait_until_idle(self) -> None:
        """Wait until all nodes are."""
        wait_until(
            lambda: len(self.in_state("idle")) == len(self.names), PATIENCE_S, "all are idle", self.logs, every_s=POLL_S
        )

    def in_state(self, state: str) -> list[str]:
        """The nodes in it ("idle", "down", ..); none while the controller does not answer."""
        command = ["sinfo", "--noheader", "--Node", "--partition=batch", f"--states={state}", "--format=%N"]
        said = subprocess.run(
            self._at(command), env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S
        )
        return said.stdout.split()

    def _places(self) -> list[Place]:
        """Where the controller listens, and each node."""
        host = socket.gethostname().partition(".")[0]
        return [Place(host, "127.0.0.1", port) for port in unused_ports("127.0.0.1", 1 + len(self.names))]

    def _at(self, command: Sequence[str], node: str = "") -> list[str]:
        """What to start to run a command on a node, or where the controller is; here all of it is this host."""
        return list(command)

    def _daemon(self, *command: str, node: str = "") -> None:
        with (self.folder / "log" / f"{node or command[0]}.err").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    dies_with_parent(self._at(command, node)),
                    env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )
            )  # fmt: skip

    def logs(self) -> str:
        """The ends of all logs."""
        files = sorted((self.folder / "log").iterdir())
        return "\n".join(f"{file.name}:\n{file.read_text(errors='replace')[-1500:]}" for file in files)

    def end(self) -> None:
        """Kill all jobs, then end the daemons and whatever else there is of this SLURM."""
        kill_all = self._at(["scancel", "--full", "--signal=KILL", "--user=root"])
        subprocess.run(kill_all, env=self.environment, timeout=PATIENCE_S)
        ours = self._processes()
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        left = {*ours, *self._processes()}
        for process in left:
            if process.is_running():
                process.kill()
        psutil.wait_procs(left, timeout=10)

    def _processes(self) -> list[psutil.Process]:
        """Steps and their tasks, of whatever session; not this process."""
        return [process for process in psutil.process_iter() if process.pid != os.getpid() and self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                return True
            # a slurmstepd has put its title where its environment was
            files = process.open_files() if process.name() == "slurmstepd" else []
        except psutil.Error:
            return False
        return any(Path(file.path).is_relative_to(self.folder) for file in files)


@contextmanager
def running_slurm(folder: Path, nodes: int = 2) -> Iterator[Slurm]:
    """A SLURM with idle nodes; it is ended at the end of the block, with all its jobs."""
    slurm = Slurm(folder, nodes)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.end()
