"""Everything that can be known to be wrong with the data before a model is loaded. No torch in here."""

from common.data import hub_data
from common.data.adapters.local_files import AnyForm
from common.data.adapters.row_forms import accepted_forms
from common.data.data_options import DataOptions, parse_data_split, share_indexes
from common.data.example import BadRow, missing_for
from common.data.raw_rows import RawRows
from common.data.registry import RawSource, load_source

NUM_READ = 200  # rows of each file; the rest is counted when the data is built
NUM_PROBED = 20  # of them, looked at to find one that serves


def check_sources(options: DataOptions) -> list[str]:
    """Problems of the options and of every source, each with its flag, value and cure; nothing is tokenised.

    Of a file only the first rows are read. A hub data set is looked at only where the hub may not be asked:
    it must lie in the library's cache then.
    """
    of_options = options.problems()
    problems = list(of_options)
    for path in dict.fromkeys([*options.data_path, *options.sft_only_data_path]):
        flag = "--data_path" if path in options.data_path else "--sft_only_data_path"
        try:
            source = load_source(path, options.score_column, NUM_READ)
            if source.needs_hub and not hub_data.is_offline():
                continue
            found = _row_problems(source, options.stage)
            if not (found or of_options or source.is_cut) and flag == "--data_path":
                found = _share_problems(source, options)
        except (ValueError, OSError) as error:
            found = [str(error) if "--data_path" in str(error) else f"--data_path {path}: {error}"]
        problems += [problem.replace("--data_path", flag, 1) for problem in found]
    return problems


def _share_problems(source: RawSource, options: DataOptions) -> list[str]:
    num_rows, stage = len(source.train), options.stage
    if share_indexes(num_rows, options.data_split, stage, options.seed):
        return []
    share = parse_data_split(options.data_split)[stage - 1]
    return [
        f"--data_path {source.name}: step {stage} gets no row: --data_split {options.data_split} gives it "
        f"{share:.0%} of {num_rows}; use more rows, or a larger share"
    ]


def _row_problems(source: RawSource, stage: int) -> list[str]:
    """For each part of which none of the first rows serves the step: what is wrong with the first of them."""
    forms = f"; step {stage} reads {accepted_forms(stage)}" if isinstance(source.adapter, AnyForm) else ""
    problems = []
    for rows in (source.train, source.eval):
        num_probed = 0 if rows is None else min(NUM_PROBED, len(rows))
        reasons = [_why_not(rows, index, source, stage) for index in range(num_probed)]
        if reasons and None not in reasons:
            problems.append(f"--data_path {source.name}: the first rows cannot be used. {reasons[0]}{forms}")
    return problems


def _why_not(rows: RawRows, index: int, source: RawSource, stage: int) -> str | None:
    """Why a row does not serve the step; None when it does."""
    try:
        reasons = [missing_for(stage, example) for example in source.adapter.to_examples(rows[index])]
        if None in reasons:
            return None
        reason = reasons[0]
    except BadRow as error:
        reason = error
    return f"{rows.location(index)}: {reason}"
