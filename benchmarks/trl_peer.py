#!/usr/bin/env python
"""TRL's trainers as peers, run by the Python of an environment of make_peer_env.sh.

DIR/bin/python benchmarks/trl_peer.py '{"task": "sft", "rows": "ROWS.json", "models": "FOLDER"}'

`train()` runs once; a callback pauses it between turns. Logs and checkpoints are off. If `options` limit the
training, the last message is `history`: the trainer's log.
  sft, reward,  TRL 1.16; a turn is a pass over the rows: TRL's own batches, forward, backward, clipping,
  dpo, kto      optimizer. An optimizer step is batch_size * accumulation rows. It reports: seconds
  ppo           TRL 1.12, the last release with a PPOTrainer; a turn is a PPO step: prompts, generation, the
                scores of four models, advantages, 4 optimizer steps, metrics. It does not clip gradients.
                It reports: seconds, tokens (generated ones: EOS included, nothing after it), rollout
  grpo          TRL 1.16; a turn is a GRPO step: prompts, generation, scores of policy, reference and reward
                model, one optimizer step of all responses. It reports the same as ppo
With `length`, sft and reward train a short step that allocates the optimizer's moments, then the measured
one, and report `peak_bytes` first: gradients, activations, logits; no weights, no moments.
Attention is torch's (sdpa): FlashAttention needs a GPU and must be compiled, and flex_attention has no
backward pass on a CPU. It trains on a GPU if there is one.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # repository root, when run as a script

import torch
import transformers
import trl
import trl.trainer.utils
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback

from benchmarks import workload
from benchmarks.measuring import Turns, peak_since, reset_peak
from benchmarks.workload import EOS, PAD, build_tokenizer

PACK_TOKENS = 512
SIDES = ("chosen_ids", "rejected_ids")
Row = dict[str, Any]
Rollout = dict[str, list[list[int]]]  # prompts and responses of a step, row by row


@dataclass(frozen=True)
class Task:
    """The task: the one argument of this program, as JSON."""

    task: str
    rows: str = ""  # a file of rows as JSON
    models: str = ""  # folder of workload.save_models
    batch_size: int = 16
    accumulation: int = 1
    labels_only: bool = False  # see `score_labels_only`
    dtype: str = "fp32"  # bf16: of products, with fp32 weights
    max_new_tokens: int = 64
    num_samples: int = 8  # per prompt, for `grpo`
    scores_tokens: bool = False  # for `grpo`: the reward model also reads the response's EOS
    options: dict[str, Any] = field(default_factory=dict)  # of the trainer, overriding those set here
    length: int = 0  # of each sequence, to measure memory
    vocabulary: int = 0


def training_options(task: Task, output_dir: str) -> dict[str, Any]:
    """Arguments of transformers' Trainer for training as ours does, without anything else."""
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
        "bf16": task.dtype == "bf16",
        "use_cpu": not torch.cuda.is_available(),
        "seed": 0,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def call_at(**functions: Callable[[], None]) -> TrainerCallback:
    """Callback that calls these functions, without arguments, at a trainer's events."""
    callback = TrainerCallback()
    for event, function in functions.items():
        setattr(callback, event, lambda *_, function=function, **__: function())
    return callback


def turn_by_step(turns: Turns, rollouts: list[Rollout]) -> TrainerCallback:
    """Callback that waits for a turn before each step and reports the newest rollout after it."""

    def hold(**facts: Any) -> None:
        turns.answer(**facts)
        turns.wait()

    def end() -> None:
        hold(tokens=sum(map(len, rollouts[-1]["responses"])), rollout=rollouts[-1])

    return call_at(on_train_begin=hold, on_step_end=end)


def measure_second_step(turns: Turns) -> TrainerCallback:
    """Callback that reports the peak memory from the end of the first step to that of the second."""
    baselines: list[int] = []

    def end() -> None:
        if baselines:
            turns.answer(peak_bytes=peak_since(baselines[0]))
        else:
            baselines.append(reset_peak())

    return call_at(on_step_end=end)


def record_rollouts(owner: Any, name: str, read: Callable[..., Rollout]) -> list[Rollout]:
    """The list that every rollout is appended to: `read` builds it from the result and arguments of
    `owner.name`.
    """
    rollouts: list[Rollout] = []
    generate = getattr(owner, name)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        generated = generate(*args, **kwargs)
        rollouts.append(read(generated, *args))
        return generated

    setattr(owner, name, recorded)
    return rollouts


def score_labels_only() -> None:
    """Make TRL's output head score only positions with a label, as it does with Triton on a GPU.

    On a CPU it also scores prompts and padding: a third of a step or more, a cost that a GPU does not have.
    """
    trl.trainer.utils._use_triton = lambda device: True  # selects the positions only, not the kernel


