"""Where deadlines come from: schedulers, clouds, signals and files; see docs/lifetime.md.

Every source is a `torchelastic.lifetime.Deadline`. `detect` finds those that apply here. Nothing imports torch,
and names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.lifetime.sources.clouds import AwsSpot as AwsSpot
    from torchelastic.lifetime.sources.clouds import AzureScheduledEvents as AzureScheduledEvents
    from torchelastic.lifetime.sources.clouds import GcpPreemption as GcpPreemption
    from torchelastic.lifetime.sources.detection import close_all as close_all
    from torchelastic.lifetime.sources.detection import detect as detect
    from torchelastic.lifetime.sources.files import PreStopFile as PreStopFile
    from torchelastic.lifetime.sources.files import TerminationFile as TerminationFile
    from torchelastic.lifetime.sources.notice import Notice as Notice
    from torchelastic.lifetime.sources.notice import Notices as Notices
    from torchelastic.lifetime.sources.poller import Poller as Poller
    from torchelastic.lifetime.sources.signals import SignalNotices as SignalNotices
    from torchelastic.lifetime.sources.slurm import SlurmDeadline as SlurmDeadline

__getattr__, __dir__ = lazily(__name__)
