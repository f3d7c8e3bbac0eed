"""Which versions are installed, and whether they are those that this package asks for."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from torchelastic.doctor.findings import Finding, Level
from torchelastic.version import NEWEST_TESTED_TORCH, __version__

NAME = "versions"
#: Named even where all is well. grpcio and protobuf come with etcd3.
_SHOWN = ("torch", "etcd3", "grpcio", "protobuf")


@dataclass(frozen=True)
class VersionFacts:
    """What is installed.

    Attributes:
        python: its version; that it is new enough is checked by whoever installs this package.
        torchelastic: this package.
        required: the requirements of this package's metadata, such as "torch>=2.6"; empty: it is run from a folder in
            which it was never installed.
        installed: version by name; None: not installed.
    """

    python: str
    torchelastic: str
    required: tuple[str, ...]
    installed: Mapping[str, str | None]


def judge_versions(facts: VersionFacts) -> list[Finding]:
    """What is missing or too old; one line with the versions if nothing is. Pure."""
    found: list[Finding] = []
    for requirement in map(Requirement, facts.required):
        name, version = requirement.name, facts.installed.get(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            what = f"{name} is not installed" if version is None else f"{name} is {version}"
            because, remedy = f"torchelastic needs {requirement}", f"pip install '{requirement}'"
            found.append(Finding(NAME, Level.ERROR, what, because, remedy))
    if found:
        return found
    too_new = _judge_new_torch(facts.installed.get("torch"))
    shown = [f"{name} {facts.installed[name]}" for name in _SHOWN if facts.installed.get(name)]
    what = f"torchelastic {facts.torchelastic}, Python {facts.python}, {', '.join(shown)}"
    if not facts.required:
        because = "it is not installed as a package, so the versions that it needs are not known"
        remedy = "pip install it, at least with `pip install -e .`"
        return [Finding(NAME, Level.NOTE, what, because, remedy), *too_new]
    return [Finding(NAME, Level.OK, what), *too_new]


def _judge_new_torch(installed: str | None) -> list[Finding]:
    """A torch that came after this release may have changed what has no public name, and is used here."""
    try:
        version, tested = Version((installed or "0").partition("+")[0]), Version(NEWEST_TESTED_TORCH)
    except InvalidVersion:
        return []  # of a build of one's own
    if version <= tested:
        return []
    level = Level.WARNING if version.release[:2] > tested.release[:2] else Level.NOTE  # else it has fixes alone
    what = f"torch {installed} is newer than any that was tested with torchelastic {__version__}"
    because = f"the newest was {NEWEST_TESTED_TORCH}; a newer one may lack private names of torch that are used here"
    remedy = f"pip install 'torch<={NEWEST_TESTED_TORCH}', or first see a short run recover from `kill -9` of a worker"
    return [Finding(NAME, level, what, because, remedy)]


def gather_versions() -> VersionFacts:
    """Reads the metadata of what is installed; imports nothing of it."""
    try:
        stated = metadata.requires("torchelastic") or ()
    except metadata.PackageNotFoundError:
        stated = ()
    required = tuple(text for text in stated if "extra ==" not in text)
    names = [*(Requirement(text).name for text in required), *_SHOWN]
    return VersionFacts(platform.python_version(), __version__, required, {name: _version_of(name) for name in names})


def compared() -> dict[str, str]:
    """The versions that should be the same on all hosts of a run."""
    return {"torchelastic": __version__, "python": platform.python_version(), "torch": _version_of("torch") or "none"}


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check() -> Sequence[Finding]:
    """Check this process's packages."""
    return judge_versions(gather_versions())