def load_model(task: Task, name: str) -> Any:
    """One of the models of `save_models`, fp32."""
    kind = AutoModelForCausalLM if name == "policy" else AutoModelForSequenceClassification
    return kind.from_pretrained(Path(task.models, name), dtype=torch.float32, trust_remote_code=False)


# ---- supervised: SFT, reward model, DPO, KTO --------------------------------------------------------------


def sft_columns(rows: list[Row]) -> list[Row]:
    """TRL's columns of SFT."""
    return [{"input_ids": row["input_ids"], "completion_mask": row["loss_mask"]} for row in rows]


def pair_columns(rows: list[Row]) -> list[Row]:
    """TRL's columns of a reward model; its sampler reads `length`."""
    return [{side: row[side] for side in SIDES} | {"length": longest_side(row)} for row in rows]


def dpo_columns(rows: list[Row]) -> list[Row]:
    """TRL's columns of DPO, which takes text; its sampler reads `length`."""
    columns = []
    for row in rows:
        prompt, chosen, rejected = to_texts(row, SIDES, row["chosen_response_start"])
        texts = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        columns.append(texts | {"length": longest_side(row)})
    return columns


def kto_columns(rows: list[Row]) -> list[Row]:
    """TRL's columns of KTO, which takes text."""
    columns = []
    for row in rows:
        prompt, response = to_texts(row, ["answer_ids"], row["answer_response_start"])
        columns.append({"prompt": prompt, "completion": response, "label": bool(row["label"])})
    return columns


def longest_side(row: Row) -> int:
    """Number of tokens of the longer sequence of a pair."""
    return max(len(row[side]) for side in SIDES)


def to_texts(row: Row, columns: Sequence[str], start: int) -> list[str]:
    """The text of a row's prompt, which has `start` tokens, and those of its responses."""
    words = [TOKENIZER.convert_ids_to_tokens(row[column]) for column in columns]
    return [" ".join([*words[0][:start], ""]), *(" ".join(text[start:]) for text in words)]


class Supervised(NamedTuple):
    """A task of TRL with rows known before it trains."""

    trainer: type
    config: type
    columns: Callable[[list[Row]], list[Row]]
    options: dict[str, Any]
    model: str = "policy"
    names: dict[str, str] = {}  # of our columns in TRL's data, if it tokenises text


NO_TRUNCATION = {"max_length": None}
SUPERVISED = {
    "sft": Supervised(trl.SFTTrainer, trl.SFTConfig, sft_columns, {"completion_only_loss": True}),
    "reward": Supervised(
        trl.RewardTrainer,
        trl.RewardConfig,
        pair_columns,
        NO_TRUNCATION | {"remove_unused_columns": False},
        model="reward",
    ),
    "dpo": Supervised(  # reference log-probabilities are computed before training
        trl.DPOTrainer,
        trl.DPOConfig,
        dpo_columns,
        NO_TRUNCATION | {"remove_unused_columns": False, "precompute_ref_log_probs": True},
        names={side: side for side in SIDES},
    ),
    "kto": Supervised(
        trl.KTOTrainer,
        trl.KTOConfig,
        kto_columns,
        NO_TRUNCATION | {"precompute_ref_log_probs": True},
        names={"answer_ids": "completion_ids"},
    ),
}


def build_supervised(task: Task, turns: Turns, output_dir: str) -> Any:
    """TRL's trainer of a supervised task."""
    kind = SUPERVISED[task.task]
    options = {"num_train_epochs": 10**6, "max_grad_norm": 1.0, "logging_strategy": "no"} | kind.options
    if task.task == "sft":
        options["max_length"] = task.length or PACK_TOKENS
    options |= task.options
    if task.length:
        callback = measure_second_step(turns)
        rows, model = memory_inputs(task, is_policy=kind.model == "policy")
        options |= {"train_sampling_strategy": "sequential", "num_train_epochs": 1}
    else:
        callback = call_at(on_train_begin=turns.answer, on_epoch_begin=turns.wait, on_epoch_end=turns.answer)
        rows = json.loads(Path(task.rows).read_text())
        model = load_model(task, kind.model)
    trainer = kind.trainer(
        model=model,
        args=kind.config(**training_options(task, output_dir) | options),
        train_dataset=Dataset.from_list(kind.columns(rows)),
        processing_class=TOKENIZER,
        callbacks=[callback],
    )
    check_tokens(rows, trainer, kind)
    return trainer


def memory_inputs(task: Task, *, is_policy: bool) -> tuple[list[Row], Any]:
    """Rows of two steps, short ones first, and the model whose memory is measured."""
    build_rows = workload.memory_rows if is_policy else workload.memory_pairs
    num_rows = task.batch_size * task.accumulation
    rows = []
    for size in (workload.WARM_UP_TOKENS, task.length):
        rows += build_rows(num_rows, size, task.vocabulary)
    config = workload.small_llama_config(
        vocab_size=task.vocabulary, max_position_embeddings=max(2048, task.length), num_labels=1
    )
    kind = transformers.LlamaForCausalLM if is_policy else transformers.LlamaForSequenceClassification
    return rows, kind(config)


