"""Tensor-parallel plans for generation, by model family.

A plan says for each Linear of a block whether its outputs (Column) or its inputs (Row) are cut: a Column's
outputs feed a Row's inputs on the same rank, and one sum over the ranks after the Row completes the result.
`build_cuts` turns the plan into index ranges of every parameter; `cut_module` of inference_module.py applies
them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

HEADS, KEY_VALUE_HEADS = "attention heads", "key/value heads"


class NoPlan(ValueError):
    """There is no plan for this family's weights; the message names the reason, the flag and the cure."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason}; use --inference_tp_size 1, or register a plan of your own with register_tp_plan"
        )


@dataclass(frozen=True)
class Cut:
    """The part of one parameter that each tensor-parallel rank holds."""

    dim: int  # the dimension that is cut (of the parameter as stored, Conv1D too)
    ranges: tuple[tuple[tuple[int, int], ...], ...]  # [tp_rank] -> (start, stop) along dim, in order

    def take(self, tensor: torch.Tensor, tp_rank: int) -> torch.Tensor:
        """A rank's part of the whole `tensor`: a view if the part is one range, else a new tensor."""
        slices = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges[tp_rank]]
        return slices[0] if len(slices) == 1 else torch.cat(slices, dim=self.dim)


@dataclass(frozen=True)
class Part:
    """A part of the cut dimension with `size` indexes, whose units of `unit` indexes are never split.

    The units are distributed evenly in order. With `may_repeat` there may be fewer units than ranks, each on
    several ranks: rank j of t has unit j * units // t, such as the key/value head of its query heads.
    """

    size: int
    unit: int = 1
    unit_name: str = "neurons"  # plural, for messages
    may_repeat: bool = False

    @property
    def count(self) -> int:
        """The number of units."""
        return self.size // self.unit

    def fits(self, tp_size: int) -> bool:
        """Whether the units can be distributed over `tp_size` ranks."""
        return self.count % tp_size == 0 or (self.may_repeat and tp_size % self.count == 0)

    def range(self, tp_rank: int, tp_size: int) -> tuple[int, int]:
        """The rank's index range, relative to the start of the part."""
        start = tp_rank * self.count // tp_size * self.unit
        return start, start + max(self.count // tp_size, 1) * self.unit


Parts = tuple[Part, ...]


@dataclass(frozen=True)
class Column:
    """Cuts a Linear's outputs, in weight and bias; without parts, the unit is one neuron."""

    parts: Parts = ()


@dataclass(frozen=True)
class Row:
    """Cuts a Linear's inputs; the outputs are summed over ranks and the whole bias is added once."""

    parts: Parts = ()


Style = Column | Row
Plan = dict[str, Style]  # by module name within the base model; `*` matches a layer's number
PlanMaker = Callable[[Any], Plan]  # of a configuration

PLANS: dict[str, PlanMaker] = {}


def register_tp_plan(family: str) -> Callable[[PlanMaker], PlanMaker]:
    """Register the decorated function (config -> Plan) for a family, by its config.model_type.

    It takes precedence over transformers' plan, and may raise NoPlan for a config.
    """

    def register(make_plan: PlanMaker) -> PlanMaker:
        PLANS[family] = make_plan
        return make_plan

    return register


def build_cuts(model: nn.Module, tp_size: int) -> dict[str, Cut]:
    """Cuts of a transformers causal LM, by parameter name; parameters without a cut stay whole.

    The model may be on the meta device. A tied weight occurs once, as in `model.named_parameters()`. Raises
    NoPlan for a family without a plan, ValueError for a size that does not fit the model.
    """
    if tp_size == 1:
        return {}
    cuts: dict[str, Cut] = {}
    for name, (module, style, parts) in planned_linears(model).items():
        for part in parts:
            if tp_size < 1 or not part.fits(tp_size):
                sizes = ", ".join(map(str, working_tp_sizes(model)))
                verb = "neither divides nor is a multiple of" if part.may_repeat else "does not divide"
                raise ValueError(
                    f"--inference_tp_size {tp_size} {verb} the {part.count} {part.unit_name} of {name}; "
                    f"sizes that work for this model: {sizes}"
                )
        ranges = tuple(join_ranges(parts, rank, tp_size) for rank in range(tp_size))
        cuts[f"{name}.weight"] = Cut(cut_dim(module, style), ranges)
        if isinstance(style, Column):
            cuts[f"{name}.bias"] = Cut(0, ranges)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):  # tied or not
        if isinstance(module, nn.Embedding | nn.Linear) and len(module.weight) % tp_size == 0:
            step = len(module.weight) // tp_size
            cut = Cut(0, tuple(((rank * step, (rank + 1) * step),) for rank in range(tp_size)))
            cuts |= {names[id(parameter)]: cut for parameter in module.parameters(recurse=False)}
    return {name: cuts[name] for name, _ in model.named_parameters() if name in cuts}


