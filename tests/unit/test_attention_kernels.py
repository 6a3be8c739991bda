"""Kernels under transformers' models on a pretended GPU, in bf16, against plain attention in fp32.

flash-attn is the stand-in of tests/fakes, torch's kernel that of pretended_gpu.py: both check what they get.
"""

from unittest import mock

import pytest
import torch
import transformers
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from pretended_gpu import pretended_gpu
from tiny_configs import CONFIGS, PADDED_IN_5_23, tiny_config
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from common.generation.decode import DecodeStep, SamplingOptions
from common.generation.generate import Generator, PromptBatch
from common.generation.inference_module import share_weights
from common.generation.kv_cache import SLOT_ATTENTION
from common.models.attention import FLASH_ATTENTION, VARLEN_ATTENTION, choose_attention, takes_packed
from common.models.loading import ModelOptions, load_causal_lm
from common.models.model_inputs import build_model_inputs
from common.models.policy_model import PolicyModel
from common.programs.training_loop import runs_packed
from common.ranks import distributed
from step1_sft.arguments import SFTArguments

FAMILIES = [*CONFIGS, "gpt_neo", "phi3", "starcoder2", "seed_oss", "gemma3"]
# What flash-attn does not serve, what is not told where sequences begin, what generates by torch's attention.
NO_FLASH = {"bloom", "falcon_alibi", "gpt_neo"}
PADDED = NO_FLASH | {"falcon", "falcon_new"} | PADDED_IN_5_23
NO_SLOTS = PADDED | {"gemma2"}
LENGTHS = torch.tensor([7, 1, 12, 4])
GROUPS = torch.tensor([2, 2])  # of sequences that begin alike
# Root mean square of differences in log-probabilities, which differ by about 1 among tokens. bf16 is off by
# up to 0.03 by plain attention, too (Falcon's ALiBi); sequences that see one another by tenths.
TOLERANCE = 0.06


def load_plain(folder):
    """Return the model with eager attention in fp32, and weights as bf16 holds them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    return model.float().eval()


def compute_logprobs(model, *, is_packed=False, lengths=LENGTHS, groups=None):
    """Return log-probabilities of all tokens but each sequence's first."""
    ids = torch.randint(3, 300, (int(lengths.sum()),), generator=torch.Generator().manual_seed(1))
    if lengths is LENGTHS:
        ids[7], ids[20:23] = ids[0], ids[8:11]
    inputs = build_model_inputs(ids, lengths, is_packed=is_packed, group_sizes=groups)
    is_scored = torch.ones(len(ids), dtype=torch.bool)
    is_scored[lengths.cumsum(0) - lengths] = False
    logprobs, _ = PolicyModel(model, num_valid_tokens=320)(
        inputs, inputs.slots_before(is_scored), ids[is_scored]
    )
    return logprobs.cpu()


def generate(model, device):
    """Return each row with its answer, the answers' log-probabilities, and the attention."""
    ids = torch.randint(3, 300, (2, 5), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, :2] = False
    options = SamplingOptions(max_new_tokens=9, stop_token_id=-1, pad_token_id=0)
    shared = share_weights(model)
    inputs = [x.to(device) for x in (ids, mask, torch.arange(2))]
    found = Generator(shared, num_slots=2).generate(PromptBatch(*inputs), options)
    rows = [torch.cat([row[m], a]) for row, m, a in zip(ids, mask, found.response_ids.cpu(), strict=True)]
    return rows, found.logprobs.cpu(), shared.config._attn_implementation


