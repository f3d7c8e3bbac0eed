"""The tools of examples/transformer_slurm, its batch script, how it is started, and the page for PyRecover's users."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.transformer_slurm import compare_weights, make_dataset
from examples.transformer_slurm.arguments import parse_options
from tests.process.transformer_jobs import (
    EXAMPLE,
    LATEST,
    PARTS,
    ROOT,
    TINY,
    command,
    experiment,
    finish,
    losses,
    torn,
)

# ----------------------------------------------------------------------------------------------------------- tools


def test_weights_of_either_sort_of_checkpoint_are_compared(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(command(corpus, "file", 6))
    finish(command(corpus, "parts", 6, *PARTS))
    file, parts = experiment(corpus, "file") / "ckpt_6.shard", experiment(corpus, "parts") / "ckpt_6"
    assert compare_weights.main([str(file), str(parts), "--distributed", "--optimizer", "--tolerance", "0"]) == 0
    capsys.readouterr()
    assert compare_weights.main([str(file), str(file.with_name("ckpt_3.shard")), "--verbose"]) == 1
    assert "blocks.0.gate.weight: " in capsys.readouterr().out
    torn(parts, "flipped")
    for wrong in (parts, corpus / "nothing", corpus):
        assert compare_weights.main([str(file), str(wrong)]) == 2
        assert capsys.readouterr().err.startswith("compare_weights.py: error:")


def submit(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the batch script as bash does, outside of SLURM."""
    script = EXAMPLE / "submit-training-simple.sh"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MASTER", "PYTHON"))
    }
    return subprocess.run(
        ["bash", str(script), *arguments], env={**environment, **variables}, capture_output=True, text=True, timeout=30
    )


def test_the_batch_script_says_what_it_would_run() -> None:
    alone = submit("--exp_name=my_experiment", "--dry-run").stdout
    assert alone.startswith("srun --ntasks=1 --nodes=1 --kill-on-bad-exit=1 python -u ")
    assert f"{EXAMPLE / 'train.py'} --dataset text.parquet --experiment_name my_experiment " in alone
    assert "--timeaware-checkpointing" in alone
    assert "--distributed" not in alone
    assert "--resume-from-checkpoint" not in alone
    flags = (
        "--use_flash_attention",
        "--log-loss-to-csv",
        "--fused-optimizer",
        "--compile",
        "--timeaware-checkpointing",
    )
    several = submit(
        *(
            "--distributed",
            "--continue",
            "--use_torch_distributed_ckpt",
            "--sequence-length=64",
            "--dataset=a b.parquet",
        ),
        *(*flags, "--profile-nsys", "--dry-run", "--", "--training-steps", "5"),
    ).stdout
    assert several.startswith("srun --kill-on-bad-exit=1 nsys profile ")
    for words in (
        *flags,
        "--sequence-length 64",
        r"--dataset a\ b.parquet",
        "--use-torch-distributed-ckpt",
        "--profile ",
    ):
        assert words in several
    assert several.rstrip().endswith("--resume-from-checkpoint latest --training-steps 5")


def test_the_batch_script_passes_signals_on_and_ends_as_the_job_does(tmp_path: Path) -> None:
    # in the place of srun, a command that does with a signal what the example does: it ends with 75, some time later
    srun = tmp_path / "srun"
    srun.write_text(
        '#!/bin/bash\ntrap "sleep 0.3; exit 75" USR1\necho ready >&2\nwhile kill -0 $PPID; do sleep 0.05; done\n'
    )
    srun.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        ["bash", str(EXAMPLE / "submit-training-simple.sh")], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.wait(20) == 75
    finally:
        process.kill()


# ------------------------------------------------------------------------------------------------ as it is started


def ended(process: subprocess.Popen[str], within_s: float = 100) -> tuple[str, str]:
    """What it has said, once it has ended; it is killed if it does not."""
    try:
        return process.communicate(timeout=within_s)
    finally:
        process.kill()


def launch(*words: str, cwd: Path, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        [sys.executable, *words], cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# ---------------------------------------------------------------------------------------------- the page for users


def commands_of(page: str, language: str) -> list[list[str]]:
    """The commands in the blocks of a page."""
    text = (ROOT / "docs" / "migrating" / page).read_text()
    blocks = re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.long
def test_the_commands_of_the_migration_page_run(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = commands_of("pyrecover.md", "sh")
    assert len(commands) == 4
    (corpus / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(corpus)
    make, *training, compare = [words[1:] for words in commands]
    assert make[:2] == ["-m", "examples.transformer_slurm.make_dataset"]
    assert make_dataset.main([*make[2:], "--max-documents", "12"]) == 0
    for words in training:
        assert words[0] == "examples/transformer_slurm/train.py"
        finish([*words[1:], *TINY])
    assert Path("checkpoints/default-exp/ckpt_8").is_dir()
    process = launch(*compare, cwd=corpus)
    out, err = ended(process)
    assert process.returncode == 0, out + err
    assert out.startswith("equal: ")


def test_the_batch_script_takes_the_lines_of_pyrecovers_readme() -> None:
    lines = commands_of("pyrecover.md", "bash")
    assert len(lines) == 3
    for words in lines:
        assert words[:2] == ["sbatch", "examples/transformer_slurm/submit-training-simple.sh"]
        done = submit(*words[2:], "--dry-run")
        assert done.returncode == 0, done.stderr
        train_words = shlex.split(done.stdout)
        parse_options(train_words[train_words.index(str(EXAMPLE / "train.py")) + 1 :])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_on_instances_that_live_shortly_no_step_is_lost(corpus: Path) -> None:
    steps = 400
    finish(command(corpus, "whole", steps, "--checkpoint-frequency", "-1"))
    # the reserve is for the interpreter to end, on a machine that has other work
    more = ["--checkpoint-frequency", "-1", "--timeaware-checkpointing", "--default-iter-time", "3", *LATEST]
    train = shlex.join([sys.executable, str(EXAMPLE / "train.py"), *command(corpus, "lives", steps, *more)])
    simulator = ["-m", "torchelastic.launch", "simulate-esi", "--timeout", "20", "--json", "--cmd", train]
    process = launch(*simulator, cwd=ROOT)
    out, err = ended(process, within_s=300)
    report = json.loads(out.splitlines()[-1])
    assert report["finished"], err
    assert report["steps_lost"] == 0
    assert losses(corpus, "lives") == losses(corpus, "whole")
