"""Models in DeepSpeed-Chat's form: weights in pytorch_model.bin, a vocabulary without its special tokens, and
for a reward model or critic other names of weights.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from common.models.saved_adapters import SCORE_HEAD

WEIGHTS = "pytorch_model.bin"
BACKBONE = "rwtransformer."  # prefix of a reward model's backbone
HEAD = "v_head.weight"
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")


def is_saved_by_it(folder: str | Path) -> bool:
    """Whether a folder has the files of a model that DeepSpeed-Chat saved."""
    return all(Path(folder, name).is_file() for name in ("config.json", WEIGHTS))


def is_reward_model(folder: str | Path) -> bool:
    """Whether such a folder holds a reward model or critic."""
    file = Path(folder, WEIGHTS)
    try:
        return is_saved_by_it(folder) and HEAD in torch.load(file, mmap=True, weights_only=True)
    except Exception:  # a damaged file, which loading reports
        return False


def load_base_tokenizer(folder: str, load: Callable[[str], PreTrainedTokenizerFast]) -> Any:
    """The tokenizer of the base that such a folder names, because the folder's own has no special tokens;
    None if the folder has a whole tokenizer or was not saved by DeepSpeed-Chat.

    Raises ValueError if it cannot be loaded, or if the base's EOS is not that of the folder.
    """
    if not is_saved_by_it(folder) or any(Path(folder, name).exists() for name in TOKENIZERS):
        return None
    config = json.loads(Path(folder, "config.json").read_text())
    base = config.get("_name_or_path", "")
    why = "its config.json names no base"
    if base:
        try:
            tokenizer = load(base)
            if tokenizer.eos_token_id == config.get("eos_token_id"):
                return tokenizer
            why = f"EOS is {config.get('eos_token_id')} in it, {tokenizer.eos_token_id} in {base}"
        except ValueError as error:
            why = str(error)
    raise ValueError(
        f"{folder} has a vocabulary without its special tokens, as DeepSpeed-Chat saves it ({why}); copy "
        "tokenizer.json and tokenizer_config.json of its base into the folder"
    )


def read_model(folder: Path) -> PreTrainedModel:
    """The saved model; a reward model or critic as a sequence classifier of one label.

    Raises ValueError if the weights do not fit the configuration.
    """
    saved = torch.load(folder / WEIGHTS, map_location="cpu", weights_only=True)
    auto_class: Any = AutoModelForCausalLM
    if HEAD in saved:
        auto_class = AutoModelForSequenceClassification
    config = AutoConfig.from_pretrained(folder, num_labels=1, trust_remote_code=False)
    model = auto_class.from_config(config, dtype=next(iter(saved.values())).dtype)
    prefix = f"{model.base_model_prefix}."
    weights = {name.replace(BACKBONE, prefix, 1): weight for name, weight in saved.items()}
    if HEAD in weights:
        weights[SCORE_HEAD] = weights.pop(HEAD)
    try:
        model.resize_token_embeddings(len(weights[_embeddings(model)]))
        model.load_state_dict(weights)
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"{folder / WEIGHTS} does not fit its config.json: {error}") from error
    return model


def write_weights(export: Path) -> None:
    """Replace an export's weights by those of DeepSpeed-Chat's form.

    The embeddings of a critic get rows up to a multiple of 8: its loader would leave others random without a
    message.
    """
    files = sorted(export.glob("*.safetensors"))
    weights = {name: weight for file in files for name, weight in load_file(file).items()}
    config = AutoConfig.from_pretrained(export, trust_remote_code=False)
    if SCORE_HEAD in weights:
        with torch.device("meta"):
            model = getattr(transformers, config.architectures[0])(config)
        name = _embeddings(model)
        weights[name] = F.pad(weights[name], (0, 0, 0, -len(weights[name]) % 8))
        config.get_text_config().vocab_size = len(weights[name])
        head = weights.pop(SCORE_HEAD)
        prefix = f"{model.base_model_prefix}."
        weights = {BACKBONE + name.removeprefix(prefix): weight for name, weight in weights.items()}
        weights[HEAD] = head
        config.save_pretrained(export)
    torch.save(weights, export / WEIGHTS)
    for file in [*files, *export.glob("*.safetensors.index.json")]:
        file.unlink()


def _embeddings(model: PreTrainedModel) -> str:
    embeddings = model.get_input_embeddings().weight
    return next(name for name, weight in model.named_parameters() if weight is embeddings)
