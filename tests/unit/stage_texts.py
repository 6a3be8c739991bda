"""What the three steps make of rows, as decoded text; rows may stand for a data set of the hub."""

import json
from pathlib import Path
from typing import Any

from common.data import hub_data
from common.data.chat_template import build_template
from common.data.raw_rows import RawRows
from common.data.stage_datasets import DataOptions, StageData, build_data

SHARES = {1: "1,0,0", 2: "0,1,0", 3: "0,0,1"}
END = "<|endoftext|>"


def put_on_hub(monkeypatch: Any, name: str, rows: list[dict[str, Any]]) -> None:
    """Let `name`, and no other data set, be found on the hub."""

    def load_hub(asked: str, config: str | None = None) -> tuple[RawRows, None]:
        assert asked == name
        return RawRows(rows, name, repr(rows)), None

    monkeypatch.setattr(hub_data, "load_hub", load_hub)


def write_rows(path: Path, rows: list[Any]) -> str:
    """A file of JSON lines, texts as they are; its path as --data_path takes it."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def make_options(source: str | list[str], step: int, cache: Path, **changes: Any) -> DataOptions:
    """All rows of the sources for one step, nothing held out or truncated."""
    given = {"data_split": SHARES[step], "eval_fraction": 0.0, "max_tokens": 4096}
    return DataOptions(
        [source] if isinstance(source, str) else source, step, cache_dir=str(cache), **given | changes
    )


def build(
    source: str | list[str],
    step: int,
    tokenizer: Any,
    cache: Path,
    template: str = "human_assistant",
    **changes: Any,
) -> StageData:
    """The step's rows of one source, all of them to train on."""
    options = make_options(source, step, cache / "cache", **changes)
    return build_data(options, build_template(template, tokenizer))


def texts(data: StageData, step: int, tokenizer: Any) -> list[Any]:
    """Step 1: (context, learnt); step 2: (prompt, chosen, rejected); step 3: the prompt."""
    result: list[Any] = []
    for i in range(len(data.train)):
        row = data.train[i]
        if step == 1:
            marked = list(zip(row["input_ids"], row["loss_mask"], strict=True))
            parts = [[token for token, m in marked if m == kind] for kind in (False, True)]
        elif step == 2:
            start = row["chosen_response_start"]
            parts = [row["chosen_ids"][:start], row["chosen_ids"][start:], row["rejected_ids"][start:]]
        else:
            parts = [row["prompt_ids"]]
        decoded = tuple(tokenizer.decode(ids) for ids in parts)
        result.append(decoded if step < 3 else decoded[0])
    return result
