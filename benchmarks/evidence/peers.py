"""The same work, ours and TRL's: losses where all is the same, scores where each samples for itself.

Llamas of 4 layers, hidden 128, fp32, on the demo's composed conversations, a word a token.
  sft, reward,  TRL 1.16; the same model, token ids, order of rows, AdamW with weight decay, constant rate,
  dpo, kto      clipping; 16 rows an optimizer step. Our rows stand end to end, in passes of 2,048 tokens,
                TRL's are padded, 16 in one. All but SFT start from our SFT model of the same seed
  grpo          TRL 1.16; the same models, prompts, sizes and coefficients. Both score token ids, EOS
                included. TRL's KL term is not multiplied by the ratio: its gradient would be that of k2
  ppo           TRL 1.12, the same; neither clips gradients: TRL's does not
Both are done twice on the same prompts, step by step: each side samples for itself, and ours learns from
TRL's rollouts.
The peers' Pythons follow --trl_python, that of TRL 1.16 first. All take 22 minutes of one core.
"""

import argparse
import json
import math
import operator
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks.bench_ppo_step import our_step
from benchmarks.bench_train import ROWS_PER_STEP, build_ours
from benchmarks.measuring import Peer
from benchmarks.workload import EOS, FIRST_ID, PAD, TINY, build_tokenizer, small_llama_config
from common.data.global_batches import GlobalBatches
from common.data.packed_batch import pad_rows
from common.generation.generate import Generation
from common.programs import startup, training_loop
from common.ranks import distributed
from step2_reward.kto_trainer import MismatchedRows
from step3_ppo.roles import Actor
from tools.report.run_reader import Curve, read_run
from training_scripts.demo import composed

SEEDS, NUM_STEPS = (0, 1, 2), 60
SIZE = {"hidden_size": 128, "intermediate_size": 352}
RATES = {"sft": 2e-3, "reward": 3e-4, "dpo": 1e-4, "kto": 1e-4}
WEIGHT_DECAY = 0.1
PAIRED_ALIKE = "kto, KL term as TRL's"  # ours: shows whether anything else differs
FED = {task: f"{task}, TRL's rollouts" for task in ("grpo", "ppo")}
# A step has so many prompts, responses to each, and optimizer steps of all.
SAMPLED = {"grpo": (16, 4, 1), "ppo": (32, 1, 4)}
NUM_RL_STEPS, RL_RATE, KL_COEF, MAX_PROMPT, MAX_RESPONSE = 40, 1e-4, 0.05, 64, 32
ROUNDING = 1e-8  # smaller differences are drawn as that
LAST = 10  # a score is the mean of so many steps
METRICS = {  # TRL's names
    "sft": {"loss": "loss"},
    "reward": {"loss": "loss", "accuracy": "accuracy"},
    "dpo": {"loss": "loss", "accuracy": "rewards/accuracies"},
    "kto": {"loss": "loss", "kl": "kl"},
    "grpo": {"score": "reward"},
    "ppo": {"score": "objective/scores"},
    FED["grpo"]: {"kl": "kl"},
    FED["ppo"]: {"kl": "objective/kl"},
}
KL_OF_OURS = {"grpo": "policy/kl_loss", "ppo": "objective/kl"}  # where TRL's name is `kl` above
Metrics = dict[str, list[float]]  # by step


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, dict[str, Curve]]]:
    """Return how far the sides are from each other, and their curves."""
    torch.set_num_threads(1)
    startup.quiet_libraries()
    distributed.start()
    seeds = SEEDS[:1] if args.quick else SEEDS
    runs: dict[str, list[dict[str, Any]]] = {}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            for task, run in Seed(seed, Path(folder), args).run_all().items():
                runs.setdefault(task, []).append({"seed": seed} | run)
                print(f"{task}, seed {seed}: {compare([run])}", flush=True)
    distributed.stop()
    facts = {
        "peers": " and ".join(("TRL 1.16", "TRL 1.12 (PPO)")[: len(args.trl_python)])
        or "left out: --trl_python is not given",
        "tasks": {task: compare(of) for task, of in runs.items()},
        "runs": runs,
    }
    return facts, draw(runs)


