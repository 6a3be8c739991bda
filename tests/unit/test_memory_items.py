"""Items of a memory plan, counted by hand: 4-bit bases, buckets, gathered weights, steps, shared prompts."""

import peft
import pytest
import transformers
from planned_runs import LLAMA_7B, NUM_350M, OPT_1B, OPT_350M, items, make_run, ppo, single, with_zero

from tools.memory_plan import MemoryPlan, head_bytes
from tools.planned_run import Run
from tools.traced_layers import trace_activations

LARGEST = 50272 * 512  # OPT-350M's embedding
IN_LINEAR = 24 * (4 * 1024**2 + 2 * 1024 * 4096) + 2 * 512 * 1024  # weights of its linear layers
PHASE = "train policy"


def item_by_verb(run: Run, item: str) -> dict[str, float]:
    """Bytes on a device of an item of the only role, by what the role does."""
    return {m.verb: m.gpu.get(("policy", item), 0.0) for m in MemoryPlan(run).moments}


# ---- weights --------------------------------------------------------------------------------------------


def test_a_base_in_4_bits_and_one_weight_of_it_unpacked():
    run = single(OPT_350M, "--load_in_4bit", "--lora_dim", "8")
    # Codes, an 8-bit scale per 64 weights, an fp32 scale per 256 of these.
    packed = IN_LINEAR * (1 / 2 + 1 / 64 + 4 / (64 * 256))
    adapters = 8 * (24 * (4 * (1024 + 1024) + 2 * (1024 + 4096)) + 2 * (512 + 1024))
    whole = 2 * (NUM_350M - IN_LINEAR + adapters)
    assert set(item_by_verb(run, "weights").values()) == {whole + packed}
    largest = 2 * 1024 * 4096
    unpacked = {"idle": 0, "score": largest, "backward": largest, "reduce": largest, "step": 0}
    assert item_by_verb(run, "unpacked weight") == unpacked


def test_only_the_role_that_runs_unpacks_a_weight():
    words = ("--load_in_4bit", "--actor_lora_dim", "8", "--critic_lora_dim", "8", "--reward", "http://a/b")
    for moment in MemoryPlan(ppo(OPT_350M, OPT_350M, *words)).moments:
        unpacks = {role for role, item in moment.gpu if item == "unpacked weight"}
        assert unpacks == (set() if moment.verb in ("idle", "step") else {moment.role})


def uses_of_the_reference(*flags: str) -> set[tuple[str, str]]:
    """Moments, a role and what it does, in which an offloaded reference is on the device."""
    plan = MemoryPlan(ppo(OPT_350M, OPT_350M, "--offload_reference_model", *flags))
    return {(m.role, m.verb) for m in plan.moments if ("reference", "weights") in m.gpu}


def test_a_teacher_scores_while_the_actor_is_trained():
    assert uses_of_the_reference() == {("reference", "score")}
    teacher = ("--teacher_model_name_or_path", OPT_350M)
    assert uses_of_the_reference(*teacher) == {("reference", "score"), ("actor", "backward")}


def test_adapters_that_training_starts_from_are_the_reference(tiny_model_folder, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_model_folder("llama"), trust_remote_code=False
    )
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(tmp_path)
    words = ("--stage", "3", "--actor_model_name_or_path", str(tmp_path), "--algorithm", "rloo")
    words += ("--max_prompt_seq_len", "24", "--max_answer_seq_len", "8")
    run = make_run(words, ("--reward", "http://a/b", "--num_gpus", "2"))
    of_rank = 2 * run.actor.model.num_trained / 2  # bytes, a half on each rank
    for moment in MemoryPlan(run).moments:
        is_scoring = (moment.role, moment.verb) == ("reference", "score")  # the actor's are put aside
        assert moment.gpu["reference", "adapters"] == of_rank * (2 if is_scoring else 1)


