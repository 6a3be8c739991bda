"""Generation mode: shared weights where they are whole, gathered ones where they are sharded."""

import gc
from contextlib import nullcontext

import pytest
import torch
from hybrid_engines import IDS, build, build_tiny_engine, generate, train_once
from plain_logits import compute_logits
from pretended_gpu import pretended_gpu

from common.generation import hybrid_engine
from common.generation.hybrid_engine import HybridEngine, HybridOptions, named_out_of_memory
from common.generation.tp_plans import NoPlan
from common.ranks.zero3 import local_shard
from common.runs.saved_state import MOMENTS

pytestmark = pytest.mark.usefixtures("process_group")


def holds_no_weight(hybrid: HybridEngine) -> bool:
    return all(p.is_meta for p in hybrid.inference_module.parameters())


@pytest.mark.parametrize(("stage", "enabled"), [(0, False), (1, True), (2, True)])
def test_whole_weights_are_shared_not_copied(stage, enabled, tiny_model_folder):
    hybrid = build(tiny_model_folder("llama"), stage, enable_hybrid_engine=enabled)
    pointers = {n: p.data_ptr() for n, p in hybrid.engine.module.named_parameters()}
    hybrid.engine.train()
    with hybrid.generation_mode() as module:
        assert {n: p.data_ptr() for n, p in module.named_parameters()} == pointers
        assert not module.training and hybrid.engine.module.training
    assert hybrid.received_bytes == 0
    assert holds_no_weight(hybrid) and hybrid.engine.module.training


# tied, untied, ALiBi
@pytest.mark.parametrize(
    ("family", "lora_dim", "stage"), [("gpt2", 2, 3), ("gpt2", 0, 0), ("llama", 2, 0), ("bloom", 0, 3)]
)
def test_the_trainers_weights_are_seen_after_each_update_and_dropped(
    family, lora_dim, stage, tiny_model_folder
):
    hybrid = build(tiny_model_folder(family), stage, lora_dim)
    texts = []
    for _ in range(2):
        hybrid.engine.eval()
        with torch.no_grad():
            expected = compute_logits(hybrid.engine, IDS, torch.ones_like(IDS))
            with hybrid.generation_mode() as module:
                found = compute_logits(module, IDS, torch.ones_like(IDS))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        texts.append(found)
        assert holds_no_weight(hybrid), "weights must not stay"
        train_once(hybrid)
    assert not texts[0].allclose(texts[1]), "the update must be seen"


@pytest.mark.parametrize("stage", [0, 3])
def test_an_exception_inside_leaves_the_trainer_usable(stage, tiny_model_folder):
    hybrid = build(tiny_model_folder("llama"), stage)
    hybrid.engine.train()
    with pytest.raises(RuntimeError, match="inside"), hybrid.generation_mode():
        raise RuntimeError("inside")
    assert hybrid.engine.module.training and holds_no_weight(hybrid)
    train_once(hybrid)
    assert generate(hybrid).response_ids.shape[0] == 2


@pytest.mark.parametrize(("stage", "lora_dim"), [(0, 2), (1, 0), (2, 2), (3, 0), (3, 2)])
@pytest.mark.slow
def test_fifty_switches_leave_every_bit_of_the_trainer(stage, lora_dim, tiny_model_folder):
    folder = tiny_model_folder("llama")
    hybrid, never = build(folder, stage, lora_dim), build(folder, stage, lora_dim)
    num_tensors = []
    for _ in range(5):
        for _ in range(10):
            with hybrid.generation_mode():
                pass
        train_once(hybrid)
        train_once(never)
        gc.collect()
        num_tensors.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    assert num_tensors[0] == num_tensors[-1], "what a switch makes must not stay"
    pairs = zip(hybrid.engine.module.parameters(), never.engine.module.parameters(), strict=True)
    assert all(local_shard(a).equal(local_shard(b)) for a, b in pairs)
    assert hybrid.received_bytes == 0  # one rank


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (0, {"generation_slots": 1}),
        (3, {"enable_hybrid_engine": False}),
        (3, {"generation_slots": 1}),
        (3, {"unpin_actor_parameters": True}),
    ],
)
def test_every_way_of_generating_gives_the_same_texts(stage, options, tiny_model_folder):
    folder = tiny_model_folder("llama")
    expected, found = generate(build(folder, 0)), generate(build(folder, stage, **options))
    assert found.response_ids.equal(expected.response_ids)
    assert found.response_mask.equal(expected.response_mask)
    assert found.is_finished.equal(expected.is_finished)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("stage", "options", "has_graphs"),
    [(0, {}, True), (0, {"no_cuda_graphs": True}, False), (3, {"unpin_actor_parameters": True}, False)],
)
def test_graphs_are_used_unless_they_must_or_shall_not_be(stage, options, has_graphs, tiny_model_folder):
    generator = build(tiny_model_folder("llama"), stage, **options).generator
    assert (generator._graphs is not None) == has_graphs


