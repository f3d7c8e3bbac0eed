"""Sources under an `ElasticStream`: each token once in an epoch, also with worker processes and after a restart."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from torchelastic.data import ElasticStream, SourceError, lines, packed, shuffled

PAD = -1


def numbers_of(line: str) -> list[int]:
    return [int(word) for word in line.split()]


def drawn(stream: ElasticStream, batches: int | None) -> list[int]:
    tokens: list[int] = []
    while batches is None or batches > 0:
        try:
            batch = next(stream)
        except StopIteration:
            break
        tokens += batch.flatten().tolist()
        stream.commit()
        batches = None if batches is None else batches - 1
    return tokens


@pytest.mark.parametrize(
    ("num_workers", "start"), [(0, None), (2, None), pytest.param(1, "spawn", marks=pytest.mark.long)]
)
def test_a_stream_goes_on_in_the_middle_of_files_documents_and_blocks(
    tmp_path: Path, num_workers: int, start: str | None
) -> None:
    tokens = iter(range(10_000))
    for name in "abc":
        text = "".join(" ".join(str(next(tokens)) for _ in range(1 + line % 5)) + "\n" for line in range(100))
        (tmp_path / f"{name}.txt").write_text(text)
    source = shuffled(packed(lines(f"{tmp_path}/*.txt"), 5, numbers_of, pad=PAD), 7, seed=3)

    def make() -> ElasticStream:
        return ElasticStream(
            source, 4, global_batch_size=8, epochs=2, num_workers=num_workers, multiprocessing_context=start
        )

    before = make()
    seen = drawn(before, 15)
    next(before)  # of a step that does not succeed
    after = make()
    after.load_state_dict(before.state_dict())
    before.close()
    seen += drawn(after, None)
    after.close()
    assert Counter(token for token in seen if token != PAD) == Counter(list(range(next(tokens))) * 2)


def test_a_file_that_vanishes_after_the_first_batch_is_named(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("a\nb\nc\n")

    def make() -> ElasticStream:
        return ElasticStream(lines(f"{tmp_path}/*.txt"), 2, global_batch_size=2)

    before, after = make(), make()
    next(before)
    before.commit()
    (tmp_path / "3.txt").unlink()
    after.load_state_dict(before.state_dict())
    with pytest.raises(SourceError, match=r"another list of files \(3 files now\)"):
        next(after)
