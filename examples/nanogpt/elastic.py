"""Training under `torchelastic run`: workers may die, leave and come in the middle, and no iteration is lost.

The data of an iteration is the same for any number of workers; dropout is drawn from (seed, iteration, rank).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torchelastic
from examples.nanogpt.losses import LossFile
from examples.nanogpt.model import initialise
from examples.nanogpt.options import Options
from examples.nanogpt.stream import text_stream
from examples.nanogpt.training import (
    ELASTIC_FOLDER,
    Rows,
    Workshop,
    claim_folder,
    local_rank,
    sum_over_ranks,
    summary_line,
)
from torchelastic.checkpoint import DiskTier, KeepLast, OnSignal, TieredCheckpointManager
from torchelastic.data import ElasticStream
from torchelastic.data.order import mixed_seed
from torchelastic.data.shares import share_bounds
from torchelastic.lifetime import Lifetime
from torchelastic.p2p import CoordinatorP2P
from torchelastic.sharded import FullShard

KEPT_CHECKPOINTS = 2
PROCESS_GROUP_TIMEOUT_MS = 60_000
RUN_ID = "nanogpt"


class Shares:
    """Tells `ModelState` how much this worker's part of an iteration counts; has no state, since the step has it all.

    Args:
        sequences: of an iteration, on all workers together.
    """

    def __init__(self, sequences: int) -> None:
        self.sequences, self.rank, self.world_size = sequences, 0, 1

    def set_world(self, rank: int, world_size: int) -> None:
        """A new group."""
        self.rank, self.world_size = rank, world_size

    @property
    def weight(self) -> float:
        """This worker's share of the gradient, 0..1."""
        first, last = share_bounds(self.sequences, self.rank, self.world_size)
        return (last - first) / self.sequences

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint: what the numbers of sequences depend on."""
        return {"sequences": self.sequences}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError: the run was trained with other batches, so its iterations mean other data."""
        if int(state["sequences"]) != self.sequences:
            raise ValueError(
                f"an iteration has {self.sequences} sequences, and had {int(state['sequences'])} when it was saved: "
                "give the same --batch_size and --gradient_accumulation_steps"
            )


def sampler_of(workshop: Workshop) -> Shares | ElasticStream:
    """What a worker trains in an iteration."""
    options = workshop.options
    return text_stream(options, workshop.corpus.vocabulary) if options.stream else Shares(options.sequences)


def extra_of(workshop: Workshop) -> dict[str, Any]:
    """What must survive beside model and optimizer: scaler, best loss, and the losses that are not in the file yet."""
    extra: dict[str, Any] = {"best_val_loss": float("inf"), "losses": [], "is_better": False}
    if workshop.scaler.is_enabled():  # one that is off has no state
        extra["scaler"] = workshop.scaler
    return extra


def is_worth_saving(options: Options, step: int, extra: Mapping[str, Any]) -> bool:
    """After the last iteration, when the options say so, and when the last evaluation was worth it. Pure."""
    has_evaluated = step % options.eval_interval == 1
    return bool(
        step == options.max_iters
        or (options.save_interval and step % options.save_interval == 0)
        or (has_evaluated and step > 1 and (options.always_save_checkpoint or extra["is_better"]))
    )


class GPTState(torchelastic.ModelState):
    """Every worker has the whole model.

    Args:
        workshop: of this process.
    """

    def __init__(self, workshop: Workshop) -> None:
        self.options = workshop.options
        super().__init__(workshop.model, workshop.optimizer, sampler=sampler_of(workshop), extra=extra_of(workshop))

    def should_save_checkpoint(self, rank: int) -> bool:  # noqa: ARG002 - all ranks are of one mind
        """See `is_worth_saving`."""
        return is_worth_saving(self.options, self.step, self.extra)


class ShardedGPTState(torchelastic.ShardedState):
    """Every worker has a part of the model, and keeps a copy of another's.

    Args:
        workshop: of this process.
    """

    def __init__(self, workshop: Workshop) -> None:
        self.options = workshop.options
        super().__init__(
            workshop.build,
            mesh=FullShard(workshop.device.device.type),
            initialize=initialise,
            seed=self.options.seed,
            sampler=sampler_of(workshop),
            extra=extra_of(workshop),
        )

    def should_save_checkpoint(self, rank: int) -> bool:  # noqa: ARG002 - all ranks are of one mind
        """See `is_worth_saving`."""
        return is_worth_saving(self.options, self.step, self.extra)


AnyGPTState = GPTState | ShardedGPTState


