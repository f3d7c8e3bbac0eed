"""The training job of the cluster tests: small, in double precision, and it writes down all that it does.

Each process appends JSON lines to its own file in --out; a line is written in one call, so a SIGKILL loses none.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import torchelastic
from torchelastic.checkpoint import CheckpointManager, FileSystemCheckpointManager, TieredCheckpointManager
from torchelastic.checkpoint.policy import KeepLast, OnSignal
from torchelastic.checkpoint.store import DiskTier, DurableTier, MemoryTier, Tier
from torchelastic.data import ElasticBatchSampler, ElasticLoader
from torchelastic.lifetime import Lifetime, StoppedEarly
from torchelastic.model import transfer
from torchelastic.p2p import CoordinatorP2P, step_agreement
from torchelastic.p2p.hangs import HangPolicy
from torchelastic.p2p.stragglers import StragglerPolicy
from torchelastic.testing.faults import FaultPlan
from torchelastic.worker_stats import SimpleWorkerStats

FEATURES = 6
#: What belongs into the agent and never into a trainer.
AGENTS_MODULES = ("grpc", "google.protobuf", "etcd3")
#: How long a held step waits for what the test is to bring about.
PATIENCE_S = 60.0


class EventLog:
    """One file per process."""

    def __init__(self, folder: Path) -> None:
        worker = os.environ.get("LOCAL_RANK", "x")
        self.worker = -1 if worker == "x" else int(worker)
        self._file = (folder / f"events-{worker}-{os.getpid()}.jsonl").open("ab", buffering=0)
        self("started", restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))

    def __call__(self, event: str, **fields: Any) -> None:
        line = {"e": event, "t": time.monotonic(), "worker": self.worker, "pid": os.getpid(), **fields}
        self._file.write(json.dumps(line).encode() + b"\n")


def make_dataset(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    targets = torch.sin(inputs.sum(dim=1, keepdim=True))
    return TensorDataset(inputs, targets)


def make_model(seed: int, dropout: float, *, batchnorm: bool = False) -> torch.nn.Module:
    torch.manual_seed(seed)
    norm = [torch.nn.BatchNorm1d(16)] if batchnorm else []
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 16), *norm, torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(16, 1)
    ).double()


class RecordedState(torchelastic.ModelState):
    """A ModelState that passes its phases to the fault plan and its commits to the log."""

    log: EventLog
    plan: FaultPlan
    coordinator: CoordinatorP2P
    checkpoint_every = 0
    messages: int | None = None

    def sync(self, world_size: int | None = None, rank: int | None = None) -> None:
        self.plan.reach("sync", self.step, rank)
        self.plan.reach(f"sync-of-{world_size}", self.step, rank)
        self.messages = 0
        try:
            super().sync(world_size, rank)
        finally:
            self.messages = None
        self.log("synced", step=self.step, round=self.round_number, rank=rank, world=world_size)

    def reach_message(self) -> None:
        """One more message of a sync is about to be sent or received here: phases round-3-message-1 and so on."""
        if self.messages is not None:
            self.messages += 1
            self.plan.reach(f"round-{self.round_number}-message-{self.messages}", self.step, self.coordinator.rank)

    def apply(self, snapshot: Any) -> None:
        self.log("rolled_back", step=self.step, round=self.round_number)
        super().apply(snapshot)

    def commit(self) -> None:
        number = self.step
        super().commit()
        if self.step == number + 1:
            self.log("committed", step=number, round=self.round_number, rank=self.coordinator.rank)

    def should_save_checkpoint(self, rank: int) -> bool:
        return bool(self.checkpoint_every) and self.step % self.checkpoint_every == 0

    def save(self, stream: Any) -> None:
        self.plan.reach("save", self.step)
        super().save(stream)
        self.log("saved", step=self.step)

    def load(self, stream: Any) -> None:
        super().load(stream)
        self.log("loaded", step=self.step)

    def checkpoint_tree(self) -> dict[str, Any]:
        self.plan.reach("share", self.step, self.coordinator.rank)
        self.log("shared", step=self.step, rank=self.coordinator.rank)
        return super().checkpoint_tree()

    def load_checkpoint_tree(self, tree: dict[str, Any]) -> None:
        super().load_checkpoint_tree(tree)
        self.log("loaded", step=self.step)

    @property
    def round_number(self) -> int:
        return self.coordinator.rendezvous.joined.number


class RecordedCoordinator(CoordinatorP2P):
    plan: FaultPlan

    log: EventLog

    def rendezvous_barrier(self) -> Any:
        self.plan.reach("rendezvous", self._committed_steps, self.rank)
        self.log("asking", step=self._committed_steps)
        return super().rendezvous_barrier()

    def init_process_group(self) -> None:
        self.plan.reach("form", self._committed_steps, self.rank)
        super().init_process_group()
        member = getattr(self.rendezvous, "member_id", "")
        self.log("formed", round=self.rendezvous.joined.number, rank=self.rank, world=self.world_size, member=member)

    def on_error(self, e: BaseException) -> None:
        self.log("error", kind=type(e).__name__, text=str(e))
        super().on_error(e)


class ForgetfulState(torchelastic.State):
    """Takes a snapshot that it cannot apply: a mistake that is to be named before anything is trained."""

    def sync(self, *args: Any) -> None:
        pass

    def snapshot(self) -> Any:
        return 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=120)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--batchnorm", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--timeout-ms", type=int, default=20000)
    parser.add_argument("--snapshot", default="commit")
    parser.add_argument("--salvage", default="discard")
    parser.add_argument("--logical-shards", type=int)
    parser.add_argument("--tail-all-reduce", action="store_true")
    parser.add_argument("--checkpoint-dir", type=Path)
    parser.add_argument("--checkpoint-every", type=int, default=5)
    parser.add_argument("--tiers", nargs="*", default=[], help="KIND=PLACE; {host} is what JOB_HOST says")
    parser.add_argument("--replicas", type=int, default=0)
    parser.add_argument("--policy", choices=["on signal"])
    parser.add_argument("--lifetime", type=float, help="stop before deadlines, with so many seconds in reserve")
    parser.add_argument("--max-failures", type=int)
    parser.add_argument("--init-method")
    parser.add_argument("--metrics", default="none")
    parser.add_argument("--seed", type=int, help="of every worker's first weights; default: each has others")
    parser.add_argument("--chunk-bytes", type=int, default=transfer.CHUNK_BYTES)
    parser.add_argument("--agreement", choices=["each step", "as usual"], default="each step")
    parser.add_argument("--mistake", choices=["forgetful state", "wrong result"])
    parser.add_argument("--gates", type=int, nargs="*", default=[], help="steps that wait for a file gate-STEP")
    parser.add_argument("--wait-for-newcomer-at", type=int, nargs="*", default=[], help="steps")
    parser.add_argument("--full-world", type=int, default=3)
    parser.add_argument("--hang-floor-s", type=float, default=HangPolicy.floor_s)
    parser.add_argument("--end-after-s", type=float)
    parser.add_argument("--skip-at", type=int, help="a step with one more collective, which rank 1 skips once")
    parser.add_argument("--after-errors", choices=["skip", "step"], help="of a backward pass: what the step does then")
    parser.add_argument("--slow-section-at", type=int, help="a step that begins with one")
    parser.add_argument("--slow-worker", type=int, help="reports half the progress of the others, every fifth step")
    parser.add_argument("--remove-stragglers", action="store_true")
    return parser.parse_args()


def configure_metrics(kind: str) -> None:
    from torchelastic import metrics

    class ThrowingHandler(metrics.MetricHandler):
        def emit(self, metric_data: Any) -> None:
            raise RuntimeError("a metric handler that throws")

    if kind == "throwing":
        metrics.configure(ThrowingHandler())
    elif kind == "prometheus":
        metrics.configure(metrics.PrometheusMetricHandler())


def choose_device(kind: str) -> str | None:
    """Compute on this device from now on; returns the backend for it.

    All workers share one GPU: NCCL refuses that to the ranks of one host, so each says to be a host of its own.
    """
    if kind == "cpu":
        return None
    os.environ["NCCL_HOSTID"] = f"worker-{os.getpid()}"
    torch.cuda.set_device(0)
    return "nccl"


def hold_until(condition: Callable[[], bool], what: str) -> None:
    """Hold the step: a test must not depend on how fast a process starts."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"{what}: not within {PATIENCE_S:g} s")
        time.sleep(0.005)


