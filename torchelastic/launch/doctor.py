"""`torchelastic doctor`: whether this host can train."""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from torchelastic.console import complain
from torchelastic.doctor import burn_in
from torchelastic.doctor.examination import Question, examine
from torchelastic.doctor.findings import Finding, exit_code
from torchelastic.doctor.findings_screen import show
from torchelastic.launch.run_address import access, url_with
from torchelastic.network.interface_choice import IFACE_VARIABLE
from torchelastic.rendezvous.credentials import PASSWORD_VARIABLE
from torchelastic.usage import UsageError

#: How long a person may let it wait for the other hosts.
LONGEST_WAIT_S = 3600.0
LONGEST_BURN_IN_S = 7 * 86_400.0
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(iB|B)?|B)?", re.IGNORECASE)
_EXPONENTS = {"K": 1, "M": 2, "G": 3, "T": 4}


def doctor(options: argparse.Namespace) -> int:
    """Look at everything and say what was found. Exit code 0, or 1 for an error (with --strict: for a warning)."""
    question = read_question(options, dict(os.environ))
    os.environ.pop(PASSWORD_VARIABLE, None)  # whatever is started from here on does not inherit it
    logger = logging.getLogger("torchelastic")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # what the rooms warn of is found and said by a check
    try:
        findings = [*examine(question), *_burn_in(options.burn_in)]  # it disturbs the others, and they it
        show(findings, as_json=options.json, strict=options.strict)
        sys.stdout.flush()
    finally:
        logger.setLevel(level)
    return exit_code(findings, strict=options.strict)


def read_question(options: argparse.Namespace, environment: dict[str, str]) -> Question:
    """What the words ask for. Raises UsageError."""
    if options.nnodes < 1 or (options.nproc_per_node is not None and options.nproc_per_node < 1):
        raise UsageError("--nnodes and --nproc-per-node start at 1")
    if options.burn_in is not None and not 0.0 < options.burn_in <= LONGEST_BURN_IN_S:
        raise UsageError(f"--burn-in {options.burn_in:g}: give seconds, above 0, up to {LONGEST_BURN_IN_S:g} (a week)")
    if options.nnodes > 1 and not options.rdzv_endpoint:
        raise UsageError(f"--nnodes {options.nnodes}: give --rdzv-endpoint too, where the hosts find each other")
    if not options.rdzv_endpoint and access(options):
        raise UsageError("--etcd-...: give --rdzv-endpoint too")
    if not (math.isfinite(options.wait) and 0.0 <= options.wait <= LONGEST_WAIT_S):
        raise UsageError(f"--wait {options.wait:g}: give seconds, up to {LONGEST_WAIT_S:g}")
    for port in options.port:
        if not 0 < port < 65536:
            raise UsageError(f"--port {port}: give one from 1 to 65535")
    for folder in options.checkpoint_dir:
        if "://" in folder:
            raise UsageError(f"--checkpoint-dir {folder} is a URL: give a folder; the doctor does not try URLs")
    return Question(
        url_with(options, options.rdzv_endpoint, options.rdzv_id) if options.rdzv_endpoint else None,
        options.nnodes,
        options.nproc_per_node,
        options.wait,
        tuple(map(Path, options.checkpoint_dir)),
        None if options.state_size is None else parse_size(options.state_size),
        tuple(dict.fromkeys(options.port)),
        environment.get(IFACE_VARIABLE) or None if options.iface is None else options.iface,
        environment,
    )


def _burn_in(for_s: float | None) -> Sequence[Finding]:
    """What it has found, if it was asked for; how far it is goes to standard error."""
    if for_s is None:
        return []
    is_live = sys.stderr.isatty()

    def tell(rounds: int, parties: int, since_s: float) -> None:
        if is_live:
            text = f"\rburn-in: {since_s:.0f} s of {for_s:g} s, {rounds} rounds on {parties} cores and GPUs\x1b[K"
            print(text, end="", file=sys.stderr, flush=True)  # noqa: T201 - for a person, beside the answer

    if not is_live:
        complain(f"burn-in: every core and GPU computes for {for_s:g} s")
    found = burn_in.check(for_s, tell)
    if is_live:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # noqa: T201 - as above
    return found


def parse_size(text: str) -> int:
    """Bytes from `30GiB`, `30G`, `1.5TiB` or `1000`; the units are binary. Raises UsageError.

    >>> parse_size("1.5KiB"), parse_size("10")
    (1536, 10)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--state-size {text!r}: give a size such as 30GiB")
    return int(float(match.group(1)) * 1024 ** _EXPONENTS.get((match.group(2) or "").upper(), 0))
