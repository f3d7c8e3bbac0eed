"""Makes a parquet file with a text column from any text files: one file, one row.

python -m examples.transformer_slurm.make_dataset text.parquet                 # the sources of Python's own library
python -m examples.transformer_slurm.make_dataset text.parquet ~/books --pattern '*.txt'
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROWS_PER_GROUP = 64


def text_files(sources: Iterable[Path], pattern: str) -> list[Path]:
    """The files themselves, and those below folders that match, in an order that is the same everywhere.

    Raises:
        FileNotFoundError: a source does not exist.
    """
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            found += sorted(path for path in source.rglob(pattern) if path.is_file())
        elif source.is_file():
            found.append(source)
        else:
            raise FileNotFoundError(f"{source}: no such file or folder")
    return found


def texts(files: Iterable[Path]) -> Iterator[str]:
    """What they hold; empty ones are left out, and what is no UTF-8 becomes U+FFFD."""
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        if text.strip():
            yield text


def write_parquet(
    target: Path, documents: Iterable[str], column: str = "text", rows_per_group: int = ROWS_PER_GROUP
) -> int:
    """Writes documents as one column, a row group at a time; the file appears when it is complete.

    Returns:
        How many there were.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    schema = pa.schema([(column, pa.string())])
    count = 0
    try:
        with pq.ParquetWriter(scratch, schema) as writer:
            group: list[str] = []
            for document in documents:
                group.append(document)
                count += 1
                if len(group) == rows_per_group:
                    writer.write_table(pa.table({column: group}, schema=schema))
                    group = []
            if group:
                writer.write_table(pa.table({column: group}, schema=schema))
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)
    return count


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the file; returns the exit code: 0, or 2 if there is nothing to write."""
    parser = argparse.ArgumentParser(prog="make_dataset", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("target", type=Path, metavar="FILE.parquet")
    parser.add_argument("sources", type=Path, nargs="*", metavar="PATH", help="files, or folders to look through")
    parser.add_argument("--pattern", help="of files in folders [*; *.py if no PATH is given]")
    parser.add_argument("--column", default="text", help="[%(default)s]")
    parser.add_argument("--max-documents", type=int, metavar="N", help="take the first N files only")
    given = parser.parse_args(arguments)
    default = not given.sources
    sources = [Path(sysconfig.get_paths()["stdlib"])] if default else given.sources
    try:
        files = text_files(sources, given.pattern or ("*.py" if default else "*"))[: given.max_documents]
        count = write_parquet(given.target, texts(files), given.column)
    except OSError as error:
        print(f"make_dataset: error: {error}", file=sys.stderr)
        return 2
    print(f"{given.target}: {count} documents, {given.target.stat().st_size / 2**20:.1f} MiB")
    return 0 if count else 2


if __name__ == "__main__":
    sys.exit(main())
