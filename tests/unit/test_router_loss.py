"""The loss of routers against float64 sums over tokens, one sequence at a time; what it adds to a step."""

import pytest
import torch
from test_policy_model import build, scored_slots, sequences
from tiny_configs import MIXTURES, tiny_config
from transformers import AutoModelForCausalLM

from common.models.loading import ModelOptions, load_causal_lm
from common.models.model_inputs import build_model_inputs
from common.models.output_head import OutputHead
from common.models.policy_model import PolicyModel
from common.models.router_loss import add_router_loss, router_coefficient
from common.models.value_model import load_value_model

COEFFICIENT = 0.5


def make_policy(family: str, folder, **options) -> PolicyModel:
    model = build(family)
    model.config.router_aux_loss_coef = COEFFICIENT
    model.save_pretrained(folder)
    model = load_causal_lm(ModelOptions(str(folder), **options), 64)
    return PolicyModel(model, num_valid_tokens=64).train()


def routers(policy: PolicyModel) -> list[torch.nn.Module]:
    return [m for m in policy.modules() if type(m).__name__.endswith("TopKRouter")]


def run_pass(policy: PolicyModel, rows: list[torch.Tensor], is_packed: bool, **more) -> torch.Tensor:
    """Return the negative log-likelihood of all tokens of the rows but their first."""
    lengths = torch.tensor([len(row) for row in rows])
    inputs = build_model_inputs(torch.cat(rows), lengths, is_packed=is_packed, **more)
    slots, token_ids = scored_slots(rows, inputs)
    return policy(inputs, slots, token_ids, OutputHead.nll_sum)


def expected_loss(policy: PolicyModel, rows: list[torch.Tensor], num_skipped: int = 0) -> float:
    """E sum_e f_e P_e; of rows after the first the first `num_skipped` tokens do not count."""
    seen: list[torch.Tensor] = []
    hooks = [m.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for m in routers(policy)]
    counts, probabilities, num_tokens = torch.zeros(4).double(), torch.zeros(4).double(), 0
    for number, row in enumerate(rows):
        seen.clear()
        with torch.no_grad():
            policy.causal_lm(row[None])
        assert len(seen) == 2, "a router in each layer"
        for hidden, router in zip(seen, routers(policy), strict=True):
            logits = hidden.reshape(-1, 32).double() @ router.weight.double().T
            for token in logits[num_skipped if number else 0 :]:
                chances = token.exp() / token.exp().sum()
                probabilities += chances
                counts[chances.argsort()[-2:]] += 1  # two are chosen
                num_tokens += 1
    for hook in hooks:
        hook.remove()
    return float(4 * (counts / num_tokens * probabilities / num_tokens).sum())


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("family", MIXTURES)
def test_router_loss_equals_a_loop_over_tokens(family, is_packed, tmp_path):
    """Padding does not count: the last layer's router sees it, as ours are padded to the longest."""
    policy, rows = make_policy(family, tmp_path), sequences()
    expected = expected_loss(policy, rows)
    run_pass(policy, rows, is_packed)
    assert float(policy.router_loss) == pytest.approx(expected, abs=1e-5)
    padded = [torch.cat([row, row.new_zeros(9 - len(row))]) for row in rows]
    assert abs(expected_loss(policy, padded) - expected) > 1e-4, "with padding it is another number"


def test_router_loss_counts_a_shared_prompt_once(tmp_path):
    policy, rows = make_policy("mixtral", tmp_path), sequences()
    rows = [torch.cat([rows[2], rows[0]]), torch.cat([rows[2], rows[3]])]
    run_pass(policy, rows, True, group_sizes=torch.tensor([2]))
    assert float(policy.router_loss) == pytest.approx(expected_loss(policy, rows, num_skipped=9), abs=1e-5)
    assert abs(expected_loss(policy, rows) - float(policy.router_loss)) > 1e-4


