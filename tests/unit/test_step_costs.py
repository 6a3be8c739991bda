"""Seconds, tokens and FLOPs of a step by phase, and the share of what the device could do."""

import pytest
import torch
from pretended_gpu import pretended_gpu
from tiny_configs import tiny_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from common.generation.decode import SamplingOptions
from common.generation.generate import Generator, PromptBatch
from common.models import model_flops
from common.models.attention import VARLEN_ATTENTION, install, narrow_last_layer
from common.models.lora import LoraOptions, add_lora
from common.models.model_inputs import build_model_inputs
from common.models.output_head import OutputHead
from common.models.policy_model import PolicyModel
from common.models.value_model import ScoreHead, ValueModel
from common.ranks import step_costs, watchdog
from common.ranks.step_costs import StepCosts
from common.runs import run_logger


@pytest.fixture
def costs(monkeypatch):
    """Costs that `watchdog.phase` uses, by a clock that only moves where it is told to."""
    time = [0.0]
    costs = StepCosts(lambda: time[0])
    monkeypatch.setattr(watchdog, "COSTS", costs)
    monkeypatch.setattr(step_costs, "COSTS", costs)
    monkeypatch.setattr(model_flops, "COSTS", costs)
    costs.wait = lambda seconds: time.__setitem__(0, time[0] + seconds)
    return costs


def test_phases_and_the_rest_are_the_step(costs):
    costs.peak_flops = 100.0
    costs.begin_step()
    for seconds in (1.0, 2.0):
        with watchdog.phase("the generation", clock="generate"):
            costs.wait(seconds)
            costs.count(tokens=30, flops=500.0)
    with watchdog.phase("a place without a clock"):
        costs.wait(0.5)
        with watchdog.phase("the reference", clock="reference"):
            costs.wait(4.0)
    costs.count(tokens=1000, flops=1e9)  # outside all clocks: no step's
    found = costs.end_step(num_ranks=2)
    assert found == {
        "perf/step_seconds": 7.5, "perf/generate_seconds": 3.0, "perf/reference_seconds": 4.0,
        "perf/rest_seconds": 0.5, "perf/generate_tokens_per_second": 40.0,
        "perf/mfu": pytest.approx(1000 / 750),
    }  # fmt: skip


def test_seconds_that_another_phase_took_are_moved_to_it(costs):
    costs.begin_step()
    with watchdog.phase("the generation", clock="generate"):
        costs.wait(3.0)
        costs.move(1.0, "generate", "environment")
    costs.move(1.0, "generate", "environment")  # outside: nobody counts them
    found = {"perf/step_seconds": 3.0, "perf/rest_seconds": 0.0, "perf/generate_seconds": 2.0}
    assert costs.end_step() == found | {"perf/environment_seconds": 1.0}


def test_a_phase_inside_another_is_part_of_it_and_an_error_ends_both(costs):
    costs.begin_step()
    with pytest.raises(ValueError), watchdog.phase("the evaluation", clock="evaluate"):
        costs.wait(1.0)
        with watchdog.phase("the generation", clock="generate"):
            costs.wait(2.0)
            raise ValueError
    with watchdog.phase("the generation", clock="generate"):
        costs.wait(4.0)
    found = costs.end_step()
    assert (found["perf/evaluate_seconds"], found["perf/generate_seconds"]) == (3.0, 4.0)
    assert found["perf/rest_seconds"] == 0.0


def test_a_phase_waits_for_its_gpu_once_whatever_is_inside(costs):
    with pretended_gpu() as gpu:
        with costs.clock("rollout"):
            for _ in range(3):
                with costs.clock("generate"):
                    torch.ones(2, device="cuda").mul_(2)
        assert [wait.name for wait in gpu.waits] == ["synchronize"]


def test_each_phase_has_a_peak_of_its_own_and_the_run_keeps_the_largest(costs, monkeypatch):
    monkeypatch.setattr(run_logger, "COSTS", costs)
    with pretended_gpu() as gpu:
        gpu.peak = gpu.allocated = 5 * 2**30  # before the step
        for name, peaks in {"generate": (7, 6), "reference": (3,)}.items():
            for peak in peaks:
                with costs.clock(name):
                    assert gpu.peak == gpu.allocated
                    gpu.peak = max(gpu.peak, peak * 2**30)
        found = costs.end_step()
        assert {name: found[f"perf/{name}_peak_gib"] for name in ("generate", "reference")} == {
            "generate": 7.0, "reference": 5.0,
        }  # fmt: skip
        gpu.peak = 9 * 2**30  # outside of all phases
        assert run_logger.peak_memory_gib() == 9.0
        with costs.clock("generate"):
            pass
        assert costs.end_step()["perf/generate_peak_gib"] == 5.0 and run_logger.peak_memory_gib() == 9.0
    assert not any(name.endswith("_peak_gib") for name in costs.end_step())


