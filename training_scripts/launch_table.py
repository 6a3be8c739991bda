#!/usr/bin/env python
"""Table of the launch scripts, and the settings of `run.sh` for every other model.

python training_scripts/launch_table.py STEP MODEL MACHINE [FLAGS]     prints the flags of run.sh, one a line

With --auto in FLAGS those that --auto chooses are left out.
"""

import os
import re
import shlex
import sys
from collections import namedtuple
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from string import Template

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.flags.groups import AUTO_FLAGS

FOLDER = Path(__file__).resolve().parent
TABLE = FOLDER / "models.txt"
STEPS = ("step1_sft", "step2_reward", "step3_ppo")
FOLDER_OF_STEP = {"sft": "step1_sft", "reward": "step2_reward", "dpo": "step2_reward", "ppo": "step3_ppo"}
DEPLOYMENTS = ("single_gpu", "single_node", "multi_node")
ONE_SET = ["Dahoas/rm-static"]
FOUR_SETS = [
    *ONE_SET,
    "Dahoas/full-hh-rlhf",
    "Dahoas/synthetic-instruct-gptj-pairwise",
    "yitingxie/rlhf-reward-datasets",
]

LINES = [line.split() for line in TABLE.read_text().splitlines() if not line.startswith("#")]
# Settings of a model on a kind of machine, by the table's columns: all strings, "-" for none.
Row = namedtuple("Row", LINES[0])
ROWS = [Row(*line) for line in LINES[1:]]


def find_row(model: str, machine: str) -> Row:
    """The settings of a model; the defaults of the kind of machine for a model that is not in the table.

    Raises ValueError if there is no such kind of machine.
    """
    rows = [row for row in ROWS if row.machine == machine]
    if not rows:
        raise ValueError(f"MACHINE {machine} must be one of {', '.join(DEPLOYMENTS)}")
    return next((row for row in rows if row.model.lower() == model.lower()), rows[-1])


def step_flags(step: str, row: Row) -> list[str]:
    """The flags of a step (sft, reward, dpo, ppo), without models and output folder.

    Raises ValueError if there is no such step.
    """
    if step not in FOLDER_OF_STEP:
        raise ValueError(f"STEP {step} must be one of {', '.join(FOLDER_OF_STEP)}")
    has_one_gpu = row.machine == "single_gpu"
    words = ["--data_path", *(ONE_SET if has_one_gpu or step == "ppo" else FOUR_SETS)]
    words += ["--data_split", "2,4,4", "--gradient_accumulation_steps", row.accumulation]
    words += ["--lr_scheduler_type", "cosine"]
    roles = ("actor_", "critic_") if step == "ppo" else ("",)
    for role in roles:
        words += [f"--{role}zero_stage", row.zero]
        if row.checkpointing != "-":
            words += [f"--{role}gradient_checkpointing"]
        if row.lora != "-":
            words += [f"--{role}lora_dim", row.lora, f"--{role}lora_module_name", "layers."]
    if step == "ppo":
        return words + _ppo_flags(row)
    rate = {"sft": row.sft_rate, "reward": "1e-5", "dpo": "1e-6"}[step]
    words += ["--per_device_train_batch_size", row.batch, "--per_device_eval_batch_size", row.batch]
    words += ["--max_seq_len", "512", "--learning_rate", rate]
    words += ["--weight_decay", "0.1" if step == "reward" else "0.0"]
    words += ["--num_train_epochs", "2" if step == "sft" else "1"]
    return words + (["--loss", "dpo"] if step == "dpo" else [])


def _ppo_flags(row: Row) -> list[str]:
    batch = min(int(row.batch), int(row.generation_batch))
    # A PPO step has at least the samples of one optimizer step.
    generation_batches = max(batch * int(row.accumulation) // int(row.generation_batch), 1)
    words = ["--per_device_generation_batch_size", row.generation_batch]
    words += ["--generation_batches", str(generation_batches)]
    words += ["--per_device_training_batch_size", str(batch)]
    words += ["--max_prompt_seq_len", "256", "--max_answer_seq_len", "256"]
    words += ["--actor_learning_rate", row.ppo_rate, "--critic_learning_rate", "5e-6"]
    words += ["--num_warmup_steps", "100", "--enable_hybrid_engine"]
    words += ["--eval_fraction", "0.05", "--eval_interval", "100"]
    words += [f"--offload_{role}_model" for role in row.offload.split(",") if role != "-"]
    return words + (["--inference_tp_size", row.tp] if row.tp != "-" else [])


def run_flags(step: str, model: str, machine: str, models: Mapping[str, str]) -> list[str]:
    """All flags of run.sh for a step; `models` by the names of run.sh's variables."""
    roles = ("actor_", "critic_") if step == "ppo" else ("",)
    words = [w for r in roles for w in (f"--{r}model_name_or_path", models[f"{r}model".upper()])]
    return words + step_flags(step, find_row(model, machine))


def without(words: Sequence[str], names: Collection[str]) -> list[str]:
    """The words of a command line without these flags and their values."""
    kept = []
    is_left_out = False
    for word in words:
        if word.startswith("--"):
            is_left_out = word.removeprefix("--") in names
        if not is_left_out:
            kept.append(word)
    return kept


# ---- the scripts of single models -----------------------------------------------------------------------


def find_script(step: int, deployment: str, model: str) -> Path | None:
    """The script of a step (1, 2, 3) for a model by its hub name; None if there is none.

    Scripts that train all weights come before those with LoRA.
    """
    family, _, size = model.lower().removesuffix("-hf").rpartition("-")
    name = {"facebook/opt": "opt", "meta-llama/llama-2": "llama2"}.get(family, family)
    folder = FOLDER / STEPS[step - 1] / name / deployment
    scripts = [folder / f"run_{size}.sh", folder / f"run_{size}_lora.sh"]
    return next((script for script in scripts if script.exists()), None)


def script_flags(script: Path, variables: Mapping[str, str]) -> list[str]:
    """The flags that a script passes to its program. Its variables are taken from `variables`, else from the
    environment, else from the script's defaults.
    """
    text = script.read_text()
    values = dict(re.findall(r"^(\w+)=\${\1:-(.*)}$", text, re.MULTILINE)) | os.environ | variables
    flags = text.partition("/main.py \\\n")[2].partition('"$@"')[0].replace("\\\n", "")
    return [Template(word).safe_substitute(values) for word in shlex.split(flags)]


if __name__ == "__main__":
    try:
        words = step_flags(sys.argv[1], find_row(*sys.argv[2:4]))
        print("\n".join(without(words, AUTO_FLAGS if "--auto" in sys.argv else ())))
    except ValueError as error:
        raise SystemExit(f"run.sh: {error}") from None