def meet(rank: int, out: Path) -> None:
    """One more collective of the user's, which the first rank 1 to come here skips."""
    group = dist.new_group(backend="gloo")
    skipped = out / "skipped"
    if rank == 1 and not skipped.exists():
        skipped.touch()
        return
    dist.all_reduce(torch.ones(1), group=group)


def make_tiers(options: argparse.Namespace, log: EventLog, plan: FaultPlan) -> TieredCheckpointManager:
    """A manager whose tiers tell the plan and the log what happens in the background."""
    keep = KeepLast(2)
    kinds: dict[str, Callable[[str], Tier]] = {
        "memory": lambda place: MemoryTier(place, keep),
        "local": lambda place: DiskTier(place, keep, shared=False, name="local"),
        "disk": lambda place: DiskTier(place, keep),
        "durable": lambda place: DurableTier(place, keep),
    }
    tiers = []
    for kind, _, place in (text.partition("=") for text in options.tiers):
        tier = kinds[kind](place.replace("{host}", os.environ.get("JOB_HOST", "")))
        for phase in ("put", "commit"):
            setattr(tier, phase, _told(getattr(tier, phase), f"{phase}-{kind}", log, plan))
        tiers.append(tier)
    policy = OnSignal() if options.policy else None
    host = os.environ.get("JOB_HOST")
    return TieredCheckpointManager(
        tiers, policy=policy, run_id="job", grace_s=2.0, replicas=options.replicas, host=host
    )