def optimizer_states(hybrid: HybridEngine) -> list[torch.Tensor]:
    """fp32 weights and moments of a ZeRO engine."""
    zero, is_3 = hybrid.engine.optimizer, hybrid.engine.zero_optimization_stage() == 3
    flat = zero.fp32_partitioned_groups_flat if is_3 else zero.single_partition_of_fp32_groups
    return [*flat, *(state[name] for state in zero.optimizer.state.values() for name in MOMENTS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offload", "place"), [("none", nullcontext), ("optimizer", nullcontext), ("none", pretended_gpu)]
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_that_leave_for_the_generation_come_back_as_they_were(
    stage, offload, place, tiny_model_folder
):
    folder = tiny_model_folder("llama")
    with place() as gpu:
        moved, never = (
            HybridEngine(
                build_tiny_engine(folder, stage, offload=offload),
                HybridOptions(offload_states_for_generation=flag),
            )
            for flag in (True, False)
        )
        for step in range(3):
            homes = [state.data_ptr() for state in optimizer_states(moved)]
            with moved.generation_mode():
                states = optimizer_states(moved)
                has_left = [state.data_ptr() != home for state, home in zip(states, homes, strict=True)]
                assert step or set(has_left) == {offload == "none"}
                assert not any(state.is_cuda for state in states)
            assert {state.is_cuda for state in optimizer_states(moved)} == {
                offload == "none" and gpu is not None
            }
            assert generate(moved).response_ids.equal(generate(never).response_ids)
            train_once(moved)
            train_once(never)
            assert all(map(torch.equal, optimizer_states(moved), optimizer_states(never)))


def test_the_cache_is_kept_or_released_as_asked(tiny_model_folder):
    folder = tiny_model_folder("llama")
    kept, released = build(folder, 0), build(folder, 0, release_inference_cache=True)
    pointers = []
    for _ in range(2):
        generate(kept)
        pointers.append([k.data_ptr() for k in kept.generator._step.cache.keys])
        generate(released)
        assert released.generator._step is None
    assert pointers[0] == pointers[1]


@pytest.mark.parametrize("is_released", [False, True])
def test_slices_stay_where_captured_graphs_read_them(is_released, tiny_model_folder):
    """Three steps capture once and see each update. It would capture anew in every step, for adapters are
    merged into new tensors. On a CPU, which has no graphs, nothing stays.
    """

    def run(record) -> list[list[list[int]]]:
        options = {"release_inference_cache": is_released, "merge_adapters": "true"}
        hybrid, texts = build(folder, 0, 2, **options), []
        for _ in range(3):
            texts.append(generate(hybrid).response_ids.tolist())
            record(hybrid)
            assert holds_no_weight(hybrid)
            train_once(hybrid)
        hybrid.release()
        assert not hybrid._inference._slices
        return texts

    def record(hybrid: HybridEngine) -> None:
        captures.append(sum(event.name == "torch.cuda.graph" for event in gpu.waits))
        places.append({name: weight.data_ptr() for name, weight in hybrid._inference._slices.items()})
        gpu.clear()

    folder, captures, places, on_cpu = tiny_model_folder("llama"), [], [], []
    expected = run(lambda hybrid: on_cpu.extend(hybrid._inference._slices))
    assert len(set(map(str, expected))) == 3 and not on_cpu
    with pretended_gpu() as gpu:
        assert run(record) == expected
    assert captures == ([1, 1, 1] if is_released else [1, 0, 0])
    assert places[0] == places[1] == places[2] and len(places[0]) == (0 if is_released else 14)


def test_out_of_memory_names_the_cure():
    with pytest.raises(MemoryError, match="lower --generation_slots"):
        with named_out_of_memory("lower --generation_slots 9"):
            torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="another"), named_out_of_memory("x"):
        raise RuntimeError("another")


def test_a_family_without_a_plan_generates_whole_and_says_so(tiny_model_folder, monkeypatch, capsys):
    def no_plan(model, tp_size):
        raise NoPlan("there is no plan for this family")

    monkeypatch.setattr(hybrid_engine, "build_cuts", no_plan)
    hybrid = build(tiny_model_folder("llama"), 0, inference_tp_size=2)
    assert hybrid.layout.tp_size == 1
    said = capsys.readouterr().out
    assert "generating with --inference_tp_size 1: there is no plan" in said and "register_tp_plan" in said
    monkeypatch.undo()
    assert generate(hybrid).response_ids.equal(generate(build(tiny_model_folder("llama"), 0)).response_ids)
