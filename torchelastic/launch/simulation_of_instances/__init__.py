"""Lives of a job on instances whose time is limited: `torchelastic simulate-esi`; see docs/simulate-esi.md.

Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.launch.simulation_of_instances.lives import Ending, How, Life, Limits, Verdict, judge, what_next
    from torchelastic.launch.simulation_of_instances.progress_file import Progress

__all__ = ["Ending", "How", "Life", "Limits", "Progress", "Verdict", "judge", "what_next"]

_HOME_OF_NAME = {
    "Ending": "lives",
    "How": "lives",
    "Life": "lives",
    "Limits": "lives",
    "Progress": "progress_file",
    "Verdict": "lives",
    "judge": "lives",
    "what_next": "lives",
}

__getattr__, __dir__ = lazily(__name__, _HOME_OF_NAME)
