"""Sources that read files: each sample in one shard, going on from any place, and what is said of bad files."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import hypothesis.strategies as st
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]
from hypothesis import given, settings

from tests.few_examples import examples
from tests.pure.source_contract import all_samples, through_json
from torchelastic.data import Source, SourceError, jsonl, lines, shuffled
from torchelastic.data.sources.api import opened

_LINE = st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=12)
_FILES = st.lists(st.lists(_LINE, max_size=8), min_size=1, max_size=4)
_SHARDS = st.integers(1, 6)


@contextlib.contextmanager
def folder_of(contents: list[bytes]) -> Iterator[str]:
    """A pattern that matches files with these contents."""
    with tempfile.TemporaryDirectory() as folder:
        for number, content in enumerate(contents):
            (Path(folder) / f"{number}.txt").write_bytes(content)
        yield f"{folder}/*.txt"


@settings(max_examples=examples(25))
@given(_FILES, _SHARDS, st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_each_line_is_in_one_shard_and_reading_goes_on_from_any_place(
    texts: list[list[str]], num_shards: int, end: str, has_last_end: bool
) -> None:
    contents = [end.join(text) + (end if text and has_last_end else "") for text in texts]
    expected = [line for text, content in zip(texts, contents, strict=True) for line in text if content]
    if not has_last_end:  # an empty line without an end is no line
        expected = [line for text in texts for line in (text if not text or text[-1] else text[:-1])]
    with folder_of([content.encode() for content in contents]) as pattern:
        assert Counter(all_samples(lines(pattern), num_shards)) == Counter(expected)
        assert list(lines(pattern)(0, 1, 0)) == expected


_VALUE = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | _LINE, st.lists, max_leaves=4)


@settings(max_examples=examples(25))
@given(st.lists(st.lists(_VALUE, max_size=6), min_size=1, max_size=3), _SHARDS)
def test_each_value_of_jsonl_comes_once(values: list[list[Any]], num_shards: int) -> None:
    contents = ["".join(json.dumps(value, ensure_ascii=False) + "\n\n" for value in one).encode() for one in values]
    with folder_of(contents) as pattern:
        samples = all_samples(jsonl(pattern), num_shards)
    assert Counter(map(json.dumps, samples)) == Counter(json.dumps(value) for one in values for value in one)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(4):
        text = "".join(f'{{"file": {number}, "line": {line}}}\n' for line in range(10))
        (tmp_path / f"part-{number}.jsonl").write_text(text)
    return tmp_path


def position_in(source: Source[Any], drawn: int, *, shard: int = 0, num_shards: int = 1) -> Any:
    samples = opened(source, shard, num_shards, 0)
    for _ in range(drawn):
        next(samples)
    return through_json(samples.state_dict())


def test_a_position_is_small_and_data_may_be_moved_as_a_whole(folder: Path, tmp_path: Path) -> None:
    position = position_in(jsonl(f"{folder}/*.jsonl"), 25)
    assert len(json.dumps(position, separators=(",", ":"))) <= 100
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in folder.glob("*.jsonl"):
        path.rename(moved / path.name)
    assert next(iter(jsonl(f"{moved}/*.jsonl")(0, 1, position))) == {"file": 2, "line": 5}


def test_going_on_seeks_and_does_not_read_what_was_before(folder: Path) -> None:
    source = jsonl(f"{folder}/*.jsonl")
    position = position_in(source, 15)
    path = folder / "part-1.jsonl"
    path.write_bytes(b"\xff" * 60 + path.read_bytes()[60:])
    assert [sample["line"] for sample in source(0, 1, position)][:5] == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    "files",
    [
        lambda folder: f"{folder}/*.jsonl",
        lambda folder: folder / "*.jsonl",
        lambda folder: [folder / "part-0.jsonl", f"{folder}/part-[123].jsonl"],
        lambda folder: [path for path in folder.glob("*.jsonl") if path.is_file()],
        lambda folder: f"file://{folder}/*.jsonl",
        lambda folder: [f"file://{folder}/part-{number}.jsonl" for number in range(4)],
    ],
)
def test_files_are_named_in_any_of_these_ways(folder: Path, files: Callable[[Path], Any]) -> None:
    (folder / "part-5.jsonl").mkdir()
    samples = all_samples(jsonl(files(folder)), 6)
    assert Counter((sample["file"], sample["line"]) for sample in samples) == Counter(
        (file, line) for file in range(4) for line in range(10)
    )


def test_urls_are_read_through_fsspec() -> None:
    system = fsspec.filesystem("memory")
    system.mkdirs("/sources", exist_ok=True)
    for number in range(3):
        system.pipe_file(f"/sources/{number}.txt", "".join(f"{number} {line}\n" for line in range(50)).encode())
    for pattern in ("memory://sources/*.txt", [f"memory://sources/{number}.txt" for number in range(3)]):
        samples = all_samples(lines(pattern), 4)
        assert Counter(samples) == Counter(f"{number} {line}" for number in range(3) for line in range(50))
    with pytest.raises(SourceError, match=r"no file matches memory://sources/\*\.gone"):
        lines("memory://sources/*.gone")(0, 1, 0)
    with pytest.raises(SourceError, match=r"memory://sources/9\.txt is not there"):
        list(lines("memory://sources/9.txt")(0, 1, 0))


@pytest.mark.parametrize("name", ["9.txt", "*.gone", "9.txt.gz"])
def test_no_secret_of_a_url_is_shown(name: str) -> None:
    with pytest.raises(SourceError) as raised:
        list(lines(f"memory://key:sec-ret@sources/{name}?token=to-ken")(0, 1, 0))
    assert f"memory://sources/{name}" in str(raised.value)
    assert "sec-ret" not in str(raised.value)
    assert "to-ken" not in str(raised.value)


class Outage:
    """Storage that cannot be read: as often as it is told to, each of these calls of a file system fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures = 0
        self.pauses_s: list[float] = []
        monkeypatch.setattr("time.sleep", self.pauses_s.append)
        for name in ("glob", "open"):
            monkeypatch.setattr(MemoryFileSystem, name, self._failing(getattr(MemoryFileSystem, name)))

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*arguments: Any, **options: Any) -> Any:
            if self.failures:
                self.failures -= 1
                raise ConnectionError("nobody is there")
            return call(*arguments, **options)

        return failing


