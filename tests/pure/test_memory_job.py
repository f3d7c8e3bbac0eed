"""The names of jobs' containers: the same for the same job, different for different ones, and plain file names."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.memory.ids import is_part
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


@pytest.mark.parametrize("run_id", ["job-17", "team@2026.11,x+y_z", "slurm-145_3", "7"])
def test_a_plain_run_id_is_the_name(run_id: str) -> None:
    assert container_name(run_id) == run_id


def test_no_two_run_ids_share_a_name() -> None:
    long = ["x" * 129, "x" * 130, "x" * 128 + "/", "=" * 44, "=" * 45, *(f"{'y' * 300}{n}" for n in range(5))]
    ids = ODD_IDS + long
    assert len({container_name(run_id) for run_id in ids}) == len(ids)


@given(st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda text: text != "none"))
def test_every_name_can_be_a_part_of_an_id(run_id: str) -> None:
    name = container_name(run_id)
    assert re.fullmatch(r"[A-Za-z0-9._=@+,-]{1,128}", name)
    assert not name.startswith(".")
    assert not name.endswith(".")
    unescaped = re.sub(rb"=([0-9A-F]{2})", lambda match: bytes([int(match[1], 16)]), name.encode())
    assert "=." in name or unescaped == os.fsencode(run_id), "a name that is not cut can be read backwards"


@pytest.mark.parametrize("run_id", [*ODD_IDS, "x" * 127 + ".", "x" * 129 + ".", "." * 200, "a/../b", "-rf", "end..."])
def test_an_odd_run_id_makes_a_part_of_an_id(run_id: str) -> None:
    assert is_part(container_name(run_id))


def test_a_name_that_is_cut_begins_like_the_run_id() -> None:
    assert container_name("llama/" + "z" * 500).startswith("llama=2Fzzz")
    assert len(container_name("z" * 500)) == 128


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
