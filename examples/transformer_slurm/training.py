"""The training: what is built once, the loop, and what is saved so that a resumed run goes on as if never stopped."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from examples.transformer_slurm.arguments import LATEST, Options
from examples.transformer_slurm.checkpoints import TIMEOUT_S, Checkpoints
from examples.transformer_slurm.loss_log import LossLog
from examples.transformer_slurm.model import built, next_token_loss
from examples.transformer_slurm.parquet_text import (
    ParquetText,
    Position,
    TokenStream,
    as_plain,
    for_other_ranks,
    from_plain,
)
from examples.transformer_slurm.profiling import StepProfiler
from examples.transformer_slurm.sharded_text import ShardedText
from examples.transformer_slurm.tokenization import FILE_NAME, TextTokenizer, read_tokenizer, train_tokenizer
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.disk import REAL_DISK, Disk
from torchelastic.group.rank_group import RankGroup
from torchelastic.lifetime import IterManager, nearest, requeue_job

log = logging.getLogger(__name__)

#: AdamW divides by the root of a mean of squares plus this; 1e-8 is 0 in float16.
EPSILON, EPSILON_FP16 = 1e-8, 1e-4


class Training:
    """One rank of the training.

    Args:
        options: the command line.
        device: of this rank.
        disk: what touches files of checkpoints.

    Raises:
        DatasetError: data set or tokenizer cannot be used.
        CheckpointError: the checkpoint to go on from cannot be, or there is one and nobody said to go on from it.
    """

    def __init__(self, options: Options, device: torch.device, disk: Disk = REAL_DISK) -> None:
        self.options, self.device = options, device
        self._ranks = RankGroup(None, TIMEOUT_S)
        self.rank, self.world_size = self._ranks.rank, self._ranks.world_size
        self.step = 0
        self._saved_step = -1
        self._reported_s = time.monotonic()
        self._losses: list[torch.Tensor] = []
        self._texts = ParquetText(options.dataset, options.text_column)
        disk.make_folder(options.folder)
        self._tokenizer = self._find_tokenizer()
        self.stream = self._stream()
        self._build_model()
        self.checkpoints = Checkpoints(
            options.folder,
            self.model,
            self.optimizer,
            self._ranks,
            each_rank=options.use_torch_distributed_ckpt,
            keep=options.max_kept_checkpoints,
            verify=options.verify_checkpoints,
            disk=disk,
        )
        self._settle_order_of_sums()
        self._resume()
        self._csv = LossLog(self.csv_path, self.step) if self.rank == 0 and options.log_loss_to_csv else None

    @property
    def csv_path(self) -> Path:
        """Where losses are logged, if they are."""
        return self.options.folder / f"{self.options.experiment_name}_loss_log.csv"

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Trains to the end, or until the time is nearly over.

        Returns:
            The exit code: 0, or 75 if the job has saved and wants to be started again.

        Raises:
            CheckpointError: a checkpoint could not be saved; those before stay.
            DatasetError: the data set cannot be read any more.
        """
        options = self.options
        manager = IterManager(
            options.training_steps,
            redundant_time=options.default_iter_time,
            save_ckpt_time=options.default_ckpt_time,
            use_torch_compile=options.compile,
            velastic_dir=options.folder / "lifetime",
            deadline=None if options.timeaware_checkpointing else nearest([]),
        )
        manager.iter_count = self.step
        profiler = StepProfiler(options.folder, options.profile_step_start, options.profile_step_end)
        try:
            while self.step < options.training_steps:
                manager.iter()
                if manager.should_save_ckpt() and self._saved_step != self.step:
                    self._save(manager, is_final=manager.should_stop)
                if manager.should_stop:
                    break
                if options.profile and self.rank == 0:
                    profiler.begin(self.step)
                self._train_step()
                if self._is_due():
                    self._save(manager, is_final=False)
            profiler.close()
            self._report()
            return self._end(manager)
        finally:
            manager.close()

    def close(self) -> None:
        """Gives memory and locks back. Not a collective."""
        self.checkpoints.close()
        self._ranks.close()

    def _train_step(self) -> None:
        options = self.options
        if isinstance(self.stream, ShardedText):
            inputs, labels = self.stream.batch()
        else:
            inputs, labels = self.stream.batch(options.batch_size, options.sequence_length)
        loss = next_token_loss(self.model(inputs.to(self.device)), labels.to(self.device))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if options.grad_max_norm > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), options.grad_max_norm)
        self.optimizer.step()
        self.scheduler.step()
        self._losses.append(loss.detach())
        self.step += 1
        if options.timeaware_checkpointing and self.device.type == "cuda":
            torch.cuda.synchronize()  # else the time of the launch is measured, and not of the step
        if self.step % options.logging_frequency == 0:
            self._report()

    def _is_due(self) -> bool:
        every = self.options.checkpoint_frequency
        return every > 0 and (self.step % every == 0 or self.step == self.options.training_steps)

    def _report(self) -> None:
        """Losses since the last report, the mean over the ranks: printed, and logged. All ranks together."""
        if not self._losses:
            return
        own = torch.stack(self._losses).double()
        self._losses = []
        every = [own]
        if self.world_size > 1:
            every = [torch.empty_like(own) for _ in range(self.world_size)]
            dist.all_gather(every, own)
        # not by an all-reduce: the order of its sums depends on how many losses there are
        losses = torch.stack(every).mean(dim=0).tolist()
        if self.rank == 0:
            now_s, rate = time.monotonic(), self.scheduler.get_last_lr()[0]
            ms = 1000 * (now_s - self._reported_s) / len(losses)
            tokens = self.options.batch_size * self.options.sequence_length * self.world_size
            print(
                f"step {self.step} of {self.options.training_steps}: loss {losses[-1]:.4f}, rate {rate:.3g}, "
                f"{ms:.1f} ms a step, {1000 * tokens / ms:.0f} tokens/s",
                flush=True,
            )
            self._reported_s = now_s
        if self._csv is not None:
            self._csv.add(self.step - len(losses) + 1, losses)

    def _end(self, manager: IterManager) -> int:
        code = manager.exit_code if self.step < self.options.training_steps else 0
        if code == 0:
            manager.cleanup()
        if self.rank == 0 and code == 0:
            print(f"done: {self.step} steps")
        elif self.rank == 0:
            print(f"stopped after step {self.step} of {self.options.training_steps}, saved; {manager.decision}")
            print(f"requeue: {requeue_job().because}", flush=True)
        return code

    # --- from life to life --------------------------------------------------------------------------------------------

    def _save(self, manager: IterManager, *, is_final: bool) -> None:
        self._report()  # first, so that the log has every step that the checkpoint has
        with manager.saving():
            extra = {
                "step": self.step,
                **self._places(),
                "dataset": self._texts.fingerprint,
                "seed": self.options.seed,
                "tokenizer": self._tokenizer.digest,
                "scheduler": self.scheduler.state_dict(),
            }
            path = self.checkpoints.save(self.step, extra, is_final=is_final)
        self._saved_step = self.step
        if self.rank == 0:
            print(f"saved {path}", flush=True)

    def _places(self) -> dict[str, Any]:
        """Where the ranks are in the data; `_stream_from` is the inverse."""
        stream = self.stream
        if isinstance(stream, ShardedText):
            return {"place": stream.place()}  # of all of them
        return {"positions": self._ranks.run_on_all("where the ranks are", lambda: as_plain(stream.position))}

    def _resume(self) -> None:
        asked = self.options.resume_from_checkpoint
        if asked is None:
            if there := self.checkpoints.names():
                raise CheckpointError(
                    f"{self.options.folder} has checkpoints already (the newest: {there[0].text}): go on with "
                    "--resume-from-checkpoint latest, or give another --experiment_name"
                )
            resumed = None
        else:
            resumed = self.checkpoints.resume_latest() if asked == LATEST else self.checkpoints.resume(Path(asked))
        if resumed is None:
            if asked is not None and self.rank == 0:
                print(f"no checkpoint in {self.options.folder} yet: starting at step 0")
            return
        self._take(resumed.extra)
        self._saved_step = self.step
        if self.rank == 0:
            print(f"resumed from {resumed.path}: step {self.step}", flush=True)

    def _take(self, extra: Mapping[str, Any]) -> None:
        if extra["tokenizer"] != self._tokenizer.digest:
            raise CheckpointError(
                f"the checkpoint was trained with another tokenizer ({extra['tokenizer']}) than this one "
                f"({self._tokenizer.digest}): give the same with --tokenizer-name-or-path"
            )
        self.step = int(extra["step"])
        self.scheduler.load_state_dict(dict(extra["scheduler"]))
        here = (self._texts.fingerprint, self.options.seed)
        if (extra["dataset"], extra["seed"]) == here:
            self.stream = self._stream_from(extra)
            return
        self._note(
            f"the data set or the seed is another one than in the checkpoint ({extra['dataset']}, seed "
            f"{extra['seed']}): reading this one from its beginning"
        )

    def _stream_from(self, extra: Mapping[str, Any]) -> TokenStream | ShardedText:
        shards = self.options.stream_shards
        if ("place" in extra) != (shards > 0):
            before = f"--stream-shards {extra['place']['logical_shards']}" if "place" in extra else "no --stream-shards"
            raise CheckpointError(f"the checkpoint was trained with {before}: give the same, or begin another run")
        if shards:
            return self._stream(place=extra["place"])
        positions = [from_plain(position) for position in extra["positions"]]
        if len(positions) == self.world_size:
            return self._stream(positions[self.rank])
        position = for_other_ranks(positions)
        self._note(
            f"{len(positions)} rank(s) saved, and there are {self.world_size}: the losses will be others than "
            f"theirs would have been; the data go on behind document {position.begin} of epoch {position.epoch} "
            "(with --stream-shards they would go on exactly)"
        )
        return self._stream(position)

    # --- what is built once -------------------------------------------------------------------------------------------

    def _find_tokenizer(self) -> TextTokenizer:
        options = self.options
        path = options.tokenizer_name_or_path or options.folder / FILE_NAME

        def find() -> str:
            if self.rank != 0:
                return ""
            if options.tokenizer_name_or_path is None and not path.exists():
                print(f"training a tokenizer of {options.vocabulary} tokens on {self._texts.path}: {path}", flush=True)
                train_tokenizer(self._texts, options.vocabulary, path)
            return read_tokenizer(path)

        # told, and not read by each rank: a file that is new on one host may not be seen on another yet
        return TextTokenizer(self._ranks.run_on_all("finding the tokenizer", find)[0])

    def _stream(
        self, position: Position | None = None, place: Mapping[str, object] | None = None
    ) -> TokenStream | ShardedText:
        options = self.options
        own = {"seed": options.seed, "rank": self.rank, "world_size": self.world_size}
        if not options.stream_shards:
            return TokenStream(self._texts, self._tokenizer.encode, **own, position=position)
        return ShardedText(
            self._texts,
            self._tokenizer.encode,
            **own,
            shards=options.stream_shards,
            sequences=options.batch_size,
            length=options.sequence_length,
            place=place,
        )

    def _build_model(self) -> None:
        options = self.options
        torch.manual_seed(options.seed)
        shape, dtype = options.shape(self._tokenizer.vocabulary), options.dtype(self.device)
        self.model: nn.Module = built(
            shape, options.sequence_length, dtype, self.device, only_flash=options.use_flash_attention
        )
        if self.rank == 0:
            count = sum(parameter.numel() for parameter in self.model.parameters())
            print(f"{count / 1e6:.1f} M parameters, {dtype} on {self.device}, {self.world_size} rank(s); {shape}")
        if options.compile:
            self.model = torch.compile(self.model, fullgraph=True)  # type: ignore[assignment]  # it is a module again
        if self.world_size > 1:
            self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=options.learning_rate,
            weight_decay=options.weight_decay,
            eps=EPSILON_FP16 if dtype is torch.float16 else EPSILON,
            fused=options.fused_optimizer,
        )
        warm_up = options.lr_warmup_steps
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / (warm_up + 1))
        )

    def _settle_order_of_sums(self) -> None:
        """DDP puts gradients together anew after its first backward pass, and sums over ranks in another order then.

        So each life begins with a pass whose gradients are thrown away, and the first step after a resume adds as the
        same step of an uninterrupted run has added.
        """
        if self.world_size == 1:
            return
        size = (self.options.batch_size, self.options.sequence_length)  # as later, or torch.compile begins anew
        tokens = torch.zeros(size, dtype=torch.int64, device=self.device)
        next_token_loss(self.model(tokens), tokens).backward()  # type: ignore[no-untyped-call]  # as above
        self.optimizer.zero_grad()

    def _note(self, text: str) -> None:
        if self.rank == 0:
            log.warning("%s", text)
