"""Fixtures for all tests."""

from __future__ import annotations

import os

# First of all: protobuf chooses its implementation when it is first imported, and etcd3's generated code runs only on
# this one. Anything imported below, or by a test, may import protobuf.
os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"

import gc
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.changes import changed_paths, waits
from tests.few_examples import FEW
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.testing.etcd import running_etcd

# how long an example takes on a shared machine says nothing; a failure prints what repeats it
hypothesis.settings.register_profile("torchelastic", deadline=None, print_blob=True)
# `make test` asks for it; `make test-long`, and CI by it, tries all examples of the same tests
hypothesis.settings.register_profile("daily", hypothesis.settings.get_profile("torchelastic"), max_examples=FEW)
hypothesis.settings.load_profile("torchelastic")

_ROOT = Path(__file__).parents[1]
#: When CI's time for the long tests is over, in seconds since 1970.
_END = "TORCHELASTIC_TESTS_END_S"
#: The environment in which the run of the tests began.
_VARIABLES = pytest.StashKey[dict[str, str]]()
#: What has changed, see `tests.changes`; None: everything.
_CHANGED = pytest.StashKey[list[str] | None]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make test-gpu` runs the jobs of tests of recovery on one GPU, by NCCL, and saves states that are there."""
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="of tests/cluster's jobs and contracts")
    parser.addoption("--forked-workers", action="store_true", help="of tests/cluster's jobs, see its forked_workers.py")
    told = "what has changed; of unchanged adapters, examples, pages the tests are long, see tests/changes.py"
    parser.addoption("--changed", choices=["all", "git", "none"], default="all", help=told)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until the tests are collected
    # A machine may say that Python is to keep no bytecode. Then every worker of xdist would rewrite the asserts of all
    # test files anew, 40 s, and each of the thousands of processes that tests start would compile this package again.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    config.stash[_VARIABLES] = dict(os.environ)
    config.stash[_CHANGED] = _changed(config)
    if config.getoption("--device") == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError("--device cuda: no GPU here, or a torch that was not built for one")
    # some hundred lines from the import of etcd3's generated code, which nobody here can change
    config.addinivalue_line("filterwarnings", "ignore:Call to deprecated create function:DeprecationWarning")
    # A shell without job control starts `make test &` with SIGINT ignored, and every process that a test starts would
    # inherit that: none could be ended by Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _changed(config: pytest.Config) -> list[str] | None:
    """What has changed; workers of xdist are told by the process that starts them."""
    told = getattr(config, "workerinput", None)
    if told is not None:
        changed: list[str] | None = told["changed"]
        return changed
    what = config.getoption("--changed")
    if what == "git":
        return changed_paths(_ROOT)
    return None if what == "all" else []


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Called by xdist for each of its workers."""
    node.workerinput["changed"] = node.config.stash[_CHANGED]


def _waits(path: Path, config: pytest.Config) -> bool:
    return path.is_relative_to(_ROOT) and waits(path.relative_to(_ROOT).as_posix(), config.stash[_CHANGED])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Imports no file of which no test is asked for: all of them take each process half a minute."""
    asked = str(config.option.markexpr)
    if not collection_path.name.startswith("test_"):
        return None
    if "not long" in asked:
        return True if _waits(collection_path, config) else None
    words = ["mark.long", "some_daily"] if "long" in asked else []
    words += ["hypothesis"] if "hypothesis" in asked else []
    if not words or _waits(collection_path, config):
        return None
    text = collection_path.read_text()
    return None if any(word in text for word in words) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before `-m` chooses among them."""
    for item in items:
        if _waits(item.path, config):
            item.add_marker(pytest.mark.long)
    end_s = os.environ.get(_END)
    if end_s is not None and items:  # else those for which no time is left would be the same each time
        files = list(dict.fromkeys(item.path for item in items))
        first = int(end_s) % len(files)
        place = {path: (number - first) % len(files) for number, path in enumerate(files)}
        items.sort(key=lambda item: place[item.path])


def pytest_collection_finish() -> None:
    """No collection of garbage looks at the modules and thousands of tests again, and copies their pages in a fork."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Nothing begins when CI's time is over. One torch thread, as in the processes that tests start.

    Results are bit-identical only for equal numbers of threads. Not in a fixture: it comes before the fixtures of a
    module, which compute, too, and before each test, for libraries such as Accelerate set another number. Tests of what
    needs no torch do not import it.
    """
    end_s = os.environ.get(_END)
    if end_s is not None and time.time() > float(end_s):
        pytest.skip("no time left in CI on this machine: run `make test-long`")
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """No test leaves variables or a group behind: those that come after it in this process would depend on it."""
    yield
    last_group = sys.modules.get("torchelastic.p2p.last_group")
    if last_group is not None:
        last_group.end_last_group()  # as the end of a script does
    kept = {name: value for name, value in os.environ.items() if name == "PYTEST_CURRENT_TEST"}
    variables = item.config.stash[_VARIABLES]
    os.environ.clear()
    os.environ.update({**variables, **kept})


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdServer]:
    """A real etcd, shared by all tests of the session: use `run_id` in every key.

    Without a binary it fails, and says how to get one. A test that stops or breaks its server starts its own.
    """
    with running_etcd() as server:
        yield server


@pytest.fixture
def run_id() -> str:
    """A name that no other test uses."""
    return f"test-{uuid.uuid4().hex}"
