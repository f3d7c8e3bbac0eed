"""Opens the agent's connection to etcd: the one place where grpc and protobuf come into a process of ours."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable

from torchelastic.rendezvous import etcd_versions
from torchelastic.rendezvous.credentials import Credentials
from torchelastic.rendezvous.store import CoordinationStore
from torchelastic.rendezvous.url import RendezvousUrl

log = logging.getLogger(__name__)

_VERBOSITY_VARIABLE = "GRPC_VERBOSITY"


def connect(
    url: RendezvousUrl,
    credentials: Credentials,
    on_connect: Callable[[str, str], None] = lambda _endpoint, _version: None,
) -> CoordinationStore:
    """A store on the etcd of `url`; does not connect yet. `on_connect`: see `EtcdStore`.

    etcd3's generated code does not import beside protobuf >= 4 unless protobuf's slow, pure implementation is chosen
    before its first import; that choice holds for this process only and is not passed on to workers.
    """
    os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"
    # gRPC reads this once, at its import: it writes what it thinks of a certificate to the screen, beside our one error
    is_ours = _VERBOSITY_VARIABLE not in os.environ
    os.environ.setdefault(_VERBOSITY_VARIABLE, "NONE")
    from torchelastic.rendezvous.etcd import EtcdStore

    if is_ours:
        del os.environ[_VERBOSITY_VARIABLE]
    if credentials.user is not None and credentials.ca_cert is None and not url.is_on_this_host:
        log.warning(
            "the password of user %r goes to etcd at %s unencrypted, for everybody on that network to read: use TLS "
            "(cacert=FILE)",
            credentials.user,
            url.endpoints_text,
        )
    return EtcdStore(url.endpoints, credentials=credentials, root=url.root, on_connect=on_connect)


@functools.cache
def say_if_unfit(endpoint: str, version: str, *, is_own: bool) -> None:
    """Log, once, that an etcd is of a release that its makers advise against. `is_own`: it ends with this launcher."""
    if not etcd_versions.is_inconsistent(version):
        return
    if is_own:
        log.info(
            "the etcd of --standalone is %s, of which a member that is killed may miss committed writes: it has no "
            "other members, and is thrown away with the run; for several hosts use %s (on PATH it is used here too)",
            version,
            etcd_versions.GOOD,
        )
    else:
        log.warning(
            "etcd at %s is %s: its makers advise against 3.5.0 to 3.5.2, of which a member that is killed may miss "
            "committed writes; use %s",
            endpoint,
            version,
            etcd_versions.GOOD,
        )
