"""Training under torchrun, or as one process: an IterManager says when to save and to stop, a BCPState saves.

This is velastic's integration into nanoGPT, call by call; docs/migrating/velastic.md has both side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from examples.nanogpt.losses import LossFile, Record
from examples.nanogpt.options import OptionError, Options
from examples.nanogpt.training import (
    PLAIN_FOLDER,
    Workshop,
    claim_folder,
    local_rank,
    sum_over_ranks,
    summary_line,
)
from torchelastic.checkpoint import BCPState
from torchelastic.data.order import mixed_seed
from torchelastic.lifetime import IterManager


@contextmanager
def process_group(options: Options, is_distributed: bool) -> Iterator[None]:
    """The default group of torchrun's workers; none for a process that is alone."""
    if not is_distributed:
        yield
        return
    dist.init_process_group(_backend(options))
    try:
        yield
    finally:
        dist.destroy_process_group()


def _backend(options: Options) -> str:
    if options.backend != "auto":
        return options.backend
    return "nccl" if torch.cuda.is_available() and options.device != "cpu" else "gloo"


class PlainRun:
    """One life of the run on one rank; every rank makes one, on the thread that trains.

    Args:
        options: the command line.

    Raises:
        DataError, OptionError, CheckpointError: the run cannot begin or go on; says what to do.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        if options.sequences < self.world_size:
            raise OptionError(
                f"an iteration has {options.sequences} sequences for {self.world_size} ranks: raise --batch_size"
            )
        self.workshop = Workshop(options, local_rank())
        shape, vocabulary = self.workshop.shape, self.workshop.corpus.vocabulary
        claim_folder(options, shape, vocabulary, PLAIN_FOLDER, writes=self.rank == 0)
        self.model: nn.Module = self.workshop.model
        self.no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
        if self.world_size > 1:
            self.model = wrapped = DistributedDataParallel(self.workshop.model)
            self.no_sync = wrapped.no_sync
        self.workshop.rehearse(self.model)
        torch.manual_seed(mixed_seed(options.seed, self.rank))  # of dropout, on each rank its own

        self.iter_num, self.best_val_loss = 0, float("inf")
        self.pending: list[dict[str, Any]] = []  # losses of this rank's sequences, not yet in the file
        self.losses = LossFile(Path(options.out_dir))
        self.state = BCPState(
            model=self.model,
            optimizer=self.workshop.optimizer,
            framework="ddp",
            get_extra_fn=self.get_extra_state,
            default_ckpt_path=Path(options.out_dir) / PLAIN_FOLDER,
        )
        self.iter_mngr = IterManager(
            total_iters=options.max_iters,
            redundant_time=options.redundant_time,
            save_ckpt_time=options.save_ckpt_time,
            use_torch_compile=options.compile,
            velastic_dir=options.out_dir,
        )

    def get_extra_state(self) -> dict[str, Any]:
        """What the next life needs besides model, optimizer and random numbers; data and rate follow."""
        return {
            "iter_num": self.iter_num,
            "best_val_loss": self.best_val_loss,
            "scaler_state": self.workshop.scaler.state_dict(),
        }

    def resume(self) -> None:
        """Goes on from the newest checkpoint, if there is one."""
        extra_state = self.state.maybe_resume_from_ckpt()
        if extra_state is not None:
            self.iter_num = extra_state["iter_num"]
            self.best_val_loss = extra_state["best_val_loss"]
            self.workshop.scaler.load_state_dict(extra_state["scaler_state"])
            self.say(f"going on from iteration {self.iter_num}")
        self.iter_mngr.iter_count = self.iter_num
        if self.rank == 0:
            self.losses.cut(self.iter_num)

    def train(self) -> int:
        """To the end of the run, or to the last good moment before the deadline; returns the exit code."""
        options = self.options
        self.resume()
        while self.iter_num < options.max_iters and not options.eval_only:
            self.iter_mngr.iter()
            if self.iter_mngr.should_save_ckpt():
                self.save()
            if self.iter_mngr.should_stop:
                break
            if self.is_worth_saving():
                self.save()
            self.iteration()
        else:
            self.finish()
        self.say(self.iter_mngr.summary())
        self.state.close()
        self.iter_mngr.close()
        return self.iter_mngr.exit_code

    def iteration(self) -> None:
        """One step over this rank's sequences."""
        workshop = self.workshop
        rate = workshop.learning_rate(self.iter_num)
        rows = workshop.rows(self.iter_num, self.rank, self.world_size)
        # DDP takes the mean over ranks, and ranks may have different numbers of sequences
        scale = self.world_size / self.options.sequences
        total = workshop.add_gradients(self.model, rows, scale=scale, no_sync=self.no_sync)
        workshop.step()
        self.pending.append({"iteration": self.iter_num, "loss": total, "learning_rate": rate})
        self.iter_num += 1
        if self.iter_num % self.options.log_interval == 0:
            self.flush()

    def is_worth_saving(self) -> bool:
        """Measures, if it is time to; whether to save now, for what was found or because it is time for that."""
        options, is_first = self.options, self.iter_num == 0
        is_due = options.save_interval > 0 and self.iter_num % options.save_interval == 0
        if self.iter_num % options.eval_interval == 0:
            is_better = self.evaluate()
            is_due |= is_better or options.always_save_checkpoint
        return is_due and not is_first

    def evaluate(self) -> bool:
        """Measures; whether the validation loss is the best so far."""
        found = self.workshop.evaluate(self.rank, self.world_size)
        self.flush()
        self.write([{"iteration": self.iter_num, **{f"{split}_loss": loss for split, loss in found.items()}}])
        is_better = found["val"] < self.best_val_loss
        self.best_val_loss = min(self.best_val_loss, found["val"])
        return is_better

    def save(self) -> None:
        """All ranks, at the same iteration."""
        self.flush()
        if self.rank == 0:
            self.losses.sync()
        with self.iter_mngr.saving():
            self.state.save(sync=True)

    def finish(self) -> None:
        """After the last iteration: a last look, and a checkpoint for `sample.py`."""
        self.evaluate()
        if not self.options.eval_only:
            self.save()
            self.iter_mngr.cleanup()

    def flush(self) -> None:
        """Writes the losses that are not in the file yet; a collective."""
        if not self.pending:
            return
        totals = torch.stack([record["loss"] for record in self.pending])
        means = (sum_over_ranks(totals) / self.options.sequences).tolist()
        self.write([{**record, "loss": mean} for record, mean in zip(self.pending, means, strict=True)])
        self.pending.clear()

    def write(self, records: list[Record]) -> None:
        """On rank 0: into the file, and the last one for people."""
        if self.rank == 0:
            self.losses.append(records)
            last = dict(records[-1])
            print(summary_line(last.pop("iteration"), last), flush=True)

    def say(self, text: str) -> None:
        """Once for all ranks."""
        if self.rank == 0:
            print(text, flush=True)


def train(options: Options, *, is_distributed: bool) -> int:
    """Trains; every rank calls it. Returns the exit code."""
    with process_group(options, is_distributed):
        return PlainRun(options).train()
