"""The training job of the battery tests: mixed precision, two optimizers, accumulation, an EMA, as users combine them.

`one_step` is the user's train step. The tests run the very same function in one process for a reference.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchelastic
from tests.cluster.elastic_job import (
    FEATURES,
    EventLog,
    RecordedCoordinator,
    RecordedState,
    hold_until,
    make_dataset,
)
from torchelastic.data import ElasticBatchSampler, ElasticLoader
from torchelastic.model.world_change import WorldChange
from torchelastic.p2p import step_agreement
from torchelastic.testing.faults import FaultPlan

SAMPLES, BATCH, EPOCHS, SEED = 120, 12, 4, 3
#: The step whose gradients are infinite where there is a scaler.
INFINITE_STEP = 4
BATTERIES = ("scaler", "two", "accumulation", "ema", "batchnorm", "compile", "tokens")


class Net(torch.nn.Module):
    """Two parts with a loss each; the second learns from what the first has become, as in a GAN."""

    def __init__(self, batchnorm: bool) -> None:
        super().__init__()
        norm: torch.nn.Module = torch.nn.BatchNorm1d(8) if batchnorm else torch.nn.Identity()
        self.first = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), norm, torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.second = torch.nn.Sequential(torch.nn.Linear(FEATURES + 1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def forward(self, part: str, inputs: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.first(inputs)
        if part == "first":
            return first
        seen = first.detach() if part == "second" else first
        outputs: torch.Tensor = self.second(torch.cat([inputs, seen], dim=1))
        return outputs


class Setup:
    """What a user builds."""

    def __init__(self, batteries: Sequence[str], seed: int) -> None:
        torch.manual_seed(seed)
        net = Net("batchnorm" in batteries).double()
        self.two = "two" in batteries
        self.optimizers = (
            {"first": sgd(net.first, 0.05), "second": torch.optim.Adam(net.second.parameters(), lr=0.01)}
            if self.two
            else {"all": sgd(net, 0.05)}
        )
        self.extra: dict[str, Any] = {"seen": 0}
        if "scaler" in batteries:
            self.extra["scaler"] = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        if "ema" in batteries:
            self.extra["ema"] = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]  # torch has no types here
        self.counts = "tokens" in batteries
        self.accumulation = 2 if "accumulation" in batteries else 1
        self.net = net
        self.module: Any = torch.compile(net) if "compile" in batteries else net

    @property
    def parts(self) -> list[tuple[str, torch.optim.Optimizer]]:
        return list(self.optimizers.items())


def sgd(module: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9)


Batches = Sequence[tuple[torch.Tensor, torch.Tensor]]


def tokens_of(inputs: torch.Tensor) -> torch.Tensor:
    """How many tokens a sample has: 0 to 5."""
    return (inputs[:, :1].abs() * 2).round().clamp(max=5)


def one_step(
    setup: Setup,
    model: Callable[..., torch.Tensor],
    batches: Batches,
    step: int,
    *,
    no_sync: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    backward: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    reach: Callable[[str], None] = lambda _phase: None,
) -> None:
    """The train step, on a module or on its wrapper; `reach` is told where it is."""
    scaler = setup.extra.get("scaler", torch.amp.GradScaler("cpu", enabled=False))
    counted = torch.cat([tokens_of(inputs) for inputs, _ in batches]).sum()
    for name, optimizer in setup.parts:
        setup.net.zero_grad()
        for number, (inputs, targets) in enumerate(batches):
            with contextlib.nullcontext() if number == len(batches) - 1 else no_sync():
                errors = (model(name, inputs) - targets).square()
                loss = (errors * tokens_of(inputs)).sum() if setup.counts else errors.mean() / len(batches)
                if step == INFINITE_STEP and scaler.is_enabled():
                    loss = loss * torch.inf
                reach(f"{name} backward {number}")
                if backward is not None and setup.counts:
                    backward(scaler.scale(loss), tokens_of(inputs).sum())
                else:
                    scaler.scale(loss / counted if setup.counts else loss).backward()
        scaler.unscale_(optimizer)
        reach(f"{name} optimizer")
        scaler.step(optimizer)
    scaler.update()
    if "ema" in setup.extra:
        setup.extra["ema"].update_parameters(setup.net)


def result_of(setup: Setup) -> dict[str, torch.Tensor]:
    """All that must be equal in the end."""
    result = {f"net.{name}": value for name, value in setup.net.state_dict().items()}
    if "scaler" in setup.extra:
        values = [float(value) for value in setup.extra["scaler"].state_dict().values()]
        result["scaler"] = torch.tensor(values, dtype=torch.float64)
    if "ema" in setup.extra:
        result |= {f"ema.{name}": value for name, value in setup.extra["ema"].state_dict().items()}
    for name, optimizer in setup.parts:
        for number, values in optimizer.state_dict()["state"].items():
            result |= {f"optimizer.{name}.{number}.{key}": torch.as_tensor(value) for key, value in values.items()}
    return result


def make_sampler() -> ElasticBatchSampler:
    return ElasticBatchSampler(SAMPLES, BATCH, epochs=EPOCHS, seed=SEED)


def warm_up(setup: Setup) -> None:
    """Compile before asking in: the others wait for a step, not for a compiler."""
    for name, _ in setup.parts:
        setup.module(name, torch.randn(BATCH // 2, FEATURES, dtype=torch.float64)).sum().backward()
    setup.net.zero_grad()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batteries", nargs="*", default=[], choices=BATTERIES)
    parser.add_argument("--loop", choices=["train", "steps"], default="train")
    parser.add_argument("--wait-for-newcomer-at", type=int, nargs="*", default=[], help="steps")
    parser.add_argument("--full-world", type=int, default=2)
    parser.add_argument("--timeout-ms", type=int, default=20000)
    return parser.parse_args()


def main() -> None:
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    torch.set_num_threads(1)
    log, plan = EventLog(options.out), FaultPlan(options.out)
    setup = Setup(options.batteries, seed=log.worker + 2)
    if "compile" in options.batteries:
        warm_up(setup)
    sampler = make_sampler()
    loader = ElasticLoader(make_dataset(SAMPLES), sampler)
    given: Any = setup.optimizers if setup.two else setup.optimizers["all"]
    state = RecordedState(
        setup.module,
        given,
        sampler=sampler,
        extra=setup.extra,
        on_out_of_sync="raise",
        find_unused_parameters=setup.two,
    )
    coordinator = RecordedCoordinator(process_group_timeout=options.timeout_ms)
    state.log, state.plan, state.coordinator, coordinator.log, coordinator.plan = log, plan, coordinator, log, plan
    step_agreement.interval_steps = lambda *_: 1
    changes: list[WorldChange] = []
    state.on_world_change(changes.append)

    def train_step(state: RecordedState) -> None:
        if state.step in options.wait_for_newcomer_at and coordinator.world_size < options.full_world:
            hold_until(lambda: coordinator.rendezvous.num_nodes_waiting() > 0, "a newcomer")
        batches = [next(loader) for _ in range(setup.accumulation)]
        one_step(
            setup, state.model, batches, state.step,
            no_sync=state.no_sync, backward=state.backward,
            reach=lambda phase: plan.reach(phase, state.step, coordinator.rank),
        )  # fmt: skip
        state.extra["seen"] += sum(share.global_samples for share in sampler.pending)
        plan.reach("tail", state.step, coordinator.rank)

    if options.loop == "train":
        torchelastic.train(coordinator, train_step, state)
    else:
        for step in torchelastic.steps(coordinator, state):
            with step:
                train_step(state)
    torch.save(result_of(setup), options.out / f"battery-{os.getpid()}.pt")
    told = [[change.before, change.now] for change in changes]
    log("finished", step=state.step, seen=state.extra["seen"], changes=told)


if __name__ == "__main__":
    main()
