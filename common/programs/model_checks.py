"""Configuration and tokenizer of a model, checked before its weights are loaded."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)
from transformers.pytorch_utils import Conv1D

from common.data.tokenizer import load_tokenizer, num_token_ids
from common.flags.args import Problems
from common.flags.problems import has_hub_form
from common.models.deepspeed_chat import is_reward_model, load_base_tokenizer
from common.models.family_probe import probe_family
from common.models.four_bit import PACKS_NO_CONV1D
from common.models.loading import length_limit
from common.models.lora import adapted_model_targets
from common.models.saved_adapters import base_of, is_adapter, tokenizer_of
from common.ranks.failures import first_line
from common.runs.export import read_metadata


def check_model(
    flag: str, name_or_path: str, args: Any, problems: Problems, *, takes_adapter: bool = False
) -> Any:
    """The model's configuration, or None after adding why the model cannot be loaded.

    For a saved adapter, in programs that support them, it is that of its base.
    """
    if not name_or_path:
        return None
    folder = Path(name_or_path)
    if is_reward_model(folder):
        problems.add(
            f"{flag} {folder} is a reward model in DeepSpeed-Chat's form: run python export.py {folder} "
            "--output NEW, then give NEW"
        )
        return None
    if closed := _closed_path(folder):
        problems.add(f"{flag} {closed} cannot be read by this user; its owner can run chmod -R a+rX {folder}")
        return None
    try:
        read_metadata(name_or_path)
    except ValueError as error:
        problems.add(f"{flag}: {error}; remove the file, or save the model again")
        return None
    if is_adapter(name_or_path):
        if not takes_adapter:
            problems.add(
                f"{flag} {name_or_path} is an adapter without its base model, which this program does not "
                "support; give the export/ folder of the run, where it is merged"
            )
            return None
        flag = f"{flag} {name_or_path}, an adapter of"
        with problems.catch():
            return check_model(flag, base_of(name_or_path), args, problems)
        return None
    if folder.is_dir() and not (folder / "config.json").exists():
        near = folder / "export"
        is_run = (near / "config.json").exists()
        cure = f"did you mean {near}?" if is_run else "give the folder that save_pretrained wrote"
        problems.add(f"{flag} {folder} has no config.json, so it is not a model; {cure}")
        return None
    try:
        return AutoConfig.from_pretrained(name_or_path, trust_remote_code=args.trust_remote_code)
    except Exception as error:  # OSError, ValueError, KeyError, ...
        is_absent = not has_hub_form(name_or_path) and not folder.is_dir()
        why = "there is no such folder" if is_absent else first_line(error)
        problems.add(f"{flag} {name_or_path} is neither a model folder nor an available hub model: {why}")
        return None


def _closed_path(folder: Path) -> Path | None:
    """The first file in a model's folder that this user cannot read, or the folder itself."""
    try:
        files = sorted(folder.iterdir()) if folder.is_dir() else []
    except PermissionError:
        return folder
    return next((file for file in files if not os.access(file, os.R_OK)), None)


def check_tokenizer(
    flag: str, name_or_path: str, args: Any, problems: Problems
) -> PreTrainedTokenizerFast | None:
    """The tokenizer with EOS and PAD set, or None after adding its problem."""
    if not name_or_path:
        return None
    load = partial(
        load_tokenizer,
        eot_token=args.eot_token or None,
        add_eot_token=args.add_eot_token,
        trust_remote_code=args.trust_remote_code,
        flag=flag,
    )
    with problems.catch():
        return load_base_tokenizer(name_or_path, load) or load(tokenizer_of(name_or_path))
    return None


def check_family(flag: str, config: Any, args: Any, problems: Problems, *, is_ranker: bool = False) -> None:
    """Add a problem if our forward passes differ from those of the family's own code, or if a classifier is
    given in place of a language model.
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


def check_lora(prefix: str, config: Any, role: Any, args: Any, problems: Problems) -> None:
    """Add the problems of new adapters. `role` has lora_dim and lora_module_name, flags after `prefix`."""
    if config is None:
        return
    width = getattr(config.get_text_config(), "hidden_size", role.lora_dim)
    problems.add_if(
        role.lora_dim > width,
        f"--{prefix}lora_dim {role.lora_dim} is above {width}, a side of every matrix of the model: such an "
        "adapter is larger than what it adapts; lower it",
    )
    if role.lora_module_name == "auto" and not args.load_in_4bit:
        return
    model = empty_model(config, args)
    has_conv1d = any(isinstance(module, Conv1D) for module in model.modules())
    problems.add_if(args.load_in_4bit and has_conv1d, PACKS_NO_CONV1D)
    with problems.catch():
        adapted_model_targets(model, role.lora_module_name, f"--{prefix}lora_module_name")


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
    text = f"{flag} has {num_rows} embedding rows, but its tokenizer has {len(new)} more tokens ({shown})"
    learned = [i for i, _ in new if i != tokenizer.pad_token_id or i == tokenizer.eos_token_id]
    problems.add_if(
        lora_flag and learned and args.only_optimize_lora,
        f"{text}: adapters do not train embedding rows, so new rows would keep their initial values; give "
        f"--only_optimize_lora false, or leave {lora_flag} out",
    )
    return [f"{text}: their rows are initialised with the mean of the others"]
