"""What can be typed after `torchelastic`: every command with its options, and the function that runs it.

`torchelastic COMMAND --help` needs nothing else: this imports no room of the package that does the work.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, TypeAlias

from torchelastic.launch.torchrun_options import add_torchrun_options, from_environment
from torchelastic.log_lines import FORMAT_VARIABLE, FORMATS
from torchelastic.usage import CommandParser, add_option
from torchelastic.version import __version__

CHECKPOINT = "checkpoint"

_RUN_EXAMPLES = """examples:
  torchelastic run --standalone --nproc-per-node 3 train.py --epochs 10
  torchelastic run --rdzv-endpoint etcd-host:2379 --rdzv-id job7 --nnodes 2:4 --nproc-per-node 8 train.py

exit codes: 0 the run is finished, 1 it or a worker failed, 2 invalid arguments, 75 stopped before a deadline: start it
again (see docs/lifetime.md), 76 this host failed its health check: do not start it here again before it is repaired,
128 + N stopped by signal N
"""
_DRAIN_EXAMPLES = """examples:
  torchelastic drain --rdzv-endpoint etcd-host:2379 --rdzv-id job7 --host node-3
  torchelastic drain --rdzv-endpoint etcd-host:2379 --rdzv-id job7 node-3-0-1f2e3d4c1
"""
_STATUS_EXAMPLES = """examples:
  torchelastic status                     # the run of a launcher on this host
  torchelastic status --rdzv-endpoint etcd-host:2379 --rdzv-id job7
  torchelastic status --rdzv-endpoint etcd-host:2379 --rdzv-id job7 --json

exit codes: 0 the run is known, 1 it is not or etcd did not answer, 2 invalid arguments
"""
_TOP_EXAMPLES = """examples:
  torchelastic top                     # the run of a launcher on this host
  torchelastic top --rdzv-endpoint etcd-host:2379 --rdzv-id job7

q or Ctrl-C ends it. Where the output is no terminal, it prints the table once and ends.
"""
_EVENTS_EXAMPLES = """examples:
  torchelastic events --rdzv-endpoint etcd-host:2379 --rdzv-id job7
  torchelastic events --rdzv-endpoint etcd-host:2379 --rdzv-id job7 --follow
  torchelastic events --journal /logs/job7 /logs/job7-node2 --json

From etcd come the newest events of each host that takes part now, from journals all that are in them (of several runs:
those of --rdzv-id). With --follow it goes on until the run is over, or Ctrl-C.
"""
_REPORT_EXAMPLES = """examples:
  torchelastic report logs/
  torchelastic report /shared/job7/logs -o job7.html --loss losses.csv
  torchelastic report logs/ --compare ../yesterday/logs
  torchelastic report node1/logs node2/logs --json | jq .figures

Give the --log-dir of every host's `torchelastic run`, or files of journals (ledger-*.jsonl). See docs/ledger.md.
"""
_SIMULATE_ESI_EXAMPLES = """examples:
  torchelastic simulate-esi --cmd 'torchrun --standalone --nproc-per-node 2 train.py' --timeout 120
  torchelastic simulate-esi --cmd 'python train.py' --timeout 60 --grace 5 --max-restarts 10 --report report.json

exit codes: 0 the job has finished, 1 it has not, 2 invalid arguments, 128 + N ended by signal N
"""
_DOCTOR_EXAMPLES = """examples:
  torchelastic doctor
  torchelastic doctor --rdzv-endpoint etcd-host:2379 --rdzv-id job7 --checkpoint-dir /mnt/checkpoints --state-size 30GiB
  srun --nodes 4 torchelastic doctor --rdzv-endpoint etcd-host:2379 --nnodes 4       # the hosts check each other too
  torchelastic doctor --burn-in 60                                                   # do all cores and GPUs agree?

