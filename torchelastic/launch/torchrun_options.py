"""Options of torchrun that `torchelastic run` has no use for: refused, with what to do instead."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from torchelastic.launch.options import add

_ETCD = "hosts meet at the etcd of --rdzv-endpoint, with --standalone at one of their own"
_RANKS = "ranks are given out in each round, so that any host may go and come"
_OUTPUT = "--log-dir DIR writes each worker's output to a file too"

#: Option: what to do instead.
INSTEAD = {
    "rdzv-backend": f"leave it out: {_ETCD}",
    "rdzv-conf": "leave it out: --last-call, --rdzv-timeout and --ttl are options here",
    "master-addr": f"leave it out: {_ETCD}",
    "master-port": f"leave it out: {_ETCD}",
    "local-addr": "write --iface NAME|SUBNET",
    "node-rank": f"leave it out: {_RANKS}",
    "role": "leave it out: all workers of a run have one role; name the run with --rdzv-id",
    "monitor-interval": "leave it out: the death of a worker is seen at once",
    "shutdown-timeout": "write --term-grace S",
    "start-method": "leave it out: each worker is a new process",
    "redirects": _OUTPUT,
    "tee": _OUTPUT,
    "local-ranks-filter": _OUTPUT,
    "duplicate-stdout-filters": _OUTPUT,
    "duplicate-stderr-filters": _OUTPUT,
    "logs-specs": _OUTPUT,
    "event-log-handler": "leave it out: --log-dir DIR keeps all events, `torchelastic events` shows them",
    "signals-to-handle": "leave it out: SIGTERM lets workers leave in order, see docs/draining.md",
    "no-python": "give a Python script, or -m and a module",
    "run-path": "give a Python script, or -m and a module",
    "virtual-local-rank": "leave it out: LOCAL_RANK counts the workers of a host",
    "numa-binding": "start the launcher under numactl",
}


class _Refused(argparse.Action):
    """Ends the command with what to do instead."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002 - part of the contract
        values: str | Sequence[Any] | None,  # noqa: ARG002
        option_string: str | None = None,
    ) -> None:
        parser.error(f"{option_string} is torchrun's: {INSTEAD[self.dest.replace('_', '-')]}")


def add_torchrun_options(parser: argparse.ArgumentParser) -> None:
    """Have torchrun's other options refused by name; they are not in the help."""
    for name in INSTEAD:
        add(parser, name, action=_Refused, nargs="?", help=argparse.SUPPRESS)
