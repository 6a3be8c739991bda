"""A PPO step whose actor, critic, reference and reward model are adapters: their base is held once."""

from collections import defaultdict
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from pretended_gpu import pretended_gpu
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.bench_ppo_step import our_step
from common.models.loading import ModelOptions, load_causal_lm
from common.models.lora import LoraOptions, add_lora
from common.models.value_model import load_value_model
from common.ranks import watchdog
from common.runs.export import save_adapter

pytestmark = pytest.mark.usefixtures("process_group")
# Matrices are nearly all of the model, and activations are small beside them.
SIZES = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 4}
PHASES = {"the generation", "the scores of the reference", "the scores of the critic"}
PHASES |= {"the scores of the reward model", "the update of the actor", "the update of the critic"}


@pytest.fixture
def adapters(tmp_path, make_tokenizer):
    """Return (folders of the adapters of actor, critic and reward model; number of weights of their base)."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=320, num_key_value_heads=4, **SIZES))
    base.save_pretrained(tmp_path / "base")
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    options, lora = ModelOptions(str(tmp_path / "base"), dropout=0.0), LoraOptions(4)
    for role in ("actor", "critic", "reward"):
        model = load_value_model(options, 320, lora, seed=0).classifier if role != "actor" else None
        model = model or add_lora(load_causal_lm(options, 320), lora)
        save_adapter(tmp_path / role, model, tokenizer, {})
    folders = {role: str(tmp_path / role) for role in ("actor", "critic", "reward")}
    return folders, sum(p.numel() for p in base.parameters())


def peaks_of_phases(folders: dict[str, str], **flags) -> dict[str, float]:
    """Return the largest number of bytes on a pretended GPU in each phase of the second of two steps."""
    peaks: dict[str, float] = defaultdict(float)
    begin = watchdog.phase

    @contextmanager
    def phase(name, *args, **more):
        gpu.peak = gpu.allocated
        with begin(name, *args, **more):
            yield
        peaks[name] = max(peaks[name], gpu.peak)

    prompts = [{"row_id": str(i), "input_ids": list(range(4 + i, 12 + i))} for i in range(8)]
    own = {"actor_model_name_or_path": folders["actor"], "critic_model_name_or_path": folders["critic"]}
    own |= {"max_prompt_seq_len": 16, "max_answer_seq_len": 8, "per_device_training_batch_size": 2}
    own |= {"actor_lora_dim": 4, "critic_lora_dim": 4}
    with pretended_gpu() as gpu, mock.patch.object(watchdog, "phase", phase):
        step = our_step(prompts, folders["reward"], num_prompts=2, **own | flags)
        step()
        peaks.clear()
        step()
    return dict(peaks)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_base_is_held_once_in_every_phase(dtype, adapters):
    folders, num_weights = adapters
    num_bytes = num_weights * (4 if dtype == "fp32" else 2)
    peaks = peaks_of_phases(folders, dtype=dtype)
    merged = peaks_of_phases(folders, dtype=dtype, merge_adapters="true")
    assert peaks.keys() >= PHASES
    for name, peak in peaks.items():
        assert num_bytes < peak < 2 * num_bytes, name
        assert merged[name] - peak > 0.85 * num_bytes, f"{name}: a second copy would be seen"
