"""CONTRIBUTING.md shows the protocol of the rendezvous as it is."""

from __future__ import annotations

from pathlib import Path

from tests.simulation.diagram import mermaid
from torchelastic.rendezvous.protocol import RULES
from torchelastic.rendezvous.records import RoundState

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_the_diagram_on_the_page_is_that_of_the_table_of_rules() -> None:
    assert f"```mermaid\n{mermaid()}```" in PAGE.read_text(), "python -m tests.simulation.diagram prints the new one"


def test_every_state_has_its_rules_and_only_the_last_one_has_none() -> None:
    assert set(RULES) == set(RoundState)
    assert [state for state, rules in RULES.items() if not rules] == [RoundState.CLOSED]
