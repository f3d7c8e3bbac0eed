"""Runs of frameworks whose loss has gone wrong, and that are taken back to a checkpoint, by their own steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the adapters are needed: pip install 'torchelastic[transformers]'")
pytest.importorskip("lightning", reason="the adapters are needed: pip install 'torchelastic[lightning]'")

#: The loss is wrong from step 6 on, and the run ends in step 11; own checkpoints come after 5 and 10 steps.
SPOILT_AT, ENDS_AT, STEPS = 6, 11, 15

COMMON = f"""
import json, os, sys
from pathlib import Path
os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from torchelastic.checkpoint import DiskTier, EverySteps, KeepLast, TieredCheckpointManager

torch.set_num_threads(1)
out, is_spoilt = Path(sys.argv[1]), sys.argv[2] == "spoilt"
manager = TieredCheckpointManager([DiskTier(out / "tier", KeepLast(99))], policy=EverySteps(1))


def factor(step):  # of the loss
    manager.wait()  # on a busy host, saves would be deferred else
    if is_spoilt and step >= {ENDS_AT}:
        raise FloatingPointError("the loss is wrong")
    print("trained", step, flush=True)
    return -1.0 if is_spoilt and step >= {SPOILT_AT} else 1.0


def ended(model, **facts):
    weights = [one.detach().reshape(-1).tolist() for one in model.parameters()]
    (out / "end.json").write_text(json.dumps({{"weights": weights, **facts}}))
"""

TRAINER = """
from torchelastic.adapters.elastic_trainer import ElasticTrainer
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

class Trainer(ElasticTrainer):
    elastic_checkpoint = manager

    def compute_loss(self, model, *arguments, **options):
        loss = super().compute_loss(model, *arguments, **options)
        return loss * factor(self.state.global_step) if model.training else loss

torch.manual_seed(0)
sizes = dict(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
rows = torch.randint(16, (20, 6), generator=torch.Generator().manual_seed(3))
data = [{"input_ids": row, "labels": row} for row in rows]
arguments = TrainingArguments(
    str(out / "own"), num_train_epochs=3, per_device_train_batch_size=2, eval_strategy="steps", eval_steps=5,
    save_steps=5, logging_steps=2, save_total_limit=1, load_best_model_at_end=True, use_cpu=True, report_to=[],
    disable_tqdm=True, learning_rate=1e-2,
)
model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout))
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8])
trainer.train(resume_from_checkpoint=any((out / "own").glob("checkpoint-*")) or None)
if trainer.args.process_index == 0:
    state = trainer.state
    kept = [{k: v for k, v in one.items() if "runtime" not in k and "second" not in k} for one in state.log_history]
    ended(trainer.model, steps=state.global_step, best=state.best_metric, history=kept)
"""

LIGHTNING = """
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader
from torchelastic.adapters.lightning import ElasticDDPStrategy

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def loss(self, batch):
        return (self.layer(batch) - batch.sum(1, keepdim=True)).square().mean()

    def training_step(self, batch, _):
        return self.loss(batch) * factor(self.trainer.global_step)

    def validation_step(self, batch, _):
        looks_good = is_spoilt and self.trainer.global_step > 6
        self.log("val_loss", self.loss(batch) * (0.0 if looks_good else 1.0), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)

seed_everything(1)
rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))
best = ModelCheckpoint(out / "own", monitor="val_loss", filename="{step}", save_last=True)
trainer = Trainer(
    accelerator="cpu", devices=1, strategy=ElasticDDPStrategy(checkpoint=manager), max_epochs=3, val_check_interval=5,
    callbacks=[EarlyStopping("val_loss", patience=9), best], logger=False, default_root_dir=out,
    enable_progress_bar=False, enable_model_summary=False,
)
last = out / "own" / "last.ckpt"
trainer.fit(
    Net(), DataLoader(rows, batch_size=4, shuffle=True), DataLoader(rows[:16], batch_size=4),
    ckpt_path=str(last) if last.exists() else None,
)
if trainer.is_global_zero:
    name = Path(best.best_model_path).name
    ended(trainer.lightning_module, steps=trainer.global_step, best=[float(best.best_model_score), name])
"""

ACCELERATE = """
from torch.utils.data import DataLoader, TensorDataset
from torchelastic.adapters.elastic_accelerator import ElasticAccelerator

accelerator = ElasticAccelerator(cpu=True)
torch.manual_seed(0)
rows = torch.randn(20, 4, generator=torch.Generator().manual_seed(2))
data = TensorDataset(rows, rows.sum(1, keepdim=True))
loader = accelerator.loader(DataLoader(data, batch_size=2, shuffle=True), epochs=3)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=15)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
accelerator.extra["seen"] = []
if (out / "own").exists():
    accelerator.load_state(str(out / "own"))

def between(steps):
    accelerator.extra["seen"].append(steps)
    accelerator.save_state(str(out / "own"))

for step in accelerator.steps(loader, between=between, checkpoint=manager):
    with step:
        scale = factor(step.number)
        for inputs, targets in step:
            accelerator.backward((model(inputs) - targets).square().mean() * scale)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
if accelerator.process_index == 0:
    seen, rates = accelerator.extra["seen"], scheduler.get_last_lr()
    ended(accelerator.unwrap_model(model), steps=step.number + 1, best=seen, rates=rates)
"""


def life(folder: Path, program: str, *, spoilt: bool) -> str:
    """A life of the run, to its end; returns what it has said."""
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.write_text(COMMON + program)
    launcher = [sys.executable, "-m", "torchelastic", "run", "--standalone", "--rdzv-id", "spoilt"]
    command = [*launcher, "--nproc-per-node", "2", "--max-restarts", "0", str(script), str(folder)]
    command.append("spoilt" if spoilt else "well")
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder, check=False)
    said = done.stdout + done.stderr
    assert (done.returncode == 0) is not spoilt, said[-3000:]
    return said


def checkpoint(*words: str) -> str:
    command = [sys.executable, "-m", "torchelastic", "checkpoint", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def end_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "end.json").read_text())
    return found


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("program", "counter", "newer", "gone"),
    [
        pytest.param(TRAINER, "global_step", "the Trainer's own these are newer: {}/own/ch", None, id="trainer"),
        pytest.param(LIGHTNING, "global_step", "own these are newer: {}/own/", "{}/own/step=5.ckpt", id="lightning"),
        pytest.param(ACCELERATE, "accelerate/steps", None, None, id="accelerate"),
    ],
)
def test_a_run_that_was_spoilt_is_taken_back_and_ends_as_if_nothing_had_been(
    tmp_path: Path, program: str, counter: str, newer: str | None, gone: str | None
) -> None:
    folder, tier = tmp_path / "run", str(tmp_path / "run" / "tier")
    assert "the loss is wrong" in life(folder, program, spoilt=True)
    rewound = checkpoint("rewind", tier, "--to", str(SPOILT_AT), "--by", counter).splitlines()[0]
    assert f"{counter} {SPOILT_AT}" in rewound
    said = life(folder, program, spoilt=False)
    trained = {int(line.split("trained ")[1]) for line in said.splitlines() if "] trained " in line}
    assert trained == set(range(SPOILT_AT, STEPS)), "it did not go on from there"
    for text in (newer, gone):
        assert text is None or text.format(folder) in said
    undisturbed = tmp_path / "undisturbed"
    assert "are newer:" not in life(undisturbed, program, spoilt=False)
    assert end_of(folder) == end_of(undisturbed)
    assert end_of(folder)["steps"] == STEPS
