"""Who is told how long the training thread has waited for a batch. The train loop sets it; by default nobody is."""

from __future__ import annotations

from collections.abc import Callable

#: Called on the training thread with nanoseconds, right after each wait.
listener: Callable[[int], None] | None = None
