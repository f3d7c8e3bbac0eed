"""torchrun's command line, word for word: what of it is mapped to options of ours, has no effect here, or is refused.

The options are those of torch 2.15's `torchrun --help`; what `torchelastic run` has under the same name is not here.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torchelastic.launch.numa_binding import MODES
from torchelastic.line_prefix import MACROS, OURS, TORCHRUNS, unknown_macros
from torchelastic.usage import UsageError, add_option

_ETCD = "hosts meet at an etcd: start one where all can reach it, and write --rdzv-endpoint HOST:2379 --rdzv-id ID"
#: Where torchrun's hosts meet if no port is named.
_C10D_PORT, _STATIC_PORT = 29400, 29500
_ONE_HOST = "one host needs no address to meet at"
_AT_ETCD = "the hosts meet at --rdzv-endpoint"

#: Options without a value that mean the same here.
FLAGS = ("no-python", "run-path", "virtual-local-rank")
#: Options that are mapped; each with a value.
MAPPED = (
    "rdzv-backend", "rdzv-conf", "master-addr", "master-port", "local-addr", "node-rank", "role", "shutdown-timeout",
    "redirects", "tee", "local-ranks-filter", "log-line-prefix-template", "numa-binding",
)  # fmt: skip
#: Options without an effect, and why they need none.
WITHOUT_EFFECT = {
    "monitor-interval": "the death of a worker is seen at once",
    "start-method": "each worker is a new process",
    "signals-to-handle": "SIGTERM, SIGHUP, SIGQUIT let workers leave in order, SIGINT ends them, SIGUSR1, 2 go to them",
}
#: An option of `python -m torch.distributed.launch`, which is torchrun besides.
USE_ENV = "use-env"
#: Options that are refused, and what to do instead.
INSTEAD = {
    "duplicate-stdout-filters": "leave it out: --log-dir DIR writes each worker's output to a file, for grep",
    "duplicate-stderr-filters": "leave it out: --log-dir DIR writes each worker's output to a file, for grep",
    "logs-specs": "leave it out: --log-dir DIR writes each worker's output to a file",
    "event-log-handler": "leave it out: --log-dir DIR keeps all events, `torchelastic events` shows them",
}
#: Values of theirs that ask for nothing: torchrun's defaults.
_NOTHING = {"logs-specs": "default", "event-log-handler": "null"}
#: As one of the options above, but there need not be a script.
COMPLETION = "print-completion"
_INSTEAD_OF_COMPLETION = (
    f"--{COMPLETION} is torchrun's: `pip install shtab`, then "
    "`shtab --shell {} torchelastic.launch.command_line.command_parser` prints that script for torchelastic"
)
#: Options that torchrun does not take from the environment.
_NOT_VARIABLES = ("numa-binding", "logs-specs")
#: Other variables that torchrun knows: (argparse's name of an option here, variable), the one that counts last.
_OTHER_VARIABLES = (
    ("log_line_prefix_template", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
    ("log_line_prefix_template", "PET_LOG_LINE_PREFIX_TEMPLATE"),
    # so that --term-grace counts more
    ("term_grace", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
    ("term_grace", "PET_SHUTDOWN_TIMEOUT"),
)
_SHORT = {"redirects": "-r", "tee": "-t"}
#: Keys of --rdzv-conf that are options here.
_CONF = {"join_timeout": "rdzv_timeout", "timeout": "rdzv_timeout", "last_call_timeout": "last_call"}
#: What bit 1 and bit 2 of --redirects and --tee stand for.
_STREAMS = ("stdout", "stderr")


@dataclass(frozen=True)
class Translation:
    """What torchrun's words come to here.

    Attributes:
        options: of ours, by the names that argparse gives them: to be set.
        notes: what has no effect and why, one line each.
        hidden: (local rank, "stdout" or "stderr") of output that is not to be on the screen.
        to_files: whether the workers' output is to be written to files too.
        variables: for the workers.
        prefix: template of what a line of a worker begins with on the screen.
        numa_mode: how workers are bound to the CPUs near their GPUs; empty: not at all.
    """

    options: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    hidden: frozenset[tuple[int, str]] = frozenset()
    to_files: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    prefix: str = OURS
    numa_mode: str = ""


def add_torchrun_options(parser: argparse.ArgumentParser) -> None:
    """Have them understood; they are not in the help."""
    for name in (*FLAGS, USE_ENV):
        add_option(parser, name, argparse.SUPPRESS, action="store_true")
    for name in (*MAPPED, *WITHOUT_EFFECT, *INSTEAD):
        add_option(parser, name, argparse.SUPPRESS, short=_SHORT.get(name))
    add_option(parser, COMPLETION, argparse.SUPPRESS, action=_NoCompletion)


class _NoCompletion(argparse.Action):
    """At once: torchrun prints it without a script."""

    def __call__(
        self, parser: argparse.ArgumentParser, _options: object, values: object, _option: str | None = None
    ) -> None:
        parser.error(_INSTEAD_OF_COMPLETION.format(values))


def from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    """The options that torchrun takes from the environment (PET_NNODES, ..), by argparse's names; no empty ones."""
    flags = [f"PET_{_dest(name)}" for name in (*FLAGS, "standalone", "module")]
    valued = [name for name in (*MAPPED, *WITHOUT_EFFECT, *INSTEAD) if name not in _NOT_VARIABLES]
    valued += ["nnodes", "nproc-per-node", "rdzv-endpoint", "rdzv-id", "max-restarts", "log-dir"]
    sources = [(_dest(name), f"PET_{_dest(name).upper()}") for name in valued]
    found: dict[str, object] = {}
    for name, variable in (*sources, *_OTHER_VARIABLES):
        if name != "shutdown_timeout" and environment.get(variable):
            found[name] = environment[variable]
    for flag in flags:
        if environment.get(flag.upper(), "0").strip() not in ("", "0"):
            found[flag.removeprefix("PET_")] = True
    return found


