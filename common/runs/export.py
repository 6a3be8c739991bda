"""Exports: folders that load with plain `from_pretrained`, written under a temporary name and then renamed.

An export carries no adapter and no vocabulary padding: LoRA is merged in fp32 (the trained weights are not
touched) and the padding rows are cut off.
"""

import contextlib
import copy
import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import cached_file

from common.data.chat_template import build_template
from common.data.tokenizer import num_token_ids
from common.models.loading import plain_model
from common.models.lora import TrainedWeight, trained_weights
from common.models.saved_adapters import ADAPTER_CONFIG, POOLING
from common.models.transformers_internals import save_as_class, weights_saved_by
from common.ranks import distributed, watchdog
from common.ranks.failures import cure_of_write, first_line, has_lost_ranks, kind_and_line
from common.ranks.passes import watched
from common.ranks.zero3 import gather_whole
from common.runs.durable_files import WRITING, SaveFailed, publish_folder, read_object, without_nan
from common.runs.model_card import CARD_FILE, build_card, header_facts
from common.runs.older_readers import add_older_names, add_older_tokenizer_names

METADATA_FILE = "triptych.json"
NEW_PAD_TOKEN = "<|pad|>"
# Of models that read images or sound; copied, because other programs do not load these models without.
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
# A pipeline returns the score itself if the problem is a regression, else its sigmoid.
SCORE_LABEL = {"id2label": {0: "reward"}, "label2id": {"reward": 0}, "problem_type": "regression"}