def _told(original: Callable[[Any], Any], phase: str, log: EventLog, plan: FaultPlan) -> Callable[[Any], Any]:
    def told(what: Any) -> Any:
        plan.reach(phase, what.name.step, getattr(what, "rank", None))
        result = original(what)
        log(phase, step=what.name.step)
        return result

    return told


def watch_messages(state: RecordedState) -> None:
    """Tell the state of every message of a sync."""
    vars(transfer)["_Channel"].tensor = _watched(transfer._Channel.tensor, state)


def _watched(original: Callable[..., Any], state: RecordedState) -> Callable[..., Any]:
    def watched(*args: Any, **keywords: Any) -> Any:
        state.reach_message()
        return original(*args, **keywords)

    return watched


def main() -> None:
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    log, plan = EventLog(options.out), FaultPlan(options.out)
    plan.reach("start")
    configure_metrics(options.metrics)
    # every worker starts from other weights: only a sync that works makes them equal
    backend = choose_device(options.device)
    seed = log.worker + 2 if options.seed is None else options.seed
    model = make_model(seed, options.dropout, batchnorm=options.batchnorm).to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = ElasticBatchSampler(options.samples, options.batch, epochs=options.epochs, seed=3)
    loader = ElasticLoader(make_dataset(options.samples), sampler)
    state = RecordedState(
        model, optimizer, sampler=sampler, extra={"seen": 0}, snapshot=options.snapshot,
        logical_shards=options.logical_shards, salvage=options.salvage,
    )  # fmt: skip
    coordinator = RecordedCoordinator(
        backend, init_method=options.init_method, process_group_timeout=options.timeout_ms,
        hang_policy=HangPolicy(floor_s=options.hang_floor_s, end_after_s=options.end_after_s),
        straggler_policy=StragglerPolicy(remove=options.remove_stragglers, patience=2),
    )  # fmt: skip
    if options.slow_worker is not None:
        coordinator.MONITOR_PROGRESS_FREQ = 5  # of this object alone
    state.log, state.plan, state.coordinator, coordinator.log, coordinator.plan = log, plan, coordinator, log, plan
    transfer.CHUNK_BYTES = options.chunk_bytes
    if options.agreement == "each step":  # else the step at which a newcomer gets in depends on the load of the machine
        step_agreement.interval_steps = lambda *_: 1
    watch_messages(state)
    manager: CheckpointManager | None = None
    if options.checkpoint_dir is not None:
        manager = FileSystemCheckpointManager(str(options.checkpoint_dir))
        state.checkpoint_every = options.checkpoint_every
    if options.tiers:
        manager = make_tiers(options, log, plan)
        state.checkpoint_every = options.checkpoint_every

    progress_rate = 0.5 if log.worker == options.slow_worker else 1.0

    def train_step(state: RecordedState) -> Any:
        step = state.step
        rank = coordinator.rank
        with coordinator.slow_section() if step == options.slow_section_at else nullcontext():
            plan.reach("step", step, rank)
        plan.reach(f"step-of-{coordinator.world_size}", step, rank)
        if step in options.wait_for_newcomer_at and coordinator.world_size < options.full_world:
            hold_until(lambda: coordinator.rendezvous.num_nodes_waiting() > 0, "a newcomer")
        if step in options.gates:
            log("held", step=step, round=state.round_number)
            hold_until((options.out / f"gate-{step}").exists, f"gate {step}")
        shards = state.shards(loader)
        (share,) = sampler.pending
        log(
            "drawn", step=step, round=state.round_number, rank=coordinator.rank, world=coordinator.world_size,
            epoch=share.epoch, number=share.number, indices=list(share.indices),
            carried=list(share.carried),
        )  # fmt: skip
        time.sleep(options.step_ms / 1000)
        optimizer.zero_grad()
        loss = torch.zeros(())
        for inputs, targets in shards:
            loss = torch.nn.functional.mse_loss(state.model(inputs.to(options.device)), targets.to(options.device))
            plan.reach("backward", step, rank)
            try:
                loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
            except RuntimeError:
                if options.after_errors is None:
                    raise
                log("caught", step=step)
                if options.after_errors == "skip":
                    return None
        plan.reach("optimizer", step, rank)
        optimizer.step()
        has_tail = options.tail_all_reduce and coordinator.world_size > 1
        if has_tail:
            dist.all_reduce(torch.zeros(1, device=options.device))  # all have stepped, whatever strikes one of them now
        plan.reach("tail", step, rank)
        plan.reach(f"tail-of-{coordinator.world_size}", step, rank)
        if has_tail:
            dist.all_reduce(loss.detach())
        if step == options.skip_at and coordinator.world_size > 1:
            meet(rank, options.out)
        state.extra["seen"] += share.global_samples
        return 42 if options.mistake == "wrong result" else SimpleWorkerStats(progress_rate)

    if options.mistake == "forgetful state":
        torchelastic.train(coordinator, train_step, ForgetfulState())
    lifetime = None if options.lifetime is None else Lifetime(reserve_s=options.lifetime)
    try:
        torchelastic.train(
            coordinator, train_step, state, checkpoint=manager, lifetime=lifetime, max_failures=options.max_failures
        )
    except StoppedEarly as stop:
        log("stopped", step=stop.step, saved_in=stop.saved_in, others_go_on=stop.others_go_on)
        raise
    weights = torch.cat([parameter.detach().reshape(-1).cpu() for parameter in model.parameters()])
    if coordinator.rank >= 0:  # who only waited has nothing to show
        torch.save(weights, options.out / f"weights-{os.getpid()}.pt")
    foreign = [name for name in AGENTS_MODULES if name in sys.modules]
    log("finished", step=state.step, seen=state.extra["seen"], rank=coordinator.rank, foreign=foreign)
    plan.reach("end", rank=coordinator.rank)


if __name__ == "__main__":
    main()
