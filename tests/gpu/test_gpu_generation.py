"""Captured passes, the sampler and attention's kernels on a CUDA device."""

import pytest
import test_attention_kernels as kernels
import test_decode_graphs as decoding
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.generation.decode import SamplingOptions
from common.generation.generate import Generator, PromptBatch
from common.generation.inference_module import share_weights
from common.models.attention import takes_packed
from common.models.loading import ModelOptions, load_causal_lm
from common.models.sampling import counter_uniform, sample_tokens
from common.ranks import distributed

GREEDY = SamplingOptions(max_new_tokens=40, stop_token_id=-1, pad_token_id=0, do_sample=False)
LIMITS = torch.tensor([3, 40, 17, 29, 8, 40])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=512, initializer_range=0.2)  # fmt: skip
    return LlamaForCausalLM(config).eval()


def run(generator, device):
    ids = torch.arange(1, 61, device=device).view(6, 10)
    limits = LIMITS.to(device)
    batch = PromptBatch(ids, torch.ones_like(ids), torch.arange(6, device=device), limits)
    return generator.generate(batch, GREEDY)


def test_texts_are_those_of_the_cpu_and_graphs_stay(model):
    expected = run(Generator(model, num_slots=4), torch.device("cpu"))
    on_gpu = LlamaForCausalLM(model.config).eval().cuda()
    on_gpu.load_state_dict(model.state_dict())
    generator = Generator(share_weights(on_gpu), num_slots=4)
    captured = []
    for _ in range(2):
        found = run(generator, torch.device("cuda"))
        assert found.response_ids.cpu().equal(expected.response_ids)
        torch.testing.assert_close(found.logprobs.cpu(), expected.logprobs, atol=1e-4, rtol=0)
        captured.append(dict(generator._step._graphs.graphs))
    assert captured[0] and captured[0] == captured[1]


def test_an_update_in_place_is_seen_by_the_graphs(model):
    on_gpu = LlamaForCausalLM(model.config).eval().cuda()
    on_gpu.load_state_dict(model.state_dict())
    generator = Generator(share_weights(on_gpu), num_slots=4)
    run(generator, torch.device("cuda"))
    with torch.no_grad():
        for parameter in on_gpu.parameters():
            parameter.mul_(1.1)
        for parameter in model.parameters():
            parameter.mul_(1.1)
    expected = run(Generator(model, num_slots=4), torch.device("cpu"))
    assert run(generator, torch.device("cuda")).response_ids.cpu().equal(expected.response_ids)


def test_the_sampler_chooses_the_tokens_of_a_cpu():
    logits = torch.randn(256, 5000, generator=torch.Generator().manual_seed(0))
    numbers = torch.arange(256)
    uniforms = counter_uniform(5, numbers, numbers)
    assert torch.equal(counter_uniform(5, numbers.cuda(), numbers.cuda()).cpu(), uniforms)
    for options in ({}, {"top_k": 4}, {"temperature": 1.3, "top_k": 6, "top_p": 0.85}):
        on_gpu = sample_tokens(logits.cuda(), uniforms.cuda(), **options).token_ids.cpu()
        # exp differs in its last bit, which moves a border between tokens by about 1e-7
        assert (on_gpu != sample_tokens(logits, uniforms, **options).token_ids).sum() <= 1


@pytest.mark.real_gpu
@pytest.mark.parametrize("family", sorted({*decoding.CONFIGS, *decoding.ROPES}))
def test_graphs_and_plain_passes_give_the_same_texts(family):
    by_graphs, plainly = (decoding.make_generator(family, use_cuda_graphs=use) for use in (True, False))
    for generator in (by_graphs, plainly) if family in decoding.MIXTURES else ():
        generator.model.bfloat16()
    assert decoding.texts(by_graphs) == decoding.texts(plainly)
    reads_sizes = family in decoding.MIXTURES and torch.cuda.get_device_capability() < (9, 0)
    assert by_graphs._graphs.is_capturable == (family not in decoding.RUN_PLAINLY and not reads_sizes)


@pytest.mark.real_gpu
@pytest.mark.parametrize("family", kernels.FAMILIES)
@torch.no_grad()
def test_a_kernel_computes_what_plain_attention_does(family, tiny_model_folder, figures):
    folder = tiny_model_folder(family)
    with distributed.on_cpu():
        expected = kernels.compute_logprobs(kernels.load_plain(folder))
    model = load_causal_lm(ModelOptions(folder, "bf16"), 320).to("cuda").eval()
    for is_packed in {False, takes_packed(model)}:
        found = kernels.compute_logprobs(model, is_packed=is_packed)
        name = f"{family}, {model.config._attn_implementation}{', packed' if is_packed else ''}"
        figures.setdefault("bf16_attention_error", {})[name] = float((found - expected).abs().max())
        assert kernels.is_near(found, expected)