# ---- gradients, buckets, steps --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "first", "later", "step"),
    [  # bytes of gradients a parameter on 4 ranks, in the backward pass and the reduction of a micro-batch
        ("--zero_stage 0 --dtype fp32", (0, 4), (4, 4), 4),
        ("--zero_stage 1", (0, 2 + 2 / 4), (2, 2 + 2 / 4), 2 / 4),
        ("--zero_stage 2", (0, 2 / 4), (2 / 4, 2 * 2 / 4), 2 / 4),  # later ones are added to a rank's part
        ("--zero_stage 3", (2 / 4, 2 / 4), (2 / 4, 2 / 4), 2 / 4),  # DeepSpeed has room from the start
        ("--zero_stage 1 --offload optimizer", (0, 2), (2, 2), 0),
        ("--zero_stage 2 --offload optimizer", (0, 0), (0, 0), 0),
        ("--zero_stage 3 --offload optimizer", (0, 0), (0, 0), 0),
    ],
)
def test_gradients(flags, first, later, step):
    for num_micro_batches, of_last in (("1", first), ("2", later)):
        words = ("--num_gpus", "4", "--gradient_accumulation_steps", num_micro_batches, *flags.split())
        held = item_by_verb(single(OPT_350M, *words), "gradients")
        of_parameter = [held[verb] / NUM_350M for verb in ("backward", "reduce", "step")]
        assert of_parameter == [*of_last, step]


BUCKET = 2e8  # elements: the most that is chosen


@pytest.mark.parametrize(
    ("flags", "idle", "backward", "reduce"),
    [  # elements of buckets
        ("--zero_stage 0 --dtype fp32", 0, 0, NUM_350M),  # DeepSpeed's own bucket is larger
        ("--zero_stage 0 --dtype fp32 --num_gpus 2", 0, 0, NUM_350M),
        ("--zero_stage 1", 0, BUCKET, BUCKET),
        ("--zero_stage 1 --num_gpus 2", 0, 2 * BUCKET, 3 * BUCKET),  # two are filled in turn; one is sent
        ("--zero_stage 3", BUCKET, BUCKET, BUCKET),
        ("--zero_stage 3 --num_gpus 2", BUCKET, BUCKET, 2 * BUCKET),
        ("--zero_stage 2 --offload optimizer", LARGEST, BUCKET + LARGEST, BUCKET + LARGEST),
        ("--zero_stage 3 --offload optimizer", BUCKET, BUCKET, BUCKET),
    ],
)
def test_buckets(flags, idle, backward, reduce):
    run = single(OPT_350M, *flags.split())
    elements = {verb: num_bytes / run.num_bytes for verb, num_bytes in item_by_verb(run, "buckets").items()}
    assert elements == {"idle": idle, "score": idle, "backward": backward, "reduce": reduce, "step": idle}


def test_a_bucket_that_is_never_filled_takes_memory_on_a_gpu_only(tmp_path):
    flags = ("--zero_stage", "1", *with_zero(tmp_path, reduce_bucket_size=10**9))
    on_gpu, on_cpu = (
        item_by_verb(single(OPT_350M, *flags, *more), "buckets") for more in ((), ("--gpu", "cpu"))
    )
    assert on_gpu["backward"] == 2 * 10**9 and on_cpu["backward"] == 4 * NUM_350M
    small = ("--zero_stage", "3", "--num_gpus", "2", *with_zero(tmp_path, reduce_bucket_size=10**6))
    assert item_by_verb(single(OPT_350M, *small), "buckets")["idle"] == 2 * 10**6


def test_a_step_under_stage_3_is_of_some_weights_at_a_time(tmp_path):
    flags = ("--num_gpus", "2", *with_zero(tmp_path, sub_group_size=10**8))
    three, two = (item_by_verb(single(OPT_350M, "--zero_stage", s, *flags), "step's buffers") for s in "32")
    assert three["step"] == 6 * 10**8 and two["step"] == 6 * NUM_350M / 2


@pytest.mark.parametrize(("num_ranks", "muon_is_more"), [(1, False), (8, True)])
def test_muon_steps_its_matrices_and_the_other_weights_in_turn(num_ranks, muon_is_more):
    matrices = IN_LINEAR - 2 * 512 * 1024
    run = single(OPT_350M, "--optimizer", "muon", "--num_gpus", str(num_ranks))
    by_adamw = 6 * matrices / num_ranks  # the larger group's fp32 gradients and its weights in 16 bits
    by_muon = 4 * matrices / num_ranks + (32 + 2 * num_ranks) * 1024 * 4096
    assert (by_muon > by_adamw) == muon_is_more
    assert item_by_verb(run, "step's buffers")["step"] == pytest.approx(max(by_adamw, by_muon), rel=1e-12)


