"""The live page: what a run looks like, in a browser, served by an agent.

Names are loaded on first use (PEP 562); importing this package imports no torch. See docs/observing.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.page.document import About
    from torchelastic.page.listening import PageOptions, listening
    from torchelastic.page.logs import Logs
    from torchelastic.page.server import PageServer
    from torchelastic.page.source import RunSource

__all__ = ["About", "Logs", "PageOptions", "PageServer", "RunSource", "listening"]

_MODULES = {
    "document": ("About",),
    "listening": ("PageOptions", "listening"),
    "logs": ("Logs",),
    "server": ("PageServer",),
    "source": ("RunSource",),
}

__getattr__, __dir__ = lazily(__name__, {name: module for module, names in _MODULES.items() for name in names})
