"""The files that a run leaves directly in its --output_dir. PURE."""

ARGS_FILE = "args.json"  # the flags, with what they resolve to
RUN_FILE = "run.json"  # the flags' defaults, and of each start: time, versions, device, data digest
FINISHED_FILE = "finished.json"  # nothing is left to do
LOCK_FILE = "lock.json"  # the process that writes here, and how it ended
METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"  # a line a step, an evaluation, a sample
ROLLOUTS = "rollouts.jsonl.gz"  # --save_rollouts: a gzip member a step, a line a response
CURVES, REPORT = "curves.png", "report.html"
TRACKERS_FILE = "trackers.json"  # the runs in --trackers, and how far they are
