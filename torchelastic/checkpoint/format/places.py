"""Pure: where a value is in a tree, as a name of a tensor has it and as a message says it."""

from __future__ import annotations

from collections.abc import Sequence

#: Python turns longer numbers into decimal digits slowly, and beyond 4300 digits not at all.
JSON_INT = 2**63

#: What is no value of a container itself, by its token.
_BESIDE = {"~key": "a key of ", "~context": "what __tensor_flatten__ gives of ", "~metadata": "the versions of "}


def token(key: object) -> str:
    """A key as a part of a name; `~` and `/` are escaped as in RFC 6901.

    What could be taken for another key is marked by a `~`, so that a name does not depend on the order of a dict:

    >>> [token(key) for key in ("a/b", 1, "1", None, "None")]
    ['a~1b', '1', "~'1'", '~None', 'None']
    """
    if type(key) is int:
        return str(key) if -JSON_INT < key < JSON_INT else f"~{key:x}"
    if type(key) is str:
        escaped = key.replace("~", "~0").replace("/", "~1")
        if not is_text(key):
            escaped = escaped.encode("utf-8", "backslashreplace").decode()
            return f"~'{escaped}'"
        is_plain = key and not key.removeprefix("-").isdecimal()
        return escaped if is_plain else f"~'{escaped}'"
    return "~" + str(key).replace("~", "~0").replace("/", "~1").encode("utf-8", "backslashreplace").decode()


def place_text(path: Sequence[str]) -> str:
    """The place of a value, as a user would write it.

    Args:
        path: the keys that lead to it, by `token`.

    >>> place_text(("extra", "last/day", "0", "~'1'", "~None")), place_text(("0",)), place_text(())
    ("extra['last/day'][0]['1'][None]", 'the state[0]', 'the state')
    """
    if path and path[-1] in _BESIDE:
        return _BESIDE[path[-1]] + place_text(path[:-1])
    first, rest = (path[0], path[1:]) if path and path[0].isidentifier() else ("the state", path)
    return first + "".join(f"[{_key_text(each)}]" for each in rest)


def is_text(value: str) -> bool:
    """Whether JSON gives back the same; it would join two halves of a character that are two in the state."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _key_text(each: str) -> str:
    if each.removeprefix("-").isdecimal():
        return each
    text = each.removeprefix("~").replace("~1", "/").replace("~0", "~")
    return text if each.startswith("~") and not each.startswith(("~0", "~1")) else repr(text)
