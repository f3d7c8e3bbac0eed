"""A folder of images as a data set, with random crops.

Elastic training repeats a step that failed, and moves samples between workers when some come or go. A sample is the
same whoever loads it and however often: `ElasticLoader` seeds torch's random numbers for each of them.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg"})

# What PIL raises on a damaged file depends on the format and on which byte is wrong (seen by flipping bytes).
DAMAGE = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)

# Channel statistics of the ImageNet training set on the scale 0..1; also a fair choice for other photographs.
CHANNEL_MEAN = (0.485, 0.456, 0.406)
CHANNEL_STD = (0.229, 0.224, 0.225)

Transform = Callable[[Image.Image], Tensor]
"""Maps an RGB image to a float tensor (3, H, W)."""


@dataclass(frozen=True)
class ImageIndex:
    """Which images there are.

    Attributes:
        classes: class names; the position is the label.
        train: (file, label) of each training image, in sorted order.
        val: (file, label) of each validation image, in sorted order.
    """

    classes: tuple[str, ...]
    train: tuple[tuple[Path, int], ...]
    val: tuple[tuple[Path, int], ...]


def index_images(root: Path) -> ImageIndex:
    """Lists ``root/{train,val}/CLASS/*.{png,jpg,jpeg}`` (suffix in any case) in one order for every worker.

    Raises:
        ValueError: something is missing or empty; the message says what was expected where.
    """
    wanted = f"expected {root}/train/CLASS/*.jpg (or .png) and {root}/val/CLASS/*.jpg, one folder for each class"
    for folder in (root, root / "train", root / "val"):
        if not folder.is_dir():
            raise ValueError(f"no folder {folder}: {wanted}")
    classes = tuple(sorted(entry.name for entry in os.scandir(root / "train") if entry.is_dir()))
    if not classes:
        raise ValueError(f"no class folders in {root / 'train'}: {wanted}")
    unknown = sorted(entry.name for entry in os.scandir(root / "val") if entry.is_dir() and entry.name not in classes)
    if unknown:
        raise ValueError(f"{root / 'val'} has classes that train has not: {', '.join(unknown[:5])}: {wanted}")
    train = _list_split(root / "train", classes)
    val = _list_split(root / "val", classes)
    present = {label for _, label in train}
    empty = [name for label, name in enumerate(classes) if label not in present]
    if empty:
        raise ValueError(f"no images in {root / 'train' / empty[0]}: {wanted}")
    if not val:
        raise ValueError(f"no images in {root / 'val'}: {wanted}")
    return ImageIndex(classes, train, val)


def _list_split(folder: Path, classes: tuple[str, ...]) -> tuple[tuple[Path, int], ...]:
    return tuple(
        (folder / name / file, label)
        for label, name in enumerate(classes)
        if (folder / name).is_dir()
        for file in sorted(entry.name for entry in os.scandir(folder / name))
        if Path(file).suffix.lower() in IMAGE_SUFFIXES
    )


class Item(NamedTuple):
    """One image, ready for the network; a batch of items has the same fields, stacked."""

    pixels: Tensor
    """float32, (3, H, W)"""
    label: int
    """position of its class"""
    sample: int
    """position of its file in the data set"""


class ImageDataset(Dataset[Item]):
    """Images and labels.

    Args:
        samples: (file, label) pairs, from ``index_images``.
        transform: makes the tensor from the decoded image.
        cache: keep every decoded image in memory (for small data sets: 3 bytes a pixel).
    """

    def __init__(self, samples: tuple[tuple[Path, int], ...], transform: Transform, *, cache: bool = False) -> None:
        self._samples = samples
        self._transform = transform
        self._cached: dict[int, Image.Image] | None = {} if cache else None

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Item:
        """What the transform makes of an image.

        Raises:
            ValueError: the file is not a readable image; the message names it.
        """
        return Item(self._transform(self._decoded(index)), self._samples[index][1], index)

    def _decoded(self, index: int) -> Image.Image:
        if self._cached is None:
            return decode(self._samples[index][0])
        if index not in self._cached:
            self._cached[index] = decode(self._samples[index][0])
        return self._cached[index]


def decode(file: Path) -> Image.Image:
    """Reads an image file as RGB.

    Raises:
        ValueError: the file is damaged or no image; the message names it.
    """
    try:
        with Image.open(file) as image:
            rgb: Image.Image = image.convert("RGB")
            return rgb
    except DAMAGE as error:
        raise ValueError(f"cannot read the image {file}: {error}; restore or remove it") from error


@dataclass(frozen=True)
class TrainTransform:
    """Random resized crop, horizontal flip, normalisation (arXiv:1409.4842 section 6).

    Attributes:
        size: height and width of the result, pixels.
        min_area: smallest crop, as a fraction of the image's area.
        max_stretch: largest distortion of the aspect ratio, either way.
        flip: mirror half of the images; wrong for digits and letters.
    """

    size: int
    min_area: float = 0.08
    max_stretch: float = 4 / 3
    flip: bool = True

    def __call__(self, image: Image.Image) -> Tensor:
        """Returns a float tensor (3, size, size)."""
        box = random_crop_box(image.size, self.min_area, self.max_stretch)
        resized = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        pixels = to_tensor(resized)
        mirrored = self.flip and _uniform(0.0, 1.0) < 0.5
        return normalise(pixels.flip(-1) if mirrored else pixels)


@dataclass(frozen=True)
class EvalTransform:
    """Resize, centre crop, normalisation; reads no random number.

    Attributes:
        size: height and width of the result, pixels.
        kept: edge of the crop as a fraction of the image's shorter edge (224 of 256 is usual for photographs).
    """

    size: int
    kept: float = 0.875

    def __call__(self, image: Image.Image) -> Tensor:
        """Returns a float tensor (3, size, size)."""
        width, height = image.size
        edge = self.kept * min(width, height)
        left, top = (width - edge) / 2, (height - edge) / 2
        box = (left, top, left + edge, top + edge)
        # Crop and resize in one resampling: the same picture as resizing first, without the pixels thrown away.
        return normalise(to_tensor(image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)))


def random_crop_box(
    image_size: tuple[int, int], min_area: float, max_stretch: float
) -> tuple[float, float, float, float]:
    """Draws (left, top, right, bottom) in pixels, fractions allowed: on an 8 pixel digit whole pixels are too coarse.

    The area is uniform in [min_area, 1] of the image and the logarithm of the aspect ratio uniform in
    [-log max_stretch, log max_stretch]. After ten boxes that stick out: the largest centred square.
    """
    width, height = image_size
    for _ in range(10):
        area = width * height * _uniform(min_area, 1.0)
        aspect = math.exp(_uniform(-math.log(max_stretch), math.log(max_stretch)))
        box_width, box_height = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if box_width <= width and box_height <= height:
            left = _uniform(0.0, width - box_width)
            top = _uniform(0.0, height - box_height)
            return left, top, min(left + box_width, width), min(top + box_height, height)
    edge = min(width, height)
    left, top = (width - edge) / 2, (height - edge) / 2
    return left, top, left + edge, top + edge


def _uniform(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), dtype=torch.float64))


def to_tensor(image: Image.Image) -> Tensor:
    """RGB image to a float tensor (3, H, W) on the scale 0..1."""
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3).permute(2, 0, 1).float().div_(255)


def normalise(pixels: Tensor) -> Tensor:
    """Shifts and scales each channel of (3, H, W) to about mean 0 and deviation 1."""
    return (pixels - torch.tensor(CHANNEL_MEAN).view(3, 1, 1)) / torch.tensor(CHANNEL_STD).view(3, 1, 1)
