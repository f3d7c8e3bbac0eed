"""Which versions are installed, and whether they are those that this package asks for."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from torchelastic.doctor.findings import Finding, Level
from torchelastic.version import __version__

NAME = "versions"
#: Named even where all is well. grpcio and protobuf come with etcd3.
_SHOWN = ("torch", "etcd3", "grpcio", "protobuf")
_FIRST_PYTHON = (3, 10)
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][\w.-]*)\s*(?:\(?\s*((?:>=|==)[^;)]*)\)?)?\s*(;.*)?$")


@dataclass(frozen=True)
class VersionFacts:
    """What is installed.

    Attributes:
        python: as `sys.version_info` has it, its first three numbers.
        torchelastic: this package.
        required: the requirements of this package's metadata, such as "torch>=2.6"; empty: it is run from a folder in
            which it was never installed.
        installed: version by name; None: not installed.
    """

    python: tuple[int, int, int]
    torchelastic: str
    required: tuple[str, ...]
    installed: Mapping[str, str | None]


def judge_versions(facts: VersionFacts) -> list[Finding]:
    """What is missing or too old; one line with the versions if nothing is. Pure."""
    found: list[Finding] = []
    python = ".".join(map(str, facts.python))
    if facts.python < _FIRST_PYTHON:
        least = ".".join(map(str, _FIRST_PYTHON))
        found.append(
            Finding(NAME, Level.ERROR, f"Python is {python}", f"{least} or newer is needed", "use a newer one")
        )
    for requirement in facts.required:
        name, condition = parse_requirement(requirement)
        version = facts.installed.get(name)
        if version is None:
            what, remedy = f"{name} is not installed", f"pip install '{name}{condition}'"
            found.append(Finding(NAME, Level.ERROR, what, f"torchelastic needs {name}{condition}", remedy))
        elif not satisfies(version, condition):
            what, remedy = f"{name} is {version}", f"pip install '{name}{condition}'"
            found.append(Finding(NAME, Level.ERROR, what, f"torchelastic needs {name}{condition}", remedy))
    if found:
        return found
    shown = [f"{name} {facts.installed[name]}" for name in _SHOWN if facts.installed.get(name)]
    what = f"torchelastic {facts.torchelastic}, Python {python}, {', '.join(shown)}"
    if not facts.required:
        because = "it is not installed as a package, so the versions that it needs are not known"
        return [Finding(NAME, Level.NOTE, what, because, "pip install it, at least with `pip install -e .`")]
    return [Finding(NAME, Level.OK, what)]


def parse_requirement(text: str) -> tuple[str, str]:
    """Name and condition of a requirement without extras; the condition is "" where there is none.

    >>> parse_requirement("torch>=2.6"), parse_requirement("rich")
    (('torch', '>=2.6'), ('rich', ''))
    """
    match = _REQUIREMENT.match(text)
    return (match.group(1).lower(), (match.group(2) or "").strip()) if match else (text, "")


def satisfies(version: str, condition: str) -> bool:
    """Whether a version is one of `>=1.2`, `==1.2.3`, or several with commas; local parts and suffixes do not count.

    >>> satisfies("2.13.0+cpu", ">=2.6"), satisfies("2.5.1", ">=2.6"), satisfies("0.12.0", "==0.12.0")
    (True, False, True)
    """
    for part in filter(None, (part.strip() for part in condition.split(","))):
        operator, wanted = part[:2], _numbers(part[2:])
        have = _numbers(version)
        size = max(len(have), len(wanted))
        padded = [numbers + (0,) * (size - len(numbers)) for numbers in (have, wanted)]
        if (operator == ">=" and padded[0] < padded[1]) or (operator == "==" and padded[0] != padded[1]):
            return False
    return True


def gather_versions() -> VersionFacts:
    """Reads the metadata of what is installed; imports nothing of it."""
    try:
        stated = metadata.requires("torchelastic") or ()
    except metadata.PackageNotFoundError:
        stated = ()
    required = tuple(text for text in stated if "extra ==" not in text)
    names = [*(parse_requirement(text)[0] for text in required), *_SHOWN]
    python = (sys.version_info.major, sys.version_info.minor, sys.version_info.micro)
    return VersionFacts(python, __version__, required, {name: _version_of(name) for name in names})


def compared() -> dict[str, str]:
    """The versions that should be the same on all hosts of a run."""
    return {"torchelastic": __version__, "python": platform.python_version(), "torch": _version_of("torch") or "none"}


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\s*(\d+(?:\.\d+)*)", version)
    return tuple(int(number) for number in match.group(1).split(".")) if match else ()


def check() -> Sequence[Finding]:
    """Check this process's packages."""
    return judge_versions(gather_versions())
