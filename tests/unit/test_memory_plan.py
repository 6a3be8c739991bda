"""Memory plans: by hand, against real engines on the CPU, and known facts of DeepSpeed-Chat."""

import gc

import pytest
import torch
import transformers
from planned_runs import GIB, LLAMA_7B, NUM_1B, NUM_350M, OPT_1B, OPT_350M, items, make_run, ppo, single
from pretended_gpu import pretended_gpu
from tiny_configs import tiny_config

from common.engine.ds_config import build_config, build_engine
from common.generation.decode import DecodeState, SamplingOptions
from common.models.loading import ModelOptions, load_causal_lm
from common.models.lora import LoraOptions, add_lora
from common.models.model_inputs import build_model_inputs
from common.models.output_head import LogitOptions, OutputHead
from common.models.policy_model import PolicyModel
from step1_sft.arguments import SFTArguments
from step3_ppo.build_roles import build_roles
from step3_ppo.rewards.reward_specs import RewardSpec
from step3_ppo.trainer_state import ExponentialMovingAverage
from tools.memory_plan import MemoryPlan, head_bytes
from tools.traced_layers import LiveBytes, trace_activations

GEMMA = "google/gemma-2-2b"
HYBRID, ZERO3 = "--enable_hybrid_engine", ("--actor_zero_stage", "3", "--critic_zero_stage", "3")


def plan_sft(model: str, *flags: str) -> MemoryPlan:
    return MemoryPlan(single(model, *flags))


def plan_ppo(*flags: str) -> MemoryPlan:
    return MemoryPlan(ppo(OPT_1B, OPT_350M, *flags))


