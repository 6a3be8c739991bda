"""Time plans: seconds by hand, on machines with round numbers."""

import json
from pathlib import Path

import pytest
from planned_runs import LLAMA_7B, NUM_7B, ppo, single

from benchmarks.evidence.counted_traffic import CASES
from benchmarks.evidence.scale import check_counted, generation_share, plan_fastest
from tools.time_plan import Machines, PhaseTime, count_matrices, plan_times, ring_seconds, tree_seconds
from tools.traffic_plan import plan_traffic

SCALE = json.loads((Path(__file__).resolve().parents[2] / "docs/results/scale.json").read_text())
ROUND = Machines(
    flops=2e12,
    memory=4e9,
    near=2e9,
    far=1e9,
    host=5e8,
    arithmetic_share=0.5,
    memory_share=0.25,
    link_share=0.5,
    layer_seconds=1.0,
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


def test_what_is_sent_goes_on_beside_arithmetic_in_passes_alone():
    causes = {"arithmetic": 5.0, "links": 2.0, "hops": 4.0}
    beside, behind = PhaseTime(**causes, is_overlapped=True), PhaseTime(**causes)
    assert (beside.seconds, beside.bound) == (6.0, "hops")
    assert (behind.seconds, behind.bound) == (11.0, "arithmetic")
    shorter = PhaseTime(**causes | {"hops": 1.0}, is_overlapped=True)
    assert (shorter.seconds, shorter.bound) == (5.0, "arithmetic")


def test_an_update_is_three_passes_and_its_gathers():
    run = sharded("--actor_gradient_checkpointing")
    time, phase = plan_times(run, ROUND)["train actor"], plan_traffic(run)["train actor"]
    forward = 2 * (4 * 96 * BODY + 4 * 32 * HEAD + 4 * 96**2 * ATTENTION)
    recomputed = forward - 2 * 4 * 32 * HEAD
    assert time.arithmetic == pytest.approx((3 * forward + recomputed) / 1e12)
    # a rank takes in more from its machine, over a link that is twice as fast
    assert phase.intra_bytes / 2e9 > phase.inter_bytes / 1e9
    assert time.links == pytest.approx(phase.intra_bytes / 1e9)
    # 2 micro-batches: matrices twice but for what is there within 1e9 / 3, and 34 buckets of 2e8 gradients
    gathers = 226 * (2 - 1e9 / 3 / NUM_7B) + 34
    assert count_matrices(run.actor) == 226
    assert time.hops == pytest.approx(2 * 158 * gathers)


def test_a_token_step_reads_weights_and_keys_and_sums():
    time = plan_times(sharded("--inference_tp_size", "2", "--inference_tp_groups", "contiguous"), ROUND)[
        "generate"
    ]
    steps = 31  # for 8 responses of 32 tokens at a time
    keys = 8 * (64 + 16) * 2 * 32 * 2048 * 2
    assert time.memory == pytest.approx(steps * (2 * (BODY + HEAD) / 2 + keys) / 1e9)
    assert time.kernels == steps * 32
    assert time.hops == pytest.approx(steps * (2 * 32 + 2) * 1004)
    reading = 2 * (8 * 64 * BODY + 8 * HEAD + 8 * 64**2 * ATTENTION)
    assert time.arithmetic == pytest.approx(reading / 2 / 1e12)
    assert time.seconds == pytest.approx(sum(time.causes.values()))


def test_twice_the_slots_take_half_the_steps():
    few, many = (plan_times(sharded("--generation_slots", slots), ROUND)["generate"] for slots in ("2", "4"))
    assert few.kernels == 2 * many.kernels == 2 * 31 * 32


def test_states_that_wait_on_the_cpu_take_their_time_at_the_switch():
    switch = plan_times(sharded("--offload_states_for_generation"), ROUND)["switch"]
    assert switch.host == pytest.approx(2 * 12 * NUM_7B / 32 / 2.5e8)


def test_step_1_has_one_phase():
    flags = ("--max_seq_len", "128", "--per_device_train_batch_size", "2", "--zero_stage", "2")
    time = plan_times(single(LLAMA_7B, *flags), ROUND)["train"]
    assert time.arithmetic == pytest.approx(6 * (256 * (BODY + HEAD) + 2 * 128**2 * ATTENTION) / 1e12)
    assert time.links == time.hops == 0  # one rank


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
