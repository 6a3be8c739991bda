"""Model card of an export: README.md as the Hugging Face hub reads it, from the files of the run."""

import contextlib
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedTokenizerFast

from common.flags.problems import has_hub_form
from common.models.saved_adapters import ADAPTER_CONFIG
from common.runs.durable_files import read_if_whole
from common.runs.run_files import ARGS_FILE, RUN_FILE

CARD_FILE = "README.md"
STAGES = {
    "sft": "Supervised fine-tuning",
    "reward": "Reward model",
    "dpo": "Direct preference optimization",
    "kto": "Kahneman-Tversky optimization",
    "ppo": "Reinforcement learning from a reward",
    "critic": "Critic of reinforcement learning",
}
SCORERS = ("reward", "critic")
EXAMPLE = [{"role": "user", "content": "A question"}, {"role": "assistant", "content": "A response"}]


def build_card(
    export: Path, run: Path, metadata: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> ModelCard | None:
    """Card of the model or adapter in `export`, with base, data, flags other than the defaults, held-out
    figures and their number of rows, form of a conversation, and versions.

    `run` is the folder of its run; None if that has no record. Of local paths, the card has the last two
    names; of addresses, only the scheme.
    """
    args = read_if_whole(run / ARGS_FILE)
    record = read_if_whole(run / RUN_FILE)
    if not (args and record.get("starts")):
        return None
    start = record["starts"][-1]
    defaults = record["defaults"]
    base = args.get("actor_model_name_or_path") or args["model_name_or_path"]
    step = metadata["step"]
    hub_names = [name for name in args["data_path"] if has_hub_form(name) and not Path(name).exists()]
    header = ModelCardData(
        base_model=base_on_hub(base),
        datasets=hub_names or None,
        library_name="peft" if (export / ADAPTER_CONFIG).exists() else "transformers",
        license=metadata.get("license"),
        pipeline_tag="text-classification" if step in SCORERS else "text-generation",
        tags=["triptych", step],
    )
    facts = {
        "trained by": f"Triptych, {metadata['num_steps']} steps",
        "base": shorten(base),
        "data": f"{shorten(args['data_path'])}, {start['data']['num_train']:,} rows",
        "versions": ", ".join(f"{name} {version}" for name, version in start["versions"].items()),
    }
    text = f"# {STAGES[step]}\n\n{_table(facts)}"
    figures = {"perplexity": metadata.get("eval_perplexity")} | (metadata.get("eval") or {})
    held_out = {name.removeprefix("eval/"): f"{x:.4g}" for name, x in figures.items() if x is not None}
    if held_out:
        text += f"\n## Held-out data, {metadata.get('eval_rows', '?')} rows\n\n{_table(held_out)}"
    if tokenizer.chat_template:
        example = tokenizer.apply_chat_template(EXAMPLE, tokenize=False)
        name = metadata.get("template", "chat")
        text += f"\n## Form of a conversation, template {name}\n\n```text\n{example}\n```\n"
    without_effect = {"output_dir", *record.get("may_change", ())}  # on the model
    given = {name for name in defaults.keys() - without_effect if args[name] not in (defaults[name], None)}
    lines = [f"--{name} {shorten(args[name])}" for name in sorted(given)]
    text += "\n## Flags other than the defaults\n\n```text\n" + "\n".join(lines) + "\n```\n"
    return ModelCard(f"---\n{header.to_yaml()}\n---\n\n{text}")


def header_facts(run: Path, metadata: dict[str, Any]) -> dict[str, str]:
    """Stage, step and revision of the code, for the headers of an export's safetensors files."""
    starts = read_if_whole(run / RUN_FILE).get("starts") or [{}]
    facts = {
        "stage": metadata.get("step"),
        "step": metadata.get("num_steps"),
        "revision": starts[-1].get("code"),
    }
    return {name: str(value) for name, value in facts.items() if value is not None}


def base_on_hub(name: str) -> str | None:
    """Hub name of a base model, read from its card if it is an export; None if it is unknown."""
    if not Path(name).exists():
        return name if has_hub_form(name) else None
    with contextlib.suppress(OSError, ValueError):
        return ModelCard.load(Path(name, CARD_FILE)).data.get("base_model")
    return None


def shorten(value: Any) -> str:
    """A flag's value with the last two names of absolute paths, and without what follows a scheme."""
    words = value if isinstance(value, list) else [value]
    without_address = (re.sub(r"(\w+://).*", r"\1...", str(word)) for word in words)
    return " ".join(re.sub(r"(?<![^:])/(?:[^/]+/)*(?=[^/]+/[^/]+$)", "", word) for word in without_address)


def _table(rows: dict[str, str]) -> str:
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows.items())
