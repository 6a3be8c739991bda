"""Time plans: seconds by hand, on machines with round numbers."""

import json
import re
from pathlib import Path

import pytest
from planned_runs import LLAMA_7B, NUM_7B, ppo, single

from benchmarks.evidence.counted_traffic import CASES
from benchmarks.evidence.scale import check_counted, generation_share, plan_fastest
from tools import time_plan
from tools.machines import Machines
from tools.memory_plan import MemoryPlan
from tools.time_plan import (
    PhaseTime,
    count_matrices,
    describe_lengths,
    hours_of_run,
    plan_times,
    ring_seconds,
    tree_seconds,
)
from tools.traced_layers import Activations, Moved
from tools.traffic_plan import plan_traffic

SCALE = json.loads((Path(__file__).resolve().parents[2] / "docs/results/scale.json").read_text())
ROUND = Machines(
    flops=2e12,
    memory=4e9,
    near=2e9,
    far=1e9,
    host=5e8,
    arithmetic_share=0.5,
    attention_share=0.25,
    memory_share=0.25,
    link_share=0.5,
    reads=1e9,
    layer_seconds=1.0,
    launch_seconds=0.01,
    ring=(100.0, 1.0, 10.0),
    tree=(1000.0, 2.0, 20.0),
)
SHARDED = ("--actor_zero_stage", "3", "--enable_hybrid_engine", "--num_gpus", "8", "--num_nodes", "4")
SHARDED += (
    "--max_prompt_seq_len",
    "64",
    "--max_answer_seq_len",
    "32",
    "--per_device_generation_batch_size",
    "4",
)
SHARDED += ("--per_device_training_batch_size", "2", "--gradient_accumulation_steps", "2")
BODY, HEAD, ATTENTION = NUM_7B - 65 * 4096 - 2 * 32000 * 4096, 32000 * 4096, 2 * 32 * 4096


def sharded(*flags: str):
    return ppo(LLAMA_7B, "", *SHARDED, *flags)


def test_a_ring_goes_through_all_and_a_tree_up_and_down():
    run = sharded()
    assert ring_seconds(run, 32, ROUND) == 100 + 28 * 1 + 3 * 10
    assert ring_seconds(run, 4, ROUND, stride=8) == 100 + 3 * 10  # one of each machine
    assert tree_seconds(run, 8, ROUND) == 1000 + 2 * 7 * 2
    assert tree_seconds(run, 16, ROUND) == 1000 + 2 * (7 * 2 + 20)
    assert ring_seconds(run, 1, ROUND) == tree_seconds(run, 1, ROUND) == 0


def test_computation_launches_and_links_overlap_in_passes_alone():
    causes = {"arithmetic": 5.0, "memory": 1.0, "kernels": 3.0, "links": 2.0, "hops": 5.0}
    beside, behind = PhaseTime(**causes, is_overlapped=True), PhaseTime(**causes)
    assert (beside.seconds, beside.bound) == (7.0, "hops")
    assert (behind.seconds, behind.bound) == (16.0, "arithmetic")
    shorter = PhaseTime(**causes | {"hops": 1.0}, is_overlapped=True)
    assert (shorter.seconds, shorter.bound) == (6.0, "arithmetic")
    slow_host = PhaseTime(**causes | {"kernels": 8.0}, is_overlapped=True)
    assert (slow_host.seconds, slow_host.bound) == (8.0, "kernels")


@pytest.fixture
def traced(monkeypatch) -> Activations:
    """A layer of round numbers: 10 launches and 1000 bytes forward, 30 and 4000 in a training pass."""
    layer = Activations(0, 0, 0, 0, Moved(10, 1000), Moved(30, 4000))
    monkeypatch.setattr(time_plan, "trace_activations", lambda *_: layer)
    return layer