@pytest.mark.parametrize("family", MIXTURES)
def test_router_loss_of_a_step_is_weighted_by_loss_items(family, tmp_path):
    policy, rows = make_policy(family, tmp_path), sequences()
    nll = run_pass(policy, rows, False)
    router_loss = policy.router_loss
    loss, stats = add_router_loss(policy, nll, None, lambda _: 14.0)
    assert float(loss) == pytest.approx(float(nll + COEFFICIENT * 14 * router_loss))
    assert float(stats["router_loss"]) == pytest.approx(14 * float(router_loss))
    assert not stats["router_loss"].requires_grad and policy.router_loss is None
    weights = [router.weight for router in routers(policy)]
    added = torch.autograd.grad(COEFFICIENT * 14 * router_loss, weights, retain_graph=True)
    whole = torch.autograd.grad(loss, weights)
    alone = torch.autograd.grad(run_pass(policy, rows, False), weights)
    for found, a, b in zip(whole, alone, added, strict=True):
        torch.testing.assert_close(found, a + b)
        assert b.norm() > 1e-4


@pytest.mark.parametrize("is_packed", [False, True])
def test_router_loss_is_unchanged_by_gradient_checkpointing(is_packed, tmp_path):
    results = []
    for name in ("plain", "recomputed"):
        policy = make_policy("qwen3_moe", tmp_path / name, gradient_checkpointing=name != "plain")
        loss, _ = add_router_loss(policy, run_pass(policy, sequences(), is_packed), None, lambda _: 14.0)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in policy.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_router_loss_is_none_without_gradients_experts_or_coefficient(tmp_path):
    """In evaluation, without gradients, of dense layers, of a dense model, without a coefficient."""
    policy, rows = make_policy("mixtral", tmp_path), sequences()
    with torch.no_grad():
        run_pass(policy, rows, False)
    assert policy.router_loss is None
    run_pass(policy.eval(), rows, False)
    assert policy.router_loss is None
    config = tiny_config("qwen3_moe", 64)
    config.mlp_only_layers = [0, 1]
    dense = PolicyModel(AutoModelForCausalLM.from_config(config), num_valid_tokens=64).train()
    loss = run_pass(dense, rows, False)
    assert dense.router_coefficient > 0 and add_router_loss(dense, loss, None, len) == (loss, {})
    config.router_aux_loss_coef = 0.0
    assert router_coefficient(AutoModelForCausalLM.from_config(config)) == 0.0
    assert router_coefficient(build("llama")) == 0.0


@pytest.mark.parametrize(("coefficient", "is_narrowed"), [(0.0, True), (0.001, False)])
def test_router_coefficient_disables_narrowing_of_the_last_layer(coefficient, is_narrowed, tmp_path):
    """Else that layer's would be over the tokens that a head reads."""
    model = build("mixtral")
    model.config.router_aux_loss_coef = coefficient
    model.save_pretrained(tmp_path)
    loaded = load_causal_lm(ModelOptions(str(tmp_path)), 64)
    assert any(hasattr(m, "narrowing") for m in loaded.modules()) == is_narrowed


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("family", MIXTURES)
def test_router_loss_of_a_value_model_is_its_backbones(family, is_packed, tmp_path):
    policy, rows = make_policy(family, tmp_path), sequences()
    run_pass(policy, rows, is_packed)
    values = load_value_model(ModelOptions(str(tmp_path)), 64).train()
    lengths = torch.tensor([len(row) for row in rows])
    inputs = build_model_inputs(torch.cat(rows), lengths, is_packed=is_packed)
    scores = values(inputs, inputs.last_slots)
    torch.testing.assert_close(values.router_loss, policy.router_loss)
    loss, stats = add_router_loss(values, scores.sum(), None, lambda _: 3.0)
    assert float(loss.detach()) == pytest.approx(float(scores.sum() + 3 * COEFFICIENT * policy.router_loss))
    assert stats.keys() == {"router_loss"} and values.router_loss is None
    values.eval()(inputs, inputs.last_slots)
    assert values.router_loss is None
