"""What an ElasticAccelerator refuses before it trains, and what it does alone, in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="the adapter for Accelerate: pip install 'torchelastic[transformers]'")

SCRIPT = """
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler
{before}
from torchelastic.adapters.elastic_accelerator import ElasticAccelerator
from accelerate import DataLoaderConfiguration

torch.set_num_threads(1)
torch.manual_seed(0)
rows = torch.randn(10, 3, dtype=torch.float64)
data = TensorDataset(rows, rows.sum(dim=1, keepdim=True))
accelerator = ElasticAccelerator(cpu=True, gradient_accumulation_steps=2{options})
{made}
model = torch.nn.Linear(3, 1).double()
start = [one.detach().clone() for one in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
loader = accelerator.loader({data}, epochs=2)
{loaded}
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
seen, tries = [], []
{prepared}
for step in accelerator.steps(loader, between=seen.append):
    with step:
        tries.append(step.number)
        for inputs, targets in step:
            with accelerator.accumulate(model):
                loss = (model(inputs) - targets).square().mean()
                {backward}
                norm = accelerator.clip_grad_norm_(model.parameters(), 100.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
{after}
"""
BY_HAND = """
other = torch.nn.Linear(3, 1).double()
with torch.no_grad():
    for parameter, value in zip(other.parameters(), start):
        parameter.copy_(value)
sgd = torch.optim.SGD(other.parameters(), lr=0.1)
by_hand = torch.optim.lr_scheduler.StepLR(sgd, 2)
for epoch in range(2):
    for begin in (0, 4, 8):
        sgd.zero_grad()
        (other(rows[begin:begin + 4]) - data.tensors[1][begin:begin + 4]).square().mean().backward()
        sgd.step()
        by_hand.step()
for mine, expected in zip(model.parameters(), other.parameters()):
    torch.testing.assert_close(mine, expected)
assert scheduler.get_last_lr() == by_hand.get_last_lr(), scheduler.get_last_lr()
assert seen == [3, 6], seen
print("as by hand", tries)
"""
ROWS_WITHOUT_LENGTH = "DataLoader(type('Rows', (IterableDataset,), {'__iter__': iter})())"
FAILS_ONCE = """
has_failed = []
def fails_once(*_):
    if scheduler.scheduler.last_epoch == 3 and not has_failed:
        has_failed.append(True)
        raise RuntimeError("fails once")
optimizer.optimizer.register_step_pre_hook(fails_once)
"""


def ran(**parts: str) -> subprocess.CompletedProcess[str]:
    plain = {
        "before": "", "options": "", "made": "", "data": "DataLoader(data, batch_size=2)", "loaded": "",
        "prepared": "", "backward": "accelerator.backward(loss)", "after": "",
    }  # fmt: skip
    text = SCRIPT.format(**plain | parts)
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.long
def test_alone_it_trains_global_batches_as_they_are() -> None:
    done = ran(after=BY_HAND)
    assert "as by hand [0, 1, 2, 3, 4, 5]" in done.stdout, done.stderr[-3000:]


@pytest.mark.long
@pytest.mark.parametrize("made", ["", "accelerator.scaler = torch.amp.GradScaler('cpu', init_scale=4.0)"])
def test_an_error_inside_the_optimizer_is_undone(made: str) -> None:
    done = ran(made=made, prepared=FAILS_ONCE, after=BY_HAND)
    assert "as by hand [0, 1, 2, 3, 3, 4, 5]" in done.stdout, done.stderr[-3000:]


@pytest.mark.long
def test_losses_may_be_sums_with_a_count() -> None:
    done = ran(backward="accelerator.backward(loss * len(inputs), len(inputs))", after=BY_HAND)
    assert "as by hand" in done.stdout, done.stderr[-3000:]


@pytest.mark.long
def test_between_steps_the_run_may_end() -> None:
    done = ran(
        prepared="seen = type('Seen', (list,), {'append': lambda self, step: step == 3})()", after="print(tries)"
    )
    assert "[0, 1, 2]\n" in done.stdout, done.stderr[-3000:]


@pytest.mark.long
def test_a_step_that_is_skipped_changes_nothing() -> None:
    skips = "step.skip('too large a loss') if step.number in (1, 4) else accelerator.backward(loss)"
    by_hand = BY_HAND.replace("for begin in (0, 4, 8):", "for begin in ((0, 8), (0, 8))[epoch]:")
    done = ran(backward=skips, after=by_hand)
    assert "as by hand [0, 1, 2, 3, 4, 5]" in done.stdout, done.stderr[-3000:]


@pytest.mark.long
def test_saves_with_automatic_names_go_on_behind_those_that_are_there(tmp_path: Path) -> None:
    """As a run that has resumed, or a newcomer that has become rank 0, finds them."""
    (tmp_path / "checkpoints" / "checkpoint_4").mkdir(parents=True)
    done = ran(
        before="from accelerate.utils import ProjectConfiguration",
        options=f", project_config=ProjectConfiguration({str(tmp_path)!r}, automatic_checkpoint_naming=True)",
        prepared="def save(step): accelerator.save_state()\nseen = type('Seen', (), {'append': staticmethod(save)})()",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_4", "checkpoint_5", "checkpoint_6"]


ONE = "init_method='tcp://127.0.0.1:0', rank=0, world_size=1"
SHARED = "ElasticAccelerator cannot go on in the running process with "


@pytest.mark.long
@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"options": ", fsdp_plugin=object()"}, SHARED + "FSDP"),
        ({"before": "import os; os.environ['ACCELERATE_USE_DEEPSPEED'] = 'true'"}, SHARED + "DeepSpeed"),
        (
            {
                "before": "from accelerate import DataLoaderConfiguration",
                "options": ", dataloader_config=DataLoaderConfiguration(dispatch_batches=True)",
            },
            SHARED + "dispatch_batches=True",
        ),
        ({"options": ", dynamo_backend='inductor'"}, SHARED + "dynamo_backend"),
        ({"options": ", step_scheduler_with_optimizer=False"}, SHARED + "step_scheduler_with_optimizer=False"),
        (
            {"before": f"torch.distributed.init_process_group('gloo', {ONE})"},
            "a process group was formed before",
        ),
        ({"data": "accelerator.prepare(DataLoader(data))"}, "leave the training data out of prepare()"),
        ({"data": ROWS_WITHOUT_LENGTH}, "the training data is an IterableDataset"),
        ({"data": "DataLoader(data, sampler=WeightedRandomSampler([1.0] * 10, 10))"}, "by a WeightedRandomSampler"),
        ({"loaded": "loader = DataLoader(data)"}, "steps() takes what accelerator.loader(train_dataloader) gives"),
        ({"loaded": "list(accelerator.steps(loader))"}, "steps() trains what was prepared"),
        ({"prepared": "accelerator.prepare(torch.nn.Linear(1, 1))"}, "a second one was prepared"),
        ({"prepared": "accelerator.backward(torch.zeros(1))"}, "backward() belongs into a step"),
        ({"prepared": "accelerator.skip_first_batches(loader, 1)"}, "leave skip_first_batches out"),
        ({"prepared": "next(iter(loader))"}, "is iterated by steps"),
        ({"backward": "loss.backward()"}, "left without accelerator.backward(loss)"),
        ({"backward": "accelerator.backward(loss); accelerator.backward(loss)"}, "was called twice for one batch"),
        ({"backward": "accelerator.backward(loss, retain_graph=True)"}, "does not take retain_graph"),
        ({"backward": "accelerator.backward(loss); break"}, "left before its batches were all used"),
    ],
)  # fmt: skip
def test_what_would_not_be_kept_is_refused_by_name(parts: dict[str, str], named: str) -> None:
    done = ran(**parts)
    assert done.returncode == 1
    [*_, last] = done.stderr.strip().splitlines()
    assert "UnfitError: " in last, done.stderr[-3000:]
    assert named in last