def test_an_update_is_three_passes_and_its_gathers():
    run = sharded("--actor_gradient_checkpointing")
    time, phase = plan_times(run, ROUND)["train actor"], plan_traffic(run)["train actor"]
    forward = 2 * (4 * 96 * BODY + 4 * 32 * HEAD)
    recomputed = 2 * 4 * 96 * BODY
    causal = 2 * 4 * 96**2 / 2 * ATTENTION  # a token and those before it
    assert time.arithmetic == pytest.approx((3 * forward + recomputed) / 1e12 + 4 * causal / 5e11)
    # a rank takes in more from its machine, over a link that is twice as fast
    assert phase.intra_bytes / 2e9 > phase.inter_bytes / 1e9
    assert time.links == pytest.approx(phase.intra_bytes / 1e9)
    # 2 micro-batches: matrices twice but for what is there within 1e9 / 3, and 34 buckets of 2e8 gradients
    gathers = 226 * (2 - 1e9 / 3 / NUM_7B) + 34
    assert count_matrices(run.actor) == 226
    assert time.hops == pytest.approx(2 * 158 * gathers)
    times = plan_times(sharded("--actor_gradient_checkpointing", "--ppo_epochs", "3"), ROUND)
    assert times["train actor"].hops == pytest.approx(3 * time.hops)


@pytest.mark.parametrize(("stage", "buckets"), [("0", 14), ("1", 34), ("2", 2 * 34)])
def test_gradients_without_shards_take_two_rings_a_bucket(stage, buckets):
    """In each of 2 micro-batches under ZeRO 2, else once an update; of 2e8 gradients, of 5e8 under ZeRO 0."""
    times = plan_times(sharded("--actor_zero_stage", stage, "--dtype", "fp32"), ROUND)
    assert times["train actor"].hops == 158 * buckets * 2
    assert times["score reference"].hops == times["switch"].hops == 0


@pytest.mark.parametrize(
    ("flags", "hops"),
    [
        ((), 226 * 158),  # each matrix by itself, from all 32 ranks
        # 8 layers at a time, and the rest; then from 8 ranks
        (("--inference_tp_size", "4"), 5 * 158 + 226 * 107),
        (("--inference_tp_size", "2"), 5 * 158 + 226 * 124),
        (("--inference_tp_size", "2", "--inference_tp_groups", "contiguous"), 5 * 158),
        (("--inference_tp_size", "4", "--inference_tp_groups", "contiguous"), 5 * 158),
        (("--inference_tp_size", "4", "--tp_gather_partition_size", "5"), 8 * 158 + 226 * 107),
        (("--unpin_actor_parameters",), 0),
    ],
)
def test_the_switch_takes_a_ring_for_each_exchange(flags, hops):
    assert plan_times(sharded(*flags), ROUND)["switch"].hops == hops


def test_a_token_step_reads_weights_and_keys_and_sums(traced):
    time = plan_times(sharded("--inference_tp_size", "2", "--inference_tp_groups", "contiguous"), ROUND)[
        "generate"
    ]
    steps = 31  # for 8 responses of 32 tokens at a time
    keys = 8 * (64 + 16) * 2 * 32 * 2048 * 2
    of_prompts = 8 * 64 / 96 * 32 * 1000 / 2
    assert time.memory == pytest.approx((steps * (2 * (BODY + HEAD) / 2 + keys) + of_prompts) / 1e9)
    assert time.kernels == steps * 32
    assert time.hops == pytest.approx(steps * (2 * 32 + 2) * 1004)
    apart = plan_times(sharded("--inference_tp_size", "2"), ROUND)["generate"]  # on two machines
    assert apart.hops == pytest.approx(steps * (2 * 32 + 2) * 1040)
    reading = 2 * (8 * 64 * BODY + 8 * HEAD)
    causal = 2 * 8 * 64**2 / 2 * ATTENTION
    assert time.arithmetic == pytest.approx((reading / 1e12 + causal / 5e11) / 2)
    assert time.seconds == pytest.approx(sum(time.causes.values()))


