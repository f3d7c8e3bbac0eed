"""ModelState on one process: what a snapshot undoes, what a failed step leaves, what is refused."""

from __future__ import annotations

import collections
import datetime
import io
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

import torchelastic
from torchelastic.data import ElasticBatchSampler
from torchelastic.errors import is_retryable
from torchelastic.rendezvous.records import StateStatus
from torchelastic.repeated_failures import is_final


def make_state(snapshot: str = "commit", width: int = 8, **options: Any) -> torchelastic.ModelState:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options.setdefault("scheduler", torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    return torchelastic.ModelState(model, optimizer, snapshot=snapshot, **options)


def forward(state: torchelastic.ModelState) -> torch.Tensor:
    loss: torch.Tensor = state.model(torch.randn(6, 4)).square().mean()
    return loss


def one_step(state: torchelastic.ModelState) -> None:
    loss = forward(state)
    state.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
    state.optimizer.step()
    state.scheduler.step()


def picture(state: torchelastic.ModelState) -> dict[str, Any]:
    buffer = io.BytesIO()
    state.save(buffer)
    return dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))


def assert_same(left: Any, right: Any) -> None:
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


def test_a_step_that_fails_before_the_optimizer_leaves_no_trace() -> None:
    state = make_state(extra={"seen": 1, "list": [1]})
    state.sync()
    one_step(state)
    state.commit()
    before = picture(state)
    snapshot = state.snapshot()
    forward(state).backward()  # type: ignore[no-untyped-call]  # torch has no types here
    state.extra["seen"] = 2
    state.extra["list"].append(2)
    state.scheduler.step()
    state.apply(snapshot)
    assert_same(before, picture(state))
    assert state.status is StateStatus.COMPLETE
    assert all(parameter.grad is None for parameter in state.module.parameters())


def test_a_step_that_fails_after_the_optimizer_stands_if_nobody_has_better() -> None:
    state = make_state()
    state.sync()
    snapshot = state.snapshot()
    one_step(state)
    after = {name: value.clone() for name, value in state.module.state_dict().items()}
    state.apply(snapshot)
    assert (state.status, state.step) == (StateStatus.UNCOMMITTED, 0)
    state.sync()
    assert (state.status, state.step) == (StateStatus.COMPLETE, 1)
    assert_same(after, dict(state.module.state_dict()))
    assert state.scheduler.last_epoch == 1


def test_a_step_that_fails_inside_the_optimizer_is_torn_and_alone_cannot_go_on() -> None:
    state = make_state()
    state.sync()
    snapshot = state.snapshot()

    def explode(*_: Any) -> None:
        raise RuntimeError("inside the optimizer")

    one_step(state)  # the first of two optimizer steps is complete
    state.optimizer.register_step_pre_hook(explode)
    with pytest.raises(RuntimeError, match="inside"):
        state.optimizer.step()
    state.apply(snapshot)
    assert state.status is StateStatus.PARTIAL
    with pytest.raises(torchelastic.NonRetryableException, match="snapshot='full'"):
        state.sync()


def test_a_full_snapshot_undoes_the_optimizer_too() -> None:
    state = make_state(snapshot="full")
    state.sync()
    one_step(state)
    state.commit()
    before = picture(state)
    snapshot = state.snapshot()
    one_step(state)
    state.apply(snapshot)
    assert_same(before, picture(state))
    assert state.status is StateStatus.COMPLETE


@pytest.mark.parametrize("snapshots", ["full", "commit"])
@pytest.mark.parametrize("are_kept", [False, True])
def test_what_a_failed_backward_pass_has_added_to_the_gradients_is_undone(are_kept: bool, snapshots: Any) -> None:
    def gradients() -> dict[str, torch.Tensor | None]:
        return {name: one.grad if one.grad is None else one.grad.clone() for name, one in parameters.items()}

    state = make_state(snapshot=snapshots)
    state.sync()
    parameters = dict(state.module.named_parameters())
    if are_kept:  # accumulation over several steps
        forward(state).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        state.commit()
    before = gradients()
    snapshot = state.snapshot()
    forward(state).backward()  # type: ignore[no-untyped-call]  # torch has no types here
    state.apply(snapshot)
    assert_same(before, gradients())


def test_a_snapshot_holds_nothing_that_grows_with_the_weights() -> None:
    def size_bytes(width: int) -> int:
        model = torch.nn.Linear(width, width)
        state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.1), snapshot="commit")
        snapshot = state.snapshot()
        assert snapshot.structure is not None
        assert snapshot.large is None
        return snapshot.random.torch_cpu.nbytes + snapshot.structure.buffers.bytes

    assert size_bytes(4) == size_bytes(512)