def gather_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights under plain transformers' names on rank 0's CPU (elsewhere {}), adapters merged.

    `model` is a transformers model or its PEFT wrapper, sharded or not; weights are gathered one at a time.
    Every rank must call this.
    """
    plain = plain_model(model)
    state = _gather(trained_weights(model))
    if distributed.is_main():
        buffers = dict(plain.named_buffers())
        persistent = plain.state_dict().keys() & buffers.keys()
        state |= {name: buffers[name].detach().to("cpu", copy=True) for name in persistent}
    return state


@torch.no_grad()
def _gather(weights: Mapping[str, TrainedWeight]) -> dict[str, torch.Tensor]:
    """Weights on rank 0's CPU (elsewhere {}), adapters merged. Every rank must call this."""
    state = {}
    for name, weight in watched(weights.items(), len(weights), "weights"):
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
    run: Path | None = None,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Write model, tokenizer and model card to `folder`, replacing it only once the new one is complete.

    `model` is a transformers model or its PEFT wrapper, sharded or not. `metadata` goes to triptych.json
    (template, step, held-out metrics), which chat.py and step 3 read; its template becomes the tokenizer's
    chat template. `needs_own_pad`: the model is a classifier, see `_prepare_tokenizer`. Existing token ids do
    not change. The card comes from the files of the run in `run`, by default the folder around `folder`.
    `finish` changes the written files before they replace the earlier ones.
    Every rank must call this. Raises SaveFailed.
    """
    run = run or Path(folder).parent
    plain = plain_model(model)
    state = gather_state_dict(model)
    metadata = metadata or {}
    tokenizer = _prepare_tokenizer(tokenizer, metadata, needs_own_pad=needs_own_pad)
    changes = SCORE_LABEL if needs_own_pad else {}

    def fill(new: Path) -> None:
        with weights_saved_by(partial(_save_weights, header_facts(run, metadata))):
            _write_model(plain, state, tokenizer, new, changes)
        if finish:
            finish(new)

    _replace(Path(folder), fill, tokenizer, metadata, run)


def _prepare_tokenizer(
    tokenizer: PreTrainedTokenizerFast,
    metadata: dict[str, Any],
    *,
    needs_own_pad: bool,
    pad_id: int | None = None,
    is_adapter: bool = False,
) -> PreTrainedTokenizerFast:
    """A copy with the chat template of the trained format, and with a PAD other than EOS if there is one.

    With `needs_own_pad`, PAD may be any special token that does not occur in conversations, and is added if
    there is none: transformers' classifiers score the last token that is not PAD, and would not see an EOS
    that is also PAD. For an adapter, whose embeddings are frozen, PAD may occur in conversations: torch does
    not train PAD's embedding. `pad_id` is the preferred id, if it is a special token.
    """
    exported = copy.deepcopy(tokenizer)
    if not needs_own_pad:
        exported.padding_side = "left"  # of a batch of prompts; transformers 4's pipelines read it
    if "template" in metadata:
        variables = metadata.get("chat_template_kwargs", "")
        exported.chat_template = build_template(metadata["template"], tokenizer, variables).chat_template
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    special.sort(key=lambda token: ("pad" not in token.lower(), token == tokenizer.bos_token, len(token)))
    unused = [token for token in special if token not in str(exported.chat_template)]
    pads = [
        getattr(tokenizer.added_tokens_decoder.get(pad_id), "content", None),
        tokenizer.pad_token,
        *(token for token in special if "pad" in token.lower()),
        tokenizer.unk_token,
        *([*unused, *(special if is_adapter else ()), NEW_PAD_TOKEN] if needs_own_pad else []),
    ]
    pad = next((token for token in pads if token not in (None, tokenizer.eos_token)), tokenizer.pad_token)
    if pad != tokenizer.pad_token:
        exported.add_special_tokens({"pad_token": pad})
    return exported


def _replace(
    folder: Path,
    fill: Callable[[Path], None],
    tokenizer: PreTrainedTokenizerFast,
    metadata: dict[str, Any],
    run: Path,
) -> None:
    """Let the first rank fill a folder that replaces `folder` once it is complete.

    Every rank must call this. Raises SaveFailed, on every rank, if it cannot be written; the previous folder
    is unchanged.
    """
    temporary = folder.with_name(folder.name + WRITING)

    def write() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        fill(temporary)
        _write_tokenizer(tokenizer, temporary)
        (temporary / METADATA_FILE).write_text(json.dumps(without_nan(metadata), indent=2))
        card = build_card(temporary, run, metadata, tokenizer)
        if card:
            card.save(temporary / CARD_FILE)
        publish_folder(temporary, folder)

    try:
        distributed.run_together(write if distributed.is_main() else lambda: None, SaveFailed)
    except Exception as error:  # safetensors, tokenizers and Python raise different errors on a full disk
        if distributed.is_main():
            shutil.rmtree(temporary, ignore_errors=True)
        if has_lost_ranks(error):
            raise
        raise SaveFailed(
            f"{folder} could not be written ({kind_and_line(error)}); its earlier content is unchanged. "
            f"{cure_of_write(error).capitalize()}, then rerun the same command: it resumes from the last "
            "checkpoint"
        ) from error


def _write_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer so that transformers 4 reads it as transformers 5 does."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)  # older readers need the template in the config
    base = {}
    with contextlib.suppress(OSError, ValueError):  # removed since it was loaded
        base = get_tokenizer_config(tokenizer.name_or_path)
    _edit(
        folder / "tokenizer_config.json", lambda content: add_older_tokenizer_names(content, base, tokenizer)
    )


def _edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _write_model(
    plain: PreTrainedModel,
    state: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    changes: dict[str, Any],
) -> None:
    """Write the weights, with as many embedding rows as there are tokens, and the configuration with these
    changes; `plain` is not changed.
    """
    num_rows = max(plain.num_exported_rows, num_token_ids(tokenizer))
    _set_num_rows(plain, state, num_rows)
    exported = copy.copy(plain)  # shares the modules, not the configurations
    save_as_class(exported)  # the base's files may pack weights in another way
    exported.config = copy.deepcopy(plain.config)
    exported.config.update({"use_cache": True} | changes)
    if getattr(plain, "hf_quantizer", None):  # weights are saved dequantized
        exported.hf_quantizer = None
        del exported.config.quantization_config
    exported.config.get_text_config().vocab_size = num_rows
    for config in (exported.config, exported.config.get_text_config()):
        config.update(_token_ids(tokenizer, config))
    if getattr(plain, "generation_config", None) is not None:
        exported.generation_config = _savable_generation_config(plain.generation_config, tokenizer)
    exported.save_pretrained(folder, state_dict=state)
    if composite := copy.deepcopy(getattr(plain, "composite_config", None)):
        composite.update({"text_config": exported.config, "architectures": exported.config.architectures})
        composite.save_pretrained(folder)
    _edit(folder / "config.json", add_older_names)
    if exported.config.get_text_config() is not exported.config:
        _copy_processor(plain.name_or_path, folder, tokenizer)


def _copy_processor(base: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Copy what a model's other inputs need, and write the chat template where a processor reads it; nothing
    if the base has been removed since it was loaded.
    """
    for name in PROCESSOR_FILES:
        with contextlib.suppress(OSError, ValueError):
            if file := cached_file(base, name, _raise_exceptions_for_missing_entries=False):
                shutil.copyfile(file, folder / name)
                if isinstance(tokenizer.chat_template, str):
                    (folder / "chat_template.jinja").write_text(tokenizer.chat_template)


