"""Traffic plans: bytes and operations by hand, and groups as the hybrid engine makes them."""

import time

import pytest
from planned_runs import LLAMA_7B, LLAMA_70B, NUM_7B, ppo, single

from common.generation.reshard_plan import TPLayout
from tools.memory_plan import MemoryPlan
from tools.planned_run import Run
from tools.traffic_plan import Phase, plan_traffic, ranks_per_machine, training_flops

HYBRID, ZERO3 = "--enable_hybrid_engine", ("--actor_zero_stage", "3")
READ = 3350e9 * 0.6  # bytes a second of an H100's memory


def on_machines(num_gpus: int, num_nodes: int, *flags: str) -> Run:
    return single(LLAMA_7B, "--num_gpus", str(num_gpus), "--num_nodes", str(num_nodes), *flags)


def plan_rloo(*flags: str, model: str = LLAMA_7B) -> dict[str, Phase]:
    return plan_traffic(ppo(model, "", *flags))


# ---- collectives and rates ------------------------------------------------------------------------------


def test_a_gather_on_one_machine_and_on_two():
    one, two, alone = Phase(), Phase(), Phase()
    one.gather(on_machines(8, 1), 8, 800.0, 1)
    assert (one.intra_bytes, one.inter_bytes) == (700.0, 0.0)
    two.gather(on_machines(8, 2), 16, 800.0, 1)
    # each machine takes in the other's 400 bytes once, 50 a rank; a rank ends with the 750 it lacked
    assert (two.intra_bytes, two.inter_bytes) == (700.0, 50.0)
    alone.gather(on_machines(1, 1), 1, 800.0, 1)
    assert alone == Phase()


def test_seconds_are_those_of_the_slower_link_and_of_latency():
    run, phase, slow = on_machines(8, 2), Phase(), Phase()  # 450 and 50 GB/s, of which 70 % are reached
    phase.gather(run, 16, 16e9, 1)
    seconds = phase.seconds_by(run)
    assert seconds["links in a machine"] == pytest.approx(14e9 / (0.7 * 450e9))
    assert seconds["latency of links"] == pytest.approx(3 * 6e-6 + 12e-6)  # log2 8 inside, log2 2 between
    slow.gather(run, 2, 16e9, 1, stride=8)
    assert slow.seconds_by(run)["links between machines"] == pytest.approx(8e9 / (0.7 * 50e9))
    fast = slow.seconds_by(on_machines(8, 2, "--inter_node_gb_s", "500"))
    assert fast["links between machines"] == pytest.approx(8e9 / (0.7 * 500e9))


def test_the_longer_of_arithmetic_and_reading_counts_and_of_links_where_they_work_beside():
    run = on_machines(1, 1)  # 989 TFLOP/s at 40 %, 3350 GB/s at 60 %, 450 GB/s at 70 %

    def spent(phase: Phase) -> dict[str, float]:
        return {name: round(seconds, 6) for name, seconds in phase.seconds_by(run).items() if seconds}

    second = Phase(flops=989e12 * 0.4, memory_bytes=1.0, intra_bytes=450e9 * 0.7 * 3)
    assert spent(second) == {"arithmetic": 1, "links in a machine": 3}
    second.is_overlapped = True
    assert spent(second) == {"links in a machine": 3}
    assert spent(Phase(flops=1.0, memory_bytes=READ * 2)) == {"memory": 2}