class ElasticTraining:
    """One worker.

    Args:
        options: the command line.

    Raises:
        DataError, OptionError: the run cannot begin or go on; says what to do.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.workshop = Workshop(options, local_rank())
        claim_folder(
            options, self.workshop.shape, self.workshop.corpus.vocabulary, ELASTIC_FOLDER, writes=local_rank() == 0
        )
        if options.compile:
            self.workshop.rehearse(self.workshop.model)
        self.losses = LossFile(Path(options.out_dir))
        self.state = ShardedGPTState(self.workshop) if options.sharded else GPTState(self.workshop)

    def train_step(self, state: AnyGPTState) -> None:
        """One iteration; may fail anywhere and be repeated."""
        options, workshop = self.options, self.workshop
        is_over = state.step >= options.max_iters or options.eval_only
        if state.step % options.log_interval == 0:
            self.flush(state)  # before what this iteration adds: the file is cut at the first of what is written
        if is_over or state.step % options.eval_interval == 0:
            self.evaluate(state)
        if is_over:
            self.flush(state)
            raise StopIteration
        torch.manual_seed(mixed_seed(mixed_seed(options.seed, state.sampler.rank + 1), state.step))
        rate = workshop.learning_rate(state.step)
        rows, do_count, all_rows = self.rows(state)
        total = workshop.add_gradients(
            state.model, rows, scale=1 / len(rows), no_sync=state.no_sync, most_rows=self.most_rows(state)
        )
        mean = sum_over_ranks(total if do_count else torch.zeros_like(total)).item() / all_rows
        workshop.step()
        state.extra["losses"].append({"iteration": state.step, "loss": mean, "learning_rate": rate})

    def most_rows(self, state: AnyGPTState) -> int:
        """How many sequences of an iteration any worker has; all must call a sharded model equally often."""
        units = self.options.stream_shards if self.options.stream else self.options.sequences
        return share_bounds(units, 0, state.sampler.world_size)[1] * self.options.sequences // units

    def rows(self, state: AnyGPTState) -> tuple[Rows, bool, int]:
        """What this worker trains in this iteration: the sequences, whether they count, and how many all have."""
        if isinstance(state.sampler, ElasticStream):
            batch: Tensor = next(state.sampler)
            (share,) = state.sampler.pending
            has_any = share.local_samples > 0
            return batch if has_any else batch[:1], has_any, share.global_samples
        rank, world_size = state.sampler.rank, state.sampler.world_size
        own = self.workshop.rows(state.step, rank, world_size)
        # a worker beyond the number of sequences takes part with some that do not count
        return own or self.workshop.rows(state.step, 0, self.options.sequences), bool(own), self.options.sequences

    def evaluate(self, state: AnyGPTState) -> None:
        """Measures; noted in the state, so that it is undone if the iteration fails."""
        found = self.workshop.evaluate(state.sampler.rank, state.sampler.world_size)
        state.extra["losses"].append(
            {"iteration": state.step, **{f"{split}_loss": loss for split, loss in found.items()}}
        )
        state.extra["is_better"] = found["val"] < state.extra["best_val_loss"]
        state.extra["best_val_loss"] = min(state.extra["best_val_loss"], found["val"])

    def flush(self, state: AnyGPTState) -> None:
        """On rank 0: the losses of committed iterations go into the file, in the place of what was there of them."""
        records = state.extra["losses"]
        if records and (not dist.is_initialized() or dist.get_rank() == 0):
            self.losses.cut(records[0]["iteration"])
            self.losses.append(records)
            last = dict(records[-1])
            print(summary_line(last.pop("iteration"), last), flush=True)
        state.extra["losses"] = []


def train(options: Options) -> int:
    """Trains; every worker calls it. Returns the exit code.

    Raises:
        StoppedEarly: (a SystemExit with the right code) saved, and stopped before the deadline.
    """
    training = ElasticTraining(options)
    folder = Path(options.out_dir) / ELASTIC_FOLDER
    manager = TieredCheckpointManager([DiskTier(folder, KeepLast(KEPT_CHECKPOINTS))], policy=OnSignal(), run_id=RUN_ID)
    coordinator = CoordinatorP2P(
        c10d_backend=None if options.backend == "auto" else options.backend,
        process_group_timeout=PROCESS_GROUP_TIMEOUT_MS,
    )
    lifetime = Lifetime(reserve_s=options.redundant_time, unknown_save_s=options.save_ckpt_time or None)
    torchelastic.train(coordinator, training.train_step, training.state, checkpoint=manager, lifetime=lifetime)
    return 0
