#!/usr/bin/env python
"""A run of PPO that is killed again and again, and what saving costs.

python benchmarks/bench_faults.py [--quick] [--kills 50]

The same tiny run twice: once in peace, once killed by SIGKILL at random moments (while it loads, generates,
learns, saves, exports) and started again by the same command, until it ends. Then: kills, steps that were
made twice, whether the final weights, optimizer states and averages are bit-equal, files left over. Every
life is a fork of a process that has imported everything, so 50 of them take minutes.

The second table is the time of a checkpoint beside that of a step (4 layers, hidden 256, actor and critic
with AdamW's state, random models of bench_ppo_step.py), at the default --save_interval.

The last line is a JSON object; `ratio` is 3 % over the share of the time that saving takes: above 1 is good.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks.chat_rows import TINY, small_llama_config
from benchmarks.ppo_models import build_tokenizer, save_models
from common.programs import startup
from common.runs.checkpoints import FOLDER, find_checkpoints
from common.runs.resume import FINISHED_FILE
from common.runs.run_files import read_rows
from step3_ppo.arguments import PPOArguments
from step3_ppo.main import main as ppo_main

AIM = 0.03
LEFT_OVER = (".writing", ".deleting", ".superseded")


@dataclass
class Lives:
    """What a run went through until it ended."""

    kills: int = 0
    resumes: int = 0  # lives that began at a checkpoint
    steps_made_twice: int = 0
    seconds: list[float] = field(default_factory=list)


def tiny_models(folder: Path) -> dict[str, Path]:
    """Save random models of two layers, hidden 32; return their folders."""
    config = small_llama_config(**TINY)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "policy")
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(folder / "reward")
    for name in ("policy", "reward"):
        build_tokenizer().save_pretrained(folder / name)
    return {name: folder / name for name in ("policy", "reward")}


def write_prompts(path: Path, count: int, num_words: int) -> Path:
    """Write prompts of random words; return the file."""
    draw = random.Random(0)
    rows = (
        {"prompt": " ".join(f"t{draw.randrange(4, 8000)}" for _ in range(num_words))} for _ in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ppo_flags(models: dict[str, Any], prompts: Path, folder: Path, **more: Any) -> list[str]:
    """Return the command line of a run."""
    flags = {
        "actor_model_name_or_path": models["policy"],
        "critic_model_name_or_path": models["reward"],
        "data_path": prompts,
        "data_split": "0,0,1",
        "template": "plain",
        "data_output_path": folder / "cache",
        "output_dir": folder / "output",
        "enable_hybrid_engine": "true",
        "enable_ema": "true",
        "num_train_epochs": 1000,
        "num_warmup_steps": 0,
    }
    return [str(word) for name, value in (flags | more).items() for word in (f"--{name}", value)]


def live(argv: list[str], log: Path) -> int:
    """Start a life of the run as a fork; return its process id."""
    child = os.fork()
    if child:
        return child
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["step3_ppo/main.py", *argv]
    code = 1
    try:
        startup.run_program(ppo_main)
        code = 0
    except SystemExit as left:
        code = int(left.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(code)


def last_step(output: Path) -> int:
    """Return the last step of which there are numbers."""
    return max((row["step"] for row in read_rows(output / "metrics.jsonl", [])), default=0)


def saved_step(output: Path) -> int | None:
    """Return the steps of the newest checkpoint."""
    found, _ = find_checkpoints(output)
    return found[0].meta["numbers"]["progress"]["step"] if found else None


def run_until_done(argv: list[str], folder: Path, num_kills: int, limit: float, seed: int) -> Lives:
    """Let the run live, and kill it at random moments, until it has ended by itself."""
    draw, lives, output = random.Random(seed), Lives(), folder / "output"
    deadline, longest = time.monotonic() + limit, 2.0
    while True:
        began_at = saved_step(output)
        before = last_step(output), began_at
        lives.resumes += began_at is not None
        started = time.monotonic()
        child = live(argv, folder / "log.txt")
        may_kill = lives.kills < num_kills and started < deadline
        end = started + draw.uniform(0, longest) if may_kill else float("inf")
        status = None
        while status is None and time.monotonic() < end:
            done, code = os.waitpid(child, os.WNOHANG)
            status = code if done else time.sleep(0.005)
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            lives.kills += 1
            after = last_step(output), saved_step(output)
            if after != before:
                lives.steps_made_twice += max(after[0] - (after[1] or 0), 0)
            # A life must be long enough to get on, and short enough to be cut anywhere.
            longest = 2.0 if after[1] != before[1] else min(longest * 1.5, 60.0)
        lives.seconds.append(time.monotonic() - started)
        if status is not None:
            if os.waitstatus_to_exitcode(status):
                raise RuntimeError(f"the run failed: {(folder / 'log.txt').read_text()[-3000:]}")
            return lives


def compare(one: Path, other: Path) -> bool:
    """Return whether two runs ended with the same bits: last checkpoint and exports."""
    states = []
    for output in (one, other):
        found, _ = find_checkpoints(output)
        files = [*found[0].folder.glob("*.safetensors"), *output.glob("export*/*.safetensors")]
        states.append({f"{f.parent.name}/{f.name}": load_file(f) for f in files})
    first, second = states
    return first.keys() == second.keys() and all(
        first[f].keys() == second[f].keys() and all(torch.equal(t, second[f][n]) for n, t in first[f].items())
        for f in first
    )


def soak(folder: Path, num_kills: int, num_steps: int, limit: float) -> dict[str, Any]:
    """Return what the killed run went through, and whether it ended as the other one."""
    models = tiny_models(folder / "models")
    prompts = write_prompts(folder / "prompts.jsonl", 256, 8)
    sizes = {"per_device_generation_batch_size": 4, "per_device_training_batch_size": 2, "ppo_epochs": 2}
    sizes |= {"max_prompt_seq_len": 16, "max_answer_seq_len": 16, "max_train_steps": num_steps}
    runs = {}
    for name, kills, seed in (("in peace", 0, 0), ("killed", num_kills, 1)):
        home = folder / name.replace(" ", "_")
        home.mkdir()
        argv = ppo_flags(models, prompts, home, **sizes, save_interval=1)
        runs[name] = run_until_done(argv, home, kills, limit, seed)
    killed = folder / "killed" / "output"
    left = [p for p in killed.rglob("*") if p.suffix in LEFT_OVER]
    lives = runs["killed"]
    return {
        "kills": lives.kills,
        "resumes": lives.resumes,
        "steps": num_steps,
        "steps_made_twice": lives.steps_made_twice,
        "is_equal": compare(folder / "in_peace" / "output", killed) and (killed / FINISHED_FILE).exists(),
        "files_left_over": len(left),
        "checkpoints": len(list((killed / FOLDER).iterdir())),
        "seconds_a_life": statistics.median(lives.seconds),
    }


def saving(folder: Path, num_steps: int, *, is_tiny: bool) -> dict[str, float]:
    """Return the seconds of a step and of a checkpoint of a run that saves at every step."""
    folder.mkdir()
    models = tiny_models(folder) if is_tiny else save_models(folder, 0)
    prompts = write_prompts(folder / "prompts.jsonl", 512, 8 if is_tiny else 64)
    sizes = {"per_device_generation_batch_size": 16, "per_device_training_batch_size": 16, "packed": "true"}
    sizes |= {"max_prompt_seq_len": 256, "max_answer_seq_len": 8 if is_tiny else 64}
    sizes |= {"max_train_steps": num_steps}
    argv = ppo_flags(models, prompts, folder, **sizes, ppo_epochs=4, save_interval=1)
    run_until_done(argv, folder, 0, 0, 0)
    rows = read_rows(folder / "output" / "metrics.jsonl", [])[1:]  # the first step has saved nothing before
    found, _ = find_checkpoints(folder / "output")
    return {
        "step_seconds": statistics.median(row["perf/step_seconds"] for row in rows),
        "save_seconds": statistics.median(row["perf/save_seconds"] for row in rows),
        "checkpoint_mib": sum(told["bytes"] for told in found[0].meta["files"].values()) / 2**20,
    }


def main() -> None:
    """Measure, print tables and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, few kills, few steps")
    parser.add_argument("--kills", type=int, default=0, help="times the run is killed (50; 1 with --quick)")
    parser.add_argument("--minutes", type=float, default=15.0, help="no more kills after this")
    args = parser.parse_args()
    num_kills = args.kills or (1 if args.quick else 50)
    startup.quiet_libraries()
    torch.set_num_threads(1)  # a process that has a pool of threads must not fork
    with tempfile.TemporaryDirectory() as place:
        cost = saving(Path(place, "cost"), 2 if args.quick else 10, is_tiny=args.quick)
        found = soak(Path(place), num_kills, 2 if args.quick else 48, args.minutes * 60)
    for name, value in found.items():
        print(f"{name.replace('_', ' '):20} {value if not isinstance(value, float) else round(value, 2)}")
    interval = PPOArguments(actor_model_name_or_path="").save_interval
    share = cost["save_seconds"] / (interval * cost["step_seconds"])
    print(
        f"\na step {cost['step_seconds']:.2f} s, a checkpoint of {cost['checkpoint_mib']:.0f} MiB "
        f"{cost['save_seconds']:.2f} s: {share:.2%} of the time at --save_interval {interval}"
    )
    result = {"name": "faults", "device": "cpu", "threads": torch.get_num_threads()}
    result |= {
        "ours": share,
        "peer": AIM,
        "ratio": round(AIM / share, 2),
        "runs": 1,
        "save_interval": interval,
    }
    print(json.dumps(result | cost | found))


if __name__ == "__main__":
    main()