class Seed:
    """Data and models of a seed, and what the sides make of them."""

    def __init__(self, seed: int, folder: Path, args: argparse.Namespace) -> None:
        self.seed, self.folder, self.pythons = seed, folder, args.trl_python
        self.num_steps, self.num_rl_steps = (5, 2) if args.quick else (NUM_STEPS, NUM_RL_STEPS)
        self.rows, self.num_tokens = build_rows(seed, self.num_steps * ROWS_PER_STEP)
        torch.manual_seed(seed)
        config = small_llama_config(vocab_size=self.num_tokens, **(TINY if args.quick else SIZE))
        LlamaForCausalLM(config).save_pretrained(folder / "policy")
        build_tokenizer(self.num_tokens).save_pretrained(folder / "policy")

    def run_all(self) -> dict[str, dict[str, Metrics]]:
        """Return the metrics of each task, ours and TRL's."""
        found = {"sft": self.train("sft", "policy")}
        torch.manual_seed(self.seed)
        path = self.folder / "policy"
        LlamaForSequenceClassification.from_pretrained(path, num_labels=1).save_pretrained(
            self.folder / "reward"
        )
        found |= {task: self.train(task) for task in ("dpo", "kto")}
        found[PAIRED_ALIKE] = found["kto"] | {"ours": self.train_ours("kto", pair_as_trl(self.rows["kto"]))}
        found["reward"] = self.train("reward", "reward", "value")
        for task in SAMPLED:
            found |= self.sample(task)
        return found

    def train(self, task: str, *kept: str) -> dict[str, Metrics]:
        """Return the metrics of both sides; our model is kept under these names."""
        options = {"learning_rate": RATES[task], "weight_decay": WEIGHT_DECAY, "num_train_epochs": 1}
        history, _ = self.run_trl(task, self.rows[task], options | {"train_sampling_strategy": "sequential"})
        return trl_metrics(task, history) | {"ours": self.train_ours(task, self.rows[task], *kept)}

    def train_ours(self, task: str, rows: list[dict[str, Any]], *kept: str) -> Metrics:
        """Return our metrics; the rows are trained on from first to last."""
        model = self.folder / ("reward" if task == "reward" else "policy")
        with tempfile.TemporaryDirectory() as output_dir, as_they_stand():
            trainer, batches = build_ours(
                task,
                rows,
                str(model),
                is_packed=True,
                num_tokens=self.num_tokens,
                learning_rate=RATES[task],
                weight_decay=WEIGHT_DECAY,
                output_dir=output_dir,
            )
            for step in range(1, len(batches) + 1):
                trainer.train_step(step, next(batches))
            curves = read_run(Path(output_dir)).curves
        for name in kept:
            training_loop.saved_model(trainer.engine.module).save_pretrained(self.folder / name)
        return {name: curves[f"{task}/{name}"].values for name in METRICS[task]}

    def sample(self, task: str) -> dict[str, dict[str, Metrics]]:
        """Return the scores of both sides, and what ours makes of TRL's rollouts."""
        of_rows = (tuple(row["answer_ids"][: row["answer_response_start"]]) for row in self.rows["kto"])
        prompts = number_rows(dict.fromkeys(of_rows))
        num_prompts, num_samples, _ = SAMPLED[task]
        num_responses = num_prompts * num_samples
        options = {"learning_rate": RL_RATE, "seed": self.seed}
        sizes: dict[str, Any] = {"batch_size": num_responses, "max_new_tokens": MAX_RESPONSE}
        if task == "ppo":
            options["total_episodes"] = num_responses * self.num_rl_steps
        else:
            options |= {"max_steps": self.num_rl_steps, "use_bias_correction_kl": False}
            sizes |= {"num_samples": num_samples, "scores_tokens": True}
        history, rollouts = self.run_trl(task, prompts, options, **sizes)
        if rollouts:
            prompts = number_rows(ids for of in rollouts for ids in of["prompts"][::num_samples])
        with as_they_stand():
            scores = [metrics["objective/score"] for metrics in self.steps(task, prompts)]
        found = {task: trl_metrics(task, history) | {"ours": {"score": scores}}}
        if rollouts:
            turns = iter(rollouts)
            with as_they_stand(), mock.patch.object(Actor, "generate", lambda *_, **__: lay_out(next(turns))):
                steps = self.steps(task, prompts, old_logprobs="recompute")
                ours = {"kl": [metrics[KL_OF_OURS[task]] for metrics in steps]}
            found[FED[task]] = trl_metrics(FED[task], history) | {"ours": ours}
        return found

    def steps(self, task: str, prompts: list[dict[str, Any]], **more: Any) -> Iterator[dict[str, float]]:
        """Yield the metrics of our steps on these prompts."""
        num_prompts, num_samples, num_epochs = SAMPLED[task]
        step = our_step(
            prompts,
            str(self.folder / "reward"),
            algorithm=task,
            num_prompts=num_prompts,
            num_samples_per_prompt=num_samples,
            ppo_epochs=num_epochs,
            per_device_training_batch_size=num_prompts * num_samples,
            actor_model_name_or_path=str(self.folder / "policy"),
            critic_model_name_or_path=str(self.folder / "value"),
            actor_learning_rate=RL_RATE,
            critic_learning_rate=RL_RATE,
            max_prompt_seq_len=MAX_PROMPT,
            max_answer_seq_len=MAX_RESPONSE,
            kl_coef=KL_COEF,
            reward_clip=0.0,
            gradient_clipping=0.0 if task == "ppo" else 1.0,
            packed=True,
            dtype="fp32",
            seed=self.seed,
            **more,
        )
        return (step() for _ in range(self.num_rl_steps))

    def run_trl(
        self, task: str, rows: list[dict[str, Any]], options: dict[str, Any], **more: Any
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return what TRL has logged, and its rollouts; nothing where its Python is not given."""
        pythons = self.pythons[1:] if task == "ppo" else self.pythons
        if not pythons:
            return [], []
        rows_file = self.folder / "rows.json"
        rows_file.write_text(json.dumps(rows))
        options = options | {"logging_strategy": "steps", "logging_steps": 1}
        where = {"rows": str(rows_file), "models": str(self.folder)}
        with Peer(pythons[0], task=task, options=options, **where, **more) as peer:
            return peer.finish()


def trl_metrics(task: str, history: list[dict[str, Any]]) -> dict[str, Metrics]:
    """Return the task's metrics of what TRL has logged as `trl`; nothing where it was not run."""
    names = METRICS[task].items()
    found = {name: [row[its] for row in history if its in row] for name, its in names}
    return {"trl": found} if history else {}


def as_they_stand() -> Any:
    """Return the block in which batches have the rows from first to last."""
    return mock.patch.object(GlobalBatches, "_order_of", lambda self, _: np.arange(len(self.dataset)))


def number_rows(prompts: Iterable[Sequence[int]]) -> list[dict[str, Any]]:
    """Return prompts as rows."""
    return [{"row_id": str(row_id), "input_ids": list(ids)} for row_id, ids in enumerate(prompts)]


def lay_out(rollout: dict[str, list[list[int]]]) -> Generation:
    """Return the responses as if ours had been sampled, without log-probabilities."""
    ids, mask = pad_rows(rollout["responses"], PAD)
    is_finished = torch.tensor([of[-1] == EOS for of in rollout["responses"]])
    return Generation(ids, mask, torch.zeros(ids.shape), torch.zeros(ids.shape), is_finished, mask)


def build_rows(seed: int, num_rows: int) -> tuple[dict[str, list[dict[str, Any]]], int]:
    """Return each task's rows in the order of training, and the size of the vocabulary."""
    turns = composed.compose_turns("train", num_rows, seed)
    pairs = composed.compose_pairs("train", num_rows, seed)
    words = {word for row in (*turns, *pairs) for text in row for word in text.split()}
    number = {word: FIRST_ID + i for i, word in enumerate(["Human:", "Assistant:", *sorted(words)])}

    def encode(text: str) -> list[int]:
        return [number[word] for word in text.split()]

    sft, ranked, rated = [], [], []
    for row_id, (message, reply) in enumerate(turns):
        prompt, answer = encode(f"Human: {message} Assistant:"), [*encode(reply), EOS]
        mask = [0] * len(prompt) + [1] * len(answer)
        sft.append({"row_id": str(row_id), "input_ids": prompt + answer, "loss_mask": mask})
    for row_id, (message, *replies) in enumerate(pairs):
        prompt = encode(f"Human: {message} Assistant:")
        row, start = {"row_id": str(row_id)}, len(prompt)
        sides = [[*prompt, *encode(reply), EOS] for reply in replies]
        for side, ids in zip(("chosen", "rejected"), sides, strict=True):
            row |= {f"{side}_ids": ids, f"{side}_response_start": start}
        ranked.append(row)
        label = int(row_id % 4 != 3)  # else the KL term would be 0 nearly always
        answer = {"answer_ids": sides[1 - label], "answer_response_start": start}
        rated.append({"row_id": str(row_id), "label": label} | answer)
    rated = list(MismatchedRows(rated, 10**9))
    return {"sft": sft, "reward": ranked, "dpo": ranked, "kto": rated}, FIRST_ID + len(number)


def pair_as_trl(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return KTO's rows with the mismatched answers that TRL gives them: each its predecessor's in the
    optimizer step, the first one the last one's.
    """
    found = []
    for place, row in enumerate(rows):
        before = rows[place - 1 if place % ROWS_PER_STEP else place + ROWS_PER_STEP - 1]
        start = row["answer_response_start"]
        ids = row["answer_ids"][:start] + before["answer_ids"][before["answer_response_start"] :]
        found.append(row | {"mismatched_ids": ids, "mismatched_response_start": start})
    return found


def compared_metric(runs: Sequence[dict[str, Any]]) -> str:
    """Return the name of what a task's sides are compared by: its first metric."""
    return next(iter(runs[0]["ours"]))


def compare(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return of a task's runs the last losses, and the differences of the sides at the first step, the last
    one, and the largest; or the scores of the first and of the last steps. Means of the seeds.
    """
    sides = [side for side in ("ours", "trl") if side in runs[0]]
    name = compared_metric(runs)
    if name == "score":
        ends = {"first": slice(LAST), "last": slice(-LAST, None)}
        return {
            side: {
                end: [statistics.fmean(run[side]["score"][of]) for run in runs] for end, of in ends.items()
            }
            for side in sides
        }
    found = {side: statistics.fmean(run[side][name][-1] for run in runs) for side in sides}
    if len(sides) == 2:
        differences = largest_differences(runs)
        found |= {"first": differences[0], "last": differences[-1], "largest": max(differences)}
    return found


def largest_differences(runs: Sequence[dict[str, Any]]) -> list[float]:
    """Return at each step the largest difference of the sides' `compared_metric` among the runs."""
    name = compared_metric(runs)
    of_runs = [map(operator.sub, run["ours"][name], run["trl"][name]) for run in runs]
    return [max(map(abs, of_step)) for of_step in zip(*of_runs, strict=True)]


def draw(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Curve]]:
    """Return losses of the first seed, means of the scores of all, and the differences of the losses."""
    panels, differences = {}, {}
    for task, of in runs.items():
        sides = [side for side in ("trl", "ours") if side in of[0]]
        name = next(iter(METRICS.get(task, [])), "")
        if name:
            shown, seeds = (of, "mean of the seeds") if name == "score" else (of[:1], f"seed {of[0]['seed']}")
            values = {side: zip(*(run[side][name] for run in shown), strict=True) for side in sides}
            panels[f"{task}: {name}, {seeds}"] = {
                side: curve_of([*map(statistics.fmean, by_step)]) for side, by_step in values.items()
            }
        if name != "score" and len(sides) == 2:
            found = largest_differences(of)
            differences[task] = curve_of([math.log10(max(one, ROUNDING)) for one in found])
    return panels | ({"largest difference of the losses, log10": differences} if differences else {})


def curve_of(values: list[float]) -> Curve:
    """Return values by step as a curve."""
    return Curve(list(range(1, len(values) + 1)), values)
