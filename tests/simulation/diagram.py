"""The protocol's states and what leads from one to the other, drawn from its table of rules."""

from __future__ import annotations

import sys

from torchelastic.rendezvous.protocol import RULES
from torchelastic.rendezvous.records import RoundState


def mermaid() -> str:
    """The table of rules as a Mermaid state diagram (https://mermaid.js.org), for the documentation.

    An edge to `running` makes a new round; the others are new editions of the same one.
    """
    lines = ["stateDiagram-v2", f"    [*] --> {RoundState.BROKEN.value}: no round yet"]
    for state, rules in RULES.items():
        for rule in rules:
            for target in rule.leads_to:
                lines.append(f"    {state.value} --> {target.value}: {_label(rule.when, state, target)}")
    lines.append(f"    {RoundState.CLOSED.value} --> [*]")
    return "\n".join(lines) + "\n"


def _label(when: str, state: RoundState, target: RoundState) -> str:
    if target is RoundState.RUNNING:
        return f"{when} (next round)"
    if state in (RoundState.GATHERING, RoundState.BROKEN) and when == "all that live are ready":
        return "too few are ready in time, the hung are ended"
    return when


if __name__ == "__main__":
    sys.stdout.write(mermaid())
