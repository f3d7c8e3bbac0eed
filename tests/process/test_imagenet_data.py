"""The ImageNet example's net, schedule and images."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from PIL import Image

from examples.imagenet import digits
from examples.imagenet.images import (
    EvalTransform,
    ImageDataset,
    TrainTransform,
    index_images,
)
from examples.imagenet.resnet import resnet
from torchelastic.data import ElasticBatchSampler, ElasticLoader


def gradient_image(width: int, height: int) -> Image.Image:
    """An image whose red channel tells the column and whose green channel tells the row."""
    pixels = bytes(
        level
        for row in range(height)
        for column in range(width)
        for level in (column * 255 // width, row * 255 // height, 0)
    )
    return Image.frombytes("RGB", (width, height), pixels)


def make_folder(root: Path, files: list[str]) -> Path:
    for name in files:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix:
            gradient_image(12, 10).save(file, format="PNG")
        else:
            file.mkdir()
    return root


# ------------------------------------------------------------------------------------------------------------ the net


@pytest.mark.parametrize(("depth", "parameters"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032)])
def test_a_resnet_has_the_published_number_of_parameters(depth: int, parameters: int) -> None:
    with torch.device("meta"):
        network = resnet(depth, 1000)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


# --------------------------------------------------------------------------------------------------------- the images


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (["val/ant/1.png"], r"no folder .*train: expected"),
        (["train/ant/1.png"], r"no folder .*val: expected"),
        (["train/1.png", "val/ant/1.png"], r"no class folders in .*train: expected"),
        (["train/ant/1.png", "train/bee", "val/ant/1.png"], r"no images in .*bee: expected"),
        (["train/ant/1.png", "val/ant"], r"no images in .*val: expected"),
        (["train/ant/1.png", "val/wasp/1.png"], r"classes that train has not: wasp"),
    ],
)
def test_a_folder_of_the_wrong_shape_is_refused_with_what_was_expected(
    tmp_path: Path, files: list[str], complaint: str
) -> None:
    root = make_folder(tmp_path, files)
    with pytest.raises(ValueError, match=complaint):
        index_images(root)


@pytest.mark.parametrize("kept_bytes", [0, 30, 60])
def test_a_damaged_image_is_named(tmp_path: Path, kept_bytes: int) -> None:
    index = index_images(make_folder(tmp_path, ["train/ant/1.png", "val/ant/1.png"]))
    file = index.train[0][0]
    file.write_bytes(file.read_bytes()[:kept_bytes])
    with pytest.raises(ValueError, match=r"cannot read the image .*1\.png"):
        ImageDataset(index.train, EvalTransform(8))[0]


# --------------------------------------------------------------------------------------------------------- the digits


def test_several_processes_may_write_the_digits_at_once(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "digits"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=digits.write_digits, args=(root,)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert len(index_images(root).train) == 1437
    assert [entry.name for entry in root.parent.iterdir()] == ["digits"]  # no scratch folder is left


@pytest.mark.parametrize("cache", [False, True])
def test_an_image_is_cropped_by_seed_epoch_and_index_in_any_process(digits_folder: Path, cache: bool) -> None:
    samples = index_images(digits_folder).train[:10]

    def pixels_of_run(seed: int, num_workers: int = 0) -> dict[tuple[int, int], torch.Tensor]:
        data = ImageDataset(samples, TrainTransform(8, min_area=0.3), cache=cache)
        loader = ElasticLoader(data, ElasticBatchSampler(data, 4, epochs=3, seed=seed), num_workers=num_workers)
        batches = list(loader)
        loader.close()
        assert len(batches) == 9
        return {
            (number // 3, index): pixels
            for number, batch in enumerate(batches)
            for index, pixels in zip(batch.sample.tolist(), batch.pixels, strict=True)
        }

    plain = pixels_of_run(4)
    ahead = pixels_of_run(4, num_workers=2)
    assert plain.keys() == ahead.keys()
    assert all(torch.equal(pixels, ahead[place]) for place, pixels in plain.items())
    others = [plain[1, 3], plain[0, 4], pixels_of_run(5)[0, 3]]
    assert not any(torch.equal(other, plain[0, 3]) for other in others)
