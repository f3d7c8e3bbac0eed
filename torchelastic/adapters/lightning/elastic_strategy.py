"""The strategy of a trainer of Lightning that goes on in the running processes; see docs/lightning.md."""

from __future__ import annotations

import fcntl
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchelastic.adapters.lightning.elastic_environment import ElasticEnvironment
from torchelastic.adapters.lightning.elastic_evaluation import shared
from torchelastic.adapters.lightning.elastic_loops import (
    BatchMarker,
    ElasticEpochLoop,
    ElasticFitLoop,
    ElasticOptimization,
)
from torchelastic.adapters.lightning.elastic_manual import ElasticManualOptimization, step_checked
from torchelastic.adapters.lightning.elastic_requirements import (
    require_fit_options,
    require_known_version,
    require_supported,
    require_trained_alike,
)
from torchelastic.adapters.lightning.elastic_run import ElasticRun
from torchelastic.checkpoint.checkpoint_manager import CheckpointManager
from torchelastic.p2p import CoordinatorP2P


class ElasticDDP:
    """For `Trainer(strategy=ElasticDDPStrategy())`, in a script under `torchelastic run`.

    `fit` is called on every worker. When one is lost, hangs or joins, the others undo what is under way, form a new
    group and go on in the same processes: the same weights, learning rates, steps and logged values, each sample once.
    A validation or a save that a loss interrupts is repeated as a whole.

    A batch has the DataLoader's `batch_size` times W samples, whatever the number of workers: W is the largest that the
    launcher allows. A rank computes its share in micro batches of at most `batch_size`.

    Args:
        global_batch_size: samples of a batch over all ranks; None: as above.
        checkpoint: saves beside Lightning's own checkpoints, in memory say, for the case that all workers are lost at
            once (`torchelastic.checkpoint.TieredCheckpointManager`); None: nothing does.
        **ddp: of DDP: find_unused_parameters, broadcast_buffers, gradient_as_bucket_view, bucket_cap_mb; and
            accelerator, precision_plugin and checkpoint_io, as for DDPStrategy.

    Raises:
        UnfitError: (of `torchelastic.errors`) another option, or another release of Lightning.
    """

    _has_trained = False  # in this process, which has the group of its last training then
    _environment: ElasticEnvironment
    _run: ElasticRun | None = None
    cluster_environment: Any
    parallel_devices: Any
    _launcher: Any

    def __init__(
        self, *, global_batch_size: int | None = None, checkpoint: CheckpointManager | None = None, **ddp: Any
    ) -> None:
        self._library = library_of(type(self))
        require_known_version(self._library)
        require_fit_options(ddp)
        self._global_batch_size, self._checkpoint_manager = global_batch_size, checkpoint
        environment = part_of(self._library, ElasticEnvironment, "plugins.environments", "ClusterEnvironment")
        super().__init__(cluster_environment=environment(), **ddp)  # type: ignore[call-arg]  # of DDPStrategy

    # --- set up -------------------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """This worker's."""
        devices, number = self.parallel_devices, self.cluster_environment.local_rank()
        if devices[0].type == "cuda" and number >= len(devices):
            return torch.device("cuda", number % torch.cuda.device_count())
        return devices[number % len(devices)]  # type: ignore[no-any-return]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The share of this rank in data whose sampler is the user's own."""
        environment = self.cluster_environment
        return {"num_replicas": environment.world_size(), "rank": environment.global_rank()}

    def _configure_launcher(self) -> None:
        """The workers are there."""
        self._launcher = None

    def setup_distributed(self) -> None:
        """No group is formed: see `elastic_environment`."""
        importlib.import_module(f"{_fabric(self._library)}.utilities.seed").reset_seed()
        self._process_group_backend = self._get_process_group_backend()  # type: ignore[attr-defined]
        self.set_world_ranks()

    def set_world_ranks(self) -> None:
        """Who logs and prints: rank 0 of the group, and nobody before there is one."""
        super().set_world_ranks()  # type: ignore[misc]

    def setup_environment(self) -> None:
        """Before anything is set up. Raises UnfitError: see the page."""
        trainer = self._trainer
        if trainer.state.fn == "fit":
            require_supported(trainer, may_have_group=ElasticDDP._has_trained)
            ElasticDDP._has_trained = True
            self._install(trainer)
        super().setup_environment()  # type: ignore[misc]
        if trainer.state.fn == "fit" and not dist.is_initialized():
            _silence_ranks(self._library)

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer  # type: ignore[attr-defined]

    def _install(self, trainer: Any) -> None:
        backend = "nccl" if self.root_device.type == "cuda" else "gloo"
        marker = part_of(self._library, BatchMarker, "callbacks", "Callback")()
        self._run = ElasticRun(
            trainer, self._library, marker, CoordinatorP2P(backend), self._global_batch_size, self._checkpoint_manager
        )
        for owner, name, part in (
            (trainer, "fit_loop", ElasticFitLoop),
            (trainer.fit_loop, "epoch_loop", ElasticEpochLoop),
            (trainer.fit_loop.epoch_loop, "automatic_optimization", ElasticOptimization),
            (trainer.fit_loop.epoch_loop, "manual_optimization", ElasticManualOptimization),
        ):
            loop = getattr(owner, name)
            if not isinstance(loop, part):
                loop.__class__ = type(f"Elastic{type(loop).__name__}", (part, type(loop)), {})
            loop.elastic = self._run
        connector = trainer._signal_connector
        connector.register_signal_handlers = lambda: None  # its handler would call the other ranks
        trainer._accelerator_connector.use_distributed_sampler = False  # see process_dataloader
        data, prepare = trainer._data_connector, type(trainer._data_connector).prepare_data
        data.prepare_data = lambda: self._prepare_one_by_one(lambda: prepare(data))

    def _prepare_one_by_one(self, prepare: Callable[[], None]) -> None:
        """No barrier makes the others wait for the one that downloads: so each looks whether all is there, in turn."""
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "alone").replace(os.sep, "_")
        with (Path(tempfile.gettempdir()) / f"torchelastic-{os.getuid()}-prepare-{run_id}").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with self.cluster_environment.said_to_be_first():
                prepare()

    def setup(self, trainer: Any) -> None:
        """As DDPStrategy's; the model is wrapped in each group."""
        super().setup(trainer)  # type: ignore[misc]
        if trainer.state.fn == "fit":
            require_trained_alike(trainer)

    def configure_ddp(self) -> None:
        """Nothing: `ModelState` does."""

    def process_dataloader(self, dataloader: Any) -> Any:
        """Shares of global batches for the training; of the rest of the data every so-manieth sample."""
        if self._run is not None and self._run.reads_training_data:
            return self._run.shares_of(dataloader)
        environment = self.cluster_environment
        return shared(dataloader, environment.global_rank(), environment.world_size())

    # --- a step -------------------------------------------------------------------------------------------------------

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The backward pass of a micro batch, with the weight that its samples have in the global batch."""
        run, precision, module = self._run, self.precision_plugin, self.lightning_module  # type: ignore[attr-defined]
        assert run is not None
        loss = precision.pre_backward(closure_loss, module)
        if run.manual is None:
            run.backward(loss)
        else:
            with run.manual.backward(loss):
                precision.backward(loss, module, optimizer, *args, **kwargs)
        return precision.post_backward(loss, module)  # type: ignore[no-any-return]

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """As DDPStrategy's, but the closure is called before the optimizer: within, all weights would be copied."""
        precision, module = self.precision_plugin, model or self.lightning_module  # type: ignore[attr-defined]
        assert self._run is not None
        closure = step_checked(self._run.manual, closure)
        if getattr(precision, "scaler", None) is not None:
            return precision.optimizer_step(optimizer, model=module, closure=closure, **kwargs)
        result = precision._wrap_closure(module, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients add up here, and are not exchanged."""
        run = self._run
        assert run is not None
        with run.state.no_sync(), nullcontext() if run.manual is None else run.manual.local():
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As DDPStrategy's; a mean in a training step is one over samples."""
        is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if self._run is not None and isinstance(tensor, torch.Tensor) and is_mean and group is None:
            mean = self._run.mean_over_samples(tensor)
            if mean is not None:
                return mean
            if not tensor.is_floating_point():
                tensor = tensor.double()  # or a mean number of samples would be cut to an integer
        return super().reduce(tensor, group, reduce_op)  # type: ignore[misc]

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Without DDP, which would send buffers with each batch, and not all ranks may have equally many."""
        with self.precision_plugin.val_step_context():  # type: ignore[attr-defined]
            return self.lightning_module.validation_step(*args, **kwargs)  # type: ignore[attr-defined]

    def on_exception(self, exception: BaseException) -> None:
        """Nothing to add."""

    def teardown(self) -> None:
        """The trainer ends, or has failed."""
        if self._run is not None:
            trainer = self._run.trainer
            vars(trainer._data_connector).pop("prepare_data", None)
            vars(trainer._signal_connector).pop("register_signal_handlers", None)
        super().teardown()  # type: ignore[misc]


def library_of(kind: type) -> str:
    """Of which library a class is derived."""
    modules = [one.__module__ for one in kind.__mro__]
    return "pytorch_lightning" if any(name.startswith("pytorch_lightning") for name in modules) else "lightning.pytorch"


def part_of(library: str, part: type, module: str, base: str) -> Any:
    """A class of one of ours and one of the library's."""
    return type(base, (part, getattr(importlib.import_module(f"{library}.{module}"), base)), {})


def _fabric(library: str) -> str:
    return "lightning_fabric" if library == "pytorch_lightning" else "lightning.fabric"


def _silence_ranks(library: str) -> None:
    """Until there is a group nobody opens a logger: which worker will be rank 0 is not known yet."""
    one = importlib.import_module(f"{library}.utilities.rank_zero").rank_zero_only
    other = importlib.import_module(f"{_fabric(library)}.utilities.rank_zero").rank_zero_only
    one.rank = other.rank = max(1, one.rank or 0)
