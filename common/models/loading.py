"""Causal language models: loading, dropout, vocabulary padding, and the forward pass that all steps share.

# B sequences, T positions, V vocabulary
"""

import inspect
import pickle
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig

from common.models.attention import (
    IS_PACKED,
    backbone_name,
    backbone_of,
    choose_attention,
    narrow_last_layer,
    takes_packed,
)
from common.models.four_bit import keep_packed, quantisation, release_file, whole_shape
from common.models.model_inputs import ModelInputs
from common.models.router_loss import balance_loss, router_coefficient
from common.models.saved_adapters import base_of, is_adapter
from common.models.transformers_internals import class_for
from common.ranks import distributed
from common.ranks.failures import first_line
from common.ranks.zero3 import gather_whole, is_sharded, local_shard

# Masks and tables that older releases of transformers saved with a model's weights.
_MASKS = re.compile(r"(attn|attention|self_attention)\.(masked_)?bias$|inv_freq$|position_ids$")
_UNPACKED = ("fp8", "mxfp4")  # formats that transformers dequantises while loading
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ModelOptions:
    """Options for loading a model; under ZeRO 3, with `ds_config`, weights are sharded as they load."""

    name_or_path: str
    dtype: str = "fp32"
    dropout: float | None = None
    gradient_checkpointing: bool = False
    pad_vocab_multiple: int = 1
    trust_remote_code: bool = False
    load_in_4bit: bool = False
    ds_config: dict[str, Any] | None = None

    @classmethod
    def of(cls, args: Any, role: Any, ds_config: dict[str, Any], *, dropout: float | None) -> Self:
        """Options from a program's flags.

        `role` has the flags of the model itself: `args.actor` or `args.critic` in step 3, else `args`. For a
        saved adapter they describe its base. A model without adapters is never loaded in 4 bits.
        """
        path = role.model_name_or_path
        return cls(
            base_of(path),
            dtype=distributed.dtype_name(args.dtype),
            dropout=dropout,
            gradient_checkpointing=role.gradient_checkpointing,
            pad_vocab_multiple=args.pad_vocab_multiple,
            trust_remote_code=args.trust_remote_code,
            load_in_4bit=args.load_in_4bit and (role.lora_dim > 0 or is_adapter(path)),
            ds_config=ds_config,
        )


def load_weights(auto_class: Any, name_or_path: str, **more: Any) -> PreTrainedModel:
    """`auto_class.from_pretrained(...)` with every weight read from the files; only a new head may be
    initialised.

    Pickled weights are read with weights_only: no code in them is run. Raises ValueError if the files are
    damaged, contain anything but tensors, or lack weights of config.json's model or have them in other
    shapes: transformers would continue with random ones.
    """
    try:
        model, info = auto_class.from_pretrained(
            name_or_path, output_loading_info=True, ignore_mismatched_sizes=True, weights_only=True, **more
        )
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{name_or_path}: its weights are a pickle with more than tensors, which could run code, "
            "so they were not loaded; give a model saved as safetensors"
        ) from error
    except Exception as error:  # OSError, SafetensorError, RuntimeError, KeyError, ...
        raise ValueError(
            f"{name_or_path}: the model cannot be loaded: {first_line(error)}; save or download it again"
        ) from error
    parameters = dict(model.named_parameters(remove_duplicate=False))
    name = type(model).__name__
    size = len(parameters)
    is_own_class = name in (getattr(model.config, "architectures", None) or [])
    needed = "" if is_own_class else f"{backbone_name(model)}."  # the head of another class is new
    absent = sorted(info["missing_keys"] & parameters.keys())
    body_names = [parameter for parameter in absent if parameter.startswith(needed)]
    mismatched = sorted(str(item[0]) for item in info["mismatched_keys"])
    is_part = type(more.get("config", model.config)) is not type(model.config)
    unmatched = _unmatched_weights(
        model, sorted(info["unexpected_keys"]), is_part=is_part, is_own_class=is_own_class
    )
    for names, text in (
        (body_names, f"its weights lack {{}} of {size} parameters of {name}"),
        (mismatched, f"its weights have the wrong sizes for {{}} of {size} parameters of {name}"),
        (unmatched, "its config.json has no counterpart for {} of its weights"),
    ):
        if names:
            raise ValueError(
                f"{name_or_path}: {text.format(len(names))}, such as {names[0]}; give a folder whose "
                "config.json and weights belong together"
            )
    if absent and auto_class is AutoModelForCausalLM:
        distributed.print_once(f"note: {name_or_path} has no output head: {absent[0]} is newly initialised")
    if is_part:
        distributed.print_once(
            f"note: {name_or_path}: only the language model of this {more['config'].model_type} is loaded, "
            "trained and exported, without its parts for images or sound"
        )
    return model


