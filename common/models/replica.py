"""Small random models of another model's class and configuration, for probes in milliseconds.

A replica has a layer of each kind, at least two, and is as narrow as its configuration allows.
"""

import copy
import re
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from common.models.transformers_internals import keep_layers
from common.ranks import distributed

MAX_PARAMETERS = 2**21  # larger configurations are narrowed
_NUM_HEADS = 2
_NUM_TOKENS = 96
_LAYERS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "vision_layers"}
_LAYERS |= {f"{side}_layers" for side in ("encoder", "decoder", "num_encoder", "num_decoder")}
# Layers before the first one with experts, or with scaled weights (RWKV).
_LEADING_LAYERS = {"first_k_dense_replace", "num_dense_layers", "rescale_every"}
# Upper limits in a narrow configuration, by a pattern of their names; the first match is used.
_UPPER_LIMITS = {
    r"vocab_size": _NUM_TOKENS,
    r"per_tok|^(moe_)?top_?k|moe_k$": 2,
    r"expert_(ffn|dim)|intermediate|ffn|inner|mlp_dim": 64,
    r"group$": 2,
    r"experts$|expert_num$": 4,
    r"n_groups$": 1,
    r"max_position_embeddings|n_positions": 512,
}
# Attention windows, small enough for short rows to exceed; router noise, large enough to show.
_WINDOW = re.compile(r"(sliding|attention)_(window|chunk)(_size)?$")
_MAX_WINDOW, _NOISE = 4, 0.5
_MEASURED: dict[Any, Any] = {}
_REPLICAS: list[PreTrainedModel] = []  # replicas of the running measurement


def measure_once(measure: Callable[..., Any], config: PreTrainedConfig, *more: Any) -> Any:
    """The result of `measure(config, *more)` for a copy of the configuration, cached in this process."""
    key = measure, type(config), config.to_json_string(use_diff=False), more
    if key not in _MEASURED:
        # The caller may have disabled gradients, which the probe needs.
        with distributed.on_cpu(), torch.inference_mode(False), torch.enable_grad():
            _MEASURED[key] = measure(copy.deepcopy(config), *more)
        for parameter in chain.from_iterable(model.parameters() for model in _REPLICAS):
            parameter.data = parameter.data.new_empty(0)  # hooks keep it until garbage collection
            parameter.grad = None
        _REPLICAS.clear()
    return _MEASURED[key]


def build_replica(auto_class: Any, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """A random model in fp32 on the CPU, in eval mode; every weight affects its outputs.

    `options` go to `auto_class.from_config`. Leaves the random state unchanged. Raises whatever the family's
    code raises if it cannot be shrunk.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for change in (_shorten, _narrow, None):
            if change:
                change(config)
            with torch.device("meta"):
                model = auto_class.from_config(copy.deepcopy(config), **options)
            if sum(parameter.numel() for parameter in model.parameters()) <= MAX_PARAMETERS:
                break
            assert change or model.num_parameters() < 8 * MAX_PARAMETERS, "it cannot be shrunk"
        with torch.device("cpu"):
            model = auto_class.from_config(config, dtype=torch.float32, **options).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    _REPLICAS.append(model)
    return model


def _shorten(config: PreTrainedConfig) -> None:
    """Keep one layer of each kind, at least two, in a configuration and its parts (vision, text)."""
    for part in _parts(config):
        numbers = vars(part)
        numbers |= {name: min(numbers[name] or 0, 1) for name in _LEADING_LAYERS & numbers.keys()}
        numbers |= {n: min(x, _MAX_WINDOW) for n, x in numbers.items() if x and _WINDOW.match(n)}
        numbers |= {n: _NOISE for n, x in numbers.items() if x and "jitter" in n}
        num_layers = max((numbers[name] or 0 for name in _LAYERS & numbers.keys()), default=0)
        if num_layers <= 2:
            continue
        lists = {name: value for name, value in numbers.items() if isinstance(value, list)}
        whole = {n: x for n, x in lists.items() if len(x) > 1 and all(type(item) is int for item in x)}
        numbered = {name: x for name, x in whole.items() if sorted(set(x)) == x}  # ascending: layer indexes
        by_layer = {n: x for n, x in lists.items() if len(x) == num_layers and n not in numbered}
        kinds = [
            (*(str(x[layer]) for x in by_layer.values()), *(layer in x for x in numbered.values()))
            for layer in range(num_layers)
        ]
        derived = None if by_layer else getattr(part, "layers_block_type", None)  # such as by a period
        kept = sorted({kinds.index(kind) for kind in kinds})
        if len(kept) == 1:
            kept = [*range(max(map(derived.index, derived)) + 1 if derived else 2)]
        if numbers.get("num_kv_shared_layers"):  # the last layers use keys of earlier ones of their kind
            kept = kept * 2
            numbers["num_kv_shared_layers"] = len(kept) // 2
        numbers |= {name: [x[layer] for layer in kept] for name, x in by_layer.items()}
        numbers |= {name: [kept.index(n) for n in x if n in kept] for name, x in numbered.items()}
        numbers |= {name: min(numbers[name] or 0, len(kept)) for name in _LAYERS & numbers.keys()}
        if part.is_heterogeneous:
            keep_layers(part, kept)


def _narrow(config: PreTrainedConfig) -> None:
    """Keep few heads of the original width, few experts and few tokens."""
    shapes, widths = [], {}  # widths of hidden states; a part may repeat another's width
    for part in _parts(config):
        heads = getattr(part, "num_attention_heads", None)
        width = getattr(part, "hidden_size", None)
        shapes.append((part, heads, width))
        if type(width) is int:
            few = width // heads * min(heads, _NUM_HEADS) if heads else min(width, 64)
            is_free = heads and vars(part).get("head_dim") not in (None, width // heads)
            widths.setdefault(width, -(-few // 16) * 16 if is_free else few)  # kernels need multiples
    for part, heads, width in shapes:
        for name, value in vars(part).items():
            if type(value) is int and value > 1:
                vars(part)[name] = _reduced(name, value, heads or 0, width, widths)
            elif isinstance(value, list) and "intermediate" in name:
                vars(part)[name] = [min(number, 64) for number in value]


def _reduced(name: str, value: int, heads: int, width: int | None, widths: dict[int, int]) -> int:
    """A smaller number for a narrow configuration."""
    if "token_id" in name or "token_index" in name:
        return value if value < _NUM_TOKENS else 0
    if value in widths and not name.startswith(("max_", "n_pos")):
        return widths[value]
    if "heads" in name or name == "n_head":
        if heads in (0, value) or "attention" in name:
            return min(value, _NUM_HEADS)
        return max(value * _NUM_HEADS // heads, 1)
    if not heads and "intermediate" in name:
        return value * widths.get(width, 64) // (width or value)
    return next((min(value, most) for words, most in _UPPER_LIMITS.items() if re.search(words, name)), value)


def _parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """A configuration and the configurations nested in it."""
    inner = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *(part for value in inner for part in _parts(value))]
