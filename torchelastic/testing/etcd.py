"""A real etcd for a test, and the environment in which Python code can talk to it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torchelastic.rendezvous.server import EtcdServer


@contextmanager
def running_etcd(options: Sequence[str] = ()) -> Iterator[EtcdServer]:
    """Run an etcd on a free port of this host; it is stopped, and its data removed, at the end of the block.

    Args:
        options: more of etcd's command line.

    Raises:
        FileNotFoundError: there is no etcd binary; the message says how to get one.
    """
    with EtcdServer(options=options) as server:
        yield server


def python_protobuf_env() -> dict[str, str]:
    """A copy of this process's environment for a child that imports `torchelastic.rendezvous.etcd`.

    The generated code of etcd3 0.12 is older than protobuf 4 and runs only on protobuf's implementation in Python,
    which has to be chosen before a process first imports protobuf.
    """
    return {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
