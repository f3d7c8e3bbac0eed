"""What every manager of local checkpoints does with the other ranks: agree on saves, on what there is, and on loads."""

from __future__ import annotations

import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torchelastic.checkpoint.compat.nvrx.async_ckpt.request import AsyncRequest, CollectiveFinalize
from torchelastic.checkpoint.compat.nvrx.local.names import CkptID, check_iteration, check_session_id
from torchelastic.checkpoint.compat.nvrx.local.state_dict import TensorAwareStateDict
from torchelastic.checkpoint.engine.durable_copies import DurableCopies
from torchelastic.checkpoint.engine.restorer import Restorer, shards_of
from torchelastic.checkpoint.errors import CheckpointError, OutOfStepError
from torchelastic.checkpoint.store.restore_plan import Candidate, candidates
from torchelastic.checkpoint.store.save_id import SaveId, ShardId
from torchelastic.checkpoint.store.tier import TierEntry
from torchelastic.group.rank_group import RankGroup

if TYPE_CHECKING:
    import torch.distributed as dist

    from torchelastic.checkpoint.compat.nvrx.local.strategies import ReplicationStrategy

log = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")
_NOBODY = object()
#: A save in the background is given up when so many later ones were finalised before it.
_ABORTED_AFTER = 3


class BaseCheckpointManager(ABC):
    """Saves and loads one part of a checkpoint per rank; where the parts lie is the business of a subclass.

    All ranks call every method, in the same order, from the thread that trains. Whoever is out of step is named in an
    `OutOfStepError` on all ranks that came. Where one rank fails, all raise.

    Args:
        session_id: tells the checkpoints of several jobs in one folder apart.
        repl_strategy: which ranks keep copies of which parts.
        timeout_s: for how long a rank that does not come is waited for.
        process_group: whose ranks save together; None: the default one, as it is at each call. Without one, this
            process is rank 0 of 1.
        copies: in durable storage, where parts are read too; None: there are none.

    Attributes:
        latest_iteration: of the newest complete checkpoint that this object knows of; -1 before that.
        globally_available_ids: per rank, the parts that it held at the last `find_latest` or `load`.
    """

    def __init__(
        self,
        session_id: str,
        repl_strategy: ReplicationStrategy | None = None,
        *,
        timeout_s: float = 600.0,
        process_group: dist.ProcessGroup | None = None,
        copies: DurableCopies | None = None,
    ) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}: give seconds, more than 0")
        self.session_id = check_session_id(session_id)
        self.repl_strategy = repl_strategy
        self.latest_iteration = -1
        self.globally_available_ids: dict[int, list[CkptID]] = {}
        self._copies = copies
        self._timeout_s = timeout_s
        self._ranks = RankGroup(process_group, timeout_s)
        self._restorer = Restorer(0, self._ranks.run_on_all)  # of the last look
        self._world: object = _NOBODY
        self._formation = 0  # how many groups there were
        self._found: dict[SaveId, Candidate] = {}  # the newest first
        self._complete: set[SaveId] = set()
        self._damaged: dict[SaveId, str] = {}  # and why
        self._pending: dict[SaveId, int] = {}  # begun and not finalised; how many later ones were finalised since
        self._written: dict[SaveId, Callable[[], None]] = {}  # of these, what this rank finalised without the others
        self._generation = -1

    # --- what a subclass does -----------------------------------------------------------------------------------------

    @abstractmethod
    def _my_ckpt_ids(self) -> Sequence[ShardId]:
        """The parts that this rank holds, its own and those of others."""

    def _my_damages(self) -> Mapping[SaveId, str]:
        """Saves of which this rank holds nothing that could be read, though something of them lies here; and why."""
        return {}

    @abstractmethod
    def _load(self, shard: ShardId) -> TensorAwareStateDict:
        """Reads a part, checked, from wherever it lies. Raises: CorruptCheckpointError if no good copy is left."""

    def _verify(self, shard: ShardId) -> None:
        """Finds out whether `_load` would succeed, and raises what it would raise."""
        self._load(shard)

    def _make_copies_again(self, call: str, save: SaveId) -> None:  # noqa: B027 - most keep none
        """This one was loaded, on all ranks: each fetches what it has lost of the others' parts."""

    @abstractmethod
    def _save(self, prepared: Any, shard: ShardId, *, is_async: bool) -> AsyncRequest:
        """Takes the snapshot, and returns what is left to be done in the background (without finalize functions)."""

    def _commit(self, save: SaveId, saved_s: float) -> bool:  # noqa: ARG002 - most need not
        """All ranks have written their parts of a save: makes it count, on all of them or, with an error, on none.

        Returns:
            Whether the hosts have it; else it is on its way to another place, or has failed, which is said there.
        """
        return True

    @abstractmethod
    def _cleanup(self, save: SaveId) -> None:
        """A save is complete on all ranks: removes what is not to be kept beside it."""

    @abstractmethod
    def _cleanup_failed_save(self, save: SaveId) -> None:
        """A save has failed on some rank: removes what is here of it."""

    def _prepare(self, state_dict: TensorAwareStateDict) -> Any:
        """Everything of a save that can fail on one rank alone, before the ranks agree on it."""
        return state_dict

    def _release_prepared(self, prepared: Any) -> None:  # noqa: B027 - most have nothing to undo
        """Undoes `_prepare`: another rank has failed."""

    def _fencing_token(self, call: str) -> tuple[int, int]:  # noqa: ARG002 - it names a collective
        """Who saves, as ever greater numbers: the epoch of the job, and the round of the group. Collective."""
        return 0, 0

    def _arrive(self, call: str) -> None:  # noqa: B027 - most need nobody's address
        """The ranks are new to each other: the process group was formed (anew), or this is the first call."""

    # --- what everybody calls -----------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The rank of this process in the group; 0 without one."""
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are now."""
        return self._ranks.world_size

    def find_latest(self) -> int:
        """Looks for the newest checkpoint of which a good copy of every part is somewhere. Called on all ranks.

        Newest is what was saved last, also if its iteration is lower than that of an older one (after a rollback).
        The parts are read and compared with their checksums, the own one by each rank: `load` gives what was found.

        Returns:
            Its iteration; -1 if there is none.

        Raises:
            OutOfStepError, CheckpointError: see the class.
        """
        self._begin("find_latest()", look=True)

        def attempt(save: SaveId) -> None:
            for shard in shards_of(self._found[save])[self.rank :: self.world_size]:
                self._verify(shard)

        self._try_all("find_latest()", attempt)
        return self.latest_iteration

    @property
    def latest_world_size(self) -> int:
        """How many ranks saved the newest checkpoint that `find_latest` found; 0 if there is none."""
        newest = self._newest()
        if newest is None:
            return 0
        return self._found[newest].world_size if newest in self._found else self.world_size

    def load(self, shard: int | None = None) -> tuple[TensorAwareStateDict, CkptID]:
        """Reads this rank's part of the newest complete checkpoint. Called on all ranks.

        A part that is damaged here is replaced by another rank's copy, with a warning; if there is no good copy of some
        part, all ranks take the next older checkpoint, with a warning. `find_latest` may be called before, or not.

        Args:
            shard: the rank (among those that saved) whose part to read; each rank may ask for another one. None: the
                own rank's.

        Returns:
            The state, its tensors back on their devices, and what it is a part of.

        Raises:
            CheckpointError: there is no (readable) checkpoint, or it was saved by another number of ranks and `shard`
                is not given; on all ranks alike.
            OutOfStepError: see the class.
        """
        self._begin("load()", look=True)
        wishes = self._ranks.run_on_all("load()", lambda: None if shard is None else int(shard))

        def attempt(save: SaveId) -> tuple[TensorAwareStateDict, CkptID]:
            for rank, wish in enumerate(wishes):
                _check_wish(save, self._found[save].world_size, rank, wish, len(wishes))
            wanted = shards_of(self._found[save])[self.rank if shard is None else shard]
            return self._load(wanted), self._ckpt_id(wanted)

        state, ckpt_id = self._first_loadable("load()", attempt)
        state.restore_tensor_device()
        return state, ckpt_id

    def save(self, state_dict: TensorAwareStateDict, iteration: int, is_async: bool = False) -> AsyncRequest | None:
        """Saves this rank's part of a checkpoint; the state may differ from rank to rank. Called on all ranks.

        When it returns, the state may change: it was copied. `state_dict` is not changed.

        Args:
            state_dict: the state.
            iteration: of training; 0 or more. It may be lower than that of an older checkpoint, and then replaces it as
                the newest one.
            is_async: leave all but the copy to an `AsyncCallsQueue`.

        Returns:
            With `is_async`, the request to be given to the queue: by all ranks, in the order of the saves. Else None,
            and the checkpoint is complete on all ranks.

        Raises:
            TypeError, ValueError: the state or the iteration cannot be saved; nothing was done, on all ranks.
            FencedError: another job has saved to this session since; this one must end.
            CheckpointError: a rank cannot save; nothing is left of it.
            OutOfStepError: see the class.
        """
        call = f"save(iteration={iteration}, is_async={bool(is_async)})"
        self._begin(call, look=False)
        token = self._fencing_token(call)
        prepared: list[Any] = []

        def prepare() -> list[Any]:
            check_iteration(iteration)
            prepared.append(self._prepare(state_dict))
            return [self._generation, secrets.token_hex(4), time.time(), list(map(str, self._written))]

        try:
            answers = self._ranks.run_on_all(call, prepare)
            self._finalize_written(set.intersection(*(set(written) for *_, written in answers)))
        except BaseException:
            for each in prepared:
                self._release_prepared(each)
            raise
        self._generation = max(int(generation) for generation, *_ in answers) + 1
        _, nonce, saved_s, _ = answers[0]
        save = SaveId(*token, self._generation, check_iteration(iteration), str(nonce))
        self._pending[save] = 0
        request = self._save(prepared[0], ShardId(save, self.rank, self.world_size), is_async=is_async)
        finalize = partial(self._finalize, save, float(saved_s), self._formation)
        alone = partial(self._written.__setitem__, save, finalize) if self.world_size > 1 else finalize
        request = request._replace(finalize_fns=[CollectiveFinalize(finalize, alone, partial(self._abort, save))])
        if is_async:
            return request
        self._finish(request, save, f"{call}, writing")
        return None

    def close(self) -> None:
        """Lets everything go that is not a file. Not a collective; the object can be used on."""
        self._ranks.close()
        self._world = _NOBODY

    # --- how --------------------------------------------------------------------------------------------------------

    def _begin(self, call: str, *, look: bool) -> None:
        """Has the ranks meet if they are new to each other, and then or if that is wanted look at what there is."""
        source = self._ranks.source
        is_new = self._world is not source
        if is_new:
            self._arrive(call)
            self._world = source
            self._formation += 1
            for save in self._written:
                self._pending.pop(save, None)
            self._written.clear()
        if is_new or look:
            self._look(call, self._copies if look else None)  # a save waits for no storage

    def _look(self, call: str, copies: DurableCopies | None) -> None:
        """Has all ranks tell what they hold, and rank 0 what is in durable storage."""

        def mine() -> tuple[list[TierEntry], None]:
            held: dict[tuple[SaveId, int], list[int]] = defaultdict(list)
            for shard in self._my_ckpt_ids():
                held[shard.name, shard.world_size].append(shard.rank)
            damages = [TierEntry(save, 1, (), False, why) for save, why in self._my_damages().items()]
            return [*(TierEntry(*save, tuple(ranks)) for save, ranks in held.items()), *damages], None

        self._restorer = Restorer(self.rank, self._ranks.run_on_all, copies)
        told, _ = self._restorer.look(f"{call}, looking", mine)
        durable = self._restorer.durable
        readable = {one.name for one in durable} | {one.name for each in told for one in each if one.ranks}
        held = [[one for one in each if one.ranks or one.name not in readable] for each in told]
        self._found = {candidate.save: candidate for candidate in candidates([*held, durable])}
        self._generation = max([self._generation, *(save.generation for save in self._found)])
        self._complete = {save for save in self._found if self._is_loadable(save)}
        self.globally_available_ids = {
            rank: sorted({CkptID(one.name.step, shard, self.session_id) for one in each for shard in one.ranks})
            for rank, each in enumerate(held)
        }

    def _ckpt_id(self, shard: ShardId) -> CkptID:
        return CkptID(shard.name.step, shard.rank, self.session_id)

    def _is_loadable(self, save: SaveId) -> bool:
        return self._found[save].is_complete and save not in self._damaged

    def _newest(self) -> SaveId | None:
        return max(self._complete, default=None)

    def _first_loadable(self, call: str, attempt: Callable[[SaveId], Loaded]) -> Loaded:
        """What `attempt` returns for the newest checkpoint that all ranks could read; see `_try_all`."""
        found = self._try_all(call, attempt)
        if found is None:
            raise CheckpointError(self._nothing_to_load())
        save, loaded = found
        self._make_copies_again(call, save)
        return loaded

    def _try_all(self, call: str, attempt: Callable[[SaveId], Loaded]) -> tuple[SaveId, Loaded] | None:
        """Tries the complete checkpoints, newest first, until all ranks could read one of them: that is the latest.

        Args:
            call: for errors.
            attempt: reads this rank's part of it.

        Returns:
            Which one that is and what `attempt` returned; None if there is no such checkpoint.
        """

        def read(candidate: Candidate) -> Loaded:
            save = candidate.save
            try:
                return self._ranks.own_on_all(f"{call} of iteration {save.step}", partial(attempt, save))
            except CheckpointError:
                raise
            except Exception as error:  # a bug of the program: an older one helps nobody
                raise CheckpointError(f"{save} could not be loaded: {type(error).__name__}: {error}") from error

        faults = self._restorer.faults = {save: why for save, why in self._damaged.items() if save in self._found}
        found = self._restorer.newest(self._found.values(), read, partial(log.warning, "%s"))
        self._damaged |= {save: why for save, why in faults.items() if self._found[save].is_complete}
        self._complete -= faults.keys()
        self.latest_iteration = -1 if found is None else found[0].save.step
        return None if found is None else (found[0].save, found[1])

    def _nothing_to_load(self) -> str:
        return (
            f"there is no local checkpoint of session {self.session_id!r} that {self.world_size} rank(s) could load: "
            f"{self._restorer.because() or 'no rank holds any part of one'}. Load a durable one, or start from scratch"
        )

    def _finish(self, request: AsyncRequest, save: SaveId, call: str) -> None:
        try:
            self._ranks.run_on_all(call, request.work)
        except OutOfStepError:
            raise  # who is lost may have written its part: what is here stays, and find_latest judges it
        except BaseException:
            del self._pending[save]
            self._cleanup_failed_save(save)
            raise
        for finalize_fn in request.finalize_fns:
            finalize_fn()

    def _finalize_written(self, by_all: Collection[str]) -> None:
        """Makes the saves count that all ranks have finalised, each without the others; called by all of them."""
        for save in sorted(save for save in self._written if str(save) in by_all):
            self._written.pop(save)()

    def _abort(self, save: SaveId) -> None:
        """Its background part has failed on some rank: its memory is wanted for the next ones."""
        if self._pending.pop(save, None) is not None:
            self._written.pop(save, None)
            self._cleanup_failed_save(save)

    def _finalize(self, save: SaveId, saved_s: float, formation: int) -> None:
        """All ranks of the present group have written it. Called on the thread that trains, by all of them."""
        self._pending.pop(save, None)
        if formation != self._formation or self._world is not self._ranks.source:
            # a rank that is not in the group any more may have died before it wrote its shard: nothing older may go
            log.warning("the process group was re-formed during %s: find_latest() finds out if it is complete", save)
            return
        # The ranks exchange what they have written, and each publishes the manifest: it is a checkpoint then.
        try:
            is_here = self._commit(save, saved_s)
        except OutOfStepError:
            raise  # as where it is written
        except BaseException:
            self._cleanup_failed_save(save)
            raise
        if is_here:
            self._complete.add(save)
            self.latest_iteration = max(self._complete).step
        # Saves that were begun before and are still not finalized: most likely their requests were dropped, as a queue
        # finalizes in order. Behind so many newer checkpoints their memory is worth more.
        for older in [older for older in self._pending if older < save]:
            self._pending[older] += 1
            if self._pending[older] >= _ABORTED_AFTER:
                log.warning("%s was begun and never finished: it is aborted", older)
                del self._pending[older]
                self._cleanup_failed_save(older)
        # Last, since it removes older checkpoints: the new one is there, on all ranks.
        (self._cleanup if is_here else self._cleanup_failed_save)(save)


def _check_wish(save: SaveId, parts: int, rank: int, wish: int | None, world_size: int) -> None:
    if wish is None and parts != world_size:
        raise CheckpointError(
            f"{save} was saved by {parts} rank(s), and there are {world_size} now: say which part each rank is to "
            f"read, load(shard=rank % {parts}) for example if they all hold the same; or read all of them, with "
            "load_all() or load_resharded(template)"
        )
    if wish is not None and not 0 <= wish < parts:
        raise CheckpointError(f"rank {rank} asked for the part of rank {wish} of {save}: there are 0 to {parts - 1}")
