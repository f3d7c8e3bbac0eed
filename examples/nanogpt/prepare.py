"""Writes the characters of a text as numbers: `python prepare.py --name NAME [FILE ..]`.

Without files the text is that of the Python standard library that runs this, which is there on every machine: nothing
is downloaded.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.nanogpt.data import Corpus, write_corpus

DEFAULT_NAME = "char"
DEFAULT_MAX_CHARACTERS = 1_000_000
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}


def library_sources() -> list[Path]:
    """The standard library's files in Python, in the order of their names; not its tests.

    Raises:
        FileNotFoundError: this interpreter comes without them.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [path.relative_to(root) for path in root.rglob("*.py")]
    kept = sorted((path.as_posix(), path) for path in found if not _LEFT_OUT & set(path.parts))
    if not kept:
        raise FileNotFoundError(f"there are no sources of the standard library in {root}: name a text file")
    return [root / path for _, path in kept]


def texts(files: Sequence[Path]) -> Iterator[str]:
    """Their contents, UTF-8; what is not is replaced by U+FFFD."""
    for path in files:
        yield path.read_text(encoding="utf-8", errors="replace")


def joined(parts: Iterator[str], max_characters: int) -> str:
    """The texts one after the other, cut after so many characters; 0: not at all."""
    taken, length = [], 0
    for part in parts:
        taken.append(part)
        length += len(part)
        if 0 < max_characters <= length:
            break
    whole = "".join(taken)
    return whole[:max_characters] if max_characters > 0 else whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the data; returns the exit code."""
    parser = argparse.ArgumentParser(prog="prepare.py", description="Writes the characters of a text as numbers.")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="text files [the Python standard library]")
    parser.add_argument("--name", default=DEFAULT_NAME, help="what train.py calls --dataset [%(default)s]")
    parser.add_argument("--data_dir", "--data-dir", type=Path, default=Path("data"), help="[%(default)s]")
    parser.add_argument(
        "--max_characters",
        "--max-characters",
        type=int,
        default=DEFAULT_MAX_CHARACTERS,
        help="take so many from the beginning; 0: all [%(default)s]",
    )
    given = parser.parse_args(arguments)
    folder = given.data_dir / given.name
    try:
        files = given.files or library_sources()
        text = joined(texts(files), given.max_characters)
        source = "files" if given.files else f"the standard library of Python {sys.version.split()[0]}"
        vocabulary = write_corpus(folder, text, source=source)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    corpus = Corpus(folder)
    print(
        f"{folder}: {corpus.size('train'):,} tokens to train, {corpus.size('val'):,} to validate, "
        f"{len(vocabulary.characters)} different characters"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