def test_twice_the_slots_take_half_the_steps():
    few, many = (plan_times(sharded("--generation_slots", slots), ROUND)["generate"] for slots in ("2", "4"))
    assert few.kernels == 2 * many.kernels == 2 * 31 * 32
    of_both = ("--generation_slots", "4", "--inference_tp_size", "2")  # prompts of two ranks
    assert plan_times(sharded(*of_both), ROUND)["generate"].kernels == 2 * 31 * 32
    slots = ("--generation_slots", "4", "--num_samples_per_prompt", "3")
    assert plan_times(sharded(*slots), ROUND)["generate"].kernels == 3 * 31 * 32


def test_states_that_wait_on_the_cpu_take_their_time_at_the_switch():
    switch = plan_times(sharded("--offload_states_for_generation"), ROUND)["switch"]
    assert switch.host == pytest.approx(2 * 12 * NUM_7B / 32 / 2.5e8)


def test_step_1_has_one_phase():
    flags = ("--max_seq_len", "128", "--per_device_train_batch_size", "2", "--zero_stage", "2")
    time = plan_times(single(LLAMA_7B, *flags), ROUND)["train"]
    products = 6 * 256 * (BODY + HEAD) / 1e12 + 6 * 2 * 128**2 / 2 * ATTENTION / 5e11
    assert time.arithmetic == pytest.approx(products)
    assert time.links == time.hops == 0  # one rank


def test_a_training_pass_moves_activations_gradients_and_optimizer_states(traced):
    """The optimizer has 12 bytes per weight; it reads the gradient twice and writes the weight in bf16."""
    flags = ("--max_seq_len", "128", "--per_device_train_batch_size", "2", "--zero_stage", "2")
    plain, more = (
        plan_times(single(LLAMA_7B, *flags, *extra), ROUND)["train"]
        for extra in ((), ("--gradient_checkpointing", "--gradient_accumulation_steps", "3"))
    )
    logits = 2 * 256 * 32000 * (2 + 8)
    states = (2 * 12 + 3 * 2) * NUM_7B
    gradients = 3 * 2 * NUM_7B
    assert plain.memory == pytest.approx((2 * 32 * 4000 + logits + gradients + states) / 1e9)
    assert more.memory == pytest.approx((3 * (2 * 32 * (4000 + 1000) + logits + gradients) + states) / 1e9)
    # 20 of torch's attention per layer; 6 of each of the 9 weights of 32 layers and 3 others; 113 of the step
    weights = 9 * 32 + 3
    assert plain.kernels == pytest.approx(0.01 * (32 * (30 + 20) + 6 * weights + 113))
    assert more.kernels == pytest.approx(0.01 * (3 * (32 * (30 + 10 + 20) + 6 * weights) + 113))


def test_without_shards_each_rank_steps_all_weights(traced):
    """Of 8 bytes of moments per weight in fp32; ZeRO 1 has a copy of the weights besides."""
    flags = ("--max_seq_len", "128", "--dtype", "fp32", "--num_gpus", "4", "--zero_stage")
    alone, shared = (plan_times(single(LLAMA_7B, *flags, stage), ROUND)["train"] for stage in "01")
    stepped = (2 * 8 + 3 * 4) - (2 * 12 + 3 * 4) / 4
    assert alone.memory - shared.memory == pytest.approx(stepped * NUM_7B / 1e9)


def test_adapters_take_launches_and_bytes(traced):
    flags = ("--max_seq_len", "128", "--per_device_train_batch_size", "2", "--zero_stage", "2")
    run = single(LLAMA_7B, *flags, "--lora_dim", "4")
    time = plan_times(run, ROUND)["train"]
    num_trained = 4 * 32 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
    assert run.roles[0].model.num_trained == num_trained
    adapters = 2 * 5 * 2 * 256 * num_trained / 4
    logits = 2 * 256 * 32000 * (2 + 8)
    assert time.memory == pytest.approx((2 * 32 * 4000 + adapters + logits + (6 + 30) * num_trained) / 1e9)
    assert time.kernels == pytest.approx(0.01 * (32 * 50 + 6 * 2 * 7 * 32 + 2 * 5 * 7 * 32 + 113))


