"""The same work, ours and TRL's: losses if all inputs are the same, scores if each side samples for itself.

Llamas of 4 layers, hidden 128, fp32, on the demo's composed conversations, one token per word.
  sft, reward,  TRL 1.16; the same model, token ids, order of rows, AdamW with weight decay, constant learning
  dpo, kto      rate, clipping; 16 rows per optimizer step. Our rows are packed, in passes of 2,048 tokens,
                TRL's are padded, 16 in one pass. All but SFT start from our SFT model of the same seed
  grpo          TRL 1.16; the same models, prompts, sizes and coefficients. Both score token ids, EOS
                included. TRL's KL term is not multiplied by the ratio: its gradient would be that of k2
  ppo           TRL 1.12, the same; neither side clips gradients, since TRL's does not
GRPO and PPO run twice on the same prompts per step: once each side samples, once ours trains on TRL's
rollouts. The peers' Pythons follow --trl_python, that of TRL 1.16 first. Everything takes 22 minutes of one
core.
"""

import json
import math
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks.bench_ppo_step import our_step
from benchmarks.bench_train import ROWS_PER_STEP, build_ours
from benchmarks.evidence.runs import DIGITS, Measured
from benchmarks.measuring import Peer
from benchmarks.workload import EOS, FIRST_ID, PAD, TINY, build_tokenizer, small_llama_config
from common.data.global_batches import EpochOrder
from common.data.packed_batch import pad_rows
from common.generation.generate import Generation
from common.programs import startup, training_loop
from common.ranks import distributed
from step2_reward.kto_trainer import MismatchedRows
from step3_ppo.roles import Actor
from tools.report.run_reader import Curve, read_run
from training_scripts.demo import composed

SEEDS = (0, 1, 2)
NUM_STEPS = 60
SIZE = {"hidden_size": 128, "intermediate_size": 352}
RATES = {"sft": 2e-3, "reward": 3e-4, "dpo": 1e-4, "kto": 1e-4}
WEIGHT_DECAY = 0.1
KTO_WITH_TRL_PAIRS = "kto, KL term as TRL's"  # with TRL's pairing, to see whether anything else differs
ON_TRL_ROLLOUTS = {task: f"{task}, TRL's rollouts" for task in ("grpo", "ppo")}
# Prompts per step, responses per prompt, optimizer steps per step.
SAMPLED = {"grpo": (16, 4, 1), "ppo": (32, 1, 4)}
NUM_RL_STEPS = 40
RL_RATE = 1e-4
KL_COEF = 0.05
MAX_PROMPT = 64
MAX_RESPONSE = 32
ROUNDING = 1e-8  # lower bound of plotted differences
MAX_POINTS = 50  # of a committed curve
LAST = 10  # steps that a reported score is averaged over
# Metric that a task's sides are compared by, ours and TRL's.
METRICS = {
    "sft": ("sft/loss", "loss"),
    "reward": ("reward/loss", "loss"),
    "dpo": ("dpo/loss", "loss"),
    "kto": ("kto/loss", "loss"),
    "grpo": ("objective/score", "reward"),
    "ppo": ("objective/score", "objective/scores"),
    ON_TRL_ROLLOUTS["grpo"]: ("policy/kl_loss", "kl"),
    ON_TRL_ROLLOUTS["ppo"]: ("objective/kl", "objective/kl"),
}
Sides = dict[str, list[float]]  # ours and TRL's metric by step


def measure(pythons: list[str], *, is_quick: bool) -> Measured:
    """Differences between the sides, and their curves. `pythons` are the interpreters of TRL 1.16 and, for
    PPO, 1.12.
    """
    torch.set_num_threads(1)
    startup.quiet_libraries()
    distributed.start()
    seeds = SEEDS[:1] if is_quick else SEEDS
    runs: dict[str, list[dict[str, Any]]] = {}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            for task, run in Seed(seed, Path(folder), pythons, is_quick=is_quick).run_all().items():
                runs.setdefault(task, []).append({"seed": seed} | run)
                print(f"{task}, seed {seed}: {compare(task, [run])}", flush=True)
    distributed.stop()
    facts = {
        "peers": " and ".join(("TRL 1.16", "TRL 1.12 (PPO)")[: len(pythons)])
        or "left out: --trl_python is not given",
        "tasks": {task: compare(task, rows) for task, rows in runs.items()},
    }
    panels = draw(runs)
    facts["curves"] = {title: shorten(curves) for title, curves in panels.items()}
    return facts, panels, "step"


