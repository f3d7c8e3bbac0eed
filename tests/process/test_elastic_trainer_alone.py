"""What an ElasticTrainer refuses before it trains, and what it does alone, in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the adapter for Transformers: pip install 'torchelastic[transformers]'")

SCRIPT = """
import os
os.environ["HF_HUB_OFFLINE"] = "1"
import torch
{before}
from torchelastic.adapters.elastic_trainer import ElasticTrainer
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

torch.set_num_threads(1)
sizes = dict(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
rows = torch.randint(16, (20, 6), generator=torch.Generator().manual_seed(3))
data = [{{"input_ids": row, "labels": row}} for row in rows]
options = dict(max_steps=3, per_device_train_batch_size=4, use_cpu=True, report_to=[], disable_tqdm=True)
options |= dict({options})
arguments = TrainingArguments({folder!r}, **options)
trainer = ElasticTrainer(GPT2LMHeadModel(GPT2Config(**sizes)), arguments, train_dataset={data}, eval_dataset=data)
{change}
trainer.train()
assert arguments.gradient_accumulation_steps == options.get("gradient_accumulation_steps", 1)
print("trained", trainer.state.global_step, trainer.state.epoch, round(trainer.evaluate()["eval_loss"], 1))
{after}
"""


def ran(
    folder: Path, options: str = "", *, before: str = "", data: str = "data", change: str = "", after: str = ""
) -> subprocess.CompletedProcess[str]:
    text = SCRIPT.format(folder=str(folder), options=options, before=before, data=data, change=change, after=after)
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.long
def test_alone_it_is_a_trainer(tmp_path: Path) -> None:
    done = ran(tmp_path)
    assert "trained 3 0.6 2." in done.stdout, done.stderr[-3000:]


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("auto_find_batch_size=True", "auto_find_batch_size"),
        ("torch_compile=True", "torch_compile"),
        ("eval_on_start=True", "eval_on_start"),
        ("average_tokens_across_devices=False", "average_tokens_across_devices=False"),
        ("train_sampling_strategy='group_by_length'", "a sampler that groups by length"),
        ("accelerator_config={'dispatch_batches': True}", "dispatch_batches"),
    ],
)
def test_what_would_not_be_kept_is_refused_by_name(tmp_path: Path, options: str, named: str) -> None:
    done = ran(tmp_path, options)
    assert done.returncode == 1
    assert f"UnfitError: ElasticTrainer cannot go on in the running process with {named}" in done.stderr


@pytest.mark.long
def test_a_group_that_was_formed_before_is_refused(tmp_path: Path) -> None:
    before = "torch.distributed.init_process_group('gloo', init_method='tcp://127.0.0.1:0', rank=0, world_size=1)"
    done = ran(tmp_path, before=before)
    assert "UnfitError: a process group was formed before ElasticTrainer was imported" in done.stderr


@pytest.mark.long
def test_data_without_a_length_is_refused(tmp_path: Path) -> None:
    data = "type('Rows', (torch.utils.data.IterableDataset,), {'__iter__': lambda self: iter(data)})()"
    done = ran(tmp_path, data=data)
    assert "UnfitError: the training data is an IterableDataset" in done.stderr


@pytest.mark.long
def test_a_second_training_and_half_precision(tmp_path: Path) -> None:
    done = ran(tmp_path, "bf16=True, num_train_epochs=1, max_steps=-1", after="trainer.train(); print('again')")
    assert "trained 5 1.0 2." in done.stdout, done.stderr[-3000:]
    assert "again" in done.stdout, done.stderr[-3000:]


RESUMES_OTHERWISE = """
saved = torch.load(arguments.output_dir + "/checkpoint-3/training_args.bin", weights_only=False)
print("saved with an accumulation of", saved.gradient_accumulation_steps)
class Other(ElasticTrainer):
    elastic_global_batch_size = 2
arguments = TrainingArguments(arguments.output_dir, **(options | dict(max_steps=4)))
Other(GPT2LMHeadModel(GPT2Config(**sizes)), arguments, train_dataset=data).train(resume_from_checkpoint=True)
"""


@pytest.mark.long
def test_a_checkpoint_has_the_users_arguments_and_steps_of_another_size_are_said(tmp_path: Path) -> None:
    done = ran(tmp_path, "gradient_accumulation_steps=2, save_steps=3", after=RESUMES_OTHERWISE)
    assert "saved with an accumulation of 2" in done.stdout, done.stderr[-3000:]
    assert "the checkpoint of step 3 was trained in 3 steps for an epoch, which has 10 now" in done.stderr


@pytest.mark.long
def test_an_epoch_that_a_callback_ends_is_refused(tmp_path: Path) -> None:
    ends = (
        "type('Ends', (TrainerCallback,), {'on_step_end': lambda _, a, s, c, **k: setattr(c, 'should_epoch_stop', 1)})"
    )
    done = ran(
        tmp_path, "max_steps=8", change=f"from transformers import TrainerCallback; trainer.add_callback({ends})"
    )
    assert "UnfitError: a callback has set control.should_epoch_stop" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("T._get_train_sampler = lambda *_: torch.utils.data.WeightedRandomSampler([1.0] * 20, 20)", "Weighted"),
        ("T._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)", "SequentialSampler"),
        ("T.get_train_dataloader = lambda _: DataLoader(data, 8, shuffle=True)", "makes batches of 8 samples"),
        (
            "ElasticTrainer.get_train_dataloader = lambda _: DataLoader(data, 4, shuffle=True)",
            "get_train_dataloader of the Trainer's class gives a DataLoader",
        ),
    ],
)
def test_an_order_of_the_users_own_is_refused(tmp_path: Path, change: str, named: str) -> None:
    imports = "from transformers import Trainer as T; from torch.utils.data import DataLoader"
    done = ran(tmp_path, change=f"{imports}; {change}")
    assert "UnfitError" in done.stderr, done.stdout
    assert named in done.stderr
