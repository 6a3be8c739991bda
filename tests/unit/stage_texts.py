"""What the three steps make of rows, as decoded text; rows may stand for a data set of the hub."""

from pathlib import Path
from typing import Any

from common.data import hub_data
from common.data.dialogue import build_template
from common.data.raw_rows import FrozenRows
from common.data.stage_datasets import DataOptions, StageData, build_pairs, build_prompts, build_sft

BUILDERS = {1: build_sft, 2: build_pairs, 3: build_prompts}
SHARES = {1: "1,0,0", 2: "0,1,0", 3: "0,0,1"}
END = "<|endoftext|>"


def put_on_hub(monkeypatch: Any, name: str, rows: list[dict[str, Any]]) -> None:
    """Let `name`, and no other data set, be found on the hub."""

    def load_hub(asked: str, place: hub_data.HubPlace | None = None) -> tuple[FrozenRows, None]:
        assert asked == name
        return FrozenRows(rows, name, repr(rows)), None

    monkeypatch.setattr(hub_data, "load_hub", load_hub)


def build(source: str, step: int, tokenizer: Any, cache: Path, **changes: Any) -> StageData:
    """The step's rows of one source, all of them to train on."""
    given = {"data_split": SHARES[step], "eval_fraction": 0.0, "max_seq_len": 4096, "max_prompt_tokens": 4096}
    options = DataOptions([source], step, cache_dir=str(cache), **given | changes)
    return BUILDERS[step](options, tokenizer, build_template("human_assistant", tokenizer))


def texts(data: StageData, step: int, tokenizer: Any) -> list[Any]:
    """Step 1: (context, learnt); step 2: (prompt, chosen, rejected); step 3: the prompt."""

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids)

    result: list[Any] = []
    for i in range(len(data.train)):
        row = data.train[i]
        if step == 1:
            marked = list(zip(row["input_ids"], row["loss_mask"], strict=True))
            result.append(tuple(decode([id for id, m in marked if m == kind]) for kind in (False, True)))
        elif step == 2:
            start = row["chosen_response_start"]
            sides = (row["chosen_ids"][:start], row["chosen_ids"][start:], row["rejected_ids"][start:])
            result.append(tuple(map(decode, sides)))
        else:
            result.append(decode(row["prompt_ids"]))
    return result
