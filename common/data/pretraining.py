"""Plain text in blocks of equal length, for the pretraining loss that step 3 mixes in."""

from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from common.data.data_options import DEFAULT_CACHE
from common.data.data_report import DataReport
from common.data.dialogue import PlainTemplate
from common.data.example import BadRow, EmptyRow
from common.data.registry import RawSource, load_source
from common.data.token_cache import REPORT_NAME, TokenTable, TokenWriter, build_once, cache_key
from common.ranks.distributed import make_on_first_rank

BATCH_TEXTS = 1024  # texts tokenised together


def build_pretraining(
    source: str,
    config_name: str | None,
    block_tokens: int,
    tokenizer: PreTrainedTokenizerFast,
    *,
    cache_dir: str = "",
    max_bad_rows: int = 100,
) -> TokenTable:
    """Rows of {input_ids} of exactly `block_tokens`: the texts end to end, eos after each, the rest dropped.

    Every rank must call this. `source` is what `--data_path` takes; its rows need a `text` column.

    Raises:
        ValueError: unreadable source, too many rows without text, or less text than one block.
    """
    template = PlainTemplate(tokenizer)

    def make() -> Path:
        raw = _open(source, config_name)
        key = cache_key(
            kind="text", source=raw.digest(), template=template.digest(), block_tokens=block_tokens
        )
        folder = Path(cache_dir or DEFAULT_CACHE).expanduser() / f"text-{key}"
        build_once(folder, lambda path: _write(path, raw, template, block_tokens, max_bad_rows))
        return folder

    folder = make_on_first_rank(make)
    DataReport.from_json((folder / REPORT_NAME).read_text()).check_bad_rows(max_bad_rows)
    return TokenTable(folder / "train.arrow")


def _open(source: str, config_name: str | None) -> RawSource:
    try:
        raw = load_source(source)
    except ValueError as error:
        raise ValueError(str(error).replace("--data_path", "--unsupervised_dataset_name", 1)) from error
    raw.reader.hub_config = config_name
    return raw


def _write(
    folder: Path, raw: RawSource, template: PlainTemplate, block_tokens: int, max_bad_rows: int
) -> None:
    report = DataReport(kind="text")
    texts = report.read(raw.train, range(len(raw.train)), _text_of, max_bad_rows)
    left: list[int] = []
    with closing(TokenWriter(folder / "train.arrow", {"input_ids": "ids"})) as writer:
        while some := list(islice(texts, BATCH_TEXTS)):
            for row in template.tokenise_batch([template.text_segments(text) for _, text in some]):
                left += row.input_ids
            num_whole = len(left) // block_tokens * block_tokens
            writer.append(
                [{"input_ids": left[i : i + block_tokens]} for i in range(0, num_whole, block_tokens)]
            )
            del left[:num_whole]
        report.num_train = writer.num_rows
    if report.num_train == 0:
        raise ValueError(
            f"--unsupervised_dataset_name {raw.name}: its {report.num_raw_rows} rows give {len(left)} "
            f"tokens, less than one block of {block_tokens}; use more text"
        )
    report.num_tokens = report.num_train * block_tokens
    (folder / REPORT_NAME).write_text(report.to_json())


def _text_of(row: dict[str, Any]) -> str:
    text = row.get("text")
    if not isinstance(text, str):
        raise BadRow(f"no text in a 'text' column; found {', '.join(map(repr, row)) or 'nothing'}")
    if not text.strip():
        raise EmptyRow("'text' is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(str(error)) from error
    return text
