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

from benchmarks.chat_rows import TINY
from benchmarks.measuring import build_parser, print_result
from benchmarks.ppo_models import save_models
from common.programs import startup
from common.runs.checkpoints import FOLDER, find_checkpoints
from common.runs.resume import FINISHED_FILE
from step3_ppo.arguments import PPOArguments
from step3_ppo.main import main as ppo_main
from tools.report.run_reader import read_rows

AIM = 0.03
LEFT_OVER = (".writing", ".deleting", ".superseded")


@dataclass
class Lives:
    """What a run went through until it ended."""

    kills: int = 0
    resumes: int = 0  # lives that began at a checkpoint
    steps_made_twice: int = 0
    seconds: list[float] = field(default_factory=list)


def write_prompts(path: Path, count: int, num_words: int) -> Path:
    """Write prompts of random words; return the file."""
    draw = random.Random(0)
    rows = [
        {"prompt": " ".join(f"t{draw.randrange(4, 8000)}" for _ in range(num_words))} for _ in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ppo_flags(models: dict[str, str], prompts: Path, folder: Path, **more: Any) -> list[str]:
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


def progress_of(output: Path) -> tuple[int, int | None]:
    """Return the last step of which there are numbers, and the steps of the newest checkpoint."""
    found, _ = find_checkpoints(output)
    saved = found[0].meta["numbers"]["progress"]["step"] if found else None
    return max((row["step"] for row in read_rows(output / "metrics.jsonl", [])), default=0), saved


def run_until_done(argv: list[str], folder: Path, num_kills: int, limit: float) -> Lives:
    """Let the run live, and kill it at random moments, until it has ended by itself.

    No more kills after `limit` seconds. Raises RuntimeError where the run fails.
    """
    draw, lives, output = random.Random(1), Lives(), folder / "output"
    deadline, longest = time.monotonic() + limit, 2.0
    while True:
        before = progress_of(output)
        lives.resumes += before[1] is not None
        started = time.monotonic()
        child = live(argv, folder / "log.txt")
        may_kill = lives.kills < num_kills and started < deadline
        end = started + draw.uniform(0, longest) if may_kill else float("inf")
        done, code = 0, 0
        while not done and time.monotonic() < end:
            done, code = os.waitpid(child, os.WNOHANG)
            time.sleep(0.005)
        lives.seconds.append(time.monotonic() - started)
        if code:
            raise RuntimeError(f"the run failed: {(folder / 'log.txt').read_text()[-3000:]}")
        if done:
            return lives
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        lives.kills += 1
        after = progress_of(output)
        if after != before:
            lives.steps_made_twice += max(after[0] - (after[1] or 0), 0)
        # A life must be long enough to get on, and short enough to be cut anywhere.
        longest = 2.0 if after[1] != before[1] else min(longest * 1.5, 60.0)


def load_end(output: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a run's last checkpoint and of its exports."""
    found, _ = find_checkpoints(output)
    files = [*found[0].folder.glob("*.safetensors"), *output.glob("export*/*.safetensors")]
    return {f"{f.parent.name}/{f.name}/{name}": t for f in files for name, t in load_file(f).items()}


def soak(folder: Path, num_kills: int, num_steps: int, limit: float) -> dict[str, Any]:
    """Return what the killed run went through, and whether it ended as the other one."""
    models = save_models(folder / "models", 0, **TINY)
    prompts = write_prompts(folder / "prompts.jsonl", 256, 8)
    sizes = {"per_device_generation_batch_size": 4, "per_device_training_batch_size": 2, "ppo_epochs": 2}
    sizes |= {"max_prompt_seq_len": 16, "max_answer_seq_len": 16, "max_train_steps": num_steps}
    runs, ends = {}, {}
    for name, kills in (("in_peace", 0), ("killed", num_kills)):
        home = folder / name
        home.mkdir()
        argv = ppo_flags(models, prompts, home, **sizes, save_interval=1)
        runs[name] = run_until_done(argv, home, kills, limit)
        ends[name] = load_end(home / "output")
    killed, lives = folder / "killed" / "output", runs["killed"]
    is_same = ends["in_peace"].keys() == ends["killed"].keys() and all(
        torch.equal(tensor, ends["killed"][name]) for name, tensor in ends["in_peace"].items()
    )
    return {
        "kills": lives.kills,
        "resumes": lives.resumes,
        "steps": num_steps,
        "steps_made_twice": lives.steps_made_twice,
        "is_equal": is_same and (killed / FINISHED_FILE).exists(),
        "files_left_over": sum(path.suffix in LEFT_OVER for path in killed.rglob("*")),
        "checkpoints": len(list((killed / FOLDER).iterdir())),
        "seconds_a_life": statistics.median(lives.seconds),
    }


def saving(folder: Path, num_steps: int, *, is_tiny: bool) -> dict[str, float]:
    """Return the seconds of a step and of a checkpoint of a run that saves at every step."""
    folder.mkdir()
    models = save_models(folder / "models", 0, **(TINY if is_tiny else {}))
    prompts = write_prompts(folder / "prompts.jsonl", 512, 8 if is_tiny else 64)
    sizes = {"per_device_generation_batch_size": 16, "per_device_training_batch_size": 16, "packed": "true"}
    sizes |= {"max_prompt_seq_len": 256, "max_answer_seq_len": 8 if is_tiny else 64}
    sizes |= {"max_train_steps": num_steps}
    run_until_done(ppo_flags(models, prompts, folder, **sizes, ppo_epochs=4, save_interval=1), folder, 0, 0)
    rows = read_rows(folder / "output" / "metrics.jsonl", [])[1:]  # the first step has saved nothing before
    found, _ = find_checkpoints(folder / "output")
    return {
        "step_seconds": statistics.median(row["perf/step_seconds"] for row in rows),
        "save_seconds": statistics.median(row["perf/save_seconds"] for row in rows),
        "checkpoint_mib": sum(told["bytes"] for told in found[0].meta["files"].values()) / 2**20,
    }


def main() -> None:
    """Measure, print tables and the JSON line."""
    parser = build_parser(__doc__, "--quick")
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
    facts = {"ours": share, "peer": AIM, "ratio": round(AIM / share, 2), "runs": 1, "save_interval": interval}
    print_result("faults", **facts, **cost, **found)


if __name__ == "__main__":
    main()
