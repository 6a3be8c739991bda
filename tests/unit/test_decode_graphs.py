"""Captured decode passes on a pretended GPU: what may be captured, what runs plainly, and when graphs go."""

import contextlib
import dataclasses
import functools
import os
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pretended_gpu import pretended_gpu
from tiny_configs import CONFIGS, NOISY, tiny_config
from transformers import AutoModelForCausalLM

from common.generation.decode import DecodeGraphs, DecodeStep, SamplingOptions
from common.generation.generate import DecodeLoop, Generator, PromptBatch
from common.generation.inference_module import cut_module, share_weights
from common.generation.tp_plans import build_cuts
from common.programs import running
from common.ranks import distributed
from common.runs.run import Stopped

# Their passes over one token make the host wait or copy from its pageable memory, in transformers' own code.
RUN_PLAINLY = {"falcon", "falcon_new", "gpt_neo", "llama_dynamic"}
# Torch's product by expert reads the experts' sizes on the host in fp32, and in bf16 below Hopper.
MIXTURES = {"mixtral", "qwen2_moe", "qwen3_moe"}
NOT_HERE = {"minimax"}  # a cache of its own
ROPES = {
    "llama_dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    "phi3_long": (
        "phi3",
        {
            "rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0] * 4, "short_factor": [1.0] * 4,
            "original_max_position_embeddings": 64,
        },
    ),
}  # fmt: skip
SAMPLING = SamplingOptions(max_new_tokens=6, stop_token_id=3, pad_token_id=0)


