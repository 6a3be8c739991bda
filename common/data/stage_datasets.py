"""The data sets of the three steps, from sources to token rows on disk.

`build_sft`, `build_pairs` and `build_prompts` differ only in the rows they make. Every rank must call them:
rank 0 tokenises, the others wait, then all read the same files.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from common.data.data_options import DataOptions, is_held_out, share_indexes
from common.data.data_report import DataReport
from common.data.dialogue import Template
from common.data.example import BadRow, EmptyRow, Example, missing_for
from common.data.hub_data import is_offline
from common.data.raw_rows import RawRows
from common.data.registry import RawSource, load_source
from common.data.source_checks import NUM_READ
from common.data.stage_rows import PAIR, PROMPT, SFT, Item, RowKind, build_row_fields
from common.data.token_cache import REPORT_NAME, TokenTable, TokenWriter, build_once, cache_key
from common.ranks import watchdog
from common.ranks.distributed import make_on_first_rank

__all__ = ["DataOptions", "StageData", "build_pairs", "build_prompts", "build_sft"]

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


class ProgressTeller:
    """Says now and then how many of so many rows are done."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.next = what, total, time.monotonic() + TELL_SECONDS

    def __call__(self, count: int) -> None:
        """`count` rows are done; nothing is said when that was said a moment ago."""
        if time.monotonic() >= self.next:
            watchdog.tell(f"{self.what} {count:,} of at most {self.total:,} rows")
            self.next = time.monotonic() + TELL_SECONDS


@dataclass
class _Share:
    """The part of a source that belongs to this step."""

    source: RawSource
    is_whole: bool  # --sft_only_data_path: all rows, whatever --data_split says


def build_sft(options: DataOptions, tokenizer: PreTrainedTokenizerFast, template: Template) -> StageData:
    """Rows of {input_ids, loss_mask, row_id}. Every rank must call this.

    Raises:
        ValueError: bad options, a source that cannot be read, too many bad rows, or no rows.
    """
    return _build(SFT, options, template, partial(SFT.to_rows, loss_on=options.loss_on))


def build_pairs(options: DataOptions, tokenizer: PreTrainedTokenizerFast, template: Template) -> StageData:
    """Rows of {chosen_ids, rejected_ids, chosen_response_start, rejected_response_start, margin, row_id}.

    Every rank must call this.

    Raises:
        ValueError: see `build_sft`.
    """
    return _build(PAIR, options, template, PAIR.to_rows)


def build_prompts(options: DataOptions, tokenizer: PreTrainedTokenizerFast, template: Template) -> StageData:
    """Rows of {prompt_ids, row_id, prompt_text, fields}; the text is whole where the ids were truncated.

    `fields` is the JSON of the raw row's other columns, what a reward may compare with.
    Every rank must call this.

    Raises:
        ValueError: see `build_sft`.
    """
    return _build(PROMPT, options, template, PROMPT.to_rows)


