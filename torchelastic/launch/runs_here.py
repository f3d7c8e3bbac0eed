"""The runs of this host: each launcher leaves the address of its run beside its socket, for `top` and `status`."""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torchelastic.launch.options import UsageError, access_words
from torchelastic.rendezvous.url import RendezvousUrl, RendezvousUrlError, parse_url

#: Of a launcher's folder below the folder for temporary files; only its user may open it. Short: a Unix socket's path
#: has 107 bytes.
FOLDER_PREFIX = "te-"
#: In there: where the agent listens, which says that the launcher lives; and the run's URL, without a password.
SOCKET, ADDRESS = "agent", "run"


def leave_address(folder: Path, url: RendezvousUrl) -> None:
    """Let the commands of this user find the run; called by the launcher, whose folder goes when it ends."""
    (folder / ADDRESS).write_text(str(url), encoding="utf-8")


def runs_here(folder: Path | None = None) -> list[RendezvousUrl]:
    """The runs whose launchers live on this host and belong to this user.

    Args:
        folder: where launchers make theirs; default: the folder for temporary files.
    """
    found = {}
    for address in sorted((folder or Path(tempfile.gettempdir())).glob(f"{FOLDER_PREFIX}*/{ADDRESS}")):
        try:
            if address.parent.lstat().st_uid == os.getuid() and _is_answered(address.with_name(SOCKET)):
                url = parse_url(address.read_text(encoding="utf-8"))
                found[url.root, url.endpoints] = url
        except (OSError, RendezvousUrlError):
            continue  # another user's, or its launcher has just ended
    return list(found.values())


def chosen_run(options: argparse.Namespace, runs: Sequence[RendezvousUrl]) -> RendezvousUrl:
    """The one run of this host that the options fit.

    Args:
        options: those of `run_address.add_run`, without an endpoint.
        runs: what `runs_here` has found.

    Raises:
        UsageError: there is none, or there are several, which the message lists with the words to type.
    """
    fitting = [url for url in runs if options.rdzv_id in (None, url.run_id)]
    if len(fitting) == 1:
        return fitting[0]
    how = "give --rdzv-endpoint HOST:PORT and --rdzv-id ID"
    if not fitting:
        called = "" if options.rdzv_id is None else f" called {options.rdzv_id!r}"
        raise UsageError(f"no launcher of this user runs a job{called} on this host: {how}")
    lines = "\n".join(f"  {words_for(options.command, url)}" for url in fitting)
    raise UsageError(f"{len(fitting)} runs of this user are on this host:\n{lines}")


def words_for(command: str, url: RendezvousUrl) -> str:
    """What to type for a command about a run."""
    words = ["torchelastic", command, "--rdzv-endpoint", url.endpoints_text, "--rdzv-id", url.run_id]
    return " ".join([*words, *access_words(url)])


def _is_answered(path: Path) -> bool:
    """Whether somebody listens at that socket: a launcher that was killed has left it. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        connection.connect(str(path))
    return True