def working_tp_sizes(model: nn.Module) -> list[int]:
    """Tensor-parallel sizes that fit this model (meta or real): [1] without a plan."""
    try:
        parts = [part for planned in planned_linears(model).values() for part in planned.parts]
    except NoPlan:
        return [1]
    max_size = min((part.count for part in parts if not part.may_repeat), default=1)
    return [size for size in range(1, max_size + 1) if all(part.fits(size) for part in parts)]


def join_ranges(parts: Parts, tp_rank: int, tp_size: int) -> tuple[tuple[int, int], ...]:
    """A rank's index ranges of all parts, with adjacent ones joined."""
    ranges: list[tuple[int, int]] = []
    offset = 0
    for part in parts:
        start, stop = part.range(tp_rank, tp_size)
        if ranges and ranges[-1][1] == offset + start:
            start = ranges.pop()[0] - offset
        ranges.append((offset + start, offset + stop))
        offset += part.size
    return tuple(ranges)


def cut_dim(module: nn.Module, style: Style) -> int:
    """Dimension of the stored weight that a style cuts; Conv1D stores it transposed."""
    return int(isinstance(style, Row) != isinstance(module, Conv1D))


class Planned(NamedTuple):
    """A Linear that is cut."""

    module: nn.Linear | Conv1D
    style: Style
    parts: Parts


def planned_linears(model: nn.Module) -> dict[str, Planned]:
    """Each Linear that is cut, by its name in the model; raises NoPlan if the plan does not fit it."""
    planned: dict[str, Planned] = {}
    modules = dict(model.named_modules())
    for pattern, style in plan_of(model.config).items():
        expression = re.escape(f"{model.base_model_prefix}.{pattern}").replace(r"\*", r"\d+")
        matching = [name for name in modules if re.fullmatch(expression, name)]
        if not matching:
            raise NoPlan(f"{type(model).__name__} has no {pattern}, which its tensor-parallel plan names")
        for name in matching:
            module = modules[name]
            if not isinstance(module, nn.Linear | Conv1D):
                raise NoPlan(f"{name} is a {type(module).__name__}: only Linear and Conv1D can be cut")
            size = module.weight.shape[cut_dim(module, style)]
            parts = style.parts or (Part(size),)
            expected = sum(part.size for part in parts)
            if expected != size:
                raise NoPlan(f"{name}: the plan expects a size of {expected}, not {size}")
            planned[name] = Planned(module, style, parts)
    if model.config.model_type not in PLANS:
        check_attention_is_covered(model, planned)
    return planned


def check_attention_is_covered(model: nn.Module, planned: dict[str, Planned]) -> None:
    """Raise NoPlan if an attention module has per-head weights that the plan leaves out."""
    _, _, head_dim = head_counts(model.config)
    for attention in {name.rpartition(".")[0] for name, p in planned.items() if p.style.parts}:
        for name, parameter in model.get_submodule(attention).named_parameters():
            owner = f"{attention}.{name}".rpartition(".")[0]
            is_norm = "Norm" in type(model.get_submodule(owner)).__name__ and parameter.shape == (head_dim,)
            if owner not in planned and not is_norm:
                raise NoPlan(f"{owner}: the tensor-parallel plan of {model.config.model_type} leaves it out")


def plan_of(config: Any) -> Plan:
    """The family's registered plan, else transformers' own; raises NoPlan."""
    if config.model_type in PLANS:
        return PLANS[config.model_type](config)
    source = getattr(config, "base_model_tp_plan", None)
    if not source:
        raise NoPlan(f"the family {config.model_type!r} has no tensor-parallel plan")
    try:
        return {
            pattern: derive_style(config, pattern, style)
            for pattern, style in source.items()
            if not style.startswith("replicated")
        }
    except RuntimeError as error:  # transformers raises it if layers differ in their heads, as in Gemma 4
        raise NoPlan(f"the layers of the family {config.model_type!r} differ in their heads") from error


