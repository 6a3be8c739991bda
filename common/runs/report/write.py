"""Reading runs and writing the report on them. No torch in here."""

from collections.abc import Sequence
from pathlib import Path

from common.runs.durable_files import write_file
from common.runs.report.page import build_page
from common.runs.report.run_files import NoRun, RunFiles, name_runs, read_run


def read_runs(folders: Sequence[Path]) -> tuple[list[RunFiles], list[str]]:
    """Return the runs that can be shown, and what is wrong with the other folders."""
    runs, problems = [], []
    for folder, name in zip(folders, name_runs(folders), strict=True):
        try:
            runs.append(read_run(folder, name))
        except NoRun as error:
            problems.append(str(error))
    return runs, problems


def write_report(folders: Sequence[Path], output: Path) -> tuple[list[RunFiles], list[str]]:
    """Write the report on these folders to `output`; return what `read_runs` does.

    Nothing is written when no folder has a run. Raises OSError when the file cannot be written.
    """
    runs, problems = read_runs(folders)
    if runs:
        write_file(output, build_page(runs, problems))
    return runs, problems
