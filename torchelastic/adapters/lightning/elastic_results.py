"""What `self.log` has gathered in training: kept over a lost worker, undone with a step, sent to newcomers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

#: Of the metadata of a metric: what `self.log` was given.
_OF_LOG = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip
#: Tensors of a metric.
_TENSORS = ("value", "cumulated_batch_size", "_forward_cache", "_computed")


def restores_of(results: Any) -> list[Callable[[], object]]:
    """What puts back the metrics of a `_ResultCollection`, which replaces tensors and changes none in place."""
    metrics, kept = dict(results), {key: dict(vars(metric)) for key, metric in results.items()}

    def put() -> None:
        for key in set(results) - set(metrics):
            del results[key]
        for key, metric in metrics.items():
            results[key] = metric
            metric.__dict__.clear()
            metric.__dict__.update(kept[key])
        results.batch = results.batch_size = None

    return [put]


# --- sums over all ranks ----------------------------------------------------------------------------------------------


class _Sum(NamedTuple):
    value: torch.Tensor | float
    samples: torch.Tensor | float


def is_shared(metric: Any) -> bool:
    """Whether it is one over all ranks (`sync_dist=True`) and over an epoch, and complete before that one ends."""
    meta = metric.meta
    if not metric.is_tensor or metric.has_reset or not meta.on_epoch or meta.fx == "on_train_epoch_end":
        return False
    return bool(meta.sync.should and not meta.sync.rank_zero_only)


def sums_of(results: Any) -> dict[str, _Sum]:
    """Of the metrics that all ranks share: what they have before the batches of a step. Equal on all ranks."""
    return {
        key: _Sum(metric.value, getattr(metric, "cumulated_batch_size", 0.0))
        for key, metric in results.items()
        if is_shared(metric)
    }


def share_sums(results: Any, before: Mapping[str, _Sum]) -> None:
    """Add up what all ranks have logged since: no lost worker takes its part of the epoch along. On all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    shared = {key: metric for key, metric in sorted(results.items()) if is_shared(metric)}
    for extreme, op in (("max", dist.ReduceOp.MAX), ("min", dist.ReduceOp.MIN)):
        metrics = [metric for metric in shared.values() if getattr(metric.meta, f"is_{extreme}_reduction")]
        _reduce([(metric, "value", 0.0) for metric in metrics], op)
    parts: list[tuple[Any, str, Any]] = []
    for key, metric in shared.items():
        begun = before.get(key, _Sum(0.0, 0.0))
        if metric.meta.is_mean_reduction or metric.meta.is_sum_reduction:
            parts.append((metric, "value", begun.value))
        if metric.meta.is_mean_reduction:
            parts.append((metric, "cumulated_batch_size", begun.samples))
    _reduce(parts, dist.ReduceOp.SUM)


def _reduce(parts: list[tuple[Any, str, Any]], op: Any) -> None:
    """Reduce what attributes have more than at the beginning, all in one message."""
    if not parts:
        return
    values = [getattr(metric, name) for metric, name, _ in parts]
    flat = torch.stack(
        [(value.double() - begun).reshape(()) for value, (_, _, begun) in zip(values, parts, strict=True)]
    )
    dist.all_reduce(flat, op)
    for value, increase, (metric, name, begun) in zip(values, flat, parts, strict=True):
        setattr(metric, name, (increase + begun).to(value.dtype).reshape(value.shape))


def settle(results: Any) -> None:
    """An epoch ends: the values of shared metrics are computed here, since each rank has the sums of all."""
    for metric in results.values():
        if is_shared(metric) and metric._computed is None:
            value = metric.value
            metric._computed = value / metric.cumulated_batch_size if metric.meta.is_mean_reduction else value.clone()


# --- one batch in several micro batches ---------------------------------------------------------------------------


class MicroBatchValues:
    """The values that `self.log(on_step=True)` has of a batch: the mean over its micro batches, by samples.

    Args:
        results: of the training loop.
    """

    def __init__(self, results: Any) -> None:
        self._results = results
        self._parts: dict[str, list[tuple[torch.Tensor, float]]] = {}
        self._restores: list[Callable[[], object]] = []

    def begin(self, batch: Any, *, is_padding: bool) -> None:
        """A micro batch begins; of padding nothing will count."""
        self._restores = restores_of(self._results) if is_padding else []
        self._results.batch, self._results.batch_size = batch, None

    def end(self, samples: int, samples_of_all: int) -> None:
        """It is done.

        Args:
            samples: of this rank.
            samples_of_all: of all ranks, as far as they have reduced a value.
        """
        caches = {
            key: metric._forward_cache
            for key, metric in self._results.items()
            if metric.is_tensor and metric.meta.on_step and metric._forward_cache is not None
        }
        made = dict(self._results)
        for restore in self._restores:
            restore()
        for key, metric in made.items():
            if key not in self._results:  # each rank has the same
                metric.reset()
                metric.has_reset = False
                self._results[key] = metric
        for key, cache in caches.items():
            weight = samples_of_all if self._results[key].meta.sync.should else samples
            self._parts.setdefault(key, []).append((cache, weight))

    def put(self) -> None:
        """All are done."""
        for key, parts in self._parts.items():
            total = sum(weight for _, weight in parts)
            if total:
                self._results[key]._forward_cache = sum(cache * (weight / total) for cache, weight in parts)


# --- for newcomers ----------------------------------------------------------------------------------------------------


def described(results: Any) -> dict[str, Any]:
    """The metrics of tensors, as plain values and tensors."""
    found = {}
    for key, metric in results.items():
        if not metric.is_tensor:
            continue  # a metric of torchmetrics is part of the module
        sync = metric.meta.sync
        found[key] = {
            "meta": {name: getattr(metric.meta, name) for name in _OF_LOG},
            "reduce_fx": metric.meta.reduce_fx.__name__,
            "sync": {"should": sync.should, "op": sync.op, "rank_zero_only": sync.rank_zero_only},
            "has_reset": metric.has_reset,
            "updates": metric._update_count,
            "tensors": {
                name: getattr(metric, name).detach()
                for name in _TENSORS
                if isinstance(getattr(metric, name, None), torch.Tensor)
            },
        }
    return found


def rebuild(results: Any, state: Mapping[str, Any], classes: Any, reduce: Callable[..., Any], device: Any) -> None:
    """The inverse, in place.

    Args:
        results: of the loop.
        state: what `described` gave, on another rank.
        classes: Lightning's module with `_ResultMetric`, `_Metadata` and `_Sync`.
        reduce: of the strategy.
        device: of the module.
    """
    for key in [key for key, metric in results.items() if metric.is_tensor]:
        del results[key]
    for key, one in state.items():
        meta = classes._Metadata(**one["meta"], reduce_fx=one["reduce_fx"])
        sync = one["sync"]
        meta.sync = classes._Sync(
            fn=reduce, _should=sync["should"], rank_zero_only=sync["rank_zero_only"], _op=sync["op"]
        )
        metric = classes._ResultMetric(meta, True)
        for name, tensor in one["tensors"].items():
            setattr(metric, name, tensor.to(device))
        metric.has_reset, metric._update_count = one["has_reset"], one["updates"]
        results[key] = metric