def _unmatched_weights(
    model: PreTrainedModel, unexpected: list[str], *, is_part: bool, is_own_class: bool
) -> list[str]:
    """Weights of a file that config.json's model should have but does not.

    The head of another class is not among them, nor are parts that a language model omits, such as
    vision.
    """
    own_names = {re.sub(r"\d+", "*", name) for name, _ in model.named_parameters(remove_duplicate=False)}
    body_names = {backbone_name(model), *dict(backbone_of(model).named_children())}
    return [
        name
        for name in unexpected
        if not _MASKS.search(name)
        and (
            re.sub(r"\d+", "*", name) in own_names
            or (not is_part and (is_own_class or name.partition(".")[0] in body_names))
        )
    ]


@torch.no_grad()
def _check_values(name_or_path: str, model: PreTrainedModel) -> None:
    """Raise ValueError if weights are NaN, or integers without a scale.

    Every rank must call this if weights are sharded.
    """
    wrong, has_shards = [], False
    for name, parameter in model.named_parameters():
        has_shards |= is_sharded(parameter)
        shard = (local_shard(parameter) if is_sharded(parameter) else parameter.data).flatten()
        part = shard[:4096]
        if not shard.sum(dtype=torch.float32).isfinite() and not shard.isfinite().all():
            wrong.append(f"{name} has NaN or infinite values; save or download it again")
        elif len(whole_shape(parameter)) > 1 and (part == part.round()).all() and len(part.unique()) > 8:
            why = "holds integers, but config.json has no quantization_config with their scales"
            wrong.append(f"{name} {why}; use the unquantised model")
    if has_shards:
        wrong = [text for rank_texts in distributed.gather_objects(wrong) for text in rank_texts]
    if wrong:
        raise ValueError(f"{name_or_path}: {wrong[0]}")


def probe_of(auto_class: Any, config: PreTrainedConfig, *, trusts_code: bool) -> Any:
    """Result of the comparison on a small replica (family_probe.py); its note is printed once.

    Raises ValueError if such a model cannot be used.
    """
    from common.models.family_probe import probe_family  # circular: it imports this file

    probe = probe_family(auto_class, config, trusts_code=trusts_code)
    if probe.refusal:
        raise ValueError(probe.refusal)
    if probe.note:
        distributed.print_once(f"note: {probe.note}")
    return probe


