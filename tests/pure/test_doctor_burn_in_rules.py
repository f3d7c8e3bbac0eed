"""Who computes wrong, by what each core has computed: named alone where others say so, together where nobody does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.doctor.burn_in_rules import (
    BurnInFacts,
    Party,
    ResultSeen,
    judge_burn_in,
    kinds_of_cores,
    of_what,
    why_too_little,
    wrong_among,
)
from torchelastic.doctor.findings import Finding, Level
from torchelastic.odd_one_out import alone_in_result

MATMUL, EXP = "matmul in float32", "exp and softmax"


def party(name: str, *results: str, work: str = MATMUL, kind: str = "A", failure: str = "") -> Party:
    """One that has had these results for one input, round by round."""
    seen: dict[str, ResultSeen] = {}
    for round_, result in enumerate(results):
        before = seen.get(result, ResultSeen(0, round_))
        seen[result] = ResultSeen(before.count + 1, before.first_round)
    return Party(name, kind, len(results), {(work, 0): seen} if seen else {}, failure)


def judged(*parties: Party) -> list[Finding]:
    return judge_burn_in(BurnInFacts(30.0, parties))


def what(*parties: Party) -> list[str]:
    return [finding.what for finding in judged(*parties)]


# Who is alone ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "suspects", "agreeing"),
    [
        ("aaa", (), (0, 1, 2)),
        ("aba", (1,), (0, 2)),
        ("abca", (1, 2), (0, 3)),
        ("abb", (0,), (1, 2)),
        ("ab", (0, 1), ()),
        ("abc", (0, 1, 2), ()),
        ("aabb", (0, 1, 2, 3), ()),
        ("aaabb", (3, 4), (0, 1, 2)),
        ("a", (), (0,)),
        ("", (), ()),
    ],
)
def test_who_has_another_result_than_most_is_suspected_and_all_where_there_is_no_most(
    results: str, suspects: tuple[int, ...], agreeing: tuple[int, ...]
) -> None:
    odd = alone_in_result(dict(enumerate(results)))
    assert (odd.suspects, odd.agreeing) == (suspects, agreeing)


@given(st.dictionaries(st.integers(), st.sampled_from("abc"), min_size=1))
def test_everybody_is_suspected_or_agrees_and_those_who_agree_are_the_most(results: Mapping[int, str]) -> None:
    odd = alone_in_result(results)
    assert {*odd.suspects, *odd.agreeing} == set(results)
    assert not set(odd.suspects) & set(odd.agreeing)
    assert len({results[who] for who in odd.agreeing}) <= 1
    if odd.agreeing:
        others = [results[who] for who in odd.suspects]
        assert all(others.count(result) < len(odd.agreeing) for result in others)


# Who computes wrong ---------------------------------------------------------------------------------------------------


def test_cores_that_agree_are_all_right() -> None:
    findings = judged(*(party(f"core {number}", "a", "a") for number in range(4)))
    assert [(one.level, one.what) for one in findings] == [
        (Level.OK, "8 rounds on 4 cores with the same results, bit for bit")
    ]


def test_a_core_that_always_has_another_result_than_the_others_is_named_alone() -> None:
    (finding,) = judged(*(party(f"core {number}", *("b" if number == 2 else "a") * 5) for number in range(4)))
    assert finding.level == Level.ERROR
    assert finding.what == "core 2 computes wrong: matmul in float32 in 5 of 5 rounds"
    assert finding.because == "3 others of its kind have another result"
    assert "take this host out of service" in finding.remedy


def test_a_core_that_is_wrong_once_is_named_with_the_round() -> None:
    (finding,) = judged(party("core 0", *"aaaa"), party("core 1", *"aaba"), party("core 2", *"aaaa"))
    assert finding.what == "core 1 computes wrong: matmul in float32 in 1 of 4 rounds (the first: round 3)"
    assert finding.because == "2 others of its kind have another result; its result differs from one round to another"


def test_of_two_cores_the_one_that_differs_from_itself_is_wrong() -> None:
    assert what(party("core 0", *"aaaa"), party("core 1", *"abbb")) == [
        "core 1 computes wrong: matmul in float32 in 3 of 4 rounds (the first: round 2)"
    ]


def test_two_cores_that_disagree_and_are_steady_are_both_named() -> None:
    (finding,) = judged(party("core 0", *"aaaa"), party("core 1", *"bbbb"))
    assert (finding.level, finding.what) == (Level.ERROR, "core 0, core 1 disagree: matmul in float32")
    assert "no others of their kind say which" in finding.because


@pytest.mark.parametrize(
    ("results", "said"),
    [("aaba", "1 of 4 rounds (the first: round 3)"), ("abab", "2 of 4 rounds")],
)
def test_the_only_one_of_its_kind_is_compared_with_itself(results: str, said: str) -> None:
    (finding,) = judged(party("GPU 0", *results))
    assert said in finding.what
    assert finding.what.startswith("GPU 0 computes wrong")
    assert finding.because == "its result differs from one round to another"


def test_that_nobody_was_there_to_be_compared_with_is_said() -> None:
    ok, note = judged(party("core 0", "a"), party("core 1", "a"), party("GPU 0", "g", kind="H200"))
    assert ok.what == "3 rounds on 2 cores and 1 GPU with the same results, bit for bit"
    assert (note.level, note.what) == (Level.NOTE, "GPU 0 is the only one of its kind here (H200)")


def test_only_cores_of_one_kind_are_compared() -> None:
    big = [party(f"core {number}", "a", "a", kind="big") for number in range(2)]
    little = [party(f"core {number}", "b", "b", kind="little") for number in (2, 3)]
    assert [finding.level for finding in judged(*big, *little)] == [Level.OK]
    assert what(*big, little[0], party("core 3", "c", "b", kind="little")) == [
        "core 3 computes wrong: matmul in float32 in 1 of 2 rounds (the first: round 1)"
    ]


def test_one_line_has_all_the_kinds_of_work_that_a_core_gets_wrong() -> None:
    wrong = Party(
        "core 1",
        "A",
        2,
        {(MATMUL, 0): {"b": ResultSeen(1, 0)}, (MATMUL, 1): {"a": ResultSeen(1, 1)}, (EXP, 0): {"x": ResultSeen(2, 0)}},
    )
    right = [
        Party(
            f"core {number}",
            "A",
            2,
            {(MATMUL, 0): {"a": ResultSeen(1, 0)}, (MATMUL, 1): {"a": ResultSeen(1, 1)}, **exp},
        )
        for number, exp in ((0, {(EXP, 0): {"e": ResultSeen(2, 0)}}), (2, {(EXP, 0): {"e": ResultSeen(2, 0)}}))
    ]
    assert what(right[0], wrong, right[1]) == [
        "core 1 computes wrong: exp and softmax in 2 of 2 rounds; matmul in float32 in 1 of 2 rounds (the first: round "
        "1)"
    ]


@given(st.integers(3, 8), st.integers(0, 7), st.lists(st.booleans(), min_size=1, max_size=6).filter(any))
def test_whatever_rounds_one_of_many_gets_wrong_it_alone_is_named_with_their_number(
    cores: int, who: int, wrong: Sequence[bool]
) -> None:
    bad = who % cores
    parties = [
        party(f"core {number}", *("b" if number == bad and is_wrong else "a" for is_wrong in wrong))
        for number in range(cores)
    ]
    (found,) = wrong_among(parties)
    assert (found.party, found.rounds, found.of_rounds) == (f"core {bad}", sum(wrong), len(wrong))
    assert found.first_round == wrong.index(True) + 1
    assert found.right == cores - 1


# What could not be tried ----------------------------------------------------------------------------------------------


def test_a_core_whose_process_crashes_is_an_error_and_one_without_memory_a_warning() -> None:
    findings = judged(party("core 0", "a"), party("core 1", "a", failure="killed by SIGILL"), party("core 2", "a"))
    assert [(one.level, one.what, one.because) for one in findings] == [
        (Level.ERROR, "core 1 did not compute to the end, in round 2", "killed by SIGILL")
    ]
    for failure in ("OutOfMemoryError: CUDA out of memory", "killed by SIGKILL"):
        (finding,) = judged(party("core 0", "a"), party("GPU 0", kind="H200", failure=failure))
        assert (finding.level, finding.because) == (Level.WARNING, failure)


def test_too_little_time_is_a_warning_and_so_is_a_core_that_never_comes_to_it() -> None:
    assert [(one.level, one.what) for one in judged(party("core 0"), party("core 1"))] == [
        (Level.WARNING, "30 s were too short")
    ]
    assert [(one.level, one.what) for one in judged(party("core 0", "a"), party("core 1"))] == [
        (Level.WARNING, "core 1 did not complete a round in 30 s")
    ]


def test_that_nothing_could_be_started_is_an_error() -> None:
    (finding,) = judge_burn_in(BurnInFacts(30.0, failure="ModuleNotFoundError: No module named 'torch'"))
    assert finding.level == Level.ERROR
    assert "torch" in finding.because


def test_a_host_without_the_memory_for_it_is_left_alone_with_a_warning() -> None:
    why = why_too_little(64, 2 * 2**30)
    assert why == "it would run out of memory: 64 cores take 4.50 GiB, and 2.00 GiB can be allocated"
    assert why_too_little(64, 5 * 2**30) == ""
    (finding,) = judge_burn_in(BurnInFacts(30.0, failure=why))
    assert (finding.level, finding.what, finding.because) == (Level.WARNING, "nothing was computed", why)


# Kinds of cores -------------------------------------------------------------------------------------------------------

ARM = """processor\t: 0
BogoMIPS\t: 48.00
CPU implementer\t: 0x61
CPU part\t: 0x022

processor\t: 1
BogoMIPS\t: 48.00
CPU implementer\t: 0x61
CPU part\t: 0x023
"""
INTEL = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Core i9
cpu MHz\t\t: 800.0

processor\t: 1
vendor_id\t: GenuineIntel
model name\t: Core i9
cpu MHz\t\t: 3100.7
"""


def test_big_and_little_cores_are_of_two_kinds_and_their_clock_rate_makes_none() -> None:
    arm = kinds_of_cores(ARM, {})
    assert arm[0] != arm[1]
    alike = kinds_of_cores(INTEL, {})
    assert alike == {0: "Core i9, vendor_id GenuineIntel", 1: "Core i9, vendor_id GenuineIntel"}
    hybrid = kinds_of_cores(INTEL, {0: "cpu_core", 1: "cpu_atom"})
    assert hybrid[0] != hybrid[1]
    assert kinds_of_cores("", {}) == {}


def test_what_took_part_is_counted() -> None:
    assert of_what([party("core 0")]) == "1 core"
    assert of_what([party("GPU 0"), party("GPU 1")]) == "2 GPUs"