def derive_style(config: Any, pattern: str, style: str) -> Style:
    """Style of an entry of transformers' base_model_tp_plan. Raises NoPlan if it is ambiguous."""
    num_heads, num_kv_heads, head_dim = head_counts(config)
    queries = (Part(num_heads * head_dim, head_dim, HEADS),)
    keys = (Part(num_kv_heads * head_dim, head_dim, KEY_VALUE_HEADS, may_repeat=True),)
    *path, leaf = pattern.split(".")
    is_attention = any("attn" in word or "attention" in word for word in path)
    if style == "rowwise":
        return Row(queries if is_attention else ())
    if style == "colwise" and not is_attention:
        return Column()
    if style == "colwise" and leaf in ("q_proj", "k_proj", "v_proj"):
        return Column(queries if leaf == "q_proj" else keys)
    raise NoPlan(f"the family {config.model_type!r} cuts {pattern} by {style!r}, which is not supported")


def head_counts(config: Any) -> tuple[int, int, int]:
    """(Query heads, key/value heads, width of a head)."""
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return num_heads, getattr(config, "num_key_value_heads", None) or num_heads, head_dim


def all_heads(config: Any, per_head: int = 1) -> Parts:
    """One part of all query heads, each `per_head` times as wide as a head."""
    num_heads, _, head_dim = head_counts(config)
    return (Part(num_heads * per_head * head_dim, per_head * head_dim, HEADS),)


def interleaved_heads(config: Any) -> Parts:
    """One part of a fused projection whose query, key and value are interleaved head by head."""
    if config.model_type == "bloom" and config.slow_but_exact and config.pretraining_tp > 1:
        raise NoPlan("BLOOM with slow_but_exact in its config computes with slices of its whole weights")
    return all_heads(config, per_head=3)


def falcon_heads(config: Any) -> Parts:
    """Falcon's layouts: groups of heads, each with its key and value (40B); one key and value after all
    heads (7B); or interleaved as in BLOOM.
    """
    num_heads, _, head_dim = head_counts(config)
    if config.new_decoder_architecture:
        group = (num_heads // config.num_kv_heads + 2) * head_dim  # its queries, a key and a value
        return (Part(config.num_kv_heads * group, group, "groups of attention heads"),)
    if config.multi_query:
        shared = Part(head_dim, head_dim, KEY_VALUE_HEADS, may_repeat=True)
        return (*all_heads(config), shared, shared)
    return interleaved_heads(config)


_QKV = ("q_proj", "k_proj", "v_proj")
_FUSED = ("query_key_value",)
_MLP_4H = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
# family: (layers, attention, its query, key and value projections, the parts of each, its output projection,
# the MLP's first Linear, its last)
_FAMILIES: dict[str, tuple[str, str, tuple[str, ...], Callable[[Any], Parts], str, str, str]] = {
    "opt": ("decoder.layers.*", "self_attn", _QKV, all_heads, "out_proj", "fc1", "fc2"),
    "gpt2": (
        "h.*",
        "attn",
        ("c_attn",),
        lambda config: 3 * all_heads(config),
        "c_proj",
        "mlp.c_fc",
        "mlp.c_proj",
    ),
    "gptj": ("h.*", "attn", _QKV, all_heads, "out_proj", "mlp.fc_in", "mlp.fc_out"),
    "gpt_neox": ("layers.*", "attention", _FUSED, interleaved_heads, "dense", *_MLP_4H),
    "bloom": ("h.*", "self_attention", _FUSED, interleaved_heads, "dense", *_MLP_4H),
    "falcon": ("h.*", "self_attention", _FUSED, falcon_heads, "dense", *_MLP_4H),
}


def _plan_family(family: str, config: Any) -> Plan:
    """The plan of a row of `_FAMILIES`."""
    layer, attention, inputs, parts_of_input, output, up, down = _FAMILIES[family]
    return {f"{layer}.{attention}.{name}": Column(parts_of_input(config)) for name in inputs} | {
        f"{layer}.{attention}.{output}": Row(all_heads(config)),
        f"{layer}.{up}": Column(),
        f"{layer}.{down}": Row(),
    }


PLANS |= {family: partial(_plan_family, family) for family in _FAMILIES}