def test_states_are_lent_to_generation_and_an_average_is_where_the_weights_are():
    lent = ppo(OPT_350M, OPT_350M, "--actor_zero_stage", "2", "--offload_states_for_generation")
    away = {(m.role, m.verb) for m in MemoryPlan(lent).moments if ("actor", "optimizer") not in m.gpu}
    assert away == {("actor", "generate")}
    flags = ("--enable_ema", "--actor_zero_stage", "3", "--num_gpus", "2", "--offload", "all")
    idle = MemoryPlan(ppo(OPT_350M, OPT_350M, *flags)).moments[0]
    assert idle.cpu["actor", "EMA"] == 4 * NUM_350M / 2 and ("actor", "EMA") not in idle.gpu


# ---- gathered weights, activations ----------------------------------------------------------------------


AGAIN, DISTANCE, AHEAD = (
    "--gradient_checkpointing",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
)


@pytest.mark.parametrize(
    ("flags", "keys", "live", "ahead"),
    [  # elements in a backward pass, and of what is fetched ahead
        ("", {}, NUM_350M, 3e7),  # views of all weights are saved
        (AGAIN, {DISTANCE: 3e7}, 3e7 / 3, 3e7),
        ("", {DISTANCE: 3e7, "memory_efficient_linear": True}, 3e7 / 2, 3e7),
        (AGAIN, {DISTANCE: 0.0}, 1e6, 3e7),
        ("", {AHEAD: 0}, NUM_350M, 0),
    ],
)
def test_weights_that_stage_3_gathers(tmp_path, flags, keys, live, ahead):
    limit = with_zero(tmp_path, stage3_max_live_parameters=1e6, **keys)
    flags = ("--zero_stage", "3", *flags.split(), *limit)
    gathered = item_by_verb(single(OPT_350M, "--num_gpus", "2", *flags), "gathered weights")
    score, backward = (2 * (elements + ahead + LARGEST) for elements in (1e6, live))
    reduce = score + 2 * LARGEST  # a gradient
    assert gathered == {"idle": 0, "score": score, "backward": backward, "reduce": reduce, "step": 0}
    assert set(item_by_verb(single(OPT_350M, *flags), "gathered weights").values()) == {0}  # on one rank


def test_gathered_weights_are_twice_the_model_at_most(tmp_path):
    flags = ("--zero_stage", "3", "--num_gpus", "2")
    usual, capped = (
        item_by_verb(single(OPT_350M, *flags, *more), "gathered weights")
        for more in ((), with_zero(tmp_path, **{AHEAD: 10**9}))
    )
    assert capped["score"] == capped["backward"] == 2 * 2 * NUM_350M
    assert usual["reduce"] - usual["backward"] == 2 * LARGEST  # its gradient


def test_the_keys_of_a_shared_prompt_are_copied_for_each_response():
    flags = ("--num_samples_per_prompt", "4", "--max_tokens_per_micro_batch", "4096")
    flags += ("--max_prompt_seq_len", "256", "--max_answer_seq_len", "64", "--critic_gradient_checkpointing")

    def activations(*more: str) -> float:
        plan = MemoryPlan(ppo(OPT_350M, OPT_350M, *flags, *more))
        return items(plan, "train critic", "backward")["activations"]

    responses = 4096 / (64 + 256 / 4)
    keys = 2 * 1024 * 2  # keys and values, hidden size, bytes
    assert activations() - activations("--no_share_prompts") == responses * 256 * keys  # of one layer


