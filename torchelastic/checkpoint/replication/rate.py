"""How long a sender has to wait so that it stays below a rate. Pure: the clock's reading is an argument."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TokenBucket:
    """A bucket that fills at a rate and is emptied by what is sent; it may go below zero, and then one waits.

    Attributes:
        bytes_per_s: the rate.
        burst_bytes: how much may be sent at once after a pause.
        level_bytes: what is in it at `at_s`.
        at_s: when that was, on any clock that only goes forward, in seconds.
    """

    bytes_per_s: float
    burst_bytes: float
    level_bytes: float
    at_s: float

    @classmethod
    def full(cls, bytes_per_s: float, burst_bytes: float, now_s: float) -> TokenBucket:
        """A bucket after a pause.

        Raises:
            ValueError: the rate or the burst is not above 0.
        """
        if not (bytes_per_s > 0 and burst_bytes > 0):
            raise ValueError(
                f"a rate of {bytes_per_s} bytes/s with bursts of {burst_bytes} bytes lets nothing through; choose "
                f"numbers above 0, or no limit (None)"
            )
        return cls(bytes_per_s, burst_bytes, burst_bytes, now_s)

    def take(self, size_bytes: int, now_s: float) -> tuple[TokenBucket, float]:
        """Takes out what is about to be sent.

        Returns:
            The bucket after that, and for how many seconds to wait before sending.
        """
        earned = max(0.0, now_s - self.at_s) * self.bytes_per_s
        level = min(self.burst_bytes, self.level_bytes + earned) - size_bytes
        return replace(self, level_bytes=level, at_s=max(self.at_s, now_s)), max(0.0, -level / self.bytes_per_s)
