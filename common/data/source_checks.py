"""Everything that can be known to be wrong with the data before a model is loaded. No torch in here."""

from collections.abc import Sequence

from common.data import hub_data
from common.data.adapters.local_files import AnyForm
from common.data.adapters.row_forms import accepted_forms
from common.data.data_options import DataOptions, parse_data_split, share_indexes
from common.data.example import BadRow, missing_for
from common.data.raw_rows import RawRows
from common.data.registry import RawSource, load_source

NUM_READ = 200  # rows of each file; the rest is counted when the data is built
NUM_PROBED = 20  # of them, looked at to find one that serves


def check_sources(paths: Sequence[str], stage: int, options: DataOptions) -> list[str]:
    """Problems of the options and of every source, each with its flag, value and cure; nothing is tokenised.

    `paths` are entries of --data_path or --sft_only_data_path. Of a file only the first rows are read. A hub
    data set is looked at only where the hub may not be asked: it must lie in the library's cache then.
    """
    problems = options.problems()
    for path in dict.fromkeys(paths):
        is_sft_only = path in options.sft_only_data_path and path not in options.data_path
        flag = "--sft_only_data_path" if is_sft_only else "--data_path"
        try:
            found = _problems(load_source(path, options.score_column, NUM_READ), stage, options)
        except (ValueError, OSError) as error:
            found = [str(error) if "--data_path" in str(error) else f"--data_path {path}: {error}"]
        problems += [problem.replace("--data_path", flag, 1) for problem in found]
    return problems


def _problems(source: RawSource, stage: int, options: DataOptions) -> list[str]:
    if source.needs_hub and not hub_data.is_offline():
        return []
    problems = []
    for rows in (source.train, source.eval):
        reason = None if rows is None else _why_none_serves(rows, source, stage)
        if reason is not None:
            problems.append(f"--data_path {source.name}: {reason}")
    if not (problems or source.is_cut) and source.name in options.data_path and not options.problems():
        num_rows = len(source.train)
        share = parse_data_split(options.data_split)[stage - 1]
        if not share_indexes(num_rows, options.data_split, stage, options.seed):
            problems.append(
                f"--data_path {source.name}: step {stage} gets no row: --data_split {options.data_split} "
                f"gives it {share:.0%} of {num_rows}; use more rows, or a larger share"
            )
    return problems


def _why_none_serves(rows: RawRows, source: RawSource, stage: int) -> str | None:
    """None as soon as one of the first rows serves the step, else what is wrong with the first."""
    first_reason = ""
    for index in range(min(NUM_PROBED, len(rows))):
        try:
            examples = source.adapter.to_examples(rows[index])
            reasons = [missing_for(stage, example) for example in examples]
            if None in reasons:
                return None
            reason = reasons[0]
        except BadRow as error:
            reason = error
        first_reason = first_reason or f"{rows.location(index)}: {reason}"
    forms = f"; step {stage} reads {accepted_forms(stage)}" if isinstance(source.adapter, AnyForm) else ""
    return f"the first rows cannot be used. {first_reason}{forms}"
