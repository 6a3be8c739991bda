"""Generation with adapters beside the trainer's own weights: nothing merged, nothing copied."""

from unittest import mock

import pytest
import torch
from hybrid_engines import IDS, build_tiny_engine, generate, train_once
from plain_logits import compute_logits
from pretended_gpu import pretended_gpu
from torch import nn

from common.generation import products
from common.generation.hybrid_engine import HybridEngine, HybridOptions, merges_adapters
from common.generation.products import Adapter, InputGroups
from common.models.lora import TrainedWeight, trained_weights
from common.ranks import distributed
from common.ranks.zero3 import local_shard
from tools.traced_layers import LiveBytes

pytestmark = pytest.mark.usefixtures("process_group")
MASK = torch.ones_like(IDS)
RANK = 2


def build(
    folder: str,
    stage: int,
    *,
    lora_names: str = "auto",
    dtype: str = "fp32",
    load_in_4bit: bool = False,
    **options,
) -> HybridEngine:
    """Return a hybrid engine of a model whose adapters are not zero."""
    of_model = {"lora_names": lora_names, "load_in_4bit": load_in_4bit}
    engine = build_tiny_engine(folder, stage, RANK, dtype=dtype, **of_model)
    generator = torch.Generator().manual_seed(5)
    for weight in trained_weights(engine.module).values():
        if weight.lora_b is not None:
            b = local_shard(weight.lora_b).data
            b.copy_(torch.randn(b.shape, generator=generator) * 0.3)
    return HybridEngine(engine, HybridOptions(**options))


def logits_of(hybrid: HybridEngine, ids: torch.Tensor = IDS) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of generation's module, from its third pass on, and of the trainer."""
    hybrid.engine.eval()
    mask = torch.ones_like(ids)
    with torch.no_grad():
        expected = compute_logits(hybrid.engine, ids, mask)
        with hybrid.generation_mode() as module:
            for _ in range(3):  # the first finds out what reads the same input
                logits = compute_logits(module, ids, mask)
    return logits, expected


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "qwen2", "bloom", "mixtral"])
def test_it_computes_what_the_trainer_does_after_each_update(family, stage, tiny_model_folder):
    hybrid, seen = build(tiny_model_folder(family), stage, lora_names=".", merge_adapters="false"), []
    for _ in range(2):
        found, expected = logits_of(hybrid)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        seen.append(found)
        train_once(hybrid)
    assert not seen[0].allclose(seen[1]), "the update must be seen"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_is_the_trainer_to_the_bit_where_kernels_agree(dtype, tiny_model_folder, monkeypatch):
    """With torch's own products, and each factor by itself, as PEFT's layers have them."""
    monkeypatch.setattr(distributed, "is_for_onednn", lambda dtype: False)
    monkeypatch.setattr(products.AdapterGroup, "join", lambda self: None)
    found, expected = logits_of(build(tiny_model_folder("llama"), 0, dtype=dtype, merge_adapters="false"))
    assert found.equal(expected)


def test_in_bf16_it_is_nearer_to_the_trainer_than_a_merged_copy(tiny_model_folder):
    gaps = []
    for choice in ("false", "true"):
        found, expected = logits_of(
            build(tiny_model_folder("llama"), 0, dtype="bf16", merge_adapters=choice),
            torch.arange(60).view(4, 15),
        )
        gaps.append((found.float() - expected.float()).abs().mean().item())
    assert gaps[0] < 0.5 * gaps[1]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_no_weight_is_copied(stage, tiny_model_folder):
    """New in a switch, and in all passes kept, are the factors A alone."""
    hybrid = build(tiny_model_folder("llama"), stage)
    own = {name: weight.parameter for name, weight in trained_weights(hybrid.module).items()}
    factors = sum(w.lora_a.nbytes for w in trained_weights(hybrid.module).values() if w.lora_a is not None)
    logits_of(hybrid)
    with LiveBytes(hybrid.engine.module) as live, hybrid.generation_mode() as module:
        for name, parameter in module.named_parameters():
            assert parameter.data_ptr() == own[name].data_ptr(), name
        assert 0 < live.now <= factors
    assert all(tensor.is_meta for tensor in module.parameters())
    assert not [name for name, _ in module.named_buffers() if "factor" in name], "factors must not stay"


@pytest.mark.parametrize(
    ("family", "joined"), [("llama", [3, 1, 2, 1]), ("gpt2", [1, 1, 1, 1]), ("opt", [3, 1, 1, 1])]
)
def test_what_reads_the_same_input_is_one_product(family, joined, tiny_model_folder):
    hybrid = build(tiny_model_folder(family), 0)
    logits_of(hybrid)
    adapters = [m for m in hybrid.inference_module.modules() if isinstance(m, Adapter)]
    groups = list({id(a.group): a.group for a in adapters}.values())
    assert sorted(len(group.members) for group in groups) == sorted(joined * 2), "two layers"
    with (
        hybrid.generation_mode() as module,
        mock.patch.object(products, "linear", wraps=products.linear) as by,
    ):
        compute_logits(module, IDS, MASK)
        shapes = [call.args[1].shape[0] for call in by.call_args_list]
    assert sum(rows in (RANK, 2 * RANK, 3 * RANK) for rows in shapes) == len(groups)