exit codes: 0 nothing is wrong, 1 an error was found (with --strict also a warning), 2 invalid arguments
"""

#: Option about access to etcd: (the rendezvous URL's name for it, metavar, help).
ACCESS_OPTIONS = {
    "etcd-cacert": ("cacert", "FILE", "TLS: the authority that signed etcd's certificate (PEM)"),
    "etcd-cert": ("cert", "FILE", "TLS: this client's certificate (PEM), if etcd wants one"),
    "etcd-key": ("key", "FILE", "TLS: its private key (PEM), for nobody else to read"),
    "etcd-user": ("user", "NAME", "log in to etcd; see docs/security.md for the environment's variables"),
    "etcd-password-file": ("password_file", "FILE", "with the password on its one line, for nobody else to read"),
}
_SECONDS: dict[str, Any] = {"type": float, "metavar": "S"}
_FLAG: dict[str, Any] = {"action": "store_true"}
_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def command_parser() -> argparse.ArgumentParser:
    """What understands the command line; the words after `checkpoint` have a parser of their own."""
    parser: argparse.ArgumentParser = CommandParser(prog="torchelastic", description="Keeps PyTorch training alive.")
    parser.add_argument("--version", action="version", version=f"torchelastic {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_drain(commands)
    _add_status(commands)
    _add_top(commands)
    _add_events(commands)
    _add_report(commands)
    commands.add_parser(CHECKPOINT, help="list, show, verify, prune and convert checkpoints", add_help=False)
    _add_simulate_esi(commands)
    _add_doctor(commands)
    return parser


def _added(
    commands: _Commands, name: str, function: str, what: str, examples: str, **settings: Any
) -> argparse.ArgumentParser:
    """A command that is run by a function of `torchelastic.launch`, with its options: "module:function"."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, help=what, epilog=examples, formatter_class=layout, **settings)
    parser.set_defaults(function=f"torchelastic.launch.{function}")
    return parser


