"""Exports: folders that load with plain `from_pretrained`, written under a temporary name and then renamed.

An export carries no adapter and no vocabulary padding: LoRA is merged in fp32 (the trained weights are not
touched) and the padding rows are cut off.
"""

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from common.data.dialogue import num_token_ids
from common.models.loading import plain_model
from common.models.lora import TrainedWeight, trained_weights
from common.models.saved_adapters import ADAPTER_CONFIG, POOLING
from common.ranks import distributed, watchdog
from common.ranks.zero3 import gather_whole
from common.runs.durable_files import WRITING, SaveFailed, publish_folder, without_nan

METADATA_FILE = "triptych.json"
NEW_PAD_TOKEN = "<|pad|>"


def gather_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the plain transformers weights on rank 0's CPU (elsewhere {}), adapters merged.

    `model` is a transformers model or its PEFT wrapper, sharded or not; weights are gathered one at a time.
    Every rank must call this.
    """
    plain, state = plain_model(model), _gather(trained_weights(model))
    if distributed.is_main():
        buffers = dict(plain.named_buffers())
        persistent = plain.state_dict().keys() & buffers.keys()
        state |= {name: buffers[name].detach().to("cpu", copy=True) for name in persistent}
    return state


@torch.no_grad()
def _gather(weights: Mapping[str, TrainedWeight]) -> dict[str, torch.Tensor]:
    """Return weights on rank 0's CPU (elsewhere {}), adapters merged. Every rank must call this."""
    state = {}
    for name, weight in weights.items():
        with gather_whole(weight.tensors()):
            if distributed.is_main():
                state[name] = weight.merged().detach().to("cpu", copy=True)
    return state


@watchdog.phase("the export")
def save_export(
    folder: Path | str,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    *,
    metadata: dict[str, Any] | None = None,
    needs_own_pad: bool = False,
) -> None:
    """Write model and tokenizer to `folder`, replacing it only when the new one is whole.

    `model` is a transformers model, its PEFT wrapper, sharded or not. `metadata` goes to triptych.json
    (template, step, held-out numbers), which chat.py and step 3 read. `needs_own_pad`: PAD must be no other
    token, for transformers' classifiers look for the last token that is not PAD, and would not see an EOS
    that is PAD too. Existing ids do not change. Every rank must call this. Raises SaveFailed.
    """
    plain, state = plain_model(model), gather_state_dict(model)
    if needs_own_pad and tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.add_special_tokens({"pad_token": NEW_PAD_TOKEN})
    _replace(Path(folder), lambda new: _write_model(plain, state, tokenizer, new), tokenizer, metadata or {})


def _replace(
    folder: Path, fill: Callable[[Path], None], tokenizer: PreTrainedTokenizerFast, metadata: dict[str, Any]
) -> None:
    """Let the first rank fill a folder that takes the place of `folder` when it is whole.

    Every rank must call this. Raises SaveFailed, on every rank, where it cannot be written; what was there
    is left as it was.
    """
    temporary = folder.with_name(folder.name + WRITING)

    def write() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        fill(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / METADATA_FILE).write_text(json.dumps(without_nan(metadata), indent=2))
        publish_folder(temporary, folder)

    try:
        distributed.run_together(write if distributed.is_main() else lambda: None, SaveFailed)
    except Exception as error:  # safetensors, tokenizers and Python each have their own for a full disk
        if distributed.is_main():
            shutil.rmtree(temporary, ignore_errors=True)
        raise SaveFailed(
            f"{folder} could not be written ({type(error).__name__}: {error}); what was there before is as "
            "it was. Make room, then give the same command: it resumes from the last checkpoint"
        ) from error


def _write_model(
    plain: PreTrainedModel, state: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Write weights, as many rows of them as there are tokens, and configuration; `plain` is not changed."""
    num_rows = max(plain.num_exported_rows, num_token_ids(tokenizer))
    _set_num_rows(plain, state, num_rows)
    token_ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    exported = copy.copy(plain)  # the same modules, with configurations of its own
    exported.config = copy.deepcopy(plain.config)
    exported.config.update({"use_cache": True, **token_ids})
    if getattr(plain, "hf_quantizer", None):  # the weights are unpacked
        exported.hf_quantizer = None
        del exported.config.quantization_config
    exported.config.get_text_config().vocab_size = num_rows
    if getattr(plain, "generation_config", None) is not None:
        exported.generation_config = _savable_generation_config(plain.generation_config, token_ids)
    exported.save_pretrained(folder, state_dict=state)


def _set_num_rows(model: PreTrainedModel, state: dict[str, torch.Tensor], num_rows: int) -> None:
    """Cut or fill (with zeros) the rows of the embeddings and of the output head in place."""
    old_rows = model.config.get_text_config().vocab_size
    modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    owned = {id(p) for m in modules if m is not None for p in m.parameters(recurse=False)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in owned and name in state and state[name].shape[0] == old_rows:
            rows = state[name][:num_rows]
            missing = num_rows - rows.shape[0]
            state[name] = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]).contiguous()


def _savable_generation_config(generation_config: GenerationConfig, token_ids: dict[str, Any]) -> Any:
    """Return a copy with these token ids, and with nothing else where transformers would not save it.

    Some published ones name a temperature without do_sample, or a length penalty without beams; transformers
    saves those back only as they were.
    """
    changed = copy.deepcopy(generation_config)
    vars(changed).update(token_ids)
    try:
        changed.validate(strict=True)
        return changed
    except ValueError:
        return GenerationConfig(bos_token_id=generation_config.bos_token_id, **token_ids)


@watchdog.phase("the export of the adapter")
def save_adapter(
    folder: Path | str, model: nn.Module, tokenizer: PreTrainedTokenizerFast, metadata: dict[str, Any]
) -> None:
    """Write what was trained beside the base model, to load with PEFT or chat.py: the LoRA factors and the
    score head with its pooling, with tokenizer and metadata.

    Nothing is written when more was trained (--only_optimize_lora false): the export alone is the model then.
    Every rank must call this.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    others = [name for name in trained if ".lora_" not in name]
    if not hasattr(model, "peft_config") or any(not name.endswith("score.weight") for name in others):
        return
    pooling = getattr(plain_model(model).config, POOLING, "last")
    weights = _gather({name.replace(".default.", "."): TrainedWeight(p) for name, p in trained.items()})

    def fill(temporary: Path) -> None:
        config = copy.deepcopy(model.peft_config["default"])
        config.base_model_name_or_path = model.get_base_model().name_or_path
        config.task_type, config.inference_mode = "SEQ_CLS" if others else "CAUSAL_LM", True
        config.save_pretrained(temporary)
        if others and pooling != "last":  # PEFT has no field for it: it says that it does not know the name
            saved = json.loads((temporary / ADAPTER_CONFIG).read_text()) | {POOLING: pooling}
            (temporary / ADAPTER_CONFIG).write_text(json.dumps(saved, indent=2, sort_keys=True))
        save_file(weights, temporary / "adapter_model.safetensors", metadata={"format": "pt"})

    _replace(Path(folder), fill, tokenizer, metadata)


def read_metadata(folder: str) -> dict[str, Any]:
    """Return what triptych.json says of an export, {} for a model of another origin."""
    path = Path(folder) / METADATA_FILE
    return json.loads(path.read_text()) if path.exists() else {}