@pytest.mark.parametrize("is_read_twice", [False, True])
def test_a_layer_that_reads_something_else_than_before_gets_its_own_product(is_read_twice):
    groups, factors = InputGroups(end_of_pass := nn.Identity()), torch.randn(2, 2, 3)
    adapters = [Adapter(groups) for _ in range(2)]
    for adapter, a in zip(adapters, factors, strict=True):
        adapter.attach(a, torch.eye(2), 1.0, is_shared=True)
    one, other = torch.randn(2, 4, 3)
    zero = torch.zeros(4, 2)
    for adapter in adapters:
        adapter.add(zero, one)
    end_of_pass(zero)
    if is_read_twice:
        for _ in range(2):
            torch.testing.assert_close(adapters[0].add(zero, other), other @ factors[0].T)
    for first, second in ((one, one), (one, one), (one, other), (other, one), (one, one)):
        for adapter, a, hidden in zip(adapters, factors, (first, second), strict=True):
            torch.testing.assert_close(adapter.add(zero, hidden), hidden @ a.T)
        end_of_pass(zero)
    one.mul_(2)  # the same tensor with other values
    for adapter, a in zip(adapters, factors, strict=True):
        torch.testing.assert_close(adapter.add(zero, one), one @ a.T)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("is_released", [False, True])
def test_captured_graphs_see_each_update(stage, is_released, tiny_model_folder):
    """Three steps capture once, unless released, and the texts are a CPU's."""

    def run(record) -> list:
        texts = []
        hybrid = build(folder, stage, merge_adapters="false", release_inference_cache=is_released)
        for _ in range(3):
            texts.append(generate(hybrid).response_ids.tolist())
            record()
            train_once(hybrid)
        return texts

    def count() -> None:
        captures.append(sum(event.name == "torch.cuda.graph" for event in gpu.waits))
        gpu.clear()

    folder, captures = tiny_model_folder("llama"), []
    expected = run(lambda: None)
    assert len(set(map(str, expected))) == 3
    with pretended_gpu() as gpu:
        assert run(count) == expected
    assert captures == ([1, 1, 1] if is_released else [1, 0, 0])


@pytest.mark.parametrize("is_transposed", [False, True])
def test_parts_of_factors_are_those_of_the_merged_weight(is_transposed):
    """A Linear's weight is (O, I), a Conv1D's (I, O); a cut along either dimension."""
    a, b, weight = torch.randn(2, 6), torch.randn(4, 2), torch.randn(4, 6)
    stored = weight.T if is_transposed else weight
    whole = TrainedWeight(stored, a, b, 0.5, is_transposed)
    expected = whole.merged()
    for dim in (0, 1):
        part = whole._replace(parameter=stored.narrow(dim, 1, 3)).cut_factors(
            lambda factor, along, dim=dim: factor.narrow(dim, 1, 3) if along == dim else factor
        )
        torch.testing.assert_close(part.merged(), expected.narrow(dim, 1, 3))


@pytest.mark.parametrize(
    ("choice", "is_sharded", "tp_size", "merges"),
    [
        ("auto", False, 1, False),
        ("auto", True, 1, True),
        ("auto", False, 2, True),
        ("true", False, 1, True),
        ("false", True, 2, False),
    ],
)
def test_adapters_are_merged_where_weights_are_copied_anyway(choice, is_sharded, tp_size, merges):
    assert merges_adapters(choice, is_sharded, tp_size) == merges


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_base_in_4_bits_stays_packed(dtype, tiny_model_folder):
    pytest.importorskip("bitsandbytes")
    hybrid = build(tiny_model_folder("llama"), 0, dtype=dtype, load_in_4bit=True)
    packed = [w.parameter for w in trained_weights(hybrid.module).values() if w.packing is not None]
    found, expected = logits_of(hybrid)
    torch.testing.assert_close(found, expected, atol=1e-5 if dtype == "fp32" else 0.05, rtol=1e-5)
    with hybrid.generation_mode() as module:
        held = {p.data_ptr() for p in module.parameters()}
        assert packed and all(p.data_ptr() in held and p.dtype == torch.uint8 for p in packed)
    assert isinstance(hybrid.inference_module.get_submodule("model.layers.0.mlp.up_proj"), nn.Linear)


@pytest.mark.parametrize(
    ("family", "choice", "words"),
    [
        ("llama", "auto", ["14 matrices beside their weights"]),
        ("llama", "true", ["14 matrices merged into copies of their weights"]),
        (
            "mixtral",
            "auto",
            ["8 matrices beside", "4 matrices merged"],
        ),  # of experts
    ],
)
def test_a_run_says_where_adapters_act(family, choice, words, tiny_model_folder, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(distributed, "print_once", lines.append)
    build(tiny_model_folder(family), 0, lora_names=".", merge_adapters=choice)
    lines = [line for line in lines if "generation uses" in line]
    assert len(lines) == len(words) and all(map(str.__contains__, lines, words)), lines
