"""A script as a newcomer has it after the first hour: README's program, with something more in it."""

from __future__ import annotations

#: README's first program with a step that does something more (IN_STEP) and ends with a line of its own.
TRAIN = """
import os, sys, time, torch, torchelastic
from torchelastic import metrics
from torchelastic.checkpoint import EverySteps, FileSystemCheckpointManager, set_checkpoint_manager

torch.set_num_threads(1)
dataset = torch.utils.data.TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sampler = torchelastic.ElasticBatchSampler(dataset, global_batch_size=32, epochs=EPOCHS)
loader = torchelastic.ElasticLoader(dataset, sampler)
state = torchelastic.ModelState(model, optimizer, sampler=sampler)
checkpoint = None
PREPARES

def train_step(state):
    inputs, targets = next(loader)
    loss = torch.nn.functional.mse_loss(state.model(inputs), targets)
    state.optimizer.zero_grad()
    loss.backward()
    state.optimizer.step()
    IN_STEP

coordinator = torchelastic.CoordinatorP2P("gloo")
torchelastic.train(coordinator, train_step, state, checkpoint=checkpoint)
print("trained", state.step, flush=True)
"""


def script(*, in_step: str = "pass", prepares: str = "", epochs: int = 2) -> str:
    """The program.

    Args:
        in_step: a statement at the end of each step, before it is committed.
        prepares: statements before the first one.
        epochs: of 8 steps each.
    """
    return TRAIN.replace("IN_STEP", in_step).replace("PREPARES", prepares).replace("EPOCHS", str(epochs))
