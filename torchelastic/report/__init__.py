"""One page about a run, made from its journals: what every second was spent on and what each failure cost.

Names are loaded on first use (PEP 562); importing this package imports no torch. See docs/ledger.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.report.building import NoRunError, report_of
    from torchelastic.report.comparing import Comparison, compared
    from torchelastic.report.losses import LossCurve, LossFileError, read_losses
    from torchelastic.report.model import Report
    from torchelastic.report.page import html_page
    from torchelastic.report.plain import to_plain
    from torchelastic.report.reading import Found, find_journals

__all__ = [
    "Comparison",
    "Found",
    "LossCurve",
    "LossFileError",
    "NoRunError",
    "Report",
    "compared",
    "find_journals",
    "html_page",
    "read_losses",
    "report_of",
    "to_plain",
]

_MODULES = {
    "building": ("NoRunError", "report_of"),
    "comparing": ("Comparison", "compared"),
    "losses": ("LossCurve", "LossFileError", "read_losses"),
    "model": ("Report",),
    "page": ("html_page",),
    "plain": ("to_plain",),
    "reading": ("Found", "find_journals"),
}

__getattr__, __dir__ = lazily(__name__, {name: module for module, names in _MODULES.items() for name in names})
