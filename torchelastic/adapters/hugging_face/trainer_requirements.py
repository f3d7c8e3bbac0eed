"""What of a `Trainer` cannot recover in the running process, said before it trains."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import transformers
from torch.utils.data import DataLoader

from torchelastic.adapters.in_process.batches import EpochBatches
from torchelastic.adapters.in_process.requirements import require_known_order, require_no_group, require_none_of
from torchelastic.errors import UnfitError

if TYPE_CHECKING:
    from transformers import Trainer, TrainerState

log = logging.getLogger(__name__)

#: The arguments of the one method that is entered again, as far as they are used.
_OF_RUN_EPOCH = {"model", "epoch", "resume_from_checkpoint", "epochs_trained", "steps_trained_in_current_epoch"}
_RESTART = "train it with MemoryCheckpointCallback (docs/transformers.md), which restarts all workers after a loss"


def require_known_version() -> None:
    """Raise UnfitError for a transformers whose loop is another one."""
    run_epoch = getattr(transformers.Trainer, "_run_epoch", None)
    has_all = run_epoch is not None and set(inspect.signature(run_epoch).parameters) >= _OF_RUN_EPOCH
    if not has_all or not hasattr(transformers.trainer, "skip_first_batches"):
        raise UnfitError(
            f"transformers {transformers.__version__} has another training loop than ElasticTrainer knows (that of "
            f"5.23): install transformers==5.23.0, or {_RESTART}"
        )


def require_supported(trainer: Trainer, trial: object, *, may_have_group: bool) -> None:
    """Raise UnfitError for what would not be kept: names it, and says what to do."""
    args: Any = trainer.args
    wrong = {
        "fsdp": bool(args.fsdp),
        "deepspeed": bool(args.deepspeed),
        "a parallelism_config": getattr(args, "parallelism_config", None) is not None,
        "a model that is sharded or spread over devices": trainer.is_model_parallel
        or getattr(trainer, "is_distributed_loading_by_transformers", False),
        "auto_find_batch_size": args.auto_find_batch_size,
        "torch_compile": args.torch_compile,
        "eval_on_start": args.eval_on_start,
        "dispatch_batches": bool(args.accelerator_config.dispatch_batches),
        "a sampler that groups by length": getattr(args, "train_sampling_strategy", "random") != "random"
        or getattr(args, "group_by_length", False),
        "average_tokens_across_devices=False": not args.average_tokens_across_devices,
        f"optim={args.optim!s}": "lomo" in str(args.optim).lower(),
        "a hyperparameter search": trial is not None,
    }
    require_none_of("ElasticTrainer", wrong, f"leave it out, or {_RESTART}")
    if not may_have_group:
        require_no_group(
            "ElasticTrainer was imported",
            "import torchelastic.adapters.elastic_trainer at the top of the script, before TrainingArguments or an "
            "Accelerator are made, and call no collective before train()",
        )


def require_own_batches(batches: object) -> None:
    """Raise UnfitError for data that is not cut into shares: a class has put another loader in their place."""
    if not isinstance(batches, EpochBatches):
        raise UnfitError(
            f"get_train_dataloader of the Trainer's class gives a {type(batches).__name__} to the training loop, so "
            "lost samples would not come back: write that method in a class behind ElasticTrainerMixin "
            "(`class MyTrainer(ElasticTrainerMixin, TheirTrainer)`), or give the data as train_dataset"
        )


def require_permutations(plain: DataLoader[Any], size: int) -> None:
    """Raise UnfitError for data without a length, or drawn otherwise: that order, or those sizes, would be lost."""
    require_known_order(
        plain,
        "leave out get_train_dataloader or _get_train_sampler of the Trainer's class, and put weights or an order into "
        "the dataset; or train it with MemoryCheckpointCallback (docs/transformers.md)",
        is_permuted=True,
    )
    batches: Any = plain.batch_sampler
    batch_size = getattr(batches, "batch_sampler", batches).batch_size
    if batch_size != size:
        raise UnfitError(
            f"get_train_dataloader of the Trainer's class makes batches of {batch_size} samples: give that "
            f"number as per_device_train_batch_size, which is {size}"
        )


def warn_of_other_epochs(state: TrainerState, steps_per_epoch: int) -> None:
    """Say that a checkpoint was trained in steps of another size: its step is another place in the data now.

    Args:
        state: of the checkpoint, or of a run that begins.
        steps_per_epoch: in this run.
    """
    before = round(state.global_step / state.epoch) if state.epoch else steps_per_epoch
    if before != steps_per_epoch:
        log.warning(
            "the checkpoint of step %d was trained in %d steps for an epoch, which has %d now, so this run goes on at "
            "epoch %.2f in place of %.2f: with another largest number of workers (or batch size, or data) a step has "
            "other samples; set elastic_global_batch_size of the Trainer's class to the samples of a step then",
            state.global_step, before, steps_per_epoch, state.global_step / steps_per_epoch, state.epoch,
        )  # fmt: skip
