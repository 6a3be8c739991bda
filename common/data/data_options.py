"""Options that determine the rows of a step, besides tokenizer and template; the steps' disjoint splits;
checks of the data before a model is loaded.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from common.data import hub_data
from common.data.adapters.base import DEFAULT_SCORE_COLUMN, AnyForm
from common.data.adapters.row_forms import FORM_COLUMNS, accepted_forms
from common.data.example import BadRow, missing_for
from common.data.raw_rows import RawRows, canonical
from common.data.registry import NoTokenizer, RawSource, load_source
from common.flags.groups import DEFAULT_DATA

DEFAULT_CACHE = Path("~/.cache/triptych")
DEFAULT_SPLIT = "2,4,4"  # of the default data set alone
NUM_READ = 200  # rows of each file that are read before the start; all are counted when the data is built
NUM_PROBED = 20  # first rows searched for a usable one
KIND_NAMES = {1: "sft", 2: "pair", 3: "prompt"}


@dataclass(frozen=True)
class DataOptions:
    """Sources, shares, lengths and tolerances of one step's data."""

    data_path: list[str]
    stage: int  # 1 SFT, 2 reward model, 3 PPO
    data_split: str = ""  # all rows
    sft_only_data_path: list[str] = field(default_factory=list)  # all rows are used, by step 1 only
    max_tokens: int = 512  # limit of prompt and response; in step 3, of the prompt
    loss_on: str = "response"  # or "all"
    eval_fraction: float = 0.05  # held out from a source without evaluation rows
    seed: int = 1234
    max_bad_rows: int = 100
    max_pairs_per_prompt: int = 10
    score_column: str = DEFAULT_SCORE_COLUMN  # ranks prompt/response rows of the same prompt
    columns: str = ""  # row columns by form column: "prompt=question,response=answer"
    cache_dir: str = ""  # empty: ~/.cache/triptych
    num_stored_epochs: int = 16  # epochs of stored pairs, for prompts above --max_pairs_per_prompt
    is_unpaired: bool = False  # step 2 learns from single rated answers
    is_scored: bool = False  # step 2 trains a reward model, which sees the whole rendered text
    data_weights: list[float] = field(default_factory=list)  # one for each of data_path, or none

    @classmethod
    def of(cls, args: Any, stage: int, **changes: Any) -> Self:
        """Data options from a program's flags, with `changes`."""
        given = {name: getattr(args, name) for name in cls.__dataclass_fields__ if hasattr(args, name)}
        if given.get("data_split") == "" and args.data_path == DEFAULT_DATA:  # which the steps share
            given["data_split"] = DEFAULT_SPLIT
        given["max_tokens"] = args.max_prompt_seq_len if stage == 3 else args.max_seq_len
        return cls(**given | {"stage": stage, "cache_dir": args.data_output_path} | changes)

    def load_source(self, name: str, tokenizer: Any, max_rows: int | None = None) -> RawSource:
        """The source of an entry of --data_path. Raises ValueError: see `registry.load_source`."""
        parts = (part.partition("=") for part in self.columns.split(","))
        own_names = {name: own for name, _, own in parts if own and name in FORM_COLUMNS}
        return load_source(name, self.score_column, max_rows, own_names, seed=self.seed, tokenizer=tokenizer)

    @property
    def kind(self) -> str:
        """Name of the kind of rows that the step uses."""
        return "rated" if self.is_unpaired else KIND_NAMES[self.stage]

    @property
    def cache_folder(self) -> Path:
        """Folder of the token caches."""
        return Path(self.cache_dir or DEFAULT_CACHE).expanduser()

    def problems(self) -> list[str]:
        """Problems of sources and shares, each with flag, value and cure."""
        problems = []
        try:
            share = parse_data_split(self.data_split or "1,1,1")[self.stage - 1]
            if share == 0 and self.data_path and not (self.stage == 1 and self.sft_only_data_path):
                problems.append(
                    f"--data_split {self.data_split} leaves no rows for step {self.stage}; raise share "
                    f"{self.stage} above 0"
                )
        except ValueError as error:
            problems.append(str(error))
        if not self.data_path and not (self.stage == 1 and self.sft_only_data_path):
            problems.append("--data_path names no data; give at least one file, folder or data set")
        if self.data_weights and len(self.data_weights) != len(self.data_path):
            problems.append(
                f"--data_weights has {len(self.data_weights)} weights, but --data_path has "
                f"{len(self.data_path)} entries; give one for each, in their order"
            )
        if not self.score_column:
            problems.append("--score_column '' names no column; helpfulness is the default")
        for part in filter(None, self.columns.split(",")):
            name, _, own = part.partition("=")
            if not own or name not in FORM_COLUMNS:
                problems.append(
                    f"--columns {part}: give NAME=COLUMN, where COLUMN is in the rows and NAME is one of "
                    f"{', '.join(sorted(FORM_COLUMNS))}"
                )
        return problems


