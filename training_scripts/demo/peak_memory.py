"""Print the largest perf/peak_memory_gib of some metrics.jsonl files, times the number of ranks.

python -m training_scripts.demo.peak_memory NUM_RANKS output/demo/step?/metrics.jsonl
"""

import sys
from pathlib import Path

from common.runs.run_files import read_rows

if __name__ == "__main__":
    rows = [row for name in sys.argv[2:] for row in read_rows(Path(name), [])]
    print(int(sys.argv[1]) * max((row.get("perf/peak_memory_gib", 0.0) for row in rows), default=0.0))