def check_tokens(rows: list[Row], trainer: Any, kind: Supervised) -> None:
    """Raise ValueError unless the trainer has the rows' tokens."""
    if kind.columns is sft_columns:
        num_tokens = sum(len(row["input_ids"]) for row in rows)
        kept = sum(len(ids) for ids in trainer.train_dataset["input_ids"])
        if kept != num_tokens:
            raise ValueError(f"TRL keeps {kept} of {num_tokens} tokens in packs of {PACK_TOKENS}")
    for row, kept in zip(rows if kind.names else (), trainer.train_dataset, strict=bool(kind.names)):
        for column, name in kind.names.items():
            if kept["prompt_ids"] + kept[name] != row[column]:
                raise ValueError(f"TRL has different tokens for row {row['row_id']}")


# ---- PPO and GRPO -----------------------------------------------------------------------------------------


def read_ppo_rollout(generated: Any, _: Any, queries: torch.Tensor, *__: Any) -> Rollout:
    """Prompts without padding, and responses up to their EOS, generated by TRL's PPO."""
    responses = generated[0][:, queries.shape[1] :]
    is_end = (responses == EOS).long()  # (B, R)
    is_kept = is_end.cumsum(1) - is_end == 0
    return {
        "prompts": [row[row != PAD].tolist() for row in queries],
        "responses": [row[mask].tolist() for row, mask in zip(responses, is_kept, strict=True)],
    }


def build_ppo_trainer(task: Task, turns: Turns, output_dir: str) -> Any:
    """TRL's PPOTrainer with four models, fp32."""
    from transformers.trainer_callback import PrinterCallback
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

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
    rollouts = record_rollouts(ppo_trainer, "batch_generation", read_ppo_rollout)
    trainer = PPOTrainer(
        args=PPOConfig(**training_options(task, output_dir) | options | task.options),
        processing_class=TOKENIZER,
        train_dataset=Dataset.from_list([{"input_ids": row["input_ids"]} for row in prompts]),
        callbacks=[turn_by_step(turns, rollouts)],
        model=load_model(task, "policy"),
        ref_model=load_model(task, "policy"),
        reward_model=load_model(task, "reward"),
        value_model=load_model(task, "value"),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def read_grpo_rollout(generated: Any, _: Any, prompt_ids: list[list[int]], *__: Any) -> Rollout:
    """Prompts and responses generated by TRL's GRPO."""
    return {"prompts": prompt_ids, "responses": generated[0]}


def build_grpo_trainer(task: Task, turns: Turns, output_dir: str) -> Any:
    """TRL's GRPOTrainer with a reference and a reward model, fp32."""
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
    prompts = json.loads(Path(task.rows).read_text())
    reward = load_model(task, "reward")
    rollouts = record_rollouts(trl.GRPOTrainer, "_generate_single_turn", read_grpo_rollout)
    # TRL concatenates the texts of prompt and response for the reward model: the space separates the words.
    texts = [{"prompt": TOKENIZER.decode(row["input_ids"]) + " "} for row in prompts]
    return trl.GRPOTrainer(
        model=load_model(task, "policy"),
        reward_funcs=build_scorer(reward) if task.scores_tokens else reward,
        reward_processing_classes=build_tokenizer(),
        args=trl.GRPOConfig(**training_options(task, output_dir) | options | task.options),
        train_dataset=Dataset.from_list(texts),
        processing_class=TOKENIZER,
        callbacks=[turn_by_step(turns, rollouts)],
    )


def build_scorer(reward: Any) -> Callable[..., list[float]]:
    """Reward function that scores the tokens of prompts and responses, EOS included."""

    @torch.no_grad()
    def score(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        pairs = zip(prompts, completion_ids, strict=True)
        rows = [TOKENIZER(prompt)["input_ids"] + ids for prompt, ids in pairs]
        padded = TOKENIZER.pad({"input_ids": rows}, padding_side="right", return_tensors="pt")
        return reward.eval()(**padded).logits[:, 0].tolist()

    return score


TOKENIZER = build_tokenizer()
BUILDERS = dict.fromkeys(SUPERVISED, build_supervised)
BUILDERS |= {
    "ppo": build_ppo_trainer,
    "grpo": build_grpo_trainer,
}


def main() -> None:
    """Train."""
    turns = Turns()
    task = Task(**json.loads(sys.argv[1]))
    torch.manual_seed(0)
    if task.labels_only:
        score_labels_only()
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = BUILDERS[task.task](task, turns, output_dir)
        trainer.train()
    turns.answer(history=trainer.state.log_history)
    turns.wait()  # until it has been read


if __name__ == "__main__":
    main()
