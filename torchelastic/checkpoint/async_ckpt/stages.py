"""How long each stage of a call took: a line for the log, and a metric."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torchelastic import metrics

log = logging.getLogger(__name__)

Stage = Literal["schedule", "copy", "write", "finalize"]


def publish_stage(stage: Stage, call_idx: int, duration_s: float) -> None:
    """Publish `checkpoint.async.<stage>.duration.ms` in group torchelastic, and log it at debug level."""
    duration_ms = duration_s * 1000.0
    metrics.publish_metric("torchelastic", f"checkpoint.async.{stage}.duration.ms", duration_ms)
    log.debug("asynchronous checkpoint call %d: %s took %.1f ms", call_idx, stage, duration_ms)


@contextmanager
def timed_stage(stage: Stage, call_idx: int) -> Iterator[None]:
    """Time what is inside; nothing is published if it raises."""
    start_s = time.monotonic()
    yield
    publish_stage(stage, call_idx, time.monotonic() - start_s)
