"""`python -m benchmarks.memory_tier`: a line of JSON per part and size; figures are ratios to a memcpy of the bytes."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.checkpoint.payload import MIB
from benchmarks.environment import print_result
from benchmarks.memory_tier.contender import CONTENDERS
from benchmarks.memory_tier.crew import Member, NotMeasuredError, Setting
from benchmarks.memory_tier.figures import PARTS, Part, batches, summary_of, verdicts
from benchmarks.memory_tier.shared_bytes import create

#: A state of 100 MB, as whole MiB.
ENDURANCE_MIB = 96


def main() -> None:
    """Measure and print."""
    options = parse()
    setting = Setting(options.folder, 0, 0, flashpoint_python=options.flashpoint_python)
    for spec in options.size:
        size, _, tensors = spec.partition("x")
        sized = replace(setting, size_mib=int(size), tensors=int(tensors or 64))
        for name in options.parts:
            if name in PARTS:
                part = PARTS[name]
                measured = measure(part, replace(sized, ranks=part.ranks), options.contenders, options.runs)
                print_result(f"memory_tier.{name}", size_mib=sized.size_mib, tensors=sized.tensors, **measured)
    if "endurance" in options.parts:
        sized = replace(setting, size_mib=options.endurance_mib, tensors=32)
        for name in options.endurance_contenders:
            print_result(
                "memory_tier.endurance", contender=name, size_mib=sized.size_mib, **endure(name, sized, options)
            )


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_tier", description=__doc__)
    names = [*PARTS, "endurance"]
    parser.add_argument("--parts", type=_list_of(names), default=names, metavar="LIST", help=",".join(names))
    parser.add_argument(
        "--size", type=_list_of(), default=["256x32", "1024x64"], metavar="LIST", help="MiB per rank, x, tensors"
    )
    parser.add_argument("--runs", type=int, default=7, help="rounds that count; two more come before them")
    parser.add_argument(
        "--contenders", type=_list_of(CONTENDERS), default=list(CONTENDERS), metavar="LIST", help=",".join(CONTENDERS)
    )
    parser.add_argument(
        "--flashpoint-python",
        type=Path,
        default=os.environ.get("FLASHPOINT_PYTHON"),
        metavar="PATH",
        help="an interpreter that can import ml_flashpoint and torch (also: FLASHPOINT_PYTHON in the environment)",
    )
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="on tmpfs")
    parser.add_argument("--endurance-s", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--endurance-mib", type=int, default=ENDURANCE_MIB, metavar="MIB")
    parser.add_argument("--endurance-per-s", type=float, default=5.0, metavar="SAVES", help="saves per second")
    parser.add_argument("--endurance-checkpointer", choices=["thread", "process"], default="thread")
    parser.add_argument("--endurance-contenders", type=_list_of(CONTENDERS), default=["ours"], metavar="LIST")
    return parser.parse_args()


def _list_of(allowed: Sequence[str] | dict[str, Any] | None = None) -> Any:
    def convert(text: str) -> list[str]:
        values = text.split(",")
        for value in values:
            if allowed is not None and value not in allowed:
                raise argparse.ArgumentTypeError(f"{value!r} is none of {', '.join(allowed)}")
        return values

    return convert


def measure(part: Part, setting: Setting, contenders: Sequence[str], runs: int) -> dict[str, Any]:
    """One part at one size: in each round every contender comes once, so that noise hits all alike."""
    names = [name for name in part.contenders if name in contenders]
    together = batches(names, setting.size_mib * MIB, setting.ranks, psutil.virtual_memory().available)
    rows: dict[str, list[dict[str, Any]]] = {}
    reasons: dict[str, str] = {}
    for batch in together:
        with ExitStack() as stack:
            room = stack.enter_context(work_room(setting))
            members: dict[str, Member] = {}
            for name in batch:
                with noting(reasons, name):
                    members[name] = stack.enter_context(closing(Member(name, room)))
            for name in list(members):
                with noting(reasons, name, members):
                    members[name].start()
            for run in range(runs + 2):
                for name in list(members):
                    with noting(reasons, name, members):
                        answers = [members[name].ask(what, **details) for what, details in part.questions]
                        if run >= 2:  # the first ones allocate
                            rows.setdefault(name, []).append(part.row(answers))
    results: dict[str, Any] = {name: {"not_measured": reasons[name]} for name in names if name in reasons}
    measured = {name: rows[name] for name in names if name in rows and name not in reasons}
    results |= {name: summary_of(found) for name, found in measured.items()}
    return {
        "ranks": setting.ranks,
        "interleaved": len(together) == 1,
        **{name: results[name] for name in names},
        **verdicts(part, measured),
    }


@contextmanager
def noting(reasons: dict[str, str], name: str, members: dict[str, Member] | None = None) -> Iterator[None]:
    """Writes down why a contender is not measured, and has it take part no longer."""
    try:
        yield
    except NotMeasuredError as error:
        reasons[name] = str(error)
        if members is not None:
            del members[name]


def endure(name: str, setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Many saves of one contender."""
    reasons: dict[str, str] = {}
    answer: dict[str, Any] = {}
    with noting(reasons, "not_measured"), work_room(setting) as room, closing(Member(name, room)) as member:
        member.start()
        [answer] = member.ask(
            "endure",
            answer_s=options.endurance_s + 120,
            seconds=options.endurance_s,
            per_s=options.endurance_per_s,
            checkpointer=options.endurance_checkpointer,
        )
    return reasons or {"seconds": options.endurance_s, "checkpointer": options.endurance_checkpointer, **answer}


@contextmanager
def work_room(setting: Setting) -> Iterator[Setting]:
    """The same with a folder of its own, in which the bytes are."""
    with tempfile.TemporaryDirectory(dir=setting.folder, prefix="memory-tier-") as folder:
        room = replace(setting, folder=Path(folder))
        for rank in range(room.ranks):
            create(room.source(rank), room.size_mib)
        create(room.target, room.size_mib)
        yield room


if __name__ == "__main__":
    main()
