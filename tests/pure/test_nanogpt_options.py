"""Config files and `--key=value`: what is read, what is refused, and that nothing is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.nanogpt import train
from examples.nanogpt.options import OptionError, Options, parse
from torchelastic.lifetime import STOPPED_EARLY

CONFIGS = Path(train.__file__).parent / "config"


def config(folder: Path, text: str) -> str:
    path = folder / "config.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("gradient_accumulation_steps = 5 * 8", "gradient_accumulation_steps", 40),
        ("eval_interval = (3 + 9) // 4 - 1", "eval_interval", 2),
        ("learning_rate = 1", "learning_rate", 1.0),
        ("min_lr = 6e-4 / 10", "min_lr", 6e-4 / 10),
        ("device = 'cpu'", "device", "cpu"),
        ("decay_lr: bool = False", "decay_lr", False),
    ],
)
def test_literals_and_arithmetic_are_read(tmp_path: Path, text: str, name: str, value: Any) -> None:
    found = getattr(parse([config(tmp_path, text)]), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "import os",
        "wandb_run_name = 'ft-' + str(time.time())",
        "out_dir = open('/tmp/x', 'w')",
        "out_dir = 'a' * 1000000000000",
        "batch_size = 1 / 0",
        "batch_size = 2 ** 2",
        "batch_size = block_size",
        "x.y = 3",
        "del batch_size",
        "out_dir = __import__('os').system('true')",
        "open('marker', 'w')",
        "for batch_size in (1, 2): pass",
        "batch_size =",
        "batch_size = " + "(" * 5000 + "1" + ")" * 5000,
    ],
)
def test_what_would_have_to_be_executed_is_refused(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=r"config.py"):
        parse([config(tmp_path, text)])
    assert [path.name for path in tmp_path.iterdir()] == ["config.py"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--batchsize=3"], "no option 'batchsize': did you mean batch_size"),
        (["--zzz=3"], "options.py lists them"),
        (["--batch_size"], "write --key=value"),
        (["no/such/file.py"], "no/such/file.py cannot be read"),
        (["--batch_size=3.5"], "batch_size is a int, and 3.5 is a float"),
        (["--compile=yes"], "compile is a bool, and 'yes' is a str"),
        (["--batch_size=0"], "from 1 on"),
        (["--seed=-1"], "from 0 on"),
        (["--learning_rate=1e999"], "from 0 on"),
        (["--dropout=1.0"], "below 1"),
        (["--n_embd=10", "--n_head=4"], "a multiple of n_head, which is 4"),
        (["--dtype=float8"], "give one of auto, float32, bfloat16, float16"),
        (["--mode=both"], "give one of auto, plain, elastic"),
        (["--init_from=gpt2-xl"], "weights of GPT-2 are not loaded"),
        (["--wandb_log=True"], "losses.jsonl"),
        (["--stream=x", "--stream_shards=7"], "an iteration has 480 sequences"),
        (["--sharded=True", "--dtype=float16"], "sharded does not go together with float16"),
        (["--sharded=True", "--compile=True"], "sharded does not go together with compile"),
        (["--stream_shards=0"], "stream_shards is 0: give a number from 1 on"),
    ],
)
def test_a_senseless_word_is_refused_with_the_remedy(words: list[str], complaint: str) -> None:
    with pytest.raises(OptionError) as raised:
        parse(words)
    assert complaint in str(raised.value)


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.py")))
def test_the_configs_that_are_there_are_read(name: str) -> None:
    options = parse([str(CONFIGS / name), "--batch_size=32", "--compile=False"])
    assert (options.batch_size, options.compile) == (32, False)
    assert options.max_iters < Options().max_iters


@pytest.mark.parametrize(
    ("mode", "environment", "expected"),
    [
        ("auto", {}, "plain"),
        ("auto", {"RANK": "0"}, "plain"),
        ("auto", {"TORCHELASTIC_INIT_METHOD": "etcd://x"}, "elastic"),
        ("plain", {"TORCHELASTIC_INIT_METHOD": "etcd://x"}, "plain"),
        ("elastic", {}, "elastic"),
    ],
)
def test_the_mode_is_that_of_the_launcher_unless_it_is_said(
    mode: str, environment: dict[str, str], expected: str
) -> None:
    assert train.mode_of(parse([f"--mode={mode}"]), environment) == expected


def test_a_worker_of_torchrun_that_stopped_early_is_no_failure() -> None:
    under_torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert train.exit_code_for(STOPPED_EARLY, {}) == STOPPED_EARLY
    assert train.exit_code_for(STOPPED_EARLY, under_torchrun) == 0
    assert train.exit_code_for(2, under_torchrun) == 2
    assert train.exit_code_for(0, {}) == 0
