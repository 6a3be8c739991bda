"""The data sets of the three steps, from sources to token rows on disk; blocks of plain text for step 3.

Rank 0 tokenises, the others wait, then all read the same files.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from common.data.adapters.row_parts import check_encodable, filled
from common.data.data_options import DEFAULT_CACHE, NUM_READ, DataOptions, is_held_out, share_indexes
from common.data.dialogue import PlainTemplate, Template
from common.data.example import Example, Message, missing_for
from common.data.hub_data import is_offline
from common.data.registry import RawSource, load_source
from common.data.stage_rows import COLUMNS, Item, RowBuilder, build_row_fields
from common.data.token_cache import DataReport, TokenTable, TokenWriter, build_cached

NUM_SHOWN = 400  # characters shown of a row
# Without effect on the tokens.
NOT_IN_KEY = ("data_path", "data_weights", "sft_only_data_path", "max_bad_rows", "cache_dir")
CHUNK_ROWS = 1024  # rows tokenised together and written as one chunk


@dataclass
class StageData:
    """Training rows, held-out rows (in a fixed shuffled order), and the report on the raw rows."""

    train: TokenTable
    eval: TokenTable
    report: DataReport
    weights: Sequence[float] = ()  # --data_weights

    @property
    def sources(self) -> list[tuple[int, float]]:
        """(training rows, weight) of each source, for Groups; [] without weights."""
        rows = self.report.source_rows if self.weights else []
        return list(zip(rows, [*self.weights, *[1.0] * len(rows)], strict=False))

    @property
    def key(self) -> str:
        """Digest of the sources and of everything that determines the rows."""
        return Path(self.report.cache_folder).name


def build_data(options: DataOptions, template: Template) -> StageData:
    """The rows of step `options.stage`: see `stage_rows.RowBuilder`.

    Every rank must call this, with options without problems in `check_sources`. Raises ValueError for an
    unreadable source, too many bad rows, or no rows.
    """

    def plan() -> tuple[dict[str, Any], Any]:
        tokenizer = template.tokenizer
        sources = [options.load_source(name, tokenizer) for name in options.data_path]
        for name in options.sft_only_data_path if options.stage == 1 else []:
            sources.append(options.load_source(name, tokenizer))
            sources[-1].is_whole = True
        key = {name: value for name, value in vars(options).items() if name not in NOT_IN_KEY}
        key["sources"] = [(source.digest(), source.is_whole) for source in sources]
        key["template"] = template.digest()
        return key, lambda folder: _write(folder, sources, options, template)

    folder, report = build_cached(options.cache_folder, options.kind, plan, options.max_bad_rows)
    held_out = TokenTable(folder / "eval.arrow", shuffle_seed=options.seed)
    data = StageData(TokenTable(folder / "train.arrow"), held_out, report, options.data_weights)
    if options.data_weights and not report.source_rows:
        raise ValueError(
            f"--data_weights: the token cache {folder} was written by an earlier version and does not say "
            "how many rows each source has; delete that folder"
        )
    for name, (rows, weight) in zip(options.data_path, data.sources, strict=False):
        of_epoch = round(weight * rows)
        report.notes.append(
            f"an epoch has about {of_epoch} rows of {name}: {weight:g} x its {rows} training rows"
        )
    return data


def preview_rows(options: DataOptions, template: Template) -> list[str]:
    """Lines about the first rows of every source, for --dry_run: the bad ones, and one row as text.

    Raises ValueError: see `build_data`.
    """
    lines = []
    for name in [*options.data_path, *options.sft_only_data_path]:
        source = options.load_source(name, template.tokenizer, NUM_READ)
        if source.needs_hub and not is_offline():
            lines.append(f"{name} is on the hub: its rows are read when the run starts")
            continue
        source.is_whole = True  # only the first rows are read here, and shares are sampled from all rows
        report = DataReport(options.kind)
        items = [item for item, _ in _items(source, options, report, count())]
        rows = RowBuilder(template, options, report).build(items)
        report.notes += source.notes(options.stage)
        which = "first " if len(source.train) >= NUM_READ else ""
        lines.append(
            f"{name}: its {which}{report.num_raw_rows} rows give {len(rows)} of step {options.stage}, "
            f"{report.num_tokens} tokens"
        )
        if name in options.data_path and (options.data_split or options.data_weights):
            num_rows = len(options.load_source(name, template.tokenizer).train)
            lines += share_notes(name, num_rows, options)
        if name in options.data_path and options.data_weights:
            weight = options.data_weights[options.data_path.index(name)]
            num_rows = len(share_indexes(num_rows, options.data_split, options.stage, options.seed))
            lines.append(
                f"an epoch has about {round(weight * num_rows)} rows of {name}: {weight:g} x the {num_rows} "
                f"of step {options.stage}, less what is held out"
            )
        lines += report.lines()[1:]
        for column, ids in rows[0].items() if rows else ():
            if column.endswith("ids"):
                text = template.tokenizer.decode(ids)
                if len(text) > NUM_SHOWN:
                    text = f"{text[: NUM_SHOWN // 2]} ... {text[-NUM_SHOWN // 2 :]}"
                lines.append(f"{rows[0]['row_id']}, {column}: {text!r}")
    return lines


def share_notes(name: str, num_rows: int, options: DataOptions) -> list[str]:
    """How many of a source's rows the step uses; [] if it uses all."""
    num_used = len(share_indexes(num_rows, options.data_split, options.stage, options.seed))
    share = f"step {options.stage}'s share in --data_split {options.data_split}"
    return [f"{name}: {num_used:,} of its {num_rows:,} rows, {share}"] * (num_used < num_rows)


