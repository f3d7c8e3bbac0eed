"""The processes of the contenders, seen from the one that measures."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

START_S = 120.0
ANSWER_S = 300.0
END_S = 20.0


class NotMeasuredError(Exception):
    """A contender is not there, or cannot do what it was asked for; the text says why."""


@dataclass(frozen=True)
class Setting:
    """What all contenders of a measurement have in common.

    Attributes:
        folder: on tmpfs.
        size_mib: of the state of each rank.
        tensors: in it.
        ranks: one per host; all of them on this one.
        flashpoint_python: the interpreter that ML Flashpoint was installed for, or None.
    """

    folder: Path
    size_mib: int
    tensors: int
    ranks: int = 1
    flashpoint_python: Path | None = None

    def source(self, rank: int) -> Path:
        """The file with the state of a rank."""
        return self.folder / f"source-{rank}"

    @property
    def target(self) -> Path:
        """The file that is copied to and loaded into."""
        return self.folder / "target"


class Member:
    """All ranks of one contender; `start` waits for them."""

    def __init__(self, name: str, setting: Setting) -> None:
        self.name = name
        self._processes: list[subprocess.Popen[bytes]] = []
        folder = setting.folder / name
        folder.mkdir()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the member
        try:
            for rank in range(setting.ranks):
                self._processes.append(self._start(setting, folder, rank))
        except BaseException:
            self.close()
            raise

    def _start(self, setting: Setting, folder: Path, rank: int) -> subprocess.Popen[bytes]:
        arguments = [
            *_interpreter(self.name, setting),
            *("-m", "benchmarks.memory_tier.contender", self.name),
            *(str(folder), str(setting.source(rank)), str(setting.target), "--tensors", str(setting.tensors)),
            *(
                "--rank",
                str(rank),
                "--ranks",
                str(setting.ranks),
                "--store",
                str(setting.folder / f"store-{self.name}"),
            ),
        ]
        if self.name.startswith("flashpoint") and setting.ranks > 1:
            arguments = [*_with_a_folder_of_its_own(folder), *arguments]
        environment = os.environ | {
            "MLFLASHPOINT_LOG_LEVEL": "ERROR",
            "TORCHELASTIC_FAILURE_DOMAIN": f"host{rank}",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        return subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment
        )

    def start(self) -> None:
        """Waits until it is ready. Raises: NotMeasuredError."""
        self._hear(START_S)

    def ask(self, what: str, answer_s: float = ANSWER_S, **details: Any) -> list[dict[str, Any]]:
        """Has all ranks do something at once.

        Raises:
            NotMeasuredError: one of them cannot, has died, or does not answer within `answer_s`.
        """
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps({"ask": what} | details).encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise NotMeasuredError(f"its process has ended: {self._last_error()}") from None
        return self._hear(answer_s)

    def _hear(self, answer_s: float) -> list[dict[str, Any]]:
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                if not selector.select(answer_s):
                    raise NotMeasuredError(f"no answer within {answer_s:g} s: {self._last_error()}")
            line = process.stdout.readline()
            if not line:
                raise NotMeasuredError(f"its process has ended: {self._last_error()}")
            answers.append(json.loads(line))
        for answer in answers:
            if "failed" in answer:
                raise NotMeasuredError(answer["failed"])
        return answers

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it has said nothing"

    def close(self) -> None:
        """Ends the processes; those that do not end by themselves are killed."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._errors.close()


def _interpreter(name: str, setting: Setting) -> list[str]:
    if not name.startswith("flashpoint"):
        return [sys.executable]
    if setting.flashpoint_python is None:
        raise NotMeasuredError("no --flashpoint-python: see benchmarks/README.md for how to get it")
    return [str(setting.flashpoint_python)]


def _with_a_folder_of_its_own(folder: Path) -> Sequence[str]:
    """ML Flashpoint knows objects by their absolute path, so each of its hosts needs a file system of its own there."""
    if os.geteuid() != 0:
        raise NotMeasuredError("two of its hosts on one machine need mount namespaces, and those need root")
    script = 'mount -t tmpfs tmpfs "$0" && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, str(folder)]
