"""Connecting a gloo group, on a thread of its own, so that the training thread can give it up.

gloo waits in there for each peer's address and connection, up to the group's time-out, and while it waits for a peer
that has published its address and died there is no connection yet that could be cut.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import distributed_c10d as c10d


class Formation:
    """One group being made: on the training thread, given up from any."""

    def __init__(self) -> None:
        self._changed = threading.Event()
        self._is_given_up = False

    def give_up(self) -> None:
        """Have whoever makes the group raise RuntimeError now. Idempotent."""
        self._is_given_up = True
        self._changed.set()

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Have every gloo backend that is constructed inside connect on a thread that can be left behind."""
        backend: Any = c10d.ProcessGroupGloo
        original = backend.__init__

        def connect(self: object, *args: Any, **kwargs: Any) -> None:
            # torch checks the type of what it constructs, so the construction itself is replaced, and not the class
            formation._run(lambda: original(self, *args, **kwargs))

        formation = self
        backend.__init__ = connect
        try:
            yield
        finally:
            backend.__init__ = original

    def _run(self, connect: Callable[[], None]) -> None:
        errors: list[BaseException] = []
        has_ended = False

        def run() -> None:
            nonlocal has_ended
            try:
                connect()
            except BaseException as error:  # noqa: BLE001 - raised where the group is made
                errors.append(error)
            has_ended = True
            self._changed.set()

        self._raise_if_given_up()
        threading.Thread(target=run, name="torchelastic-formation", daemon=True).start()
        while not has_ended:
            self._raise_if_given_up()
            self._changed.wait()
            self._changed.clear()
        if errors:
            raise errors[0]

    def _raise_if_given_up(self) -> None:
        if self._is_given_up:
            raise RuntimeError("the group was given up while it was being formed: another worker was lost or hangs")