def _dest(name: str) -> str:
    """The name that argparse gives an option."""
    return name.replace("-", "_")


def workers_per_host(text: str, cpus: Callable[[], int], accelerators: Callable[[str], int | None]) -> int:
    """What --nproc-per-node means: a number, `cpu`, `gpu`, another kind of accelerator, or `auto`: of what there is.

    Args:
        text: the option's value.
        cpus: counts the processors.
        accelerators: counts those of a kind; None: there is no such kind.

    Raises:
        UsageError: it is none of these, or there is no such device here.

    >>> workers_per_host("auto", lambda: 8, lambda _kind: 0)
    8
    """
    if re.fullmatch(r"\d{1,6}", text):
        return int(text)
    if text == "cpu":
        return cpus()
    count = accelerators(text) if re.fullmatch(r"[a-z]\w*", text) else None
    if text == "auto":
        return count or cpus()
    if count is None:
        raise UsageError(f"--nproc-per-node {text!r}: write a number, auto, cpu, gpu, or another device type of torch")
    if not count:
        raise UsageError(f"--nproc-per-node {text}: no {text.upper()} is visible here; write a number, or cpu")
    return count


def translated(given: argparse.Namespace, *, several_hosts: bool, nproc: int) -> Translation:
    """What torchrun's options in a command line come to.

    Args:
        given: the parsed command line.
        several_hosts: whether --nnodes allows more than one.
        nproc: workers on this host.

    Raises:
        UsageError: an option cannot be mapped; the message says what to write instead.
    """
    for name, instead in INSTEAD.items():
        if _value(given, name) not in (None, _NOTHING.get(name)):
            raise UsageError(f"--{name} is torchrun's: {instead}")
    if given.numa_binding not in (None, *MODES):
        raise UsageError(f"--numa-binding {given.numa_binding!r}: write {', '.join(MODES[:-1])} or {MODES[-1]}")
    options: dict[str, object] = {}
    notes = [f"--{name} has no effect: {why}" for name, why in WITHOUT_EFFECT.items() if _value(given, name)]
    notes += _meeting(given, options, several_hosts=several_hosts)
    notes += _times(given, options)
    if given.use_env:  # of `torch.distributed.launch`, which gives the script a `--local-rank` of its own without it
        notes.append(f"--{USE_ENV} has no effect: LOCAL_RANK is set always")
    if given.local_addr:
        options["iface"] = given.iface or _network(given.local_addr)
    prefix = given.log_line_prefix_template or (OURS if given.role is None else TORCHRUNS)
    unknown = ", ".join(f"${{{name}}}" for name in unknown_macros(prefix))
    if unknown:
        notes.append(f"--log-line-prefix-template: {unknown} stays as it is, there are only {', '.join(MACROS)}")
    redirected, shown = (_by_stream(given, name, nproc) for name in ("redirects", "tee"))
    return Translation(
        options,
        tuple(notes),
        (redirected - shown) | _filtered(given.local_ranks_filter, nproc),
        bool(redirected | shown),
        {} if given.role is None else {"ROLE_NAME": given.role},
        prefix,
        given.numa_binding or "",
    )


def _value(given: argparse.Namespace, name: str) -> str | None:
    value: str | None = getattr(given, _dest(name))
    return value


def _meeting(given: argparse.Namespace, options: dict[str, object], *, several_hosts: bool) -> list[str]:
    """Where the hosts meet: nowhere, or at an etcd."""
    has_etcd = bool(given.rdzv_endpoint) and (several_hosts or not _is_torchruns_own(given))
    backend = given.rdzv_backend or ("etcd" if has_etcd else "")
    if several_hosts and has_etcd and not (given.rdzv_backend or given.rdzv_id or given.standalone):
        raise UsageError(
            "--rdzv-endpoint without --rdzv-id: write --rdzv-id ID for an etcd there; if it is one of the hosts, write "
            "--rdzv-backend c10d, and its launcher starts one"
        )
    if several_hosts and not given.standalone:
        if backend not in ("", "etcd", "etcd-v2") or (given.master_addr and not given.rdzv_endpoint):
            return _at_one_of_them(given, backend, options)
    elif given.standalone or not backend.startswith("etcd"):
        options["standalone"], options["rdzv_endpoint"] = True, None
    why = _ONE_HOST if options.get("standalone") else _AT_ETCD
    named = ["master-addr", "master-port", "node-rank"]
    named += ["rdzv-backend", "rdzv-endpoint"] if options.get("standalone") else []
    said = [f"--{name}" for name in named if _value(given, name) is not None]
    return [f"{', '.join(said)} {'has' if len(said) == 1 else 'have'} no effect: {why}"] if said else []