def test_what_happens_between_two_steps_comes_once_with_the_next_and_is_none_of_its_seconds(costs):
    costs.peak_flops = 1.0
    with watchdog.phase("the checkpoint", clock="save"):
        costs.wait(2.0)
        costs.count(1, 1e6)
    costs.begin_step()
    with watchdog.phase("the checkpoint", clock="save"):  # of a run that was asked to stop
        costs.wait(1.0)
    found = costs.end_step()
    assert found["perf/save_seconds"] == 3.0 and found["perf/step_seconds"] == 1.0
    assert found["perf/rest_seconds"] == 0.0 and found["perf/mfu"] == 0.0
    costs.begin_step()
    costs.wait(1.0)
    assert "perf/save_seconds" not in costs.end_step()


# ---- FLOPs -------------------------------------------------------------------------------------------------


def build_model(kind: str, family: str, lora_dim: int, *, is_packed: bool = False):
    config = tiny_config(family, 64)
    if lora_dim:  # the frozen embeddings need no gradient from the first layer: little, where there are more
        config.num_hidden_layers = 8
    # The products of "eager" are plain ones, which torch's counter sees.
    install()
    config._attn_implementation = VARLEN_ATTENTION if is_packed else "eager"
    config.num_labels = 1
    kinds = {"value": AutoModelForSequenceClassification, "policy": AutoModelForCausalLM}
    model = kinds[kind].from_config(config)
    narrow_last_layer(model)
    if kind == "policy":
        return PolicyModel(add_lora(model, LoraOptions(lora_dim)), num_valid_tokens=64)
    model.score.__class__ = ScoreHead
    return ValueModel(add_lora(model, LoraOptions(lora_dim)))


@pytest.mark.parametrize(
    ("kind", "family", "lora_dim", "is_training"),
    [
        ("policy", "llama", 0, False),
        ("policy", "gpt2", 0, True),
        ("policy", "llama", 8, True),
        ("value", "llama", 0, True),
    ],
)
def test_flops_of_a_pass_are_those_that_torch_counts(kind, family, lora_dim, is_training, costs):
    model = build_model(kind, family, lora_dim)
    inputs = build_model_inputs(torch.arange(48) % 60, torch.tensor([24, 24]), is_packed=False)
    slots = inputs.token_slots.view(2, 24)[:, 12:].flatten()  # a response is scored, its prompt is not
    with (
        watchdog.phase("a pass", clock="pass"),
        FlopCounterMode(display=False) as counter,
        torch.set_grad_enabled(is_training),
    ):
        if kind == "value":
            found = model(inputs, slots).sum()
        else:
            found = model(inputs, slots, inputs.input_ids.flatten()[slots], OutputHead.nll_sum)
        if is_training:
            found.backward()
    assert costs.tokens == {"pass": 48}
    assert costs.flops == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize(("kind", "lora_dim"), [("policy", 0), ("value", 0), ("value", 8)])
def test_flops_of_shared_prompts_and_of_a_last_layer_that_is_hardly_read_are_those_that_torch_counts(
    kind, lora_dim, costs
):
    model = build_model(kind, "llama", lora_dim, is_packed=True)
    ids, lengths = (
        torch.cat([torch.arange(30), torch.arange(20), torch.arange(33, 37)]),
        torch.tensor([30, 24]),
    )
    inputs = build_model_inputs(ids, lengths, is_packed=True, group_sizes=torch.tensor([2]))
    slots = inputs.last_slots if kind == "value" else inputs.last_slots - 1
    with (
        watchdog.phase("a pass", clock="pass"),
        sdpa_kernel(SDPBackend.MATH),  # its products are plain ones, which torch's counter sees
        FlopCounterMode(display=False) as counter,
    ):
        found = model(inputs, slots) if kind == "value" else model(inputs, slots, ids[:2], OutputHead.nll_sum)
        found.sum().backward()
    assert costs.tokens == {"pass": 54} and inputs.num_tokens == 34
    assert costs.flops == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_flops_of_a_generation_are_those_that_torch_counts(costs):
    model = build_model("policy", "llama", 0)
    prompt_ids = torch.arange(20).view(1, 20)
    options = SamplingOptions(max_new_tokens=30, stop_token_id=-1, pad_token_id=0, num_valid_tokens=64)
    generator = Generator(model.causal_lm.eval(), num_slots=2)
    with FlopCounterMode(display=False) as counter:
        mask = torch.ones(1, 20, dtype=torch.bool)
        generator.generate(PromptBatch(prompt_ids, mask, torch.arange(2)), options)
    found = model.flops.of_generation(torch.tensor([20]), torch.tensor([30, 30]), 2)
    assert found == pytest.approx(counter.get_total_flops(), rel=0.05)


def test_a_gpu_has_its_data_sheets_peak_and_a_cpu_is_measured(monkeypatch):
    assert 1e8 < model_flops.own_peak_flops(torch.float32) < 1e14
    monkeypatch.setattr(model_flops.distributed, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    assert model_flops.own_peak_flops(torch.float32) == 19.5e12
    assert model_flops.own_peak_flops(torch.bfloat16) == 312e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A10")
    assert model_flops.own_peak_flops(torch.bfloat16) == 125e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 4090")
    assert model_flops.own_peak_flops(torch.float32) == 82.6e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    monkeypatch.setattr(model_flops, "measure_flops", lambda dtype: 7.0)
    assert model_flops.own_peak_flops(torch.float32) == 7.0, "a part of a card is measured"
