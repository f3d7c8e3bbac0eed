"""Ordinary things that a newcomer does in the first hour, at a real terminal, with the commands that users type.

Of twenty such things ten are here; those about other people's scripts are in `test_ordinary_scripts.py`, and
breakpoints in `test_debugger.py`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import AtTerminal
from tests.cluster.harness import ROOT
from tests.cluster.ordinary_script import script
from tests.cluster.shell import launcher
from tests.few_examples import some_daily
from tests.process.small_tmpfs import small_tmpfs
from tests.waiting import wait_until

# --- start, watch, stop, start again ----------------------------------------------------------------------------------


def test_start_readmes_program_and_see_which_run_it_is_and_how_far_it_came(
    at_terminal: AtTerminal, host_folder: Path
) -> None:
    readme = (ROOT / "README.md").read_text()
    [text] = re.findall(r"^```python\n(.*?)^```", readme, flags=re.MULTILINE | re.DOTALL)
    shell = at_terminal("run", "train.py", text=text)
    assert shell.end() == 0, shell.said
    assert re.search(r"^run standalone-\w+ at 127.0.0.1:\d+; to watch it: torchelastic top ", shell.said, re.MULTILINE)
    assert shell.screen[-2].endswith("INFO step 16 of 16 (100 %)")
    assert shell.screen[-1] == "", "the shell's prompt comes at the beginning of a line"


@pytest.mark.long
def test_a_run_shows_by_itself_how_far_it_is_and_its_loss_without_garbling_a_line(at_terminal: AtTerminal) -> None:
    text = script(
        prepares="metrics.configure(metrics.PrometheusMetricHandler())",
        in_step='metrics.publish_metric("mine", "loss", 0.25); time.sleep(0.1); print("said", state.step + 1)',
        epochs=8,
    )
    shell = at_terminal("run", "--nproc-per-node=2", "train.py", text=text)
    line = re.compile(r"step \d+ of 64 \(\d+ %\)  [\d.]+ steps/s  loss 0.25  about [\d.]+ (s|min) left")
    shell.until_true(lambda: any(map(line.fullmatch, shell.screen[-1:])), "progress in the last line")
    assert shell.end() == 0, shell.said
    said = [line for line in shell.screen if "said" in line]
    assert sorted(said) == sorted(f"[worker {worker}] said {step}" for worker in (0, 1) for step in range(1, 65))
    assert not any(map(line.fullmatch, shell.screen)), "it was in its place, and is gone"


@pytest.mark.long
def test_watch_the_run_without_an_address_until_ctrl_c_stops_it_and_leaves_no_process(at_terminal: AtTerminal) -> None:
    text = script(in_step="time.sleep(0.1)", epochs=100)
    shell = at_terminal("run", "--nproc-per-node=2", "--rdzv-id=mine", "train.py", text=text)
    shell.until("committed its first step")
    status = at_terminal("status")
    assert status.end() == 0, status.said
    assert "run mine" in status.said
    top = at_terminal("top")
    top.until("of 800 (")
    top.type("q")
    assert top.end() == 0
    processes = psutil.Process(shell.pid).children(recursive=True)
    assert len(processes) >= 3, "two workers and an etcd"
    shell.type("\x03")
    assert shell.end() == 130
    assert shell.screen[-2] == "stopped by SIGINT"
    wait_until(lambda: not any(process.is_running() for process in processes), 10, "all processes have ended")


@pytest.mark.long
def test_the_same_command_again_goes_on_from_the_checkpoint(at_terminal: AtTerminal, host_folder: Path) -> None:
    keeps = 'checkpoint = EverySteps(4)\nset_checkpoint_manager(FileSystemCheckpointManager("saved"))'
    text = script(prepares=keeps, in_step='time.sleep(0.1); print("did", state.step + 1, flush=True)', epochs=4)
    shell = at_terminal("run", "train.py", text=text)
    shell.until("did 10")
    shell.type("\x03")
    assert shell.end() == 130
    again = at_terminal("run", "train.py")
    assert again.end() == 0, again.said
    did = [int(step) for step in re.findall(r"did (\d+)", shell.said + again.said)]
    assert did == list(range(1, 33)), "Ctrl-C saves what was done: no step is done twice"
    assert "from a checkpoint" in again.said
    assert "[worker 0] trained 32" in again.screen


@pytest.mark.long
@pytest.mark.parametrize("how", ["closed", "ctrl-backslash", "scancel"])
def test_a_closed_terminal_and_ctrl_backslash_save_and_end_the_run_as_sigterm_does(
    at_terminal: AtTerminal, host_folder: Path, how: str
) -> None:
    keeps = 'checkpoint = EverySteps(100)\nset_checkpoint_manager(FileSystemCheckpointManager("saved"))'
    does = 'time.sleep(0.1); print(state.step + 1, file=open("did", "a"), flush=True)'
    text = script(prepares=keeps, in_step=does, epochs=4)
    shell = at_terminal("run", "--rdzv-id=mine", "train.py", text=text)
    shell.until("committed its first step")
    if how == "closed":
        assert shell.hang_up() == 128 + signal.SIGHUP
    else:
        if how == "scancel":  # every process of the job gets it
            for process in (launcher := psutil.Process(shell.pid), *launcher.children(recursive=True)):
                process.send_signal(signal.SIGQUIT)
        else:
            shell.type("\x1c")
        assert shell.end() == 128 + signal.SIGQUIT
        assert shell.screen[-2] == "stopped by SIGQUIT"
    assert list(host_folder.glob("te-*")) == list(host_folder.glob("torchelastic-etcd-*")) == [], "nothing is left"
    again = at_terminal("run", "--rdzv-id=mine", "train.py")
    assert again.end() == 0, again.said
    assert [int(step) for step in (host_folder / "did").read_text().split()] == list(range(1, 33))


@pytest.mark.long
def test_under_nohup_a_run_outlives_its_terminal(at_terminal: AtTerminal, host_folder: Path) -> None:
    text = script(in_step="time.sleep(0.1)", epochs=2) + "open('is-done', 'w')"
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the launcher inherits it, as from nohup
    try:
        shell = at_terminal("run", "train.py", text=text)
    finally:
        signal.signal(signal.SIGHUP, ignored)
    shell.until("committed its first step")
    assert shell.hang_up() == 0
    assert (host_folder / "is-done").exists()


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "remedy"),
    some_daily(
        [
            (("--nproc-per-nod=2", "train.py"), "did you mean --nproc-per-node?"),
            (("--nproc-per-node=two", "train.py"), "write a number"),
            (("--nnodes=2", "train.py"), "--rdzv-endpoint HOST:PORT"),
            (("--rdzv-endpoint=http://host:2379", "--rdzv-id=a", "train.py"), "write HOST:PORT[,..], without a scheme"),
            (("--term-grace=nan", "train.py"), "give seconds, 0 or more"),
            (("trian.py",), "there is no file 'trian.py'"),
            ((), "script"),
        ],
        lambda case: len(case[0]) == 1,
    ),
)
def test_wrong_words_are_answered_in_one_line_that_names_the_remedy(
    at_terminal: AtTerminal, words: tuple[str, ...], remedy: str
) -> None:
    shell = at_terminal("run", *words, text="")
    assert shell.end() == 2
    (line, rest) = shell.screen[:2]
    assert line.startswith("torchelastic run: ")
    assert remedy in line
    assert rest == ""


@pytest.mark.long
def test_a_full_disk_of_logs_stops_nothing(at_terminal: AtTerminal, host_folder: Path) -> None:
    with small_tmpfs(host_folder / "disk", 2**16) as disk:
        text = script(in_step='print("x" * 9000, flush=True)')
        shell = at_terminal("run", f"--log-dir={disk}", "train.py", text=text)
        assert shell.end() == 0, shell.said[-3000:]
        assert "[worker 0] trained 16" in shell.screen
        assert shell.said.count("cannot be written to --log-dir") == 1


@pytest.mark.long
def test_read_the_report_of_a_run_in_which_a_worker_was_lost(at_terminal: AtTerminal, host_folder: Path) -> None:
    is_first = 'os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"'
    dies = f"state.step == 3 and coordinator.rank == 1 and {is_first} and os.kill(os.getpid(), 9)"
    shell = at_terminal("run", "--nproc-per-node=2", "--log-dir=logs", "train.py", text=script(in_step=dies))
    assert shell.end() == 0, shell.said
    lost = re.search(r"WARNING worker (\d) \(rank 1, round 1, step 3\): lost, signal 9", shell.said)
    assert lost is not None, shell.said
    report = at_terminal("report", "logs", "--json", COLUMNS="100000")
    assert report.end() == 0, report.said
    assert re.search(rf'"worker": "[^"]+/{lost[1]}\.0"', report.said)
    page = at_terminal("report", "logs")
    assert page.end() == 0
    assert "report: report.html" in page.screen
    assert "SIGKILL" in (host_folder / "report.html").read_text()


# --- progress bars and colours ----------------------------------------------------------------------------------------

TQDM = """
import time, tqdm
for n in tqdm.tqdm(range(40)):
    time.sleep(0.05)