def _write(
    folder: Path, sources: Sequence[RawSource], options: DataOptions, template: Template
) -> DataReport:
    """Tokenise the step's shares of all sources into train.arrow and eval.arrow."""
    report = DataReport(options.kind)
    builder = RowBuilder(template, options, report)
    prompt_indexes = count()
    with ExitStack() as stack:
        train, held_out = (
            stack.enter_context(closing(TokenWriter(folder / f"{name}.arrow", COLUMNS[options.kind])))
            for name in ("train", "eval")
        )
        for source in sources:
            num_before = train.num_rows
            if not source.is_whole:
                report.notes += share_notes(source.name, len(source.train), options)
            items = _items(source, options, report, prompt_indexes)
            while chunk := list(islice(items, CHUNK_ROWS)):
                for writer in (train, held_out):
                    items_of_part = [item for item, is_eval in chunk if is_eval == (writer is held_out)]
                    writer.append(builder.build(items_of_part))
                report.check_bad_rows(options.max_bad_rows)
            report.notes += source.notes(options.stage)
            report.source_rows.append(train.num_rows - num_before)
            if train.num_rows == num_before:
                raise ValueError(_no_rows(source, options, report))
        report.num_train = train.num_rows
        report.num_eval = held_out.num_rows
    return report


def _items(
    source: RawSource, options: DataOptions, report: DataReport, prompt_indexes: Iterator[int]
) -> Iterator[tuple[Item, bool]]:
    """Usable Examples of the step's share of a source, each with whether it is held out.

    `prompt_indexes` number the prompts. Every step uses a source's own evaluation part as a whole, because
    none trains on it.
    """
    stage = options.stage

    def read(row: dict) -> tuple[dict, list[Example]]:
        return row, _usable(source.adapter.to_examples(row), options, report)

    indexes: Sequence[int] = range(len(source.train))
    if not source.is_whole:
        indexes = share_indexes(len(source.train), options.data_split, stage, options.seed)
    parts = [(source.train, indexes)]
    eval_fraction = options.eval_fraction
    if source.eval is not None:
        parts.append((source.eval, range(len(source.eval))))
        eval_fraction = 0.0
    for rows, indexes in parts:
        for index, (row, examples) in report.read(rows, indexes, read, options.max_bad_rows):
            row_id = rows.row_id(index, row)
            fields = build_row_fields(row) if stage == 3 else "{}"
            # Several rows may have the same prompt: step 3 must not train on its evaluation prompts.
            contents = [_split_key(e.prompt) for e in examples] if stage == 3 else [row] * len(examples)
            is_eval = [
                rows is source.eval
                or (eval_fraction > 0 and is_held_out(content, eval_fraction, options.seed))
                for content in contents
            ]
            if options.kind == "pair" and len(examples) > options.max_pairs_per_prompt:
                examples = _sample_pairs(
                    examples, options, f"{options.seed} {row_id}", report, for_once=is_eval[0]
                )
            index_of_prompt: dict[object, int] = defaultdict(lambda: next(prompt_indexes))
            for number, example in enumerate(examples):
                name = row_id if len(examples) == 1 else f"{row_id}#{number}"
                prompt_index = index_of_prompt[example.prompt if options.kind == "pair" else number]
                item = Item(example, name, rows.location(index), prompt_index, fields)
                yield item, is_eval[number]


def _split_key(prompt: Sequence[Message]) -> list[tuple[str, ...]]:
    """Roles, texts and extras of a prompt, which determine whether it is held out."""
    return [message[: 3 if message.extras else 2] for message in prompt]


def _usable(examples: Sequence[Example], options: DataOptions, report: DataReport) -> list[Example]:
    """Distinct Examples of one raw row that a step can use.

    Raises BadRow if there are none.
    """
    stage = options.stage
    problems = [missing_for(stage, example, is_unpaired=options.is_unpaired) for example in examples]
    if None not in problems:
        raise problems[0]
    usable = [example for example, problem in zip(examples, problems, strict=True) if problem is None]
    if stage == 2:
        report.num_ties += sum(example.is_tie for example in usable)
        usable = [example for example in usable if not example.is_tie]
    if options.is_unpaired:
        return unpair(usable)
    kept: dict[object, Example] = {}
    for example in usable:  # keep one of the Examples that give the same row of this step
        answers = {1: (example.chosen, example.text), 2: (example.chosen, example.rejected), 3: ()}[stage]
        kept.setdefault((example.prompt, example.tools, answers), example)
    return list(kept.values())