def answer_logprobs(model, row):
    logprobs = model(input_ids=row[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, row[1:, None]).squeeze(1)[-9:]


def is_near(found, expected):
    return bool((found - expected).square().mean().sqrt() < TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_family_computes_with_flash_attn_what_it_computes_without(
    family, tiny_model_folder, install_flash_attn
):
    folder = tiny_model_folder(family)
    plain = load_plain(folder)
    expected = compute_logprobs(plain)
    with pretended_gpu():
        install_flash_attn()
        model = load_causal_lm(ModelOptions(folder, "bf16"), 320).to("cuda").eval()
        assert (model.config._attn_implementation != FLASH_ATTENTION) == (family in NO_FLASH)
        assert is_near(compute_logprobs(model), expected)
        assert takes_packed(model) == (family not in PADDED)
        if family not in PADDED:
            assert is_near(compute_logprobs(model, is_packed=True), expected)
            assert is_near(compute_logprobs(model, is_packed=True, groups=GROUPS), expected)
        rows, logprobs, attention = generate(model, "cuda")
        assert (attention == SLOT_ATTENTION) == (family not in NO_SLOTS)
    assert is_near(logprobs, torch.stack([answer_logprobs(plain, row) for row in rows]))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_family_computes_with_torchs_kernel_what_it_computes_without(
    family, tiny_model_folder, install_flash_attn
):
    folder = tiny_model_folder(family)
    with pretended_gpu():
        install_flash_attn("flash-attn-4")  # which is not used
        model = load_causal_lm(ModelOptions(folder, "bf16"), 320).to("cuda").eval()
        is_packed = family not in NO_SLOTS
        assert takes_packed(model) == (model.config._attn_implementation == VARLEN_ATTENTION) == is_packed
        found = [compute_logprobs(model, is_packed=choice) for choice in {False, is_packed}]
        found.append(compute_logprobs(model, is_packed=is_packed, groups=GROUPS))
        with mock.patch.object(
            DecodeStep, "_additive", side_effect=DecodeStep._additive, autospec=True
        ) as mask:
            rows, logprobs, attention = generate(model, "cuda")
        assert (attention == SLOT_ATTENTION) == is_packed and not (is_packed and mask.called)
    plain = load_plain(folder)
    expected = compute_logprobs(plain)
    assert all(is_near(logprobs, expected) for logprobs in found)
    assert is_near(logprobs, torch.stack([answer_logprobs(plain, row) for row in rows]))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_a_row_that_is_alone_makes_the_host_wait_no_more_than_two(
    family, tiny_model_folder, install_flash_attn
):
    """Where transformers is not told where it begins, it asks the device in every layer."""
    with pretended_gpu() as gpu:
        install_flash_attn()
        model = load_causal_lm(ModelOptions(tiny_model_folder(family), "bf16"), 320).to("cuda").eval()
        waits = []
        for lengths in ([5, 5], [10]):
            gpu.clear()
            compute_logprobs(model, lengths=torch.tensor(lengths))
            waits.append([event.where for event in gpu.waits if event.where.startswith("loading.py")])
    assert waits == [[], []]


@pytest.mark.parametrize(
    ("distribution", "capability", "dtype", "family", "expected"),
    [
        ("flash-attn", (8, 0), "bf16", "llama", FLASH_ATTENTION),
        ("flash-attn", (8, 0), "fp32", "llama", None),
        ("flash-attn", (8, 0), "bf16", "bloom", None),
        ("flash-attn", (7, 5), "fp16", "llama", None),  # neither kernel runs on Turing
        ("flash-attn-4", (8, 0), "bf16", "llama", VARLEN_ATTENTION),  # another package of the same name
        ("", (8, 0), "bf16", "llama", VARLEN_ATTENTION),
        ("", (7, 0), "fp16", "llama", None),
        ("", (8, 0), "bf16", "gemma2", None),  # caps scores inside attention
        ("", (8, 0), "fp32", "llama", None),
    ],
)  # fmt: skip
def test_a_kernel_is_chosen_where_it_can_be_used(
    distribution, capability, dtype, family, expected, install_flash_attn, capfd
):
    config = tiny_config(family, 64)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    distributed.print_once.cache_clear()
    with pretended_gpu(capability=capability):
        if distribution:
            install_flash_attn(distribution)
        for _ in range(2):
            assert choose_attention(model_class, config, dtype) == expected
        told = capfd.readouterr().err.splitlines()
        assert choose_attention(None, config, dtype) is None  # remote code
    is_left_out = distribution == "flash-attn" and dtype != "fp32" and expected != FLASH_ATTENTION
    assert sum("note: flash-attn is installed and not used" in line for line in told) == is_left_out, told


@pytest.mark.parametrize(
    ("kind", "with_flash", "packed_without"),
    [
        (transformers.Gemma4TextConfig, None, None),  # some heads are 512 wide
        (transformers.GptOssConfig, None, None),  # sinks; transformers would fetch a kernel from the hub
        (transformers.DeepseekV3Config, FLASH_ATTENTION, None),  # transformers widens the values
        (transformers.Qwen3Config, FLASH_ATTENTION, VARLEN_ATTENTION),
    ],
)
def test_what_no_kernel_computes_is_left_to_torch(kind, with_flash, packed_without, install_flash_attn):
    model_class, config = MODEL_FOR_CAUSAL_LM_MAPPING[kind], kind()
    with pretended_gpu():
        assert choose_attention(model_class, config, "bf16") == packed_without
        install_flash_attn()
        assert choose_attention(model_class, config, "bf16") == with_flash
        with mock.patch.object(real_accelerator, "ds_accelerator", CPU_Accelerator()):  # DS_ACCELERATOR=cpu
            assert choose_attention(model_class, config, "bf16") == packed_without


def test_rows_that_are_padded_in_spite_of_packed_are_told_once(tiny_model_folder, capfd):
    args = SFTArguments(packed=True, dtype="bf16")
    distributed.print_once.cache_clear()
    for family in ("falcon", "falcon", "llama"):
        with pretended_gpu():
            loaded = load_causal_lm(ModelOptions(tiny_model_folder(family), "bf16"), 320)
            assert runs_packed(args, PolicyModel(loaded, num_valid_tokens=320)) == (family == "llama")
    note = "note: falcon in bf16 cannot run packed rows, so they are padded"
    assert capfd.readouterr().err.count(note) == 1