def _save_weights(
    facts: dict[str, str], weights: dict[str, torch.Tensor], path: str | Path, metadata: Any = None
) -> None:
    """Write a safetensors file with these facts in its header, in alphabetic order: equal exports are equal
    files.
    """
    save_file(weights, path, {"format": "pt"} | (metadata or {}) | facts)
    with open(path, "r+b") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(num_bytes))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        file.seek(8)
        file.write(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(num_bytes))


def _token_ids(tokenizer: PreTrainedTokenizerFast, config: PreTrainedConfig) -> dict[str, Any]:
    """Token ids for the configuration.

    If PAD is EOS, the base's own PAD is kept, or there is none: a classifier initialised from this model
    would not see the EOS, and torch would not train PAD's embedding.
    """
    pad = tokenizer.pad_token_id
    eos = tokenizer.eos_token_id
    bos = tokenizer.bos_token_id
    if pad == eos:
        pad = getattr(config, "pad_token_id", None)
    has_stops = isinstance(getattr(config, "eos_token_id", None), list)
    return {
        "pad_token_id": None if pad == eos else pad,
        "eos_token_id": _stop_ids(tokenizer, config) if has_stops else eos,
        "bos_token_id": getattr(config, "bos_token_id", None) if bos is None else bos,
    }


def _stop_ids(
    tokenizer: PreTrainedTokenizerFast, base: PreTrainedConfig | GenerationConfig
) -> int | list[int]:
    """Tokens that end a response: the tokenizer's EOS first, then those of the base."""
    of_base = base.eos_token_id if isinstance(base.eos_token_id, list) else [base.eos_token_id]
    ids = list(dict.fromkeys(i for i in [tokenizer.eos_token_id, *of_base] if i is not None))
    return ids if len(ids) > 1 else ids[0]


def _set_num_rows(model: PreTrainedModel, state: dict[str, torch.Tensor], num_rows: int) -> None:
    """Truncate, or pad with zeros, the rows of the embeddings and the output head in place."""
    old_rows = model.config.get_text_config().vocab_size
    modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    owned = {id(p) for m in modules if m is not None for p in m.parameters(recurse=False)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in owned and name in state and state[name].shape[0] == old_rows:
            rows = state[name][:num_rows]
            missing = num_rows - rows.shape[0]
            state[name] = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]).contiguous()


