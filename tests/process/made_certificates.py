"""Runs deploy/tls/make-certs.sh."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.process.manifests import ROOT

SCRIPT = ROOT / "deploy" / "tls" / "make-certs.sh"


def make_certs(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script with these words; more variables for it, if any."""
    words = tuple(map(str, words))
    variables = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **environment}
    return subprocess.run([SCRIPT, *words], capture_output=True, text=True, env=variables, timeout=60)
