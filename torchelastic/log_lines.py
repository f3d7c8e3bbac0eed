"""How log lines look: for people, or as one JSON object each; and the log of a worker that `torchelastic run` started.

Every line can give the position of its process: rank, round and step. Imports nothing but the standard library.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

#: In the environment of the launcher and of its workers: the form of their log lines.
FORMAT_VARIABLE = "TORCHELASTIC_LOG_FORMAT"
HUMAN, JSON = "human", "json"
FORMATS = (HUMAN, JSON)

#: A record's attributes of its own: what its line says besides its text.
_FIELDS = "torchelastic_fields"
_LIBRARY = "torchelastic"


@dataclass(frozen=True)
class Position:
    """The position of a worker in the run; -1: not known, or none.

    Attributes:
        rank: its rank.
        round: number of its round.
        step: the number of steps that its state has seen.
    """

    rank: int = -1
    round: int = -1
    step: int = -1

    def __str__(self) -> str:
        named = (("rank", self.rank), ("round", self.round), ("step", self.step))
        return ", ".join(f"{name} {number}" for name, number in named if number >= 0)


NOWHERE = Position()


def checked_format(text: str, source: str) -> str:
    """One of `FORMATS`.

    Args:
        text: what was given; empty: nothing, which is `human`.
        source: named in the error.

    Raises:
        ValueError: it is none of them.

    >>> checked_format("", "it"), checked_format("json", "it")
    ('human', 'json')
    """
    if text and text not in FORMATS:
        raise ValueError(f"{source} is {text!r}: give {' or '.join(FORMATS)}")
    return text or HUMAN


def fields(**more: Any) -> dict[str, Any]:
    """The `extra` of a log call whose line is to say more than its text in JSON: these keys."""
    return {_FIELDS: more}


def json_line(document: Mapping[str, Any]) -> str:
    r"""One line of strict JSON, in ASCII; numbers that JSON does not know become null.

    >>> json_line({"text": "a\nb", "share": float("inf")})
    '{"text": "a\\nb", "share": null}'
    """
    return json.dumps(_finite(document), allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JsonFormatter(logging.Formatter):
    """One JSON object per record: `at_s` (Unix seconds), `level`, `kind`, `logger`, `text`, and where it was.

    Args:
        position: returns the position of this process; None: it is no worker.
        **always: more keys of every line.
    """

    def __init__(self, position: Callable[[], Position] | None = None, **always: Any) -> None:
        super().__init__()
        self._position, self._always = position, always

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        document: dict[str, Any] = {
            "at_s": round(record.created, 6),
            **self._always,
            "level": record.levelname,
            "kind": "log",
            "logger": record.name,
            "text": record.getMessage(),
        }
        if self._position is not None:
            position = self._position()
            document |= {"rank": position.rank, "round": position.round, "step": position.step}
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return json_line({**document, **getattr(record, _FIELDS, {})})


class HumanFormatter(logging.Formatter):
    """`WARNING rank 1, round 4, step 1200: text` of a worker; its agent writes before it which worker it is.

    Args:
        position: returns the position of this process.
    """

    def __init__(self, position: Callable[[], Position]) -> None:
        super().__init__("%(levelname)s %(message)s")
        self._position = position

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        where = str(self._position())
        text = super().format(record)
        return f"{record.levelname} {where}: {text[len(record.levelname) + 1 :]}" if where else text


# generic since Python 3.11
if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[Any]
else:
    _StreamHandler = logging.StreamHandler


class _ForPeople(_StreamHandler):
    """Writes nothing once the script has set up logging its own way: then it has the lines, and in its own form."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, unless somebody else does."""
        if not logging.getLogger().handlers:
            super().emit(record)


def set_up_worker_log(position: Callable[[], Position], environment: Mapping[str, str] | None = None) -> None:
    """Have this worker's own torchelastic lines give its position, in the form that its launcher wants.

    Does nothing without a launcher, and the second time. For people: as long as the script has not set up logging
    (`logging.basicConfig`), torchelastic's lines go to standard error; else the script's own handlers have them. As
    JSON: they go to standard error as JSON and to no other handler; to both with
    `logging.getLogger("torchelastic").propagate = True`. Levels are left alone. From any thread.

    Args:
        position: returns the position of this worker, at the time of each line; from any thread.
        environment: default: this process's.
    """
    form = (os.environ if environment is None else environment).get(FORMAT_VARIABLE, "")
    logger = logging.getLogger(_LIBRARY)
    if form not in FORMATS or any(getattr(handler, "is_worker_log", False) for handler in logger.handlers):
        return
    handler: logging.StreamHandler[Any]
    if form == JSON:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter(position))
        logger.propagate = False
    else:
        handler = _ForPeople(sys.stderr)
        handler.setFormatter(HumanFormatter(position))
    handler.is_worker_log = True  # type: ignore[attr-defined]  # to be known again
    logger.addHandler(handler)
