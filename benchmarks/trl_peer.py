#!/usr/bin/env python
"""TRL's trainers as peers, run by the Python of an environment of make_peer_env.sh.

DIR/bin/python benchmarks/trl_peer.py '{"task": "sft", "rows": "ROWS.json", "models": "FOLDER"}'

`train()` runs once; a callback holds it between turns. Logs and checkpoints are off. Where `options` end it,
the last answer is `history`: what the trainer has logged.
  sft, reward,  TRL 1.16; a turn is a pass over the rows: TRL's own batches, forward, backward, clipping,
  dpo, kto      optimizer. An optimizer step is batch_size * accumulation rows. The answer: seconds
  ppo           TRL 1.12, the last release with a PPOTrainer; a turn is a PPO step: prompts, generation, the
                scores of four models, advantages, 4 optimizer steps, metrics. It does not clip gradients.
                The answer: seconds, tokens (generated ones: EOS included, nothing after it), rollout
  grpo          TRL 1.16; a turn is a GRPO step: prompts, generation, scores of policy, reference and reward
                model, one optimizer step of all responses. The answer is as ppo's
  memory,       TRL 1.16; trains a short step that makes the optimizer's moments, then the measured one, and
  reward_memory says `peak_bytes` when it is ready: gradients, activations, logits; no weights, no moments
Attention is torch's (sdpa): FlashAttention needs a GPU, and flex_attention has no backward pass on a CPU.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback

from benchmarks import workload
from benchmarks.measuring import Turns, peak_since, start_peak
from benchmarks.workload import EOS, PAD, build_tokenizer

PACK_TOKENS = 512
SIDES = ("chosen_ids", "rejected_ids")
Rollout = dict[str, list[list[int]]]  # prompts and responses of a step, row by row
BATCHINGS: dict[str, dict[str, Any]] = {
    "padded": {},
    "grouped": {"train_sampling_strategy": "group_by_length"},
    "padding_free": {"padding_free": True, "max_length": None},  # one row, a mask between its sequences
    "bfd": {"packing": True, "packing_strategy": "bfd"},  # best fit decreasing; batch_size counts packs
}


@dataclass(frozen=True)
class Task:
    """What to train on what: the one argument of this program, as JSON."""

    task: str
    rows: str = ""  # a file of rows as JSON
    models: str = ""  # folder of workload.save_models
    batching: str = "padded"
    batch_size: int = 16
    accumulation: int = 1
    labels_only: bool = False  # see `score_labels_only`
    max_new_tokens: int = 64
    num_samples: int = 8  # of a prompt, for `grpo`
    scores_tokens: bool = False  # for `grpo`: its reward model reads the response's EOS, too
    options: dict[str, Any] = field(default_factory=dict)  # of the trainer, in place of those it has here
    length: int = 0  # of each sequence, to measure memory
    vocabulary: int = 0


def training_options(task: Task, output_dir: str) -> dict[str, Any]:
    """Return the arguments of transformers' Trainer that make it train as we do and do nothing else."""
    return {
        "output_dir": output_dir,
        "per_device_train_batch_size": task.batch_size,
        "gradient_accumulation_steps": task.accumulation,
        "learning_rate": 1e-6 if task.task == "ppo" else 1e-5,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "seed": 0,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def supervised_options(task: Task, output_dir: str) -> dict[str, Any]:
    """Return the options of SFT and reward modelling."""
    options = training_options(task, output_dir) | BATCHINGS[task.batching]
    options |= {"num_train_epochs": 10**6, "max_grad_norm": 1.0, "logging_strategy": "no"}
    return options | task.options


def call_at(**functions: Callable[[], None]) -> TrainerCallback:
    """Return a callback that calls these functions, without arguments, at a trainer's events."""
    callback = TrainerCallback()
    for event, function in functions.items():
        setattr(callback, event, lambda *_, function=function, **__: function())
    return callback


def turn_by_epoch(turns: Turns) -> TrainerCallback:
    """Return a callback that waits for a turn before each epoch and answers after it."""
    return call_at(on_train_begin=turns.answer, on_epoch_begin=turns.wait, on_epoch_end=turns.answer)


def turn_by_step(turns: Turns, rollouts: list[Rollout]) -> TrainerCallback:
    """Return a callback that waits for a turn before each step and answers the newest rollout after it."""

    def hold(**facts: Any) -> None:
        turns.answer(**facts)
        turns.wait()

    def end() -> None:
        hold(tokens=sum(map(len, rollouts[-1]["responses"])), rollout=rollouts[-1])

    return call_at(on_train_begin=hold, on_step_end=end)


def turn_by_ppo_step(turns: Turns) -> TrainerCallback:
    """Return a callback that waits for a turn before each PPO step and answers after it."""
    from trl.experimental.ppo import ppo_trainer

    generate, rollouts = ppo_trainer.batch_generation, []

    def watched(model: Any, queries: Any, *args: Any, **kwargs: Any) -> Any:
        found = generate(model, queries, *args, **kwargs)
        responses = found[0][:, queries.shape[1] :]
        is_end = (responses == EOS).long()  # (B, R)
        is_kept = is_end.cumsum(1) - is_end == 0
        kept = [row[mask].tolist() for row, mask in zip(responses, is_kept, strict=True)]
        rollouts.append({"prompts": [row[row != PAD].tolist() for row in queries], "responses": kept})
        return found

    ppo_trainer.batch_generation = watched
    return turn_by_step(turns, rollouts)


def turn_by_grpo_step(turns: Turns) -> TrainerCallback:
    """Return a callback that waits for a turn before each GRPO step and answers after it."""
    from trl import GRPOTrainer

    generate, rollouts = GRPOTrainer._generate_single_turn, []

    def watched(trainer: Any, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        found = generate(trainer, prompt_ids, *args, **kwargs)
        rollouts.append({"prompts": prompt_ids, "responses": found[0]})
        return found

    GRPOTrainer._generate_single_turn = watched
    return turn_by_step(turns, rollouts)


def measure_second_step(turns: Turns) -> TrainerCallback:
    """Return a callback that answers the memory from the end of the first step to that of the second."""
    baselines: list[int] = []

    def end() -> None:
        if baselines:
            turns.answer(peak_bytes=peak_since(baselines[0]))
        else:
            baselines.append(start_peak())

    return call_at(on_step_end=end)


def score_labels_only() -> None:
    """Let TRL's output head score only positions with a label, as it does where it has Triton, on a GPU.

    On a CPU it scores prompts and padding too: a third of a step and more, which nobody pays on a GPU.
    """
    import trl.trainer.utils

    trl.trainer.utils._use_triton = lambda device: True  # read for the choice of positions, not of the kernel


def load_model(task: Task, name: str) -> Any:
    """Return one of the models of `save_models`, fp32."""
    kind = AutoModelForCausalLM if name == "policy" else AutoModelForSequenceClassification
    return kind.from_pretrained(Path(task.models, name), dtype=torch.float32, trust_remote_code=False)


def prepare(task: Task, name: str, output_dir: str) -> tuple[list[dict[str, Any]], dict[str, Any], Any]:
    """Return rows, options and the model `name` of a trainer; to measure memory those of two steps, rows in
    their order, short ones first.
    """
    options = supervised_options(task, output_dir)
    if not task.length:
        return json.loads(Path(task.rows).read_text()), options, load_model(task, name)
    of_policy, sizes = name == "policy", (workload.WARM_UP_TOKENS, task.length)
    build_rows = workload.memory_rows if of_policy else workload.memory_pairs
    rows = [
        row
        for size in sizes
        for row in build_rows(task.batch_size * task.accumulation, size, task.vocabulary)
    ]
    longest = max(2048, task.length)
    config = workload.small_llama_config(
        vocab_size=task.vocabulary, max_position_embeddings=longest, num_labels=1
    )
    kind = transformers.LlamaForCausalLM if of_policy else transformers.LlamaForSequenceClassification
    return rows, options | {"train_sampling_strategy": "sequential", "num_train_epochs": 1}, kind(config)


def build_sft_trainer(task: Task, turns: Turns, output_dir: str) -> Any:
    """Return TRL's trainer of SFT."""
    import trl
    from datasets import Dataset

    rows, options, model = prepare(task, "policy", output_dir)
    options = {"max_length": task.length or PACK_TOKENS} | options
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**options, completion_only_loss=True),
        train_dataset=Dataset.from_list(
            [{"input_ids": row["input_ids"], "completion_mask": row["loss_mask"]} for row in rows]
        ),
        processing_class=build_tokenizer(),
        callbacks=[measure_second_step(turns) if task.length else turn_by_epoch(turns)],
    )
    num_tokens = sum(len(row["input_ids"]) for row in rows)
    kept = sum(len(ids) for ids in trainer.train_dataset["input_ids"])
    if kept != num_tokens:
        raise ValueError(f"TRL keeps {kept} of {num_tokens} tokens in packs of {PACK_TOKENS}")
    return trainer