# ---- by hand --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "stage", "num_ranks", "weights", "optimizer", "gradients", "copies"),
    [  # bytes a parameter: 16 with 16-bit weights on one rank, whatever the stage
        ("fp32", 0, 1, 4, 8, 4, 0),
        ("fp32", 0, 4, 4, 8, 4, 0),
        ("fp32", 1, 4, 4, 12 / 4, 4 / 4, 4 / 4),
        ("bf16", 0, 4, 2, 12 / 4, 2 / 4, 6 / 4),  # runs at stage 1
        ("fp32", 2, 4, 4, 12 / 4, 4 / 4, 4 / 4),
        ("bf16", 2, 4, 2, 12 / 4, 2 / 4, 6 / 4),
        ("bf16", 3, 1024, 2 / 1024, 12 / 1024, 2 / 1024, 6 / 1024),
    ],
)
def test_bytes_of_a_parameter(dtype, stage, num_ranks, weights, optimizer, gradients, copies):
    ranks = ("--num_gpus", str(min(num_ranks, 8)), "--num_nodes", str(max(num_ranks // 8, 1)))
    plan = plan_sft(OPT_350M, "--zero_stage", str(stage), "--dtype", dtype, *ranks)
    found = items(plan, "train policy", "step")
    assert found["weights"] / NUM_350M == pytest.approx(weights)
    assert found["optimizer"] / NUM_350M == pytest.approx(optimizer)
    assert found["gradients"] / NUM_350M == pytest.approx(gradients)
    assert found.get("step's buffers", 0.0) / NUM_350M == pytest.approx(copies)


NUM_IN_LAYERS = 24 * (4 * 1024**2 + 2 * 1024 * 4096)  # of OPT-350M's matrices


@pytest.mark.parametrize(
    ("optimizer", "dtype", "optimizer_dtype", "num_bytes"),
    [("adamw", "bf16", "bf16", 6), ("muon", "bf16", "fp32", 12 - 4 * NUM_IN_LAYERS / NUM_350M),
     ("muon", "bf16", "bf16", 6 - 2 * NUM_IN_LAYERS / NUM_350M),
     ("muon", "fp32", "fp32", 8 - 4 * NUM_IN_LAYERS / NUM_350M)],
)  # fmt: skip
def test_what_another_optimizer_keeps_of_a_parameter(optimizer, dtype, optimizer_dtype, num_bytes):
    flags = ("--optimizer", optimizer, "--dtype", dtype, "--optimizer_dtype", optimizer_dtype)
    found = items(plan_sft(OPT_350M, *flags), "train policy", "step")
    assert found["optimizer"] / NUM_350M == pytest.approx(num_bytes)
    if optimizer_dtype == "bf16" and optimizer == "adamw":
        assert found["step's buffers"] == 2 * NUM_350M


def test_the_gradients_of_actor_and_critic_wait_for_one_another():
    plan = plan_ppo("--actor_zero_stage", "2", "--critic_zero_stage", "2", "--num_gpus", "4")
    waiting = {
        (m.role, m.verb): m.gpu.get(("critic" if m.role == "actor" else "actor", "gradients"), 0.0)
        for m in plan.moments
        if m.phase.startswith("train")
    }
    # bf16, a quarter each: both are made before the actor steps, then the critic
    actor, critic = 2 / 4 * NUM_1B, plan.moments[0].gpu["critic", "weights"] / 4
    assert waiting == {
        ("actor", "backward"): 0, ("actor", "reduce"): 0, ("actor", "step"): critic,
        ("critic", "backward"): actor, ("critic", "reduce"): actor, ("critic", "step"): 0,
    }  # fmt: skip


def test_offload_moves_what_it_names():
    flags = ("--zero_stage", "3", "--num_gpus", "2")
    plain, states, everything = (
        plan_sft(OPT_350M, *flags, *more).moments[0]
        for more in ((), ("--offload", "optimizer"), ("--offload",))
    )
    weights, optimizer = ("policy", "weights"), ("policy", "optimizer")
    assert states.cpu[optimizer] == plain.gpu[optimizer]
    assert optimizer not in states.gpu and optimizer not in plain.cpu
    assert states.gpu[weights] == plain.gpu[weights]
    gradients = ("policy", "gradients")
    assert states.cpu[gradients] == 3 * plain.gpu[gradients] and gradients not in states.gpu  # fp32 too
    assert everything.cpu[weights] == plain.gpu[weights] and weights not in everything.gpu


def test_checkpointing_keeps_a_layers_input():
    flags = ("--per_device_train_batch_size", "8", "--max_seq_len", "512", "--packed")
    plain, saving = (plan_sft(OPT_1B, *flags, *m) for m in ((), ("--gradient_checkpointing",)))
    activations = [items(p, "train policy", "backward")["activations"] for p in (plain, saving)]
    inputs = 24 * 8 * 512 * 2048 * 2  # layers, tokens, hidden size, bytes
    assert inputs < activations[1] < inputs + 0.25 * activations[0]
    # Korthikanti et al. count 34 s b h a layer with dropout and GELU
    assert 20 < activations[0] / inputs * 2 < 36


def test_a_recomputed_layer_stands_beside_all_inputs():
    run = single(LLAMA_7B, "--gradient_checkpointing", "--lora_dim", "8")
    layer = trace_activations(run.roles[0].model, "bf16", 512)
    of_sequence = 32 * 512 * 4096 * 2 + layer.saved_outside + layer.saved_by_layer + layer.backward_work
    assert items(MemoryPlan(run), "train policy", "backward")["activations"] == 16 * of_sequence


def test_scoring_has_a_cap_of_its_own():
    def activations(cap: str, score_cap: str = "0") -> dict[str, float]:
        words = ("--max_tokens_per_micro_batch", cap, "--max_tokens_per_scoring_pass", score_cap)
        plan = MemoryPlan(ppo(OPT_1B, OPT_350M, *words))
        return {m.phase + m.verb: m.gpu.get((m.role, "activations"), 0.0) for m in plan.moments if m.role}

    small, large, both = activations("1024"), activations("4096"), activations("1024", "4096")
    assert both == {name: (large if name.startswith("score") else small)[name] for name in both}
    assert all(small[name] < large[name] for name in ("scorescore", "train actorbackward"))


def test_a_frozen_head_has_no_gradient():
    plain, frozen = (single(OPT_350M, *words) for words in ((), ("--lora_dim", "8")))
    held = [head_bytes(run, run.roles[0], 512, is_training=True) for run in (plain, frozen)]
    assert held[0] - held[1] == 50272 * 512 * (4 + 2)  # added up in fp32


def test_no_padded_pass_has_a_mask_and_caps_on_scores_need_all_of_them():
    """Activations grow with the length, and with its square where transformers makes all scores itself."""

    def saved(model: str, length: int) -> float:
        return trace_activations(single(model).roles[0].model, "bf16", length).saved_by_layer

    assert saved(OPT_350M, 512) == 2 * saved(OPT_350M, 256)
    assert saved(GEMMA, 512) - 2 * saved(GEMMA, 256) > 8 * 2 * 2 * 256**2  # heads, bytes, half of the pairs


def test_several_communicators_take_memory_too():
    seven, eight = (plan_sft(OPT_350M, "--num_gpus", n).moments[0].gpu["device", "reserved"] for n in "78")
    assert (seven, eight) == (2 * GIB, 3 * GIB)


def test_keys_and_values_are_slots_by_length():
    flags = (HYBRID, "--generation_slots", "32", "--per_device_generation_batch_size", "64")
    plan, freed = plan_ppo(*flags), plan_ppo(*flags, "--release_inference_cache")
    keys = 32 * 512 * 2 * 24 * 2048 * 2  # slots, their length, keys and values, layers, hidden size, bytes
    assert items(plan, "generate", "generate")["keys and values"] == keys
    assert items(plan, "idle", "idle")["keys and values"] == keys  # kept for the next time
    # Captured passes keep what they sample from: logits, and 20 bytes for each of them.
    tokens = 32 * 50272 * (2 + 20)
    nucleus = items(plan_ppo(*flags, "--top_p", "0.9"), "idle", "idle")["token passes"]
    assert nucleus - tokens == 32 * 50272 * 18  # what the threshold of top-p is found with
    assert items(plan, "idle", "idle")["token passes"] == tokens
    assert items(freed, "generate", "generate")["token passes"] == tokens
    assert not {"keys and values", "token passes"} & items(freed, "idle", "idle").keys()
    assert freed.of_phase("generate").total == plan.of_phase("generate").total


def test_a_slice_is_a_share_of_the_model_and_an_ema_another_copy():
    flags = (HYBRID, *ZERO3, "--num_gpus", "8", "--enable_ema", "--inference_tp_size", "4")
    plan = plan_ppo(*flags)
    found = items(plan, "generate", "generate")
    assert found["slices of weights"] == pytest.approx(2 * NUM_1B / 4, rel=0.02)  # positions are whole
    assert found["EMA"] == 4 * NUM_1B / 8
    # They stay while captured passes read them; the next are copied there, 8 of 24 layers at a time.
    freed, on_cpu = (plan_ppo(*flags, *more) for more in (["--release_inference_cache"], ["--gpu", "cpu"]))
    assert items(plan, "idle", "idle")["slices of weights"] == found["slices of weights"]
    assert not any("slices of weights" in items(other, "idle", "idle") for other in (freed, on_cpu))
    copied = found["gather buffers"] - items(freed, "generate", "generate")["gather buffers"]
    assert copied == pytest.approx(found["slices of weights"] * 8 / 24, rel=0.15)
    below = plan_ppo("--num_gpus", "8", "--enable_ema")  # each rank has a share of it there too
    assert below.moments[0].gpu["actor", "EMA"] == 4 * NUM_1B / 8
    both = plan_ppo("--num_gpus", "8", "--enable_ema", "--ref_ema_decay", "0.9")
    assert both.moments[0].gpu["actor", "EMA"] == 2 * 4 * NUM_1B / 8


def test_the_reference_is_a_model_of_its_own_unless_there_are_adapters():
    plain = plan_ppo().moments[0].gpu
    assert plain["reference", "weights"] == plain["actor", "weights"]
    assert ("reference", "weights") not in plan_ppo("--actor_lora_dim", "8").moments[0].gpu
    away = plan_ppo("--offload_reference_model")
    key = ("reference", "weights")
    assert key not in away.moments[0].gpu and away.moments[0].cpu[key] == plain[key]
    [used] = [moment for moment in away.moments if (moment.verb, moment.role) == ("score", "reference")]
    assert used.gpu[key] == used.cpu[key] == plain[key]  # a copy: the pinned original stays


# ---- against reality ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sampling_a_token_holds_what_is_planned(dtype):
    slots, vocabulary = 8, 20000
    options = SamplingOptions(8, stop_token_id=1, pad_token_id=0)
    with pretended_gpu(), torch.inference_mode(), LiveBytes(torch.nn.Module()) as live:
        state = DecodeState.build(slots, 8, torch.device("cuda"))
        state.sample(slice(0, slots), torch.zeros(slots, vocabulary, dtype=dtype, device="cuda"), options)
    of_logit = live.peak / (slots * vocabulary)
    assert of_logit < dtype.itemsize + 20 < 1.25 * of_logit


def test_the_head_holds_what_is_planned(tmp_path, monkeypatch):
    monkeypatch.setattr("common.models.output_head.CPU_CHUNK_ELEMENTS_BF16", 250 * 3000)
    config = transformers.LlamaConfig(
        vocab_size=3000, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    config.save_pretrained(tmp_path)
    hidden, weight = (torch.nn.Parameter(torch.randn(n, 64, dtype=torch.bfloat16)) for n in (1000, 3000))
    ids = torch.zeros(1000, dtype=torch.int64)
    with LiveBytes(torch.nn.ParameterList([hidden, weight])) as live:
        head = OutputHead(hidden, weight, None, LogitOptions())
        logprobs, entropies = head.logprobs(ids, with_entropy=True)
        (logprobs + entropies).sum().backward()
    run = ppo(str(tmp_path), "", "--reward", "http://a/b", "--gpu", "cpu", "--dtype", "bf16")
    planned = head_bytes(run, run.actor, 2 * 1000, is_training=True)  # half of the tokens are responses
    assert planned == pytest.approx(live.peak, rel=0.15)


def measure_engine(
    folder: str,
    stage: int,
    dtype: str,
    is_checkpointed: bool,
    optimizer: str = "adamw",
    optimizer_dtype: str = "fp32",
    lora: LoraOptions | None = None,
) -> dict[str, int]:
    """Return the most bytes that a real engine holds, by what it does, in its second optimizer step."""
    rows, length, peaks = 2, 64, {}
    with LiveBytes(torch.nn.Module()) as live:  # of no weights: those that are made here count
        options = ModelOptions(folder, dtype=dtype, gradient_checkpointing=is_checkpointed)
        model = PolicyModel(
            add_lora(load_causal_lm(options, 320), lora or LoraOptions()), num_valid_tokens=320
        ).train()
        num_params = sum(p.numel() for p in model.parameters())
        # A bucket of the model's size: on a CPU no more of it would ever be written to.
        overrides = {
            "zero_optimization": {"reduce_bucket_size": num_params},
            "gradient_accumulation_steps": 2,
        }
        flags = SFTArguments(optimizer=optimizer, gradient_accumulation_steps=2)
        config = build_config(
            zero_stage=stage, dtype=dtype, overrides=overrides, optimizer_dtype=optimizer_dtype
        )
        engine = build_engine(model, config, flags, 10)
        del model
        ids = torch.zeros(rows * length, dtype=torch.int64)
        inputs = build_model_inputs(ids, torch.full((rows,), length), is_packed=False)
        slots = torch.arange(rows * length).view(rows, length)[:, 1:].flatten()
        for _ in range(2):
            live.peak = live.now
            for is_last in (False, True):
                engine.set_gradient_accumulation_boundary(is_last)
                engine.backward(engine(inputs, slots, ids[slots], OutputHead.nll_sum))
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
    ("stage", "dtype", "is_checkpointed", "optimizer", "optimizer_dtype"),
    [
        (0, "fp32", False, "adamw", "fp32"),
        (1, "bf16", False, "adamw", "fp32"),
        (3, "bf16", True, "adamw", "fp32"),
        (2, "bf16", False, "adamw", "bf16"),
        (3, "bf16", False, "muon", "bf16"),
        (1, "bf16", False, "muon", "fp32"),
    ],
)
def test_a_real_engine_holds_what_is_planned(
    request, tmp_path, stage, dtype, is_checkpointed, optimizer, optimizer_dtype
):
    config, folder = tiny_config("llama", 320), str(tmp_path)
    config.max_position_embeddings = 512
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    flags = ["--zero_stage", str(stage), "--dtype", dtype, "--gpu", "cpu", "--max_seq_len", "64"]
    flags += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]
    flags += ["--optimizer", optimizer, "--optimizer_dtype", optimizer_dtype]
    plan = plan_sft(folder, *flags, *(["--gradient_checkpointing"] if is_checkpointed else []))
    gc.freeze()  # DeepSpeed collects garbage several times, which takes half a second after a long session
    request.addfinalizer(gc.unfreeze)
    planned = {m.verb: m.total - m.gpu["device", "reserved"] for m in plan.moments}
    measured = measure_engine(folder, stage, dtype, is_checkpointed, optimizer, optimizer_dtype)
    few = 8192  # ids, positions, flags
    assert planned["idle"] == pytest.approx(measured["idle"], abs=few)
    # Of matrices of 8 KB what Muon holds at once is known less well.
    few += 32 * 2**10 if optimizer == "muon" else few * (optimizer_dtype == "bf16")
    assert planned["step"] == pytest.approx(measured["step"], abs=few)
    backward = max(planned["backward"], planned["reduce"])
    assert 0.97 * measured["backward"] < backward < 1.2 * measured["backward"]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_real_engine_holds_the_sums_of_experts_and_adapters_that_are_planned(is_checkpointed, tmp_path):
    config, folder = tiny_config("mixtral", 320), str(tmp_path)
    config.num_hidden_layers, config.num_local_experts = 4, 16  # more bytes than the activations
    config.hidden_size, config.intermediate_size, config.max_position_embeddings = 64, 256, 512
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    flags = ["--dtype", "fp32", "--gpu", "cpu", "--max_seq_len", "64", "--per_device_train_batch_size", "2"]
    flags += ["--gradient_accumulation_steps", "2", "--lora_dim", "2", "--lora_module_name", "experts"]
    plan = plan_sft(folder, *flags, *(["--gradient_checkpointing"] if is_checkpointed else []))
    planned = {m.verb: m.total - m.gpu["device", "reserved"] for m in plan.moments}
    lora = LoraOptions(2, module_name="experts")
    measured = measure_engine(folder, 0, "fp32", is_checkpointed, lora=lora)
    assert planned["idle"] == pytest.approx(measured["idle"], rel=0.01)
    assert 0.97 * measured["backward"] < planned["backward"] < 1.25 * measured["backward"]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "more",
    [
        "--actor_zero_stage 2 --enable_ema",
        "--dtype fp32 --offload_reference_model",
        "--dtype fp32 --actor_lora_dim 4 --critic_lora_dim 4",  # one base for all
    ],
)
def test_the_roles_of_ppo_hold_what_is_planned(more, tiny_model_folder, tiny_tokenizer):
    folder = tiny_model_folder("llama")
    words = ("--stage", "3", "--actor_model_name_or_path", folder, "--critic_model_name_or_path", folder)
    run = make_run((*words, "--max_prompt_seq_len", "24", "--max_answer_seq_len", "8"), tuple(more.split()))
    reward = [RewardSpec("model", folder, 1.0, "reward")]
    with pretended_gpu() as gpu:
        roles = build_roles(run.args, tiny_tokenizer, reward, 8, has_critic=True)
        average = run.args.ema_decay and ExponentialMovingAverage(roles.actor.model.module, 0.9)
        gc.collect()
        held = gpu.allocated
        roles.actor.model.destroy(), roles.critic.model.destroy()
    idle = MemoryPlan(run).moments[0]
    assert (("actor", "EMA") in idle.gpu) == bool(average)
    later = 8 * sum(
        role.model.num_trained for role in run.roles if role.spec.is_trained
    )  # Adam's, by its first step
    assert held + later == pytest.approx(idle.total - idle.gpu["device", "reserved"], rel=0.02)


# ---- known facts ----------------------------------------------------------------------------------------


def test_deepspeed_chats_single_gpu_script_fits_one_a6000():
    """Its OPT-1.3B actor with a 350M reward model was published on one A6000-48G."""
    flags = ("--actor_gradient_checkpointing", "--actor_lora_dim", "128", HYBRID)
    plan = plan_ppo(*flags, "--gpu", "a6000-48g")
    assert plan.fits and plan.left > 10 * GIB


def test_cpu_memory_is_checked_where_it_is_known():
    flags = ("--zero_stage", "2", "--offload", "optimizer", "--gradient_checkpointing")
    needed = plan_sft(OPT_1B, *flags).cpu_peak / GIB
    assert needed > 12 * 1.3e9 / GIB
    assert not plan_sft(OPT_1B, *flags, "--cpu_memory_gib", str(0.9 * needed)).fits
    assert plan_sft(OPT_1B, *flags, "--cpu_memory_gib", str(1.1 * needed)).fits
    # All ranks of a machine together: two have half of the optimizer each.
    assert plan_sft(OPT_1B, *flags, "--num_gpus", "2").cpu_peak / GIB == pytest.approx(needed)
    # Each of four ranks reads all weights; under ZeRO 3 the first one alone.
    loading = [plan_sft(OPT_1B, "--num_gpus", "4", "--zero_stage", stage).loading for stage in "23"]
    assert loading == pytest.approx([4 * 2 * NUM_1B, 2 * NUM_1B], rel=0.01)
