"""Memory plans: by hand, against real engines on the CPU, and known facts of DeepSpeed-Chat."""

import gc
import json
from collections.abc import Callable
from pathlib import Path

import deepspeed
import pytest
import torch
import transformers
from tiny_configs import tiny_config
from transformers import AutoModelForCausalLM

from common.engine.ds_config import EngineOptions, build_train_config
from common.engine.optim import build_optimizer
from common.flags.args import Problems
from common.generation.kv_cache import kv_bytes_per_token
from common.models.loading import ModelOptions, load_causal_lm
from common.models.model_inputs import build_model_inputs
from common.models.output_head import LogitOptions, summed_logprobs, token_scores
from common.models.policy_model import PolicyModel
from tools.memory_plan import MemoryPlan, head_bytes, plan_memory
from tools.model_sizes import LiveBytes
from tools.planned_run import Models, PlanArguments, Run, build_run, find_problems, read_models
from tools.step_flags import parse_step_args

GIB = 2**30
OPT = {"vocab_size": 50272, "max_position_embeddings": 2048}
SIZES = {
    "opt-350m": {"hidden_size": 1024, "num_hidden_layers": 24, "ffn_dim": 4096, "num_attention_heads": 16}
    | {"word_embed_proj_dim": 512, "do_layer_norm_before": False},
    "opt-1.3b": {"hidden_size": 2048, "num_hidden_layers": 24, "ffn_dim": 8192, "num_attention_heads": 32}
    | {"word_embed_proj_dim": 2048},
    "opt-13b": {"hidden_size": 5120, "num_hidden_layers": 40, "ffn_dim": 20480, "num_attention_heads": 40}
    | {"word_embed_proj_dim": 5120},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[str], str]:
    """A folder that holds the configuration of that name, and no weights."""
    root = tmp_path_factory.mktemp("configs")

    def save(name: str) -> str:
        if not (root / name).exists():
            config = transformers.OPTConfig(**OPT, **SIZES[name]) if name in SIZES else tiny_config(name, 320)
            config.save_pretrained(root / name)
        return str(root / name)

    return save


MODELS: dict[tuple[str, ...], Models] = {}  # by their flags: to read them takes longest


def make_run(models: tuple[str, ...], flags: tuple[str, ...]) -> Run:
    problems = Problems()
    args = parse_step_args(PlanArguments, [*models, *flags], problems=problems)
    if models not in MODELS:
        MODELS[models] = read_models(args, problems)
    assert not problems.messages and not find_problems(args, MODELS[models])
    return build_run(args, MODELS[models])


def single(folder: str, *flags: str) -> MemoryPlan:
    return plan_memory(make_run(("--stage", "1", "--model_name_or_path", folder), flags))


def ppo(actor: str, critic: str, *flags: str) -> MemoryPlan:
    models = ("--actor_model_name_or_path", actor, "--critic_model_name_or_path", critic)
    return plan_memory(make_run(("--stage", "3", *models), flags))


def items(plan: MemoryPlan, phase: str, verb: str) -> dict[str, float]:
    (moment,) = (m for m in plan.moments if m.phase == phase and m.verb == verb)
    return {item: num_bytes for (_, item), num_bytes in moment.gpu.items()}


