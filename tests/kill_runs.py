"""Kills short runs of all steps at random moments, gives the same command again, and compares the end with
a run that was never killed: weights, states, metrics, samples and exports, to the bit.

python -m tests.kill_runs --count 60 [--seed 0]

Half of the kills come at a random second, half inside a start, a checkpoint or an export; of two ranks one
is killed; every third run is killed twice. A line a run; the last line is JSON. The exit code is 1 where a
run was refused or differs.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE / "programs")]

from conftest import train_tiny_tokenizer  # noqa: E402
from forked_runs import ForkServer, fork_server  # noqa: E402
from test_resume import KILLED, assert_same_run, short_runs  # noqa: E402
from tiny_inputs import save_inputs  # noqa: E402

from common.ranks.failure_detector import OTHER_RANK_FAILED  # noqa: E402

INSIDE = {  # functions of a start, a checkpoint, an export, and how often they are called at most
    "common.runs.run:write_file": 3,
    "common.runs.run_logger:RunLogger.open": 1,
    "common.runs.run:Run._clear": 1,
    "common.runs.checkpoints:write_slices": 12,
    "common.runs.checkpoints:publish_folder": 4,
    "common.runs.checkpoints:remove_folder": 2,
    "common.runs.durable_files:sync": 40,
    "common.runs.export:_write_model": 1,
    "common.runs.export:publish_folder": 1,
    "common.models.loading:load_weights": 2,
    "common.ranks.distributed:start": 1,
}
AT_ONCE = (
    "exec:import os, signal, threading; threading.Timer({}, os.kill, (os.getpid(), signal.SIGKILL)).start()"
)


def draw_kill(generator: random.Random, seconds: float, ranks: int) -> dict[str, Any]:
    """A hook that kills a rank."""
    rank = generator.randrange(ranks)
    if generator.random() < 0.5:
        moment = round(generator.uniform(0, seconds), 3)
        return {"at": "common.programs.startup:read_flags", "do": AT_ONCE.format(moment), "rank": rank}
    at = generator.choice(list(INSIDE))
    return {"at": at, "call": generator.randint(1, INSIDE[at]), "do": "kill", "rank": rank}


def kill_and_resume(
    forks: ForkServer, run: tuple, whole: Path, seconds: float, folder: Path, generator: random.Random
) -> tuple[str, list[dict[str, Any]]]:
    """What became of a run: equal, or what was wrong; and its kills."""
    step, ranks, flags = run
    flags, kills = flags | {"output_dir": folder}, []
    for _ in range(1 + (generator.random() < 1 / 3)):
        kills.append(draw_kill(generator, seconds, ranks))
        done = forks.run(step, flags, ranks=ranks, hooks=kills[-1:])
        if not set(done.codes) <= {0, KILLED, OTHER_RANK_FAILED}:
            return f"left with {done.codes}: {done.text()[-300:]}", kills
    done = forks.run(step, flags, ranks=ranks)
    if done.codes != [0] * ranks:
        return f"refused with {done.codes}: {done.text()[-300:]}", kills
    try:
        assert_same_run(folder, whole)
    except AssertionError as error:
        line = traceback.extract_tb(error.__traceback__)[-1].line
        return f"differs: {line} {str(error)[:300]}", kills
    return "equal", kills


def main() -> int:
    """Kill, resume, compare; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    generator, ends, wrong = random.Random(args.seed), Counter(), []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tokenizer = train_tiny_tokenizer()
        runs = short_runs(save_inputs(folder / "tiny", tokenizer), tokenizer, folder)
        wholes: dict[str, float] = {}
        with fork_server(folder / "log") as forks:
            for number in range(args.count):
                name = generator.choice([name for name in runs if "fp16" not in name])  # it needs a GPU
                step, ranks, flags = runs[name]
                if name not in wholes:
                    done = forks.run(step, flags | {"output_dir": folder / name}, ranks=ranks)
                    assert done.codes == [0] * ranks, done.text()
                    wholes[name] = done.seconds
                killed = folder / f"killed-{number}"
                end, kills = kill_and_resume(
                    forks, runs[name], folder / name, wholes[name], killed, generator
                )
                shutil.rmtree(killed, ignore_errors=True)
                print(f"{number + 1:3} {name}: {end}; {json.dumps(kills)}", flush=True)
                ends[end.partition(":")[0].partition(" with")[0]] += 1
                wrong += [f"{name}: {end}"] if end != "equal" else []
    print(json.dumps({"count": args.count, "seed": args.seed, "ends": dict(ends), "wrong": wrong}))
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
