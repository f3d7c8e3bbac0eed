"""How long a process has after SIGTERM before it is killed."""

from __future__ import annotations

from collections.abc import Mapping

from torchelastic.checkpoint.policy.arguments import real_number

#: Seconds from SIGTERM, or from the preStop hook, to SIGKILL.
GRACE_VARIABLE = "TORCHELASTIC_TERM_GRACE_S"
#: A launcher ends workers so long after the signal that it passes on: torchrun (torch 2.13) and `torchelastic run`.
LAUNCHER_GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
#: From SIGTERM to SIGKILL: torchrun's, SLURM's (KillWait) and Kubernetes' default. Others give less (`docker stop` 10
#: s, pods on spot nodes of GKE 15 s), so where nobody has said it this is a guess: see `Notice.unsure_since_s`.
TERM_GRACE_S = 30.0
#: The shortest usual grace after a notice that does not say how much time is left: that of `docker stop`.
SHORTEST_GRACE_S = 10.0


def term_grace_s(environment: Mapping[str, str]) -> float:
    """Seconds from SIGTERM to SIGKILL: of the user, of the launcher, else 30. Raises ValueError: it is no number.

    >>> term_grace_s({}), term_grace_s({LAUNCHER_GRACE_VARIABLE: "60"}), term_grace_s({GRACE_VARIABLE: "90"})
    (30.0, 60.0, 90.0)
    """
    text = environment.get(GRACE_VARIABLE, "").strip()
    remedy = "give seconds, for example a pod's terminationGracePeriodSeconds"
    if text:
        try:
            number = float(text)
        except ValueError:
            raise ValueError(f"{GRACE_VARIABLE} is {text!r}, which is no number: {remedy}") from None
        return real_number(GRACE_VARIABLE, number, remedy=remedy)
    launchers = environment.get(LAUNCHER_GRACE_VARIABLE, "").strip()
    return float(launchers) if launchers.isdecimal() else TERM_GRACE_S


def is_grace_known(environment: Mapping[str, str]) -> bool:
    """Whether the user has set the grace; the launcher's may be longer than that of `docker stop` or Kubernetes.

    >>> is_grace_known({LAUNCHER_GRACE_VARIABLE: "60"}), is_grace_known({GRACE_VARIABLE: "90"})
    (False, True)
    """
    return bool(environment.get(GRACE_VARIABLE, "").strip())
