"""Traffic plans: bytes and operations by hand, and groups as the hybrid engine makes them."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import transformers
from tiny_configs import tiny_config

from common.flags.args import Problems
from common.generation.reshard_plan import TPLayout
from tools.memory_plan import plan_memory
from tools.planned_run import (
    ARITHMETIC,
    INTER,
    LATENCY,
    MEMORY,
    Models,
    PlanArguments,
    Run,
    build_hardware,
    build_run,
    find_problems,
    read_models,
)
from tools.step_flags import parse_step_args
from tools.traffic_plan import (
    RankGroup,
    all_gather,
    all_reduce,
    cost_of_generation,
    cost_of_scoring,
    cost_of_switch,
    cost_of_token_step,
    cost_of_update,
    neighbours,
    plan_traffic,
    strided_group,
    training_flops,
    work,
)

LLAMA = {"num_attention_heads": 32, "tie_word_embeddings": False, "max_position_embeddings": 8192}
SIZES = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 32000},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    | {"num_attention_heads": 64, "num_key_value_heads": 8},
}
MODELS: dict[tuple[str, ...], Models] = {}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[str], str]:
    """A folder that holds the configuration of that name, and no weights."""
    root = tmp_path_factory.mktemp("configs")

    def save(name: str) -> str:
        if not (root / name).exists():
            sizes = SIZES.get(name)
            config = transformers.LlamaConfig(**LLAMA | sizes) if sizes else tiny_config(name, 320)
            config.save_pretrained(root / name)
        return str(root / name)

    return save


def make_run(models: tuple[str, ...], flags: tuple[str, ...]) -> Run:
    problems = Problems()
    args = parse_step_args(PlanArguments, [*models, *flags], problems=problems)
    if models not in MODELS:
        MODELS[models] = read_models(args, problems)
    assert not problems.messages and not find_problems(args, MODELS[models])
    return build_run(args, MODELS[models])


def single(folder: str, *flags: str) -> Run:
    return make_run(("--stage", "1", "--model_name_or_path", folder), flags)


def ppo(folder: str, *flags: str) -> Run:
    return make_run(("--stage", "3", "--actor_model_name_or_path", folder, "--algorithm", "rloo"), flags)


def machines(num_gpus: int, num_nodes: int):
    return build_hardware(PlanArguments(num_gpus=num_gpus, num_nodes=num_nodes), "bf16")


# ---- collectives ----------------------------------------------------------------------------------------


def test_a_gather_on_one_machine_and_on_two():
    one = all_gather(machines(8, 1), RankGroup(8, 1), 800.0)
    assert (one.intra_bytes, one.inter_bytes) == (700.0, 0.0)
    two = all_gather(machines(8, 2), RankGroup(8, 2), 800.0)
    # each machine takes in the other's 400 bytes once, 50 a rank; a rank ends with the 750 it lacked
    assert (two.intra_bytes, two.inter_bytes) == (700.0, 50.0)
    summed = all_reduce(machines(8, 2), RankGroup(8, 2), 800.0)
    assert (summed.intra_bytes, summed.inter_bytes) == (1400.0, 100.0)
    assert all_gather(machines(1, 1), RankGroup(1, 1), 800.0).total == 0


def test_seconds_are_those_of_the_slower_link_and_of_latency():
    hardware = machines(8, 2)  # 450 and 50 GB/s, of which 70 % are reached
    cost = all_gather(hardware, RankGroup(8, 2), 16e9)
    assert cost.total == pytest.approx(14e9 / (0.7 * 450e9) + 3 * 6e-6 + 12e-6)
    assert cost.seconds[LATENCY] == pytest.approx(3 * 6e-6 + 12e-6)  # log2 8 inside, log2 2 between
    slow = all_gather(hardware, RankGroup(1, 16), 16e9)
    assert slow.bound == INTER and slow.total == pytest.approx(15e9 / (0.7 * 50e9) + 4 * 12e-6)


def test_the_longer_of_arithmetic_and_reading_counts():
    hardware = machines(1, 1)  # 989 TFLOP/s at 40 %, 3350 GB/s at 60 %
    assert work(hardware, 989e12 * 0.4, 1.0).seconds == {ARITHMETIC: pytest.approx(1.0)}
    assert work(hardware, 1.0, 3350e9 * 0.6 * 2).seconds == {MEMORY: pytest.approx(2.0)}


@pytest.mark.parametrize(("num_gpus", "num_nodes"), [(1, 1), (8, 1), (8, 2), (4, 8), (8, 128)])
def test_groups_span_as_many_machines_as_the_engines_layout_says(num_gpus, num_nodes):
    num_ranks = num_gpus * num_nodes
    for tp_size in (size for size in (1, 2, 4, 8) if num_ranks % size == 0):
        layout = TPLayout(num_ranks, tp_size, 0)
        hardware = machines(num_gpus, num_nodes)
        strided = strided_group(hardware, tp_size)
        nodes = {rank // num_gpus for rank in layout.ranks[:, 0].tolist()}
        assert (strided.size, strided.num_nodes) == (tp_size, len(nodes))
        gathering = neighbours(hardware, layout.gather_size)
        nodes = {rank // num_gpus for rank in layout.ranks[0].tolist()}
        assert (gathering.size, gathering.num_nodes) == (layout.gather_size, len(nodes))


# ---- phases ---------------------------------------------------------------------------------------------


def test_training_takes_6_operations_a_parameter_and_token_and_8_with_recomputation(saved):
    tokens = 1000
    for flags, factor in (((), 6), (("--gradient_checkpointing",), 8)):
        run = single(saved("7b"), "--max_seq_len", "512", *flags)
        (role,) = run.roles
        model = role.model
        head = 6 * model.num_head * tokens  # the head is not recomputed
        # causal scores and values: 2 x 2 x width x length / 2, forward; backward 2.5 times that
        attention = 2 * 4096 * 512 * 32 * tokens * (3.5 if factor == 6 else 4.5)
        expected = factor * model.num_body * tokens + head + attention
        assert training_flops(run, role, tokens) == pytest.approx(expected)
        assert model.num_body + model.num_head == pytest.approx(6.607e9, rel=1e-3)


def received(run: Run) -> float:
    cost = cost_of_update(run, run.roles[0])
    return cost.intra_bytes + cost.inter_bytes


def test_bytes_of_an_update_by_stage(saved):
    m = 2 * 6_738_415_616  # weights and gradients in bf16
    share = 7 / 8
    flags = ("--num_gpus", "8")
    assert received(single(saved("7b"), "--dtype", "fp32", *flags)) == pytest.approx(2 * 2 * m * share)
    # DeepSpeed's ZeRO 1 and 2: all-reduce of gradients, all-gather of weights; 2 for every micro-batch
    assert received(single(saved("7b"), "--zero_stage", "1", *flags)) == pytest.approx(3 * m * share)
    two = ("--zero_stage", "2", "--gradient_accumulation_steps", "4")
    assert received(single(saved("7b"), *two, *flags)) == pytest.approx((4 * 2 + 1) * m * share)


def test_stage_3_gathers_twice_and_scatters_once(saved, tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage3_max_reuse_distance": 0}}')
    m = 2 * 6_738_415_616
    three = ("--zero_stage", "3", "--num_gpus", "8", "--gradient_accumulation_steps", "2")
    run = single(saved("7b"), *three, "--ds_config", str(tmp_path / "ds.json"))
    assert received(run) == pytest.approx(2 * 3 * m * 7 / 8, rel=1e-3)
    kept = received(single(saved("7b"), *three))  # half of a distance of 10^9 parameters is still there
    assert received(run) - kept == pytest.approx(2 * 2 * 5e8 * 7 / 8, rel=1e-3)


def test_the_switchs_bytes_cross_machines_where_ranks_do(saved):
    flags = ("--actor_zero_stage", "3", "--enable_hybrid_engine", "--max_prompt_seq_len", "32")
    run = ppo(
        saved("llama"), *flags, "--max_answer_seq_len", "32", "--inference_tp_size", "2", "--num_gpus", "4"
    )
    sizes = run.switch_sizes()
    received = 2 * (sizes.from_gather_group + sizes.from_all)
    cost = cost_of_switch(run)
    assert cost.intra_bytes == pytest.approx(received) and cost.inter_bytes == 0 < received
    cost = cost_of_switch(replace(run, hardware=replace(run.hardware, num_gpus=1, num_nodes=4)))
    assert cost.inter_bytes == pytest.approx(received) and cost.intra_bytes == 0


def test_weights_that_are_whole_are_not_sent(saved):
    cost = cost_of_switch(ppo(saved("7b"), "--enable_hybrid_engine", "--num_gpus", "8"))
    assert cost.total == cost.intra_bytes == cost.inter_bytes == 0


def test_a_token_step_of_few_sequences_reads_the_weights(saved):
    flags = ("--enable_hybrid_engine", "--per_device_training_batch_size", "1", "--max_answer_seq_len", "2")
    one = ppo(saved("7b"), *flags, "--per_device_generation_batch_size", "1", "--max_prompt_seq_len", "4")
    cost = cost_of_token_step(one, one.actor)
    read = 2 * 6.607e9 + 5 * 2 * 32 * 4096 * 2  # all but the input embedding, and five tokens' keys
    assert cost.seconds == {MEMORY: pytest.approx(read / (3350e9 * 0.6), rel=1e-3)}
    many = ppo(
        saved("7b"), *flags, "--per_device_generation_batch_size", "4096", "--generation_slots", "4096"
    )
    assert cost_of_token_step(many, many.actor).bound in (ARITHMETIC, MEMORY)


def test_sums_over_a_replicas_ranks_cross_the_network_where_it_spans_machines(saved):
    flags = ("--enable_hybrid_engine", "--actor_zero_stage", "3", "--inference_tp_size", "8")
    near = ppo(saved("7b"), *flags, "--num_gpus", "8")
    far = ppo(saved("7b"), *flags, "--num_gpus", "8", "--num_nodes", "8")
    costs = [cost_of_token_step(run, run.actor) for run in (near, far)]
    # 2 all-reduces a layer, one of the embedding, one gather of logits, for 128 sequences in bf16
    sums, logits = 65 * 128 * 4096 * 2 * 2, 128 * 32000 * 2
    assert costs[0].intra_bytes == pytest.approx((sums + logits) * 7 / 8) and costs[0].inter_bytes == 0
    assert costs[1].inter_bytes == pytest.approx((sums + logits) * 7 / 8) and costs[1].intra_bytes == 0
    assert costs[1].total > costs[0].total


def test_gathering_layer_by_layer_is_slower_than_holding_a_slice(saved):
    flags = ("--enable_hybrid_engine", "--actor_zero_stage", "3", "--num_gpus", "8")
    pinned, unpinned = (ppo(saved("7b"), *flags, *more) for more in ((), ("--unpin_actor_parameters",)))
    assert cost_of_generation(unpinned).total > 4 * cost_of_generation(pinned).total
    assert cost_of_switch(unpinned).total == 0


def test_an_offloaded_reference_crosses_the_link_to_the_cpu_and_back(saved):
    run = ppo(saved("7b"), "--offload_reference_model")
    (reference,) = (role for role in run.roles if role.name == "reference")
    cost = cost_of_scoring(run, reference)
    assert cost.seconds["link to the CPU"] == pytest.approx(2 * 2 * 6_738_415_616 / (0.7 * 50e9))


# ---- whole steps ----------------------------------------------------------------------------------------


def test_phases_and_tokens_add_up(saved):
    flags = ("--num_gpus", "8", "--num_samples_per_prompt", "4", "--generation_batches", "2")
    plan = plan_traffic(ppo(saved("7b"), *flags, "--enable_hybrid_engine", "--actor_zero_stage", "3"))
    names = ["switch", "generate", "score actor", "score reference", "train actor"]
    assert list(plan.phases) == names
    assert plan.seconds == pytest.approx(sum(cost.total for cost in plan.phases.values()))
    assert plan.num_tokens == 8 * 16 * 2 * 4 * 256
    assert plan.tokens_per_second == plan.num_tokens / plan.seconds
    trained = plan_traffic(ppo(saved("7b"), "--old_logprobs", "rollout"))
    assert "score actor" not in trained.phases


def test_1024_ranks_are_planned_at_once(saved):
    flags = ("--num_gpus", "8", "--num_nodes", "128", "--enable_hybrid_engine", "--inference_tp_size", "8")
    flags += ("--actor_zero_stage", "3", "--actor_gradient_checkpointing", "--max_prompt_seq_len", "1024")
    run = ppo(saved("70b"), *flags, "--max_answer_seq_len", "1024")
    plan_memory(run)  # traces the activations: once for a model, whatever the number of ranks
    started = time.process_time()
    run = ppo(saved("70b"), *flags, "--max_answer_seq_len", "1024", "--gpu", "h200")
    memory, traffic = plan_memory(run), plan_traffic(run)
    assert time.process_time() - started < 2
    assert run.num_ranks == 1024 and memory.fits
    assert traffic.phases["train actor"].bound == ARITHMETIC
    assert traffic.num_tokens == 1024 * 16 * 1024
