"""Started by test_hybrid_engine_ranks.py under torchrun: what a hybrid engine promises, case by case.

torchrun --nproc_per_node N hybrid_engine_worker.py FOLDERS.json RESULTS.jsonl [GROUP THAT IS LEFT OUT ...]

FOLDERS.json is {family: folder of a tiny model}. Rank 0 writes one line for each group of cases:
{"group": name, "error": traceback or "", "found": {check: complaint or "", or texts to compare},
"seconds": 1.5}.
"""

import faulthandler
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]

import hybrid_engine_checks as checks  # noqa: E402
from hybrid_engine_checks import Found  # noqa: E402
from tiny_configs import VARIANTS  # noqa: E402

from common.programs import startup  # noqa: E402
from common.ranks import distributed  # noqa: E402

SECONDS_PER_GROUP = 120  # a rank that waits for another one must not wait for gloo's half hour
# (ranks, stage, families, sizes): every family once on two ranks, a third of them with each stage
GREEDY = (
    (4, 3, ("llama", "gpt2", "falcon", "gemma2"), (1, 2, 4)),
    (4, 0, ("gpt2", *VARIANTS), (2, 4)),
    (2, 0, ("opt", "gpt2", "gptj", "bloom", "falcon_alibi", "qwen2"), (1, 2)),
    (2, 2, ("llama", "falcon", "mistral", "gemma", "qwen3"), (1, 2)),
    (2, 3, ("gpt_neox", "falcon_new", "mistral_window", "gemma2", "phi"), (1, 2)),
)
# Conv1D; grouped heads; those in one projection
LORA = ((2, 3, ("gpt2", "llama"), (1, 2)), (2, 0, ("falcon_new",), (2,)), (4, 3, ("llama",), (2,)))
SAMPLED = {1: ("llama", "gpt2"), 2: ("llama", "gpt2"), 4: ("llama",)}  # ranks -> families
BY_LAYER = ("llama", "bloom", "gemma2")
SLICES = {  # on four ranks: family, vocabulary, elements from which on ZeRO shards a weight, engine
    "llama": ("llama", 320, 0, {}),
    "gpt2, odd vocabulary": ("gpt2", 323, 0, {}),
    "gpt2, small weights whole": ("gpt2", 320, None, {}),
    "llama, bf16, offloaded": ("llama", 320, 99, {"dtype": "bf16", "offload": "all"}),
}


def list_groups(folders: dict[str, str]) -> Iterator[tuple[str, Callable[[], Found]]]:
    """Yield (name, check) of what is done with so many ranks."""
    world_size = distributed.world_size()
    for kind, rows, lora_dim in (("greedy", GREEDY, 0), ("lora", LORA, 2)):
        for num_ranks, stage, families, sizes in rows:
            for family in families if num_ranks == world_size else ():
                name = f"{kind} {family} {stage}"
                yield name, partial(checks.check_greedy, folders[family], stage, sizes, lora_dim)
    for family in SAMPLED[world_size]:
        sizes = tuple(size for size in (1, 2, 4) if size <= world_size)
        yield f"sampled {family}", partial(checks.check_sampled, folders[family], sizes)
    if world_size == 4:
        for family in BY_LAYER:
            yield f"by layer {family}", partial(checks.check_by_layer, folders[family])
        for case, (family, num_tokens, smallest, options) in SLICES.items():
            check = partial(checks.check_slices, folders[family], num_tokens, smallest, **options)
            yield f"slices {case}", check


def run_group(check: Callable[[], Found]) -> tuple[str, Found]:
    """Return (what was raised, what all ranks found): a complaint is that of the ranks that have it."""
    error, found = "", {}
    try:
        found = check()
    except Exception:
        error = f"rank {distributed.rank()}: {traceback.format_exc()}"
        print(error, file=sys.stderr, flush=True)  # the other ranks may wait in vain for what follows
    everyone = distributed.gather_objects((error, found))
    errors = "".join(error for error, _ in everyone)
    if errors or all(found == everyone[0][1] for _, found in everyone):
        return errors, found
    return "", {
        what: "; ".join(f"rank {rank}: {of[what]}" for rank, (_, of) in enumerate(everyone) if of[what])
        for what in found
    }


def main() -> None:
    """Do all that is to be done with so many ranks."""
    folders, left_out = json.loads(Path(sys.argv[1]).read_text()), sys.argv[3:]
    startup.quiet_libraries()
    distributed.start()
    gc.collect()
    gc.freeze()  # what the imports made stays: collections would take longer than the work
    with open(sys.argv[2] if distributed.is_main() else os.devnull, "w") as results:
        for name, check in list_groups(folders):
            if name in left_out:
                continue
            started = time.monotonic()
            faulthandler.dump_traceback_later(SECONDS_PER_GROUP, exit=True)
            error, found = run_group(check)
            gc.collect()  # engines are in cycles with their hooks
            line = {"group": name, "error": error, "found": found, "seconds": time.monotonic() - started}
            print(json.dumps(line), file=results, flush=True)
    faulthandler.cancel_dump_traceback_later()
    distributed.stop()


if __name__ == "__main__":
    main()
