"""examples/nanogpt: stopped and started again it has the bits of the uninterrupted run, under each launcher."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from examples.nanogpt import sample, train
from examples.nanogpt.data import write_corpus
from examples.nanogpt.losses import Record, read_losses
from examples.nanogpt.options import parse
from examples.nanogpt.training import Workshop
from torchelastic.checkpoint.store import list_checkpoints

TRAIN = Path(train.__file__)
TEXT = "the quick brown fox jumps over the lazy dog; then it sleeps. " * 60
SMALL = (
    *("--dataset=fox", "--device=cpu", "--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=16"),
    *("--gradient_accumulation_steps=2", "--batch_size=3", "--eval_interval=10", "--eval_iters=2", "--log_interval=7"),
    *("--warmup_iters=5", "--lr_decay_iters=100", "--always_save_checkpoint=False", "--dropout=0.2"),
)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
ELASTIC_RUN = (sys.executable, "-m", "torchelastic.launch", "run", "--standalone", "--nproc-per-node")
SIMULATOR = (sys.executable, "-m", "torchelastic.launch", "simulate-esi", "--json")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data, which the test is in."""
    write_corpus(tmp_path / "data" / "fox", TEXT, source="a test")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train_here(*words: str) -> int:
    """In this process."""
    return train.main([*SMALL, *words])


def train_by(launcher: Sequence[str], *words: str) -> None:
    """In processes of their own, to their end."""
    command = [*launcher, str(TRAIN), *SMALL, *words]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def weights(out: str) -> dict[str, torch.Tensor]:
    return sample.newest_weights(Path(out))


def require_same(out: str, other: str) -> None:
    """Losses and final weights of two runs, to the bit."""
    ours, theirs = read_losses(Path(out)), read_losses(Path(other))
    assert [record["iteration"] for record in ours] == [record["iteration"] for record in theirs]
    assert ours == theirs
    assert weights(out).keys() == weights(other).keys()
    assert all(torch.equal(value, weights(other)[name]) for name, value in weights(out).items())


def iterations(records: Sequence[Record]) -> list[int]:
    return [record["iteration"] for record in records if "loss" in record]


# --- one run, and its file ------------------------------------------------------------------------