print("\\033[31mred\\033[0m" if __import__("os").environ.get("FORCE_COLOR") else "plain")
"""
RICH = """
import time
from rich.progress import Progress
with Progress() as bars:
    tasks = [bars.add_task(name, total=20) for name in ("one", "two", "three")]
    for n in range(20):
        [bars.advance(task) for task in tasks]
        if n == 10:
            bars.print("between")
        time.sleep(0.05)
print("done")
"""


@pytest.mark.long
def test_the_bar_of_tqdm_moves_in_its_place(at_terminal: AtTerminal) -> None:
    pytest.importorskip("tqdm")
    shell = at_terminal("run", "--log-dir=logs", "train.py", text=TQDM)
    moves = re.compile(r"\[worker 0\] +\d?[1-9]%\|.*")
    shell.until_true(lambda: moves.fullmatch(shell.screen[-1]), "a bar under way in the last line")
    assert shell.end() == 0
    (bar,) = [line for line in shell.screen if "%|" in line]
    assert bar.startswith("[worker 0] 100%|")
    assert "40/40" in bar


def test_bars_of_several_workers_are_not_among_each_others_lines(at_terminal: AtTerminal, host_folder: Path) -> None:
    pytest.importorskip("tqdm")
    shell = at_terminal("run", "--nproc-per-node=3", "--log-dir=logs", "train.py", text=TQDM)
    moves = re.compile(r"\[worker \d\] +\d?[1-9]%\|.*")
    shell.until_true(lambda: moves.fullmatch(shell.screen[-1]), "a bar under way in the last line")
    assert shell.end() == 0
    bars = sorted(line for line in shell.screen if "%|" in line)
    assert [bar[:16] for bar in bars] == [f"[worker {worker}] 100%|" for worker in range(3)]
    kept = (host_folder / "logs" / "worker_1.0.log").read_bytes()
    assert kept.count(b"\r") > 10, "a file has all of it"


def test_a_picture_of_several_lines_is_drawn_in_its_place(at_terminal: AtTerminal) -> None:
    shell = at_terminal("run", "train.py", text=RICH)
    assert shell.end() == 0
    assert shell.said.count("one") > 5, "it was drawn again and again"
    said = [line.removeprefix("[worker 0] ") for line in shell.screen if line.startswith("[worker 0]")]
    assert [line.split()[0] for line in said] == ["between", "one", "two", "three", "done"]
    assert all("100%" in line for line in said[1:4])


@pytest.mark.parametrize(
    ("name", "text", "ends"),
    some_daily(
        [("tqdm", TQDM, ["100%|"]), ("rich", RICH, ["one", "two", "three"])],
        lambda case: case[0] == "tqdm",
    ),
)
def test_in_a_file_a_bar_is_one_line_and_nothing_has_a_colour(
    host_folder: Path, name: str, text: str, ends: list[str]
) -> None:
    pytest.importorskip(name)
    (host_folder / "train.py").write_text(text)
    environment = {**os.environ, "TERM": "xterm-256color"}
    command = [sys.executable, *launcher("run", "train.py")]
    done = subprocess.run(command, cwd=host_folder, env=environment, capture_output=True, timeout=60)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    assert "\r" not in said
    assert "\x1b" not in said
    bars = [line for line in said.splitlines() if "100%" in line or "%|" in line]
    assert len(bars) == len(ends)
    assert all(bar.startswith(f"[worker 0] {end}") for bar, end in zip(bars, ends, strict=True))


def test_a_terminal_has_the_colours_of_workers_and_files_have_none(at_terminal: AtTerminal, host_folder: Path) -> None:
    pytest.importorskip("tqdm")
    shell = at_terminal("run", "--log-dir=logs", "train.py", text=TQDM)
    assert shell.end() == 0
    assert "[worker 0] \x1b[31mred\x1b[0m\r\n" in shell.said
    kept = (host_folder / "logs" / "worker_0.0.log").read_text()
    assert "red\n" in kept
    assert "\x1b" not in kept
    without = at_terminal("run", "train.py", NO_COLOR="1")
    assert without.end() == 0
    assert "[worker 0] plain" in without.screen