def test_scores_of_the_reference(traced):
    time = plan_times(sharded(), ROUND)["score reference"]
    logits = 4 * 32 * 32000 * (2 + 8)
    assert time.memory == pytest.approx((4 * 32 * 1000 + logits) / 1e9)
    gathers = 25 * 226  # of ZeRO 3
    assert time.kernels == pytest.approx(0.01 * 2 * (32 * 10 + gathers))  # two passes of 2 rows
    training = plan_times(sharded(), ROUND)["train actor"]
    of_pass = 32 * (30 + 20) + 6 * (9 * 32 + 3) + 2 * gathers
    assert training.kernels == pytest.approx(0.01 * (2 * of_pass + 113))


def test_adam_on_a_gpu_machines_cpu_overlaps_nothing_and_is_shared_by_its_ranks(traced):
    """3.8e9 weights a second for the whole machine, however its ranks share them."""
    flags = ("--max_seq_len", "128", "--per_device_train_batch_size", "2", "--offload", "optimizer")
    near, away = (plan_times(single(LLAMA_7B, *words), ROUND)["train"] for words in (flags[:4], flags))
    assert near.memory - away.memory == pytest.approx((2 * 12 + 3 * 2) * NUM_7B / 1e9)
    assert near.cpu_adam == 0 and away.cpu_adam == pytest.approx(NUM_7B / 3.8e9)
    others = max(away.arithmetic + away.memory, away.kernels, away.links + away.hops + away.host)
    assert away.seconds == pytest.approx(others + away.cpu_adam)
    machines = (*flags, "--zero_stage", "2", "--num_gpus", "4", "--num_nodes", "2")
    assert plan_times(single(LLAMA_7B, *machines), ROUND)["train"].cpu_adam == pytest.approx(
        NUM_7B / 2 / 3.8e9
    )
    on_cpu = plan_times(single(LLAMA_7B, *flags, "--gpu", "cpu", "--zero_stage", "1"), ROUND)["train"]
    assert on_cpu.cpu_adam == 0  # it is among the bytes that its only memory moves
    updates = ("--offload", "optimizer", "--ppo_epochs", "3", "--old_logprobs", "recompute")
    offloaded = plan_times(sharded(*updates), ROUND)
    assert offloaded["train actor"].cpu_adam == pytest.approx(3 * 1 * NUM_7B / 4 / 3.8e9)
    assert offloaded["score actor"].cpu_adam == 0


@pytest.mark.parametrize("gpu", ["h100-80g", "cpu"])
def test_each_epoch_trains_again_and_none_scores_again(traced, gpu):
    machine = ROUND._replace(is_cpu=gpu == "cpu")
    once, thrice = (
        plan_times(sharded("--gpu", gpu, "--dtype", "bf16", "--ppo_epochs", number), machine)
        for number in "13"
    )
    assert thrice["score reference"] == once["score reference"]
    training = {cause: pytest.approx(3 * seconds) for cause, seconds in once["train actor"].causes.items()}
    assert thrice["train actor"].causes == training


def test_without_graphs_a_token_step_launches_each_operation(traced):
    kernels = plan_times(sharded("--no_cuda_graphs"), ROUND)["generate"].kernels
    assert kernels == pytest.approx(31 * (32 * (10 + 2) + 91) * 0.01)


def test_a_prompt_that_a_group_shares_is_computed_once():
    flags = ("--num_samples_per_prompt", "4", "--per_device_generation_batch_size", "1")
    shared, alone = (
        plan_times(sharded(*flags, *more), ROUND)["score reference"] for more in ((), ("--no_share_prompts",))
    )
    assert alone.arithmetic - shared.arithmetic == pytest.approx(2 * 3 * 64 * BODY / 1e12)


