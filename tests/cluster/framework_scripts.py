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

#: Goes on from memory; with the word "killed", rank 1 is killed in its first life.
LIGHTNING_SHARDED = """
import os, signal, sys, torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torchelastic.adapters.lightning import MemoryCheckpointCallback, wrap_trainer_and_auto_resume
from torchelastic.data import ElasticBatchSampler, EpochLoader

torch.set_num_threads(1)
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))

    def configure_model(self):
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, _):
        if "killed" in sys.argv and (rank, life, self.trainer.global_step) == (1, 0, 7):
            os.kill(os.getpid(), signal.SIGKILL)
        print("rank", rank, "life", life, "step", self.trainer.global_step, flush=True)
        return self.net(batch).square().mean()

    def on_train_end(self):
        weights = torch.cat([parameter.full_tensor().reshape(-1) for parameter in self.parameters()])
        print("weights", weights.detach().double().abs().sum().item(), flush=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)

samples = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(
    accelerator="cpu", devices=2, max_epochs=1, use_distributed_sampler=False, **quiet,
    strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    callbacks=[MemoryCheckpointCallback(sys.argv[1], every_n_steps=1)],
)
auto_resume = wrap_trainer_and_auto_resume(trainer, sys.argv[1], async_save=False)
path = auto_resume.ckpt_path()
loader = EpochLoader(samples, ElasticBatchSampler(samples, global_batch_size=8, epochs=1, seed=1))
trainer.fit(Model(), loader, ckpt_path=path)
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
