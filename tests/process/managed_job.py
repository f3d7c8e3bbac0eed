"""A script with an IterManager that counts; each line of `done` is a step. How it ends is its first argument.

Run as `python managed_job.py WAY FOLDER`. It saves the number of its steps, and goes on from there.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from torchelastic.lifetime import IterManager

TOTAL, STEP_S = 60, 0.04


class Job:
    def __init__(self, folder: Path) -> None:
        self.saved, self.done = folder / "saved", folder / "done"
        self.step = int(self.saved.read_text()) if self.saved.exists() else 0
        self.manager = IterManager(
            total_iters=TOTAL, redundant_time=0.2, save_ckpt_time=0.1, velastic_dir=folder / ".velastic"
        )
        self.manager.iter_count = self.step

    def train(self) -> None:
        time.sleep(STEP_S)
        self.step += 1
        with self.done.open("a") as file:
            file.write(f"{self.step}\n")

    def save(self) -> None:
        partial = self.saved.with_suffix(".new")
        partial.write_text(str(self.step))
        partial.replace(self.saved)

    def loop(self) -> None:
        """As docs/lifetime.md has it."""
        while self.step < TOTAL:
            self.manager.iter()
            if self.manager.should_save_ckpt():
                with self.manager.saving():
                    self.save()
            if self.manager.should_stop:
                break
            self.train()


def exit_code(job: Job) -> None:
    job.loop()
    job.manager.close()
    sys.exit(job.manager.exit_code)


def without_close(job: Job) -> None:
    job.loop()
    sys.exit(job.manager.exit_code)


def falls_off(job: Job) -> None:
    """Its exit with 0 does not say that it has finished."""
    job.loop()


def seed(job: Job) -> None:
    """As velastic's users have it: it knows of no `should_stop`, and trains until it is killed."""
    while True:
        job.manager.iter()
        if job.manager.should_save_ckpt():
            job.save()
        job.train()
        if job.step >= TOTAL:
            break


def on_a_thread(job: Job) -> None:
    """Its manager was made on another thread than the main one, too."""
    job.manager.close()

    def work() -> None:
        again = Job(job.saved.parent)
        again.loop()
        again.manager.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def for_ever(job: Job) -> None:
    """Until it is told to stop."""
    while not job.manager.should_stop:
        job.manager.iter()
        if job.manager.should_save_ckpt():
            with job.manager.saving():
                job.save()
        else:
            job.train()
    sys.exit(job.manager.exit_code)


def main() -> None:
    ways = {way.__name__: way for way in (exit_code, without_close, falls_off, seed, on_a_thread, for_ever)}
    ways[sys.argv[1]](Job(Path(sys.argv[2])))


if __name__ == "__main__":
    main()
