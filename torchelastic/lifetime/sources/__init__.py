"""Where deadlines come from: schedulers, clouds, signals and files; see docs/lifetime.md.

Every source is a `torchelastic.lifetime.Deadline`. `detect` finds those that apply here. Nothing imports torch.
"""

from __future__ import annotations

from torchelastic.lifetime.sources.clouds import AwsSpot, AzureScheduledEvents, GcpPreemption
from torchelastic.lifetime.sources.detection import close_all, detect
from torchelastic.lifetime.sources.files import PreStopFile, TerminationFile
from torchelastic.lifetime.sources.notice import Notice, Notices
from torchelastic.lifetime.sources.poller import Poller
from torchelastic.lifetime.sources.signals import SignalNotices
from torchelastic.lifetime.sources.slurm import SlurmDeadline

__all__ = [
    "AwsSpot",
    "AzureScheduledEvents",
    "GcpPreemption",
    "Notice",
    "Notices",
    "Poller",
    "PreStopFile",
    "SignalNotices",
    "SlurmDeadline",
    "TerminationFile",
    "close_all",
    "detect",
]
