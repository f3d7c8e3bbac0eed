"""Whether this host can train: one finding for each thing that was checked, with its remedy; see docs/doctor.md.

Each subject is a file with facts (a frozen dataclass), `judge_*` (pure: facts in, findings out) and `gather_*` (asks
the host). A new check is such a file, its `Check` in `examination.py`, and its row in docs/doctor.md. Names are
loaded on first use (PEP 562); nothing here imports torch, a child is asked for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.doctor.examination import Question, examine
    from torchelastic.doctor.findings import Finding, Level, exit_code, worst

__all__ = ["Finding", "Level", "Question", "examine", "exit_code", "worst"]

_MODULE_OF_NAME = {
    "Finding": "findings",
    "Level": "findings",
    "Question": "examination",
    "examine": "examination",
    "exit_code": "findings",
    "worst": "findings",
}

__getattr__, __dir__ = lazily(__name__, _MODULE_OF_NAME)
