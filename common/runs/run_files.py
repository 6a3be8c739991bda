"""The names of the files in a run's folder; `tools.report` reads them."""

ARGS_FILE = "args.json"  # the flags, with what they resolve to
RUN_FILE = "run.json"  # the flags' defaults, and of each start: time, versions, device, data digest
FINISHED_FILE = "finished.json"  # nothing is left to do
METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"  # a line a step, an evaluation, a sample
ROLLOUTS = "rollouts.jsonl.gz"  # --save_rollouts: a gzip member a step, a line a response
CURVES, REPORT = "curves.png", "report.html"