def build_reward_trainer(task: Task, turns: Turns, output_dir: str) -> Any:
    """Return TRL's trainer of reward models."""
    import trl
    from datasets import Dataset

    rows, options, model = prepare(task, "reward", output_dir)
    pairs = [{side: row[side] for side in SIDES} for row in rows]
    # The sampler reads `length`; the collator takes what it needs.
    columns = [pair | {"length": max(map(len, pair.values()))} for pair in pairs]
    return trl.RewardTrainer(
        model=model,
        args=trl.RewardConfig(**options, max_length=None, remove_unused_columns=False),
        train_dataset=Dataset.from_list(columns),
        processing_class=build_tokenizer(),
        callbacks=[measure_second_step(turns) if task.length else turn_by_epoch(turns)],
    )


def build_dpo_trainer(task: Task, turns: Turns, output_dir: str) -> Any:
    """Return TRL's trainer of DPO; it has asked its model for the reference's log-probabilities."""
    import trl
    from datasets import Dataset

    rows, options, model = prepare(task, "policy", output_dir)
    tokenizer, texts = build_tokenizer(), []
    for row in rows:  # it takes text
        text = to_texts(tokenizer, row, SIDES, row["chosen_response_start"])
        length = max(len(row[side]) for side in SIDES)  # the sampler reads it
        texts.append({"prompt": text[0], "chosen": text[1], "rejected": text[2], "length": length})
    trainer = trl.DPOTrainer(
        model=model,
        args=trl.DPOConfig(
            **options, max_length=None, remove_unused_columns=False, precompute_ref_log_probs=True
        ),
        train_dataset=Dataset.from_list(texts),
        processing_class=tokenizer,
        callbacks=[turn_by_epoch(turns)],
    )
    check_tokens(rows, trainer, SIDES, SIDES)
    return trainer


