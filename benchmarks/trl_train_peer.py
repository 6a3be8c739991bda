#!/usr/bin/env python
"""TRL's SFTTrainer and RewardTrainer as peers, a pass over the rows for each turn. Run by TRL 1.16's Python.

DIR/bin/python benchmarks/trl_train_peer.py sft --rows ROWS.json [--batching grouped] [--batch_size 8]
DIR/bin/python benchmarks/trl_train_peer.py reward --rows PAIRS.json
DIR/bin/python benchmarks/trl_train_peer.py memory --length 512 --vocabulary 32000

`train()` runs once, with an epoch for every pass; a callback holds it between them. `seconds` is from "go" to
the end of the epoch: TRL's own batches, forward, backward, clipping and optimizer, without its start-up, logs
and checkpoints. An optimizer step is --batch_size * --accumulation rows. Ways of batching:
  padded        rows in random order, padded to the longest of the batch
  grouped       the same with transformers' group_by_length
  padding_free  the batch laid out as one row, a mask between its sequences (sft)
  bfd           packs of 512 tokens, best fit decreasing; --batch_size counts packs, all in one row (sft)
Attention is torch's (sdpa): FlashAttention needs a GPU, and flex_attention has no backward pass on a CPU.
The answer: seconds, tokens (real ones of a pass), rows, optimizer_steps, loss (mean of the optimizer steps).

`memory` trains two steps of --batch_size rows, a short one that makes the optimizer's moments and the
measured one, and says `peak_bytes` when it is ready: gradients, activations, logits; no weights, no moments.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.peer_process import WARM_UP_TOKENS, Turns, peak_since, start_peak

PACK_TOKENS = 512
BATCHINGS: dict[str, dict[str, Any]] = {
    "padded": {},
    "grouped": {"train_sampling_strategy": "group_by_length"},
    "padding_free": {"padding_free": True, "max_length": None},
    "bfd": {"packing": True, "packing_strategy": "bfd"},
}


def training_options(output_dir: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of transformers' Trainer that make it train as we do and do nothing else."""
    return {
        "output_dir": output_dir,
        "per_device_train_batch_size": args.batch_size,
        "gradient_accumulation_steps": args.accumulation,
        "num_train_epochs": 1 if args.task == "memory" else 10**6,  # the benchmark ends it
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "seed": 0,
        "logging_strategy": "no",
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def build_passes(turns: Turns, epoch: dict[str, Any]) -> Any:
    """Return a callback that waits for a turn before each epoch and answers after it.

    `epoch` has what every pass is alike in; its `losses` (of micro-batches, to be summed) grow.
    """
    from transformers import TrainerCallback

    class Passes(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turns.ready(batches=epoch["batches"])

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            epoch["losses"], self.first_step = [], state.global_step
            turns.wait()

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds, num_steps = turns.seconds(), state.global_step - self.first_step
            loss = sum(map(float, epoch["losses"])) / num_steps
            facts = {"tokens": epoch["tokens"], "rows": epoch["rows"], "optimizer_steps": num_steps}
            turns.answer(seconds=seconds, loss=loss, **facts)

    return Passes()


def build_meter(turns: Turns) -> Any:
    """Return a callback that measures memory from the end of the first step to that of the second."""
    from transformers import TrainerCallback

    class Meter(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                self.baseline = start_peak()
            else:
                turns.ready(peak_bytes=peak_since(self.baseline))

    return Meter()


def score_labels_only() -> None:
    """Let TRL's output head score only positions with a label, as it does where it has Triton, on a GPU.

    On a CPU it scores prompts and padding too: a third of a step and more, which nobody pays on a GPU.
    """
    import trl.trainer.utils

    trl.trainer.utils._use_triton = lambda device: True  # read for the choice of positions, not of the kernel


def memory_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the short rows of the first step, then those of the measured one; a third is the prompt."""
    import torch

    from benchmarks.chat_rows import FIRST_ID

    rows = []
    for length, prompt in ((WARM_UP_TOKENS, 1), (args.length, args.length // 3)):
        ids = torch.randint(FIRST_ID, args.vocabulary, (args.batch_size, length))
        mask = [0] * prompt + [1] * (length - prompt)
        rows += [{"input_ids": row, "completion_mask": mask} for row in ids.tolist()]
    return rows


def build_trainer(turns: Turns, args: argparse.Namespace, output_dir: str) -> Any:
    """Return TRL's trainer of the task."""
    import transformers
    import trl
    from datasets import Dataset

    from benchmarks.chat_rows import read_rows, small_llama_config
    from benchmarks.ppo_models import build_tokenizer

    options = training_options(output_dir, args) | BATCHINGS[args.batching]
    common = {"processing_class": build_tokenizer()}
    if args.task == "memory":
        config = small_llama_config(
            vocab_size=args.vocabulary, max_position_embeddings=max(2048, args.length)
        )
        options |= {"train_sampling_strategy": "sequential", "max_length": args.length}
        return trl.SFTTrainer(
            model=transformers.LlamaForCausalLM(config),
            args=trl.SFTConfig(**options, completion_only_loss=True),
            train_dataset=Dataset.from_list(memory_rows(args)),
            callbacks=[build_meter(turns)],
            **common,
        )
    rows = read_rows(args.rows)
    kinds = (transformers.LlamaForCausalLM, transformers.AutoModelForCausalLM)
    if args.task == "reward":
        kinds = (
            transformers.LlamaForSequenceClassification,
            transformers.AutoModelForSequenceClassification,
        )
    labels = {"num_labels": 1} if args.task == "reward" else {}
    model = kinds[0](small_llama_config(**labels))
    if args.model:
        model = kinds[1].from_pretrained(args.model, dtype="float32", **labels)
    sides = ("chosen_ids", "rejected_ids") if args.task == "reward" else ("input_ids",)
    lengths = [[len(row[side]) for side in sides] for row in rows]
    epoch: dict[str, Any] = {"rows": len(rows), "tokens": sum(map(sum, lengths))}
    common["callbacks"] = [build_passes(turns, epoch)]
    if args.task == "reward":
        columns = [
            {side: row[side] for side in sides} | {"length": max(pair)}
            for row, pair in zip(rows, lengths, strict=True)
        ]
        # The sampler reads `length`; the collator takes what it needs.
        config = trl.RewardConfig(**options, max_length=None, remove_unused_columns=False)
        trainer = trl.RewardTrainer(
            model=model, args=config, train_dataset=Dataset.from_list(columns), **common
        )
    else:
        columns = [{"input_ids": row["input_ids"], "completion_mask": row["loss_mask"]} for row in rows]
        config = trl.SFTConfig(**{"max_length": PACK_TOKENS, "completion_only_loss": True} | options)
        trainer = trl.SFTTrainer(model=model, args=config, train_dataset=Dataset.from_list(columns), **common)
        kept = sum(len(ids) for ids in trainer.train_dataset["input_ids"])
        if kept != epoch["tokens"]:
            raise ValueError(f"TRL keeps {kept} of {epoch['tokens']} tokens in packs of {PACK_TOKENS}")
    epoch["batches"] = len(trainer.get_train_dataloader())
    watch_losses(trainer, epoch)
    return trainer


def watch_losses(trainer: Any, epoch: dict[str, Any]) -> None:
    """Let every training step of the trainer leave its loss in `epoch`."""
    training_step = trainer.training_step

    def watched(*args: Any, **kwargs: Any) -> Any:
        loss = training_step(*args, **kwargs)
        epoch["losses"].append(loss)
        return loss

    trainer.training_step = watched


def main() -> None:
    """Train."""
    turns = Turns()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("sft", "reward", "memory"))
    parser.add_argument("--rows", default="", help="file of chat_rows.write_rows")
    parser.add_argument("--batching", choices=BATCHINGS, default="padded")
    parser.add_argument("--batch_size", type=int, default=8, help="rows, pairs or packs of a micro-batch")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of an optimizer step")
    parser.add_argument("--model", default="", help="model folder; empty: a random one of chat_rows' size")
    parser.add_argument("--labels_only", action="store_true", help=score_labels_only.__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=512, help="memory: tokens of each row")
    parser.add_argument("--vocabulary", type=int, default=8192, help="memory")
    args = parser.parse_args()

    import torch

    torch.manual_seed(0)
    if args.labels_only:
        score_labels_only()
    with tempfile.TemporaryDirectory() as output_dir:
        build_trainer(turns, args, output_dir).train()


if __name__ == "__main__":
    main()
