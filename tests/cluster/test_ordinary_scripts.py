"""Ordinary scripts, as people have them already, started at a real terminal: ten things of twenty.

The others are in `test_ordinary_things.py`. What becomes of such scripts when a worker is lost is in
`test_plain_scripts.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.cluster.conftest import AtTerminal
from tests.cluster.framework_scripts import ACCELERATE, DDP, LIGHTNING, TRANSFORMERS
from tests.cluster.ordinary_script import script
from tests.cluster.shell import Shell
from torchelastic.network.ports import unused_ports
from torchelastic.rendezvous.server import EtcdServer


def said_by_workers(shell: Shell, pattern: str) -> list[str]:
    """What the workers have said that looks so, each line once as the terminal shows it, sorted."""
    lines = [re.fullmatch(rf"\[worker \d+\] ({pattern})", line) for line in shell.screen]
    return sorted(line[1] for line in lines if line)


def skip_without(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")


# --- with the train loop ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_evaluate_on_rank_0_while_the_others_wait(at_terminal: AtTerminal) -> None:
    evaluates = """
    if coordinator.rank == 0 and (state.step + 1) % 8 == 0:
        with torch.no_grad():
            time.sleep(3)  # a large data set
            print(f"loss {torch.nn.functional.mse_loss(state.module(dataset[:][0]), dataset[:][1]):.2f}", flush=True)
"""
    shell = at_terminal("run", "--nproc-per-node=2", "train.py", text=script(in_step=evaluates.strip()))
    assert shell.end() == 0, shell.said
    assert len(said_by_workers(shell, r"loss \d\.\d\d")) == 2
    assert said_by_workers(shell, r"trained \d+") == ["trained 16"] * 2
    assert shell.said.count("WARNING") == shell.said.count("this worker has been in its own code") <= 1, shell.said
    assert not re.search(r"ERROR|failure|aborted|undone", shell.said), "a slow evaluation is no failure"


def test_log_to_tensorboard(at_terminal: AtTerminal, host_folder: Path) -> None:
    skip_without("tensorboard")
    prepares = "from torch.utils.tensorboard import SummaryWriter\nwriter = SummaryWriter('board')"
    logs = 'coordinator.rank == 0 and writer.add_scalar("loss", loss.item(), state.step)'
    shell = at_terminal("run", "--nproc-per-node=2", "train.py", text=script(prepares=prepares, in_step=logs))
    assert shell.end() == 0, shell.said
    assert sum(path.stat().st_size for path in (host_folder / "board").iterdir()) > 500


#: README's step as those write it who give the optimizer a closure; one worker is killed in it, once.
WITH_CLOSURE = """
    def closure():
        if state.step == 3 and coordinator.rank == 1 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), 9)
        state.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(state.model(inputs), targets)
        loss.backward()
        return loss
    state.optimizer.step(closure)
"""


@pytest.mark.long
def test_an_optimizer_with_a_closure_and_a_worker_that_is_killed_in_it(
    at_terminal: AtTerminal, host_folder: Path
) -> None:
    program = script(in_step="time.sleep(0.1)", epochs=16)
    begin, end = program.index("    loss = torch.nn"), program.index("    time.sleep(0.1)")
    text = f"{program[:begin]}{WITH_CLOSURE.strip(chr(10))}\n{program[end:]}\nprint('weights', model.weight.tolist())"
    shell = at_terminal("run", "--nproc-per-node=2", "train.py", text=text)
    assert shell.end() == 0, shell.said
    assert (host_folder / "killed").exists()
    assert said_by_workers(shell, r"trained \d+") == ["trained 128"] * 2, "it has come back"
    first, second = said_by_workers(shell, r"weights .*")
    assert first == second
    assert "not averaged" not in shell.said
    assert "half-way" not in shell.said


@pytest.mark.long
def test_a_head_that_no_step_uses_is_named_before_workers_train_each_by_themselves(at_terminal: AtTerminal) -> None:
    with_head = "model = torch.nn.Linear(8, 1); model.head = torch.nn.Linear(8, 1)"
    text = script().replace("model = torch.nn.Linear(8, 1)", with_head)
    shell = at_terminal("run", "--nproc-per-node=2", "train.py", text=text)
    assert shell.end() == 1
    assert "the backward pass gave no gradient to head.weight, head.bias" in shell.said
    assert "trained" not in shell.said
    text = text.replace("sampler=sampler)", "sampler=sampler, find_unused_parameters=True)")
    shell = at_terminal("run", "--nproc-per-node=2", "train.py", text=text)
    assert shell.end() == 0, shell.said
    assert said_by_workers(shell, r"trained \d+") == ["trained 16"] * 2
    assert "ERROR" not in shell.said


@pytest.mark.long
def test_python_train_py_trains_alone(host_folder: Path) -> None:
    (host_folder / "train.py").write_text(script(in_step="pass"))
    shell = Shell("train.py", folder=host_folder)
    assert shell.end() == 0, shell.said
    assert shell.screen[-2:] == ["trained 16", ""]
    assert sum("this process trains alone" in line for line in shell.screen) == 1


#: What a kernel of Jupyter does with the cells of a notebook: one after the other, in one module, in its event loop.
KERNEL = """
import asyncio, json, sys, types