class Seed:
    """Data and models of a seed, and the results of both sides."""

    def __init__(self, seed: int, folder: Path, pythons: list[str], *, is_quick: bool) -> None:
        self.seed = seed
        self.folder = folder
        self.pythons = pythons
        self.num_steps, self.num_rl_steps = (5, 2) if is_quick else (NUM_STEPS, NUM_RL_STEPS)
        self.rows, self.num_tokens = build_rows(seed, self.num_steps * ROWS_PER_STEP)
        torch.manual_seed(seed)
        config = small_llama_config(vocab_size=self.num_tokens, **(TINY if is_quick else SIZE))
        LlamaForCausalLM(config).save_pretrained(folder / "policy")
        build_tokenizer(self.num_tokens).save_pretrained(folder / "policy")

    def run_all(self) -> dict[str, Sides]:
        """The metrics of each task, ours and TRL's."""
        results = {"sft": self.train("sft", "policy")}
        torch.manual_seed(self.seed)
        path = self.folder / "policy"
        LlamaForSequenceClassification.from_pretrained(path, num_labels=1).save_pretrained(
            self.folder / "reward"
        )
        results |= {task: self.train(task) for task in ("dpo", "kto")}
        results[KTO_WITH_TRL_PAIRS] = results["kto"] | {
            "ours": self.train_ours("kto", pair_as_trl(self.rows["kto"]))
        }
        results["reward"] = self.train("reward", "reward", "value")
        for task in SAMPLED:
            results |= self.sample(task)
        return results

    def train(self, task: str, *kept: str) -> Sides:
        """Metrics of both sides; our model is stored under these names."""
        options = {"learning_rate": RATES[task], "weight_decay": WEIGHT_DECAY, "num_train_epochs": 1}
        history, _ = self.run_trl(task, self.rows[task], options | {"train_sampling_strategy": "sequential"})
        return trl_metrics(task, history) | {"ours": self.train_ours(task, self.rows[task], *kept)}

    def train_ours(self, task: str, rows: list[dict[str, Any]], *kept: str) -> list[float]:
        """Our metrics; the rows are trained on in their order."""
        model = self.folder / ("reward" if task == "reward" else "policy")
        with tempfile.TemporaryDirectory() as output_dir, in_stored_order():
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
        return curves[METRICS[task][0]].values

    def sample(self, task: str) -> dict[str, Sides]:
        """Scores of both sides, and our results on TRL's rollouts."""
        row_prompts = (tuple(row["answer_ids"][: row["answer_response_start"]]) for row in self.rows["kto"])
        prompts = number_rows(dict.fromkeys(row_prompts))
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
            prompts = number_rows(ids for rollout in rollouts for ids in rollout["prompts"][::num_samples])
        with in_stored_order():
            results = {task: trl_metrics(task, history) | {"ours": self.steps(task, prompts)}}
        if rollouts:
            turns = iter(rollouts)
            with (
                in_stored_order(),
                mock.patch.object(Actor, "generate", lambda *_, **__: as_generation(next(turns))),
            ):
                ours = self.steps(task, prompts, ON_TRL_ROLLOUTS[task], old_logprobs="recompute")
            results[ON_TRL_ROLLOUTS[task]] = trl_metrics(ON_TRL_ROLLOUTS[task], history) | {"ours": ours}
        return results

    def steps(self, task: str, prompts: list[dict[str, Any]], name: str = "", **flags: Any) -> list[float]:
        """The metric of our steps on these prompts; `name` is one of METRICS, by default the task's."""
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
            **flags,
        )
        metric = METRICS[name or task][0]
        return [step()[metric] for _ in range(self.num_rl_steps)]

    def run_trl(
        self, task: str, rows: list[dict[str, Any]], options: dict[str, Any], **more: Any
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """TRL's log, and its rollouts; empty without its Python."""
        pythons = self.pythons[1:] if task == "ppo" else self.pythons
        if not pythons:
            return [], []
        rows_file = self.folder / "rows.json"
        rows_file.write_text(json.dumps(rows))
        options = options | {"logging_strategy": "steps", "logging_steps": 1}
        paths = {"rows": str(rows_file), "models": str(self.folder)}
        with Peer(pythons[0], task=task, options=options, **paths, **more) as peer:
            return peer.finish()


def trl_metrics(task: str, history: list[dict[str, Any]]) -> Sides:
    """The task's metric from TRL's log, by the key "trl"; {} if TRL was not run."""
    name = METRICS[task][1]
    values = [row[name] for row in history if name in row]
    return {"trl": values} if history else {}


def in_stored_order() -> Any:
    """Context in which batches have the rows in their order."""
    return mock.patch.object(EpochOrder, "epoch", lambda self, _: np.arange(self.num_rows))


def number_rows(prompts: Iterable[Sequence[int]]) -> list[dict[str, Any]]:
    """Prompts as rows."""
    return [{"row_id": str(row_id), "input_ids": list(ids)} for row_id, ids in enumerate(prompts)]


def as_generation(rollout: dict[str, list[list[int]]]) -> Generation:
    """TRL's responses as our `Generation`, without log-probabilities."""
    ids, mask = pad_rows(rollout["responses"], PAD)
    is_finished = torch.tensor([response[-1] == EOS for response in rollout["responses"]])
    return Generation(ids, mask, torch.zeros(ids.shape), torch.zeros(ids.shape), is_finished, mask)


def build_rows(seed: int, num_rows: int) -> tuple[dict[str, list[dict[str, Any]]], int]:
    """Each task's rows in training order, and the vocabulary size."""
    turns = composed.compose_turns("train", num_rows, seed)
    pairs = composed.compose_pairs("train", num_rows, seed)
    words = {word for row in (*turns, *pairs) for text in row for word in text.split()}
    number = {word: FIRST_ID + i for i, word in enumerate(["Human:", "Assistant:", *sorted(words)])}

    def encode(text: str) -> list[int]:
        return [number[word] for word in text.split()]

    tasks: dict[str, list[dict[str, Any]]] = {"sft": [], "reward": [], "kto": []}
    for row_id, (message, *replies) in enumerate(turns + pairs):
        prompt = encode(f"Human: {message} Assistant:")
        sides = [[*prompt, *encode(reply), EOS] for reply in replies]
        start = len(prompt)
        row: dict[str, Any] = {"row_id": str(row_id % num_rows)}
        if len(sides) == 1:
            mask = [0] * start + [1] * (len(sides[0]) - start)
            tasks["sft"].append(row | {"input_ids": sides[0], "loss_mask": mask})
            continue
        pair = {"chosen_ids": sides[0], "rejected_ids": sides[1]}
        starts = {"chosen_response_start": start, "rejected_response_start": start}
        tasks["reward"].append(row | pair | starts)
        label = int(row_id % 4 != 3)  # otherwise the KL term would almost always be 0
        answer = {"answer_ids": sides[1 - label], "answer_response_start": start}
        tasks["kto"].append(row | {"label": label} | answer)
    tasks["kto"] = list(MismatchedRows(tasks["kto"], 10**9))
    return tasks | {"dpo": tasks["reward"]}, FIRST_ID + len(number)


def pair_as_trl(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """KTO's rows with TRL's mismatched answers: each row gets that of its predecessor in the optimizer step,
    the first row that of the last.
    """
    results = []
    for place, row in enumerate(rows):
        before = rows[place - 1 if place % ROWS_PER_STEP else place + ROWS_PER_STEP - 1]
        start = row["answer_response_start"]
        ids = row["answer_ids"][:start] + before["answer_ids"][before["answer_response_start"] :]
        results.append(row | {"mismatched_ids": ids, "mismatched_response_start": start})
    return results


def sides_of(runs: Sequence[dict[str, Any]]) -> list[str]:
    """The sides that were run."""
    return [side for side in ("trl", "ours") if side in runs[0]]


def compare(task: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Last losses of a task's runs, and the differences of the sides at the first step, the last one, and the
    largest; or the scores of the first and of the last steps, per seed. Losses are means over seeds.
    """
    summary: dict[str, Any] = {}
    for side in sides_of(runs):
        curves = [run[side] for run in runs]
        summary[side] = statistics.fmean(curve[-1] for curve in curves)
        if task in SAMPLED:
            first = [statistics.fmean(curve[:LAST]) for curve in curves]
            last = [statistics.fmean(curve[-LAST:]) for curve in curves]
            summary[side] = {"first": first, "last": last}
    if task not in SAMPLED and len(summary) == 2:
        differences = largest_differences(runs)
        summary |= {"first": differences[0], "last": differences[-1], "largest": max(differences)}
    return summary


def largest_differences(runs: Sequence[dict[str, Any]]) -> list[float]:
    """The largest difference of the sides among the runs, at each step."""
    differences = [np.subtract(run["ours"], run["trl"]) for run in runs]
    return np.abs(differences).max(axis=0).tolist()


def draw(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Curve]]:
    """Losses of the first seed, mean scores over seeds, and the differences of the losses."""
    panels = {}
    differences = {}
    for task, rows in runs.items():
        name = "kl" if task in ON_TRL_ROLLOUTS.values() else "loss"
        title = f"{task}: {name}, seed {rows[0]['seed']}"
        shown = rows[:1]
        if task in SAMPLED:
            title = f"{task}: score, mean of the seeds"
            shown = rows
        elif len(sides_of(rows)) == 2:
            logarithms = np.log10(np.maximum(largest_differences(rows), ROUNDING))
            differences[task] = curve_of(logarithms)
        if task in METRICS:
            panels[title] = {
                side: curve_of(np.mean([run[side] for run in shown], axis=0)) for side in sides_of(rows)
            }
    if differences:
        panels["largest difference of the losses, log10"] = differences
    return panels


def shorten(curves: dict[str, Curve]) -> dict[str, Any]:
    """Steps and values of a panel's curves, at most MAX_POINTS each."""
    shortened = {}
    for name, curve in curves.items():
        stride = math.ceil(len(curve.values) / MAX_POINTS)
        values = [round(value, DIGITS) for value in curve.values[::stride]]
        shortened[name] = {"steps": curve.steps[::stride], "values": values}
    return shortened


def curve_of(values: np.ndarray) -> Curve:
    """Values by step as a curve."""
    return Curve(list(range(1, len(values) + 1)), values.tolist())