def test_nothing_overlaps_on_a_cpu_and_token_steps_launch_each_operation(traced):
    flags = ("--gpu", "cpu", "--dtype", "bf16", "--max_prompt_seq_len", "64", "--max_answer_seq_len", "32")
    flags += ("--per_device_generation_batch_size", "2", "--per_device_training_batch_size", "2")
    run = ppo(LLAMA_7B, "", *flags, "--enable_hybrid_engine")
    times = plan_times(run, ROUND._replace(is_cpu=True))
    score, generate = times["score reference"], times["generate"]
    assert score.seconds == pytest.approx(sum(score.causes.values()))
    # twice the measured launches, and four of each of 7 matrices of 32 layers and the head
    assert generate.kernels == pytest.approx(31 * (2 * (32 * (10 + 2) + 91) + 4 * (7 * 32)) * 0.01)
    assert score.kernels == pytest.approx(
        (2 * 32 * 10 + 2 * 32 * 12) * 0.01
    )  # twelve of each row's attention
    weights = 6 * (9 * 32 + 3) + 113
    assert times["train actor"].kernels == pytest.approx((2 * 32 * 30 + 2 * 2 * 32 * 12 + weights) * 0.01)
    keys = 2 * (64 + 16) * 2 * 32 * 4096 * 2
    reads = (31 * (2 * (BODY + HEAD) + keys) + 2 * 64 / 96 * 32 * 1000) / 1e9
    pairs = 2 * (31 * 64 + 31 * 32 / 2)
    decoding = 2 * (2 * 31 * (BODY + HEAD) + pairs * ATTENTION) / 1e12
    assert generate.memory == pytest.approx(reads + decoding)


# ---- mean lengths ---------------------------------------------------------------------------------------

MEANS = ("--mean_prompt_seq_len", "24.5", "--mean_answer_seq_len", "16.25")


def test_seconds_are_of_mean_lengths_and_memory_of_full_ones():
    full, short = (sharded(), sharded(*MEANS))
    assert MemoryPlan(full).peak == MemoryPlan(short).peak and plan_traffic(full) == plan_traffic(short)
    time = plan_times(short, ROUND)["score reference"]
    tokens, scored = 4 * (24.5 + 16.25), 4 * 16.25
    causal = 2 * 4 * 40.75**2 / 2 * ATTENTION
    assert time.arithmetic == pytest.approx(2 * (tokens * BODY + scored * HEAD) / 1e12 + causal / 5e11)
    assert describe_lengths(short) == "prompts of 24.5 and responses of 16.25 tokens"
    assert describe_lengths(full) == "prompts of 64 and responses of 32 tokens"
    flags = ("--max_seq_len", "128", "--per_device_train_batch_size", "2", "--zero_stage", "2")
    row = single(LLAMA_7B, *flags, "--mean_seq_len", "50.5")
    products = 6 * 101 * (BODY + HEAD) / 1e12 + 6 * 2 * 50.5**2 / 2 * ATTENTION / 5e11
    assert plan_times(row, ROUND)["train"].arithmetic == pytest.approx(products)
    assert describe_lengths(row) == "sequences of 50.5 tokens" and hours_of_run(row, 1.0) == 0


def test_token_steps_are_those_of_full_slots_but_as_many_as_the_longest_response_has(traced):
    """Of 4 responses of 16.25 tokens on average, of 32 at most."""
    steps = {
        slots: plan_times(sharded(*MEANS, "--generation_slots", slots), ROUND)["generate"].kernels / 32
        for slots in ("1", "2", "4")
    }
    assert steps == {"1": 4 * 15.25, "2": 31, "4": 31}
    alone = plan_times(sharded(*MEANS, "--generation_slots", "4"), ROUND)["generate"]
    keys = 4 * 15.25 * (24.5 + 16.25 / 2) * 2 * 32 * 4096 * 2
    of_prompts = 4 * 24.5 / 41 * 32 * 1000
    assert alone.memory == pytest.approx((31 * 2 * (BODY + HEAD) + keys + of_prompts) / 1e9)