# ---- by hand --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "stage", "num_ranks", "weights", "optimizer", "gradients", "copies"),
    [  # bytes a parameter: 16 with 16-bit weights on one rank, whatever the stage
        ("fp32", 0, 1, 4, 8, 4, 0),
        ("bf16", 0, 4, 2, 12 / 4, 2 / 4, 6 / 4),  # runs at stage 1
        ("bf16", 1, 1, 2, 12, 2, 6),
        ("bf16", 2, 4, 2, 12 / 4, 2 / 4, 6 / 4),
        ("fp32", 2, 4, 4, 12 / 4, 4 / 4, 4 / 4),
        ("bf16", 3, 4, 2 / 4, 12 / 4, 2 / 4, 6 / 4),
        ("bf16", 3, 1024, 2 / 1024, 12 / 1024, 2 / 1024, 6 / 1024),
    ],
)
def test_bytes_of_a_parameter(saved, dtype, stage, num_ranks, weights, optimizer, gradients, copies):
    num_params = 331_196_416  # OPT-350M without a score head
    ranks = ("--num_gpus", str(min(num_ranks, 8)), "--num_nodes", str(max(num_ranks // 8, 1)))
    plan = single(saved("opt-350m"), "--zero_stage", str(stage), "--dtype", dtype, *ranks)
    found = items(plan, "train policy", "step")
    small = 0.002 if stage == 3 else 0  # biases and norms stay whole
    assert found["weights"] / num_params == pytest.approx(weights, abs=small)
    assert found["optimizer"] / num_params == pytest.approx(optimizer)
    assert found["gradients"] / num_params == pytest.approx(gradients)
    assert found.get("step's buffers", 0.0) / num_params == pytest.approx(copies)


def test_gradients_are_whole_under_stage_1_and_a_part_under_stage_2(saved):
    one, two = (single(saved("opt-350m"), "--zero_stage", s, "--num_gpus", "4") for s in "12")
    num_params = 331_196_416
    assert items(one, "train policy", "reduce")["gradients"] == 2 * num_params * (1 + 1 / 4)
    assert items(two, "train policy", "reduce")["gradients"] == 2 * num_params / 4
    assert "gradients" not in items(one, "train policy", "backward")  # there are none yet
    more = single(saved("opt-350m"), "--zero_stage", "1", "--gradient_accumulation_steps", "2")
    assert items(more, "train policy", "backward")["gradients"] == 2 * num_params


def test_the_gradients_of_actor_and_critic_wait_for_one_another(saved):
    models = saved("opt-1.3b"), saved("opt-350m")
    plan = ppo(*models, "--actor_zero_stage", "2", "--critic_zero_stage", "2", "--num_gpus", "4")
    waiting = {
        (m.role, m.verb): m.gpu.get(("critic" if m.role == "actor" else "actor", "gradients"), 0.0)
        for m in plan.moments
        if m.phase.startswith("train")
    }
    # bf16, a quarter each: both are made before the actor steps, then the critic
    actor, critic = 2 / 4 * 1_315_758_080, plan.moments[0].gpu["critic", "weights"] / 4
    assert waiting == {
        ("actor", "backward"): 0, ("actor", "reduce"): 0, ("actor", "step"): critic,
        ("critic", "backward"): actor, ("critic", "reduce"): actor, ("critic", "step"): 0,
    }  # fmt: skip


def test_adapters_alone_are_trained(saved):
    flags = ("--lora_dim", "8", "--zero_stage", "2")
    found = items(single(saved("opt-350m"), *flags), "idle", "idle")
    # q, k, v, out: 1024 + 1024; fc1, fc2: 1024 + 4096; project_in, project_out: 512 + 1024
    num_adapter = 8 * (24 * (4 * 2048 + 2 * 5120) + 2 * 1536)
    assert found["optimizer"] == 12 * num_adapter
    assert found["weights"] == 2 * (331_196_416 + num_adapter)


def test_offload_moves_what_it_names(saved):
    flags = ("--zero_stage", "3", "--num_gpus", "2")
    plain, states, everything = (
        single(saved("opt-350m"), *flags, *more) for more in ((), ("--offload", "optimizer"), ("--offload",))
    )
    of = {id(plan): (plan.moments[0].gpu, plan.moments[0].cpu) for plan in (plain, states, everything)}
    weights, optimizer = ("policy", "weights"), ("policy", "optimizer")
    assert of[id(states)][1][optimizer] == of[id(plain)][0][optimizer]
    assert optimizer not in of[id(states)][0] and optimizer not in of[id(plain)][1]
    assert of[id(states)][0][weights] == of[id(plain)][0][weights]
    assert of[id(everything)][0][weights] < 0.01 * of[id(plain)][0][weights]


def test_checkpointing_keeps_a_layers_input(saved):
    flags = ("--per_device_train_batch_size", "8", "--max_seq_len", "512", "--packed")
    plain, saving = (single(saved("opt-1.3b"), *flags, *m) for m in ((), ("--gradient_checkpointing",)))
    activations = [items(p, "train policy", "backward")["activations"] for p in (plain, saving)]
    inputs = 24 * 8 * 512 * 2048 * 2  # layers, tokens, hidden size, bytes
    assert inputs < activations[1] < inputs + 0.25 * activations[0]
    # Korthikanti et al. count 34 s b h a layer with dropout and GELU
    assert 20 < activations[0] / inputs * 2 < 36


def test_keys_and_values_are_slots_by_length(saved):
    folder = saved("opt-1.3b")
    flags = ("--enable_hybrid_engine", "--generation_slots", "32", "--per_device_generation_batch_size", "64")
    plan = ppo(folder, saved("opt-350m"), *flags)
    by_token = kv_bytes_per_token(transformers.AutoConfig.from_pretrained(folder), 2)
    assert by_token == 2 * 24 * 2048 * 2
    assert items(plan, "generate", "generate")["keys and values"] == 32 * 512 * by_token
    assert items(plan, "idle", "idle")["keys and values"] == 32 * 512 * by_token  # kept for the next time
    freed = ppo(folder, saved("opt-350m"), *flags, "--release_inference_cache")
    assert "keys and values" not in items(freed, "idle", "idle")
    assert freed.of_phase("generate").total == plan.of_phase("generate").total


def test_a_slice_is_a_share_of_the_model_and_an_ema_another_copy(saved):
    flags = ("--enable_hybrid_engine", "--actor_zero_stage", "3", "--num_gpus", "8", "--enable_ema")
    plan = ppo(saved("opt-1.3b"), saved("opt-350m"), *flags, "--inference_tp_size", "4")
    found = items(plan, "generate", "generate")
    num_params = 1_315_758_080
    assert found["slices of weights"] == pytest.approx(2 * num_params / 4, rel=0.02)  # positions are whole
    assert found["EMA"] == 4 * num_params / 8


def test_the_reference_is_a_model_of_its_own_unless_there_are_adapters(saved):
    models = saved("opt-1.3b"), saved("opt-350m")
    plain = ppo(*models).moments[0].gpu
    assert plain["reference", "weights"] == plain["actor", "weights"]
    adapted = ppo(*models, "--actor_lora_dim", "8").moments[0].gpu
    assert ("reference", "weights") not in adapted
    away = ppo(*models, "--offload_reference_model").moments[0]
    assert ("reference", "weights") not in away.gpu and away.cpu["reference", "weights"] > 0


def test_the_engines_own_keys_count(saved, tmp_path):
    bucket = {"zero_optimization": {"reduce_bucket_size": 10**6}}
    (tmp_path / "ds.json").write_text(json.dumps(bucket))
    flags = ("--zero_stage", "3", "--num_gpus", "2")
    plain, small = (
        single(saved("opt-350m"), *flags, *more) for more in ((), ("--ds_config", str(tmp_path / "ds.json")))
    )
    assert items(plain, "idle", "idle")["buckets"] == 2 * 5e8  # DeepSpeed's default
    assert items(small, "idle", "idle")["buckets"] == 2 * 1e6


# ---- what must hold for any run -------------------------------------------------------------------------


def test_more_ranks_never_need_more_memory(saved):
    stage = "3"
    totals = []
    for num_ranks in (2, 8, 1024):
        machines = ("--num_gpus", str(min(num_ranks, 8)), "--num_nodes", str(max(num_ranks // 8, 1)))
        zero = ("--actor_zero_stage", stage, "--critic_zero_stage", stage, "--enable_hybrid_engine")
        plan = ppo(saved("opt-1.3b"), saved("opt-350m"), *zero, *machines)
        totals.append([plan.of_phase(m.phase).total for m in plan.moments])
    for fewer, more in zip(totals, totals[1:], strict=False):
        assert all(b <= a * 1.001 for a, b in zip(fewer, more, strict=True))


def test_smaller_passes_and_higher_stages_never_need_more(saved):
    folder = saved("opt-350m")
    batches = [single(folder, "--per_device_train_batch_size", str(n)).peak.total for n in (1, 8, 32)]
    assert batches == sorted(batches)
    idle = [single(folder, "--zero_stage", s, "--num_gpus", "8").moments[0] for s in "0123"]
    without_buckets = [m.total - m.gpu.get(("policy", "buckets"), 0.0) for m in idle]
    assert without_buckets[0] >= without_buckets[1] >= without_buckets[2] > without_buckets[3]


# ---- against reality ------------------------------------------------------------------------------------


def test_the_head_holds_what_is_planned(tmp_path, monkeypatch):
    for module in ("tools.memory_plan", "common.models.output_head"):
        monkeypatch.setattr(f"{module}.CPU_CHUNK_ELEMENTS", 250 * 3000)
    config = transformers.LlamaConfig(
        vocab_size=3000, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    config.save_pretrained(tmp_path)
    hidden, weight = (torch.nn.Parameter(torch.randn(n, 64, dtype=torch.bfloat16)) for n in (1000, 3000))
    ids = torch.zeros(1000, dtype=torch.int64)
    with LiveBytes(torch.nn.ParameterList([hidden, weight])) as live:
        logprobs, entropies = token_scores(hidden, weight, None, ids, LogitOptions(), with_entropy=True)
        (logprobs + entropies).sum().backward()
    models = ("--actor_model_name_or_path", str(tmp_path), "--algorithm", "rloo", "--reward", "http://a/b")
    run = make_run(("--stage", "3", *models), ("--gpu", "cpu", "--dtype", "bf16"))
    assert [role.name for role in run.roles] == ["actor", "reference"]  # who scores is not here
    planned = head_bytes(run, run.actor, 2 * 1000, is_training=True)  # half of the tokens are responses
    assert planned == pytest.approx(live.peak, rel=0.15)


class Everything(LiveBytes):
    """Counts all storages, those of weights too."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Module())


def measure_engine(folder: str, stage: int, dtype: str, is_checkpointed: bool) -> dict[str, int]:
    """Return the most bytes that a real engine holds, by what it does, in its second optimizer step."""
    rows, length, peaks = 2, 64, {}
    with Everything() as live:
        options = ModelOptions(folder, dtype=dtype, gradient_checkpointing=is_checkpointed)
        model = PolicyModel(load_causal_lm(options, 512), num_valid_tokens=512).train()
        num_params = sum(p.numel() for p in model.parameters())
        # A bucket of the model's size: on a CPU no more of it would ever be written to.
        zero = {"zero_optimization": {"reduce_bucket_size": num_params}}
        config = build_train_config(
            EngineOptions(stage, dtype, gradient_accumulation_steps=2, overrides=zero)
        )
        optimizer = build_optimizer(model, learning_rate=1e-3)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        del model, optimizer
        ids = torch.zeros(rows * length, dtype=torch.int64)
        inputs = build_model_inputs(ids, torch.full((rows,), length), is_packed=False)
        slots = torch.arange(rows * length).view(rows, length)[:, 1:].flatten()
        for _ in range(2):
            live.peak = live.now
            for is_last in (False, True):
                engine.set_gradient_accumulation_boundary(is_last)
                engine.backward(-engine(inputs, slots, ids[slots], score=summed_logprobs))
            peaks["backward"] = live.peak
            live.peak = live.now
            engine.step()
            peaks["step"] = live.peak
        gc.collect()
        peaks["idle"] = live.now
    engine.destroy()
    return peaks


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("stage", "dtype", "is_checkpointed"),
    [(0, "fp32", False), (1, "bf16", False), (3, "bf16", True)],
)
def test_a_real_engine_holds_what_is_planned(request, tmp_path, stage, dtype, is_checkpointed):
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(Path(tmp_path))
    flags = ["--zero_stage", str(stage), "--dtype", dtype, "--gpu", "cpu", "--reserved_gib", "1e-9"]
    flags += ["--per_device_train_batch_size", "2", "--max_seq_len", "64"]
    flags += ["--gradient_accumulation_steps", "2"]
    flags += ["--gradient_checkpointing"] if is_checkpointed else []
    plan = single(str(tmp_path), *flags)
    gc.freeze()  # DeepSpeed collects garbage several times, which takes half a second after a long session
    request.addfinalizer(gc.unfreeze)
    planned = {m.verb: m.total for m in plan.moments}
    measured = measure_engine(str(tmp_path), stage, dtype, is_checkpointed)
    few = 8192  # ids, positions, flags
    assert planned["idle"] == pytest.approx(measured["idle"], abs=few)
    assert planned["step"] == pytest.approx(measured["step"], abs=few)
    backward = max(planned["backward"], planned["reduce"])
    assert 0.97 * measured["backward"] < backward < 1.2 * measured["backward"]


# ---- known facts ----------------------------------------------------------------------------------------


def test_deepspeed_chats_single_gpu_script_fits_one_a6000(saved):
    """Its OPT-1.3B actor with a 350M reward model was published on one A6000-48G."""
    flags = ("--actor_gradient_checkpointing", "--actor_lora_dim", "128", "--enable_hybrid_engine")
    plan = ppo(saved("opt-1.3b"), saved("opt-350m"), *flags, "--gpu", "a6000-48g")
    assert plan.fits and plan.left > 10 * GIB


def test_13b_needs_more_than_one_gpu_of_40_gib_and_fits_eight_with_adapters(saved):
    models = saved("opt-13b"), saved("opt-350m")
    assert not ppo(*models, "--gpu", "a100-40g").fits
    assert not ppo(*models, "--gpu", "a100-40g", "--actor_gradient_checkpointing", "--offload").fits
    flags = ("--actor_zero_stage", "3", "--critic_zero_stage", "3", "--enable_hybrid_engine")
    flags += ("--inference_tp_size", "2", "--actor_lora_dim", "128", "--actor_gradient_checkpointing")
    assert ppo(*models, *flags, "--gpu", "a100-40g", "--num_gpus", "8").fits


def test_cpu_memory_is_checked_where_it_is_known(saved):
    flags = ("--zero_stage", "2", "--offload", "optimizer", "--gradient_checkpointing")
    needed = single(saved("opt-1.3b"), *flags).cpu_peak / GIB
    assert needed > 12 * 1.3e9 / GIB
    assert not single(saved("opt-1.3b"), *flags, "--cpu_memory_gib", str(0.9 * needed)).fits
    assert single(saved("opt-1.3b"), *flags, "--cpu_memory_gib", str(1.1 * needed)).fits
