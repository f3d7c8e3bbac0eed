"""What an `ElasticTrainer` costs per step beside Transformers' `Trainer`, and how long a kill keeps it.

    python -m benchmarks.trainer [--pairs 3] [--workers 2] [--step-ms 100] [--steps 60] [--kills 3]

Jobs of both follow each other under the same launcher, with the same script; a pair is one run. Each trains a GPT-2 of
one layer and sleeps so that a step takes about `--step-ms`; a step's time is that between two `on_step_end`.

* overhead_percent: median step of ours beside that of the Trainer next to it, of the slowest worker. Target: 2 % of a
  step of 100 ms.
* kill_ms: from SIGKILL of a worker before its forward pass to the survivors' next step that counts; of which one step
  is `--step-ms`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import print_result, summary

TARGETS = {"overhead_percent_at_100_ms": 2}
WARM_UP = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="runs")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kills", type=int, default=3, help="runs in which a worker is killed")
    parser.add_argument("--worker", choices=("ours", "theirs"), help="internal: be one worker")
    parser.add_argument("--kill-at", type=int, default=-1, help="internal")
    options = parser.parse_args()
    if options.worker:
        _train(options)
        return
    pairs = [{name: _step_s(options, name) for name in ("ours", "theirs")} for _ in range(options.pairs)]
    result: dict[str, Any] = {
        "ours_ms": summary([1000 * pair["ours"] for pair in pairs]),
        "theirs_ms": summary([1000 * pair["theirs"] for pair in pairs]),
        "overhead_percent": summary([100 * (pair["ours"] / pair["theirs"] - 1) for pair in pairs]),
    }
    if options.kills:
        result["kill_ms"] = summary([1000 * _kill_s(options) for _ in range(options.kills)], 0)
    about = {"workers": options.workers, "step_ms": options.step_ms, "steps": options.steps}
    print_result("trainer", **about, **result, targets=TARGETS)


def _run(options: argparse.Namespace, worker: str, *launcher: str, kill_at: int = -1) -> str:
    command = [sys.executable, "-m", "torchelastic.launch", "run", "--standalone", "--nproc-per-node"]
    command += [str(options.workers), *launcher, "-m", "benchmarks.trainer", "--worker", worker]
    command += ["--step-ms", str(options.step_ms), "--steps", str(options.steps), "--kill-at", str(kill_at)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def _told(output: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in re.findall(r"TOLD (\{.*\})", output)]


def _step_s(options: argparse.Namespace, worker: str) -> float:
    """The median step of the slowest worker."""
    told = _told(_run(options, worker))
    assert len(told) == options.workers
    return max(_median_step_s(one["at_s"]) for one in told)


def _median_step_s(at_s: list[float]) -> float:
    steps = [after - before for before, after in zip(at_s[WARM_UP:], at_s[WARM_UP + 1 :], strict=False)]
    return statistics.median(steps)


def _kill_s(options: argparse.Namespace) -> float:
    """From the kill to the first step of the survivors behind it."""
    output = _run(options, "ours", "--max-restarts=0", "--min-workers=1", kill_at=options.steps // 2)
    [killed_s] = [float(text) for text in re.findall(r"KILLED (\S+)", output)]
    told = _told(output)
    assert len(told) == options.workers - 1
    first_s = [min(float(at_s) for at_s in one["at_s"] if at_s > killed_s) for one in told]
    return max(first_s) - killed_s


def _train(options: argparse.Namespace) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    if options.worker == "ours":
        from torchelastic.adapters.elastic_trainer import ElasticTrainer as Base
    else:
        from transformers import Trainer as Base  # type: ignore[assignment, unused-ignore]
    from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

    torch.set_num_threads(1)
    at_s: list[float] = []

    class Told(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del args, state, control
            at_s.append(time.monotonic())

    class Trainer(Base):  # type: ignore[misc, unused-ignore]
        def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
            if self.state.global_step == options.kill_at and self.args.process_index == options.workers - 1:
                print("KILLED", time.monotonic(), flush=True)
                os.kill(os.getpid(), 9)
            began_s = time.monotonic()
            loss = super().training_step(*arguments, **named)
            time.sleep(max(0.0, options.step_ms / 1000 - (time.monotonic() - began_s)))
            return loss

    rows = torch.randint(64, (1024, 16), generator=torch.Generator().manual_seed(0))
    sizes: dict[str, Any] = {"vocab_size": 64, "n_positions": 16, "n_embd": 64, "n_layer": 1, "n_head": 2}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            str(Path(folder)),
            max_steps=options.steps,
            per_device_train_batch_size=4,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        tokens: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
        model = GPT2LMHeadModel(GPT2Config(**sizes, **tokens))
        Trainer(model, arguments, train_dataset=data, callbacks=[Told()]).train()
    print("TOLD", json.dumps({"at_s": at_s}), flush=True)


if __name__ == "__main__":
    main()