def _savable_generation_config(
    generation_config: GenerationConfig, tokenizer: PreTrainedTokenizerFast
) -> GenerationConfig:
    """A copy with the tokenizer's ids and all stop tokens, without fields that transformers refuses to save.

    Some published ones have a temperature without do_sample, or a length penalty without beams; transformers
    saves those only unchanged.
    """
    values = generation_config.to_diff_dict()
    kept = GenerationConfig()
    dropped = []
    values |= {
        "eos_token_id": _stop_ids(tokenizer, generation_config),
        "pad_token_id": tokenizer.pad_token_id,
    }
    # The validity of the others depends on these two.
    for name in sorted(values, key=lambda name: (name not in ("do_sample", "num_beams"), name)):
        trial = copy.deepcopy(kept)
        setattr(trial, name, values[name])
        try:
            trial.validate(strict=True)
            kept = trial
        except ValueError:
            dropped.append(name)
    if dropped:
        distributed.print_once(
            f"note: generation_config.json of the export omits the base's {', '.join(dropped)}: they have "
            "no effect, and transformers would not save them"
        )
    return kept


def save_adapter(
    folder: Path | str,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    metadata: dict[str, Any],
    run: Path | None = None,
) -> None:
    """Write the trained weights for PEFT and chat.py: LoRA factors, score head with its pooling, tokenizer
    and metadata.

    Nothing is written if more than these was trained (--only_optimize_lora false): then the export alone is
    the model. Every rank must call this.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    others = [name for name in trained if ".lora_" not in name]
    if not hasattr(model, "peft_config") or any(not name.endswith("score.weight") for name in others):
        return
    run = run or Path(folder).parent
    plain = plain_model(model)
    pooling = getattr(plain.config, POOLING, "last")
    base = plain.name_or_path
    pad_id = getattr(plain.config.get_text_config(), "pad_token_id", None)
    tokenizer = _prepare_tokenizer(
        tokenizer, metadata, needs_own_pad=bool(others), pad_id=pad_id, is_adapter=True
    )
    if others and tokenizer.pad_token_id != pad_id:
        distributed.print_once(
            f"note: PEFT takes PAD from {base}, where it is {pad_id}: load {folder} with num_labels=1, and "
            f"set its config.pad_token_id to {tokenizer.pad_token_id}"
        )

    def fill(temporary: Path) -> None:
        config = copy.deepcopy(model.peft_config["default"])
        config.base_model_name_or_path = str(Path(base).resolve()) if Path(base).exists() else base
        config.task_type = "SEQ_CLS" if others else "CAUSAL_LM"
        config.inference_mode = True
        config.save_pretrained(temporary)
        if others and pooling != "last":  # not a field of PEFT, which warns of it
            _edit(temporary / ADAPTER_CONFIG, lambda content: content.update({POOLING: pooling}))
        facts = header_facts(run, metadata)
        _save_weights(facts, weights, temporary / "adapter_model.safetensors")

    with watchdog.phase("the export of the adapter"):
        weights = _gather({n.replace(".default.", "."): TrainedWeight(p) for n, p in trained.items()})
        _replace(Path(folder), fill, tokenizer, metadata, run)


def damage_of_export(folder: Path) -> str:
    """Why an export or adapter cannot be loaded, from its files' names and headers; "" if it can."""
    weights = sorted(folder.glob("*.safetensors"))
    try:
        index = read_object(folder / "model.safetensors.index.json", weight_map=dict)
        missing = {*index.get("weight_map", {}).values()} - {path.name for path in weights}
        configs = [read_object(folder / name) for name in ("config.json", ADAPTER_CONFIG)]
        if missing or not (weights and any(configs)):
            return f"{folder} lacks {', '.join(sorted(missing)) or 'weights or configuration'}"
        for path in weights:
            with safe_open(path, "pt"):
                pass
    except (ValueError, OSError, SafetensorError) as error:
        return f"{folder} is damaged ({first_line(error)})"
    return ""


def read_metadata(folder: str) -> dict[str, Any]:
    """Contents of triptych.json in an export; {} for a model without it.

    Raises ValueError, with the file's name, if this program did not write it.
    """
    return read_object(Path(folder) / METADATA_FILE, template=str, chat_template_kwargs=str, step=str)
