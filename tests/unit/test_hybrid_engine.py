"""Generation mode: shared weights where they are whole, gathered ones where they are sharded."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common.ds_config import EngineOptions, build_train_config
from common.models import LoraOptions, ModelOptions, add_lora, compute_logits, load_causal_lm
from common.training_loop import build_engine
from step3_ppo.hybrid_engine import HybridEngine

pytestmark = pytest.mark.usefixtures("process_group")
IDS = torch.arange(1, 13).view(2, 6)


def build(folder: str, stage: int, lora_dim: int = 0) -> HybridEngine:
    overrides = {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else {}
    ds_config = build_train_config(EngineOptions(zero_stage=stage, overrides=overrides))
    lora = LoraOptions(dim=lora_dim)
    model = load_causal_lm(ModelOptions(folder, dropout=0.0, ds_config=ds_config), 320)
    engine = build_engine(
        add_lora(model, lora), ds_config, learning_rate=1e-2, weight_decay=0.0,
        lora_learning_rate=1e-2, beta2=0.95,
        schedule="constant", num_warmup_steps=0, num_steps=10,
    )  # fmt: skip

    def build_module():
        plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        return add_lora(plain, lora, draw=False)

    return HybridEngine(engine, build_module)


def train_once(hybrid: HybridEngine) -> None:
    hybrid.engine.train()
    loss = compute_logits(hybrid.engine, IDS, torch.ones_like(IDS)).float().square().mean()
    hybrid.engine.backward(loss)
    hybrid.engine.step()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_whole_weights_are_shared_not_copied(stage, tiny_model_folder):
    hybrid = build(tiny_model_folder("llama"), stage)
    pointers = [p.data_ptr() for p in hybrid.engine.module.parameters()]
    hybrid.engine.train()
    with hybrid.generation_mode() as module:
        assert [p.data_ptr() for p in module.parameters()] == pointers
        assert not module.training
    assert hybrid.engine.module.training


@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom"])  # tied, untied, ALiBi
@pytest.mark.parametrize("lora_dim", [0, 2])
def test_sharded_weights_are_gathered_anew_after_each_update_and_dropped(family, lora_dim, tiny_model_folder):
    hybrid = build(tiny_model_folder(family), 3, lora_dim)
    texts = []
    for _ in range(2):
        hybrid.engine.eval()
        with torch.no_grad():
            expected = compute_logits(hybrid.engine, IDS, torch.ones_like(IDS))
            with hybrid.generation_mode() as module:
                found = compute_logits(module, IDS, torch.ones_like(IDS))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        texts.append(found)
        assert all(p.is_meta for p in hybrid.inference_module.parameters()), "weights must not stay"
        train_once(hybrid)
    assert not texts[0].allclose(texts[1]), "the update must be seen"


@pytest.mark.parametrize("stage", [0, 3])
def test_an_exception_inside_leaves_the_trainer_usable(stage, tiny_model_folder):
    hybrid = build(tiny_model_folder("llama"), stage)
    hybrid.engine.train()
    with pytest.raises(RuntimeError, match="inside"), hybrid.generation_mode():
        raise RuntimeError("inside")
    assert hybrid.engine.module.training
    if stage == 3:
        assert all(p.is_meta for p in hybrid.inference_module.parameters()), "weights must not stay"
    train_once(hybrid)
