"""A job that counts: each line of `done` is a step. How it ends and what it starts is its first argument.

Run as `python -S short_lived_job.py WAY FOLDER`, so that it has started before its time is over.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

TOTAL, PER_LIFE = 11, 4


class Job:
    def __init__(self, folder: Path) -> None:
        self.saved_path, self.done_path = folder / "saved", folder / "done"
        self.progress_path = Path(os.environ["TORCHELASTIC_PROGRESS_FILE"])
        self.start = self.step = self.saved = int(self.saved_path.read_text()) if self.saved_path.exists() else 0

    def work(self, steps: int) -> None:
        for _ in range(min(steps, TOTAL - self.step)):
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # a step is done, or it is not
            self.step += 1
            with self.done_path.open("a") as file:
                file.write(f"{self.step}\n")
            self.tell()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    def save(self) -> None:
        self.saved_path.write_text(str(self.step))
        self.saved = self.step
        self.tell()

    def tell(self) -> None:
        told = {"resumed_step": self.start, "committed_step": self.step, "saved_step": self.saved}
        partial = self.progress_path.with_suffix(".new")
        partial.write_text(json.dumps(told))
        partial.replace(self.progress_path)


def ignore_the_end(job: Job, folder: Path) -> None:
    """Saves once, does more, ignores SIGTERM; a child in its own session, and one whose parent is gone, do so too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    leave_behind(folder)
    job.work(2)
    job.save()
    job.work(2)
    while True:
        time.sleep(0.1)


def leave_behind(folder: Path) -> None:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    shell = "sleep 600 >/dev/null & echo $!"
    orphan = subprocess.run(["sh", "-c", f"exec setsid sh -c '{shell}'"], stdout=subprocess.PIPE).stdout
    with (folder / "pids.new").open("a") as file:
        file.write(f"{os.getpid()} {child.pid} {orphan.decode().strip()} ")
    (folder / "pids").write_text((folder / "pids.new").read_text())


def save_at_the_end(job: Job, folder: Path) -> None:
    """Does a few steps, waits for SIGTERM, saves and ends, a little later."""
    end_s = float(Path(os.environ["TORCHELASTIC_TERMINATION_FILE"]).read_text())

    def on_term(_number: int, _frame: FrameType | None) -> None:
        with (folder / "early").open("a") as file:
            file.write("early\n" if time.time() < end_s else "")
        time.sleep(0.3)  # a save takes its time; whoever goes by the shell, which is gone already, ends it here
        job.save()
        sys.exit(0)

    signal.signal(signal.SIGTERM, on_term)
    job.work(PER_LIFE)
    while job.step < TOTAL:
        time.sleep(0.05)


def stop_early(job: Job, folder: Path) -> None:
    """Does a few steps, saves, and asks to be started again."""
    with (folder / "ends").open("a") as file:
        end = Path(os.environ["TORCHELASTIC_TERMINATION_FILE"]).read_text().strip()
        variable = os.environ["MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"]
        file.write(f"{os.environ['TORCHELASTIC_LIFE']} {end} {variable} {time.time()}\n")
    job.work(PER_LIFE)
    job.save()
    sys.exit(0 if job.step == TOTAL else 75)


def main() -> None:
    ways = {"ignore": ignore_the_end, "save": save_at_the_end, "stop": stop_early}
    folder = Path(sys.argv[2])
    ways[sys.argv[1]](Job(folder), folder)


if __name__ == "__main__":
    main()
