"""Traffic plans: bytes by hand, and groups as the hybrid engine makes them."""

import pytest
from planned_runs import (
    LLAMA_7B,
    LLAMA_70B,
    NUM_1B,
    NUM_7B,
    NUM_350M,
    OPT_1B,
    OPT_350M,
    ppo,
    single,
    with_zero,
)

from tools.memory_plan import MemoryPlan
from tools.planned_run import Run
from tools.traffic_plan import Phase, plan_traffic

HYBRID, ZERO3 = "--enable_hybrid_engine", ("--actor_zero_stage", "3")


def on_machines(num_gpus: int, num_nodes: int) -> Run:
    return single(LLAMA_7B, "--num_gpus", str(num_gpus), "--num_nodes", str(num_nodes))


def plan_rloo(*flags: str) -> dict[str, Phase]:
    return plan_traffic(ppo(LLAMA_7B, "", *flags))


def test_a_gather_on_one_machine_and_on_two():
    one, two, alone = Phase(), Phase(), Phase()
    one.gather(on_machines(8, 1), 8, 800.0)
    assert (one.intra_bytes, one.inter_bytes) == (700.0, 0.0)
    two.gather(on_machines(8, 2), 16, 800.0)
    # each machine takes in the other's 400 bytes once, 50 a rank; a rank ends with the 750 it lacked
    assert (two.intra_bytes, two.inter_bytes) == (700.0, 50.0)
    alone.gather(on_machines(1, 1), 1, 800.0)
    assert alone == Phase()


def received(*flags: str) -> float:
    phase = plan_traffic(single(LLAMA_7B, "--num_gpus", "8", *flags))["train"]
    return phase.intra_bytes + phase.inter_bytes


def test_bytes_of_an_update_by_stage(tmp_path):
    m, share = 2 * NUM_7B, 7 / 8  # weights and gradients in bf16
    assert received("--dtype", "fp32") == pytest.approx(2 * 2 * m * share)
    # DeepSpeed's ZeRO 1 and 2: all-reduce of gradients, all-gather of weights; 2 for every micro-batch
    for more in ((), ("--gradient_accumulation_steps", "4")):
        assert received("--zero_stage", "1", *more) == pytest.approx(3 * m * share)
    two = ("--zero_stage", "2", "--gradient_accumulation_steps", "4")
    assert received(*two) == pytest.approx((4 * 2 + 1) * m * share)
    three = ("--zero_stage", "3", "--gradient_accumulation_steps", "2")  # gathers twice and scatters once
    anew = received(*three, *with_zero(tmp_path, stage3_max_reuse_distance=0))
    assert anew == pytest.approx(2 * 3 * m * share)
    # half of a distance of 10^9 parameters is still there
    assert anew - received(*three) == pytest.approx(2 * 2 * 5e8 * share)


@pytest.mark.parametrize("more", [(), ("--gradient_checkpointing",)])
def test_weights_that_all_lie_within_the_reuse_distance_are_gathered_once(more):
    phase = plan_traffic(single(OPT_350M, "--num_gpus", "8", "--zero_stage", "3", *more))["train"]
    assert phase.intra_bytes == pytest.approx((1 + 1) * 2 * NUM_350M * 7 / 8, abs=0.5)


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_gradients_go_to_the_cpu_and_weights_come_back_in_every_epoch(stage):
    def train(*more: str) -> Phase:
        return plan_rloo("--num_gpus", "2", "--actor_zero_stage", stage, *more)["train actor"]

    plain, away, thrice = train(), train("--offload", "optimizer"), train("--ppo_epochs", "3")
    assert thrice.intra_bytes == 3 * plain.intra_bytes and plain.host_bytes == 0
    assert away.host_bytes == 2 * 2 * NUM_7B / 2
    assert train("--offload", "optimizer", "--ppo_epochs", "3").host_bytes == 3 * away.host_bytes
    if stage == "3":  # each rank's part of the weights, for each gather
        gathered = 2 * NUM_7B * (2 - 1e9 / 2 / NUM_7B)
        assert train("--offload", "all").host_bytes == pytest.approx(away.host_bytes + gathered / 2)


def test_what_a_recomputed_layer_uses_early_is_gathered_a_third_time(tmp_path):
    def received_with(distance: float, *flags: str) -> float:
        limit = with_zero(tmp_path, stage3_max_reuse_distance=round(distance))
        return received("--zero_stage", "3", *limit, *flags)

    attention, mlp = 4 * 4096 * 4096, 4096 * 11008  # of a layer: 4 matrices together, one of 3
    # The last matrix is there when the backward pass begins. Behind gate_proj are two of the MLP, recomputed
    # and then used backwards; behind up_proj one, behind o_proj three.
    for distance, thrice in (
        (0, attention + 2 * mlp),
        (3 * mlp, attention + mlp),
        (5 * mlp, attention),
        (4e8, 0),
    ):
        again, kept = received_with(distance, "--gradient_checkpointing"), received_with(distance * 2 / 3)
        assert again - kept == pytest.approx(2 * 32 * thrice * 7 / 8, abs=10)


def test_the_switchs_bytes_cross_machines_where_ranks_do():
    flags = (*ZERO3, HYBRID, "--inference_tp_size", "2")
    near = plan_rloo(*flags, "--num_gpus", "8")["switch"]
    switch = ppo(LLAMA_7B, "", *flags, "--num_gpus", "8").plan_switch()
    assert near.intra_bytes == pytest.approx(2 * (switch.from_gather_group + switch.from_all))
    far = plan_rloo(*flags, "--num_nodes", "8")["switch"]
    assert far.inter_bytes == pytest.approx(near.intra_bytes)
    assert far.intra_bytes == near.inter_bytes == 0 < switch.from_all
    assert plan_rloo(HYBRID, "--num_gpus", "8")["switch"] == Phase()  # each rank has all weights already


