"""A script of Accelerate as its users write them, with faults: see `test_elastic_accelerator.py`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.tracking import GeneralTracker, on_main_process
from torch.utils.data import DataLoader, TensorDataset

import torchelastic
from tests.cluster.elastic_job import EventLog
from torchelastic.adapters.elastic_accelerator import ElasticAccelerator
from torchelastic.checkpoint import EverySteps, TieredCheckpointManager
from torchelastic.checkpoint.store import MemoryTier
from torchelastic.observe.ledger.meter import this_worker
from torchelastic.testing.faults import FaultPlan

SAMPLES, EPOCHS, FEATURES = 22, 4, 5


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(torch.arange(SAMPLES), rows, torch.sin(rows.sum(dim=1, keepdim=True)))


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


class Tracker(GeneralTracker):  # type: ignore[misc, unused-ignore]
    """Writes down when it begins, and what it is told."""

    name, requires_logging_directory = "events", False

    def __init__(self, log: EventLog) -> None:
        super().__init__()
        self._log = log

    @property
    def tracker(self) -> EventLog:
        return self._log

    @on_main_process  # type: ignore[untyped-decorator, unused-ignore]
    def start(self) -> None:
        self._log("tracker begins")

    @on_main_process  # type: ignore[untyped-decorator, unused-ignore]
    def store_init_configuration(self, values: Any) -> None:
        del values

    @on_main_process  # type: ignore[untyped-decorator, unused-ignore]
    def log(self, values: dict[str, Any], step: int | None, **_: Any) -> None:
        self._log("tracked", step=step, **values)


class Job:
    """What the script holds."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.log, self.plan = EventLog(options.out), FaultPlan(options.out)
        self.accelerator = ElasticAccelerator(cpu=True, log_with=Tracker(self.log))
        self.accelerator.init_trackers("job", config={"samples": SAMPLES})
        self.accelerator.log({"error": 1.0}, step=0)
        if options.scaled:
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        self.data = make_data()
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.loader = self.accelerator.loader(
            DataLoader(self.data, batch_size=2, shuffle=True), epochs=EPOCHS, global_batch_size=8
        )
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=len(self.loader) * EPOCHS)
        self.model, self.optimizer, self.scheduler, self.evaluation = self.accelerator.prepare(
            model, optimizer, scheduler, DataLoader(self.data, batch_size=2)
        )
        self.accelerator.extra["trained"] = 0
        self.accelerator.extra["losses"] = []
        self.accelerator.extra["evaluated"] = []

    def reach(self, phase: str, number: int) -> None:
        self.plan.reach(phase, number, self.accelerator.process_index)

    def train_step(self, step: Any) -> None:
        accelerator, losses = self.accelerator, []
        if step.number >= len(self.loader) * EPOCHS // 2 and accelerator.num_processes < self.options.wait_for:
            time.sleep(0.7)  # a run gives up after 100 failures
            raise torchelastic.RetryableException("waits for a newcomer")
        time.sleep(self.options.step_s)
        for numbers, rows, targets in step:
            own = numbers.tolist() if step.samples else []
            # here, since a step counts where a worker is lost that has given its gradients
            self.log("trained", step=step.number, round=this_worker().position().round, samples=own, epoch=step.epoch)
            with accelerator.accumulate(self.model):
                self.optimizer.zero_grad()  # at the beginning, as many scripts have it
                self.reach("forward", step.number)
                losses_of = (self.model(rows) - targets).square()
                if self.options.sums:
                    accelerator.backward(losses_of.sum(), len(rows))
                else:
                    accelerator.backward(losses_of.mean())
                losses.append(accelerator.gather(losses_of.detach()))
                if accelerator.sync_gradients:
                    self.reach("backward", step.number)
                    if accelerator.scaler is not None:
                        accelerator.scaler.unscale_(self.optimizer.optimizer)  # Accelerate does it with fp16 only
                    accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.reach("optimizer", step.number)
                self.optimizer.step()
                self.scheduler.step()
        accelerator.extra["trained"] += 1
        accelerator.extra["losses"].append(round(float(torch.cat(losses).mean()), 9))
        self.reach("end", step.number)

    def evaluate(self, number: int) -> None:
        self.model.eval()
        with torch.no_grad():
            seen, errors = [], []
            for numbers, rows, targets in self.evaluation:
                self.reach("evaluate", number)
                kept = self.accelerator.gather_for_metrics((numbers, (self.model(rows) - targets).square()))
                seen.append(kept[0])
                errors.append(kept[1])
        self.model.train()
        count, error = len(set(torch.cat(seen).tolist())), float(torch.cat(errors).mean())
        assert count == sum(map(len, seen)) == SAMPLES, "a sample is missing, or counts twice"
        self.accelerator.log({"error": error}, step=number)
        self.accelerator.extra["evaluated"].append(number)
        if self.options.saved:
            self.accelerator.save_state(str(self.options.out / "state"))
        self.log(
            "evaluated",
            step=number,
            error=error,
            round=this_worker().position().round,
            world=self.accelerator.num_processes,
        )

    def run(self) -> None:
        accelerator, out = self.accelerator, self.options.out
        if self.options.saved and (out / "state").exists():
            accelerator.load_state(str(out / "state"))
            self.log("loaded")
        memory = self.options.memory
        checkpoint = memory and TieredCheckpointManager([MemoryTier(str(memory))], policy=EverySteps(2), run_id="job")
        for step in accelerator.steps(self.loader, between=self.evaluate, between_every=3, checkpoint=checkpoint):
            with step:
                self.train_step(step)
            if step.committed:
                self.log("step", step=step.number, rate=self.scheduler.get_last_lr()[0])
        flat = torch.cat([one.detach().reshape(-1) for one in self.model.parameters()])
        torch.save(flat, out / f"weights-{self.log.worker}-{accelerator.process_index}.pt")
        scale = accelerator.scaler.get_scale() if accelerator.scaler else 1.0
        self.log(
            "finished",
            trained=accelerator.extra["trained"],
            losses=accelerator.extra["losses"],
            scale=scale,
            evaluated=accelerator.extra["evaluated"],
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--memory", type=Path)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--wait-for", type=int, default=0, help="workers, from half of the steps on")
    for flag in ("--sums", "--scaled", "--saved"):
        parser.add_argument(flag, action="store_true")
    torch.set_num_threads(1)
    Job(parser.parse_args()).run()


if __name__ == "__main__":
    main()
