"""`python -m tools.report RUN_DIR... [--output FILE]`: one HTML file about one or more runs.

For several runs the curves are overlaid, and a table has their last values and the flags in which they
differ. The file is self-contained, runs no script, and fetches nothing. Each program writes one at its end.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.flags.args import Problems, begin_tool, flag, parse_args
from common.flags.streams import run_tool
from common.runs.run_files import REPORT


@dataclass
class ReportArguments:
    """Runs and output file."""

    run_dir: list[str] = flag([], "--output_dir of runs; may be given first, without --run_dir")
    output: str = flag(
        "", f"page to write; empty: {REPORT} in the run's folder, or in this folder for several runs"
    )


if __name__ == "__main__":
    begin_tool(ReportArguments, __doc__, leading="run_dir")

from tools.report.diagnostics import find_diagnostics
from tools.report.page import write_report


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page and print its path; exit code 2 if there is nothing to show."""
    problems = Problems()
    args = parse_args(
        ReportArguments, argv, description=__doc__.splitlines()[0], problems=problems, leading="run_dir"
    )
    problems.add_if(not args.run_dir, "no run is named: give --output_dir of one or several")
    problems.exit_if_any()
    folders = [Path(name) for name in args.run_dir]
    output = Path(args.output or (folders[0] / REPORT if len(folders) == 1 else REPORT)).absolute()
    try:
        runs, messages = write_report(folders, output)
    except OSError as error:
        runs = []
        messages = [f"--output {output} cannot be written ({error.strerror}); choose another file"]
    if not runs:
        for message in messages:
            problems.add(message)
        problems.exit_if_any()
    for note in [*messages, *(f"{run.folder}: {note}" for run in runs for note in run.notes)]:
        print(f"note: {note}", file=sys.stderr)
    for run in runs:
        print(f"{run.name}: {run.state}")
        for diagnostic, finding in find_diagnostics(run.curves):
            if finding:
                print(f"  {diagnostic['title']}: {finding}")
    print(f"wrote {output}")


if __name__ == "__main__":
    run_tool(main)
