"""Local checkpoints on tmpfs or a disk of each host, with copies on other hosts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchelastic.checkpoint.compat.nvrx.async_ckpt.request import AsyncRequest
from torchelastic.checkpoint.compat.nvrx.local.base_manager import BaseCheckpointManager
from torchelastic.checkpoint.compat.nvrx.local.host_folder import HostFolder
from torchelastic.checkpoint.compat.nvrx.local.local_shards import LocalShards, Used
from torchelastic.checkpoint.compat.nvrx.local.names import CkptID, header_meta
from torchelastic.checkpoint.compat.nvrx.local.shard_write import ShardWrite
from torchelastic.checkpoint.compat.nvrx.local.spare_shards import SpareShard, what_becomes, why_unkept
from torchelastic.checkpoint.compat.nvrx.local.state_dict import TensorAwareStateDict, decode, encode, plain_basic
from torchelastic.checkpoint.engine.durable_copies import DurableCopies
from torchelastic.checkpoint.engine.group_folders import give_manifest
from torchelastic.checkpoint.engine.restorer import read_good_copies, shards_of
from torchelastic.checkpoint.engine.stages import Staged
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.failures import Failures
from torchelastic.checkpoint.format.disk import REAL_DISK, Disk
from torchelastic.checkpoint.format.header import Header
from torchelastic.checkpoint.format.layout import RecurringLayout
from torchelastic.checkpoint.format.loading import read_into
from torchelastic.checkpoint.format.mapped_files import is_to_map
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.policy import KeepLast, KeepPolicy
from torchelastic.checkpoint.replicas.topology import PeerTopology, ReplicationRetryConfig, meet, root_id
from torchelastic.checkpoint.store.kinds import Kind, require_own_folder
from torchelastic.checkpoint.store.manifest import Manifest, ShardRecord
from torchelastic.checkpoint.store.save_id import SaveId, ShardId
from torchelastic.checkpoint.store.tier import TierContext, agree_epoch
from torchelastic.processes.dropped import let_go, let_go_when_dropped
from torchelastic.text import listed

if TYPE_CHECKING:
    import torch.distributed as dist

    from torchelastic.checkpoint.compat.nvrx.local.strategies import ReplicationStrategy
    from torchelastic.checkpoint.replicas.replica_server import ReplicaServer
    from torchelastic.checkpoint.store.durable_tier import DurableTier

log = logging.getLogger(__name__)

_Tensors = tuple[Header, Mapping[str, torch.Tensor]]

#: For how long a peer may be silent in a transfer, at most.
_MOST_SILENCE_S = 30.0
#: And as a part of the manager's timeout: whoever gives up on a silent peer must not be missed by the others meanwhile.
_SILENCE_PART = 1 / 4


@dataclass(frozen=True)
class _Prepared:
    """A state with its place in a warm slot; nothing is copied yet."""

    staged: Staged
    header: Header
    sources: list[torch.Tensor]


class LocalCheckpointManager(BaseCheckpointManager):
    """Saves each rank's part on its own host, and on those of its clique; see docs/checkpoint-interfaces.md.

    A save stops training for one copy into memory that is used again and again; checksums, the file and the copies to
    other hosts are the background's. While that still writes two saves, a third one waits for it. Nothing is read that
    does not match its checksums. Copies that were lost with a host are made again when a checkpoint is loaded.

    Args:
        root_local_ckpt_dir: a folder of each host, on tmpfs to be fast; it need not exist. There must be room for one
            checkpoint more than are kept (two more if one is begun while another is written), times the replication
            factor.
        session_id: tells the checkpoints of several jobs in one folder apart.
        repl_strategy: which ranks keep copies of each other's parts; None: nobody does.
        keep: how many complete checkpoints stay, or a policy that says which.
        durable: where checkpoints are copied to in the background, of this session alone; each or, with its `every`,
            some of them, the next one when the copy before is done. What no host has any more is read there. A save
            that a host has no room for goes there alone, which is an error in the log and in `failures`. None: nowhere.
        timeout_s: for how long a rank that does not come is waited for.
        process_group: see `BaseCheckpointManager`.
        allow_pickles: store and load what is neither plain nor a tensor as pickles, which can run any code.
        replica_host: the address of this host for the others; found out if it is not given.
        disk: what touches files.

    Attributes:
        failures: of saves that the hosts have no room for, in words; see `Failures`.

    Raises:
        CheckpointError: the folder cannot be created.
        TypeError, ValueError: an argument is invalid.
    """

    def __init__(
        self,
        root_local_ckpt_dir: str | os.PathLike[str],
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
        *,
        keep: int | KeepPolicy = 1,
        durable: DurableTier | None = None,
        timeout_s: float = 600.0,
        process_group: dist.ProcessGroup | None = None,
        allow_pickles: bool = False,
        replica_host: str | None = None,
        disk: Disk = REAL_DISK,
    ) -> None:
        copies = DurableCopies(durable, Kind.LOCAL) if durable is not None else None
        super().__init__(session_id, repl_strategy, timeout_s=timeout_s, process_group=process_group, copies=copies)
        self._root = Path(root_local_ckpt_dir).absolute() / session_id
        self._keep = keep if isinstance(keep, KeepPolicy) else KeepLast(keep)
        self._allow_pickles, self._replica_host, self._disk = allow_pickles, replica_host, disk
        self._folder: HostFolder | None = None
        self._server: ReplicaServer | None = None
        self._peers = PeerTopology(0, ("",))
        self._roots: list[str] = [""]
        self._epoch: int | None = None
        self._round = 0
        self._entered = 0  # which of the formations has its epoch and round
        self._layout = RecurringLayout(allow_pickles=allow_pickles)
        self._checked: tuple[ShardId, _Tensors] | None = None  # what `find_latest` has read, for the `load` after it
        self._spare: dict[SaveId, tuple[SpareShard, CheckpointError]] = {}
        self.failures = Failures()
        self._dropped = let_go_when_dropped(self, self._ranks)
        disk.make_folder(self._root)

    @property
    def local_ckpt_dir(self) -> Path:
        """The folder of this host, which its ranks share: their own parts, and the copies that they keep for others."""
        return self._root

    def load_all(self) -> list[tuple[TensorAwareStateDict, CkptID]]:
        """Reads the parts of all ranks that saved the newest complete checkpoint, on every rank. Called on all ranks.

        For another number of ranks than saved it, if you know how to put the parts together. There must be memory for
        all of them; tensors stay on the CPU until `restore_tensor_device`.

        Returns:
            State and id, as of `load`, for each rank that saved, in the order of the ranks.

        Raises:
            CheckpointError, OutOfStepError: see `load`.
        """

        def attempt(save: SaveId) -> list[tuple[TensorAwareStateDict, CkptID]]:
            return [(self._read(shard, keep=False), self._ckpt_id(shard)) for shard in shards_of(self._found[save])]

        self._begin("load_all()", look=True)
        return self._first_loadable("load_all()", attempt)

    def load_resharded(self, template: Any, *, strict: bool = True) -> tuple[Any, CkptID]:
        """Copies the newest complete checkpoint into a state that is there, whatever number of ranks saved it.

        A DTensor or `ShardOf` of the template gets its own part, put together from whatever parts were saved; what
        every rank held whole is taken from one of them. Called on all ranks, each with its own template. From
        other hosts only the parts that the template has are fetched, into memory.

        Args:
            template: a state dict (or `BasicTensorAwareStateDict`) of the saved structure; its tensors are overwritten.
            strict: see `torchelastic.checkpoint.shards.read_into`.

        Returns:
            The state with the tensors of the template (of a DTensor its local part), and what it is a part of.

        Raises:
            CheckpointError, OutOfStepError: see `load`.
        """
        tree = plain_basic(template)

        def attempt(save: SaveId) -> tuple[Any, CkptID]:
            def take(readers: Mapping[ShardId, ShardReader]) -> Any:
                return read_into(list(readers.values()), tree, strict=strict, allow_pickles=self._allow_pickles)

            shards, found = self._shards, self._found[save]
            state = read_good_copies({one: shards.sources(found, one) for one in shards_of(found)}, shards, take)
            return state, CkptID(save.step, self.rank, self.session_id)

        self._begin("load_resharded()", look=True)
        return self._first_loadable("load_resharded()", attempt)

    def wait_for_durable(self, timeout_s: float) -> bool:
        """Waits until no copy to the durable place is under way; whether that is so. Before the last rank ends, say.

        Not a collective. Rank 0 knows whether the others have copied their parts too.
        """
        return self._copies is None or self._copies.wait(timeout_s)

    def close(self) -> None:
        """Stops serving copies, gives memory back, calls off what is being written. Not a collective.

        Files stay. The object can be used on, by all ranks.
        """
        self._dropped.detach()
        self._checked = None
        let_go(*(spare for spare, _ in self._spare.values()), self._server, self._folder, self._copies)
        self._spare.clear()
        self._server = self._folder = self._epoch = None
        super().close()

    # --- meeting ------------------------------------------------------------------------------------------------------

    def _arrive(self, call: str) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

        def open_folder() -> str:
            require_own_folder(self._root, Kind.LOCAL)
            durable = self._copies.tier if self._copies else None
            self._folder = self._folder or HostFolder(self._root, self._keep, self._disk, durable)
            return root_id(self._root)

        silence_s = min(_SILENCE_PART * self._timeout_s, _MOST_SILENCE_S)
        self._peers, self._server, self._roots = meet(
            self._ranks,
            call,
            lambda: self._files.shelf,
            ReplicationRetryConfig(timeout_seconds=silence_s),
            answer=open_folder,
            choose=self._partners,
            replica_host=self._replica_host,
        )
        self._dropped.detach()
        self._dropped = let_go_when_dropped(self, self._server, self._folder, self._ranks)
        hosts, partners = self._peers.hosts, self._peers.partners
        elsewhere = tuple(  # one host has one copy
            tuple(other for other in partners if self._roots[other] != self._roots[rank])
            for rank, partners in enumerate(self._peers.partners_of)
        )
        self._peers = replace(self._peers, partners_of=elsewhere)
        if self.repl_strategy is not None and not partners:
            log.warning("rank %d keeps no copies with others: its clique has no other member", self.rank)
        clique = sorted([self.rank, *partners])
        if partners and self.rank == clique[0] and len({hosts[rank] for rank in clique}) == 1:
            log.warning("%s are to keep copies of each other, but are on one host, and lost with it", listed(clique))

    def _partners(self, peers: PeerTopology) -> list[int]:
        clique = [] if self.repl_strategy is None else self.repl_strategy.clique(self.rank, peers.hosts)
        return sorted({*clique} - {self.rank})

    @property
    def _files(self) -> HostFolder:
        if self._folder is None:
            raise CheckpointError("this manager was closed while it was in use")
        return self._folder

    def _fencing_token(self, call: str) -> tuple[int, int]:
        """Agreed before the first save of each group; who only loads fences nobody off."""
        if self._entered != self._formation:
            files, own = self._files, self._epoch

            def known_epoch() -> int:
                durable = self._copies.known_epoch(self.session_id) if self._copies and self.rank == 0 else 0
                return max(durable, files.known_epoch(self.session_id))

            def own_state() -> tuple[int | None, int, int]:
                return own, self._round, known_epoch() if own is None else 0

            epochs, rounds, known = zip(*self._ranks.run_on_all(f"{call}, entering", own_state), strict=True)
            self._epoch = agree_epoch(max((one for one in epochs if one is not None), default=None), known)
            self._round = max(rounds) + 1
            context = TierContext(self.session_id, self._epoch, self._round, self.rank, self.world_size)
            self._ranks.run_on_all(f"{call}, preparing", lambda: files.prepare(context))
            if self._copies is not None:
                self._copies.enter(context)
            self._entered = self._formation
        assert self._epoch is not None
        return self._epoch, self._round

    # --- saving -------------------------------------------------------------------------------------------------------

    def _prepare(self, state_dict: TensorAwareStateDict) -> _Prepared:
        # the others wait for `timeout_s` to hear how it went
        self._checked = None  # its file may be used again
        self._files.wait_for_turn(self._timeout_s / 2)
        header, sources = encode(state_dict, self._layout)
        return _Prepared(self._files.take(header), header, sources)

    def _release_prepared(self, prepared: Any) -> None:
        prepared.staged.pool.release(prepared.staged.stage)

    def _save(self, prepared: Any, shard: ShardId, *, is_async: bool) -> AsyncRequest:
        staged: Staged = prepared.staged
        stage, header = staged.stage, prepared.header
        header = replace(header, meta={**header.meta, **header_meta(shard, self.session_id)})
        try:
            if is_async or staged.refused is not None:
                stage.copy(prepared.sources, just_laid_out=True)
            else:
                header = header.with_checksums(stage.copy_and_hash(prepared.sources, just_laid_out=True))
        except BaseException:
            self._release_prepared(prepared)
            raise
        if staged.refused is not None:
            self._spare[shard.name] = SpareShard(shard, staged, header, self._files.stages), staged.refused
            return AsyncRequest(None, (), [])
        write = ShardWrite(
            hidden=stage.slot.path or Path(),
            target=self._files.path_of(shard),
            data_offset=stage.data_offset,
            header=header,
            shard=shard,
            peers=self._peers,
            disk=self._disk,
            stage=stage,
        )
        self._files.begin(shard, stage, write)
        return AsyncRequest(ShardWrite.run, (write,), [])

    def _commit(self, save: SaveId, saved_s: float) -> bool:
        files, copies, own = self._files, self._copies, ShardId(save, self.rank, self.world_size)
        files.settle()
        spare, refused = self._spare.get(save, (None, None))

        def answer() -> tuple[tuple[Any, ...], bool, str]:
            record = files.record_of(own) if spare is None else spare.record()
            return astuple(record), copies is not None and copies.is_free(), str(refused or "")

        parts = self._ranks.run_on_all(f"committing {save}", answer)
        shards = tuple(ShardRecord(*record) for record, *_ in parts)
        manifest = Manifest(save, self.session_id, self.world_size, shards, saved_s=saved_s)
        can_copy = all(is_free for _, is_free, _ in parts)
        unkept = why_unkept({rank: why for rank, (*_, why) in enumerate(parts) if why}, refused)

        def publish() -> bool:
            if unkept is None:
                files.commit(manifest)
            return copies is not None and can_copy and self.rank == 0 and copies.is_due(save.step)

        is_copied, *_ = self._ranks.run_on_all(f"publishing {save}", publish)
        if unkept is not None:
            self.failures.add(f"{save}", unkept, place=files.name, then=what_becomes(is_copied))
        if copies is not None and is_copied:
            copies.take(own, spare or files.open(save, self.rank))
            self._spare.pop(save, None)  # whoever reads it closes it
            if self.rank == 0:
                copies.publish(manifest)
        return unkept is None

    def _cleanup(self, save: SaveId) -> None:  # noqa: ARG002 - it is the newest, or older and superfluous
        self._files.tidy(set(self._damaged), set(self._pending))

    def _cleanup_failed_save(self, save: SaveId) -> None:
        spare, _ = self._spare.pop(save, (None, None))
        if spare is not None:
            spare.close()
        if self._folder is not None:
            self._folder.abort(save)

    # --- loading ------------------------------------------------------------------------------------------------------

    def _my_ckpt_ids(self) -> Sequence[ShardId]:
        return self._files.held()

    def _my_damages(self) -> Mapping[SaveId, str]:
        return self._files.unreadable()

    def _load(self, shard: ShardId) -> TensorAwareStateDict:
        checked, self._checked = self._checked, None
        if checked is not None and checked[0] == shard:
            return decode(*checked[1], allow_pickles=self._allow_pickles)
        return self._read(shard, keep=True)

    def _verify(self, shard: ShardId) -> None:
        self._checked = None

        def use(reader: ShardReader) -> None:
            with reader:
                if shard.rank == self.rank and is_to_map(reader.path):
                    self._checked = shard, (reader.header, reader.map())
                else:
                    reader.verify()

        self._from_any(shard, use, keep=True)

    def _make_copies_again(self, call: str, save: SaveId) -> None:
        found, folders = self._found[save], self._shards.folders
        lost = folders.lost(found.sources, own_too=True)
        if lost:  # nobody goes while others fetch from it
            again = partial(folders.make_again, shards_of(found), found.sources, lost.get(self.rank, ()))
            self._ranks.run_on_all(f"{call}, making lost copies again", again)
        give_manifest(self._files, save, self.rank, partial(self._ranks.run_on_all, f"{call}, manifests"))

    def _read(self, shard: ShardId, *, keep: bool) -> TensorAwareStateDict:
        def use(reader: ShardReader) -> TensorAwareStateDict:
            with reader:
                tensors = reader.map() if is_to_map(reader.path) else reader.read()
                return decode(reader.header, tensors, allow_pickles=self._allow_pickles)

        return self._from_any(shard, use, keep=keep)

    def _from_any(self, shard: ShardId, use: Callable[[ShardReader], Used], *, keep: bool) -> Used:
        return self._shards.read(self._found[shard.name], shard, use, keep=keep)

    @property
    def _shards(self) -> LocalShards:
        return LocalShards(self._files, self._peers, self._roots, self._copies)
