#!/usr/bin/env python
"""TRL's PPOTrainer as the peer of bench_ppo_step.py: one "go" is a PPO step. Run by TRL 1.12's Python.

DIR/bin/python benchmarks/trl_ppo_peer.py --rows PROMPTS.json --models FOLDER [--num_ppo_epochs 4]

1.12 is the last release with a PPOTrainer. FOLDER is what ppo_models.save_models made: `policy` is actor and
reference, `reward` and `value` are the other two. `train()` runs once; a callback holds it between steps.
`seconds` is from "go" to the end of the step: prompts, generation, the four models' scores, advantages, all
optimizer steps, the step's metrics. Optimizer steps: num_ppo_epochs * num_minibatches.
(gradient_accumulation_steps stays 1: above it, TRL steps at every micro-batch of a data set's last batch.)
TRL's PPO does not clip gradients. A step takes --batch_size prompts of the file, shuffled.
The answer: seconds, generated_tokens (EOS included, nothing after it), response_lengths,
computed_tokens (prompts times the longest response), prompt_tokens, prompt_width (what they are padded to),
optimizer_steps, policy_loss, value_loss, kl, score.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.peer_process import Turns

METRICS = {
    "policy_loss": "loss/policy_avg",
    "value_loss": "loss/value_avg",
    "kl": "objective/kl",
    "score": "objective/scores",
}


def response_lengths(responses: Any, eos: int) -> list[int]:
    """Return the tokens up to and with the first EOS of responses (B, R), or all R."""
    is_eos = (responses == eos).long()
    return (is_eos.cumsum(1) - is_eos == 0).sum(1).tolist()


def build_steps(turns: Turns, step: dict[str, Any], facts: dict[str, Any]) -> Any:
    """Return a callback that waits for a turn before each PPO step and answers after it.

    `step` is what others leave there: `prompts` (B, P) and `texts` (B, P + R), `optimizer_steps`, `metrics`.
    """
    from transformers import TrainerCallback

    from benchmarks.chat_rows import EOS, PAD

    class Steps(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turns.ready(**facts)
            self._wait()

        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            step["metrics"] = logs

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds = turns.seconds()
            prompts, texts = step["prompts"], step["texts"]
            lengths = response_lengths(texts[:, prompts.shape[1] :], EOS)
            turns.answer(
                seconds=seconds,
                generated_tokens=sum(lengths),
                response_lengths=lengths,
                computed_tokens=len(lengths) * (texts.shape[1] - prompts.shape[1]),
                prompt_tokens=int((prompts != PAD).sum()),
                prompt_width=prompts.shape[1],
                optimizer_steps=step["optimizer_steps"],
                **{name: float(step["metrics"][key]) for name, key in METRICS.items()},
            )
            self._wait()

        def _wait(self) -> None:
            step["optimizer_steps"] = 0
            turns.wait()

    return Steps()


def watch_generation(step: dict[str, Any]) -> None:
    """Let TRL's generation leave its prompts and its result in `step`."""
    from trl.experimental.ppo import ppo_trainer

    batch_generation = ppo_trainer.batch_generation

    def watched(model: Any, queries: Any, *args: Any, **kwargs: Any) -> Any:
        found = batch_generation(model, queries, *args, **kwargs)
        step["prompts"], step["texts"] = queries, found[0]
        return found

    ppo_trainer.batch_generation = watched


def build_config(output_dir: str, args: argparse.Namespace) -> Any:
    """Return TRL's configuration: what we do, nothing logged, saved or evaluated."""
    from trl.experimental.ppo import PPOConfig

    return PPOConfig(
        output_dir=output_dir,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=1,
        num_mini_batches=args.num_minibatches,
        num_ppo_epochs=args.num_ppo_epochs,
        total_episodes=10**6 * args.batch_size,  # the benchmark ends it
        local_rollout_forward_batch_size=args.batch_size,
        response_length=args.max_new_tokens,
        stop_token="eos",
        temperature=1.0,
        kl_coef=0.05,
        gamma=1.0,
        lam=0.95,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta2=0.95,
        weight_decay=0.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        seed=args.seed,
        num_sample_generations=0,
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def load_models(folder: str) -> dict[str, Any]:
    """Return the four models as PPOTrainer's arguments, fp32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kinds = {
        "model": ("policy", AutoModelForCausalLM),
        "ref_model": ("policy", AutoModelForCausalLM),
        "reward_model": ("reward", AutoModelForSequenceClassification),
        "value_model": ("value", AutoModelForSequenceClassification),
    }
    return {
        name: kind.from_pretrained(Path(folder, part), dtype=torch.float32)
        for name, (part, kind) in kinds.items()
    }


def main() -> None:
    """Train, a PPO step for each turn."""
    turns = Turns()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", required=True, help="file of chat_rows.write_rows: prompts")
    parser.add_argument("--models", required=True, help="folder of ppo_models.save_models")
    parser.add_argument("--batch_size", type=int, default=16, help="prompts of a PPO step")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--num_ppo_epochs", type=int, default=4)
    parser.add_argument("--num_minibatches", type=int, default=1, help="optimizer steps of an epoch")
    parser.add_argument("--learning_rate", type=float, default=1e-6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    import torch
    import transformers
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer
    from transformers.trainer_callback import PrinterCallback

    try:
        from trl.experimental.ppo import PPOTrainer
    except ImportError as error:
        raise SystemExit(f"TRL {trl.__version__} has no PPOTrainer; 1.12 is the last: trl-1.12") from error
    from benchmarks.chat_rows import read_rows

    prompts = [{"input_ids": row["input_ids"]} for row in read_rows(args.rows)]
    if len(prompts) < args.batch_size:
        raise SystemExit(f"--batch_size {args.batch_size} is more than the {len(prompts)} prompts of --rows")
    step: dict[str, Any] = {"optimizer_steps": 0}
    facts: dict[str, Any] = {
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "prompts": len(prompts),
    }
    watch_generation(step)
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = PPOTrainer(
            args=build_config(output_dir, args),
            processing_class=AutoTokenizer.from_pretrained(Path(args.models, "policy"), padding_side="left"),
            train_dataset=Dataset.from_list(prompts),
            callbacks=[build_steps(turns, step, facts)],
            **load_models(args.models),
        )
        trainer.remove_callback(PrinterCallback)

        def count(*_: Any) -> None:
            step["optimizer_steps"] += 1

        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate wraps it
        optimizer.register_step_post_hook(count)
        trainer.train()


if __name__ == "__main__":
    main()