def build_kto_trainer(task: Task, turns: Turns, output_dir: str) -> Any:
    """Return TRL's trainer of KTO; it has asked its model for the reference's log-probabilities."""
    import trl
    from datasets import Dataset

    rows, options, model = prepare(task, "policy", output_dir)
    tokenizer, texts = build_tokenizer(), []
    for row in rows:
        prompt, answer = to_texts(tokenizer, row, ["answer_ids"], row["answer_response_start"])
        texts.append({"prompt": prompt, "completion": answer, "label": bool(row["label"])})
    trainer = trl.KTOTrainer(
        model=model,
        args=trl.KTOConfig(**options, max_length=None, precompute_ref_log_probs=True),
        train_dataset=Dataset.from_list(texts),
        processing_class=tokenizer,
        callbacks=[turn_by_epoch(turns)],
    )
    check_tokens(rows, trainer, ["answer_ids"], ["completion_ids"])
    return trainer


def to_texts(tokenizer: Any, row: dict[str, Any], columns: Sequence[str], start: int) -> list[str]:
    """Return the text of a row's prompt, which has `start` tokens, and those of its answers."""
    words = [tokenizer.convert_ids_to_tokens(row[column]) for column in columns]
    return [" ".join([*words[0][:start], ""]), *(" ".join(of[start:]) for of in words)]


