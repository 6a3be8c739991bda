"""Run programs one after the other in one process group: what takes long is the imports, not a tiny run.

torchrun --nproc_per_node 2 run_many.py JOBS.json

JOBS.json is a list of {"step": 1, "argv": [...]}. A run that fails ends them all; the last
line says which it was.
"""

import contextlib
import importlib
import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

from program_runs import STEPS, run_here  # noqa: E402

from common.programs import startup  # noqa: E402
from common.ranks import distributed  # noqa: E402
from common.runs import run_logger  # noqa: E402


def main() -> None:
    """Run all jobs; print what each took."""
    for step in STEPS.values():
        importlib.import_module(f"{step}.main")
    startup.quiet_libraries()
    distributed.start()
    run_logger.draw_run = lambda *_: None  # a picture takes longer than a tiny run
    for job in json.loads(Path(sys.argv[1]).read_text()):
        if distributed.is_main():
            print("job", json.dumps(job), flush=True)
        started = time.monotonic()
        with open("/dev/null", "w") as nowhere, contextlib.redirect_stdout(nowhere):
            run_here(job["step"], job["argv"])
        if distributed.is_main():
            print(f"took {time.monotonic() - started:.2f} s", flush=True)
    distributed.stop()


if __name__ == "__main__":
    main()
