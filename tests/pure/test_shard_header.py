"""The format of a shard: places, round trips, and every changed byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.format.header import (
    PREAMBLE_BYTES,
    Header,
    Preamble,
    data_offset_bytes,
    decode_header,
    decode_preamble,
    encode_header,
    encode_preamble,
    lay_out,
    place,
)
from torchelastic.checkpoint.format.regions import Region
from torchelastic.checkpoint.format.tree import NamedTensor, flatten

DTYPES = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex128, torch.bool])
CHECKSUMS = st.text("0123456789abcdef", min_size=16, max_size=16)


@st.composite
def tensors(draw: st.DrawFn) -> list[NamedTensor]:
    found = []
    for number in range(draw(st.integers(0, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=2)))
        tensor = torch.empty(shape, dtype=draw(DTYPES))
        found.append(NamedTensor(f"t/{number}", tensor, shape, Region.whole(shape), draw(st.booleans())))
    return found


def example() -> Header:
    state = {"w": torch.zeros(3, 2), "b": torch.zeros(5, dtype=torch.bfloat16), "n": [1, 2.5, "é"], "e": torch.empty(0)}
    header = lay_out(flatten(state), {"iteration": 3})
    return header.with_checksums([f"{number:016x}" for number in range(len(header.entries))])


def encoded(header: Header) -> tuple[bytes, bytes]:
    body = encode_header(header)
    return encode_preamble(body, data_offset_bytes(len(body)), header.data_bytes), body


@given(tensors(), st.dictionaries(st.text(), st.one_of(st.integers(), st.text(), st.none())), st.data())
def test_a_header_comes_back(named: list[NamedTensor], meta: dict[str, Any], data: st.DataObject) -> None:
    checksums = data.draw(st.lists(CHECKSUMS, min_size=len(named), max_size=len(named)))
    header = Header({"dict": []}, place(named), meta).with_checksums(checksums)
    preamble, body = encoded(header)
    decoded = decode_header(body, decode_preamble(preamble))
    assert decoded == header
    assert decoded.data_bytes == header.data_bytes
    assert sum(entry.size_bytes for entry in decoded.entries) == sum(
        one.tensor.numel() * one.tensor.element_size() for one in named
    )


def test_a_newer_version_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchelastic.checkpoint.format.header.VERSION", 2)
    newer, _ = encoded(example())
    monkeypatch.undo()
    with pytest.raises(CorruptCheckpointError, match="version 2; this release reads version 1"):
        decode_preamble(newer)


def entry(**changes: Any) -> list[Any]:
    fields = {
        "name": "w",
        "dtype": "float32",
        "shape": [2, 3],
        "offsets": [0, 0],
        "sizes": [2, 3],
        "offset_bytes": 0,
        "size_bytes": 24,
        "checksum": "0" * 16,
        "is_shard": False,
    }
    name, dtype, shape, offsets, sizes, *rest = {**fields, **changes}.values()
    return [name, dtype, shape, [offsets, sizes], *rest]


NONSENSE: dict[str, Any] = {
    "a list": [],
    "a number": 7,
    "nothing": None,
    "no tensors": {"structure": None, "meta": {}},
    "no meta": {"structure": None, "tensors": []},
    "meta is a list": {"structure": None, "meta": [], "tensors": []},
    "tensors is a number": {"structure": None, "meta": {}, "tensors": 3},
    "tensors is text": {"structure": None, "meta": {}, "tensors": "abc"},
    "an entry too short": [entry()[:5]],
    "a part too long": [[*entry()[:3], [[0, 0], [2, 3], [0, 0]], *entry()[4:]]],
    "an entry too long": [[*entry(), 1]],
    "an entry is no list": [5],
    "a name that is none": [entry(name=3)],
    "a name that is a list": [entry(name=[])],
    "an unknown dtype": [entry(dtype="float33")],
    "a dtype of torch's, but no such": [entry(dtype="Tensor")],
    "a dtype that is none": [entry(dtype=4)],
    "a quantised dtype": [entry(dtype="qint8", size_bytes=6)],
    "a dtype of bits": [entry(dtype="bits8", size_bytes=6)],
    "a negative place": [entry(offset_bytes=-64)],
    "a place behind the data": [entry(offset_bytes=64)],
    "a crooked place": [entry(offset_bytes=1)],
    "a huge place": [entry(offset_bytes=2**80)],
    "a place with a fraction": [entry(offset_bytes=0.0)],
    "a place that is a bool": [entry(offset_bytes=False)],
    "a wrong length": [entry(size_bytes=23)],
    "a negative length": [entry(size_bytes=-24)],
    "a shape with a fraction": [entry(shape=[2.0, 3])],
    "a negative shape": [entry(shape=[-2, -3], sizes=[-2, -3])],
    "a huge shape": [entry(shape=[2**40, 2**40], sizes=[2**40, 2**40], size_bytes=4 * 2**80)],
    "a huge shape of nothing": [entry(shape=[0, 2**70], sizes=[0, 2**70], size_bytes=0)],
    "a shape that overflows beside a nothing": [entry(shape=[0, 2**61, 8], sizes=[0, 2**61, 8], size_bytes=0)],
    "a shape that is none": [entry(shape=None)],
    "a part outside of the whole": [entry(offsets=[1, 0])],
    "a part of another number of dimensions": [entry(offsets=[0], sizes=[6])],
    "offsets and sizes of different lengths": [entry(offsets=[0])],
    "a checksum that is none": [entry(checksum=0)],
    "a mark that is none": [entry(is_shard=1)],
    "two of one name": [entry(), entry(offset_bytes=64)],
    "two in one place": [entry(), entry(name="v")],
    "a gap between": [entry(), entry(name="v", offset_bytes=128)],
    "an end behind the data": [
        entry(),
        entry(name="v", offset_bytes=64, shape=[99], offsets=[0], sizes=[99], size_bytes=396),
    ],
}


@pytest.mark.parametrize("name", NONSENSE)
def test_a_header_that_makes_no_sense_is_corrupt(name: str) -> None:
    case = NONSENSE[name]
    is_entries = isinstance(case, list) and case
    document = {"structure": None, "meta": {}, "tensors": case} if is_entries else case
    require_corrupt(json.dumps(document).encode(), 24 if len(case or [] if is_entries else []) < 2 else 256)


def test_data_that_begins_inside_of_the_header_is_corrupt() -> None:
    body = json.dumps({"structure": None, "meta": {}, "tensors": [entry()]}).encode()
    with pytest.raises(CorruptCheckpointError, match="inside of its header"):
        decode_header(body, decode_preamble(encode_preamble(body, PREAMBLE_BYTES, 24)))


def require_corrupt(body: bytes, data_bytes: int) -> None:
    preamble = decode_preamble(encode_preamble(body, data_offset_bytes(len(body)), data_bytes))
    with pytest.raises(CorruptCheckpointError, match="its header is damaged"):
        decode_header(body, preamble)


def test_a_shard_tells_when_it_is_cut_and_when_its_checksums_are_to_come() -> None:
    header = lay_out(flatten({"x": torch.ones(3)}), {})
    assert header.lacks_checksums
    assert not header.with_checksums(["0123456789abcdef"]).lacks_checksums
    preamble = Preamble(10, b"", 4096, header.data_bytes)
    assert preamble.shard_bytes(8192) == 4096 + 12
    with pytest.raises(CorruptCheckpointError, match="4100 bytes of 4108: it was cut"):
        preamble.shard_bytes(4100)


def test_every_changed_byte_is_noticed() -> None:
    preamble, body = encoded(example())
    both = preamble + body
    for position in range(len(both)):
        for change in (0x01, 0x80, 0xFF):
            damaged = bytearray(both)
            damaged[position] ^= change
            head, rest = bytes(damaged[:PREAMBLE_BYTES]), bytes(damaged[PREAMBLE_BYTES:])
            with pytest.raises(CorruptCheckpointError):
                decode_header(rest, decode_preamble(head))
