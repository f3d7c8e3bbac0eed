"""A server on this host that speaks S3, for tests of `s3://`: moto's. Nothing that it keeps outlives pytest."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest

from tests.waiting import wait_until
from torchelastic.processes import dies_with_parent

#: They take as long to install as all the rest of what the tests need.
NEEDS_S3 = pytest.mark.skipif(
    not (importlib.util.find_spec("s3fs") and importlib.util.find_spec("moto")),
    reason="no S3: `pip install s3fs 'moto[s3,server]'`, then `pytest tests/process/test_tier_storage.py -k s3`",
)


@functools.cache
def bucket() -> tuple[str, Mapping[str, Any]]:
    """The URL of an empty bucket, and the options of `DurableTier` with which it is reached."""
    with tempfile.NamedTemporaryFile(prefix="s3-server-") as file:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        subprocess.Popen(dies_with_parent(command), stdout=file, stderr=file)
        log = Path(file.name)
        found = wait_until(lambda: re.search(r"http://[\d.]+:\d+", log.read_text()), what="the server has begun")
    options = {"key": "somebody", "secret": "of the tests", "client_kwargs": {"endpoint_url": found[0]}}
    fsspec.filesystem("s3", **options).mkdir("bucket")
    return "s3://bucket", options
