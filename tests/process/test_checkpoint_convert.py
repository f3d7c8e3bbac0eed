"""`torchelastic checkpoint convert`: every format to every other, and each read by those whose format it is."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.process.command_checkpoints import add_checkpoint, add_local, lines_of, run
from tests.process.conversions import (
    FORMATS,
    Capture,
    assert_same,
    convert,
    everything,
    refusal,
    store_everything,
    trained,
)
from tests.process.forked_ranks import run_ranks
from tests.process.forked_ranks import values as values_of
from torchelastic.checkpoint import BCPState, FileSystemCheckpointManager
from torchelastic.checkpoint.command.foreign import safetensors_file
from torchelastic.checkpoint.command.main import main
from torchelastic.checkpoint.shards import ShardOf, load_tree, save_tree


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return store_everything(tmp_path_factory.mktemp("stored"))


@pytest.mark.parametrize("through", FORMATS)
@pytest.mark.parametrize("first", FORMATS)
def test_there_and_back_gives_the_same_bits_and_names(
    stored: dict[str, Path], tmp_path: Path, first: str, through: str
) -> None:
    convert(stored[first], tmp_path / "through", through)
    convert(tmp_path / "through", tmp_path / "back", "shard")
    state = load_tree(tmp_path / "back")
    assert_same(state, everything())
    assert state["tied"] is state["tied too"]
    assert state["channels_last"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("to", FORMATS)
def test_views_of_one_memory_keep_their_values(tmp_path: Path, to: str) -> None:
    memory, pairs = torch.arange(12.0), torch.randn(4, dtype=torch.complex64)
    state = {
        "all": memory,
        "front": memory[:4],
        "back": memory[4:],
        "crossed": memory.view(3, 4).t(),
        "pairs": pairs,
        "conjugated": pairs.conj(),
        "imaginary": torch.randn(4, dtype=torch.complex64).conj().imag,
    }
    torch.save(state, tmp_path / "s")
    convert(tmp_path / "s", tmp_path / "t", to)
    convert(tmp_path / "t", tmp_path / "u", "shard")
    assert_same(load_tree(tmp_path / "u"), state)


def test_a_file_of_torch_holds_no_more_than_the_part_and_what_shared_memory_still_does(tmp_path: Path) -> None:
    memory, pairs = torch.arange(2.0**20), torch.randn(2**16, dtype=torch.complex64)
    head = {
        "few": memory[7:17],
        "overlapping": memory[12:32].view(4, 5).t(),
        "one": torch.nn.Parameter(memory[2**19 : 2**19 + 1]),
        "conjugated": pairs[3:5].conj(),
        "nothing": memory[5:5],
        "whole": torch.ones(3),
    }
    head["same"] = head["few"]
    torch.save({"all": memory, "head": head}, tmp_path / "s")
    convert(tmp_path / "s", tmp_path / "t", "torch", "--part", "head")
    back = torch.load(tmp_path / "t", weights_only=True)
    assert_same(back, head)
    assert (tmp_path / "t").stat().st_size < 2**14
    assert back["same"] is back["few"]
    back["few"][8] = -1.0
    assert back["overlapping"][3, 0] == -1.0, "one memory, as before"


def test_dcp_loads_into_a_model_and_adam(tmp_path: Path) -> None:
    model, optimizer = trained()
    save_tree(tmp_path / "s", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    convert(tmp_path / "s", tmp_path / "dcp", "dcp")
    fresh, adam = trained()
    with torch.no_grad():
        for tensor in fresh.parameters():
            tensor.zero_()
    for values in adam.state.values():
        values["exp_avg"].zero_()
    state = {"model": fresh.state_dict(), "optimizer": adam.state_dict()}
    dcp_load(state, storage_reader=FileSystemReader(tmp_path / "dcp"))
    fresh.load_state_dict(state["model"])
    assert_same(dict(fresh.state_dict()), dict(model.state_dict()))
    adam.load_state_dict(state["optimizer"])
    averages = [values["exp_avg"] for values in adam.state.values()]
    assert_same(averages, [values["exp_avg"] for values in optimizer.state.values()])


def test_safetensors_of_a_flat_state_has_its_names(tmp_path: Path) -> None:
    model, _ = trained()
    save_tree(tmp_path / "s", model.state_dict())
    convert(tmp_path / "s", tmp_path / "m.safetensors", "safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert_same(loaded, {name: loaded[name] for name in loaded})
    assert loaded.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name], tensor)
    (tmp_path / "plain").touch()
    assert (tmp_path / "m.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode, "others may read it too"
    other, _ = trained()
    missing, unexpected = safetensors.torch.load_model(other, tmp_path / "m.safetensors")
    assert not missing
    assert not unexpected


def test_safetensors_of_a_nested_state_joins_names_and_notes_the_tied_one(stored: dict[str, Path]) -> None:
    loaded = safetensors.torch.load_file(stored["safetensors"])
    assert "optimizer/state/0/exp_avg" in loaded
    assert "a~1b~0c.d" in loaded
    assert "tied too" not in loaded
    with safe_open(stored["safetensors"], framework="pt") as file:
        assert file.metadata()["tied too"] == "tied"


def test_a_tied_tensor_of_a_file_of_safetensors_itself_has_both_its_names(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(3, 3), "tied": torch.nn.Linear(3, 3)})
    model["tied"].weight = model["head"].weight
    safetensors.torch.save_model(model, str(tmp_path / "theirs.safetensors"), {"made by": "us"})
    convert(tmp_path / "theirs.safetensors", tmp_path / "s", "torch")
    loaded = torch.load(tmp_path / "s", weights_only=True)
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    assert loaded["tied.weight"].data_ptr() == loaded["head.weight"].data_ptr()


def test_a_checkpoint_of_dcp_itself_is_read(tmp_path: Path) -> None:
    dcp_save({"a": torch.randn(3), "n": {"x": 1}}, checkpoint_id=tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "s", "shard")
    assert load_tree(tmp_path / "s")["n"] == {"x": 1}


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_checkpoint_of_0_1_is_a_source(tmp_path: Path, as_zip: bool) -> None:
    for number in (6, 7):
        (tmp_path / "root" / str(number)).mkdir(parents=True)
        state = {"number": number, "w": torch.full((2,), float(number))}
        torch.save(state, tmp_path / "root" / str(number) / "default", _use_new_zipfile_serialization=as_zip)
    assert main(["convert", str(tmp_path / "root"), str(tmp_path / "s"), "--to", "shard"]) == 0
    assert load_tree(tmp_path / "s")["number"] == 7
    assert main(["convert", str(tmp_path / "root" / "6"), str(tmp_path / "t"), "--to", "torch"]) == 0
    assert torch.load(tmp_path / "t", weights_only=True)["number"] == 6


def test_a_stream_of_the_manager_is_a_source_after_its_digest_was_compared(tmp_path: Path, capsys: Capture) -> None:
    checkpoint = FileSystemCheckpointManager(tmp_path / "root").create_checkpoint()
    with checkpoint.open_output_stream("default") as stream:
        torch.save({"w": torch.zeros(1000)}, stream)
    checkpoint.commit()
    assert main(["convert", str(tmp_path / "root"), str(tmp_path / "s"), "--to", "shard"]) == 0
    stored = tmp_path / "root" / "0" / "default"
    data = bytearray(stored.read_bytes())
    data[len(data) // 2] ^= 1
    stored.write_bytes(data)
    assert "digest" in refusal(capsys, tmp_path / "root", tmp_path / "t", "--to", "shard")


def test_what_a_target_cannot_hold_is_named_with_the_remedy(tmp_path: Path, capsys: Capture) -> None:
    cases: list[tuple[str, Any, list[str]]] = [
        ("safetensors", {"n": {"z": torch.ones(1, dtype=torch.complex128)}}, ["complex128", "'n/z'", "--to torch"]),
        ("torch", {"n": [frozenset({1})], "a": np.ones(2)}, ["n[0] is a frozenset", "numpy", "--to shard"]),
        ("torch", {"d": [1, datetime.date(2026, 1, 2)]}, ["d[1] is no plain value (date)", "--to shard"]),
        ("dcp", [torch.ones(1)], ["list", "--to torch"]),
        ("dcp", {"s": torch.eye(2).to_sparse()}, ["sparse", "(s)", "--to torch"]),
        ("dcp", {"a": {"b.c": 1}, "a.b": {"c": 2}}, ["a.b.c", "--to torch"]),
    ]
    for number, (to, state, expected) in enumerate(cases):
        source = tmp_path / f"{number}.shard"
        save_tree(source, state)
        said = refusal(capsys, source, tmp_path / "t", "--to", to)
        assert not [part for part in expected if part not in said], said
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{number}.shard" for number in range(len(cases))]


def test_convert_of_a_folder_of_shards_puts_the_tensors_together(tmp_path: Path, capsys: Capture) -> None:
    add_checkpoint(tmp_path / "root", 7)
    assert run(capsys, "convert", tmp_path / "root", tmp_path / "t", "--to", "shard")[0] == 0
    state = load_tree(tmp_path / "t")
    assert state["w"][:, 0].tolist() == [7.0, 7.0, 8.0, 8.0]
    assert lines_of(capsys, "show", tmp_path / "t")[0]["step"] == 7


def test_convert_of_local_saves_wants_one_rank_where_each_has_its_own_state(tmp_path: Path, capsys: Capture) -> None:
    paths = add_local(tmp_path / "local", 1)
    code, _, err = run(capsys, "convert", tmp_path / "local", tmp_path / "t", "--to", "torch")
    assert code == 2
    assert str(paths[0]) in err
    assert run(capsys, "convert", paths[1], tmp_path / "t", "--to", "torch")[0] == 0
    assert torch.load(tmp_path / "t", weights_only=True)["mine"].item() == 1


def test_convert_of_local_parts_loses_no_tensor_of_another_rank_and_tells_what_is_each_ranks_own(
    tmp_path: Path, capsys: Capture
) -> None:
    halves = [{"w": ShardOf(torch.full((2,), float(rank)), (4,), (2 * rank,))} for rank in range(2)]
    add_local(
        tmp_path / "stages", 1, states=[{**halves[0], "layer0": torch.ones(1)}, {**halves[1], "layer1": torch.ones(1)}]
    )
    said = refusal(capsys, tmp_path / "stages", tmp_path / "t", "--to", "torch")
    assert "layer0, layer1" in said

    for same, others in (
        ({"rng": torch.ones(1), "n": 1}, ""),
        ({"rng": torch.zeros(1), "n": 1}, "rng"),
        ({"rng": torch.ones(1), "n": 2}, "values"),
    ):
        root, target = tmp_path / f"own-{others}", tmp_path / f"own-{others}.pt"
        add_local(root, 1, states=[{**halves[0], "rng": torch.ones(1), "n": 1}, {**halves[1], **same}])
        code, _, err = run(capsys, "convert", root, target, "--to", "torch")
        assert (code, others in err, bool(err)) == (0, True, bool(others))
        state = torch.load(target, weights_only=True)
        assert (state["w"].tolist(), state["rng"].item(), state["n"]) == ([0.0, 0.0, 1.0, 1.0], 1.0, 1)


def save_training_state(folder: Path) -> None:
    """On each rank: equal parameters, and buffers and extra state of its own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model, optimizer = trained(torch.nn.BatchNorm1d(4))
    model.get_buffer("1.running_mean").fill_(rank)
    state = BCPState(model, optimizer, get_extra_fn=lambda: {"rank": rank}, default_ckpt_path=folder)
    state.save()
    state.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_bcp_state_has_saved_goes_on_in_a_plain_model_and_optimizer(
    tmp_path: Path, capsys: Capture, ranks: int
) -> None:
    values_of(run_ranks(save_training_state, tmp_path / "saved", ranks=ranks))
    code, _, err = run(capsys, "convert", tmp_path / "saved", tmp_path / "t", "--to", "torch")
    assert code == 0
    assert "left out" in err, "extra state and random numbers"
    (shard, *_) = (tmp_path / "saved").glob("*/shard-00000-*")
    assert str(shard.parent) in refusal(capsys, shard, tmp_path / "u", "--to", "torch")
    state = torch.load(tmp_path / "t", weights_only=True)
    model, optimizer = trained(torch.nn.BatchNorm1d(4))
    expected = {**model.state_dict(), "1.running_mean": torch.zeros(4)}  # rank 0's
    fresh = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    fresh.load_state_dict(state["model"])
    assert_same(dict(fresh.state_dict()), expected)
    adam = torch.optim.Adam(fresh.parameters())
    adam.load_state_dict(state["optimizer"][0])
    assert_same(adam.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_part_of_a_state_is_converted_alone(stored: dict[str, Path], tmp_path: Path, capsys: Capture) -> None:
    convert(stored["shard"], tmp_path / "m", "safetensors", "--part", "model")
    model, _ = trained()
    assert safetensors.torch.load_file(tmp_path / "m").keys() == model.state_dict().keys()
    convert(stored["torch"], tmp_path / "n", "torch", "--part", "optimizer/state/0")
    assert sorted(torch.load(tmp_path / "n", weights_only=True)) == ["exp_avg", "exp_avg_sq", "step"]
    convert(stored["torch"], tmp_path / "o", "shard", "--part", "a~1b~0c.d")
    assert torch.equal(load_tree(tmp_path / "o"), torch.ones(1))
    said = refusal(capsys, stored["shard"], tmp_path / "p", "--to", "torch", "--part", "optimizer/stat")
    assert "'state', 'param_groups'" in said


def test_two_keys_of_the_same_text_stay_two_tensors(tmp_path: Path) -> None:
    save_tree(tmp_path / "s", {1: torch.ones(1), "1": torch.zeros(1)})
    convert(tmp_path / "s", tmp_path / "t", "safetensors")
    with safe_open(tmp_path / "t", framework="pt") as file:
        assert file.metadata().keys() == {safetensors_file.STRUCTURE_KEY, "format"}
    convert(tmp_path / "t", tmp_path / "u", "shard")
    assert {key: tensor.item() for key, tensor in load_tree(tmp_path / "u").items()} == {1: 1.0, "1": 0.0}