def test_the_cursor_of_the_sampler_moves_with_the_commit_alone() -> None:
    sampler = ElasticBatchSampler(20, 5, epochs=1)
    state = make_state(sampler=sampler)
    state.sync()
    snapshot = state.snapshot()
    sampler.consume()
    state.apply(snapshot)
    assert (sampler.cursor, sampler.pending) == (0, ())
    state.snapshot()
    sampler.consume()
    state.commit()
    assert (sampler.cursor, state.step) == (5, 1)


def test_accumulated_batches_of_which_a_rank_has_unequal_parts_are_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = torch.nn.Linear(2, 1)
    sampler = ElasticBatchSampler(10, 8, epochs=3)  # batches of 8 and of 2: of the second one rank 2 has none
    state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.1), sampler=sampler)
    for rank, world_size in ((1, 2), (2, 3), (2, 3)):  # of two ranks each has half of both batches
        sampler.set_world(rank, world_size)
        sampler.consume()
        sampler.consume()
        state.commit()
        assert "unequal parts" not in caplog.text or world_size == 3
    (record,) = [record for record in caplog.records if "unequal parts" in record.getMessage()]
    assert "step 2" in record.getMessage()
    assert "(2 of 8, 0 of 2 samples)" in record.getMessage()


def test_batches_that_another_thread_has_drawn_ahead_of_the_step_are_not_counted_with_it() -> None:
    model, sampler = torch.nn.Linear(2, 1), ElasticBatchSampler(8, 2, epochs=1)
    state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.1), sampler=sampler)
    state.sync()
    reader = threading.Thread(target=sampler.consume)
    reader.start()
    reader.join()
    with pytest.raises(torchelastic.NonRetryableException, match=r"call next\(\) in the step"):
        state.commit()
    assert (state.step, sampler.cursor) == (0, 0)


def test_what_is_saved_is_what_is_loaded() -> None:
    state = make_state(extra={"best": 0.5}, sampler=ElasticBatchSampler(20, 5, epochs=3))
    state.sync()
    for _ in range(3):
        state.snapshot()
        state.sampler.consume()
        one_step(state)
        state.commit()
    stream = io.BytesIO()
    state.save(stream)
    stream.seek(0)
    other = make_state(extra={}, sampler=ElasticBatchSampler(20, 5, epochs=3))
    other.load(stream)
    assert (other.step, other.extra, other.sampler.cursor) == (3, {"best": 0.5}, 15)
    assert_same(picture(state), picture(other))


@pytest.mark.parametrize("value", [np.float64(1.5), np.int32(4), np.bool_(True), np.str_("best"), np.arange(3)])
def test_values_of_numpy_are_saved_and_loaded(value: Any) -> None:
    state = make_state(extra={"own": value})
    state.optimizer.param_groups[0]["lr"] = np.float64(0.25)
    one_step(state)
    saved = io.BytesIO()
    state.save(saved)
    again = make_state(extra={"own": None})
    again.load(io.BytesIO(saved.getvalue()))
    assert np.array_equal(again.extra["own"], value)
    assert type(again.extra["own"]) is type(value)
    assert again.optimizer.param_groups[0]["lr"] == state.optimizer.param_groups[0]["lr"]


def test_loading_runs_no_code_that_somebody_has_put_into_the_file() -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (print, ("executed",))

    stream = io.BytesIO()
    torch.save({"module": Evil()}, stream)
    stream.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        make_state().load(stream)


class FullyShardedDataParallel(torch.nn.Linear):
    """By its name only: building the real one takes a process group, and it is the name that is looked for."""


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (FullyShardedDataParallel(2, 2), "sharded"),
        (torch.nn.DataParallel(torch.nn.Linear(2, 2)), "plain module"),
    ],
)
def test_modules_that_are_sharded_or_wrapped_are_refused(model: torch.nn.Module, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("options", [{"snapshot": "deep"}, {"sampler": object()}, {"scheduler": 3}, {"extra": ["a"]}])
def test_arguments_that_cannot_work_are_refused_by_name(options: dict[str, Any]) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=next(iter(options))):
        torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_a_sampler_that_keeps_no_place_is_refused_with_the_ones_that_do() -> None:
    model = torch.nn.Linear(1, 1)
    plain: Any = DistributedSampler(TensorDataset(torch.zeros(8)), num_replicas=1, rank=0)
    with pytest.raises(ValueError, match=r"sampler is a DistributedSampler .* give an ElasticBatchSampler"):
        torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.1), sampler=plain)


