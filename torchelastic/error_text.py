"""What an error says: in one line, and without what differs each time that it comes. Pure."""

from __future__ import annotations

import re

#: torch's text of what was raised in a data worker process: a headline, the traceback, and the cause at its end.
_OF_DATA_WORKER = re.compile(r"Caught (?P<kind>\w+) (?P<where>in [^\n]*?)\.?\nOriginal Traceback")

#: What names one thing among many of its kind, which may be another at each attempt: temporary files, parts of a store.
_PLACES = re.compile(r"""(?<![\w+.-])\w[\w+.-]*://[^\s'",)>]+|(?<![\w/])/[^\s'",:)>]+""")
#: Times, addresses of objects and of hosts, process ids, counters, hashes: whatever has a digit in it.
_WORDS = re.compile(r"[\w.:+-]+")
_DIGIT = re.compile(r"\d")


def in_one_line(error: BaseException) -> str:
    r"""An error in one line: its type, and the line of its text that says something.

    Messages of gloo have many lines, some of torch begin with an empty one, and torch puts the cause of an error in a
    data worker process at the end of its text.

    >>> in_one_line(RuntimeError("\n  two\nlines")), in_one_line(RuntimeError())
    ('RuntimeError: two', 'RuntimeError: ')
    >>> text = "Caught OSError in DataLoader worker process 1.\nOriginal Traceback ..\n    f()\nOSError: no file\n"
    >>> in_one_line(RuntimeError(text))
    'RuntimeError: Caught OSError in DataLoader worker process 1: no file'
    """
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {_of_data_worker(text, lines) or next(iter(lines), '')}"


def _of_data_worker(text: str, lines: list[str]) -> str:
    """The headline and the cause; empty: the text is no such."""
    found = _OF_DATA_WORKER.match(text)
    if found is None:
        return ""
    raised = re.compile(rf"([\w.<>]+\.)?{found['kind']}(: |$)")
    cause = next((line for line in reversed(lines) if raised.match(line)), lines[-1])
    return f"Caught {found['kind']} {found['where']}: {raised.sub('', cause, count=1)}"


def without_particulars(text: str) -> str:
    """The text of an error without what may differ each time that the same error comes.

    >>> without_particulars("<Thing at 0x7f3a> of pid 4711 at 2026-11-29 14:01:03.25")
    '<Thing at #> of pid # at # #'
    >>> without_particulars("no file '/tmp/part-ab': s3://bucket/a?b=c failed")
    "no file '/': / failed"
    """
    return _WORDS.sub(lambda word: "#" if _DIGIT.search(word[0]) else word[0], _PLACES.sub("/", text))
