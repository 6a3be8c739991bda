"""One optimizer step is taken on the exact mean over the global batch."""

import math
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from pretended_gpu import pretended_gpu

from common.engine import engine_step
from common.engine.ds_config import build_config, build_engine
from common.engine.engine_step import Gradients, LossTerm, compute_gradients, take_steps
from common.ranks.failures import StepSkipped
from common.runs.export import gather_state_dict
from common.runs.saved_state import EngineState, TensorReader, write_slices
from step1_sft.arguments import SFTArguments

pytestmark = pytest.mark.usefixtures("process_group")
# Micro-batches of very different sizes: a mean of their means is another number.
MICRO_BATCHES = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0], [0.5, 0.5], [2.0, 2.0]])]


def build(stage: int = 0, accumulation: int = 2, learning_rate: float = 0.1, schedule: str = "constant"):
    """An engine over one linear layer with known weights, and plain SGD's view of it."""
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -0.25]]))
    return build_engine(
        model,
        build_config(
            zero_stage=stage,
            overrides={"gradient_accumulation_steps": accumulation, "gradient_clipping": 0.0},
        ),
        SFTArguments(learning_rate=learning_rate, lr_scheduler_type=schedule),
        10,
    )


def squared_sums(engine):
    return lambda batch: (engine(batch).square().sum(), {"mean_output": engine(batch).detach().sum()})


def term(engine, **more) -> LossTerm:
    return LossTerm("loss", MICRO_BATCHES, squared_sums(engine), lambda batch: len(batch), **more)


def update_engine(engine, terms: list[LossTerm]) -> dict[str, float]:
    return take_steps([compute_gradients(engine, terms)])[0]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_gradient_is_that_of_the_global_mean(stage):
    engine = build(stage)
    means = update_engine(engine, [term(engine)])
    rows = torch.cat(MICRO_BATCHES)
    weight = torch.tensor([[0.5, -0.25]], requires_grad=True)
    outputs = rows @ weight.T
    loss = outputs.square().mean()
    (gradient,) = torch.autograd.grad(loss, weight)
    assert means["loss"] == pytest.approx(float(loss), abs=1e-6)
    assert means["mean_output"] == pytest.approx(float(outputs.mean()), abs=1e-6)
    assert means["grad_norm"] == pytest.approx(float(gradient.norm()), abs=1e-5)
    assert means["learning_rate"] == pytest.approx(0.1)
    mean_of_means = sum((m @ weight.T).square().mean() for m in MICRO_BATCHES) / 2
    assert abs(float(mean_of_means) - means["loss"]) > 0.1, "the wrong form must be another number"
    # AdamW's first step moves each weight by the learning rate against the gradient's sign.
    expected = torch.tensor([[0.5, -0.25]]) - 0.1 * gradient.sign()
    torch.testing.assert_close(engine.module.weight.data, expected, atol=1e-4, rtol=0)