def _add_run(commands: _Commands) -> None:
    what = "run a training script on this host, alone or together with others"
    # without allow_abbrev=False an option of the script that begins like two of ours is refused as ambiguous
    parser = _added(commands, "run", "run:run", what, _RUN_EXAMPLES, allow_abbrev=False)
    _add_meeting(parser)
    add_option(parser, "max-restarts", "of each worker (default 3)", type=int, default=3, metavar="K")
    add_option(parser, "log-dir", "write each worker's output to a file in here too", type=Path, metavar="DIR")
    add_option(parser, "rdzv-timeout", "wait for a group (default 600 s)", default=600.0, **_SECONDS)
    add_option(parser, "last-call", "first group: wait for more (default 30 s)", default=30.0, **_SECONDS)
    add_option(parser, "ttl", "silence after which a host is lost (default 10 s)", default=10.0, **_SECONDS)
    add_option(parser, "connect-timeout", "wait for etcd (default 30 s)", default=30.0, **_SECONDS)
    what = "on SIGTERM, let workers leave in order for so long (default 30 s)"
    add_option(parser, "term-grace", what, default=30.0, **_SECONDS)
    what = "how long a group may train without contact to etcd; 'unlimited' (default 300 s; --standalone: unlimited)"
    add_option(parser, "orphan-timeout", what, metavar="S")
    what = "meet the other hosts over this network: an interface or a subnet (default: the one that leads to etcd)"
    add_option(parser, "iface", what, metavar="NAME|SUBNET[,..]")
    what = "this host ends so long after the start of the launcher: scripts with a deadline source save and stop before"
    add_option(parser, "time-limit", what, **_SECONDS)
    what = "run it on this host before its workers start, one line for the shell: if it fails, this host is kept out"
    add_option(parser, "health-check", what, metavar="COMMAND")
    what = "after which a health check has failed (default 600 s)"
    add_option(parser, "health-check-timeout", what, **_SECONDS)
    what = "what to do in a run that was finished before: fail (default), or succeed with exit code 0"
    add_option(parser, "if-finished", what, choices=("fail", "succeed"), default="fail")
    _add_access(parser)
    _add_watching(parser)
    add_torchrun_options(parser)
    parser.set_defaults(**from_environment(os.environ))
    parser.add_argument("-m", "--module", action="store_true", help="script is the name of a module")
    parser.add_argument("-v", "--verbose", action="store_true", help="say more about membership")
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def _add_meeting(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run` about who trains together, and where they meet."""
    what = "this host alone, with an etcd of its own: the default without --nnodes and --rdzv-endpoint"
    add_option(parser, "standalone", what, **_FLAG)
    _add_place(parser, what="names the run; the same on every host")
    add_option(parser, "nnodes", "how many hosts (default 1)", default="1:1", metavar="MIN[:MAX]")
    what = "workers on each host: a number (default 1), cpu, gpu: as many as there are, or auto: gpu, or else cpu"
    add_option(parser, "nproc-per-node", what, default="1", metavar="N")
    add_option(parser, "min-workers", "default: 1 with --standalone, else MIN x N", type=int, metavar="M")
    add_option(parser, "max-workers", "default: MAX x N", type=int, metavar="M")
    what = "train in groups whose size is a multiple of it; who is over waits as a spare (default 1)"
    add_option(parser, "multiple-of", what, type=int, default=1, metavar="K")


def _add_watching(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run` about metrics, the page and the terminal."""
    add_option(parser, "metrics-port", "serve Prometheus metrics there; 0: any free port", type=int, metavar="PORT")
    what = "where to serve them (default 127.0.0.1)"
    add_option(parser, "metrics-host", what, default="127.0.0.1", metavar="ADDR")
    what = "push the metrics to a Prometheus push gateway, every 15 s and at the end"
    add_option(parser, "push-gateway", what, metavar="URL")
    what = "serve the run's live page there (default off; --standalone: any free port of this host alone)"
    add_option(parser, "page", what, metavar="[HOST:]PORT")
    what = "with the token that opens the page; made if there is none (default: a new token, in a file that is named)"
    add_option(parser, "page-token-file", what, type=Path, metavar="FILE")
    what = f"each event and each line of a worker is a line for people, or JSON (default: {FORMAT_VARIABLE}, or human)"
    add_option(parser, "log-format", what, choices=FORMATS)


def _add_place(
    parser: argparse.ArgumentParser, *, required: bool = False, what: str = "names the run", default: str | None = None
) -> None:
    text = "the etcd where the hosts of a run meet"
    add_option(parser, "rdzv-endpoint", text, required=required, metavar="HOST:PORT[,..]")
    add_option(parser, "rdzv-id", what, required=required, default=default, metavar="ID")


def _add_address(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add the options that name a run that goes on elsewhere, and its etcd: see `run_address.opened`."""
    _add_place(parser, required=required)
    add_option(parser, "connect-timeout", "wait for etcd (default 30 s)", default=30.0, **_SECONDS)
    _add_access(parser)


def _add_access(parser: argparse.ArgumentParser) -> None:
    """Add the options about access to etcd, in the last part of the help."""
    group = parser.add_argument_group("access to etcd")
    for name, (_parameter, metavar, what) in ACCESS_OPTIONS.items():
        add_option(group, name, what, metavar=metavar)


def _add_drain(commands: _Commands) -> None:
    what = "let workers leave a run at an agreed step, without a roll-back"
    parser = _added(commands, "drain", "drain:drain", what, _DRAIN_EXAMPLES)
    _add_address(parser, required=True)
    add_option(parser, "host", "all members on this host", metavar="HOST")
    add_option(parser, "timeout", "wait so long until they have left (default 60 s)", default=60.0, **_SECONDS)
    parser.add_argument("members", nargs="*", metavar="MEMBER", help="ids of members; without any, those are listed")


def _add_status(commands: _Commands) -> None:
    what = "show a run: members, steps, where the time goes, what happened last"
    parser = _added(commands, "status", "status:status", what, _STATUS_EXAMPLES)
    _add_address(parser)
    add_option(parser, "json", "one line of JSON, for programs", **_FLAG)


def _add_top(commands: _Commands) -> None:
    parser = _added(commands, "top", "status:top", "watch a run, live in the terminal", _TOP_EXAMPLES)
    _add_address(parser)
    what = "between two updates (default 1 s; hosts of large runs report less often)"
    add_option(parser, "interval", what, default=1.0, **_SECONDS)
    parser.set_defaults(json=False)


def _add_events(commands: _Commands) -> None:
    what = "list what has happened in a run: joins, losses, re-forms, saves, .."
    parser = _added(commands, "events", "events:events", what, _EVENTS_EXAMPLES)
    _add_address(parser)
    add_option(parser, "follow", "go on as they come", **_FLAG)
    add_option(parser, "json", "one JSON object per line, for programs", **_FLAG)
    what = "folders with journals of the run, instead of its etcd"
    add_option(parser, "journal", what, type=Path, nargs="+", default=[], metavar="PATH")


def _add_report(commands: _Commands) -> None:
    what = "write a page about a run: where every second went, what each failure cost"
    parser = _added(commands, "report", "report:report", what, _REPORT_EXAMPLES)
    what = "folders with journals of the run, or files of journals"
    parser.add_argument("journals", type=Path, nargs="+", metavar="PATH", help=what)
    what = "the file to write; - is standard output [report.html; with --json -]"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=what)
    add_option(parser, "json", "the same content as one JSON object, for programs", **_FLAG)
    what = "losses by step: CSV or JSON lines with step and loss, or a folder of them"
    add_option(parser, "loss", what, type=Path, metavar="FILE")
    what = "journals of another run, side by side"
    add_option(parser, "compare", what, type=Path, nargs="+", default=[], metavar="PATH")
    add_option(parser, "run-id", "which run, where there are journals of several", metavar="ID")
    add_option(parser, "compare-run-id", "the same for --compare", metavar="ID")