def test_shorter_rows_need_fewer_passes_of_as_many_tokens(traced):
    flags = ("--max_seq_len", "128", "--per_device_train_batch_size", "2", "--zero_stage", "2")
    flags += ("--gradient_accumulation_steps", "6", "--mean_seq_len", "42.6")
    cap = ("--max_tokens_per_micro_batch", "256")
    of_pass, step = 32 * (30 + 20) + 6 * (9 * 32 + 3), 113
    for more, num_passes in (((), 6), (cap, 2), (("--packed",), 2)):
        time = plan_times(single(LLAMA_7B, *flags, *more), ROUND)["train"]
        assert time.kernels == pytest.approx(0.01 * (num_passes * of_pass + step)), more


@pytest.mark.parametrize(
    ("flag", "text", "allowed"),
    [
        ("--mean_seq_len", "40", "1 to 0 (--max_seq_len"),
        ("--mean_prompt_seq_len", "64.5", "1 to 64 (--max_prompt_seq_len"),
        ("--mean_answer_seq_len", "0.5", "1 to 32 (--max_answer_seq_len"),
    ],
)
def test_a_mean_that_no_rows_can_have_is_refused(flag, text, allowed):
    with pytest.raises(AssertionError, match=re.escape(f"{flag} {text}: step 3 allows {allowed}")):
        sharded(flag, text)


def test_hours_of_rows_and_of_steps():
    flags = ("--max_seq_len", "128", "--per_device_train_batch_size", "2", "--num_gpus", "4")
    flags += ("--gradient_accumulation_steps", "3")
    hours = lambda *more: hours_of_run(single(LLAMA_7B, *flags, *more), 36.0)  # noqa: E731
    assert hours() == 0
    assert hours("--num_rows", "2400", "--num_train_epochs", "2") == pytest.approx(2.0)  # 200 steps of 24
    assert hours("--max_train_steps", "50") == pytest.approx(0.5)
    assert hours("--max_train_steps", "50", "--num_rows", "240") == pytest.approx(0.1)
    step3 = sharded("--num_rows", "1280")  # 4 prompts of 32 ranks, 10 steps
    assert hours_of_run(step3, 36.0) == pytest.approx(0.1)


# ---- docs/results/scale.json ----------------------------------------------------------------------------


def test_the_committed_plan_is_what_is_planned_now():
    [row] = [row for row in SCALE["planned"] if (row["model"], row["gpus"]) == ("7B", 64)]
    assert plan_fastest("7B", 64) == row
    [row] = [row for row in SCALE["planned"] if (row["model"], row["gpus"]) == ("70B", 1024)]
    shares = SCALE["generation_share"]
    assert shares == {doubt: generation_share(row, doubt) for doubt in shares}


@pytest.mark.parametrize("row", SCALE["counted"], ids=lambda row: f"{row['case']}-{row['ranks']}")
def test_committed_bytes_are_the_plans(row):
    assert row["case"] in CASES
    check_counted(row)


@pytest.mark.parametrize("name", ["received", "planned"])
def test_bytes_that_are_not_the_plans_are_refused(name):
    row = SCALE["counted"][0]
    [phase] = row["planned"]
    with pytest.raises(RuntimeError, match=rf"^SFT, ZeRO 2 on 2 ranks, {phase}: "):
        check_counted(row | {name: {phase: 1.03 * row[name][phase]}})
    with pytest.raises(RuntimeError, match="all, on sockets"):
        check_counted(row | {"on_wire": 1.03 * row["expected_on_wire"]})
    with pytest.raises(RuntimeError, match="switch: 1 bytes of 0"):
        check_counted(row | {"received": row["received"] | {"switch": 1}})
