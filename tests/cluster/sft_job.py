"""TRL's SFTTrainer with `ElasticTrainerMixin`, with faults: see `test_elastic_trainer.py`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found, unused-ignore]

from tests.cluster.elastic_job import EventLog
from torchelastic.adapters.elastic_trainer import ElasticTrainerMixin
from torchelastic.testing.faults import FaultPlan

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "dog",
    "ran",
    "to",
    "his",
    "red",
    "house",
    "under",
    "blue",
    "sky",
]


class Trainer(ElasticTrainerMixin, SFTTrainer):  # type: ignore[misc, unused-ignore]
    plan: FaultPlan

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*arguments, **options)
        self.plan.reach("backward", self.state.global_step, self.args.process_index)
        return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ids = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words: Any = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made: Any = PreTrainedTokenizerFast
    tokenizer = made(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 10, (48,), generator=generator).tolist()
    drawn = [torch.randint(len(WORDS), (length,), generator=generator).tolist() for length in lengths]
    texts = Dataset.from_dict({"text": [" ".join(WORDS[number] for number in numbers) for numbers in drawn]})
    sizes: dict[str, Any] = {"vocab_size": len(ids), "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    tokens: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    dropout: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **tokens, **dropout))
    arguments = SFTConfig(
        str(options.out / "checkpoints"),
        num_train_epochs=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        max_length=16,
        learning_rate=1e-2,
    )
    log = EventLog(options.out)
    trainer = Trainer(
        model, args=arguments, train_dataset=texts, eval_dataset=texts.select(range(8)), processing_class=tokenizer
    )
    trainer.plan = FaultPlan(options.out)
    trainer.train()
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    torch.save(flat, options.out / f"weights-{log.worker}-{trainer.args.process_index}.pt")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    log("finished", step=trainer.state.global_step, losses=losses)


if __name__ == "__main__":
    main()