def _add_simulate_esi(commands: _Commands) -> None:
    what = "run a job as on instances that end at a known time: end it, start it again, report what was lost"
    parser = _added(commands, "simulate-esi", "simulate_esi:simulate_esi", what, _SIMULATE_ESI_EXAMPLES)
    add_option(parser, "cmd", "the job: one line for the shell", required=True, metavar="COMMAND")
    add_option(parser, "timeout", "from the start of an instance to SIGTERM", required=True, **_SECONDS)
    add_option(parser, "grace", "from SIGTERM to SIGKILL (default 30 s)", default=30.0, **_SECONDS)
    what = "start it again so often (default 100, but not after 3 failures in a row)"
    add_option(parser, "max-restarts", what, type=int, metavar="N")
    add_option(parser, "pause", "between two starts (default 0 s)", default=0.0, **_SECONDS)
    what = "a job that exits with this wants to be started again; may be given several times (default 75)"
    add_option(parser, "requeue-code", what, type=int, action="append", metavar="N")
    add_option(parser, "json", "the report as one line of JSON, the last one on stdout", **_FLAG)
    add_option(parser, "report", "write the report as JSON here", type=Path, metavar="FILE")


def _add_doctor(commands: _Commands) -> None:
    what = "look for what would keep a run from working on this host, and say what to do about it"
    parser = _added(commands, "doctor", "doctor:doctor", what, _DOCTOR_EXAMPLES)
    _add_place(parser, what="the run below whose key it writes (default: doctor)", default="doctor")
    _add_access(parser)
    what = "the network over which the hosts are to meet, as for `torchelastic run` (default: etcd's)"
    add_option(parser, "iface", what, metavar="NAME|SUBNET[,..]")
    add_option(parser, "nnodes", "how many hosts run the doctor now (default 1)", type=int, default=1, metavar="N")
    add_option(parser, "nproc-per-node", "workers on each host", type=int, metavar="N")
    add_option(parser, "wait", "for the other hosts (default 7 s)", default=7.0, **_SECONDS)
    what = "where checkpoints go; may be given several times"
    add_option(parser, "checkpoint-dir", what, action="append", default=[], metavar="DIR")
    add_option(parser, "state-size", "what the ranks of a host save together, such as 30GiB", metavar="SIZE")
    what = "has to be free here, and reached by the other hosts; may be given several times"
    add_option(parser, "port", what, type=int, action="append", default=[], metavar="PORT")
    what = "also have every core and GPU compute the same for so long, and name those that compute wrong"
    add_option(parser, "burn-in", what, **_SECONDS)
    add_option(parser, "strict", "exit code 1 for warnings too", **_FLAG)
    add_option(parser, "json", "one line of JSON, for programs", **_FLAG)