def unpair(examples: Sequence[Example]) -> list[Example]:
    """Each answer of pairs and rated Examples once, with a label: good if it wins more often than it loses,
    bad if it loses more often, left out if equal. A label counts as one pair.
    """
    wins: Counter[tuple[tuple[Message, ...], str | Message]] = Counter()
    for example in examples:
        for answer, won in ((example.chosen, 1), (example.rejected, -1)):
            if answer is not None:
                wins[example.prompt, answer] += won
    return [
        Example(
            prompt, **{"chosen" if won > 0 else "rejected": answer}, tools=examples[0].tools, is_rated=True
        )
        for (prompt, answer), won in wins.items()
        if won
    ]


def _sample_pairs(
    examples: list[Example], options: DataOptions, key: str, report: DataReport, *, for_once: bool
) -> list[Example]:
    """Pairs of each prompt of a raw row, sampled by a hash of its name: as many as an evaluation uses
    (`for_once`), or those from which epochs sample, see `GlobalBatches`. The others are counted.
    """
    max_pairs = options.max_pairs_per_prompt
    num_stored = max_pairs * (1 if for_once else options.num_stored_epochs)
    # random.Random.sample may change between Python versions; an order by hash does not.
    order = sorted(range(len(examples)), key=lambda i: hashlib.sha256(f"{key} {i}".encode()).digest())
    by_prompt: dict[object, list[int]] = {}
    for i in order:
        by_prompt.setdefault(examples[i].prompt, []).append(i)
    report.num_dropped_pairs += sum(max(len(pairs) - max_pairs, 0) for pairs in by_prompt.values())
    return [examples[i] for i in sorted(i for pairs in by_prompt.values() for i in pairs[:num_stored])]


def _no_rows(source: RawSource, options: DataOptions, report: DataReport) -> str:
    """Error message, with the cure, for a source without rows."""
    flag = "--sft_only_data_path" if source.is_whole else "--data_path"
    cure = f"use more rows, an --eval_fraction under {options.eval_fraction}"
    if options.data_split and not source.is_whole:
        cure += f", or a --data_split that gives step {options.stage} more than {options.data_split} does"
    details = "; ".join(report.lines()[1:])
    return (
        f"{flag} {source.name}: none of its {len(source.train)} rows is left to train step "
        f"{options.stage} on; {cure}" + (f" ({details})" if details else "")
    )


def build_pretraining(
    source: str,
    config_name: str | None,
    block_tokens: int,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int = 1234,
    cache_dir: str = "",
    max_bad_rows: int = 100,
) -> TokenTable:
    """Rows of {input_ids} of exactly `block_tokens`: the concatenated texts, with EOS after each; the rest is
    dropped.

    Every rank must call this. `source` is an entry of `--data_path`; its rows need a `text` column. Raises
    ValueError for an unreadable source, too many rows without text, or less text than one block.
    """
    template = PlainTemplate(tokenizer)

    def plan() -> tuple[dict[str, Any], Any]:
        try:
            raw = load_source(source, seed=seed, tokenizer=tokenizer)
        except ValueError as error:
            raise ValueError(str(error).replace("--data_path", "--unsupervised_dataset_name", 1)) from error
        raw.adapter.hub_config = config_name
        key = dict(source=raw.digest(), template=template.digest(), block_tokens=block_tokens)
        return key, lambda folder: _write_blocks(folder, raw, template, block_tokens, max_bad_rows)

    folder, _ = build_cached(Path(cache_dir or DEFAULT_CACHE).expanduser(), "text", plan, max_bad_rows)
    return TokenTable(folder / "train.arrow")


def _write_blocks(
    folder: Path, raw: RawSource, template: PlainTemplate, block_tokens: int, max_bad_rows: int
) -> DataReport:
    report = DataReport("text")
    texts = report.read(raw.train, range(len(raw.train)), _text_of, max_bad_rows)
    pending: list[int] = []
    with closing(TokenWriter(folder / "train.arrow", {"input_ids": "ids"})) as writer:
        while chunk := list(islice(texts, CHUNK_ROWS)):
            for row in template.tokenise_batch([template.text_segments(text) for _, text in chunk]):
                pending += row.input_ids
            num_whole = len(pending) // block_tokens * block_tokens
            writer.append(
                [{"input_ids": pending[i : i + block_tokens]} for i in range(0, num_whole, block_tokens)]
            )
            del pending[:num_whole]
        report.num_train = writer.num_rows
    if report.num_train == 0:
        raise ValueError(
            f"--unsupervised_dataset_name {raw.name}: its {report.num_raw_rows} rows give {len(pending)} "
            f"tokens, less than one block of {block_tokens}; use more text"
        )
    report.num_tokens = report.num_train * block_tokens
    return report


def _text_of(row: dict[str, Any]) -> str:
    text = filled("text", row.get("text"))
    check_encodable(text)
    return text
