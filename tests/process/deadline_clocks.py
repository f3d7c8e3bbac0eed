"""Clocks that a test moves, and waiting for what a thread does."""

from __future__ import annotations

PATIENCE_S = 60.0
NOON_S = 1_795_262_400.0  # 2026-11-21T12:00:00Z


class Clocks:
    """Monotonic and wall clock."""

    def __init__(self) -> None:
        self.now_s, self.wall_s = 500.0, NOON_S

    def clock(self) -> float:
        return self.now_s

    def wall_clock(self) -> float:
        return self.wall_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        self.wall_s += seconds
