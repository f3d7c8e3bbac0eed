"""Scripts for torchrun, as users of DDP and of frameworks have them; each trains on two workers for a few steps."""

DDP = """
import os, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
print("gradient", model.module.weight.grad.tolist(), "of", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""

LIGHTNING = """
import torch
from lightning.pytorch import LightningModule, Trainer

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=3, **quiet)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=8))
print("rank", trainer.global_rank, "of", trainer.world_size, "step", trainer.global_step, flush=True)
"""

ACCELERATE = """
import accelerate, torch

accelerator = accelerate.Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(48, 4), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
step = 0
for batch in loader:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    step += 1
print("rank", accelerator.process_index, "of", accelerator.num_processes, "step", step, flush=True)
accelerator.end_training()
"""

TRANSFORMERS = """
import os, sys, torch
os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}

data = [{"x": torch.randn(4)} for _ in range(64)]
arguments = TrainingArguments(
    sys.argv[1], max_steps=3, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
)
trainer = Trainer(Model(), arguments, train_dataset=data)
trainer.train()
print("rank", arguments.process_index, "of", arguments.world_size, "step", trainer.state.global_step, flush=True)
"""
