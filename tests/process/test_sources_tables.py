"""Sources of parquet and tar files: each sample once, going on from any place, and what is said of bad files."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pyarrow
import pytest
from hypothesis import given, settings
from pyarrow import parquet as parquet_library

from tests.few_examples import examples
from tests.pure.source_contract import all_samples, through_json
from torchelastic.data import Source, SourceError, parquet, tar_samples
from torchelastic.data.sources.api import opened
from torchelastic.data.sources.files import say_shards_are_empty

_SHARDS = st.integers(1, 6)


def write_table(path: Path, rows: Sequence[int], rows_in_group: int) -> None:
    table = pyarrow.table({"x": pyarrow.array(rows, pyarrow.int64()), "text": [f"row {row}" for row in rows]})
    parquet_library.write_table(table, path, row_group_size=rows_in_group)


def position_in(source: Source[Any], drawn: int) -> Any:
    samples = opened(source, 0, 1, 0)
    for _ in range(drawn):
        next(samples)
    return through_json(samples.state_dict())


# --- parquet ----------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(12))
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 4), _SHARDS)
def test_each_row_is_in_one_shard_and_reading_goes_on_from_any_place(
    counts: list[int], rows_in_group: int, num_shards: int
) -> None:
    numbers = iter(range(1000))
    with tempfile.TemporaryDirectory() as folder:
        for number, count in enumerate(counts):
            write_table(Path(folder) / f"{number}.parquet", [next(numbers) for _ in range(count)], rows_in_group)
        rows = all_samples(parquet(f"{folder}/*.parquet"), num_shards)
    assert sorted(row["x"] for row in rows) == list(range(sum(counts)))
    assert all(row == {"x": row["x"], "text": f"row {row['x']}"} for row in rows)


@pytest.mark.parametrize(("num_shards", "groups"), [(4, [1, 1, 1, 1]), (6, [1, 1, 1, 1, 0, 0])])
def test_row_groups_of_few_files_are_dealt_evenly_and_empty_shards_are_told(
    tmp_path: Path, num_shards: int, groups: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    say_shards_are_empty.cache_clear()
    for name in "ab":
        write_table(tmp_path / f"{name}.parquet", range(10), 5)
    source = parquet(f"{tmp_path}/*.parquet")
    assert [len(list(source(shard, num_shards, 0))) for shard in range(num_shards)] == [5 * count for count in groups]
    told = [record.getMessage() for record in caplog.records]
    assert told == (["there are 4 row groups for 6 logical shards, so 2 shards are empty: make more of them, or fewer "
                     "logical shards"] if num_shards == 6 else [])  # fmt: skip


def test_a_parquet_file_that_is_none_or_not_what_it_was_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_table(path, range(20), 5)
    source = parquet(path)
    position = position_in(source, 7)
    good = path.read_bytes()
    path.write_bytes(good + b"more")
    with pytest.raises(SourceError, match=r"a\.parquet, at \[1, 2\]: .* grown to"):
        list(source(0, 1, position))
    path.write_bytes(good[:-9])
    with pytest.raises(SourceError, match=r"a\.parquet is no parquet file, or is cut off"):
        list(source(0, 1, 0))
    path.write_bytes(good[:4] + b"\xff" * 60 + good[64:])
    with pytest.raises(SourceError, match=r"a\.parquet, row group 0 cannot be read"):
        list(source(0, 1, 0))
    path.write_bytes(good)
    with pytest.raises(SourceError, match=r"a\.parquet has no column 'y'"):
        list(parquet(path, columns=["x", "y"])(0, 1, 0))


# --- tar --------------------------------------------------------------------------------------------------------------


def write_tar(path: Path, members: Sequence[tuple[str, bytes]], kind: int = tarfile.PAX_FORMAT) -> None:
    with tarfile.open(path, "w", format=kind) as archive:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))


def members_of(samples: int, *, prefix: str = "", first: int = 0) -> list[tuple[str, bytes]]:
    return [
        (f"{prefix}{number}.{extension}", f"{number} {extension}".encode() * (number % 40 * 30))
        for number in range(first, first + samples)
        for extension in ("seg.png", "json", "cls")
    ]


@settings(max_examples=examples(40))
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.sampled_from(["", "train/", "x" * 120 + "/é"]),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    _SHARDS,
)
def test_each_tar_sample_is_in_one_shard_and_reading_goes_on_from_any_place(
    counts: list[int], prefix: str, kind: int, num_shards: int
) -> None:
    members = list[tuple[str, bytes]]()
    with tempfile.TemporaryDirectory() as folder:
        for number, count in enumerate(counts):
            own = members_of(count, prefix=prefix, first=10 * number)
            write_tar(Path(folder) / f"{number}.tar", own, kind)
            members += own
        samples = all_samples(tar_samples(f"{folder}/*.tar"), num_shards)
    assert len(samples) == sum(counts)
    found = {
        f"{sample['__key__']}.{extension}": content
        for sample in samples
        for extension, content in sample.items()
        if extension != "__key__"
    }
    assert found == dict(members)


def test_folders_hidden_members_and_such_without_extension_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name, content in [("a.b/1.txt", b"1"), ("README", b""), ("a.b/._1.txt", b""), ("a.b/1.json", b"2")]:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
            folder = tarfile.TarInfo(f"folder.of.{name[-1]}")
            folder.type = tarfile.DIRTYPE
            archive.addfile(folder)
    assert list(tar_samples(path)(0, 1, 0)) == [{"__key__": "a.b/1", "txt": b"1", "json": b"2"}]


def test_nothing_in_an_archive_is_unpickled(tmp_path: Path) -> None:
    trap = b"cbuiltins\nexit\n(tR."
    write_tar(tmp_path / "a.tar", [("1.pkl", trap), ("1.pyd", trap)])
    assert list(tar_samples(tmp_path / "a.tar")(0, 1, 0)) == [{"__key__": "1", "pkl": trap, "pyd": trap}]


@pytest.mark.parametrize("cut", range(1, 30))
def test_an_archive_that_is_cut_anywhere_gives_what_is_whole_and_then_is_named(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, [(f"{number}.txt", bytes([number]) * 700) for number in range(8)])
    whole = list(tar_samples(path)(0, 1, 0))
    content = path.read_bytes()[: 9 * 1536]  # eight members and the end mark
    path.write_bytes(content[: cut * 421])
    samples = list[Any]()
    with pytest.raises(SourceError, match=r"a\.tar, byte \d+: the archive is damaged or cut off"):
        samples.extend(tar_samples(path)(0, 1, 0))
    assert samples == whole[: len(samples)]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"no archive at all" * 99, r"a\.tar, byte 0: the archive is damaged or cut off"),
        (lambda content: content[:1536] + b"x" * 512 + content[2048:], r"a\.tar, byte 1536: the archive is damaged"),
        (lambda content: b"", r"a\.tar, byte 0: the archive is damaged or cut off"),
    ],
)
def test_a_damaged_archive_is_named(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, [(f"{number}.txt", b"." * 700) for number in range(3)])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SourceError, match=message):
        list(tar_samples(path)(0, 1, 0))


def test_members_that_make_no_sample_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, [("1.txt", b"a"), ("1.txt", b"b")])
    with pytest.raises(SourceError, match=r"a\.tar, byte 1024: sample '1' has an extension twice: 'txt'"):
        list(tar_samples(path)(0, 1, 0))
    write_tar(path, [("1.__key__", b"a")])
    with pytest.raises(SourceError, match="sample '1' has an extension twice: '__key__'"):
        list(tar_samples(path)(0, 1, 0))
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("2.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(SourceError, match=r"a\.tar, byte 0: member '2\.txt' is a link or a device: pack files"):
        list(tar_samples(path)(0, 1, 0))