def _is_torchruns_own(given: argparse.Namespace) -> bool:
    """Whether an endpoint is an address of one host for itself, and no etcd: a run in one has an id."""
    return (
        not given.rdzv_id
        and re.fullmatch(r"\d+|(localhost|127\.[\d.]+|\[::1\])(:\d+)?", given.rdzv_endpoint) is not None
    )


def _at_one_of_them(given: argparse.Namespace, backend: str, options: dict[str, object]) -> list[str]:
    """The hosts meet at one of them: torchrun opens a store of its own there, and the launcher an etcd."""
    if backend not in ("", "c10d", "static"):
        raise UsageError(f"--rdzv-backend {backend} is torchrun's: {_ETCD}")
    if backend == "c10d" or given.rdzv_endpoint:
        text, usual = given.rdzv_endpoint or "", _C10D_PORT
    else:
        text, usual = f"{given.master_addr or ''}:{given.master_port or _STATIC_PORT}", _STATIC_PORT
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:,/@]+)(?::(\d{1,5}))?", text)
    if match is None or match[2] == "0":
        raise UsageError(f"the hosts meet at one of them: write --rdzv-endpoint HOST:{usual}, the same on each")
    host, port = match[1].strip("[]"), int(match[2] or usual)
    options["meeting_place"], options["rdzv_endpoint"] = (host, port), f"{match[1]}:{port}"
    options["rdzv_id"] = given.rdzv_id or "none"
    named = [name for name in ("master-addr", "master-port", "node-rank") if _value(given, name) is not None]
    unused = [f"--{name}" for name in named if name == "node-rank" or backend == "c10d"]
    notes = [f"{', '.join(unused)} {'has' if len(unused) == 1 else 'have'} no effect: {_AT_ETCD}"] if unused else []
    return [
        *notes,
        f"the launcher on {host} starts an etcd at port {port}, open to its network, where all meet; without that host "
        f"the run cannot go on: a run that outlives it has an etcd elsewhere (--rdzv-endpoint without --rdzv-backend)",
    ]


def _times(given: argparse.Namespace, options: dict[str, object]) -> list[str]:
    if given.shutdown_timeout is not None:
        options["term_grace"] = _number("--shutdown-timeout", given.shutdown_timeout)
    unused = []
    for pair in filter(None, (given.rdzv_conf or "").split(",")):
        key, equals, value = pair.strip().partition("=")
        if not equals:
            raise UsageError(f"--rdzv-conf {pair!r}: write KEY=VALUE[,..]")
        if key in _CONF:
            options[_CONF[key]] = _number(f"--rdzv-conf {key}", value)
        else:
            unused.append(key)
    why = "the keys that have one are join_timeout and last_call_timeout"
    return [f"--rdzv-conf {', '.join(unused)} has no effect: {why}"] if unused else []


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{name} {text!r}: write a number of seconds") from None


def _network(address: str) -> str:
    """An address is a subnet of one; a name of this host is no interface's."""
    if re.fullmatch(r"[0-9.]+|[0-9a-fA-F:]*:[0-9a-fA-F:.]*", address):
        return f"{address}/{128 if ':' in address else 32}"
    raise UsageError(f"--local-addr {address!r}: write an address of this host, or --iface NAME|SUBNET")


def _by_stream(given: argparse.Namespace, name: str, nproc: int) -> frozenset[tuple[int, str]]:
    """What `3`, or `0:1,1:2`, means: 1 standard output, 2 standard error, 3 both; of all workers, or of those named."""
    text = _value(given, name) or "0"
    if re.fullmatch(r"[0-3]", text):
        bits = dict.fromkeys(range(nproc), int(text))
    elif re.fullmatch(r"\d{1,6}:[0-3](,\d{1,6}:[0-3])*", text):
        bits = {int(rank): int(bit) for rank, bit in (pair.split(":") for pair in text.split(","))}
    else:
        raise UsageError(f"--{name} {text!r}: write 0, 1, 2 or 3, or LOCAL_RANK:N[,..]")
    return frozenset(
        (rank, stream) for rank, bit in bits.items() for at, stream in enumerate(_STREAMS) if bit >> at & 1
    )


def _filtered(text: str | None, nproc: int) -> frozenset[tuple[int, str]]:
    if not text:
        return frozenset()
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
        raise UsageError(f"--local-ranks-filter {text!r}: write LOCAL_RANK[,..]")
    shown = set(map(int, text.split(",")))
    return frozenset((rank, stream) for rank in range(nproc) if rank not in shown for stream in _STREAMS)
