"""HTML as a tree: every text and every attribute is escaped by the library that writes it out."""

from __future__ import annotations

from xml.etree.ElementTree import Element, tostring

from torchelastic.text import escaped

#: What may be inside of an element.
Child = Element | str | None


def node(tag: str, *children: Child, **attributes: str | float | int) -> Element:
    """An element.

    Args:
        tag: its name.
        children: texts and elements in order; None is left out.
        attributes: by name; a trailing underscore is dropped (`class_`), others become dashes.

    >>> write(node("p", "<b>", node("br"), "x", class_="a"))
    '<p class="a">&lt;b&gt;<br>x</p>'
    """
    named = {name.rstrip("_").replace("_", "-"): _text(value) for name, value in attributes.items()}
    made = Element(tag, named)
    for child in children:
        if isinstance(child, str):
            _add_text(made, escaped(child))
        elif child is not None:
            made.append(child)
    return made


def write(root: Element) -> str:
    """As HTML."""
    return tostring(root, encoding="unicode", method="html")


def number(value: float) -> str:
    """A coordinate, as short as it is useful."""
    return f"{value:.1f}".removesuffix(".0")


def _text(value: str | float) -> str:
    return escaped(value) if isinstance(value, str) else number(value)


def _add_text(made: Element, text: str) -> None:
    if len(made):
        made[-1].tail = (made[-1].tail or "") + text
    else:
        made.text = (made.text or "") + text