async def main():
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    for cell in json.load(open("cells.json")):
        exec(compile(cell, "<cell>", "exec"), module.__dict__)
        await asyncio.sleep(0)

asyncio.run(main())
"""


@pytest.mark.long
def test_a_notebook_trains_and_trains_again_in_its_next_cell(host_folder: Path) -> None:
    program, call = script(in_step="pass").split('coordinator = torchelastic.CoordinatorP2P("gloo")\n')
    again = "sampler.epochs, coordinator = 3, torchelastic.CoordinatorP2P('gloo')\n" + call
    cells = [program, f"coordinator = torchelastic.CoordinatorP2P('gloo')\n{call}", again]
    (host_folder / "cells.json").write_text(json.dumps(cells))
    (host_folder / "kernel.py").write_text(KERNEL)
    shell = Shell("kernel.py", folder=host_folder)
    assert shell.end() == 0, shell.said
    assert [line for line in shell.screen if line.startswith("trained")] == ["trained 16", "trained 24"]


@pytest.mark.skipif(importlib.util.find_spec("nbclient") is None, reason="pip install nbclient ipykernel")
def test_a_notebook_in_jupyter(host_folder: Path) -> None:
    nbclient, nbformat = importlib.import_module("nbclient"), importlib.import_module("nbformat")
    cell = nbformat.v4.new_code_cell(script(in_step="pass"))
    notebook = nbformat.v4.new_notebook(cells=[cell])
    nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(host_folder)}}).execute()
    assert "trained 16" in str(cell.outputs)


@pytest.mark.long
def test_two_hosts_with_the_same_command(at_terminal: AtTerminal) -> None:
    with EtcdServer(port=unused_ports("127.0.0.1")[0]) as etcd:
        words = ("run", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job7", "--nnodes=2", "train.py")
        text = script(in_step="time.sleep(0.1)", epochs=4)
        hosts = [at_terminal(*words, text=text) for _ in range(2)]
        for shell in hosts:
            shell.until("of 32 (")
        for shell in hosts:
            assert shell.end() == 0, shell.said
            assert "[worker 0] trained 32" in shell.screen
            assert re.search(r"joined round 1 as rank \d, world size 2", shell.said)
            assert f"torchelastic top --rdzv-endpoint {etcd.endpoint} --rdzv-id job7" in shell.said


# --- scripts of torchrun ----------------------------------------------------------------------------------------------


def test_torchruns_words_on_one_host(at_terminal: AtTerminal, host_folder: Path) -> None:
    text = "import os, sys\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[1:])"
    shell = at_terminal(
        *("run", "--nnodes=1", "--nproc_per_node=2", "--rdzv-backend=c10d", "--rdzv_endpoint=localhost:0"),
        *("--max-restarts=1", "--tee=3", "--log_dir=logs", "train.py", "--epochs", "10"),
        text=text,
    )  # fmt: skip
    assert shell.end() == 0, shell.said
    assert said_by_workers(shell, "rank .*") == [f"rank {rank} of 2 ['--epochs', '10']" for rank in (0, 1)]
    assert "rank 1 of 2" in (host_folder / "logs" / "worker_1.0.log").read_text()


@pytest.mark.long
def test_plain_ddp(at_terminal: AtTerminal) -> None:
    shell = at_terminal("run", "--nproc-per-node=2", "train.py", text=DDP)
    assert shell.end() == 0, shell.said
    assert said_by_workers(shell, "gradient .*") == ["gradient [[0.5, 0.5]] of 2"] * 2


@pytest.mark.long
@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    ("package", "text"),
    [("lightning", LIGHTNING), ("accelerate", ACCELERATE), ("transformers", TRANSFORMERS)],
    ids=["lightning", "accelerate", "transformers"],
)
def test_a_trainer_of_a_framework_with_its_bars(
    at_terminal: AtTerminal, host_folder: Path, package: str, text: str
) -> None:
    skip_without(package)
    text = text.replace("enable_progress_bar=False", "enable_progress_bar=True").replace("disable_tqdm=True", "")
    shell = at_terminal("run", "--nproc-per-node=2", "train.py", str(host_folder / "out"), text=text)
    assert shell.end(200) == 0, shell.said[-6000:]
    assert said_by_workers(shell, r"rank \d of \d step \d") == ["rank 0 of 2 step 3", "rank 1 of 2 step 3"]
    unfinished = [line for line in shell.screen if re.search(r"\s[1-9]?\d%\|", line)]
    assert len(unfinished) <= 2, "a bar is a line, and not one for each of its states"
