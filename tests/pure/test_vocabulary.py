"""One word per idea: CONTRIBUTING.md has the table, and these rules hold names, messages and pages to it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchelastic"


class Rule(NamedTuple):
    """A word that was replaced.

    Attributes:
        replaced: a regular expression of its forms.
        use: what to write.
        kept: the names or texts where it stays, as regular expressions, each with the reason.
    """

    replaced: str
    use: str
    kept: dict[str, str] = {}  # noqa: RUF012 - never changed


PUBLIC = "a public name (tests/pure/public_api.txt)"
OTHERS = "what etcd, a peer or the operating system does: their own word"

#: Of names, in lower case with underscores: those of modules, classes, functions and parameters.
NAMES = (
    Rule("declin(e|es|ed|ing)", "skip"),
    Rule("leav(e|es|ing)_out|left_out", "skip"),
    Rule("pass(es|ed|ing)?_over", "skip"),
    Rule(
        "refus(e|es|ed|ing|al)",
        "skip, abort, or a name for what is required",
        {
            "replica_refused_error|why_refused|refuse_strangers|is_refusal|refused": OTHERS,
        },
    ),
    Rule("call(s|ed|ing)?_off", "abort", {"call_off": "an old name of `abort_save`, until 1.1.0"}),
    Rule(
        "abandon(s|ed|ing)?", "abort", {"abandon": PUBLIC, "abandoned": "the module that publishes `groups.abandoned`"}
    ),
    Rule("g(ive|ives|iven|ave|iving)_up", "abort", {"given_up(_s)?": PUBLIC, "gave_up": "a field of stored records"}),
    Rule("put(s|ting)?_off", "defer"),
    Rule("g(ive|ives|iven|ave|iving)_back", "release"),
    Rule("discard(s|ed|ing)?", "delete or release", {"discard": PUBLIC}),
    Rule("retir(e|es|ed|ing)", "delete or close"),
    Rule(
        "drop(s|ped|ping)?",
        "delete, skip or release",
        {
            "drop_last": "torch's parameter",
            "dropped": PUBLIC,
            "(let_go_)?when_dropped": "a reference that Python drops",
        },
    ),
    Rule("revok(e|es|ed|ing)", "release or delete", {"revoke_lease": OTHERS}),
    Rule("hear(s|d|ing)?", "receive, record or handle"),
    Rule(
        "t(ell|ells|elling|old)", "report, notify or send", {"tell": f"file objects' method; Notices.tell is {PUBLIC}"}
    ),
)

#: Of messages (texts that are raised, logged, warned of or printed) and of pages.
TEXTS = (
    Rule(r"declin(e|es|ed|ing)", "skip"),
    Rule(r"(is|are|was|were|be|been) left out", "is skipped"),
    Rule(r"pass(es|ed|ing)? over", "skip"),
    Rule(r"call(s|ed|ing)? (it )?off", "abort"),
    Rule(r"abandon(s|ed|ing)?", "abort", {r"groups\.abandoned": "a metric"}),
    Rule(r"(give|gives|given|gave|giving) (it |them |this |that )?up", "abort, or stop", {"give up to": "at most"}),
    Rule(r"put(s|ting)? (it )?off", "defer"),
    Rule(r"(give|gives|given|gave|giving) (\w+ ){0,2}back", "release"),
    Rule(r"retir(e|es|ed|ing)", "delete or close"),
    Rule(r"revok(e|es|ed|ing)", "release or delete", {"expired or was revoked": OTHERS}),
    Rule(
        r"discards?|discarded",
        "delete",
        {r"[`'\"]discard[`'\"]|, discard \||salvage discard|with `discard`": "a policy"},
    ),
    Rule(r"incarnations?", "attempt"),
    Rule(r"life|lives", "attempt", {"signs? of life": "of a heartbeat", "life (span|cycle)": "other words"}),
    Rule(r"mend(s|ed|ing)?", "fix"),
    Rule(r"(is|are|was|were|be|been) (told|heard)", "is notified, or receives"),
    Rule(r"hears?|heard( of)?", "receive"),
    Rule(r"it is unknown whether there is a checkpoint", "cannot list checkpoints"),
    Rule(r"(faster|slow|durable) places?|places? for (a )?checkpoints?", "tier"),
)

#: Calls whose texts are messages: of a logger, of `warnings`, of the command line.
SPEAKERS = frozenset(
    {"critical", "debug", "error", "exception", "info", "log", "print", "say", "warn", "warning", "_say"}
)
#: Classes are nouns: these forms of verbs are of people who use them, or are nouns.
NOUNS_IN_ING = {
    "LocalCheckpointing": PUBLIC,
    "HierarchicalCheckpointing": PUBLIC,
    "MemorySaving": PUBLIC,
    "MemoryCheckpointing": PUBLIC,
    "FrozenMapping": "a mapping",
    "Finding": "a finding of the doctor",
}


@cache
def modules() -> tuple[tuple[Path, ast.Module], ...]:
    """All modules of the package."""
    return tuple((path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(PACKAGE.rglob("*.py")))


def snake(name: str) -> str:
    """The words of a name: `TieredRestore` becomes `tiered_restore`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower().strip("_")


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The classes, functions and parameters that a module defines, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def text_of(node: ast.AST) -> str | None:
    """A text as it is written; what is filled in becomes `..`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else ".." for part in node.values)
    return None


def texts_below(node: ast.AST) -> Iterator[tuple[int, str]]:
    """All texts with a blank below a node; those of a formatted one together."""
    text = text_of(node)
    if text is not None:
        if " " in text:
            yield getattr(node, "lineno", 0), text
        return
    for child in ast.iter_child_nodes(node):
        yield from texts_below(child)


def messages_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The texts that a module raises, logs, warns of, prints or shows as help."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from texts_below(node.exc)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            parts = [*node.args, *(word.value for word in node.keywords)] if called in SPEAKERS else []
            for part in [*parts, *(word.value for word in node.keywords if word.arg in ("help", "what"))]:
                yield from texts_below(part)


def broken(rules: Iterable[Rule], text: str, *, is_name: bool = False) -> list[str]:
    """What to write instead, for each replaced word of a text."""
    left, right = (r"(?:^|_)", r"(?=_|$)") if is_name else (r"\b", r"\b")
    found = []
    for rule in rules:
        rest = text
        for kept in rule.kept:
            rest = re.sub(rf"^(?:{kept})$" if is_name else kept, "", rest)
        match = re.search(f"{left}({rule.replaced}){right}", rest, re.IGNORECASE)
        if match is not None:
            found.append(f"{match[1]!r}: write {rule.use}")
    return found


def test_names_have_the_words_of_the_table() -> None:
    where: dict[str, str] = {}  # most names are there many times
    for path, tree in modules():
        for line, name in [(1, path.stem), *names_in(tree)]:
            where.setdefault(name, f"{path.relative_to(ROOT)}:{line}")
    faults = [
        f"{place}: {name}: {fault}"
        for name, place in where.items()
        for fault in broken(NAMES, snake(name), is_name=True)
    ]
    assert not faults, "\n".join(faults)


def test_classes_are_nouns() -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith("ing") and node.name not in NOUNS_IN_ING
    ]
    assert not faults, "\n".join(faults)


def test_messages_have_the_words_of_the_table() -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {text!r}: {fault}"
        for path, tree in modules()
        for line, text in messages_in(tree)
        for fault in broken(TEXTS, text)
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: str(page.relative_to(ROOT))
)
def test_pages_have_the_words_of_the_table(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    faults = [
        f"{number}: {fault}" for number, line in enumerate(lines, 1) for fault in broken(TEXTS, without_names(line))
    ]
    assert not faults, "\n".join(faults)


def without_names(line: str) -> str:
    """A line of a page without names and paths: a code span without a blank, a link's target, a file."""
    return re.sub(r"`[^`\s]*`|\([^()\s]*\)|\S*/\S*", "", line)