def test_sums_over_a_replicas_ranks_cross_the_network_where_it_spans_machines():
    flags = (HYBRID, *ZERO3, "--inference_tp_size", "8", "--max_answer_seq_len", "1", "--num_gpus", "8")
    near, far = (plan_rloo(*flags, "--num_nodes", n)["generate"] for n in "18")
    # 2 all-reduces a layer, one of the embedding for each token of 128 prompts; one gather of their logits
    sums, logits = 65 * 128 * 256 * 4096 * 2 * 2, 128 * 32000 * 2
    assert near.intra_bytes == pytest.approx((sums + logits) * 7 / 8) and near.inter_bytes == 0
    assert far.inter_bytes == pytest.approx((sums + logits) * 7 / 8) and far.intra_bytes == 0


def test_a_token_that_is_sampled_is_read_but_for_the_last():
    flags = (HYBRID, *ZERO3, "--inference_tp_size", "2", "--num_gpus", "2", "--num_samples_per_prompt", "3")
    one, three = (plan_rloo(*flags, "--max_answer_seq_len", n)["generate"].intra_bytes for n in "13")
    sums, logits = 65 * 4096 * 2 * 2, 32000 * 2
    # 2 tokens more of each of 2 x 16 x 3 responses; half of what two ranks gather comes from the other
    assert three - one == pytest.approx(2 * 96 * (sums + logits) / 2)


def test_neighbours_sum_on_their_machine_and_fetch_their_slices_from_others():
    flags = (HYBRID, *ZERO3, "--inference_tp_size", "8", "--num_gpus", "8", "--num_nodes", "8")
    strided, contiguous = (
        plan_rloo(*flags, "--inference_tp_groups", groups) for groups in ("strided", "contiguous")
    )
    assert (contiguous["generate"].intra_bytes, contiguous["generate"].inter_bytes) == (
        strided["generate"].inter_bytes,
        strided["generate"].intra_bytes,
    )
    # Of what is cut, and by rows, a rank lacks all of its 1/8, or 7/8 of that, which its machine has.
    m = 2 * NUM_7B / 8
    received = contiguous["switch"].intra_bytes + contiguous["switch"].inter_bytes
    assert received == pytest.approx(m, rel=0.01)
    assert contiguous["switch"].inter_bytes == pytest.approx(m * 56 / 63, rel=0.01)
    assert strided["switch"].inter_bytes < 0.4 * contiguous["switch"].inter_bytes


def test_gathering_layer_by_layer_receives_all_weights_for_every_token():
    flags = (HYBRID, *ZERO3, "--num_gpus", "8", "--unpin_actor_parameters")
    few, many = (plan_rloo(*flags, "--per_device_generation_batch_size", n) for n in ("16", "64"))
    assert few["switch"] == Phase()
    # 4,096 tokens of prompts of 256, then each token of a response but the last
    assert few["generate"].intra_bytes == pytest.approx((1 + 255) * 2 * NUM_7B * 7 / 8)
    assert many["generate"].intra_bytes == pytest.approx((4 + 255) * 2 * NUM_7B * 7 / 8)


def test_an_offloaded_reference_crosses_the_link_from_the_cpu_and_nothing_comes_back():
    phases = plan_rloo("--offload_reference_model")
    assert phases["score reference"].host_bytes == 2 * NUM_7B
    flags = ("--offload_reference_model", *ZERO3, "--num_gpus", "4")
    assert plan_rloo(*flags)["score reference"].host_bytes == 2 * NUM_7B / 4


def test_a_step_of_several_batches_generates_each():
    for way in (("--inference_tp_size", "2"), ("--unpin_actor_parameters",)):
        flags = (HYBRID, *ZERO3, "--num_gpus", "2", *way)
        one, three = (plan_rloo(*flags, "--generation_batches", n)["generate"].intra_bytes for n in "13")
        assert three == 3 * one > 0


def test_states_that_wait_on_the_cpu_cross_the_link_twice():
    flags = ("--offload_states_for_generation", "--num_gpus", "4")
    both, actor_alone, neither = (
        plan_traffic(ppo(OPT_1B, OPT_350M, *more))["switch"].host_bytes
        for more in (flags, (*flags, "--critic_offload", "param", "--critic_zero_stage", "3"), flags[1:])
    )
    assert both == pytest.approx(2 * 12 * (NUM_1B + NUM_350M) / 4) and neither == 0
    assert actor_alone == pytest.approx(2 * 12 * NUM_1B / 4)


def test_a_step_has_its_phases_and_scores_the_actor_only_where_its_numbers_are_not_the_samplers():
    recomputed = ["switch", "generate", "score actor", "score reference", "train actor"]
    assert list(plan_rloo(HYBRID, *ZERO3, "--old_logprobs", "recompute")) == recomputed
    assert list(plan_rloo(HYBRID, *ZERO3, "--trusted_logprob_gap", "0.001")) == recomputed
    trusted = [phase for phase in recomputed if phase != "score actor"]
    assert list(plan_rloo(HYBRID, *ZERO3)) == list(plan_rloo("--old_logprobs", "rollout", HYBRID)) == trusted


def test_1024_ranks_can_be_planned():
    flags = ("--num_gpus", "8", "--num_nodes", "128", HYBRID, *ZERO3, "--inference_tp_size", "8")
    flags += ("--actor_gradient_checkpointing", "--max_prompt_seq_len", "1024")
    run = ppo(LLAMA_70B, "", *flags, "--max_answer_seq_len", "1024", "--gpu", "h200")
    assert MemoryPlan(run).fits and plan_traffic(run)["train actor"].inter_bytes > 0
