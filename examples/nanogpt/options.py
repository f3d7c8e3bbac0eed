"""The options: names and meanings are nanoGPT's; values come from config files and from `--key=value`.

    train.py config/train_char.py --batch_size=32 --compile=False

A config file looks like Python, and may be one of nanoGPT's, but is never executed: it has lines `name = value`, where
a value is a literal or arithmetic with numbers (`5 * 8`). Later words win over earlier ones. (Not TOML: Python 3.10 has
no reader for it, and the files that people have would have to be rewritten.)
"""

from __future__ import annotations

import ast
import difflib
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "mode": ("auto", "plain", "elastic"),
    "init_from": ("auto", "scratch", "resume"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "backend": ("auto", "gloo", "nccl"),
}
_AT_LEAST_ONE = (
    *("eval_interval", "log_interval", "eval_iters", "gradient_accumulation_steps", "batch_size"),
    *("block_size", "n_layer", "n_head", "n_embd", "stream_shards"),
)
_AT_LEAST_ZERO = (
    *("max_iters", "warmup_iters", "lr_decay_iters", "learning_rate", "min_lr", "weight_decay", "grad_clip"),
    *("save_interval", "redundant_time", "save_ckpt_time", "seed"),
)


class OptionError(Exception):
    """An option is invalid; names it and says what would be valid."""


@dataclass(frozen=True)
class Options:
    """What is trained and how.

    Attributes:
        out_dir: checkpoints, losses and the model's description go there.
        eval_interval: iterations from one evaluation to the next.
        log_interval: iterations from one line on the screen, and one flush of the losses, to the next.
        eval_iters: batches of an evaluation, for each of the two parts of the data.
        eval_only: evaluate once, and end.
        always_save_checkpoint: save after each evaluation, also if the validation loss is no better.
        init_from: "auto" goes on from a checkpoint if there is one, "resume" wants one, "scratch" refuses one.
        mode: "elastic" is for `torchelastic run`, "plain" for torchrun and python; "auto": as the environment says.
        sharded: each worker holds a part of the model and of the optimizer's state (FSDP2); for `torchelastic run`.
        save_interval: iterations from one save to the next besides; 0: none.
        redundant_time: seconds in reserve before the deadline.
        save_ckpt_time: seconds that a save takes at least; 0: 10 s until one was measured.
        data_dir: the folder that `dataset` is in.
        stream: text files to train on instead of `dataset`'s training part, a name or a glob pattern: each character
            once in an epoch; for `torchelastic run`. Vocabulary and evaluation stay `dataset`'s.
        stream_shards: logical shards of the stream: at least as many as workers; divides the sequences of an iteration.
        gradient_accumulation_steps: micro batches of an iteration, on all ranks together.
        batch_size: sequences of a micro batch.
        grad_clip: norm to which gradients are cut; 0: never.
        seed: of weights, data and dropout.
        wandb_log: must be False: losses are in `out_dir`.
    """

    out_dir: str = "out"
    eval_interval: int = 2000
    log_interval: int = 1
    eval_iters: int = 200
    eval_only: bool = False
    always_save_checkpoint: bool = True
    init_from: str = "auto"
    mode: str = "auto"
    sharded: bool = False
    save_interval: int = 0
    redundant_time: float = 5.0
    save_ckpt_time: float = 0.0
    data_dir: str = "data"
    dataset: str = "char"
    stream: str = ""
    stream_shards: int = 4
    gradient_accumulation_steps: int = 40
    batch_size: int = 12
    block_size: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = False
    learning_rate: float = 6e-4
    max_iters: int = 600_000
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    decay_lr: bool = True
    warmup_iters: int = 2000
    lr_decay_iters: int = 600_000
    min_lr: float = 6e-5
    backend: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    compile: bool = False
    seed: int = 1337
    wandb_log: bool = False
    wandb_project: str = ""
    wandb_run_name: str = ""

    @property
    def sequences(self) -> int:
        """Sequences of an iteration, on all ranks together."""
        return self.gradient_accumulation_steps * self.batch_size