def test_storage_that_fails_behind_the_first_sample_is_asked_again_and_no_sample_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = fsspec.filesystem("memory")
    for number in range(3):
        files.pipe_file(f"/outage/{number}.txt", f"{number} a\n{number} b\n".encode())
    outage, source = Outage(monkeypatch), lines("memory://outage/*.txt")
    samples: Any = source(0, 1, 0)
    read = [next(samples), next(samples)]
    outage.failures = 3
    read.append(next(samples))  # of the next file
    assert len(outage.pauses_s) == 3
    assert "/outage/1.txt cannot be read at present, and is asked for again in 4 s" in caplog.text
    outage.failures = 3
    read += source(0, 1, samples.state_dict())  # as who takes the shard over
    assert read == [f"{number} {letter}" for number in range(3) for letter in "ab"]
    assert len(outage.pauses_s) == 6


def test_storage_that_fails_at_the_start_or_for_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("memory").pipe_file("/outage/only.txt", b"a\nb\n")
    outage, source = Outage(monkeypatch), lines("memory://outage/only.*")
    outage.failures = 1
    with pytest.raises(ConnectionError, match="nobody is there"):
        source(0, 1, 0)
    assert not outage.pauses_s
    samples: Any = source(0, 1, 0)
    next(samples)
    outage.failures = 1000
    with pytest.raises(ConnectionError, match="nobody is there"):
        source(0, 1, samples.state_dict())
    assert 500 < sum(outage.pauses_s) < 700


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("{0}/*.gone", r"no file matches .*\.gone"),
        (["{0}/*.jsonl", "{0}/part-1.jsonl"], r"part-1\.jsonl is named twice"),
        ([], "the list of files is empty"),
        ("{0}/a.txt.gz", "a.txt.gz is compressed"),
    ],
)
def test_a_wrong_list_of_files_is_told_when_a_shard_is_opened(folder: Path, files: Any, message: str) -> None:
    filled = files.format(folder) if isinstance(files, str) else [one.format(folder) for one in files]
    with pytest.raises(SourceError, match=message):
        lines(filled)(0, 1, 0)


def test_a_line_that_is_no_json_is_named(folder: Path) -> None:
    (folder / "part-1.jsonl").write_text('{"good": 1}\n{"bad": \x1b\n')
    with pytest.raises(SourceError, match=r"part-1\.jsonl, byte 12: the line is not JSON \(.*bad") as caught:
        list(jsonl(f"{folder}/*.jsonl")(0, 1, 0))
    assert "\x1b" not in str(caught.value)
    (folder / "part-1.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(SourceError, match=r"part-1\.jsonl, byte 0: the line is not JSON"):
        list(jsonl(f"{folder}/*.jsonl")(0, 1, 0))


@pytest.mark.parametrize("wrapped", [lambda source: source, lambda source: shuffled(source, 4)])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"part-2\.jsonl, at \d+: .* had 230 bytes.* shrunk to"),
        (lambda path: path.write_bytes(path.read_bytes() + b"0"), r"part-2\.jsonl, at \d+: .* bytes, .* grown to 231"),
        (lambda path: path.unlink(), r"part-2\.jsonl, at \d+: .* this file is gone \(3 files now\): bring back"),
        (lambda path: (path.parent / "new.jsonl").touch(), r"part-2\.jsonl, at \d+: .* in another list of files \(5"),
    ],
    ids=["shrunk", "grown", "gone", "another file"],
)
def test_a_file_that_is_not_what_it_was_is_named(
    folder: Path, change: Callable[[Path], object], message: str, wrapped: Callable[[Source[Any]], Source[Any]]
) -> None:
    source = wrapped(jsonl(f"{folder}/*.jsonl"))
    position = position_in(source, 25)
    change(folder / "part-2.jsonl")
    with pytest.raises(SourceError, match=message):
        next(source(0, 1, position))


def test_sources_are_imported_without_what_only_some_of_them_need() -> None:
    names = "lines jsonl parquet tar_samples from_datasets from_stateful shuffled packed mixed repeated mapped"
    code = (
        f"import sys; from torchelastic.data import {', '.join(names.split())}; "
        "print({'torch', 'pyarrow', 'fsspec', 'datasets', 'torchdata', 'numpy', 'pickle'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