@pytest.mark.parametrize("options", [{"salvage": "drop"}, {"salvage": "recompute"}, {"logical_shards": 2}])
def test_sparse_gradients_are_refused_by_the_name_of_the_layer_where_sums_of_them_would_be_kept(
    options: dict[str, Any],
) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 2, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"0 is an Embedding\(sparse=True\)"):
        torchelastic.ModelState(model, optimizer, sampler=torchelastic.ElasticBatchSampler(8, 4), **options)
    torchelastic.ModelState(model, optimizer, sampler=torchelastic.ElasticBatchSampler(8, 4))


@pytest.mark.parametrize("salvage", ["drop", "recompute"])
def test_complex_parameters_are_refused_where_their_gradients_would_be_kept(salvage: str) -> None:
    model = torch.nn.Linear(2, 2, dtype=torch.complex64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="weight is complex"):
        torchelastic.ModelState(model, optimizer, sampler=torchelastic.ElasticBatchSampler(8, 4), salvage=salvage)


PLAIN = [datetime.date(2026, 1, 2), collections.deque([1]), [{"deep": frozenset([1])}], {(1, 2): Path("/x")}]


@pytest.mark.parametrize("value", PLAIN)
def test_plain_values_that_torch_would_not_load_come_back_and_the_rest_is_read_by_torch_alone(value: Any) -> None:
    stream, state = io.BytesIO(), make_state(extra={"fine": 1, "mine": value})
    state.save(stream)
    stream.seek(0)
    found = make_state(extra={"mine": None})
    found.load(stream)
    assert (found.extra["mine"], found.extra["fine"]) == (value, 1)
    stream.seek(0)
    by_torch = torch.load(stream, weights_only=True)
    assert by_torch["extra"]["fine"] == 1
    for name, weight in state.module.state_dict().items():
        assert torch.equal(by_torch["module"][name], weight)
        assert torch.equal(found.module.state_dict()[name], weight)


def test_what_was_written_before_there_were_such_values_is_read() -> None:
    stream, state = io.BytesIO(), make_state(extra={"mine": np.float32(1.5)})
    torch.save(state.state_dict(), stream)
    stream.seek(0)
    found = make_state(extra={"mine": None})
    found.load(stream)
    assert found.extra == {"mine": np.float32(1.5)}
    assert torch.equal(found.module.state_dict()["0.weight"], state.module.state_dict()["0.weight"])


def test_what_could_not_be_loaded_again_is_refused_when_it_is_saved() -> None:
    stream = io.BytesIO()
    with pytest.raises(TypeError, match=r"^extra\['mine'\]\[0\] is an object: save plain values") as refused:
        make_state(extra={"fine": 1, "mine": [object()]}).save(stream)
    assert "allow_pickles" not in str(refused.value)
    assert not stream.getvalue()


def test_a_loss_with_its_graph_in_extra_is_named() -> None:
    state = make_state(extra={"fine": 1, "losses": []})
    state.extra["losses"].append(forward(state))
    with pytest.raises(TypeError, match=r"extra\['losses'\] .*loss\.item\(\)"):
        state.snapshot()


def test_a_scheduler_and_a_sampler_that_the_saved_state_had_not_begin_as_built(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = torchelastic.ModelState(model, optimizer, scheduler=scheduler, sampler=ElasticBatchSampler(20, 5))
    tree = torchelastic.ModelState(model, optimizer).state_dict()
    state.load_state_dict({**tree, "step": 7})
    assert (state.step, state.sampler.cursor, scheduler.last_epoch) == (7, 0, 0)
    assert [record.args for record in caplog.records] == [("scheduler",), ("sampler",)]


def test_a_checkpoint_of_another_model_ends_the_run_at_once() -> None:
    stream = io.BytesIO()
    make_state(width=6).save(stream)
    with pytest.raises(ValueError, match=r"does not fit this model[\s\S]*save to another folder") as raised:
        make_state(width=8).load(io.BytesIO(stream.getvalue()))
    assert not is_retryable(raised.value)
    assert is_final(raised.value)


def test_an_optimizer_of_other_parameters_than_the_models_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    compiled: Any = torch.compile(model)
    torchelastic.ModelState(compiled, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not caplog.records
    torchelastic.ModelState(model, torch.optim.SGD([model.weight, *other.parameters()], lr=0.1))
    (record,) = caplog.records
    assert record.getMessage().startswith("2 of the 3 parameters of the SGD are not the model's: ")
