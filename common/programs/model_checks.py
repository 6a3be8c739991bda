"""Checks of a model's configuration and tokenizer before its weights are loaded."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from common.data.tokenizer import num_token_ids
from common.flags.args import Problems
from common.models.family_probe import probe_family
from common.models.loading import length_limit
from common.models.lora import adapted_model_targets


def check_family(flag: str, config: Any, args: Any, problems: Problems, *, is_ranker: bool = False) -> None:
    """Add a problem if our passes do not compute what the family's own code does, or if a classifier is given
    in place of a language model.
    """
    if config is None:
        return
    is_classifier = any("Classification" in name for name in config.architectures or [])
    problems.add_if(is_classifier and not is_ranker, f"{flag} is a classifier; give a causal LM")
    auto_class = AutoModelForSequenceClassification if is_ranker else AutoModelForCausalLM
    refusal = probe_family(auto_class, config, trusts_code=args.trust_remote_code).refusal
    problems.add_if(refusal, f"{flag}: {refusal}")


def check_length(config: Any, num_tokens: int, flags: str, problems: Problems) -> None:
    """Add a problem if the flags ask for more tokens than the model supports."""
    if config is None:
        return
    limit, name = length_limit(config)
    text = f"{flags}: {num_tokens} tokens are more than the model's {limit} {name}; lower it"
    problems.add_if(num_tokens > limit, text)


def empty_model(config: Any, args: Any, auto_class: Any = AutoModelForCausalLM) -> Any:
    """Model of a configuration on the meta device, where weights take no memory."""
    with torch.device("meta"):
        return auto_class.from_config(config, trust_remote_code=args.trust_remote_code)


def check_lora(flag: str, config: Any, module_name: str, args: Any, problems: Problems) -> None:
    """Add a problem if `module_name` matches no matrix of the model."""
    if config is None or module_name == "auto":
        return
    with problems.catch():
        adapted_model_targets(empty_model(config, args), module_name, flag)


def check_new_tokens(
    flag: str, config: Any, tokenizer: Any, args: Any, problems: Problems, *, lora_flag: str = ""
) -> list[str]:
    """A note about tokens that the model has no embedding rows for; adds a problem if they would not be
    trained.

    `lora_flag` is the flag that gives the model adapters, empty without.
    """
    num_rows = config and getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if tokenizer is None or not num_rows or num_token_ids(tokenizer) <= num_rows:
        return []
    new = sorted((i, token) for token, i in tokenizer.get_vocab().items() if i >= num_rows)
    shown = ", ".join(token for _, token in new[:3])
    text = f"{flag} has {num_rows} rows, and its tokenizer {len(new)} tokens behind them ({shown})"
    learned = [i for i, _ in new if i != tokenizer.pad_token_id or i == tokenizer.eos_token_id]
    problems.add_if(
        lora_flag and learned and args.only_optimize_lora,
        f"{text}: adapters do not train embedding rows, so new rows would keep their initial values; give "
        f"--only_optimize_lora false, or leave {lora_flag} out",
    )
    return [f"{text}: their rows begin as the mean of the others"]
