"""How often something fails, measured while the run goes on, by class of failure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from torchelastic.checkpoint.policy.arguments import FrozenMapping, real_number, text, whole_number


@dataclass(frozen=True)
class FailurePrior:
    """What to expect before anything was seen: so many failures in so many seconds (a Gamma distribution's a and b).

    It weighs as much as having seen just that. The default, a quarter of a failure in an hour, expects one in four
    hours and is outvoted by the first failure, or by some hours without one.

    Args:
        failures: a, above 0.
        seconds: b, above 0.

    Raises:
        ValueError: one of them is not above 0.
    """

    failures: float = 0.25
    seconds: float = 3600.0

    def __post_init__(self) -> None:
        remedy = "give a number above 0; FailurePrior(1, 86_400) expects one failure a day"
        real_number("failures", self.failures, above=0.0, remedy=remedy)
        real_number("seconds", self.seconds, above=0.0, remedy=remedy)


@dataclass(frozen=True)
class FailureRate:
    """Failures of the run so far, by class. A value: `observed` and `failed` return a new one.

    The classes are the caller's, by what a failure takes away: "process", "host" and "job", for example. It assumes
    that the rate does not change; where it does (another cluster, twice the workers), begin with a new one.

    Args:
        prior: what to expect before anything was seen, of whatever set of classes is asked for.
        seconds: for how long failures were looked for; leave it to `observed`.
        failures: how many there were, by class; leave it to `failed`.

    Raises:
        ValueError: `seconds` or a count is negative, infinite or NaN.

    >>> rate = FailureRate().observed(6 * 3600).failed("process").failed("process").failed("host")
    >>> rate.failures_of({"process"}), rate.failures_of(None)
    (2, 3)
    >>> round(rate.mtbf_s({"host"}) / 3600, 1)  # (6 h + 1 h) / 1.25
    5.6
    """

    prior: FailurePrior = FailurePrior()
    seconds: float = 0.0
    failures: Mapping[str, int] = field(default=FrozenMapping[int]())

    def __post_init__(self) -> None:
        real_number("seconds", self.seconds, remedy="give the seconds that were observed, 0 or more")
        for name, count in self.failures.items():
            whole_number(f"failures[{name!r}]", count, at_least=0, remedy="give how many there were, 0 or more")
        object.__setattr__(self, "failures", FrozenMapping(self.failures))

    def observed(self, seconds: float) -> FailureRate:
        """The rate after so many more seconds of the job. Raises ValueError if they are negative or NaN."""
        seconds = real_number("seconds", seconds, remedy="give the seconds since the last call, 0 or more")
        return replace(self, seconds=self.seconds + seconds)

    def failed(self, failure_class: str) -> FailureRate:
        """The rate after one more failure of this class. Raises ValueError if the class has no name."""
        text("failure_class", failure_class, "name the class, for example 'process'")
        return replace(self, failures={**self.failures, failure_class: self.failures.get(failure_class, 0) + 1})

    def failures_of(self, classes: Collection[str] | None = None) -> int:
        """How many failures of these classes there were; None: of all."""
        return sum(count for name, count in self.failures.items() if classes is None or name in classes)

    def per_second(self, classes: Collection[str] | None = None, *, prior: FailurePrior | None = None) -> float:
        """Failures of these classes per second: (a + failures) / (b + seconds), the mean of what to believe now.

        Several classes are counted as one, with the prior once.

        Source: the posterior mean of a Poisson rate with the conjugate prior Gamma(a, b).

        Args:
            classes: which; None: all.
            prior: instead of the one given to the constructor.
        """
        expected = self.prior if prior is None else prior
        return (expected.failures + self.failures_of(classes)) / (expected.seconds + self.seconds)

    def mtbf_s(self, classes: Collection[str] | None = None, *, prior: FailurePrior | None = None) -> float:
        """Mean seconds between two failures of these classes: one over `per_second`."""
        rate = self.per_second(classes, prior=prior)
        return 1.0 / rate if rate > 0.0 else math.inf