def _build(kind: RowKind, options: DataOptions, template: Template, to_rows: partial) -> StageData:
    problems = options.problems()
    if problems:
        raise ValueError("\n".join(problems))
    was_built: list[bool] = []

    def make() -> Path:
        shares = [_Share(load_source(name, options.score_column), False) for name in options.data_path]
        if options.stage == 1:
            shares += [
                _Share(load_source(name, options.score_column), True) for name in options.sft_only_data_path
            ]
        folder = options.cache_folder / f"{kind.name}-{_key(kind, shares, options, template)}"
        was_built.append(
            build_once(folder, lambda path: _write(path, kind, shares, options, template, to_rows))
        )
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
        ValueError: see `build_sft`.
    """
    kind = {1: SFT, 2: PAIR, 3: PROMPT}[options.stage]
    more = {"loss_on": options.loss_on} if kind is SFT else {}
    lines = []
    for name in [*options.data_path, *options.sft_only_data_path]:
        source = load_source(name, options.score_column, NUM_READ)
        if source.needs_hub and not is_offline():
            lines.append(f"{name} is on the hub: its rows are read at the start")
            continue
        report = DataReport(kind=kind.name)
        share = _Share(source, is_whole=True)  # the shares of the steps are drawn from all rows
        items = [item for item, _ in _items(share, kind, options, report)]
        rows = kind.to_rows(items, template, report, max_tokens=options.max_tokens, **more)
        which = "first " if source.is_cut else ""
        lines.append(
            f"{name}: its {which}{report.num_raw_rows} rows give {len(rows)} of step {options.stage}, "
            f"{report.num_tokens} tokens"
        )
        lines += report.lines()[1:]
        for column, ids in rows[0].items() if rows else ():
            if column.endswith("ids"):
                text = template.tokenizer.decode(ids)
                short = (
                    text
                    if len(text) <= NUM_SHOWN
                    else f"{text[: NUM_SHOWN // 2]} ... {text[-NUM_SHOWN // 2 :]}"
                )
                lines.append(f"{rows[0]['row_id']}, {column}: {short!r}")
    return lines


def _key(kind: RowKind, shares: Sequence[_Share], options: DataOptions, template: Template) -> str:
    return cache_key(
        kind=kind.name,
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


def _write(
    folder: Path,
    kind: RowKind,
    shares: Sequence[_Share],
    options: DataOptions,
    template: Template,
    to_rows: partial,
) -> None:
    """Tokenise all shares into train.arrow, eval.arrow and report.json."""
    report = DataReport(kind=kind.name)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(TokenWriter(folder / f"{n}.arrow", kind.columns)) for n in ("train", "eval")
        ]
        tell = ProgressTeller("tokenised", sum(len(share.source.train) for share in shares))
        for share in shares:
            num_before = writers[0].num_rows
            waiting: tuple[list[Item], list[Item]] = ([], [])
            for item, is_eval in _items(share, kind, options, report):
                queue = waiting[is_eval]
                queue.append(item)
                tell(report.num_raw_rows)
                if len(queue) == CHUNK_ROWS:
                    writers[is_eval].append(to_rows(queue, template, report, max_tokens=options.max_tokens))
                    queue.clear()
                    report.check_bad_rows(options.max_bad_rows)
            for writer, queue in zip(writers, waiting, strict=True):
                writer.append(to_rows(queue, template, report, max_tokens=options.max_tokens))
            report.check_bad_rows(options.max_bad_rows)
            report.notes += [f"{share.source.name}: {note}" for note in share.source.adapter.notes]
            if writers[0].num_rows == num_before:
                raise ValueError(_no_rows(share, options, report))
        report.num_train, report.num_eval = (writer.num_rows for writer in writers)
    (folder / REPORT_NAME).write_text(report.to_json())


def _items(
    share: _Share, kind: RowKind, options: DataOptions, report: DataReport
) -> Iterator[tuple[Item, bool]]:
    """The usable Examples of a share, each with whether it is held out.

    A source's own evaluation part is used whole by every step: nobody trains on it.
    """
    source = share.source
    data_split = "1,0,0" if share.is_whole else options.data_split
    indexes = share_indexes(
        len(source.train), data_split, 1 if share.is_whole else options.stage, options.seed
    )
    eval_fraction = options.eval_fraction if source.eval is None else 0.0
    parts: list[tuple[RawRows, Sequence[int], bool]] = [(source.train, indexes, False)]
    if source.eval is not None:
        parts.append((source.eval, range(len(source.eval)), True))
    for rows, chosen_indexes, is_eval_part in parts:
        for index in chosen_indexes:
            report.num_raw_rows += 1
            try:
                row = rows[index]
                examples = _usable(source.adapter.to_examples(row), kind, report)
            except EmptyRow:
                report.num_empty += 1
                continue
            except BadRow as error:
                report.add_bad(rows.location(index), str(error))
                report.check_bad_rows(options.max_bad_rows)
                continue
            row_id = rows.row_id(index)
            fields = build_row_fields(row) if "fields" in kind.columns else "{}"
            examples = _at_most(
                examples, options.max_pairs_per_prompt, kind, report, f"{options.seed} {row_id}"
            )
            for number, example in enumerate(examples):
                name = row_id if len(examples) == 1 else f"{row_id}#{number}"
                # Many rows may have one prompt: step 3 must not train on those that it judges by.
                content = example.prompt if kind is PROMPT else row
                is_eval = eval_fraction > 0 and is_held_out(content, eval_fraction, options.seed)
                yield Item(example, name, rows.location(index), fields), is_eval_part or is_eval


def _usable(examples: Sequence[Example], kind: RowKind, report: DataReport) -> list[Example]:
    """Examples of one raw row that this step can use, without repeats.

    Raises:
        BadRow: none of them has what the step needs.
    """
    kept: dict[object, Example] = {}
    problems = [missing_for(kind.stage, example) for example in examples]
    if None not in problems:
        raise problems[0] or AssertionError("a row gave no example")
    for example, problem in zip(examples, problems, strict=True):
        if problem is not None:
            continue
        if kind is PAIR and example.is_tie:
            report.num_ties += 1
        else:
            kept.setdefault(kind.text_key(example), example)
    return list(kept.values())


def _at_most(
    examples: list[Example], max_pairs: int, kind: RowKind, report: DataReport, key: str
) -> list[Example]:
    """At most `max_pairs` pairs of a prompt of one raw row, drawn by its name: the same ones in every run."""
    if kind is not PAIR or len(examples) <= max_pairs:
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
    num_rows = len(share.source.train)
    cure = f"use more rows, an --eval_fraction under {options.eval_fraction}"
    if not share.is_whole:
        cure += f", or a --data_split that gives step {options.stage} more than {options.data_split} does"
    seen = "; ".join(report.lines()[1:])
    return (
        f"{flag} {share.source.name}: none of its {num_rows} rows is left to train step {options.stage} on; "
        f"{cure}" + (f" ({seen})" if seen else "")
    )
