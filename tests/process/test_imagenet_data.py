"""The ImageNet example's net, schedule and images."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from PIL import Image

from examples.imagenet import digits
from examples.imagenet.epoch_sampler import EpochSampler
from examples.imagenet.evaluation import evaluate
from examples.imagenet.images import (
    EvalTransform,
    ImageDataset,
    TrainTransform,
    index_images,
)
from examples.imagenet.resnet import resnet
from examples.imagenet.schedule import learning_rate
from torchelastic.data import ElasticLoader


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


# ------------------------------------------------------------------------------------------------------- the schedule


def test_the_rate_warms_up_peaks_and_falls_towards_zero() -> None:
    rates = [learning_rate(step, total_steps=100, peak=0.5, warmup_steps=10) for step in range(101)]
    assert rates[0] == pytest.approx(0.05)
    assert max(rates) == rates[10] == 0.5
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.25)  # half way down the cosine
    assert 0 < rates[100] == rates[99] < 0.001


# --------------------------------------------------------------------------------------------------------- the images


def test_classes_and_files_are_indexed_in_sorted_order_whatever_the_suffix_case(tmp_path: Path) -> None:
    root = make_folder(
        tmp_path,
        ["train/zebra/2.JPEG", "train/zebra/1.png", "train/ant/7.jpg", "val/zebra/9.jpeg", "train/ant/notes.txt"],
    )
    index = index_images(root)
    assert index.classes == ("ant", "zebra")
    assert [(file.name, label) for file, label in index.train] == [("7.jpg", 0), ("1.png", 1), ("2.JPEG", 1)]
    assert [(file.name, label) for file, label in index.val] == [("9.jpeg", 1)]


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


def test_an_item_depends_on_seed_epoch_and_index_and_on_nothing_else(digits_folder: Path) -> None:
    samples = index_images(digits_folder).train

    def load(seed: int, epoch: int, item: int) -> torch.Tensor:
        data = ImageDataset(samples, TrainTransform(16, min_area=0.5), seed=seed)
        return data[epoch * len(data) + item].pixels

    first = load(1, 2, 3)
    torch.manual_seed(99)
    data = ImageDataset(samples, TrainTransform(16, min_area=0.5), seed=1, cache=True)
    data[7]  # loaded in another order, by a data set that keeps images
    assert torch.equal(data[2 * len(data) + 3].pixels, first)
    assert torch.equal(data[2 * len(data) + 3].pixels, first)
    assert data[2 * len(data) + 3][1:] == (samples[3][1], 3)
    for other in (load(2, 2, 3), load(1, 3, 3), load(1, 2, 4)):
        assert not torch.equal(other, first)


# --------------------------------------------------------------------------------------------------------- the digits


def test_the_digits_are_the_fixed_stratified_split(digits_folder: Path) -> None:
    index = index_images(digits_folder)
    assert index.classes == tuple("0123456789")
    assert (len(index.train), len(index.val)) == (1437, 360)
    assert [sum(label == digit for _, label in index.val) for digit in range(10)] == [36] * 10
    names = [file.name for file, _ in index.train + index.val]
    assert len(set(names)) == 1797  # nothing is in both


def test_the_files_hold_the_pixels_of_the_data_set(digits_folder: Path) -> None:
    from sklearn.datasets import load_digits

    data = load_digits()
    for file, label in index_images(digits_folder).val[::30]:
        position = int(file.stem)
        assert data.target[position] == label
        with Image.open(file) as image:
            assert image.mode == "L"
            assert [round(level * 16 / 255) for level in image.tobytes()] == data.images[position].flatten().tolist()


def test_writing_the_digits_again_touches_nothing(digits_folder: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in digits_folder.rglob("*")}
    digits.write_digits(digits_folder)
    assert {file: file.stat().st_mtime_ns for file in digits_folder.rglob("*")} == before


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


def test_a_folder_that_is_something_else_is_not_overwritten(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "photos", ["train/ant/1.png"])
    with pytest.raises(ValueError, match="not a complete copy of the digits; remove it"):
        digits.write_digits(root)
    assert (root / "train" / "ant" / "1.png").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["photos"]


def test_the_epoch_reaches_the_data_set_through_prefetching_loaders(digits_folder: Path) -> None:
    samples = index_images(digits_folder).train[:10]

    def pixels_of_run(num_workers: int) -> list[tuple[list[int], torch.Tensor]]:
        data = ImageDataset(samples, TrainTransform(8, min_area=0.3), seed=4)
        loader = ElasticLoader(data, EpochSampler(len(data), 4, epochs=3, seed=4), num_workers=num_workers)
        batches = [(batch.sample.tolist(), batch.pixels) for batch in loader]
        loader.close()
        return batches

    plain = pixels_of_run(num_workers=0)
    ahead = pixels_of_run(num_workers=2)
    data = ImageDataset(samples, TrainTransform(8, min_area=0.3), seed=4)
    assert len(plain) == len(ahead) == 9
    for number, ((indices, pixels), (indices_ahead, pixels_ahead)) in enumerate(zip(plain, ahead, strict=True)):
        assert indices == indices_ahead
        assert torch.equal(pixels, pixels_ahead)
        epoch = number // 3
        assert torch.equal(pixels, torch.stack([data[epoch * 10 + index].pixels for index in indices]))


def test_a_slim_resnet_learns_the_digits(digits_folder: Path) -> None:
    index = index_images(digits_folder)
    train = ImageDataset(index.train, TrainTransform(8, min_area=0.6, flip=False), seed=0, cache=True)
    val = ImageDataset(index.val, EvalTransform(8, kept=1.0))
    torch.manual_seed(0)
    network = resnet(18, 10, width=8, small_images=True)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    sampler = EpochSampler(len(train), 96, epochs=4)
    total_steps = sampler.epochs * sampler.batches_per_epoch
    for step, batch in enumerate(ElasticLoader(train, sampler)):
        rate = learning_rate(step, total_steps=total_steps, peak=0.1, warmup_steps=6)
        optimizer.param_groups[0]["lr"] = rate
        loss = torch.nn.functional.cross_entropy(network(batch.pixels), batch.label)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
    accuracy = evaluate(network, val, rank=0, world_size=1, batch_size=100, device=torch.device("cpu"))
    assert accuracy.top1 > 0.9
    assert accuracy.top5 > 0.98