@pytest.mark.parametrize(("model", "head_is_more"), [(OPT_350M, True), (LLAMA_7B, False)])
def test_activations_beside_the_head(model, head_is_more):
    run = single(model)
    policy = run.roles[0].model
    traced = trace_activations(policy, "bf16", 512)  # of one of 16 sequences
    held = item_by_verb(run, "activations")
    assert held["reduce"] == 16 * traced.backward_work
    states = 16 * 512 * policy.hidden_size * 2
    logits = 2**26 * (2 + 4)  # a chunk of them and its fp32 copy
    assert (2 * states + logits > 16 * traced.forward_peak) == head_is_more
    assert held["score"] == max(2 * states + logits, 16 * traced.forward_peak)
    saved = 16 * (traced.saved_outside + policy.num_layers * traced.saved_by_layer)
    head = head_bytes(run, run.roles[0], 16 * 512, is_training=True)
    assert held["backward"] == saved + max(head, 16 * traced.backward_work)


def test_each_layer_saves_the_sums_of_its_experts_and_their_adapters(monkeypatch, tiny_model_folder):
    words = ("--stage", "1", "--model_name_or_path", tiny_model_folder("mixtral"), "--max_seq_len", "64")
    flags = ("--dtype", "fp32", "--lora_dim", "2", "--lora_module_name", "experts")
    runs = [make_run(words, (*flags, *more)) for more in ((), ("--gradient_checkpointing",))]
    with_sums = [item_by_verb(run, "activations") for run in runs]
    for run in runs:
        monkeypatch.setattr(run.roles[0].model, "num_in_stacks", 0)
    without = [item_by_verb(run, "activations") for run in runs]
    of_layer = 4 * 4 * 3 * 32 * 64  # bytes, experts, matrices of each, their size
    sums = [
        {verb: held[verb] - other[verb] for verb in held}
        for held, other in zip(with_sums, without, strict=True)
    ]
    assert sums == [  # of both layers or of one, and half a layer's: gradients
        {"idle": 0, "score": of_layer, "backward": 2.5 * of_layer, "reduce": 0, "step": 0},
        {"idle": 0, "score": of_layer, "backward": 1.5 * of_layer, "reduce": 0, "step": 0},
    ]


# ---- heads and generation -------------------------------------------------------------------------------

LORA = "--actor_lora_dim 8"  # a frozen head


@pytest.mark.parametrize(
    ("step", "flags", "is_training", "logits", "rows"),
    [  # bytes of logits and of rows; 2,048 tokens, in step 3 half of them responses, 2,048 states each
        (1, "--lora_dim 8", True, 2**26 * (2 + 8), 2048 * 2),
        (1, "--lora_dim 8 --gpu cpu", True, 2**22 * (4 + 8), 2048 * 4),
        (2, "--lora_dim 8 --gpu cpu", True, 2**22 * (4 + 8) + (2**24 - 2**22) * 4, 2048 * 4),
        (3, LORA, True, 1024 * 50272 * (2 * 2 + 8), 1024 * 2),
        (3, LORA + " --gpu cpu", True, 2**22 * (2 * 4 + 8) + (2**24 - 2**22) * 4, 1024 * 4),
        (3, LORA + " --gpu cpu --dtype bf16", True, 2**24 * (2 * 2 + 8), 1024 * 2),
        (3, LORA, False, 1024 * 50272 * (2 + 8), 0),
        (2, "--lora_dim 8 --gpu cpu", False, 2**22 * (4 + 4), 0),
        # The head's gradient is accumulated in fp32, then copied.
        (3, "", True, 1024 * 50272 * (2 * 2 + 8) + 50272 * 2048 * (4 + 2), 1024 * 2),
    ],
)
def test_what_a_head_holds(step, flags, is_training, logits, rows):
    words = {1: (), 2: ("--loss", "dpo"), 3: ("--algorithm", "rloo", "--reward", "http://a/b")}[step]
    name = "--actor_model_name_or_path" if step == 3 else "--model_name_or_path"
    run = make_run(("--stage", str(step), name, OPT_1B, *words), tuple(flags.split()))
    assert head_bytes(run, run.roles[0], 2048, is_training=is_training) == logits + 2048 * rows


