"""Everything that users' code, shells and dashboards may rely on, as one text.

python -m tests.pure.public_api > tests/pure/public_api.txt
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.pure.public_names import ROOT, described, tree_of
from torchelastic.checkpoint.command.main import command_parser as checkpoint_parser
from torchelastic.launch.command_line import command_parser
from torchelastic.metrics.exposition import MetricsRegistry
from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.status.ledger_collector import HostSnapshot, LedgerCollector

PACKAGE = ROOT / "torchelastic"

#: Where a code stands that a process of ours ends with; those of each command are in its `--help`.
EXIT_CODES = (
    ("torchelastic.p2p.watchdog", "EXIT_CODE"),
    ("torchelastic.processes.exit_codes", "STOPPED_EARLY"),
    ("torchelastic.processes.exit_codes", "COMPUTES_WRONG"),
)
#: Besides `TORCHELASTIC_...`: what else a worker finds in its environment, or is asked for in it.
_OTHER_VARIABLES = re.compile(
    r"(?:SLURM(?!_TIME)|MLP|SAGEMAKER|TORCH_ELASTIC|GLOO|NCCL)_[A-Z0-9_]+|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR"
)
_OWN_VARIABLES = re.compile(r"TORCHELASTIC_[A-Z0-9_]+")
_PUBLISHED = re.compile(r"_?publish(?:_metric)?\(\s*(?:\"torchelastic\"|_GROUP),\s*f?\"([a-z_.{}]+)\"", re.DOTALL)


def text() -> str:
    """The whole list."""
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "Names to import": described,
        "Command line": _commands,
        "Environment variables": _variables,
        "Exit codes": _exit_codes,
        "Metrics that workers publish (group torchelastic)": _published,
        "Metrics that the agent serves": _served,
    }
    sections = [f"== {title} ==\n\n" + "\n".join(lines()).rstrip() for title, lines in parts.items()]
    return "\n\n".join(sections) + "\n"


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Every command of the package by its words, `torchelastic checkpoint ls` and so on, with its parser."""
    return dict(_below("torchelastic", command_parser())) | dict(_below("torchelastic checkpoint", checkpoint_parser()))


def _below(words: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield words, parser
    for action in parser._actions:  # argparse has no public way to its commands
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _below(f"{words} {name}", inner)


def _commands() -> Iterator[str]:
    for words, parser in parsers().items():
        yield words
        listed = [one for one in parser._actions if not isinstance(one, argparse._SubParsersAction)]
        actions = [one for one in listed if one.help != argparse.SUPPRESS]  # hidden ones are there to be refused
        for action in sorted(actions, key=lambda one: (bool(one.option_strings), _spelling(one))):
            yield f"  {_option(action)}"


def _spelling(action: argparse.Action) -> str:
    """Its options, each in one of its spellings: dashes and underscores are the same."""
    spellings = [one for one in action.option_strings if one.startswith("-") and "_" not in one]
    return ", ".join(spellings) or action.dest


def _option(action: argparse.Action) -> str:
    said = [_spelling(action)]
    if action.option_strings and action.nargs != 0:
        said.append(action.metavar if isinstance(action.metavar, str) else action.dest.upper())
    if action.nargs not in (None, 0):
        said.append(f"nargs={action.nargs}")
    if action.choices is not None:
        said.append("one of " + ", ".join(map(str, action.choices)))
    if isinstance(action.type, type):
        said.append(action.type.__name__)
    if action.default not in (None, argparse.SUPPRESS, False):
        said.append(f"default {action.default}")
    if action.required and action.option_strings:
        said.append("required")
    return "  ".join(said)


def _strings() -> Iterator[tuple[Path, str]]:
    """Every text in the package's code that stands alone, docstrings not among them."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path, node.value


def _variables() -> Iterator[str]:
    texts = {one for _path, one in _strings()}
    yield from sorted(one for one in texts if _OWN_VARIABLES.fullmatch(one))
    yield ""
    yield from sorted(one for one in texts if _OTHER_VARIABLES.fullmatch(one))


def _exit_codes() -> Iterator[str]:
    for module, name in EXIT_CODES:
        for node in tree_of(module).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                yield f"{module}.{name} = {ast.unparse(node.value)}"
    for words, parser in parsers().items():
        told = re.search(r"exit codes?: (.*)", parser.epilog or "", flags=re.DOTALL)
        if told:
            yield f"{words}: {' '.join(told[1].split())}"


def _published() -> Iterator[str]:
    names = set()
    for path in PACKAGE.rglob("*.py"):
        names |= set(_PUBLISHED.findall(path.read_text(encoding="utf-8")))
    yield from sorted(names)


def _served() -> Iterator[str]:
    registry = MetricsRegistry()
    registry.add(LedgerCollector(lambda: HostSnapshot(HostLedger(), 0), run_id="run", host="host"))
    families: Mapping[str, Any] = {family.name: family for family in registry.collector_registry.collect()}
    for name, family in sorted(families.items()):
        labels = sorted({label for sample in family.samples for label in sample.labels})
        yield f"{name} ({family.type}) {' '.join(labels)}".rstrip()


if __name__ == "__main__":
    print(text(), end="")
