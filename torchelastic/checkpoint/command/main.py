"""The words of `torchelastic checkpoint`; torch is loaded only when one of its commands runs."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torchelastic.checkpoint.command.command_error import CheckpointCommandError
from torchelastic.console import complain
from torchelastic.text import error_text
from torchelastic.usage import CommandParser

if TYPE_CHECKING:
    from torchelastic.checkpoint.command.stored_saves import StoredSaves
    from torchelastic.checkpoint.policy import KeepPolicy

EXAMPLES = """examples:
  torchelastic checkpoint ls /mnt/checkpoints
  torchelastic checkpoint ls s3://bucket/run
  torchelastic checkpoint show /mnt/checkpoints --tensors
  torchelastic checkpoint verify /mnt/checkpoints
  torchelastic checkpoint prune /mnt/checkpoints --keep-last 3 --keep-every 10000 --dry-run
  torchelastic checkpoint prune --dead --older-than 86400     # what dead jobs have left in memory; asks
  torchelastic checkpoint rewind /mnt/checkpoints --to 8000   # go on from there, whatever is newer
  torchelastic checkpoint convert /mnt/checkpoints model.safetensors --to safetensors --part module

exit codes: 0 done and intact, 1 verify has found damage, 2 cannot be done or read (one line on stderr says why)
"""
_PATH_HELP = (
    "a folder of checkpoints, one of them, or a shard file, or a URL of these (s3://, gs://); which of them is "
    "recognized by its content"
)


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
    options = command_parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        code = int(options.execute(options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it ends
        return 128 + signal.SIGPIPE
    except (CheckpointCommandError, OSError) as error:  # a CheckpointError is an OSError
        complain(f"torchelastic checkpoint {options.verb}: {error_text(error)}")
        return 2
    except KeyboardInterrupt:
        complain(f"torchelastic checkpoint {options.verb}: interrupted")
        return 130


def command_parser() -> argparse.ArgumentParser:
    """What understands the words after `torchelastic checkpoint`."""
    parser: argparse.ArgumentParser = CommandParser(
        prog="torchelastic checkpoint",
        description="List, verify, prune, rewind and convert checkpoints.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    listed = _add(verbs, "ls", "list the checkpoints at a path, newest first")
    listed.set_defaults(execute=_ls)
    shown = _add(verbs, "show", "show what a checkpoint holds; of several, the newest complete one")
    shown.add_argument("--newest", action="store_true", help="of several, the newest complete one (as without it)")
    shown.add_argument("--tensors", action="store_true", help="list every tensor: name, dtype, shape, size, shards")
    shown.add_argument("--values", action="store_true", help="print everything that is no tensor, as a tree")
    shown.set_defaults(execute=_show)
    verified = _add(verbs, "verify", "read everything, compare all checksums, and name what is damaged")
    verified.set_defaults(execute=_verify)
    what = "remove the checkpoints that no rule keeps, never the newest complete one; or what dead jobs left in memory"
    pruned = _add(verbs, "prune", what, path_is_optional=True)
    _add_rules(pruned)
    _add_dead(pruned)
    pruned.set_defaults(execute=_prune)
    back = _add(
        verbs, "rewind", "let the run, which has ended, go on from an older checkpoint; removes nothing", json=False
    )
    back.add_argument("--to", type=_steps, required=True, metavar="STEP", help="the most steps of one that counts")
    back.add_argument(
        "--by", type=_metric, metavar="METRIC", help="STEP is of this metric, such as global_step; `ls` shows which"
    )
    back.add_argument("--dry-run", action="store_true", help="change nothing, only say what would not count any more")
    back.set_defaults(execute=_rewind)
    _add_convert(verbs)
    return parser


def _add(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    what: str,
    *,
    path_is_optional: bool = False,
    json: bool = True,
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    if path_is_optional:
        optional = "; with --dead, a folder of jobs' containers, or one (default: this host's memory, /dev/shm)"
        parser.add_argument("path", type=_path, nargs="?", metavar="PATH", help=_PATH_HELP + optional)
    else:
        parser.add_argument("path", type=_path, metavar="PATH", help=_PATH_HELP)
    if json:
        parser.add_argument("--json", action="store_true", help="one line of JSON per checkpoint, for programs")
    return parser


def _add_rules(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep-last", type=_count, metavar="N", help="keep the N newest")
    parser.add_argument("--keep-every", type=_count, metavar="K", help="keep the first of each K steps (of each K ids)")
    parser.add_argument("--keep-best", type=_metric, metavar="METRIC", help="keep the best by this metric in manifests")
    parser.add_argument("--best-count", type=_count, metavar="N", help="how many of the best (default 1)")
    parser.add_argument("--best-mode", choices=("min", "max"), help="which is best (default min)")
    parser.add_argument("--dry-run", action="store_true", help="remove nothing, only say what would be removed")


def _add_dead(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what dead jobs have left in memory")
    group.add_argument("--dead", action="store_true", help="list the containers that no living process uses, and ask")
    group.add_argument("--yes", action="store_true", help="with --dead: remove them without asking")
    group.add_argument(
        "--older-than",
        type=float,
        metavar="SECONDS",
        help="with --dead: leave alone what was changed less than so long ago: its job may come back",
    )


def _add_convert(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    what = "write a checkpoint in another format, tensors bit by bit the same"
    parser = verbs.add_parser("convert", help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument(
        "source",
        type=_path,
        metavar="SOURCE",
        help="any of what `ls` takes (of several, the newest complete one), a torch.save file, a folder of "
        "torch.distributed.checkpoint, a .safetensors file or a folder of them",
    )
    parser.add_argument("target", type=_path, metavar="TARGET", help="must not exist; appears complete or not at all")
    parser.add_argument(
        "--to",
        required=True,
        choices=("torch", "dcp", "safetensors", "shard"),
        help="torch: a file for torch.load; dcp: a folder for torch.distributed.checkpoint; shard: for torchelastic",
    )
    parser.add_argument("--part", metavar="KEY[/KEY..]", help="only this part of the state, such as `module`")
    parser.add_argument(
        "--allow-pickles",
        action="store_true",
        help="run the pickles in SOURCE, which can do anything: only if you trust whoever wrote it",
    )
    parser.set_defaults(execute=_convert)


def _count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def _steps(text: str) -> int:
    """A number of committed steps."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps: give 0 or more")
    return int(text)


