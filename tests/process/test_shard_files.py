"""Every kind of tensor, written to a file and read back: equal bits, and what torch needs to know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from tests.older_torch import KEEPS_THE_INTERPRETER, NO_OTHER_THREADS
from torchelastic.checkpoint.format.header import lay_out
from torchelastic.checkpoint.format.pool import SlotPool
from torchelastic.checkpoint.format.tensor_parts import dtype_named
from torchelastic.checkpoint.shards import flatten, load_tree, save_tree

pytestmark = pytest.mark.filterwarnings("ignore:.*(beta state|deprecated|ComplexHalf)")  # of torch's own kinds

DTYPES = sorted({value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)}, key=str)
PLAIN = [dtype for dtype in DTYPES if not str(dtype).startswith(("torch.q", "torch.bits"))]


INT4, UINT3 = (dtype_named(name) for name in ("int4", "uint3"))


def raw(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Elements of any dtype with every bit pattern, NaNs and infinities among them (for bool only what is one)."""
    generator = torch.Generator().manual_seed(count)
    data = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (data & 1 if dtype is torch.bool else data).view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = plain.view(torch.uint8) if plain.dtype.itemsize == 1 else plain
    return bytes(plain.contiguous().view(-1).view(torch.uint8).numpy())


Store = Callable[[Path, Any], Any]


def through_a_file(folder: Path, tree: Any) -> Any:
    save_tree(folder / "shard", tree)
    return load_tree(folder / "shard")


def through_a_slot(folder: Path, tree: Any) -> Any:
    pool = SlotPool(folder)
    for name in ("first", "second"):  # the second into a place that is in use already
        flat = flatten(tree)
        header = lay_out(flat, {})
        stage = pool.take(header)
        stage.copy([named.tensor for named in flat.tensors])
        stage.seal(header)
        pool.publish(stage, folder / name)
        if name == "first":
            pool.delete(folder / name)
    pool.close()
    return load_tree(folder / "second")


def through_a_slot_at_once(folder: Path, tree: Any) -> Any:
    flat = flatten(tree)
    header = lay_out(flat, {})
    pool = SlotPool(folder)
    stage = pool.take(header)
    stage.seal(header.with_checksums(stage.copy_and_hash([named.tensor for named in flat.tensors])))
    pool.publish(stage, folder / "shard")
    pool.close()
    return load_tree(folder / "shard")


@pytest.fixture(params=[through_a_file, through_a_slot, through_a_slot_at_once])
def store(request: pytest.FixtureRequest) -> Store:
    kept: Store = request.param
    return kept


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_every_dtype_in_every_form(dtype: torch.dtype, store: Store, tmp_path: Path) -> None:
    tree = {
        "row": raw(dtype, 24),
        "matrix": raw(dtype, 24).view(4, 6),
        "scalar": raw(dtype, 1).view(()),
        "empty": raw(dtype, 0).view(0, 3),
        "transposed": raw(dtype, 24).view(4, 6).t(),
        "strided": raw(dtype, 24)[::3],
        "expanded": raw(dtype, 3).expand(4, 3),
    }
    loaded = store(tmp_path, tree)
    for name, tensor in tree.items():
        assert (loaded[name].dtype, loaded[name].shape) == (dtype, tensor.shape), name
        assert bits(loaded[name]) == bits(tensor), name
    assert loaded["transposed"].stride() == tree["transposed"].stride()
    assert loaded["expanded"].is_contiguous()


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_conjugated_and_negated_views(dtype: torch.dtype, store: Store, tmp_path: Path) -> None:
    plain = torch.view_as_complex(torch.randn(5, 2).to(dtype.to_real()))
    tree = {"conj": plain.conj(), "plain": plain, "negative": plain.conj().imag, "transposed": plain.view(1, 5).mH}
    assert tree["conj"].is_conj()
    assert tree["negative"].is_neg()
    loaded = store(tmp_path, tree)
    for name, tensor in tree.items():
        assert bits(loaded[name]) == bits(tensor), name


@pytest.mark.parametrize(
    "view", [torch._neg_view, lambda tensor: torch.view_as_complex(tensor.view(-1, 2)).conj(), torch.Tensor.t]
)
def test_a_lone_view_that_torch_has_to_work_out(
    view: Callable[[torch.Tensor], torch.Tensor], store: Store, tmp_path: Path
) -> None:
    tensor = view(torch.randn(4, 6))
    assert bits(store(tmp_path, {"x": tensor})["x"]) == bits(tensor)


