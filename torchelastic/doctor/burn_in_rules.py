"""Which cores and GPUs compute wrong, by what each has computed again and again. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torchelastic.doctor.findings import Finding, Level
from torchelastic.odd_one_out import alone_in_result
from torchelastic.text import bytes_text, counted, shortlist

NAME = "burn-in"
#: What tells cores apart, in /proc/cpuinfo of x86 and of ARM.
_KIND_FIELDS = (
    "vendor_id", "cpu family", "model", "model name", "stepping", "CPU implementer", "CPU architecture", "CPU variant",
    "CPU part", "CPU revision",
)  # fmt: skip
#: Of several names so many are written out.
_MOST_NAMES = 8
#: What it takes: torch, and the numbers of each core.
BYTES, BYTES_PER_CORE = 512 * 2**20, 64 * 2**20
_NO_MEMORY = re.compile(r"out of memory|MemoryError|SIGKILL", re.IGNORECASE)
_REMEDY = (
    "take this host out of service (in SLURM: scontrol update nodename=... state=drain reason=...) and have it "
    "repaired; checkpoints that it has written may be wrong, too"
)

#: A kind of work, and which of its inputs.
Task = tuple[str, int]


@dataclass(frozen=True)
class ResultSeen:
    """How often a result was seen, and in which round first."""

    count: int
    first_round: int


@dataclass(frozen=True)
class Party:
    """A core or a GPU, and what it has computed.

    Attributes:
        name: such as "core 3" or "GPU 0".
        kind: only those of one kind are compared.
        rounds: that it has completed.
        results: by task, the digest of each result with how often it came.
        failure: how its process ended, if it did not end in order.
    """

    name: str
    kind: str
    rounds: int = 0
    results: Mapping[Task, Mapping[str, ResultSeen]] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class BurnInFacts:
    """What there was to see.

    Attributes:
        for_s: how long it was to take.
        parties: all cores and GPUs that took part.
        failure: why nobody has computed anything; empty: somebody has.
    """

    for_s: float
    parties: tuple[Party, ...] = ()
    failure: str = ""


@dataclass(frozen=True)
class Wrong:
    """A kind of work in which a party may have computed wrong.

    Attributes:
        party: its name.
        work: the kind of work.
        rounds: how often; of `of_rounds`.
        of_rounds: how often it has done that work.
        first_round: the first such round, counted from 1.
        right: how many others agree on another result.
        is_steady: whether it had the same result each time, for the same input.
    """

    party: str
    work: str
    rounds: int
    of_rounds: int
    first_round: int
    right: int
    is_steady: bool

    def __str__(self) -> str:
        """In how many rounds."""
        where = f" (the first: round {self.first_round})" if self.rounds < self.of_rounds else ""
        return f"{self.work} in {self.rounds} of {self.of_rounds} rounds{where}"


# --- who computes wrong -----------------------------------------------------------------------------------------------


def wrong_among(parties: Collection[Party]) -> list[Wrong]:
    """What parties of one kind have computed differently: from the others, or from one time to the next.

    Who always has the same result for an input decides what is right, before who has not. Where two such disagree and
    nobody else is there to say who is right, both are named, with `right` 0.

    Args:
        parties: of one kind.
    """
    by_task: dict[tuple[str, str], list[Wrong]] = {}
    for task in sorted({task for party in parties for task in party.results}):
        seen = {party.name: party.results[task] for party in parties if party.results.get(task)}
        for wrong in _wrong_in(task[0], seen):
            by_task.setdefault((wrong.party, wrong.work), []).append(wrong)
    totals = {(party.name, work): _rounds_of(party, work) for party in parties for work in _works(party)}
    return [_together(several, totals[name]) for name, several in by_task.items()]


def _wrong_in(work: str, seen: Mapping[str, Mapping[str, ResultSeen]]) -> list[Wrong]:
    """For one task: by party, how often each result was seen."""
    steady = {name: next(iter(results)) for name, results in seen.items() if len(results) == 1}
    usual = {name: max(results, key=lambda one: results[one].count) for name, results in seen.items()}
    odd = alone_in_result(steady or usual)
    right = usual[odd.agreeing[0]] if odd.agreeing else None
    found = []
    for name, results in seen.items():
        # where nobody knows what is right, it is at least the usual: who has not always had that differs from itself
        usually_right = right if right is not None else usual[name]
        others = [one for result, one in results.items() if result != usually_right]
        if not others and right is None and name in odd.suspects:
            others = list(results.values())
        if others:
            agreeing = len(odd.agreeing) if name not in odd.agreeing else 0
            rounds, first = sum(one.count for one in others), min(one.first_round for one in others)
            found.append(Wrong(name, work, rounds, 0, first + 1, agreeing, len(results) == 1))
    return found


def _works(party: Party) -> set[str]:
    return {work for work, _ in party.results}


def _rounds_of(party: Party, work: str) -> int:
    return sum(one.count for (name, _), seen in party.results.items() if name == work for one in seen.values())


def _together(several: Sequence[Wrong], of_rounds: int) -> Wrong:
    """What was found with each of its inputs."""
    return Wrong(
        several[0].party,
        several[0].work,
        sum(one.rounds for one in several),
        of_rounds,
        min(one.first_round for one in several),
        min(one.right for one in several),
        all(one.is_steady for one in several),
    )


# --- findings ---------------------------------------------------------------------------------------------------------


def judge_burn_in(facts: BurnInFacts) -> list[Finding]:
    """Name who computes wrong, who could not compute, and who had nobody to be compared with."""
    if facts.failure:
        level = Level.WARNING if _NO_MEMORY.search(facts.failure) else Level.ERROR
        return [Finding(NAME, level, "nothing was computed", facts.failure, "see the reason, and try again")]
    if not any(party.rounds for party in facts.parties if not party.failure) and not _failures(facts.parties):
        because = "starting torch takes some seconds, and a round of work another one"
        return [Finding(NAME, Level.WARNING, f"{facts.for_s:g} s were too short", because, "give it 30 s or more")]
    kinds = list(dict.fromkeys(party.kind for party in facts.parties))
    groups = [[party for party in facts.parties if party.kind == kind] for kind in kinds]
    found = [finding for group in groups for finding in _findings_of(group)]
    found += _failures(facts.parties)
    idle = [party.name for party in facts.parties if not party.rounds and not party.failure]
    if idle:
        what = f"{shortlist(idle, _MOST_NAMES)} did not complete a round in {facts.for_s:g} s"
        because = "something else keeps them busy, or they hang"
        found.append(
            Finding(NAME, Level.WARNING, what, because, "end what else runs on this host, or give it more time")
        )
    if found:
        return found
    rounds = sum(party.rounds for party in facts.parties)
    what = f"{counted(rounds, 'round')} on {of_what(facts.parties)} with the same results, bit for bit"
    return [Finding(NAME, Level.OK, what), *(_alone(group[0]) for group in groups if len(group) == 1)]


def why_too_little(cores: int, available_bytes: int) -> str:
    """Why so many cores are not tried: a container may have few bytes and all cores. Empty: there is memory enough.

    Args:
        cores: that would be tried.
        available_bytes: that can be allocated.

    >>> why_too_little(128, 2**31), why_too_little(2, 2**31)
    ('it would run out of memory: 128 cores take 8.50 GiB, and 2.00 GiB can be allocated', '')
    """
    needed_bytes = BYTES + cores * BYTES_PER_CORE
    if needed_bytes <= available_bytes:
        return ""
    needed, available = bytes_text(needed_bytes), bytes_text(available_bytes)
    return f"it would run out of memory: {cores} cores take {needed}, and {available} can be allocated"


def of_what(parties: Collection[Party]) -> str:
    """How many cores and GPUs these are.

    >>> of_what([Party("core 0", "x"), Party("core 1", "x"), Party("GPU 0", "H200")])
    '2 cores and 1 GPU'
    """
    names = [party.name for party in parties]
    cores, gpus = (sum(name.startswith(kind) for name in names) for kind in ("core", "GPU"))
    return " and ".join(counted(count, one) for count, one in ((cores, "core"), (gpus, "GPU")) if count)


def _alone(party: Party) -> Finding:
    what = f"{party.name} is the only one of its kind here ({party.kind})"
    return Finding(
        NAME, Level.NOTE, what, "it was compared with itself alone: a mistake that it always makes is not seen"
    )


def _findings_of(parties: Sequence[Party]) -> list[Finding]:
    """About those of one kind."""
    wrong = wrong_among(parties)
    unknown = [one for one in wrong if not one.right and one.is_steady]
    named = [one for one in wrong if one not in unknown]
    found = []
    for name in dict.fromkeys(one.party for one in named):
        its = [one for one in named if one.party == name]
        what = f"{name} computes wrong: {'; '.join(map(str, its))}"
        found.append(Finding(NAME, Level.ERROR, what, _why(its), _REMEDY))
    if unknown:
        names = list(dict.fromkeys(one.party for one in unknown))
        works = ", ".join(dict.fromkeys(one.work for one in unknown))
        what = f"{shortlist(names, _MOST_NAMES)} disagree: {works}"
        because = "each has the same result every time, and no others of their kind say which of them computes wrong"
        found.append(Finding(NAME, Level.ERROR, what, because, _REMEDY))
    return found


def _why(wrong: Sequence[Wrong]) -> str:
    right = max(one.right for one in wrong)
    reasons = (
        [f"{counted(right, 'other')} of its kind {'have' if right > 1 else 'has'} another result"] if right else []
    )
    if not all(one.is_steady for one in wrong):
        reasons.append("its result differs from one round to another")
    return "; ".join(reasons)


def _failures(parties: Sequence[Party]) -> list[Finding]:
    found = []
    for party in parties:
        if not party.failure:
            continue
        what = f"{party.name} did not compute to the end, in round {party.rounds + 1}"
        if _NO_MEMORY.search(party.failure):
            remedy = "end what else uses the memory of this host or GPU, and try again"
            found.append(Finding(NAME, Level.WARNING, what, party.failure, remedy))
        else:
            remedy = f"try again; if it is the same one again, {_REMEDY}"
            found.append(Finding(NAME, Level.ERROR, what, party.failure, remedy))
    return found


# --- kinds of cores ---------------------------------------------------------------------------------------------------


def kinds_of_cores(cpuinfo: str, marks: Mapping[int, str]) -> dict[int, str]:
    r"""What kind each core is of, by its number: the model, and what else tells big and little cores apart.

    Args:
        cpuinfo: text of /proc/cpuinfo.
        marks: what else the kernel says of a core, such as its capacity.

    >>> kinds_of_cores("processor: 0\nmodel name: A\n\nprocessor: 1\nmodel name: A\n", {1: "capacity 512"})
    {0: 'A', 1: 'A, capacity 512'}
    """
    found = {}
    for block in re.split(r"\n\s*\n", cpuinfo):
        fields = {
            name.strip(): value.strip() for name, _, value in (line.partition(":") for line in block.splitlines())
        }
        number = fields.get("processor", "")
        if number.isdecimal():
            model = fields.get("model name", "")
            rest = [f"{name} {fields[name]}" for name in _KIND_FIELDS if name in fields and name != "model name"]
            found[int(number)] = ", ".join(filter(None, [model, *rest, marks.get(int(number), "")]))
    return found