def test_each_replaced_word_is_in_the_table_of_the_page() -> None:
    table = (
        (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## The vocabulary")[2].partition("\n## ")[0]
    )
    for word in (*["skip", "abort", "defer", "release", "delete", "attempt", "tier"], *FIVE_FOR_TWELVE):
        assert re.search(rf"\b{word}\b", table), word


#: The verbs that said that something is not done.
FIVE_FOR_TWELVE = (
    *("decline", "refuse", "leave out", "call off", "abandon", "give up"),
    *("discard", "drop", "retire", "revoke", "put off", "pass over"),
)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("def give_up(): ...", "give_up"),
        ("class WorkerGivenUp: ...", "given_up"),
        ("def f(discarded): ...", "discarded"),
    ],
)
def test_a_replaced_word_in_a_name_is_found(source: str, fault: str) -> None:
    found = [one for _, name in names_in(ast.parse(source)) for one in broken(NAMES, snake(name), is_name=True)]
    assert len(found) == 1
    assert found[0].startswith(repr(fault))


@pytest.mark.parametrize(
    "source",
    [
        "raise ValueError(f'{x} was given back')",
        "log.warning('%s is passed over', x)",
        "say(f'{x} is put off')",
        "parser.add_argument('--x', help='what is told, and mended')",
    ],
)
def test_a_replaced_word_in_a_message_is_found(source: str) -> None:
    assert [fault for _, text in messages_in(ast.parse(source)) for fault in broken(TEXTS, text)]


def test_a_kept_word_is_none_and_another_one_beside_it_is() -> None:
    assert broken(TEXTS, "no sign of life from rank 1") == []
    assert broken(TEXTS, "no sign of life in its next life") == ["'life': write attempt"]
    assert broken(NAMES, "drop_last", is_name=True) == []
    assert broken(NAMES, "drop_last_one", is_name=True) == ["'drop': write delete, skip or release"]
