"""Handwritten digits as a folder of PNG files: a real data set that needs no download.

The images are the UCI "Optical Recognition of Handwritten Digits" test set (1797 images of 8x8 pixels, 17 grey levels),
which ships inside scikit-learn.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from PIL import Image

TRAIN_IMAGES = 1437
VAL_IMAGES = 360
VAL_IMAGES_PER_DIGIT = VAL_IMAGES // 10


def write_digits(root: Path) -> None:
    """Writes ``root/{train,val}/{0..9}/NNNN.png``; does nothing if they are already there.

    The split is fixed: of each digit 36 images, evenly spaced over the file, are for validation. The folder appears
    in one rename, so several processes may call this at once and none ever sees half of it.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
        ValueError: ``root`` exists and is something else.
    """
    if _is_complete(root):
        return
    root.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
    try:
        _write_files(scratch)
        scratch.chmod(0o755)  # mkdtemp makes folders that only their owner may read
        try:
            scratch.rename(root)
        except OSError as error:
            # Somebody else was first (then all is well), or the name is taken by something that is not ours.
            if not _is_complete(root):
                raise ValueError(
                    f"{root} exists but is not a complete copy of the digits; remove it or name another folder"
                ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def split_of_positions(positions: list[int], val_count: int) -> tuple[list[int], list[int]]:
    """Splits positions into (train, val), the ``val_count`` of validation evenly spaced over them."""
    chosen = {positions[index * len(positions) // val_count] for index in range(val_count)}
    return [position for position in positions if position not in chosen], sorted(chosen)


def _is_complete(root: Path) -> bool:
    wanted = {"train": TRAIN_IMAGES, "val": VAL_IMAGES}
    return all(sum(1 for _ in (root / split).glob("[0-9]/*.png")) == count for split, count in wanted.items())


def _write_files(folder: Path) -> None:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the digits ship inside scikit-learn: pip install scikit-learn") from error
    data = load_digits()
    positions_by_digit: dict[int, list[int]] = {digit: [] for digit in range(10)}
    for position, digit in enumerate(data.target.tolist()):
        positions_by_digit[digit].append(position)
    for digit, positions in positions_by_digit.items():
        train, val = split_of_positions(positions, VAL_IMAGES_PER_DIGIT)
        for split, chosen in (("train", train), ("val", val)):
            target = folder / split / str(digit)
            target.mkdir(parents=True)
            for position in chosen:
                # 0..16 in the data set; 255 = 16 * 15.9375, so the grey levels stay distinct.
                grey = bytes(round(level * 255 / 16) for row in data.images[position].tolist() for level in row)
                Image.frombytes("L", (8, 8), grey).save(target / f"{position:04d}.png")
