"""The names of jobs' containers: the same for the same job, different for different ones, and plain file names."""

from __future__ import annotations

import pytest

from torchelastic.checkpoint.memory.job import container_name, known_run_id

ODD_IDS = [
    "a/b",
    "a=2Fb",
    "a=b",
    ".",
    "..",
    ".hidden",
    "end.",
    "=2E",
    "a b",
    "ü",
    "Job",
    "job",
    "=.x",
    "x" * 128,
    "=" * 43,
]


def test_no_two_run_ids_share_a_name() -> None:
    long = ["x" * 129, "x" * 130, "x" * 128 + "/", "=" * 44, "=" * 45, *(f"{'y' * 300}{n}" for n in range(5))]
    ids = ODD_IDS + long
    assert len({container_name(run_id) for run_id in ids}) == len(ids)


@pytest.mark.parametrize("run_id", [None, "", "none"])
def test_a_job_without_a_run_id_is_told_what_to_do(run_id: str | None) -> None:
    with pytest.raises(ValueError, match=r"--rdzv-id.*TORCHELASTIC_RUN_ID.*run_id"):
        container_name(run_id)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "job7", "SLURM_JOB_ID": "145"}, "job7"),
        ({"SLURM_JOB_ID": "145"}, "slurm-145"),
        ({"SLURM_JOB_ID": "145", "SLURM_ARRAY_TASK_ID": "3"}, "slurm-145_3"),
        ({"SLURM_ARRAY_TASK_ID": "3"}, None),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "145"}, "slurm-145"),
        ({"TORCHELASTIC_RUN_ID": "", "SLURM_JOB_ID": ""}, None),
    ],
)
def test_the_run_id_comes_from_the_launcher_or_from_slurm(environment: dict[str, str], expected: str | None) -> None:
    assert known_run_id(environment) == expected