def test_items_may_weigh_less_than_1_together():
    """As the pairs of one prompt of which a batch has a part."""
    means = []
    for weight in (0.1, 1.0):
        engine = build()
        some = LossTerm("loss", MICRO_BATCHES, squared_sums(engine), lambda batch, w=weight: w * len(batch))
        means.append(update_engine(engine, [some])["loss"])
    assert means[0] == pytest.approx(10 * means[1], rel=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loaded_engine_goes_on_as_the_saved_one(stage, tmp_path):
    """Weights, moments and their step, schedule and counters: each shows in the updates or in the numbers."""
    saved, loaded = (build(stage, schedule="linear") for _ in range(2))
    for _ in range(2):
        update_engine(saved, [term(saved)])
    state = EngineState(saved)
    write_slices(tmp_path / "pieces", state.tensor_slices())
    EngineState(loaded).load(TensorReader([tmp_path / "pieces"]), state.json_state())
    assert EngineState(loaded).json_state() == state.json_state() and loaded.global_steps == 2
    for _ in range(2):
        assert update_engine(loaded, [term(loaded)]) == update_engine(saved, [term(saved)])
    assert torch.equal(gather_state_dict(loaded.module)["weight"], gather_state_dict(saved.module)["weight"])


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_parameter_of_another_size_is_refused(stage, tmp_path):
    """A longer one too: its first elements are not this one's."""
    saved, loaded = (
        EngineState(build_engine(model, build_config(zero_stage=stage), SFTArguments(), 10))
        for model in (torch.nn.Linear(3, 1, bias=False), torch.nn.Linear(2, 1, bias=False))
    )
    write_slices(tmp_path / "pieces", saved.tensor_slices())
    with pytest.raises(ValueError, match="it holds 3 elements of weight:weight, not 2"):
        loaded.load(TensorReader([tmp_path / "pieces"]), saved.json_state())


def test_weights_that_are_not_here_are_not_left_out_of_a_checkpoint():
    """As where DeepSpeed has swapped a partition to a disk."""
    state = EngineState(build(3))
    state.segments[0].owner.data = torch.empty(0)
    with pytest.raises(AssertionError, match="weight: 2 elements are owned, 0 are here"):
        list(state.tensor_slices())


def test_terms_are_weighted_and_each_has_its_own_denominator():
    engine = build()
    second = LossTerm("other", MICRO_BATCHES[1:], squared_sums(engine), lambda batch: 5.0, weight=3.0)
    means = update_engine(engine, [term(engine), second])
    weight = torch.tensor([[0.5, -0.25]], requires_grad=True)
    first_loss = (torch.cat(MICRO_BATCHES) @ weight.T).square().mean()
    second_loss = (MICRO_BATCHES[1] @ weight.T).square().sum() / 5
    (gradient,) = torch.autograd.grad(first_loss + 3.0 * second_loss, weight)
    assert means["other"] == pytest.approx(float(second_loss), abs=1e-6)
    assert means["grad_norm"] == pytest.approx(float(gradient.norm()), abs=1e-5)


def test_a_statistic_may_have_its_own_number_of_items():
    engine = build()

    def sums(batch):
        is_counted = batch[:, 0] > 0.75  # one row of each micro-batch but for the last row
        pair = (batch[:, 1][is_counted].sum(), is_counted.sum())
        none = (batch.sum() * 0, is_counted.sum() * 0)
        return engine(batch).square().sum(), {"of_some": pair, "of_none": none, "of_all": batch.sum()}

    means = update_engine(engine, [LossTerm("loss", MICRO_BATCHES, sums, len)])
    assert means["of_some"] == pytest.approx((2.0 - 1.0 + 2.0) / 3)
    assert "of_none" not in means, "nothing has no mean"
    assert means["of_all"] == pytest.approx(10.0 / 4)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_rows_without_an_item_make_no_step(stage):
    """Weights, moments, schedule and counters are as if they had not been there, though momentum would move
    the weights.
    """
    with_them, without = (build(stage, schedule="linear") for _ in range(2))
    for engine in (with_them, without):
        update_engine(engine, [term(engine)])
    nothing = LossTerm("loss", MICRO_BATCHES, squared_sums(with_them), lambda batch: 0.0)
    for terms in ([nothing], [term(with_them), nothing]):
        with pytest.raises(StepSkipped, match="no token of this step"):
            compute_gradients(with_them, terms)
    assert EngineState(with_them).json_state() == EngineState(without).json_state()
    for _ in range(2):
        assert update_engine(with_them, [term(with_them)]) == update_engine(without, [term(without)])
    weights = [gather_state_dict(engine.module)["weight"] for engine in (with_them, without)]
    assert torch.equal(*weights)


def test_two_ranks_of_equal_batches_make_the_step_of_one(monkeypatch):
    """DeepSpeed averages over the one rank that is there; the other's sums are this one's again."""
    one, two = build(), build()
    alone = update_engine(one, [term(one)])
    monkeypatch.setattr(engine_step.distributed, "world_size", lambda: 2)
    monkeypatch.setattr(engine_step.distributed, "reduce_sum", lambda sums: 2 * sums)
    assert update_engine(two, [term(two)]) == alone
    torch.testing.assert_close(two.module.weight.data, one.module.weight.data)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_rates_are_those_of_the_step_and_adapters_have_their_own(stage):
    model = torch.nn.ModuleDict({"plain": torch.nn.Linear(2, 1), "lora_a": torch.nn.Linear(2, 1)})
    engine = build_engine(
        model,
        build_config(zero_stage=stage, overrides={"gradient_accumulation_steps": 2}),
        SFTArguments(learning_rate=0.1, lora_learning_rate=0.5, lr_scheduler_type="linear"),
        4,
    )
    model.forward = lambda x: model["plain"](x) + model["lora_a"](x)
    for share_left in (1.0, 0.75, 0.5):
        means = update_engine(engine, [term(engine)])
        rates = means["learning_rate"], means["lora_learning_rate"]
        assert rates == pytest.approx((0.1 * share_left, 0.5 * share_left))


# ---- A step that is refused

SETUPS = [(0, "fp32", "none"), (1, "bf16", "none"), (2, "fp32", "none"), (3, "fp32", "none")]
SETUPS += [(1, "fp32", "optimizer"), (2, "bf16", "optimizer"), (3, "fp32", "optimizer"), (3, "bf16", "all")]


def spoil_loss(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.sum() * float("nan")


def spoil_slope(outputs: torch.Tensor) -> torch.Tensor:
    """The root's slope at 0 is infinite, the loss is finite."""
    return (outputs * 0).abs().sqrt().sum()


GRADIENT = "^not finite: the gradient's norm"
# What is spoilt in which micro-batch, and the message.
SPOILERS = {
    "NaN in the first loss": (spoil_loss, 0, "^not finite: loss"),
    "NaN in the last gradient": (spoil_slope, 1, GRADIENT),
}


class Net(torch.nn.Sequential):
    """Two layers with a vector in between: two parameter groups, and shards that end within a parameter."""

    def __init__(self):
        super().__init__(torch.nn.Linear(2, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator)


class Trained:
    """An engine, and steps on good and on bad batches."""

    def __init__(
        self, stage: int, dtype: str, offload: str, muon_learning_rate: float | None = None, **more
    ) -> None:
        """`muon_learning_rate`: of Muon; without it the optimizer is AdamW."""
        overrides = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5} | more.pop("overrides", {})
        config = build_config(zero_stage=stage, dtype=dtype, offload=offload, overrides=overrides, **more)
        args = SFTArguments(
            learning_rate=0.01,
            weight_decay=0.1,
            optimizer="adamw" if muon_learning_rate is None else "muon",
            muon_learning_rate=muon_learning_rate,
            lr_scheduler_type="constant",
        )
        self.engine = build_engine(Net(), config, args, 10)
        self.dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
        self.state = EngineState(self.engine)

    def gradients(self, scale: float, spoil=None, at: int = 0) -> Gradients:
        """Those of the batches times `scale`; `spoil` gives the loss of micro-batch `at`."""

        def sums(batch):
            outputs = self.engine((batch * scale).to(self.engine.device, self.dtype))
            is_bad = spoil and batch is MICRO_BATCHES[at]
            return (spoil(outputs) if is_bad else outputs.square().sum()), {}

        return compute_gradients(self.engine, [LossTerm("loss", MICRO_BATCHES, sums, len)])

    def snapshot(self) -> tuple[dict[str, torch.Tensor], dict]:
        """All that moves, but for DeepSpeed's counters of steps and samples."""
        tensors = {f"{p.key}@{p.start}": p.tensor.detach().cpu().clone() for p in self.state.tensor_slices()}
        tensors |= {f"model {n}": w.clone() for n, w in gather_state_dict(self.engine.module).items()}
        return tensors, {k: v for k, v in self.state.json_state().items() if k != "counters"}


def assert_equal_snapshots(found, expected) -> None:
    assert found[1] == expected[1]
    assert found[0].keys() == expected[0].keys()
    for name, tensor in expected[0].items():
        assert torch.equal(found[0][name], tensor), name


@pytest.mark.parametrize("what", SPOILERS)
@pytest.mark.parametrize(("stage", "dtype", "offload"), SETUPS)
def test_a_refused_step_leaves_no_trace(stage, dtype, offload, what):
    """Nor does the good step of another engine that is to be made with it, before it or after it."""
    clean, disturbed, beside = (Trained(stage, dtype, offload) for _ in range(3))
    spoil, at, message = SPOILERS[what]
    for scale in (1.0, 0.5, 2.0):
        before = disturbed.snapshot()
        with pytest.raises(StepSkipped, match=message) as caught:
            both = [beside.gradients(3.0), disturbed.gradients(3.0, spoil, at)]
            take_steps(both if scale < 2.0 else both[::-1])
        assert caught.value.batches == MICRO_BATCHES
        assert_equal_snapshots(disturbed.snapshot(), before)
        assert_equal_snapshots(beside.snapshot(), before)
        expected = take_steps([clean.gradients(scale)])
        assert take_steps([disturbed.gradients(scale), beside.gradients(scale)]) == 2 * expected
        assert_equal_snapshots(disturbed.snapshot(), clean.snapshot())
        assert_equal_snapshots(beside.snapshot(), clean.snapshot())
        moved = any(not torch.equal(disturbed.snapshot()[0][n], before[0][n]) for n in before[0])
        assert moved, "a step that moves nothing shows nothing"


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype", "offload"), SETUPS)
def test_a_refused_step_leaves_no_trace_on_a_gpu(stage, dtype, offload):
    with pretended_gpu():
        for what in SPOILERS:
            test_a_refused_step_leaves_no_trace(stage, dtype, offload, what)


@pytest.mark.parametrize(("stage", "offload"), [(2, "none"), (3, "none"), (3, "optimizer")])
def test_sums_of_gradients_in_fp32_are_dropped_with_a_refused_step(stage, offload):
    more = {"overrides": {"data_types": {"grad_accum_dtype": "fp32"}}}
    clean, disturbed = (Trained(stage, "bf16", offload, **more) for _ in range(2))
    with pytest.raises(StepSkipped):
        take_steps([disturbed.gradients(3.0, spoil_slope, 1)])
    assert take_steps([disturbed.gradients(1.0)]) == take_steps([clean.gradients(1.0)])
    assert_equal_snapshots(disturbed.snapshot(), clean.snapshot())


class HalfPrecisionEngine:
    """As much of an engine in fp16, which no CPU has, as leaving out a step meets; its scaler is real."""

    def __init__(self, scale: float) -> None:
        self.optimizer = SimpleNamespace(
            loss_scaler=DynamicLossScaler(scale, 100, 1.0, delayed_shift=1, consecutive_hysteresis=False),
            overflow=False,
            scaled_global_norm=None,
        )

    def zero_optimization(self) -> bool:
        return True

    def fp16_enabled(self) -> bool:
        return True

    def step(self) -> None:
        """What ZeRO's step does with a norm that is infinite."""
        zero = self.optimizer
        zero.overflow = not math.isfinite(zero.scaled_global_norm())
        zero.loss_scaler.update_scale(zero.overflow)


@pytest.mark.parametrize("scale", [1.0, 1024.0], ids=["lowest", "higher"])
def test_what_is_refused_in_fp16_and_that_it_says_nothing_about_the_scale(scale):
    """An overflow is refused where the scale cannot fall; else DeepSpeed skips the step and halves it."""
    engine = HalfPrecisionEngine(scale)
    before = dict(vars(engine.optimizer.loss_scaler))
    for _ in range(3):
        engine_step.skip_step(engine)
        assert engine.optimizer.overflow and engine.optimizer.scaled_global_norm is None
        assert vars(engine.optimizer.loss_scaler) == before
    engine.optimizer.param_groups = []
    norms = [torch.tensor(math.inf)]
    gradients = Gradients(engine, [LossTerm("loss", [], len, len)], {"loss": 1.0}, math.inf, norms)
    if scale == 1.0:
        with pytest.raises(StepSkipped, match=GRADIENT):
            take_steps([gradients])
    else:
        assert take_steps([gradients]) == [{"loss": 1.0, "grad_norm": math.inf}]
        assert engine.optimizer.loss_scaler.cur_scale == scale / 2


@pytest.mark.parametrize("stage", [1, 2])
def test_an_engine_in_fp16_halves_its_scale_and_raises_at_the_lowest(stage):
    """Gradients that overflow at every scale: steps are skipped down to scale 1, where it is an error."""
    with pretended_gpu():
        model = torch.nn.Linear(2, 1, bias=False)
        overrides = {"fp16": {"initial_scale_power": 2, "hysteresis": 1}, "gradient_clipping": 0.0}
        config = build_config(zero_stage=stage, dtype="fp16", overrides=overrides)
        engine = build_engine(model.half(), config, SFTArguments(learning_rate=0.1), 10)
        (weight,) = engine.module.parameters()
        before, scales = weight.detach().clone(), []
        batch = torch.tensor([[300.0, 1.0]], dtype=torch.float16, device=weight.device)
        # A finite loss of about 1e5, whose gradient is above fp16's 65,504.
        terms = [LossTerm("loss", [batch], lambda b: (engine(b).float().sum() * 1e3, {}), lambda b: 1.0)]
        with pytest.raises(StepSkipped, match=GRADIENT):
            for _ in range(5):
                scales.append(engine.optimizer.loss_scaler.cur_scale)
                assert math.isinf(update_engine(engine, terms)["grad_norm"])
        assert scales == [4.0, 2.0, 1.0] and weight.equal(before)
        engine.destroy()
