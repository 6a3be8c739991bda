"""Print the largest perf/peak_memory_gib of some metrics.jsonl files, times the number of ranks.

python training_scripts/demo/peak_memory.py NUM_RANKS output/demo/step?/metrics.jsonl
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    rows = [json.loads(line) for name in sys.argv[2:] for line in Path(name).read_text().splitlines()]
    print(int(sys.argv[1]) * max((row.get("perf/peak_memory_gib", 0.0) for row in rows), default=0.0))
