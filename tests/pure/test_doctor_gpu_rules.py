"""What the doctor says of GPUs, and of releases and settings of NCCL that make the loss of a peer worse than it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.pure.test_doctor_rules import ERROR, NOTE, OK, WARNING, levels, text_of
from torchelastic.doctor.accelerators import AcceleratorFacts, judge_accelerators
from torchelastic.doctor.findings import Finding, Level
from torchelastic.doctor.nccl_rules import NcclFacts, judge_nccl, may_share

# GPUs -----------------------------------------------------------------------------------------------------------------

FOUR = tuple(f"nvidia{number}" for number in range(4))
H100 = ("H100", "9.0")
GPUS = AcceleratorFacts(
    FOUR,
    torch="2.15.0",
    cuda_build="13.2",
    nccl=True,
    nccl_version="2.30.7",
    devices=(H100,) * 4,
    compiled_for=("sm_90",),
)
ONE_SHOWN = replace(GPUS, visible="2", devices=(H100,))


def test_gpus_that_fit_are_one_line() -> None:
    assert judge_accelerators(GPUS, 4) == [Finding("accelerators", OK, "4 x H100; torch 2.15.0 for 13.2")]


def test_without_a_gpu_a_build_for_gpus_says_which_nccl_it_has() -> None:
    (found,) = judge_accelerators(replace(GPUS, nodes=(), devices=()), 4)
    assert (found.level, found.because) == (NOTE, "on a host with GPUs: NCCL 2.30.7")
    (found,) = judge_accelerators(replace(GPUS, nodes=(), devices=(), is_nccl2=True), 4)
    assert found.because == 'on a host with GPUs: NCCL 2.30.7, where the backend "nccl" is NCCL2'
    (found,) = judge_accelerators(AcceleratorFacts(torch="2.13.0"), 4)
    assert (found.what, found.because) == ("no GPU: torch 2.13.0 trains on the CPU, over gloo", "")


@pytest.mark.parametrize(
    ("facts", "workers", "expected", "said"),
    [
        (GPUS, 8, [WARNING], "CoordinatorP2P() takes gloo"),
        (GPUS, 8, [WARNING], "--nproc-per-node 4"),
        (replace(GPUS, may_share=True), 8, [OK, NOTE], "NCCL_MULTI_RANK_GPU_ENABLE=1"),
        (ONE_SHOWN, 4, [WARNING], "CUDA_VISIBLE_DEVICES=2 shows 1 of this host's 4 GPUs; NCCL refuses"),
        (ONE_SHOWN, 4, [WARNING], "unset CUDA_VISIBLE_DEVICES, or --nproc-per-node 1"),
        (ONE_SHOWN, 1, [OK, NOTE], "CUDA_VISIBLE_DEVICES=2 shows 1 of this host's 4 GPUs"),
        (ONE_SHOWN, None, [OK, NOTE], "every worker that is started here sees no others"),
        (replace(ONE_SHOWN, visible=None), None, [OK], "1 x H100"),
        (replace(GPUS, visible="0,1,2,3"), 4, [OK], "4 x H100"),
    ],
)
def test_workers_that_use_one_gpu_without_meaning_it(
    facts: AcceleratorFacts, workers: int | None, expected: list[Level], said: str
) -> None:
    found = judge_accelerators(facts, workers)
    assert levels(found) == expected
    assert said in text_of(found)


@pytest.mark.parametrize(
    ("visible", "said"),
    [("0,1,0", "named twice"), ("", "hides all"), ("-1", "hides all"), ("0,1", "the driver refuses")],
)
def test_why_no_gpu_can_be_used(visible: str, said: str) -> None:
    found = judge_accelerators(replace(GPUS, visible=visible, devices=()), None)
    assert levels(found) == [ERROR]
    assert said in text_of(found)


@pytest.mark.parametrize(
    ("release", "value", "may"),
    [((2, 30, 3), "1", True), ((2, 29, 7), "1", False), ((2, 30, 3), "0", False), ((), "1", False)],
)
def test_ranks_share_a_gpu_where_nccl_can_and_was_told_to(release: tuple[int, ...], value: str, may: bool) -> None:
    assert may_share(release, {"NCCL_MULTI_RANK_GPU_ENABLE": value}) is may
    assert not may_share(release, {})


# NCCL -----------------------------------------------------------------------------------------------------------------

LEGACY = NcclFacts((2, 28, 9), "12.8", capabilities=("8.0", "8.0"))
NCCL2 = replace(LEGACY, release=(2, 30, 7), cuda="13.2", is_nccl2=True)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (LEGACY, 'NCCL 2.28.9; the backend "nccl" is ProcessGroupNCCL'),
        (NCCL2, 'NCCL 2.30.7; the backend "nccl" is NCCL2, torch\'s new engine'),
        (
            replace(NCCL2, is_nccl2=False, variables={"TORCH_DIST_USE_NCCL2": "0"}),
            'NCCL 2.30.7; the backend "nccl" is ProcessGroupNCCL, by TORCH_DIST_USE_NCCL2=0',
        ),
        (replace(LEGACY, release=()), 'NCCL of unknown version; the backend "nccl" is ProcessGroupNCCL'),
    ],
)
def test_release_and_engine_are_one_line_where_nothing_is_wrong(facts: NcclFacts, said: str) -> None:
    assert judge_nccl(facts) == [Finding("NCCL", OK, said)]


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ((2, 21, 5), [OK]),
        ((2, 25, 1), [WARNING]),
        ((2, 26, 2), [OK]),
        ((2, 28, 1), [OK]),
        ((2, 28, 3), [WARNING]),
        ((2, 28, 8), [WARNING]),
        ((2, 28, 9), [OK]),
        ((2, 31, 1), [OK]),
        ((2, 31, 2), [OK, NOTE]),
        ((2, 32, 3), [OK, NOTE]),
    ],
)
def test_releases_in_which_an_abort_does_not_end_well(release: tuple[int, ...], expected: list[Level]) -> None:
    assert levels(judge_nccl(replace(LEGACY, release=release))) == expected


def test_the_remedy_for_a_release_names_the_package_for_the_cuda_of_this_torch() -> None:
    (found,) = judge_nccl(replace(LEGACY, release=(2, 28, 7), cuda="13.0"))
    assert found.what.startswith("NCCL 2.28.7 crashes when a communicator is aborted")
    assert "pip install --no-deps 'nvidia-nccl-cu13>=2.28.9'" in found.remedy
    (found,) = judge_nccl(replace(LEGACY, release=(2, 25, 1), cuda=""))
    assert "'nvidia-nccl-cu12>=2.26.2'" in found.remedy


MODE, HEARTBEAT, MONITORING = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "TORCH_NCCL_ENABLE_MONITORING",
)


@pytest.mark.parametrize("engine", [LEGACY, NCCL2], ids=["legacy", "nccl2"])
@pytest.mark.parametrize(
    ("variables", "expected", "said"),
    [
        ({MODE: "1"}, NOTE, "torch would end a process"),
        ({MODE: "3"}, NOTE, f"unset {MODE}, or set it to 2"),
        ({MODE: "0"}, WARNING, "goes unnoticed"),
        ({MODE: "2"}, OK, ""),
        ({MODE: ""}, ERROR, "no number"),
        ({MODE: "clean"}, ERROR, "no number"),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, OK, ""),  # a worker sets the newer name to 2, which torch prefers
        ({"TORCH_NCCL_BLOCKING_WAIT": "True"}, WARNING, "holds the training thread"),
        ({"NCCL_BLOCKING_WAIT": "1"}, WARNING, "unset NCCL_BLOCKING_WAIT"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "0", "NCCL_BLOCKING_WAIT": "1"}, OK, ""),
    ],
)
def test_settings_by_which_torch_ends_a_process_or_sees_nothing(
    engine: NcclFacts, variables: dict[str, str], expected: Level, said: str
) -> None:
    found = judge_nccl(replace(engine, variables=variables))
    assert levels(found) == [expected]
    assert said in text_of(found)


@pytest.mark.parametrize(
    ("variables", "expected", "said"),
    [
        ({HEARTBEAT: "20"}, WARNING, "torch's default is 480"),
        ({HEARTBEAT: "20", MONITORING: "1"}, WARNING, f"{MONITORING}=0"),
        ({HEARTBEAT: "20", MONITORING: "0"}, OK, ""),
        ({HEARTBEAT: "60"}, OK, ""),
        ({HEARTBEAT: "soon"}, ERROR, "no number"),
        ({"TORCH_NCCL_TEARDOWN_ON_TIMEOUT": "1"}, WARNING, "times out"),
        ({"TORCH_NCCL_TEARDOWN_ON_TIMEOUT": "0"}, OK, ""),
    ],
)
def test_settings_that_the_older_engine_alone_reads(variables: dict[str, str], expected: Level, said: str) -> None:
    found = judge_nccl(replace(LEGACY, variables=variables))
    assert levels(found) == [expected]
    assert said in text_of(found)
    assert levels(judge_nccl(replace(NCCL2, variables=variables))) == [OK]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TORCH_FR_BUFFER_SIZE": "2000"}, WARNING),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "1"}, WARNING),
        ({"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "1"}, OK),
        ({"TORCH_FR_BUFFER_SIZE": ""}, OK),
    ],
)
def test_a_flight_recorder_that_keeps_an_abort_waiting(variables: dict[str, str], expected: Level) -> None:
    assert levels(judge_nccl(replace(NCCL2, variables=variables))) == [expected]
    assert levels(judge_nccl(replace(LEGACY, variables=variables))) == [OK]


@pytest.mark.parametrize(("value", "expected"), [("false", WARNING), ("NO", WARNING), ("1", OK), ("", OK)])
def test_a_switch_that_was_meant_to_choose_the_older_engine_and_does_not(value: str, expected: Level) -> None:
    found = judge_nccl(replace(NCCL2, variables={"TORCH_DIST_USE_NCCL2": value}))
    assert levels(found) == [expected]
    assert (expected is OK) or found[0].remedy.startswith("TORCH_DIST_USE_NCCL2=0")


CARDS = replace(NCCL2, rdma_devices=("mlx5_0", "mlx5_1"))


@pytest.mark.parametrize(
    ("facts", "hint"),
    [
        (CARDS, "NCCL_IB_RESILIENCY_PORT_FAILOVER=1"),
        (replace(CARDS, rdma_devices=("mlx5_0",)), ""),
        (replace(CARDS, release=(2, 29, 3)), ""),
        (replace(CARDS, variables={"NCCL_IB_RESILIENCY_PORT_FAILOVER": "0"}), ""),
        (replace(NCCL2, capabilities=("9.0", "9.0")), "NCCL_NVLS_ENABLE=0"),
        (replace(NCCL2, capabilities=("10.0", "10.0")), "NCCL_NVLS_ENABLE=0"),
        (replace(NCCL2, capabilities=("9.0",)), ""),
        (replace(NCCL2, capabilities=("9.0", "9.0"), variables={"NCCL_NVLS_ENABLE": "0"}), ""),
    ],
)
def test_hints_come_where_they_can_help(facts: NcclFacts, hint: str) -> None:
    found = judge_nccl(facts)
    assert levels(found) == ([OK, NOTE] if hint else [OK])
    assert hint in text_of(found)