@pytest.mark.parametrize(("num_gpus", "num_nodes"), [(8, 1), (8, 2), (4, 8), (8, 128)])
def test_groups_span_as_many_machines_as_the_engines_layout_says(num_gpus, num_nodes):
    run = on_machines(num_gpus, num_nodes)
    for tp_size in (1, 2, 4, 8):
        layout = TPLayout(run.num_ranks, tp_size, 0)
        nodes = {rank // num_gpus for rank in layout.ranks[:, 0].tolist()}
        stride = run.num_ranks // tp_size
        assert tp_size / ranks_per_machine(run, tp_size, stride) == len(nodes)
        nodes = {rank // num_gpus for rank in layout.ranks[0].tolist()}
        assert layout.gather_size / ranks_per_machine(run, layout.gather_size) == len(nodes)


# ---- phases ---------------------------------------------------------------------------------------------


def test_training_takes_6_operations_a_parameter_and_token_and_8_with_recomputation():
    tokens = 1000
    for flags, factor in (((), 6), (("--gradient_checkpointing",), 8)):
        run = single(LLAMA_7B, "--max_seq_len", "512", *flags)
        (role,) = run.roles
        model = role.model
        head = 6 * model.num_head * tokens  # the head is not recomputed
        # causal scores and values: 2 x 2 x width x length / 2, forward; backward 2.5 times that
        attention = 2 * 4096 * 512 * 32 * tokens * (3.5 if factor == 6 else 4.5)
        expected = factor * model.num_body * tokens + head + attention
        assert training_flops(run, role, tokens) == pytest.approx(expected)
        assert model.num_body + model.num_head == pytest.approx(6.607e9, rel=1e-3)


def received(*flags: str) -> float:
    phase = plan_traffic(single(LLAMA_7B, "--num_gpus", "8", *flags))["train"]
    return phase.intra_bytes + phase.inter_bytes


def test_bytes_of_an_update_by_stage(tmp_path):
    m, share = 2 * NUM_7B, 7 / 8  # weights and gradients in bf16
    assert received("--dtype", "fp32") == pytest.approx(2 * 2 * m * share)
    # DeepSpeed's ZeRO 1 and 2: all-reduce of gradients, all-gather of weights; 2 for every micro-batch
    assert received("--zero_stage", "1") == pytest.approx(3 * m * share)
    two = ("--zero_stage", "2", "--gradient_accumulation_steps", "4")
    assert received(*two) == pytest.approx((4 * 2 + 1) * m * share)
    three = ("--zero_stage", "3", "--gradient_accumulation_steps", "2")  # gathers twice and scatters once
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage3_max_reuse_distance": 0}}')
    anew = received(*three, "--ds_config", str(tmp_path / "ds.json"))
    assert anew == pytest.approx(2 * 3 * m * share, rel=1e-3)
    # half of a distance of 10^9 parameters is still there
    assert anew - received(*three) == pytest.approx(2 * 2 * 5e8 * share, rel=1e-3)


def test_the_switchs_bytes_cross_machines_where_ranks_do():
    flags = (*ZERO3, HYBRID, "--inference_tp_size", "2")
    near = plan_rloo(*flags, "--num_gpus", "4")["switch"]
    sizes = ppo(LLAMA_7B, "", *flags, "--num_gpus", "4").switch_sizes()
    assert near.intra_bytes == pytest.approx(2 * (sizes.from_gather_group + sizes.from_all))
    far = plan_rloo(*flags, "--num_nodes", "4")["switch"]
    assert far.inter_bytes == pytest.approx(near.intra_bytes)
    assert far.intra_bytes == near.inter_bytes == 0 < sizes.from_all
    whole = plan_rloo(HYBRID, "--num_gpus", "8")["switch"]  # each rank has all weights already
    assert whole.intra_bytes == whole.inter_bytes == whole.memory_bytes == 0


def test_a_token_step_of_few_sequences_reads_the_weights():
    flags = (HYBRID, "--per_device_training_batch_size", "1", "--max_answer_seq_len", "2")
    flags += ("--per_device_generation_batch_size", "1", "--max_prompt_seq_len", "4")
    run = ppo(LLAMA_7B, "", *flags)
    read = 2 * 6.607e9 + 5 * 2 * 32 * 4096 * 2  # all but the input embedding, and five tokens' keys
    phase = plan_traffic(run)["generate"]
    assert phase.memory_bytes == pytest.approx(2 * read, rel=1e-3)  # two tokens
    assert phase.seconds_by(run)["memory"] == pytest.approx(2 * read / READ, rel=1e-3)


def test_sums_over_a_replicas_ranks_cross_the_network_where_it_spans_machines():
    flags = (HYBRID, *ZERO3, "--inference_tp_size", "8", "--max_answer_seq_len", "1", "--num_gpus", "8")
    near, far = (plan_rloo(*flags, "--num_nodes", n)["generate"] for n in "18")
    # 2 all-reduces a layer, one of the embedding, one gather of logits, for 128 sequences in bf16
    sums, logits = 65 * 128 * 4096 * 2 * 2, 128 * 32000 * 2
    assert near.intra_bytes == pytest.approx((sums + logits) * 7 / 8) and near.inter_bytes == 0
    assert far.inter_bytes == pytest.approx((sums + logits) * 7 / 8) and far.intra_bytes == 0


def test_gathering_layer_by_layer_is_slower_than_holding_a_slice():
    runs = [
        ppo(LLAMA_7B, "", HYBRID, *ZERO3, "--num_gpus", "8", *more)
        for more in ((), ("--unpin_actor_parameters",))
    ]
    pinned, unpinned = (sum(plan_traffic(run)["generate"].seconds_by(run).values()) for run in runs)
    assert unpinned > 4 * pinned and plan_traffic(runs[1])["switch"] == Phase()


def test_an_offloaded_reference_crosses_the_link_to_the_cpu_and_back():
    run = ppo(LLAMA_7B, "", "--offload_reference_model")
    seconds = plan_traffic(run)["score reference"].seconds_by(run)
    assert seconds["link to the CPU"] == pytest.approx(2 * 2 * NUM_7B / (0.7 * 50e9))


# ---- whole steps ----------------------------------------------------------------------------------------


def test_a_step_has_its_phases_and_tokens():
    flags = ("--num_gpus", "8", "--num_samples_per_prompt", "4", "--generation_batches", "2")
    run = ppo(LLAMA_7B, "", *flags, HYBRID, *ZERO3)
    assert list(plan_traffic(run)) == "switch,prefill,generate,score actor,score reference,train actor".split(
        ","
    )
    assert run.num_tokens == 8 * 16 * 2 * 4 * 256
    assert "score actor" not in plan_rloo("--old_logprobs", "rollout")


def test_1024_ranks_are_planned_at_once():
    flags = ("--num_gpus", "8", "--num_nodes", "128", HYBRID, *ZERO3, "--inference_tp_size", "8")
    flags += (
        "--actor_gradient_checkpointing",
        "--max_prompt_seq_len",
        "1024",
        "--max_answer_seq_len",
        "1024",
    )
    MemoryPlan(ppo(LLAMA_70B, "", *flags))  # traces the activations: once, whatever the number of ranks
    started = time.process_time()
    run = ppo(LLAMA_70B, "", *flags, "--gpu", "h200")
    memory, phases = MemoryPlan(run), plan_traffic(run)
    assert time.process_time() - started < 2
    assert run.num_ranks == 1024 and memory.fits and run.num_tokens == 1024 * 16 * 1024
    seconds = phases["train actor"].seconds_by(run)
    assert max(seconds, key=seconds.get) == "arithmetic"