def parse(words: Sequence[str]) -> Options:
    """Options from the words of a command line: config files and `--key=value`, in their order.

    Raises:
        OptionError: an option, a file or a value is invalid; says which, and what would be valid.
    """
    options = Options()
    for word in words:
        if not word.startswith("--"):
            for line, name, value in read_config(Path(word)):
                options = _with(options, name, value, f"{word}, line {line}")
            continue
        name, equals, text = word[2:].partition("=")
        if not equals:
            raise OptionError(f"{word}: write --key=value, such as --batch_size=32")
        options = _with(options, name, _value_of(text), word)
    _check(options)
    return options


def read_config(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Line, name and value of each assignment in a config file; nothing of it is executed.

    Raises:
        OptionError: the file cannot be read, or holds something else; says where.
    """
    try:
        statements = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise OptionError(f"the config file {path} cannot be read: {error}") from error
    for statement in statements:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        value = getattr(statement, "value", None)
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or not isinstance(target, ast.Name) or value is None:
            raise OptionError(f"{path}, line {statement.lineno}: only lines such as `batch_size = 32` are read")
        try:
            yield statement.lineno, target.id, _literal(value)
        except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
            raise OptionError(
                f"{path}, line {statement.lineno}: the value of {target.id} is no literal, and config files are not "
                "executed: write the value itself, or say it on the command line"
            ) from error


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = _literal(node.left), _literal(node.right)
        if not all(type(side) in (int, float) for side in (left, right)):
            raise ValueError("arithmetic is for numbers")
        return _ARITHMETIC[type(node.op)](left, right)
    return ast.literal_eval(node)


def _value_of(text: str) -> Any:
    """A literal where it is one, else the text itself: `--device=cpu` needs no quotes."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text


def _with(options: Options, name: str, value: Any, where: str) -> Options:
    known = {field.name: type(getattr(options, field.name)) for field in fields(options)}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "examples/nanogpt/options.py lists them"
        raise OptionError(f"{where}: there is no option {name!r}: {hint}")
    wanted = known[name]
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise OptionError(f"{where}: {name} is a {wanted.__name__}, and {value!r} is a {type(value).__name__}")
    return replace(options, **{name: value})


def _check(options: Options) -> None:
    for name, choices in _CHOICES.items():
        if getattr(options, name) not in choices:
            more = "; weights of GPT-2 are not loaded here" if options.init_from.startswith("gpt2") else ""
            raise OptionError(f"{name} is {getattr(options, name)!r}: give one of {', '.join(choices)}{more}")
    for names, least in ((_AT_LEAST_ONE, 1), (_AT_LEAST_ZERO, 0)):
        for name in names:
            if not least <= getattr(options, name) < math.inf:
                raise OptionError(f"{name} is {getattr(options, name)}: give a number from {least} on")
    for name in ("dropout", "beta1", "beta2"):
        if not 0 <= getattr(options, name) < 1:
            raise OptionError(f"{name} is {getattr(options, name)}: give a number from 0 on and below 1")
    if options.n_embd % options.n_head:
        raise OptionError(f"n_embd is {options.n_embd}: give a multiple of n_head, which is {options.n_head}")
    if options.stream and options.sequences % options.stream_shards:
        raise OptionError(
            f"stream_shards is {options.stream_shards}, and an iteration has {options.sequences} sequences "
            "(gradient_accumulation_steps x batch_size): give a divisor of that"
        )
    if options.sharded:
        _check_sharded(options)
    if options.wandb_log:
        raise OptionError("wandb_log is not supported: the losses of all iterations are in out_dir/losses.jsonl")


def _check_sharded(options: Options) -> None:
    if options.dtype == "float16":
        raise OptionError(
            "sharded does not go together with float16, whose gradients need scaling: give --dtype=bfloat16"
        )
    if options.compile:
        raise OptionError(
            "sharded does not go together with compile, since each new group would compile anew: give --compile=False"
        )