def _metric(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("name a metric, such as loss")
    return text


def _path(text: str) -> Path | str:
    """A path with a name: that of `.` says what is in the folder; or a URL, as it is."""
    text = text.removeprefix("file://")
    if "://" in text:
        return text
    path = Path(text)
    return path.resolve() if path.name in ("", "..") else path


@contextmanager
def _saves_at(place: Path | str, wanted: Literal["list", "all", "newest"] = "list") -> Iterator[StoredSaves]:
    """What is stored there, as files of this host; see `remote`."""
    from torchelastic.checkpoint.command.stored_saves import StoredSaves

    if isinstance(place, Path):
        yield StoredSaves(place)
        return
    from torchelastic.checkpoint.command.remote import RemoteSaves, copied, newest_at

    with newest_at(place) if wanted == "newest" else copied(place, heads_only=wanted == "list") as path:
        yield RemoteSaves(path, place)


def _folder(place: Path | str | None, why_not_a_url: str) -> Path:
    """A path, and no URL. Raises: CheckpointCommandError."""
    if isinstance(place, Path):
        return place
    raise CheckpointCommandError(f"{place} is a URL: {why_not_a_url}")


def _ls(options: argparse.Namespace) -> int:
    from torchelastic.checkpoint.command.listing import ls

    with _saves_at(options.path) as saves:
        return ls(saves, as_json=options.json, now_s=time.time())


def _show(options: argparse.Namespace) -> int:
    from torchelastic.checkpoint.command.showing import show

    with _saves_at(options.path) as saves:
        return show(saves, tensors=options.tensors, values=options.values, as_json=options.json, now_s=time.time())


def _verify(options: argparse.Namespace) -> int:
    from torchelastic.checkpoint.command.listing import verify

    with _saves_at(options.path, "all") as saves:
        return verify(saves, as_json=options.json)


def _prune(options: argparse.Namespace) -> int:
    if options.dead:
        return _prune_dead(options)
    if options.yes or options.older_than is not None:
        raise CheckpointCommandError("--yes and --older-than go with --dead")
    if options.path is None:
        raise CheckpointCommandError(
            "say which folder of checkpoints; or --dead, for what dead jobs have left in memory"
        )
    from torchelastic.checkpoint.command.pruning import prune

    if options.keep_best is None and (options.best_count or options.best_mode):
        raise CheckpointCommandError("--best-count and --best-mode go with --keep-best METRIC")
    policy = _policy(options)
    with _saves_at(options.path) as saves:
        return prune(saves, policy, metric=options.keep_best, dry_run=options.dry_run, as_json=options.json)


def _prune_dead(options: argparse.Namespace) -> int:
    from torchelastic.checkpoint.command.prune_dead import prune_dead

    rules = (options.keep_last, options.keep_every, options.keep_best, options.best_count, options.best_mode)
    if any(rule is not None for rule in rules):
        raise CheckpointCommandError("--dead removes whole containers: use it without --keep-... and --best-...")
    if options.older_than is not None and not options.older_than >= 0:
        raise CheckpointCommandError(f"--older-than {options.older_than:g}: give seconds, 0 or more")
    return prune_dead(
        options.path and _folder(options.path, "give a folder of this host's memory"),
        older_than_s=options.older_than,
        dry_run=options.dry_run,
        yes=options.yes,
        as_json=options.json,
        now_s=time.time(),
    )


def _rewind(options: argparse.Namespace) -> int:
    from torchelastic.checkpoint.command.rewinding import Target, rewind

    with _saves_at(options.path) as saves:
        return rewind(saves, Target(options.to, options.by), dry_run=options.dry_run)


def _convert(options: argparse.Namespace) -> int:
    from torchelastic.checkpoint.command.converting import convert

    target, pickles = _folder(options.target, "write a file or folder, and copy it there"), options.allow_pickles
    with _saves_at(options.source, "newest") as saves:
        return convert(saves, target, options.to, part=options.part, allow_pickles=pickles)


def _policy(options: argparse.Namespace) -> KeepPolicy:
    from torchelastic.checkpoint.policy import KeepBest, KeepEvery, KeepLast
    from torchelastic.checkpoint.policy.keeping import KeepIfAny

    rules: list[KeepPolicy] = []
    if options.keep_last is not None:
        rules.append(KeepLast(options.keep_last))
    if options.keep_every is not None:
        rules.append(KeepEvery(options.keep_every))
    if options.keep_best is not None:
        rules.append(KeepBest(options.keep_best, options.best_count or 1, options.best_mode or "min"))
    if not rules:
        raise CheckpointCommandError("say what to keep: --keep-last N, --keep-every K or --keep-best METRIC")
    return KeepIfAny(tuple(rules))
