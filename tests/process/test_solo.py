"""Without a launcher a process trains alone: started by hand, in a notebook, in a debugger; no etcd, no agent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import torchelastic

ROOT = Path(__file__).parents[2]
SAID = (
    "this process trains alone; for more workers, start the script with `torchelastic run --nproc-per-node 2 train.py`"
)

#: A run of 20 steps; `in_step` is called in each before it changes anything.
TRAINING = """
import sys, torch, torchelastic
from torchelastic.checkpoint import EverySteps, FileSystemCheckpointManager

def train(in_step=lambda step: None, checkpoint=None):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.01))

    def train_step(state):
        if state.step == 20:
            raise StopIteration
        in_step(state.step)
        state.optimizer.zero_grad()
        state.model(torch.ones(1, 2)).square().sum().backward()
        state.optimizer.step()

    coordinator = torchelastic.CoordinatorP2P()
    torchelastic.train(coordinator, train_step, state, checkpoint=checkpoint)
    print("trained", state.step, "rank", coordinator.rank, "of", coordinator.world_size, flush=True)
    return model
"""


def readme() -> str:
    """README's first program, with a line at its end that says what became of it, and of its children."""
    [script] = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    ending = "import os\nprint('trained', state.step, torch.distributed.get_world_size())\n"
    children = "print('children', open(f'/proc/self/task/{os.getpid()}/children').read().split())\n"
    return str(script) + ending + children


def clean_environment(**more: str) -> dict[str, str]:
    """Of a shell that knows nothing of any launcher, and in which no etcd is found."""
    return {"HOME": os.environ.get("HOME", "/"), "PATH": "/nowhere", **more}


def start(folder: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=clean_environment(**more),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *words: str, stdin: str = "", code: int = 0, **more: str) -> tuple[str, str]:
    """What it wrote to standard output and standard error."""
    process = start(folder, *words, **more)
    out, err = process.communicate(stdin, timeout=90)
    assert process.returncode == code, err
    return out, err


@pytest.mark.long
def test_readmes_first_program_trains_alone_under_plain_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(readme())
    out, err = run(tmp_path, "train.py")
    assert out.splitlines() == ["trained 16 1", "children []"], err
    assert [line for line in err.splitlines() if SAID in line] == err.splitlines()
    assert len(err.splitlines()) == 1


@pytest.mark.long
def test_typed_into_an_interactive_interpreter_it_trains(tmp_path: Path) -> None:
    out, err = run(tmp_path, "-i", stdin=readme())
    assert "trained 16 1" in out, err
    assert err.count(SAID) == 1
    assert "Traceback" not in err


@pytest.mark.long
def test_cells_of_a_notebook_can_be_interrupted_and_run_again(tmp_path: Path) -> None:
    """As a notebook's kernel does it: one process, `exec` of source without a file, exceptions shown, on it goes."""
    cells = """
import traceback
cells = [
    TRAINING,
    "def once(what):\\n    seen = []\\n    def in_step(step):\\n        if step == 5 and not seen:\\n"
    "            seen.append(step)\\n            raise what\\n    return in_step\\n",
    "failed = train(once(RuntimeError('a step that fails once')))",
    "train(once(KeyboardInterrupt()))",
    "train(once(ValueError('a mistake in the cell')))",
    "straight = train()",
    "print('same weights', all(torch.equal(*pair) for pair in zip(failed.parameters(), straight.parameters())))",
]
namespace = {"__name__": "__main__"}
for cell in cells:
    try:
        exec(cell, namespace)
    except BaseException as error:
        print(type(error).__name__, flush=True)
"""
    out, err = run(tmp_path, "-c", f"TRAINING = {TRAINING!r}\n{cells}")
    trained = "trained 20 rank 0 of 1"
    assert out.splitlines() == [trained, "KeyboardInterrupt", "ValueError", trained, "same weights True"], err
    assert "failure 1 in a row: RuntimeError: a step that fails once" in err


@pytest.mark.long
def test_a_breakpoint_in_a_step_reads_standard_input(tmp_path: Path) -> None:
    script = f"{TRAINING}\ndef in_step(step):\n    if step == 3:\n        breakpoint()\n\ntrain(in_step)\n"
    (tmp_path / "train.py").write_text(script)
    out, err = run(tmp_path, "train.py", stdin="p 'the step is', step\nc\n")
    assert "(Pdb) ('the step is', 3)" in out, err
    assert out.endswith("trained 20 rank 0 of 1\n"), err


@pytest.mark.long
def test_sigterm_saves_and_the_next_start_goes_on(tmp_path: Path) -> None:
    script = f"""{TRAINING}
def in_step(step):
    print("step", step, flush=True)
    if step == 7 and len(sys.argv) > 1:
        sys.stdin.readline()

train(in_step, FileSystemCheckpointManager("checkpoints"))
"""
    (tmp_path / "train.py").write_text(script)
    first = start(tmp_path, "train.py", "waits")
    assert first.stdout is not None
    assert first.stdin is not None
    while "step 7" not in first.stdout.readline():
        assert first.poll() is None
    first.send_signal(signal.SIGTERM)
    assert first.stderr is not None
    while "SIGTERM" not in first.stderr.readline():
        assert first.poll() is None
    out, err = first.communicate("\n", timeout=60)
    assert out.splitlines() == ["trained 8 rank -1 of 0"], err
    assert first.returncode == 0
    out, err = run(tmp_path, "train.py")
    assert out.splitlines() == [*(f"step {n}" for n in range(8, 20)), "trained 20 rank 0 of 1"], err


@pytest.mark.long
def test_a_second_sigterm_and_ctrl_c_end_it_at_once(tmp_path: Path) -> None:
    script = (
        f"{TRAINING}\ndef in_step(step):\n    print('step', flush=True)\n    sys.stdin.readline()\n\ntrain(in_step)\n"
    )
    (tmp_path / "train.py").write_text(script)
    for signals, code in (([signal.SIGTERM, signal.SIGTERM], -signal.SIGTERM), ([signal.SIGINT], -signal.SIGINT)):
        process = start(tmp_path, "train.py")
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "step\n"
        process.send_signal(signals[0])
        for number in signals[1:]:
            while "SIGTERM: this worker leaves" not in process.stderr.readline():
                assert process.poll() is None
            process.send_signal(number)
        assert process.wait(60) == code
        process.communicate()


@pytest.mark.long
def test_tiers_take_the_checkpoints_of_one_process_after_another(tmp_path: Path) -> None:
    """The second process has lower round numbers than the first, which had formed several groups."""
    script = f"""{TRAINING}
from torchelastic.checkpoint import DiskTier, TieredCheckpointManager

failures = []
def in_step(step):
    if step in (2, 4) and step not in failures:
        failures.append(step)
        raise RuntimeError(f"in step {{step}}")
    if step == int(sys.argv[1]):
        sys.exit("stopped")
    print("step", step, flush=True)

train(in_step, TieredCheckpointManager([DiskTier("disk")], policy=EverySteps(5)))
"""
    (tmp_path / "train.py").write_text(script)
    out, err = run(tmp_path, "train.py", "12", code=1)
    assert out.splitlines()[-1] == "step 11", err
    assert "in step 4" in err
    out, err = run(tmp_path, "train.py", "100")
    assert out.splitlines() == [*(f"step {n}" for n in range(10, 20)), "trained 20 rank 0 of 1"], err


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_where_another_launcher_has_started_several_none_trains_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_INIT_METHOD", raising=False)
    monkeypatch.setenv(name, "4")
    with pytest.raises(ValueError, match=f"{name}=4: each of these processes would train alone: start the script with"):
        torchelastic.CoordinatorP2P()