def _dropouts(owner: PreTrainedConfig | nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield every dropout of a configuration or a model, its parts included, as (owner, attribute name)."""
    # Attribute names differ between families: they are matched by their common parts.
    parts = list(owner.children()) if isinstance(owner, nn.Module) else []
    for name, value in vars(owner).items():
        if isinstance(value, PreTrainedConfig) and isinstance(owner, PreTrainedConfig):
            parts.append(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if "drop" in name or "jitter" in name or (name == "p" and isinstance(owner, _DropoutNd)):
                yield owner, name
    for part in parts:
        yield from _dropouts(part)


def set_dropout(owner: PreTrainedConfig | nn.Module, dropout: float) -> None:
    """Set every dropout of a configuration or a model, its parts included, to `dropout`.

    0 also turns off layer drop and router jitter, which make a training pass random too.
    """
    for part, name in list(_dropouts(owner)):
        if dropout and ("jitter" in name or "layerdrop" in name):
            continue
        # vars() bypasses the classes' type checks: MPT declares an integer, and cannot load any other type.
        kind = type(vars(part)[name])
        vars(part)[name] = kind(dropout) if float(dropout).is_integer() else dropout


def has_dropout(owner: PreTrainedConfig | nn.Module) -> bool:
    """Whether a configuration or a model, its parts included, has a nonzero dropout."""
    return any(vars(part)[name] for part, name in _dropouts(owner))


def load_pretrained(
    auto_class: Any, options: ModelOptions, num_tokens: int, **config_changes: Any
) -> PreTrainedModel:
    """The model of `auto_class`, its vocabulary grown to `num_tokens`; under ZeRO 3 this rank's shard only.

    Embeddings only grow: a model with more rows than its tokenizer has tokens keeps them. Rows past
    `num_tokens` must be masked out of every softmax (`num_valid_tokens`). Every rank must call this. Raises
    ValueError: see `load_weights`.
    """
    config = AutoConfig.from_pretrained(options.name_or_path, trust_remote_code=options.trust_remote_code)
    probe = probe_of(auto_class, config, trusts_code=options.trust_remote_code)
    config.use_cache = False
    if options.dropout is not None:
        set_dropout(config, options.dropout)
    config.update(config_changes)
    scheme = getattr(config, "quantization_config", None) or {}
    if scheme.get("quant_method") in _UNPACKED:
        scheme["dequantize"] = True
    zero = (options.ds_config or {}).get("zero_optimization", {})
    # transformers looks this object up while it loads and resizes; with it, layers are sharded as they load.
    sharding = HfDeepSpeedConfig(options.ds_config) if zero.get("stage") == 3 else None
    dtype = DTYPES[options.dtype]
    packed = {"quantization_config": quantisation(dtype)} if options.load_in_4bit else {}
    model = load_weights(
        auto_class,
        options.name_or_path,
        config=config,
        dtype=dtype,
        trust_remote_code=options.trust_remote_code,
        attn_implementation=choose_attention(class_for(auto_class, config), config, options.dtype),
        **packed,
    )
    model.packs_rows = probe.packs
    keep_packed(model)
    if packed:
        release_file(model)
    if not getattr(model, "hf_quantizer", None):
        _check_values(options.name_or_path, model)
    elif not options.load_in_4bit:
        raise ValueError(
            f"{options.name_or_path}: its weights are quantised ({scheme.get('quant_method')}), and cannot "
            "be trained; use the unquantised model"
        )
    _untie(options.name_or_path, model)
    _grow_vocabulary(model, num_tokens, options.pad_vocab_multiple)
    model.get_input_embeddings().padding_idx = None  # PAD may be a token of the rows, which must be trained
    keep_composite(model, config, auto_class)
    del sharding
    if options.dropout is not None:  # remote code may have dropout outside its configuration
        set_dropout(model, options.dropout)
    if options.gradient_checkpointing:  # non-reentrant: also works with frozen embeddings (LoRA)
        # Without dropout no RNG state needs to be saved; remote code may use random numbers elsewhere.
        is_random = options.trust_remote_code or has_dropout(model) or has_dropout(model.config)
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": is_random}
        )
    # A router loss needs all tokens in all layers.
    if not router_coefficient(model):
        narrow_last_layer(model)
    return model


def keep_composite(model: PreTrainedModel, config: PreTrainedConfig, auto_class: Any) -> None:
    """Make exports of a submodel carry the whole model's configuration if `auto_class` accepts no other."""
    if class_for(auto_class, model.config) is None and class_for(auto_class, config) is not None:
        model.composite_config = config


def _untie(name_or_path: str, model: PreTrainedModel) -> None:
    """Set tie_word_embeddings to false if the loaded head differs from the embeddings."""
    head = model.get_output_embeddings()
    text = model.config.get_text_config()
    is_apart = head is not None and head.weight is not model.get_input_embeddings().weight
    if is_apart and getattr(text, "tie_word_embeddings", False):
        text.tie_word_embeddings = model.config.tie_word_embeddings = False
        distributed.print_once(
            f"note: {name_or_path}: its config.json ties the output head to the embeddings, but they "
            "differ in its weights: they are trained and exported separately"
        )


def _grow_vocabulary(model: PreTrainedModel, num_tokens: int, multiple: int) -> None:
    num_rows = model.config.get_text_config().vocab_size
    model.num_exported_rows = max(num_rows, num_tokens)  # an export has no padding
    wanted = -(-model.num_exported_rows // multiple) * multiple
    if wanted == num_rows:
        return
    model.resize_token_embeddings(wanted, mean_resizing=False)
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    for weight in {id(e.weight): e.weight for e in embeddings if e}.values():  # once if tied
        # A new token starts as the mean of the old ones: its logits are typical, and equal on every rank.
        with torch.no_grad(), gather_whole([weight], to_modify=True):
            if weight.numel():
                weight[num_rows:] = weight[:num_rows].float().mean(dim=0).to(weight.dtype)


def init_weight(parameter: nn.Parameter, name: str, *, std: float, seed: int) -> None:
    """Fill a new weight from a normal distribution that depends on (seed, name) only: not on the ranks, the
    ZeRO stage or earlier random numbers. Every rank must call this.
    """
    with torch.no_grad(), gather_whole([parameter], to_modify=True):
        if parameter.numel():
            # torch's generator uses 32 bits of a seed, so both are hashed into 32 bits
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(noise.to(parameter.device, parameter.dtype))


def length_limit(config: PreTrainedConfig, default: int = sys.maxsize) -> tuple[int, str]:
    """Largest number of tokens per row, and the name of the limit; `default` without one."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    limits = {
        "positions": getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None),
        "tokens of its keep_window_size, beyond which padding counts": getattr(
            text, "keep_window_size", None
        ),
    }
    if rope.get("rope_type") == "longrope":  # a longer row changes the factors of its whole row or batch
        name = "original_max_position_embeddings, beyond which all rotary factors change"
        limits[name] = rope["original_max_position_embeddings"]
    return min(((limit, name) for name, limit in limits.items() if limit), default=(default, ""))


def load_causal_lm(options: ModelOptions, num_tokens: int) -> PreTrainedModel:
    """A causal LM with room for `num_tokens` (see `load_pretrained`). Every rank must call this."""
    return load_pretrained(AutoModelForCausalLM, options, num_tokens)


def plain_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper (or the model itself)."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def build_position_ids(attention_mask: torch.Tensor) -> torch.Tensor:
    """Positions (B, T) int64 that count the real tokens, for padding on either side."""
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def forward_accepts(model: nn.Module, name: str) -> bool:
    """Whether the transformers model's forward takes this argument (BLOOM's has no position_ids)."""
    return name in inspect.signature(plain_model(model).forward).parameters


def compute_hidden(model: PreTrainedModel, inputs: ModelInputs) -> torch.Tensor:
    """Last hidden states (slots, H) of a transformers model's backbone, row after row."""
    return run_backbone(model, inputs)[0].flatten(0, 1)


def run_with_router(owner: nn.Module, model: PreTrainedModel, inputs: ModelInputs) -> torch.Tensor:
    """Last hidden states (slots, H), as from `compute_hidden`.

    Sets `owner.router_loss`, for `add_router_loss`: the router loss of a training pass of a mixture of
    experts, else None.
    """
    is_balanced = owner.router_coefficient > 0 and owner.training and torch.is_grad_enabled()
    outputs = run_backbone(model, inputs, **({"output_router_logits": True} if is_balanced else {}))
    owner.router_loss = balance_loss(model.config, outputs.router_logits, inputs) if is_balanced else None
    return outputs[0].flatten(0, 1)


def run_backbone(model: PreTrainedModel, inputs: ModelInputs, **more: Any) -> Any:
    """Outputs of a transformers model's backbone, the last hidden states first."""
    backbone = backbone_of(model)
    arguments = inputs.model_arguments(with_packing=takes_packed(model))
    if not forward_accepts(backbone, "position_ids"):
        del arguments["position_ids"]
    token = IS_PACKED.set("packing" in arguments)
    try:
        return backbone(**arguments, **more)
    finally:
        IS_PACKED.reset(token)
