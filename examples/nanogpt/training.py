"""What both ways of training share: where a process computes, one iteration's gradients, evaluation, descriptions.

Every sum over ranks is made in the order of the ranks, so that its bits do not depend on how a collective cuts it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that everybody knows it by
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from examples.nanogpt import schedule
from examples.nanogpt.data import SPLITS, Corpus, Vocabulary
from examples.nanogpt.model import GPT, Shape, adamw, initialise
from examples.nanogpt.options import OptionError, Options
from torchelastic.checkpoint.store import list_checkpoints
from torchelastic.data.shares import share_bounds

PLAIN_FOLDER, ELASTIC_FOLDER = "checkpoint", "elastic"
_DESCRIPTION = "model.json"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Rows = Sequence[int] | Tensor
NoSync = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Device:
    """Where a process computes, and in which precision."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def chosen(cls, options: Options, local_rank: int) -> Device:
        """By the options; "auto" takes this rank's GPU if there is one, and bfloat16 if that can.

        Raises:
            OptionError: float16 was wanted without a GPU, or the device is not there.
        """
        name = options.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        if name.startswith("cuda") and not torch.cuda.is_available():
            raise OptionError(f"device is {name!r}, and there is no GPU here: give --device=cpu")
        device = torch.device("cuda", local_rank) if name == "cuda" else torch.device(name)
        is_cuda = device.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(device)
        dtype = options.dtype
        if dtype == "auto":
            dtype = "bfloat16" if is_cuda and torch.cuda.is_bf16_supported() else "float32"
        if dtype == "float16" and not is_cuda:
            raise OptionError("dtype is 'float16', which needs a GPU: give --dtype=bfloat16 or --dtype=float32")
        return cls(device, _DTYPES[dtype])

    def autocast(self) -> AbstractContextManager[Any]:
        """Around a forward pass."""
        return nullcontext() if self.dtype is torch.float32 else torch.autocast(self.device.type, self.dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """Keeps gradients in the range of float16; does nothing for other precisions."""
        return torch.amp.GradScaler(self.device.type, enabled=self.dtype is torch.float16)


class Workshop:
    """Data, model, optimizer and scaler of one process, made alike on every rank.

    With `sharded` there is no model until `build` makes one for a group, and another one for each group after it.

    Args:
        options: the command line.
        local_rank: of this process on its host.

    Raises:
        DataError: there is no data; says what to do.
        OptionError: the options do not fit this machine.
    """

    def __init__(self, options: Options, local_rank: int) -> None:
        self.options = options
        self.device = Device.chosen(options, local_rank)
        self.corpus = Corpus(Path(options.data_dir) / options.dataset)
        self.corpus.require_length(options.block_size)
        self.shape = Shape(
            len(self.corpus.vocabulary.characters),
            options.block_size,
            options.n_layer,
            options.n_head,
            options.n_embd,
            options.bias,
        )
        self.scaler = self.device.scaler()
        self.module: GPT
        self.optimizer: torch.optim.AdamW
        if not options.sharded:
            self.build()
            self.model: nn.Module = self.module
            if options.compile:
                self.model = torch.compile(self.module)  # type: ignore[assignment]  # a module, whatever torch says

    def build(self, mesh: DeviceMesh | None = None) -> tuple[GPT, torch.optim.AdamW]:
        """Make model and optimizer; from now on the others work with these.

        Args:
            mesh: over which both are sharded, without values as yet. None: this process has all of them.
        """
        options = self.options
        with torch.device("meta"):
            self.module = GPT(self.shape, options.dropout)
        if mesh is None:
            self.module.to_empty(device=self.device.device)
            torch.manual_seed(options.seed)
            self.module.apply(initialise)
        else:
            for block in self.module.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.module, mesh=mesh)
        self.optimizer = adamw(
            self.module,
            learning_rate=options.learning_rate,
            weight_decay=options.weight_decay,
            beta1=options.beta1,
            beta2=options.beta2,
        )
        return self.module, self.optimizer

    # --- one iteration ------------------------------------------------------------------------------------------------

    def learning_rate(self, iteration: int) -> float:
        """Of one iteration; sets it in the optimizer."""
        rate = self.options.learning_rate
        if self.options.decay_lr:
            rate = schedule.learning_rate(
                iteration,
                peak=rate,
                lowest=self.options.min_lr,
                warmup_iters=self.options.warmup_iters,
                decay_iters=self.options.lr_decay_iters,
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def rows(self, iteration: int, rank: int, world_size: int) -> range:
        """The numbers of the sequences that a rank trains in one iteration. Pure."""
        first, last = share_bounds(self.options.sequences, rank, world_size)
        begin = iteration * self.options.sequences
        return range(begin + first, begin + last)

    def add_gradients(
        self, model: nn.Module, rows: Rows, *, scale: float, no_sync: NoSync, most_rows: int = 0
    ) -> Tensor:
        """Forward and backward passes over some sequences, one micro batch after the other.

        Args:
            model: the wrapped one, in training mode.
            rows: the numbers of this rank's sequences; or the sequences, of shape (count, block_size + 1).
            scale: the weight of one sequence in what is minimised.
            no_sync: a context in which gradients stay on this rank.
            most_rows: the most that any rank has, where all must make equally many passes.

        Returns:
            The sum of the losses of the sequences, float64.
        """
        size, total = self.options.batch_size, torch.zeros((), dtype=torch.float64, device=self.device.device)
        batches = micro_batches(rows, size, max(len(rows), most_rows))
        for place, (numbers, counted) in enumerate(batches):
            is_last = place == len(batches) - 1
            with nullcontext() if is_last else no_sync():
                loss = self._loss(model, "train", numbers, "train")
                self.scaler.scale(loss * (counted * scale)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach().double() * counted
        return total

    def step(self) -> None:
        """The optimizer's step with the gradients that are there; they are gone then."""
        if self.options.grad_clip > 0:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.module.parameters(), self.options.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def rehearse(self, model: nn.Module) -> None:
        """One forward and backward pass for nothing, before random numbers are seeded or restored.

        After its first backward pass DDP sorts its buckets anew, which changes the order of sums; compilers compile. So
        that the first iteration of a life that resumes has the bits of the same one in an undisturbed run.
        """
        self._loss(model, "train", [0], "rehearsal").backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad(set_to_none=True)

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self, rank: int, world_size: int) -> dict[str, float]:
        """The mean loss on both parts of the data, over the same sequences each time; draws no random number.

        Every rank calls it and computes its share; one collective.
        """
        count = self.options.eval_iters * self.options.batch_size
        own = range(*share_bounds(count, rank, world_size))
        batches = micro_batches(own, self.options.batch_size, share_bounds(count, 0, world_size)[1])
        was_training = self.module.training
        self.module.eval()
        sums = torch.zeros(len(SPLITS), dtype=torch.float64, device=self.device.device)
        with torch.no_grad():
            for place, split in enumerate(SPLITS):
                for numbers, counted in batches:
                    loss = self._loss(self.module, split, numbers, f"evaluation {split}")
                    sums[place] += loss.double() * counted
        self.module.train(was_training)
        means = (sum_over_ranks(sums) / count).tolist()
        return dict(zip(SPLITS, means, strict=True))

    def _loss(self, model: nn.Module, split: str, numbers: Rows, stream: str) -> Tensor:
        if isinstance(numbers, Tensor):
            inputs, targets = numbers[:, :-1], numbers[:, 1:]
        else:
            inputs, targets = self.corpus.sequences(
                split, numbers, self.options.block_size, seed=self.options.seed, stream=stream
            )
        with self.device.autocast():
            logits = model(inputs.to(self.device.device))
            return F.cross_entropy(logits.flatten(0, 1), targets.to(self.device.device).flatten())


def micro_batches(rows: Rows, size: int, most_rows: int) -> list[tuple[Rows, int]]:
    """Micro batches of a rank's rows, and how many of each one's rows count. Pure.

    Args:
        rows: numbers of sequences, or the sequences.
        size: rows of a micro batch.
        most_rows: of any rank: there are as many micro batches as for these; those over have a row that does not count.
    """
    over = rows[:1] if len(rows) else range(1)
    parts = [rows[start : start + size] for start in range(0, most_rows, size)]
    return [(part, len(part)) if len(part) else (over, 0) for part in parts]


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum over all ranks, made in their order; itself without a process group. A collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return torch.stack(parts).sum(dim=0)


def local_rank() -> int:
    """As the launcher has said it; 0 without one."""
    return int(os.environ.get("LOCAL_RANK", "0"))


# --- what is in the output folder -------------------------------------------------------------------------------------


def claim_folder(options: Options, shape: Shape, vocabulary: Vocabulary, mode_folder: str, *, writes: bool) -> None:
    """Looks whether a run may go on in its output folder, and leaves a description of the model for `sample.py`.

    Args:
        options: the command line.
        shape: of the model.
        vocabulary: of the data.
        mode_folder: where this way of training keeps its checkpoints.
        writes: whether this rank writes the description.

    Raises:
        OptionError: there are checkpoints of another model, of other data or of the other mode, or against the word of
            `init_from`.
    """
    folder = Path(options.out_dir)
    others = {PLAIN_FOLDER: "plain", ELASTIC_FOLDER: "elastic"}
    is_there = {name: bool(list_checkpoints(folder / name)) for name in others}
    if is_there[mode_folder] and options.init_from == "scratch":
        raise OptionError(
            f"init_from is 'scratch', and {folder / mode_folder} holds checkpoints: give --init_from=auto to go on, or "
            "another --out_dir"
        )
    if not is_there[mode_folder] and any(is_there.values()):
        (other,) = (words for name, words in others.items() if name != mode_folder)
        raise OptionError(
            f"{folder} holds checkpoints of --mode={other}, and this is --mode={others[mode_folder]}: go on in that "
            "mode, or give another --out_dir"
        )
    if not any(is_there.values()) and options.init_from == "resume":
        raise OptionError(f"init_from is 'resume', and there is no checkpoint in {folder}: give --init_from=auto")
    if is_there[mode_folder]:
        _require_same(folder, shape, vocabulary)
    elif writes:
        write_description(folder, shape, vocabulary)


def write_description(folder: Path, shape: Shape, vocabulary: Vocabulary) -> None:
    """Writes the model's shape and its vocabulary, in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".{_DESCRIPTION}.{os.getpid()}"
    scratch.write_text(json.dumps({"shape": asdict(shape), "vocabulary": vocabulary.characters}, indent=1) + "\n")
    scratch.replace(folder / _DESCRIPTION)


def read_description(folder: Path) -> tuple[Shape, Vocabulary]:
    """What `write_description` has written. Raises OptionError: it is not there, or something else."""
    path = folder / _DESCRIPTION
    try:
        document = json.loads(path.read_bytes())
        return Shape(**document["shape"]), Vocabulary(document["vocabulary"])
    except FileNotFoundError:
        raise OptionError(f"there is no {path}: train a model with --out_dir={folder} first") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise OptionError(f"{path} is no description of a model: {error!r}") from error


def _require_same(folder: Path, shape: Shape, vocabulary: Vocabulary) -> None:
    before, text_before = read_description(folder)
    was, now = asdict(before), asdict(shape)
    differences = [f"{name} was {was[name]} and is {now[name]}" for name in was if was[name] != now[name]]
    if not differences and text_before != vocabulary:
        differences = ["the data has other characters"]
    if differences:
        raise OptionError(
            f"{folder} holds checkpoints of another model: {', '.join(differences)}. Give the same options and data as "
            "then, or another --out_dir"
        )


def summary_line(iteration: int, record: Mapping[str, Any]) -> str:
    """What a person sees of an iteration."""
    numbers = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in record.items())
    return f"iteration {iteration}: {numbers}"