def test_a_value_model_holds_its_inputs_in_fp32():
    run = ppo(OPT_350M, OPT_1B, "--max_prompt_seq_len", "384", "--max_answer_seq_len", "128")
    [critic] = (role for role in run.roles if role.name == "critic")
    held = [head_bytes(run, critic, 2048, is_training=is_training) for is_training in (False, True)]
    assert held == [512 * 2048 * 4, 2 * 512 * 2048 * 4]  # a quarter of the tokens are responses


def tp_size(number: str) -> tuple[str, ...]:
    return "--num_gpus", number, "--inference_tp_size", number


HYBRID = ("--enable_hybrid_engine", "--per_device_generation_batch_size", "64", "--generation_slots", "32")


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [  # prompt tokens of a pass
        (HYBRID, 4096),
        ((*HYBRID, "--generation_slots", "8"), 8 * 256),
        ((*HYBRID, *tp_size("2")), 4096 / 2),  # activations of a half
        (HYBRID[1:3], 64 * 256),
        ((*HYBRID, "--max_prompt_seq_len", "8192"), 8192),
    ],
)
def test_a_prefill_pass(flags, tokens):
    run = ppo(LLAMA_7B, OPT_350M, *flags)
    of_sequence = trace_activations(run.actor.model, "bf16", run.length).forward_peak
    held = items(MemoryPlan(run), "generate", "generate")["activations"]
    assert held == pytest.approx(tokens / run.length * of_sequence, rel=1e-12)


def test_ranks_that_hold_a_replica_share_its_keys_and_all_that_is_held_is_a_roles():
    one, two = (MemoryPlan(ppo(LLAMA_7B, OPT_350M, *HYBRID, *tp_size(n))) for n in "12")
    keys = 32 * 512 * 2 * 32 * 4096 * 2  # slots, their length, keys and values, layers, hidden size, bytes
    held = items(one, "generate", "generate"), items(two, "generate", "generate")
    assert [of_run["keys and values"] for of_run in held] == [keys, keys / 2]
    roles = {role for role, _ in two.of_phase("generate").gpu}
    assert roles == {"actor", "reference", "critic", "reward", "device"}


def test_layers_that_are_gathered_for_each_pass():
    flags = (*HYBRID, "--unpin_actor_parameters", "--actor_zero_stage", "3", "--num_gpus")
    one, two = (MemoryPlan(ppo(LLAMA_7B, OPT_350M, *flags, n)) for n in "12")
    held = items(two, "generate", "generate")
    assert held["gathered weights"] == 2 * (1e9 + 32000 * 4096 + 3e7)
    assert not {"slices of weights", "gather buffers"} & held.keys()
    assert "gathered weights" not in items(one, "generate", "generate")
    assert "token passes" not in items(two, "idle", "idle")  # nothing is captured


# ---- the whole plan -------------------------------------------------------------------------------------


def test_what_is_left_and_what_is_lacking():
    flags = ("--zero_stage", "2", "--offload", "optimizer", "--gpu_memory_gib")
    large, small = (single(OPT_350M, *flags, size, "--cpu_memory_gib", "1") for size in ("80", "2"))
    roomy, tight = MemoryPlan(large), MemoryPlan(small)
    assert [moment.phase for moment in roomy.moments] == ["idle", "evaluate"] + [PHASE] * 3
    assert roomy.of_phase(PHASE) is roomy.peak is roomy.moments[2]
    assert roomy.left == 80 * 2**30 - roomy.peak.total and tight.left == 2 * 2**30 - roomy.peak.total < 0
    on_cpu = (12 + 6) * NUM_350M - 2**30
    assert roomy.lacking == on_cpu and tight.lacking == on_cpu - tight.left


def test_on_a_cpu_all_is_in_one_memory():
    flags = ("--zero_stage", "2", "--offload", "optimizer", "--gpu", "cpu", "--dtype", "fp32")
    idle = MemoryPlan(single(OPT_350M, *flags)).moments[0]
    assert not idle.cpu
    assert idle.gpu["policy", "optimizer"] == 12 * NUM_350M
    assert idle.gpu["policy", "gradients"] == 8 * NUM_350M
    assert idle.gpu["device", "reserved"] == 0.6 * 2**30