def test_a_negated_view_beside_a_dtype_that_torch_cannot_copy(store: Store, tmp_path: Path) -> None:
    negative = torch.randn(4, dtype=torch.complex64).conj().imag
    loaded = store(tmp_path, {"negative": negative, "nibbles": raw(INT4, 4), "strided": raw(UINT3, 8)[::2]})
    assert torch.equal(loaded["negative"], negative)
    assert bits(loaded["nibbles"]) == bits(raw(INT4, 4))
    assert bits(loaded["strided"]) == bits(raw(UINT3, 8)[::2])


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 2, 2, 2), (1, 3, 4, 4), (2, 1, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_channels_last_keeps_its_strides(
    shape: tuple[int, ...], dtype: torch.dtype, store: Store, tmp_path: Path
) -> None:
    memory_format = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    tensor = torch.randn(shape).to(memory_format=memory_format).to(dtype)
    loaded = store(tmp_path, [tensor])[0]
    assert loaded.is_contiguous(memory_format=memory_format)
    assert bits(loaded) == bits(tensor)


def quantized(kind: torch.dtype, per_channel: bool) -> torch.Tensor:
    values = torch.randn(3, 4)
    if per_channel:
        return torch.quantize_per_channel(values, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, kind)
    return torch.quantize_per_tensor(values, 0.1, 3, kind)


@pytest.mark.parametrize("kind", [torch.qint8, torch.quint8, torch.qint32], ids=str)
@pytest.mark.parametrize("per_channel", [False, True])
def test_quantised_tensors(kind: torch.dtype, per_channel: bool, store: Store, tmp_path: Path) -> None:
    tensor = quantized(kind, per_channel)
    loaded = store(tmp_path, {"q": tensor})["q"]
    assert loaded.dtype == kind
    assert loaded.qscheme() == tensor.qscheme()
    assert torch.equal(loaded.int_repr(), tensor.int_repr())
    assert torch.equal(loaded.dequantize(), tensor.dequantize())


def test_packed_quantised_tensors_are_refused(tmp_path: Path) -> None:
    packed = torch.quantize_per_channel(torch.randn(4, 4), torch.rand(4) + 1, torch.zeros(4), 0, torch.quint4x2)
    with pytest.raises(TypeError, match=r"'q' is quantised as torch\.quint4x2"):
        save_tree(tmp_path / "shard", {"q": packed})
    assert not list(tmp_path.iterdir())


DENSE = torch.tensor([[0.0, 1, 0, 2], [0, 0, 0, 0], [3, 0, 0, 0], [0, 0, 4, 5]])


@pytest.mark.parametrize(
    "make",
    [
        lambda: DENSE.to_sparse(),
        lambda: torch.eye(4).to_sparse() + torch.eye(4).to_sparse(),
        lambda: torch.sparse_coo_tensor(
            torch.tensor([[0, 0, 1]]), torch.ones(3), (4,), check_invariants=True
        ),  # one place twice
        lambda: torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 3), (4, 3), check_invariants=True),
        lambda: torch.sparse_coo_tensor(
            torch.empty(2, 0, dtype=torch.int64), torch.empty(0), (3, 2**40), check_invariants=True
        ),
        lambda: DENSE.to_sparse_csr(),
        lambda: DENSE.to_sparse_csc(),
        lambda: DENSE.to_sparse_bsr((2, 2)),
        lambda: DENSE.to_sparse_bsc((2, 2)),
    ],
    ids=["coo", "sum", "uncoalesced", "hybrid", "empty", "csr", "csc", "bsr", "bsc"],
)
def test_sparse_tensors(make: Callable[[], torch.Tensor], store: Store, tmp_path: Path) -> None:
    tensor = make()
    loaded = store(tmp_path, {"s": tensor})["s"]
    assert (loaded.layout, loaded.shape, loaded.dtype) == (tensor.layout, tensor.shape, tensor.dtype)
    assert loaded._nnz() == tensor._nnz()
    if tensor.layout is torch.sparse_coo:
        assert loaded.is_coalesced() == tensor.is_coalesced()
        assert torch.equal(loaded._indices(), tensor._indices())
        assert torch.equal(loaded._values(), tensor._values())
    else:
        assert torch.equal(loaded.values(), tensor.values())
        assert torch.equal(loaded.to_dense(), DENSE)


def test_saving_leaves_tensors_that_can_be_resized(store: Store, tmp_path: Path) -> None:
    tensor = torch.zeros(400_000)
    store(tmp_path, {"x": tensor, "small": tensor[:3]})
    tensor.untyped_storage().resize_(0)  # as FSDP does between two steps


@pytest.fixture
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if KEEPS_THE_INTERPRETER:
        pytest.skip(NO_OTHER_THREADS)  # where the group is destroyed
    where = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_distributed_tensors(placement: Any, mesh: Any, store: Store, tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    loaded = store(tmp_path, {"d": distribute_tensor(whole, mesh, [placement])})
    assert torch.equal(loaded["d"], whole)


def test_empty_and_partial_distributed_tensors(mesh: Any, tmp_path: Path) -> None:
    empty = distribute_tensor(torch.empty(0, 4), mesh, [Shard(0)])
    assert through_a_file(tmp_path, {"d": empty})["d"].shape == (0, 4)
    partial = torch.distributed.tensor.DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(TypeError, match="'d' holds partial sums"):
        save_tree(tmp_path / "other", {"d": partial})
