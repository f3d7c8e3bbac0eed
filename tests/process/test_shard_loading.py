"""States put together from the shards of any number of ranks, and read into states that exist."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.few_examples import examples
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.loading import read_tensors
from torchelastic.checkpoint.format.regions import Extent, Region, split_replicated
from torchelastic.checkpoint.shards import ShardOf, ShardReader, flatten, read_into, read_tree, save_tree

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated")  # of torch's own kinds

FEW = settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def whole(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, tuple(shape), generator=generator).to(dtype)


def part_of(tensor: torch.Tensor, region: Region) -> ShardOf:
    return ShardOf(tensor[region.within(Region.whole(tensor.shape))], tuple(tensor.shape), region.offsets)


def split(state: dict[str, torch.Tensor], world_size: int) -> list[dict[str, Any]]:
    """What each rank saves of it."""
    extents = [Extent(name, tuple(tensor.shape), tensor.element_size()) for name, tensor in state.items()]
    shares = split_replicated(extents, world_size)
    return [{name: part_of(state[name], region) for name, region in share.items()} for share in shares]


@contextlib.contextmanager
def saved(*trees: Any) -> Iterator[list[ShardReader]]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        readers = []
        for number, tree in enumerate(trees):
            save_tree(Path(folder) / str(number), tree)
            readers.append(stack.enter_context(ShardReader(Path(folder) / str(number))))
        yield readers


@st.composite
def states(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    shapes = draw(st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=4))
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64])
    return {f"t{number}": whole(shape, draw(dtypes), number) for number, shape in enumerate(shapes)}


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


@FEW
@given(states(), st.integers(1, 8), st.integers(1, 8), st.randoms())
def test_from_any_number_of_ranks_to_any_other(
    state: dict[str, torch.Tensor], writers: int, readers: int, random: Any
) -> None:
    trees = split(state, writers)
    random.shuffle(trees)
    with saved(*trees) as shards:
        read = read_tensors(shards)
        assert all(equal(read[name], tensor) for name, tensor in state.items())
        blank = {name: torch.full_like(tensor, 99) for name, tensor in state.items()}
        for rank, template in enumerate(split(blank, readers)):
            read_into(shards, template, strict=False)
            for name, part in template.items():
                wanted = state[name][part.region.within(Region.whole(part.shape))]
                assert equal(part.tensor, wanted), (rank, name)
        assert all(equal(blank[name], tensor) for name, tensor in state.items())


@st.composite
def overlapping(draw: st.DrawFn) -> tuple[torch.Tensor, list[Region], Region]:
    """Pieces that cover a matrix, some of it more than once, and a block that is wanted of it."""
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))

    def block() -> Region:
        top, left = draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))
        return Region((top, left), (draw(st.integers(1, rows - top)), draw(st.integers(1, columns - left))))

    cut = draw(st.integers(0, columns))
    covering = [Region((0, 0), (rows, cut)), Region((0, cut), (rows, columns - cut))]
    regions = [region for region in covering if region.numel] + [block() for _ in range(draw(st.integers(0, 4)))]
    return whole((rows, columns)), draw(st.permutations(regions)), block()


@FEW
@given(overlapping())
def test_blocks_that_overlap(case: tuple[torch.Tensor, list[Region], Region]) -> None:
    tensor, regions, wanted = case
    with saved(*({"w": part_of(tensor, region)} for region in regions)) as shards:
        assert torch.equal(read_tensors(shards)["w"], tensor)
        assert torch.equal(read_tree(shards)["w"], tensor)
        target = ShardOf(torch.full(wanted.sizes, 999.0), tuple(tensor.shape), wanted.offsets)
        read_into(shards, {"w": target})
        assert torch.equal(target.tensor, tensor[wanted.within(Region.whole(tensor.shape))])


def test_a_transposed_and_a_strided_target_are_filled() -> None:
    tensor = whole((4, 6))
    with saved(*split({"w": tensor}, 3)) as shards:
        for target in (torch.zeros(6, 4).t(), torch.zeros(4, 12)[:, ::2], torch.nn.Parameter(torch.zeros(4, 6))):
            read_into(shards, {"w": target})
            assert torch.equal(target.detach(), tensor)


def test_dtypes_that_torch_cannot_copy_are_put_together() -> None:
    tensor = torch.arange(24, dtype=torch.uint8).view(getattr(torch, "uint4")).view(4, 6)  # noqa: B009 - has no stub
    columns = [Region((0, 0), (4, 2)), Region((0, 2), (4, 4))]
    with saved(*({"w": part_of(tensor, region)} for region in columns)) as shards:
        assert torch.equal(read_tree(shards)["w"].view(torch.uint8), tensor.view(torch.uint8))
        target = torch.zeros(4, 6, dtype=torch.uint8).view(tensor.dtype)
        read_into(shards, {"w": target})
        assert torch.equal(target.view(torch.uint8), tensor.view(torch.uint8))


def test_missing_pieces_are_named() -> None:
    trees = split({"model/w": whole((6, 2)), "b": whole((1,))}, 3)
    with saved(*trees[:2]) as shards:
        for read in (read_tree, read_tensors):
            with pytest.raises(CheckpointError, match=r"part\(s\) of the tensor 'model~1w'.*other ranks are missing"):
                read(shards)
        target = {"model/w": torch.full((6, 2), 9.0)}
        with pytest.raises(CheckpointError, match=r"of the tensor 'model~1w' are in none of"):
            read_into(shards, target, strict=False)
        assert torch.equal(target["model/w"], torch.full((6, 2), 9.0))
        here = ShardOf(torch.zeros(2, 2), (6, 2), (0, 0))
        read_into(shards, {"model/w": here}, strict=False)  # what this rank wants is there
        assert torch.equal(here.tensor, whole((6, 2))[:2])


def test_shards_that_contradict_each_other_are_corrupt() -> None:
    for other in (torch.zeros(3), torch.zeros(2, dtype=torch.int32)):
        with (
            saved({"w": torch.zeros(2)}, {"w": other}) as shards,
            pytest.raises(CorruptCheckpointError, match="they do not belong together"),
        ):
            read_tensors(shards)


STATE: dict[str, Any] = {
    "model": {"w": whole((3, 2)), "b": whole((2,)), "tied": None},
    "optimizer": [{"step": torch.tensor(5.0), "lr": 0.1}, whole((4,), torch.int64)],
    "epoch": 3,
}
STATE["model"]["tied"] = STATE["model"]["w"]


def blank_like(tree: Any) -> Any:
    memo: dict[int, torch.Tensor] = {}

    def blank(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return memo.setdefault(id(value), torch.full_like(value, 77))
        if isinstance(value, dict):
            return {key: blank(item) for key, item in value.items()}
        return [blank(item) for item in value] if isinstance(value, list) else 0

    return blank(tree)


def bits(tree: Any) -> list[bytes]:
    return [bytes(named.tensor.clone().view(-1).view(torch.uint8).numpy()) for named in flatten(tree).tensors]


def test_a_state_is_filled_in_place_and_its_plain_values_are_returned() -> None:
    target = blank_like(STATE)
    weight = target["model"]["w"]
    with saved(STATE) as shards:
        returned = read_into(shards, target)
    assert bits(target) == bits(STATE)
    assert returned["epoch"] == 3
    assert returned["optimizer"][0]["lr"] == 0.1
    assert returned["model"]["w"].data_ptr() == weight.data_ptr()
    assert returned["model"]["tied"] is returned["model"]["w"]


def test_everything_that_does_not_fit_is_named_at_once() -> None:
    target = {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(2, dtype=torch.int32), "d": torch.zeros(1)}
    before = bits(target)
    with saved({"a": torch.ones(2), "b": torch.ones(4), "c": torch.ones(2), "e": torch.ones(1)}) as shards:
        with pytest.raises(CheckpointError) as caught:
            read_into(shards, target)
        message = str(caught.value)
        for words in ("lacks 'd'", "lacks 'e'", "'b' is a float32 of shape (4,)", "'c' is a float32", "strict=False"):
            assert words in message
        with pytest.raises(CheckpointError, match="'b' is a float32") as caught:
            read_into(shards, target, strict=False)
        assert "'d'" not in str(caught.value)
    assert bits(target) == before


def test_a_state_of_which_elements_share_memory_is_refused_untouched() -> None:
    with saved({"first": torch.ones(3), "then": torch.ones(3)}) as shards:
        first = torch.zeros(3)
        with pytest.raises(CheckpointError, match=r"'then' is expanded"):
            read_into(shards, {"first": first, "then": torch.zeros(1).expand(3)})
        assert not first.any()


def test_quantised_and_sparse_tensors_are_returned() -> None:
    def kinds(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return {
            "q": torch.quantize_per_tensor(torch.randn(3, 3), 0.1, seed, torch.qint8),
            "s": (torch.eye(3) * seed).to_sparse(),
        }

    with saved(kinds(1)) as shards:
        returned = read_into(shards, kinds(2))
    assert torch.equal(returned["q"].dequantize(), kinds(1)["q"].dequantize())
    assert torch.equal(returned["s"].to_dense(), kinds(1)["s"].to_dense())