def parse_data_split(text: str) -> tuple[float, float, float]:
    """The three shares of `--data_split`, as fractions that sum to 1.

    Raises ValueError unless they are three numbers of at least 0, some above 0.
    """
    try:
        shares = [float(part) for part in str(text).split(",")]
    except ValueError:
        shares = []
    if len(shares) != 3 or not all(0 <= share < float("inf") for share in shares) or not sum(shares) > 0:
        raise ValueError(
            f"--data_split {text!r} must be three numbers of at least 0, the shares of steps 1, 2 and 3, "
            "such as 2,4,4"
        )
    first, second, third = (share / sum(shares) for share in shares)
    return first, second, third


def share_indexes(num_rows: int, data_split: str, stage: int, seed: int) -> Sequence[int]:
    """Row indexes of step `stage` (1, 2 or 3), ascending: all without a split, else a slice of one
    permutation, determined by `seed`.

    numpy guarantees RandomState's permutation, so the shares are the same in later versions.
    """
    if not data_split:
        return range(num_rows)
    shares = parse_data_split(data_split)
    start, end = (round(num_rows * sum(shares[:upto])) for upto in (stage - 1, stage))
    permutation = np.random.RandomState(seed % 2**32).permutation(num_rows)
    return sorted(permutation[start:end].tolist())


def is_held_out(row: object, eval_fraction: float, seed: int) -> bool:
    """Whether a row is held out for evaluation, by a hash of its content: equal rows are on the same side."""
    digest = hashlib.blake2b(canonical(row), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest) < eval_fraction * 2**64


def check_sources(options: DataOptions, tokenizer: Any = None) -> list[str]:
    """Problems of the options and of every source, each with its flag, value and cure, found before a model
    is loaded and without tokenising. Without a tokenizer, a class that needs one is not checked.

    Only the first rows of a file are read. A hub data set is only checked offline: it must then be in the
    library's cache.
    """
    problems = options.problems()
    last_form_problem = 0
    for path in dict.fromkeys([*options.data_path, *options.sft_only_data_path]):
        flag = "--data_path" if path in options.data_path else "--sft_only_data_path"
        try:
            source = options.load_source(path, tokenizer, NUM_READ)
            asks_hub = source.needs_hub and not hub_data.is_offline()
            source_problems = [] if asks_hub else _row_problems(source, options)
            if source_problems and isinstance(source.adapter, AnyForm):
                last_form_problem = len(problems) + len(source_problems)
        except NoTokenizer:
            continue
        except (ValueError, OSError) as error:
            source_problems = [str(error) if "--data_path" in str(error) else f"--data_path {path}: {error}"]
        problems += [problem.replace("--data_path", flag, 1) for problem in source_problems]
    if last_form_problem:  # stated once, even if several sources are wrong
        forms = accepted_forms(options.stage, is_unpaired=options.is_unpaired)
        problems[last_form_problem - 1] += (
            f"; step {options.stage} reads {forms}; other columns: see docs/data.md"
        )
    return problems


def _row_problems(source: RawSource, options: DataOptions) -> list[str]:
    """For each part without a usable row among its first ones, the problem of its first row."""
    problems = []
    for rows in (source.train, source.eval):
        num_probed = 0 if rows is None else min(NUM_PROBED, len(rows))
        reasons = [_reason_unusable(source, rows, index, options) for index in range(num_probed)]
        if reasons and None not in reasons:
            place = f"{rows.location(0)}: {reasons[0]}"
            problems.append(f"--data_path {source.name}: the first rows cannot be used. {place}")
    return problems


def _reason_unusable(source: RawSource, rows: RawRows, index: int, options: DataOptions) -> BadRow | None:
    """Why a row cannot be used in the step; None if it can."""
    try:
        examples = source.adapter.to_examples(rows[index])
        reasons = [missing_for(options.stage, e, is_unpaired=options.is_unpaired) for e in examples]
    except BadRow as error:
        return error
    return None if None in reasons else reasons[0]
