"""Which backend a coordinator takes: by default, by a name of torch's, and what it says to any other one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from torchelastic.p2p.options import checked_backend, needs_gpu


def torch_with(monkeypatch: pytest.MonkeyPatch, *names: str, gpus: int = 8, **environment: str) -> pytest.MonkeyPatch:
    """A torch that has these backends, on a host with so many GPUs."""
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name in names)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: "nccl" in names)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name in ("LOCAL_WORLD_SIZE", "TORCHELASTIC_OWN_GPU"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


NEW = ("gloo", "nccl", "nccl2", "nccl-legacy", "nccl-lazy")


@pytest.mark.parametrize("name", ["nccl", "nccl2", "nccl-legacy", "cpu:gloo,cuda:nccl", "cuda:nccl2", "gloo"])
def test_the_names_of_torchs_engines_are_taken(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    torch_with(monkeypatch, *NEW)
    assert checked_backend(name) == name
    assert needs_gpu(name) == (name != "gloo")


@pytest.mark.parametrize(
    "name", ["", "mpi", "nccl-lazy", "cpu:gloo,cuda:foo", "cpu:nccl", "cpu:gloo,nccl,", "xpu:nccl", "cpu:gloo,foo"]
)
def test_any_other_name_is_refused_with_those_that_there_are(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    torch_with(monkeypatch, *NEW, "mpi")
    with pytest.raises(ValueError, match=r"give one that this torch \(.*\) has: gloo, nccl, nccl2, nccl-legacy; or"):
        checked_backend(name)


def test_an_engine_that_would_end_the_process_when_it_is_aborted_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch that had the new engine, and no name for the older one yet."""
    torch_with(monkeypatch, "gloo", "nccl", "nccl2")
    with pytest.raises(ValueError, match="has: gloo, nccl; or"):
        checked_backend("nccl2")


def test_a_host_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new engine ends the process there, in a constructor of C++."""
    torch_with(monkeypatch, *NEW, gpus=0)
    with pytest.raises(ValueError, match="torch finds no GPU here, see `torchelastic doctor`"):
        checked_backend("nccl")
    assert checked_backend("cpu:gloo,cuda:gloo") == "gloo"


@pytest.mark.parametrize(
    ("gpus", "environment", "expected"),
    [
        (8, {"LOCAL_WORLD_SIZE": "8"}, "nccl"),
        (4, {"LOCAL_WORLD_SIZE": "8"}, "gloo"),
        (0, {}, "gloo"),
        (1, {"LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_OWN_GPU": "1"}, "nccl"),
    ],
    ids=["a GPU each", "too few", "none", "each sees its own alone"],
)
def test_the_default_is_nccl_where_every_worker_has_its_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: int, environment: dict[str, str], expected: str
) -> None:
    torch_with(monkeypatch, *NEW, gpus=gpus, **environment)
    assert checked_backend(None) == expected