@functools.cache
def tiny_model(family="llama"):
    base, rope = ROPES.get(family, (family, None))
    config = tiny_config(base, 64)
    config.initializer_range = config.init_std = 0.2
    if rope:
        config.rope_parameters = rope
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def prompts(device, num=4):
    ids = torch.randint(1, 60, (num, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(num, 5, dtype=torch.bool)
    mask[0, :2] = False
    return ids.to(device), mask.to(device), torch.arange(num, device=device)


def make_generator(family="llama", **more):
    """A generator whose weights are on the device that there is now; with `tp_group` this rank's part."""
    model = share_weights(tiny_model(family))
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    if "tp_group" in more:
        cut_module(model, build_cuts(model, 2), distributed.rank(), 2, more["tp_group"])
    return Generator(model.to(distributed.device()), num_slots=3, **more)


def texts(generator, sampling=SAMPLING, num=4):
    found = generator.generate(PromptBatch(*prompts(distributed.device(), num)), sampling)
    return [ids[mask].tolist() for ids, mask in zip(found.response_ids, found.response_mask, strict=True)]


@pytest.mark.parametrize("family", sorted({*CONFIGS, *NOISY, *ROPES} - NOT_HERE))
def test_a_family_is_captured_or_is_known_to_run_plainly(family, capfd):
    expected = texts(make_generator(family))
    with pretended_gpu() as gpu:
        generator = make_generator(family)
        assert texts(generator) == expected
        captured = gpu.launches["a graph"] > 0
        assert captured == bool(gpu.graphs) == (family not in RUN_PLAINLY | MIXTURES)
        said = capfd.readouterr().err
        assert said.count("without CUDA graphs") == (not captured)
        assert texts(generator) == expected and capfd.readouterr().err == "", "it is said once"


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
@pytest.mark.parametrize("family", sorted(MIXTURES))
def test_a_mixture_in_bf16_is_captured_from_hopper_on(family, capability, capfd):
    with pretended_gpu(capability) as gpu:
        generator = make_generator(family)
        generator.model.bfloat16()
        assert texts(generator) == texts(generator)
        assert bool(gpu.graphs) == (capability >= (9, 0))
    assert capfd.readouterr().err.count("_grouped_mm") == (capability < (9, 0))


def test_a_turn_that_goes_on_runs_by_the_same_graphs():
    """Its stop token is read though passes that ran ahead have overwritten it."""

    def texts_of_turns():
        generator, told = make_generator(), []
        inputs = PromptBatch(*prompts(distributed.device()))
        found = generator.generate(
            inputs, sampling, on_turns=lambda ended: told.append(ended) or [[9, 3]] * len(ended)
        )
        assert told and (found.response_mask & ~found.sampled_mask).any()
        return [ids[mask].tolist() for ids, mask in zip(found.response_ids, found.response_mask, strict=True)]

    sampling = dataclasses.replace(SAMPLING, max_new_tokens=16, num_valid_tokens=6)
    expected = texts_of_turns()
    with pretended_gpu() as gpu:
        assert texts_of_turns() == expected and gpu.launches["a graph"] > 0


# ---- which graphs there are, and how long -----------------------------------------------------------------


def test_no_graphs_where_ranks_fetch_weights_in_a_pass_or_none_are_wanted():
    with pretended_gpu() as gpu:
        for more in ({"agree_any": bool}, {"use_cuda_graphs": False}):
            texts(make_generator(**more))
        assert gpu.launches["a graph"] == 0 and not gpu.graphs


def test_the_pass_that_warms_up_leaves_nothing_behind():
    with pretended_gpu():
        graphs, count = DecodeGraphs(torch.nn.Linear(1, 1)), torch.zeros(2, device="cuda")
        graphs.begin(SAMPLING)
        for num_passes in (1, 2):
            graphs.run(1, 1, lambda *_: count.add_(1), [count])
            assert count.tolist() == [num_passes] * 2


def test_each_generator_has_one_stream_of_its_own(monkeypatch):
    with pretended_gpu() as gpu, monkeypatch.context() as patch:
        used = []
        patch.setattr(torch.cuda, "stream", lambda stream: used.append(stream) or contextlib.nullcontext())
        generators = [make_generator(), make_generator("opt")]
        for generator in generators:
            used.clear()
            texts(generator)
            generator.max_length = 100  # a new cache: all is captured anew
            texts(generator)
            generator.streams = {graph.stream for graph in generator._graphs.graphs.values()} | set(used)
        streams = [generator.streams for generator in generators]
        assert [len(own) for own in streams] == [1, 1] and streams[0] != streams[1]
        assert len(gpu.graphs) >= 2


def test_other_sampling_options_keep_the_cache_and_some_graphs():
    samplings = [dataclasses.replace(SAMPLING, temperature=t, max_new_tokens=n)
                 for t, n in ((1.0, 6), (0.5, 6), (1.0, 4), (0.9, 6), (0.8, 6), (0.7, 6))]  # fmt: skip
    expected = [texts(make_generator(), sampling) for sampling in samplings]
    with pretended_gpu() as gpu:
        generator, counts = make_generator(), []
        for sampling, plain in zip(samplings, expected, strict=True):
            assert texts(generator, sampling) == plain
            counts.append(len(gpu.graphs))
            cache = generator._step.cache
        assert counts[0] < counts[1] < counts[2] < counts[3] and counts[5] <= counts[1], "four are kept"
        assert texts(generator, dataclasses.replace(samplings[4], seed=9)) != expected[4]
        assert texts(generator, samplings[5]) == expected[5]
        assert generator._step.cache is cache and len(gpu.graphs) <= 2 * counts[0]


@pytest.mark.parametrize("is_buffer", [False, True])
def test_graphs_are_forgotten_when_a_weight_moves(is_buffer):
    """Or a factor of an adapter, which is a buffer."""
    with pretended_gpu() as gpu:
        generator = make_generator()
        generator.model.lm_head.register_buffer("factor", torch.zeros(3, device="cuda"))
        before = texts(generator)
        kept = set(gpu.graphs)
        assert texts(generator) == before and set(gpu.graphs) == kept
        head = generator.model.lm_head
        weight = head.factor if is_buffer else head.weight
        weight.data = weight.data.clone()
        assert texts(generator) == before and not set(gpu.graphs) & kept


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("end", [None, Stopped("stopped"), RuntimeError("an error")], ids=str)
def test_graphs_go_before_the_process_group(end, monkeypatch):
    alive = []
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pretended_gpu() as gpu, mock.patch.object(dist, "destroy_process_group") as destroy:
        destroy.side_effect = lambda: alive.append(len(gpu.graphs))

        def program():
            generator = make_generator()
            generator.itself = generator  # roles and engines are in such cycles
            texts(generator)
            assert gpu.graphs
            if end:
                raise end

        with pytest.raises((SystemExit, RuntimeError)) if end else contextlib.nullcontext():
            running.run_program(program)
    assert alive == [0]


def be_a_rank(rank: int, folder: Path) -> None:
    """Generate on two ranks; the second time a weight of rank 0 has moved."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    expected = texts(make_generator())
    with pretended_gpu() as gpu:
        generator = make_generator(tp_group=dist.group.WORLD)
        assert texts(generator) == expected
        captured = set(gpu.graphs)
        if rank == 0:
            weight = generator.model.lm_head.weight
            weight.data = weight.data.clone()
        assert texts(generator) == expected
        assert captured and not captured & set(gpu.graphs), "one rank replays what the other captures"
        end = dist.destroy_process_group
        with mock.patch.object(dist, "destroy_process_group", lambda: end() if not gpu.graphs else 1 / 0):
            distributed.stop()


@pytest.mark.slow
def test_ranks_that_compute_together_forget_their_graphs_together(tmp_path):
    torch.multiprocessing.spawn(be_a_rank, (tmp_path,), nprocs=2)


# ---- what the host waits for ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "bloom", "gemma2"])
@pytest.mark.parametrize("on_tokens", [None, lambda sample, ids: False], ids=["rollout", "chat"])
def test_the_host_waits_once_a_look(family, on_tokens, monkeypatch):
    seen = {"_admit": [], "_decode": [], "_finished_slots": [], "_retire": []}

    def watch(name):
        method = getattr(DecodeLoop, name)

        def watched(loop, *args):
            gpu.clear()
            found = method(loop, *args)
            seen[name].append([len(gpu.waits), gpu.launches.total()])
            return found

        monkeypatch.setattr(DecodeLoop, name, watched)

    with pretended_gpu() as gpu:
        generator = make_generator(family)
        texts(generator, num=8)  # captures
        for name in seen:
            watch(name)
        generator.generate(PromptBatch(*prompts("cuda", 8)), SAMPLING, on_tokens=on_tokens)
    waits = {name: {num for num, _ in rows} for name, rows in seen.items()}
    assert waits["_finished_slots"] == {1} and waits["_decode"] == waits["_retire"] == {0}
    assert 0 in waits["_admit"] and max(waits["_admit"]) <= 2, (
        "transformers asks twice whether a mask is full"
    )
    assert {num for _, num in seen["_decode"]} == {1 if on_tokens else 4}, "a pass is one launch"


def count_prefills(device, monkeypatch):
    """Passes that read 128 prompts of 8 to 103 tokens."""
    widths, read = [], DecodeStep.prefill
    monkeypatch.setattr(
        DecodeStep,
        "prefill",
        lambda step, ids, *more: widths.append(ids.shape) or read(step, ids, *more),
    )
    mask = torch.arange(103) >= 103 - torch.arange(128)[:, None] * 3 // 4 - 8
    generator = make_generator()
    generator.num_slots = 128
    one_token = dataclasses.replace(SAMPLING, max_new_tokens=1)
    inputs = [x.to(device) for x in (mask.long(), mask, torch.arange(128))]
    generator.generate(PromptBatch(*inputs), one_token)
    return len(widths)


def test_prompts_are_read_in_few_passes_on_a_gpu(monkeypatch):
    assert count_prefills("cpu", monkeypatch) == 14
    with pretended_gpu():
        assert count_prefills("cuda", monkeypatch) == 4
