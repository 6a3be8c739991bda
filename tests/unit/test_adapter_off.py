"""With LoRA the reference is the actor with its adapter off: what it was before it learned."""

import pytest
import torch
from records import make_record

from common.engine.ds_config import EngineOptions, build_train_config
from common.engine.engine_step import LossTerm, update_engine
from common.engine.optim import build_engine
from common.models.loading import ModelOptions, load_causal_lm
from common.models.lora import LoraOptions, add_lora
from common.models.policy_model import PolicyModel
from step1_sft.arguments import SFTArguments
from step3_ppo.response_inputs import build_response_inputs
from step3_ppo.roles import AdapterOff, Policy, Reference


@pytest.mark.parametrize("only_lora", [False, True])
@pytest.mark.usefixtures("process_group")
def test_the_reference_stays_what_the_actor_was(only_lora, tiny_model_folder):
    model = load_causal_lm(ModelOptions(tiny_model_folder("llama"), dropout=0.0), 320)
    policy = PolicyModel(add_lora(model, LoraOptions(4, only_optimize_lora=only_lora)), num_valid_tokens=320)
    engine = build_engine(
        policy,
        build_train_config(EngineOptions()),
        SFTArguments(learning_rate=1e-2, lora_learning_rate=1e-2, lr_scheduler_type="constant"),
        9,
    )
    reference = Reference(AdapterOff(engine), is_packed=False)
    record = make_record([0, 1], [3, 2], [4, 2])
    (before,) = reference.score([record])

    def sums(batch):
        inputs = build_response_inputs(batch, is_packed=False)
        return -engine(inputs.inputs, inputs.slots, inputs.token_ids)[0].sum(), {}

    for _ in range(3):
        update_engine(engine, [LossTerm("x", [record], sums, lambda batch: 6.0)])
    (after,) = reference.score([record])
    engine.eval()
    with torch.no_grad():
        moved = Policy(is_packed=False).compute_logprobs(engine, record)[0]
    assert after.equal(before)
    assert (moved - before).abs().max() > 0.1
