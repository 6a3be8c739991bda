"""Muon's step against plain float64, what is Muon's and what AdamW's, and optimizer states in bf16."""

import math

import pytest
import torch
from pretended_gpu import pretended_gpu
from test_engine_step import Trained, assert_equal_snapshots
from tiny_configs import tiny_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from common.engine.ds_config import build_optimizer
from common.engine.engine_step import take_steps
from common.engine.muon import orthogonalise
from common.flags.optimizer import check_optimizer
from common.flags.problems import Problems
from common.ranks.zero3 import OptimizerStates
from common.runs.saved_state import EngineState, TensorReader, write_slices
from step1_sft.arguments import SFTArguments
from step3_ppo.arguments import PPOArguments

RATE, DECAY, MOMENTUM = 0.01, 0.1, 0.95


def of_polynomial(value: float) -> float:
    """A singular value after the five steps, each of which makes a s + b s^3 + c s^5 of it."""
    for _ in range(5):
        value = 3.4445 * value - 4.7750 * value**3 + 2.0315 * value**5
    return value


def iterate(matrix: torch.Tensor) -> torch.Tensor:
    """The same by singular values, in float64: neither a product of Gram matrices nor a transpose."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.square().sum().sqrt()
    return left @ torch.diag(torch.tensor([of_polynomial(float(v)) for v in values]).double()) @ right


def test_singular_values_worked_out_by_hand():
    found = orthogonalise(torch.diag(torch.tensor([3.0, -4.0])))
    # 3/5 and 4/5, the sign stays; after one step of five they were 1.193 and 0.977.
    assert float(found[0, 0]) == pytest.approx(of_polynomial(0.6), abs=1e-5)
    assert float(found[1, 1]) == pytest.approx(-of_polynomial(0.8), abs=1e-5)
    assert 0.68 < of_polynomial(0.6) < 1.2 and 0.68 < of_polynomial(0.8) < 1.2


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (3, 4, 6), (3, 6, 4)], ids=str)
def test_matrices_become_orthogonal(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = orthogonalise(matrices)
    expected = torch.stack([iterate(m) for m in matrices.view(-1, *shape[-2:])]).view(shape)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=0)
    values = torch.linalg.svdvals(found)
    assert 0.3 < float(values.min()) and float(values.max()) < 1.3
    assert orthogonalise(torch.zeros(2, 3)).eq(0).all(), "no gradient is no direction"


ADAPTED = {"actor_lora_dim": 4, "critic_lora_dim": 4}


@pytest.mark.parametrize(
    ("flags", "dtype", "says"),
    [
        (SFTArguments(optimizer="muon", lora_dim=4), "fp32", "or --only_optimize_lora false"),
        (SFTArguments(optimizer="muon", lora_dim=4, only_optimize_lora=False), "fp32", ""),
        (PPOArguments(optimizer="muon", **ADAPTED), "bf16", "muon has no matrix to train"),
        (PPOArguments(optimizer="muon", actor_lora_dim=4), "bf16", ""),  # the critic has
        (SFTArguments(optimizer_dtype="bf16"), "fp32", "needs --dtype bf16, but this run uses fp32"),
        (SFTArguments(optimizer_dtype="bf16", offload="all"), "bf16", "--offload all exclude each other"),
        (SFTArguments(optimizer_dtype="bf16", offload="param"), "bf16", ""),
        (PPOArguments(optimizer_dtype="bf16", critic_offload="optimizer"), "bf16", "--critic_offload opt"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_told_with_the_cure(flags, dtype, says):
    problems = Problems()
    check_optimizer(flags, dtype, problems)
    assert len(problems.messages) == bool(says) and all(says in message for message in problems.messages)


# ---- which weights are Muon's


@pytest.mark.parametrize("auto_class", [AutoModelForCausalLM, AutoModelForSequenceClassification])
@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox", "llama"])
def test_matrices_of_layers_are_muons_and_nothing_else(family, auto_class):
    config = tiny_config(family, 64)
    config.num_labels = 1
    model = auto_class.from_config(config)
    groups = build_optimizer(model, learning_rate=1e-3, optimizer="muon", muon_learning_rate=0.5).param_groups
    (muons,) = (group for group in groups if group["is_muon"])
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)] for p in muons["params"]}
    linear = {name for name, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")}
    heads = {"lm_head", "embed_out", "score"}
    assert found == {f"{name}.weight" for name in linear - heads}
    assert muons["lr"] == 0.5 and {group["lr"] for group in groups} == {0.5, 1e-3}
    assert sum(len(group["params"]) for group in groups) == len(names)


# ---- steps of engines

GRADIENT_SCALES = (1.0, 0.5, 2.0)


def start(stage: int, dtype: str = "fp32", offload: str = "none", optimizer_dtype: str = "fp32") -> Trained:
    return Trained(stage, dtype, offload, muon_learning_rate=0.02, optimizer_dtype=optimizer_dtype)


def expected_weights() -> dict[str, torch.Tensor]:
    """A plain loop over float64 weights: what three steps make of them."""
    model = start(0).engine.module.double()
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    rows = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.5], [2.0, 2.0]]).double()
    for step, scale in enumerate(GRADIENT_SCALES, 1):
        loss = model(rows * scale).square().sum() / len(rows)
        gradients = dict(zip(moments, torch.autograd.grad(loss, list(model.parameters())), strict=True))
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        for name, p in model.named_parameters():
            gradient, (first, second) = gradients[name] * min(0.5 / norm, 1.0), moments[name]
            if name == "0.weight":  # (5, 2); 2.weight is a row, and no matrix
                first.mul_(MOMENTUM).add_(gradient, alpha=1 - MOMENTUM)
                update = iterate(gradient * (1 - MOMENTUM) + first * MOMENTUM)
                rate, update = 0.02, update * 0.2 * math.sqrt(5)
            else:
                first.mul_(0.9).add_(gradient, alpha=0.1)
                second.mul_(0.95).add_(gradient.square(), alpha=0.05)
                update = (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
                rate = RATE
            decay = DECAY if "weight" in name else 0.0
            p.data.mul_(1 - rate * decay).sub_(rate * update)
    return {name: p.detach() for name, p in model.named_parameters()}


SETUPS = [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (1, "optimizer"), (3, "optimizer"), (3, "all")]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("stage", "offload"), SETUPS)
def test_steps_are_those_of_a_plain_loop(stage, offload):
    trained, expected = start(stage, offload=offload), expected_weights()
    for scale in GRADIENT_SCALES:
        (means,) = take_steps([trained.gradients(scale)])
    found = {name.removeprefix("model "): t for name, t in trained.snapshot()[0].items() if " " in name}
    assert means["learning_rate"] == RATE and means["muon_learning_rate"] == 0.02
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name].double(), weight, atol=2e-5, rtol=0, msg=name)


# ZeRO stage, offload, --optimizer_dtype of a run in bf16, and the stage and offload that resume it.
RESUMED = [
    (0, "none", "fp32", 3, "none"),
    (0, "none", "fp32", 1, "none"),
    (3, "none", "fp32", 3, "none"),
    (2, "optimizer", "fp32", 2, "none"),
    (2, "optimizer", "fp32", 2, "optimizer"),
    (1, "none", "bf16", 1, "none"),
    (2, "none", "bf16", 3, "none"),
    (3, "none", "bf16", 3, "none"),
    (3, "param", "bf16", 1, "none"),
]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("stage", "offload", "optimizer_dtype", "later", "later_offload"), RESUMED)
@pytest.mark.parametrize("muon_learning_rate", [0.02, None])
def test_a_run_resumes_to_the_bit_under_another_stage_too(
    muon_learning_rate, stage, offload, optimizer_dtype, later, later_offload, tmp_path
):
    more = {"muon_learning_rate": muon_learning_rate, "optimizer_dtype": optimizer_dtype}
    saved, loaded = Trained(stage, "bf16", offload, **more), Trained(later, "bf16", later_offload, **more)
    take_steps([saved.gradients(1.0)])
    write_slices(tmp_path / "pieces", saved.state.tensor_slices())
    reader = TensorReader([tmp_path / "pieces"])
    kinds = {reader.read(key).dtype for key in reader.index}
    assert kinds == {torch.bfloat16 if optimizer_dtype == "bf16" else torch.float32}
    has_second = any(key == "0.weight:exp_avg_sq" for key in reader.index)
    assert has_second == (muon_learning_rate is None) and "0.weight:exp_avg" in reader.index
    EngineState(loaded.engine).load(reader, saved.state.json_state())
    before = saved.snapshot()
    assert_equal_snapshots(loaded.snapshot(), before)
    (found,), (means,) = (take_steps([trained.gradients(0.5)]) for trained in (loaded, saved))
    if (later, later_offload) == (max(stage, 1), offload):  # others sum norms in another order
        assert found == means
        assert_equal_snapshots(loaded.snapshot(), saved.snapshot())
    assert found == pytest.approx(means, rel=1e-6)
    assert any(not torch.equal(t, before[0][n]) for n, t in saved.snapshot()[0].items())


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("optimizer_dtype", ["fp32", "bf16"])
def test_states_can_wait_on_the_cpu(stage, optimizer_dtype):
    moved, still = (start(stage, "bf16", optimizer_dtype=optimizer_dtype) for _ in range(2))
    states = OptimizerStates(moved.engine)
    for scale in GRADIENT_SCALES:
        states.offload()
        states.reload()
        assert take_steps([moved.gradients(scale)]) == take_steps([still.gradients(scale)])
        assert_equal_snapshots(moved.snapshot(), still.snapshot())


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("optimizer_dtype", ["fp32", "bf16"])
def test_an_update_below_the_last_place_of_bf16_is_lost(optimizer_dtype):
    """AdamW's first one is the learning rate: 1 / 600 of a weight of 1, and 1 / 150 of one of 1 / 4."""
    trained = Trained(1, "bf16", "none", optimizer_dtype=optimizer_dtype)
    for group in trained.engine.optimizer.param_groups:
        group["lr"], group["weight_decay"] = 1 / 600, 0.0
    (flat, *_) = trained.engine.optimizer.single_partition_of_fp32_groups
    before = torch.tensor([1.0, 0.25]).repeat(len(flat) // 2 + 1)[: len(flat)]
    flat.data.copy_(before)
    take_steps([trained.gradients(1.0)])
    is_moved = (flat.data != before)[:15]  # the last one is padding
    assert is_moved.tolist() == [optimizer_dtype == "fp32" or w == 0.25 for w in before[:15].tolist()]


@pytest.mark.usefixtures("process_group")
def test_matrices_are_orthogonalised_in_bf16_on_a_gpu():
    with pretended_gpu():
        trained = start(1)
        take_steps([trained.gradients(1.0)])
        found = trained.snapshot()[0]["model 0.weight"].double()
    on_cpu = start(1)
    before = on_cpu.snapshot()[0]["model 0.weight"].double()
    take_steps([on_cpu.gradients(1.0)])
    apart = (found.cpu() - on_cpu.snapshot()[0]["model 0.weight"].double()).norm()
    assert 1e-6 < apart < 0.03 * (found.cpu() - before).norm()
