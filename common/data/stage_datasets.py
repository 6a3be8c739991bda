"""The data sets of the three steps, from sources to token rows on disk.

Rank 0 tokenises, the others wait, then all read the same files.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from common.data.data_options import DataOptions, is_held_out, share_indexes
from common.data.data_report import DataReport
from common.data.dialogue import Template
from common.data.example import Example, missing_for
from common.data.hub_data import is_offline
from common.data.registry import RawSource, load_source
from common.data.source_checks import NUM_READ
from common.data.stage_rows import KINDS, PAIR, PROMPT, Item, RowBuilder, build_row_fields, text_key
from common.data.token_cache import REPORT_NAME, TokenTable, TokenWriter, build_once, cache_key
from common.ranks import watchdog
from common.ranks.distributed import make_on_first_rank

__all__ = ["DataOptions", "StageData", "build_data", "preview_rows"]

TELL_SECONDS = 5.0
NUM_SHOWN = 400  # characters of a row that is shown
CHUNK_ROWS = 1024  # rows tokenised together and written as one chunk


@dataclass
class StageData:
    """Rows to train on, rows held out (in a fixed shuffled order), and what became of the raw rows."""

    train: TokenTable
    eval: TokenTable
    report: DataReport

    @property
    def key(self) -> str:
        """Return what changes with the sources and with all that decides the rows."""
        return Path(self.report.cache_folder).name


@dataclass
class _Share:
    """The part of a source that belongs to a step."""

    source: RawSource
    is_whole: bool  # --sft_only_data_path: all rows, whatever --data_split says

    def indexes(self, options: DataOptions) -> Sequence[int]:
        num_rows = len(self.source.train)
        if self.is_whole:
            return range(num_rows)
        return share_indexes(num_rows, options.data_split, options.stage, options.seed)


def build_data(options: DataOptions, template: Template) -> StageData:
    """The rows of step `options.stage`: see `stage_rows.RowBuilder`.

    Every rank must call this.

    Raises:
        ValueError: bad options, a source that cannot be read, too many bad rows, or no rows.
    """
    problems = options.problems()
    if problems:
        raise ValueError("\n".join(problems))
    was_built: list[bool] = []

    def make() -> Path:
        shares = [_Share(load_source(name, options.score_column), False) for name in options.data_path]
        if options.stage == 1:
            names = options.sft_only_data_path
            shares += [_Share(load_source(name, options.score_column), True) for name in names]
        name = f"{KINDS[options.stage].name}-{_key(shares, options, template)}"
        folder = options.cache_folder / name
        was_built.append(build_once(folder, lambda path: _write(path, shares, options, template)))
        return folder

    folder = make_on_first_rank(make)
    report = DataReport.from_json((folder / REPORT_NAME).read_text())
    report.cache_folder, report.from_cache = str(folder), not any(was_built)
    report.check_bad_rows(options.max_bad_rows)  # the cache may be a more tolerant run's
    return StageData(
        TokenTable(folder / "train.arrow"),
        TokenTable(folder / "eval.arrow", shuffle_seed=options.seed),
        report,
    )


def preview_rows(options: DataOptions, template: Template) -> list[str]:
    """Lines about the first rows of every source, for --dry_run: which are bad, and what one looks like.

    Raises:
        ValueError: see `build_data`.
    """
    kind = KINDS[options.stage]
    lines = []
    for name in [*options.data_path, *options.sft_only_data_path]:
        source = load_source(name, options.score_column, NUM_READ)
        if source.needs_hub and not is_offline():
            lines.append(f"{name} is on the hub: its rows are read at the start")
            continue
        report = DataReport(kind=kind.name)
        share = _Share(source, is_whole=True)  # the shares of the steps are drawn from all rows
        items = [item for item, _ in _items(share, options, report)]
        rows = RowBuilder(template, options, report).build(items)
        which = "first " if source.is_cut else ""
        lines.append(
            f"{name}: its {which}{report.num_raw_rows} rows give {len(rows)} of step {options.stage}, "
            f"{report.num_tokens} tokens"
        )
        lines += report.lines()[1:]
        for column, ids in rows[0].items() if rows else ():
            if column.endswith("ids"):
                text = template.tokenizer.decode(ids)
                if len(text) > NUM_SHOWN:
                    text = f"{text[: NUM_SHOWN // 2]} ... {text[-NUM_SHOWN // 2 :]}"
                lines.append(f"{rows[0]['row_id']}, {column}: {text!r}")
    return lines


def _key(shares: Sequence[_Share], options: DataOptions, template: Template) -> str:
    return cache_key(
        kind=KINDS[options.stage].name,
        sources=[(share.source.digest(), share.is_whole) for share in shares],
        template=template.digest(),
        stage=options.stage,
        data_split=options.data_split,
        eval_fraction=options.eval_fraction,
        seed=options.seed,
        max_tokens=options.max_tokens,
        loss_on=options.loss_on,
        max_pairs_per_prompt=options.max_pairs_per_prompt,
        score_column=options.score_column,
    )


def _write(folder: Path, shares: Sequence[_Share], options: DataOptions, template: Template) -> None:
    """Tokenise all shares into train.arrow, eval.arrow and report.json."""
    kind = KINDS[options.stage]
    report = DataReport(kind=kind.name)
    builder = RowBuilder(template, options, report)
    total = sum(len(share.source.train) for share in shares)
    with ExitStack() as stack:
        train, held_out = (
            stack.enter_context(closing(TokenWriter(folder / f"{name}.arrow", kind.columns)))
            for name in ("train", "eval")
        )
        for share in shares:
            num_before = train.num_rows
            items = _told(_items(share, options, report), report, total)
            while chunk := list(islice(items, CHUNK_ROWS)):
                for writer in (train, held_out):
                    some = [item for item, is_eval in chunk if is_eval == (writer is held_out)]
                    writer.append(builder.build(some))
                report.check_bad_rows(options.max_bad_rows)
            report.notes += [f"{share.source.name}: {note}" for note in share.source.adapter.notes]
            if train.num_rows == num_before:
                raise ValueError(_no_rows(share, options, report))
        report.num_train, report.num_eval = train.num_rows, held_out.num_rows
    (folder / REPORT_NAME).write_text(report.to_json())


def _told(items: Iterator[tuple[Item, bool]], report: DataReport, total: int) -> Iterator[tuple[Item, bool]]:
    """The items; every TELL_SECONDS it is said how many of `total` rows are done."""
    next_time = time.monotonic() + TELL_SECONDS
    for item in items:
        if time.monotonic() >= next_time:
            watchdog.tell(f"tokenised {report.num_raw_rows:,} of at most {total:,} rows")
            next_time = time.monotonic() + TELL_SECONDS
        yield item


def _items(share: _Share, options: DataOptions, report: DataReport) -> Iterator[tuple[Item, bool]]:
    """The usable Examples of a share, each with whether it is held out.

    A source's own evaluation part is used whole by every step: nobody trains on it.
    """
    source, kind = share.source, KINDS[options.stage]

    def read(row: dict) -> tuple[dict, list[Example]]:
        return row, _usable(source.adapter.to_examples(row), options.stage, report)

    parts = [(source.train, share.indexes(options))]
    if source.eval is not None:
        parts.append((source.eval, range(len(source.eval))))
    eval_fraction = options.eval_fraction if source.eval is None else 0.0
    for rows, indexes in parts:
        for index, (row, examples) in report.read(rows, indexes, read, options.max_bad_rows):
            row_id = rows.row_id(index)
            fields = build_row_fields(row) if "fields" in kind.columns else "{}"
            if kind is PAIR:
                examples = _at_most(
                    examples, options.max_pairs_per_prompt, f"{options.seed} {row_id}", report
                )
            for number, example in enumerate(examples):
                name = row_id if len(examples) == 1 else f"{row_id}#{number}"
                # Many rows may have one prompt: step 3 must not train on those that it judges by.
                content = example.prompt if kind is PROMPT else row
                is_eval = eval_fraction > 0 and is_held_out(content, eval_fraction, options.seed)
                yield Item(example, name, rows.location(index), fields), is_eval or rows is source.eval


def _usable(examples: Sequence[Example], stage: int, report: DataReport) -> list[Example]:
    """Examples of one raw row that a step can use, without repeats.

    Raises:
        BadRow: none of them has what the step needs.
    """
    problems = [missing_for(stage, example) for example in examples]
    if None not in problems:
        raise problems[0] or AssertionError("a row gave no example")
    kept: dict[object, Example] = {}
    for example, problem in zip(examples, problems, strict=True):
        if stage == 2 and problem is None and example.is_tie:
            report.num_ties += 1
        elif problem is None:
            kept.setdefault(text_key(stage, example), example)
    return list(kept.values())


def _at_most(examples: list[Example], max_pairs: int, key: str, report: DataReport) -> list[Example]:
    """At most `max_pairs` pairs of a prompt of one raw row, drawn by its name: the same ones in every run."""
    if len(examples) <= max_pairs:
        return examples
    # random.Random's `sample` may change between Pythons; an order by hash does not.
    order = sorted(range(len(examples)), key=lambda i: hashlib.sha256(f"{key} {i}".encode()).digest())
    by_prompt: dict[object, list[int]] = {}
    for i in order:
        by_prompt.setdefault(examples[i].prompt, []).append(i)
    kept = sorted(i for indexes in by_prompt.values() for i in indexes[:max_pairs])
    report.num_dropped_pairs += len(examples) - len(kept)
    return [examples[i] for i in kept]


def _no_rows(share: _Share, options: DataOptions, report: DataReport) -> str:
    """Why a source gave no row, and what to do."""
    flag = "--sft_only_data_path" if share.is_whole else "--data_path"
    cure = f"use more rows, an --eval_fraction under {options.eval_fraction}"
    if not share.is_whole:
        cure += f", or a --data_split that gives step {options.stage} more than {options.data_split} does"
    seen = "; ".join(report.lines()[1:])
    return (
        f"{flag} {share.source.name}: none of its {len(share.source.train)} rows is left to train step "
        f"{options.stage} on; {cure}" + (f" ({seen})" if seen else "")
    )