def test_a_run_learns_writes_each_loss_once_and_can_be_asked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_here("--max_iters=40", "--learning_rate=0.01") == 0
    records = read_losses(here / "out")
    assert iterations(records) == list(range(40))
    assert [record["iteration"] for record in records if "val_loss" in record] == [0, 10, 20, 30, 40]
    assert records[-1]["val_loss"] < 0.9 * records[0]["val_loss"]
    assert not (here / "out" / "manager_state.json").exists(), "the next run is to count from 1"
    capsys.readouterr()
    assert sample.main(["--out_dir=out", "--start=the ", "--max_new_tokens=30"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("the ")
    assert set(text) <= set(TEXT) | set("-\n")
    assert len(text) == 4 + 30 + len("\n---\n")


def test_what_was_trained_after_the_last_save_is_trained_again_alike(here: Path) -> None:
    """A kill leaves losses behind that are in no checkpoint, and half a line."""
    assert train_here("--max_iters=25", "--out_dir=whole") == 0
    assert train_here("--max_iters=13", "--out_dir=killed") == 0
    with (here / "killed" / "losses.jsonl").open("a") as file:
        file.write('{"iteration": 13, "loss": 99.0, "learning_rate": 1.0}\n{"iteration": 14, "lo')
    assert train_here("--max_iters=25", "--out_dir=killed") == 0
    records = [record for record in read_losses(here / "killed") if "loss" in record]
    assert records == [record for record in read_losses(here / "whole") if "loss" in record]


def test_uneven_shares_and_micro_batches_add_up_to_the_gradient_of_the_whole_batch(here: Path) -> None:
    options = parse([*SMALL, "--dropout=0.0", "--gradient_accumulation_steps=4", "--batch_size=2"])  # 8 are 3, 3 and 2
    workshop = Workshop(options, local_rank=0)
    rows = [workshop.rows(5, rank, 3) for rank in range(3)]
    assert [number for own in rows for number in own] == list(range(40, 48))
    totals = [
        workshop.add_gradients(workshop.module, own, scale=1 / options.sequences, no_sync=nullcontext) for own in rows
    ]
    found = {name: parameter.grad for name, parameter in workshop.module.named_parameters()}
    inputs, targets = workshop.corpus.sequences(
        "train", range(40, 48), options.block_size, seed=options.seed, stream="train"
    )
    loss = torch.nn.functional.cross_entropy(workshop.module(inputs).flatten(0, 1), targets.flatten())
    expected = torch.autograd.grad(loss, list(workshop.module.parameters()))
    torch.testing.assert_close(sum(totals) / 8, loss.double())
    for (name, gradient), wanted in zip(found.items(), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, msg=name)


# --- launchers ------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_of_python_goes_on_under_torchrun_to_the_same_bits(here: Path) -> None:
    assert train_here("--max_iters=30", "--out_dir=whole", "--eval_interval=1000") == 0
    assert train_here("--max_iters=11", "--out_dir=parts", "--eval_interval=1000") == 0
    (here / "parts" / "losses.jsonl").write_bytes(
        b"".join((here / "parts" / "losses.jsonl").read_bytes().splitlines(keepends=True)[:-1])
    )  # the look at the end of the shorter run
    train_by([*TORCHRUN, "1"], "--max_iters=30", "--out_dir=parts", "--eval_interval=1000")
    require_same("parts", "whole")


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_run_of_torchelastic_goes_on_to_the_bits_of_python(here: Path) -> None:
    """Without dropout, which each way draws in a manner of its own."""
    words = ["--dropout=0.0"]
    assert train_here("--max_iters=30", "--out_dir=whole", *words) == 0
    train_by([*ELASTIC_RUN, "1"], "--max_iters=11", "--out_dir=parts", *words)
    train_by([*ELASTIC_RUN, "1"], "--max_iters=30", "--out_dir=parts", *words)
    require_same("parts", "whole")
    kept = [info.name.step for info in list_checkpoints(here / "parts" / "elastic")]
    assert kept[0] == 30


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_on_a_stream_of_files_goes_on_at_its_place_to_the_same_bits(here: Path) -> None:
    for number in range(3):
        (here / f"{number}.txt").write_text(TEXT[: 700 * (number + 1)].replace("; ", "\n"))
    write_corpus(here / "data" / "fox", TEXT + "\n", source="a test")
    words = ["--stream=*.txt", "--stream_shards=3", "--dropout=0.0", "--eval_interval=1000"]
    train_by([*ELASTIC_RUN, "2"], "--max_iters=60", "--out_dir=whole", *words)  # more than an epoch
    for max_iters in (17, 60):
        train_by([*ELASTIC_RUN, "2"], f"--max_iters={max_iters}", "--out_dir=parts", *words)
    losses = [[record for record in read_losses(here / out) if "loss" in record] for out in ("whole", "parts")]
    assert iterations(losses[0]) == list(range(60))
    assert losses[0] == losses[1]
    assert losses[0][-1]["loss"] < losses[0][0]["loss"]


# --- sharded --------------------------------------------------------------------------------------


def require_close(out: str, other: str) -> None:
    """Each iteration's loss is there once, and two runs agree as far as the order of sums leaves it open."""
    ours, theirs = read_losses(Path(out)), read_losses(Path(other))
    assert [record["iteration"] for record in ours] == [record["iteration"] for record in theirs]
    for record, expected in zip(ours, theirs, strict=True):
        assert record == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(weights(out), weights(other), rtol=1e-3, atol=1e-4)


def kill_one_worker(launcher: subprocess.Popen[str], out: str, after: int) -> None:
    """SIGKILL for one of the launcher's processes that train, when so many lines of losses are in the file."""
    file = Path(out) / "losses.jsonl"
    while not file.exists() or len(file.read_bytes().splitlines()) < after:
        assert launcher.poll() is None, "the run has ended"
        time.sleep(0.05)
    for process in psutil.Process(launcher.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if str(TRAIN) in words and "torchelastic.launch" not in words:
                process.send_signal(signal.SIGKILL)
                return
    raise AssertionError("there is no worker")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_sharded_run_that_loses_a_worker_has_the_losses_of_one_process(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data and the first values are the same on any number of workers; dropout is not."""
    words = ["--max_iters=60", "--log_interval=1", "--dropout=0.0", "--n_layer=2"]
    assert train_here(*words, "--out_dir=whole") == 0
    command = [*ELASTIC_RUN, "3", str(TRAIN), *SMALL, *words, "--out_dir=killed", "--sharded=True"]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        kill_one_worker(launcher, "killed", after=8)
        output = launcher.communicate(timeout=200)[0]
    assert launcher.returncode == 0, output[-4000:]
    assert "SIGKILL" in output, "no worker was killed while it trained"
    assert "Full backward hook" not in output, "nobody who trains on tokens is to be warned of them"
    require_close("killed", "whole")
    assert iterations(read_losses(here / "killed")) == list(range(60))
    capsys.readouterr()
    assert sample.main(["--out_dir=killed", "--start=the ", "--max_new_tokens=30"]) == 0
    assert capsys.readouterr().out.startswith("the ")


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "words",
    [
        ["--gradient_accumulation_steps=7", "--batch_size=1", "--eval_iters=1"],  # some have fewer micro batches
        ["--stream=*.txt", "--stream_shards=3"],
        ["--dtype=bfloat16"],
    ],
    ids=["uneven", "stream", "bfloat16"],
)
def test_sharded_or_not_a_run_has_the_same_losses(here: Path, words: list[str]) -> None:
    write_corpus(here / "data" / "fox", TEXT + "\n", source="a test")
    for number in range(3):
        (here / f"{number}.txt").write_text(TEXT.replace("; ", "\n"))
    for out, sharded in (("whole", "False"), ("parts", "True")):
        train_by([*ELASTIC_RUN, "3"], "--max_iters=25", f"--out_dir={out}", f"--sharded={sharded}", *words)
    require_close("parts", "whole")


# --- deadlines ------------------------------------------------------------------------------------


def simulate(command: Sequence[str], *words: str, patience_s: float = 110.0) -> dict[str, Any]:
    line = [*SIMULATOR, "--cmd", shlex.join(command), *words]
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=patience_s)
    assert done.stdout, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["steps_lost"] == 0, done.stderr[-4000:]
    return report


def require_continuous(lives: Sequence[dict[str, Any]]) -> None:
    """Each life went on where the one before had stopped, and none failed."""
    assert [life["resumed_step"] for life in lives] == [0, *(life["committed_step"] for life in lives[:-1])]
    assert {life["how"] for life in lives} <= {"stopped", "ended", "finished"}


def start_s(here: Path) -> float:
    """How long a process takes here and now until it can begin; a life has to be longer than that."""
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, str(TRAIN), "--dataset=cat"], cwd=here, env=ENVIRONMENT, capture_output=True)
    assert done.returncode == 2
    return time.monotonic() - began_s


@pytest.mark.long
def test_two_short_lives_have_the_bits_of_one_long_one(here: Path) -> None:
    words = ["--max_iters=1000000", "--eval_interval=100000", "--redundant_time=1", "--save_ckpt_time=0.5"]
    command = [sys.executable, str(TRAIN), *SMALL, *words, "--out_dir=lives"]
    report = simulate(command, "--timeout", f"{4 + 2 * start_s(here):.1f}", "--max-restarts", "1")
    require_continuous(report["lives"])
    assert not report["finished"]
    assert [life["how"] for life in report["lives"]].count("finished") == 0
    done = int(report["lives"][-1]["committed_step"])
    assert 0 < report["lives"][0]["committed_step"] < done
    # as if it had been alone on a machine that never ends
    assert train_here(f"--max_iters={done}", "--eval_interval=100000", "--out_dir=whole") == 0
    assert read_losses(here / "lives") == read_losses(here / "whole")[:-1]  # but for the look at the end
    assert all(torch.equal(value, weights("whole")[name]) for name, value in weights("lives").items())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("launcher", "timeout_s", "restarts"),
    [pytest.param(TORCHRUN, 45, 1, id="torchrun"), pytest.param(ELASTIC_RUN, 20, 3, id="torchelastic")],
)
def test_two_ranks_lose_no_step_however_often_they_are_stopped(
    here: Path, launcher: Sequence[str], timeout_s: int, restarts: int
) -> None:
    words = ["--max_iters=1000000", "--eval_interval=400", "--redundant_time=3", "--save_ckpt_time=1"]
    command = [*launcher, "2", str(TRAIN), *SMALL, *words, "--out_dir=lives"]
    life_s = max(timeout_s, 6 + 4 * start_s(here))  # longer only where the machine has so much else to do
    report = simulate(
        command, "--timeout", f"{life_s:.1f}", "--max-restarts", str(restarts), patience_s=100.0 + 6 * life_s
    )
    require_continuous(report["lives"])
    assert len(report["lives"]) == 1 + restarts
    done = int(report["lives"][-1]["committed_step"])
    line = [*launcher, "2", str(TRAIN), *SMALL, f"--max_iters={done}", "--eval_interval=400", "--out_dir=whole"]
    ended = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr[-4000:]
    lives, whole = read_losses(here / "lives"), read_losses(here / "whole")
    assert lives == whole[: len(lives)]
    assert len(lives) > 0.9 * done
    assert all(torch.equal(value, weights("whole")[name]) for name, value in weights("lives").items())


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--dataset=cat"], "no data in data/cat: run `python prepare.py --name cat`"),
        (["--batchsize=3"], "did you mean batch_size"),
        (["--n_embd=32"], "another model: n_embd was 16 and is 32"),
        (["--bias=True", "--n_layer=2"], "n_layer was 1 and is 2, bias was False and is True"),
        (["--init_from=scratch"], "give --init_from=auto to go on"),
        (["--init_from=resume", "--out_dir=empty"], "there is no checkpoint in empty"),
        (["--mode=elastic"], "holds checkpoints of --mode=plain"),
        (["--dtype=float16"], "needs a GPU"),
        (["--stream=*.txt", "--stream_shards=3"], "stream is for `torchelastic run`"),
        (["--sharded=True"], "sharded is for `torchelastic run`"),
        (["--block_size=500"], "too few for sequences of block_size=500"),
    ],
)
def test_bad_input_is_named_with_the_remedy_and_changes_nothing(
    here: Path, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here("--max_iters=3") == 0
    before = {path: path.stat().st_mtime_ns for path in (here / "out").rglob("*")}
    assert train_here("--max_iters=6", *words) == 2
    assert complaint in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in (here / "out").rglob("*")} == before


def test_other_data_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_here("--max_iters=3") == 0
    write_corpus(here / "data" / "fox", TEXT.replace("q", "Q"), source="a test")
    assert train_here("--max_iters=6") == 2
    assert "the data has other characters" in capsys.readouterr().err
