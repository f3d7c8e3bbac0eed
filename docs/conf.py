"""Builds docs/ and the API reference: `make docs`.

The sources are the repository's pages where they lie, so that one spelling of a link between them, to a heading or to a
file holds both on the site and where the repository is read.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from pygments.formatters import HtmlFormatter
from pygments.lexers.special import TextLexer
from sphinx.domains.python import PyObject
from sphinx.roles import XRefRole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from docutils.parsers.rst.states import Inliner
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.pure.public_names import front_doors  # noqa: E402 - found on the path that was set above
from torchelastic.version import __version__  # noqa: E402

project = "torchelastic"
copyright = "the torchelastic authors"  # noqa: A001 - Sphinx's name for it
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "benchmarks/README.md",
    "examples/*/README.md",
    "deploy/*/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "THIRD_PARTY_NOTICES.md",
]
exclude_patterns = ["docs/_build/**"]

myst_heading_anchors = 4
myst_enable_extensions = ["strikethrough"]

autodoc_default_options = {"members": True, "show-inheritance": True, "member-order": "bysource"}
autodoc_class_signature = "mixed"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_mock_imports = [
    name for name in ("accelerate", "lightning", "megatron", "nemo", "pytorch_lightning", "transformers")
    if find_spec(name) is None
]  # fmt: skip
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
default_role = "named"
toc_object_entries_show_parents = "hide"

html_theme = "alabaster"
html_static_path = ["_static"]
html_css_files = ["torchelastic.css", "code-dark.css"]
html_theme_options = {
    "description": "Keeps a PyTorch training job alive while machines come and go",
    "fixed_sidebar": True,
    "page_width": "1180px",
    "sidebar_width": "270px",
}
html_sidebars = {"**": ["about.html", "searchfield.html", "navigation.html"]}
html_copy_source = False
html_show_sourcelink = False

linkcheck_timeout = 20
linkcheck_retries = 2
linkcheck_workers = 2

#: What is looked for in the reference: a class, or a name in full. A word such as `rank` may be many things.
_NAME = re.compile(r"[A-Z]\w*[a-z]\w*|torchelastic\.[\w.]*\w")
_SEVERAL = re.compile(r"^ +(?:\w+, )+\w+: ")


def _named(
    _role: str, raw: str, text: str, line: int, inliner: Inliner, options: Any = None, content: Sequence[str] = ()
) -> Any:
    """What is between single backticks in docstrings: code, and a link if it is a name that the reference has."""
    if _NAME.fullmatch(text):
        return XRefRole()("py:obj", raw, text, line, inliner, options or {}, content)
    return [nodes.literal(raw, text)], []


def _skip(app: Sphinx, what: str, name: str, *_rest: Any) -> bool | None:
    """A name that several modules have is described once, at the shortest way to it."""
    if what != "module":
        return None
    full = f"{app.env.temp_data.get('autodoc:module')}.{name}"
    return True if front_doors().get(full, full) != full else None


def _keep_together(_app: Sphinx, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """`low, high: text` tells of two names; Napoleon would take the first for the type of the second."""
    lines[:] = [_SEVERAL.sub(lambda found: found[0].replace(", ", ","), line) for line in lines]


def _write_colours(app: Sphinx, error: Exception | None) -> None:
    """Code in dark pages; Pygments knows the colours."""
    if error is None and app.builder.format == "html":
        rules = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
        dark = f"@media (prefers-color-scheme: dark) {{\n{rules}\n}}\n"
        (Path(app.outdir) / "_static" / "code-dark.css").write_text(dark, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """What Sphinx calls."""
    app.add_role("named", _named)
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"  # as the docstrings say; Sphinx would say Variables
    app.add_lexer("mermaid", TextLexer)  # a diagram where the repository is read, its text here
    app.connect("autodoc-skip-member", _skip)
    app.connect("autodoc-process-docstring", _keep_together, priority=100)  # before Napoleon
    app.connect("build-finished", _write_colours)