def check_tokens(
    rows: list[dict[str, Any]], trainer: Any, columns: Sequence[str], answers: Sequence[str]
) -> None:
    """Raise ValueError unless the trainer has the rows' tokens; `answers` are its names of `columns`."""
    for row, kept in zip(rows, trainer.train_dataset, strict=True):
        pairs = zip(columns, answers, strict=True)
        if any(kept["prompt_ids"] + kept[answer] != row[column] for column, answer in pairs):
            raise ValueError(f"TRL has other tokens of row {row['row_id']}")


def build_ppo_trainer(task: Task, turns: Turns, output_dir: str) -> Any:
    """Return TRL's PPOTrainer with four models, fp32."""
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    options = {
        "num_mini_batches": 1,
        "num_ppo_epochs": 4,
        "total_episodes": 10**6 * task.batch_size,
        "local_rollout_forward_batch_size": task.batch_size,
        "response_length": task.max_new_tokens,
        "stop_token": "eos",
        "temperature": 1.0,
        "kl_coef": 0.05,
        "gamma": 1.0,
        "lam": 0.95,
        "num_sample_generations": 0,
    }
    prompts = json.loads(Path(task.rows).read_text())
    trainer = PPOTrainer(
        args=PPOConfig(**training_options(task, output_dir) | options | task.options),
        processing_class=build_tokenizer(),
        train_dataset=Dataset.from_list([{"input_ids": row["input_ids"]} for row in prompts]),
        callbacks=[turn_by_ppo_step(turns)],
        model=load_model(task, "policy"),
        ref_model=load_model(task, "policy"),
        reward_model=load_model(task, "reward"),
        value_model=load_model(task, "value"),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def build_grpo_trainer(task: Task, turns: Turns, output_dir: str) -> Any:
    """Return TRL's GRPOTrainer with a reference and a reward model, fp32."""
    import trl
    from datasets import Dataset

    options = {
        "num_generations": task.num_samples,
        "max_completion_length": task.max_new_tokens,
        "max_steps": 10**6,
        "beta": 0.05,
        "loss_type": "grpo",
        "temperature": 1.0,
        "top_k": 0,
        "max_grad_norm": 1.0,
        "logging_strategy": "no",
        "learning_rate": 1e-6,
    }
    tokenizer, prompts = build_tokenizer(), json.loads(Path(task.rows).read_text())
    reward = load_model(task, "reward")
    # The reward model reads the texts of prompt and response one after the other: words stay words.
    texts = [{"prompt": tokenizer.decode(row["input_ids"]) + " "} for row in prompts]
    return trl.GRPOTrainer(
        model=load_model(task, "policy"),
        reward_funcs=build_scorer(reward, tokenizer) if task.scores_tokens else reward,
        reward_processing_classes=build_tokenizer(),
        args=trl.GRPOConfig(**training_options(task, output_dir) | options | task.options),
        train_dataset=Dataset.from_list(texts),
        processing_class=tokenizer,
        callbacks=[turn_by_grpo_step(turns)],
    )


def build_scorer(reward: Any, tokenizer: Any) -> Callable[..., list[float]]:
    """Return a reward function that scores the tokens of prompts and responses, EOS included."""

    @torch.no_grad()
    def score(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        rows = [
            tokenizer(prompt)["input_ids"] + ids for prompt, ids in zip(prompts, completion_ids, strict=True)
        ]
        found = tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt")
        return reward.eval()(**found).logits[:, 0].tolist()

    return score


TRAINERS = {
    "grpo": build_grpo_trainer,
    "sft": build_sft_trainer,
    "reward": build_reward_trainer,
    "dpo": build_dpo_trainer,
    "kto": build_kto_trainer,
    "ppo": build_ppo_trainer,
    "memory": build_sft_trainer,
    "reward_memory": build_reward_trainer,
}


def main() -> None:
    """Train."""
    turns = Turns()
    task = Task(**json.loads(sys.argv[1]))
    torch.manual_seed(0)
    if task.labels_only:
        score_labels_only()
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = TRAINERS[task.task](task, turns, output_dir)
        trainer.train()
    turns.answer(history=trainer.state.log_history)
    turns.wait()  # until it is read


if __name__ == "__main__":
    main()
