"""The list of public names holds, and has everything in it that other code was written against."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

import pytest

from tests.pure.public_api import text
from tests.pure.public_names import PUBLIC_MODULES, ROOT, exported, front_doors, public_names, tree_of

CHECKED_IN = Path(__file__).with_name("public_api.txt")
COMMAND = "python -m tests.pure.public_api > tests/pure/public_api.txt"

WHAT_TO_DO = f"""
What users may rely on has changed (- as it was, + as it is now). If that was not meant, undo it. If it was:
  1. decide whether their code still runs; a name that goes or changes its meaning stays for a release, with a warning;
  2. say in CHANGELOG.md what is new, and of a break what to write instead;
  3. {COMMAND}
"""

#: What code outside of this repository was written against: these names stay, whatever becomes of the others.
PROMISED = {
    "torchelastic": """train steps State ModelState Coordinator CoordinatorP2P ElasticBatchSampler ElasticLoader
        WorkerStats SimpleWorkerStats StopException
        NonRetryableException RetryableException __version__""",
    "torchelastic.p2p": "CoordinatorP2P",
    "torchelastic.rendezvous": """RendezvousHandler RendezvousClosedException RendezvousTimeoutException
        RendezvousNonRetryableError EtcdServer""",
    "torchelastic.checkpoint": """Checkpoint CheckpointManager FileSystemCheckpointManager set_checkpoint_manager
        get_checkpoint_manager BCPState""",
    "torchelastic.checkpoint.api": """Checkpoint CheckpointManager FileSystemCheckpointManager set_checkpoint_manager
        get_checkpoint_manager""",
    "torchelastic.metrics": """configure getStream publish_metric profile MetricHandler ConsoleMetricHandler
        NullMetricHandler PrometheusMetricHandler get_elapsed_time_ms""",
    "torchelastic.distributed": """all_gather_return_max_long broadcast_binary broadcast_bool broadcast_float_list
        broadcast_long broadcast_model get_rank""",
    "torchelastic.data": "ElasticDistributedSampler CyclingIterator ElasticBatchSampler",
    "torchelastic.lifetime": "IterManager",
    "torchelastic.checkpoint.memory": """MemoryStorageWriter MemoryStorageReader CheckpointContainerId
        CheckpointObjectManager DefaultCheckpointSaver DefaultCheckpointLoader""",
    "torchelastic.checkpoint.replication": "ReplicationManager CliqueReplicationStrategy",
    "torchelastic.checkpoint.local": "LocalCheckpointManager BasicTensorAwareStateDict TensorAwareStateDict",
    "torchelastic.checkpoint.async_ckpt": "AsyncRequest AsyncCallsQueue",
    "torchelastic.adapters.lightning": """MemoryCheckpointCallback wrap_trainer_and_auto_resume
        LocalCheckpointCallback""",
    "torchelastic.adapters.nemo": "MemoryCheckpointCallback wrap_trainer_and_auto_resume",
    "torchelastic.adapters.megatron": "MegatronAsyncSaveStrategy MegatronLoadStrategy",
}

#: Parts of signatures that are promised: (the line that the definition begins with, what stands in it or below it).
PROMISED_PARTS = [
    ("class CoordinatorP2P(", ["c10d_backend:", "init_method:", "max_num_trainers:",
                               "process_group_timeout: int=10000"]),
    ("class ModelState(", ["*,", "scheduler:", "sampler:", "extra:", "snapshot: str='auto'", "logical_shards:"]),
    ("def train(", ["coordinator:", "train_step:", "state:", "*,", "checkpoint:", "lifetime:", "max_failures:"]),
    ("def steps(", ["coordinator:", "state:"]),
    ("class State(", ["sync(", "snapshot(", "apply(", "save(", "load(", "should_save_checkpoint(self, rank: int)"]),
    ("class RendezvousHandler(", ["next_rendezvous(", "is_closed(", "set_closed(", "num_nodes_waiting("]),
    ("class EtcdServer", ["start(", "stop(", "endpoint("]),
    ("torchelastic run", ["--standalone", "--rdzv-endpoint  HOST:PORT[,..]", "--rdzv-id  ID", "--nnodes  MIN[:MAX]",
                          "--nproc-per-node  N", "--min-workers  M", "--max-workers  M", "--max-restarts  K",
                          "--log-dir  DIR"]),
    ("torchelastic simulate-esi", ["--cmd  ", "--timeout  "]),
    ("== Environment variables ==", ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_INIT_METHOD",
                                     "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def now() -> str:
    return text()


def entry(listed: str, beginning: str) -> str:
    """One definition or command of the list: its line, and everything below it that stands further in."""
    lines = listed.splitlines()
    at = next(i for i, line in enumerate(lines) if line.lstrip().startswith(beginning))
    depth = len(lines[at]) - len(lines[at].lstrip())
    taken = [lines[at]]
    for line in lines[at + 1 :]:
        if beginning.startswith("=="):
            if line.startswith("=="):
                break
        elif len(line) - len(line.lstrip()) <= depth and not line.lstrip().startswith(")"):
            break
        taken.append(line)
    return "\n".join(taken)


def test_what_users_may_rely_on_is_what_the_list_says(now: str) -> None:
    before = CHECKED_IN.read_text(encoding="utf-8")
    if before != now:
        changes = difflib.unified_diff(before.splitlines(), now.splitlines(), "public_api.txt", "the code", lineterm="")
        pytest.fail(WHAT_TO_DO + "\n".join(changes), pytrace=False)


@pytest.mark.parametrize("module", PROMISED)
def test_the_promised_names_are_public(module: str) -> None:
    assert set(PROMISED[module].split()) <= set(exported(module))


@pytest.mark.parametrize(("beginning", "parts"), PROMISED_PARTS, ids=[one[0] for one in PROMISED_PARTS])
def test_the_promised_parts_of_signatures_and_commands_are_there(beginning: str, parts: list[str], now: str) -> None:
    listed = entry(now, beginning)
    assert [part for part in parts if part not in listed] == []


def test_the_bound_on_failures_is_where_it_was_promised() -> None:
    assert "MAX_FAILURES = 100" in source_lines("torchelastic.train_loop")


def source_lines(module: str) -> list[str]:
    return [ast.unparse(node) for node in tree_of(module).body]


def test_every_public_name_is_defined_in_the_package() -> None:
    assert [name for name, found in public_names().items() if found is None] == []


def test_a_name_that_several_modules_have_is_described_at_the_shortest_way_to_it() -> None:
    doors = front_doors()
    assert doors["torchelastic.checkpoint.policy.YoungDaly"] == "torchelastic.checkpoint.YoungDaly"
    assert all(doors[door] == door for door in doors.values())


def test_every_package_with_public_names_is_in_the_list_or_known_to_be_for_ourselves() -> None:
    """A new package: add it to `PUBLIC_MODULES`, or here, with the reason."""
    for_ourselves = {
        "torchelastic.processes",  # what every room uses
    }
    packages = set()
    for path in (ROOT / "torchelastic").rglob("__init__.py"):
        source = path.read_text(encoding="utf-8")
        if "__all__ = " in source or "= lazily(" in source:
            packages.add(".".join(path.parent.relative_to(ROOT).parts))
    assert packages - for_ourselves <= set(PUBLIC_MODULES)
    assert for_ourselves <= packages
