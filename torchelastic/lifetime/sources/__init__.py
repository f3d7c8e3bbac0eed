"""Who says when this machine ends: schedulers, clouds, signals and files; see docs/lifetime.md.

Every source is a `torchelastic.lifetime.Deadline`. `detect` finds those that apply to this process. Names are loaded on
first use (PEP 562); nothing here imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.lifetime.sources.aws import AwsSpot
    from torchelastic.lifetime.sources.azure import AzureScheduledEvents
    from torchelastic.lifetime.sources.detection import close_all, detect
    from torchelastic.lifetime.sources.files import PreStopFile, TerminationFile
    from torchelastic.lifetime.sources.gcp import GcpPreemption
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

_MODULE_OF_NAME = {
    "AwsSpot": "aws",
    "AzureScheduledEvents": "azure",
    "GcpPreemption": "gcp",
    "Notice": "notice",
    "Notices": "notice",
    "Poller": "poller",
    "PreStopFile": "files",
    "SignalNotices": "signals",
    "SlurmDeadline": "slurm",
    "TerminationFile": "files",
    "close_all": "detection",
    "detect": "detection",
}

__getattr__, __dir__ = lazily(__name__, _MODULE_OF_NAME)
