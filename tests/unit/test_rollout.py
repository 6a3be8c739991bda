"""Collecting a rollout batch: ids, groups, versions, refilled groups, and what each role says of it."""

import contextlib
import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from pretended_gpu import pretended_gpu
from rollout_batches import make_rollout_batch

from common.data.collators import collate_prompts
from common.data.packed_batch import ROW_IDS, PackedBatch
from common.engine.ds_config import build_config, build_engine
from common.engine.engine_step import LossTerm, compute_gradients, take_steps
from common.generation.decode import SamplingOptions
from common.generation.generate import Generation, PromptBatch
from common.models.loading import ModelOptions, load_causal_lm
from common.models.lora import LoraOptions, add_lora, trained_weights
from common.models.offloaded_weights import OffloadedWeights
from common.models.output_head import SamplingMask
from common.models.policy_model import PolicyModel
from common.ranks import distributed
from common.ranks.failures import StepSkipped
from step1_sft.arguments import SFTArguments
from step3_ppo.algorithms import ALGORITHMS, add_ppo_advantages, fill_defaults
from step3_ppo.arguments import PPOArguments
from step3_ppo.build_roles import build_roles
from step3_ppo.rewards.reward_specs import RewardSpec, parse_rewards
from step3_ppo.rewards.scorer import Scorer
from step3_ppo.roles import Actor, LoraReference, MovingReference, Reference, Roles
from step3_ppo.rollout import Rollout, add_sampling_mask

DIRECTIONS = ("copy to the device", "copy to the host")


class FakeActor:
    """Answers with the sample ids: response k of a prompt is as long as k + 1."""

    is_packed, shares_prompts, num_switches = False, False, 0

    @contextlib.contextmanager
    def generation_mode(self):
        self.num_switches += 1
        yield

    def generate(self, inputs, *, on_turns=None, is_greedy=False):
        num_samples, sample_ids = inputs.num_samples, inputs.sample_ids
        lengths = torch.arange(num_samples).repeat(len(inputs.prompt_ids)) + 1 + 2 * is_greedy
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        ids = torch.where(mask, sample_ids[:, None] + 1, 0)
        logprobs = torch.where(mask, -0.5, 0.0)
        return Generation(ids, mask, logprobs, logprobs + 0.25, lengths < num_samples, mask)

    def score(self, batches):
        return [batch.data["rollout_logprobs"] - 0.125 for batch in batches]


class FakeReward:
    """Gives the scores that a function finds for the sample ids."""

    def __init__(self, score_of):
        self.score_of = score_of

    def score(self, batches):
        return [torch.tensor([float(self.score_of(i)) for i in batch.ids]) for batch in batches]


def build(
    score_of=lambda x: x, *, rounds=0, source="rollout", texts=None, bias=0.0, caps=(64, 0),
    on_error="refuse", needs_greedy=False, **flags,
):  # fmt: skip
    def values(batches):
        return [(batch.data["rollout_logprobs"] * 2, torch.zeros(len(batch))) for batch in batches]

    reference = SimpleNamespace(score=lambda batches: [b.data["rollout_logprobs"] - 1 for b in batches])
    roles = Roles(FakeActor(), reference, SimpleNamespace(score=values), {"model": FakeReward(score_of)})
    specs = [RewardSpec("model", "x", 1.0, "model")]
    if texts:
        specs.append(RewardSpec("function", "m:f", 0.5, "function_f"))
    args = PPOArguments(
        per_device_generation_batch_size=3,  # prompts
        num_samples_per_prompt=2,
        dynamic_sampling_rounds=rounds,
        old_logprobs=source,
        max_tokens_per_micro_batch=caps[0],
        max_tokens_per_scoring_pass=caps[1],
        **flags,
    )
    texts = {"function_f": texts} if texts else {}
    scores = Scorer(specs, texts, lambda ids: f"<{len(ids)}>", bias=bias, on_error=on_error)
    return Rollout(args, roles, scores, needs_greedy=needs_greedy)


class EndlessPrompts:
    """The same three prompts every time."""

    num_steps, order = 0, SimpleNamespace(global_rows=3)

    def __next__(self):
        rows = []
        for i, ids in enumerate([[6, 7, 8], [9, 10, 11, 12], [16]]):
            texts = {"row_id": f"file:{i}", "prompt_text": f"prompt {i}", "fields": f'{{"answer": {i}}}'}
            texts["messages"] = json.dumps([{"role": "user", "content": f"prompt {i}"}])
            rows.append({"prompt_ids": ids} | texts)
        self.num_steps += 1
        return [collate_prompts(rows)]


def test_a_rollout_batch_has_a_response_an_item_in_the_order_of_the_samples():
    rollout, prompts = build(), EndlessPrompts()
    first, second = rollout.collect(prompts, version=0), rollout.collect(prompts, version=4)
    first.check()
    assert first.ids == tuple(range(6)) and second.ids == tuple(range(6, 12))
    assert first.numbers("group_ids").tolist() == [0, 0, 1, 1, 2, 2]
    assert first.lengths["prompt_ids"].tolist() == [3, 3, 4, 4, 1, 1]
    assert first.lengths["response_ids"].tolist() == [1, 2] * 3
    assert first.numbers("is_finished").tolist() == [True, False] * 3
    assert set(first.data["versions"].tolist()) == {0} and set(second.data["versions"].tolist()) == {4}
    assert first.numbers("scores").tolist() == list(range(6))
    assert first.data["ref_logprobs"].eq(-1.5).all() and first.data["old_values"].eq(-1.0).all()
    assert first.data["old_logprobs"].eq(-0.5).all()
    assert first.texts(ROW_IDS) == ["file:0", "file:0", "file:1", "file:1", "file:2", "file:2"]


@pytest.mark.parametrize(
    ("caps", "num_passes", "trained"),
    [((6, 0), 5, 6), ((6, 64), 1, 6), ((64, 6), 5, 64), ((0, 6), 5, 16 * 512), ((0, 0), 1, 16 * 512)],
)
def test_passes_without_gradients_have_a_cap_of_their_own(caps, num_passes, trained):
    """Of 4, 5, 5, 6, 2 and 3 tokens; the last two are 6 with their padding. No score depends on it."""
    rollout = build(caps=caps)
    reward = rollout.roles.rewards["model"]
    with patch.object(reward, "score", wraps=reward.score) as score:
        batch = rollout.collect(EndlessPrompts(), version=0)
    assert len(score.call_args.args[0]) == num_passes and rollout.cap.max_tokens == trained
    assert batch.numbers("scores").tolist() == list(range(6))


def test_each_prompt_has_a_greedy_answer_that_is_scored_and_in_no_row():
    """R43: ReMax's baseline. The bias of --reward is added to every score."""
    batch = build(lambda sample: sample, bias=-1.5, needs_greedy=True).collect(EndlessPrompts(), version=0)
    batch.check()
    assert batch.ids == tuple(range(6)) and batch.lengths["response_ids"].tolist() == [1, 2] * 3
    assert batch.numbers("scores").tolist() == [-1.5, -0.5, 0.5, 1.5, 2.5, 3.5]
    assert batch.numbers("greedy_scores").tolist() == [-1.5, -1.5, -0.5, -0.5, 0.5, 0.5]  # samples 0, 1, 2
    assert batch.numbers("greedy_lengths").tolist() == [3] * 6
    assert "greedy_scores" not in build().collect(EndlessPrompts(), version=0).data


@pytest.mark.parametrize("is_greedy", [False, True])
def test_a_greedy_answer_takes_the_likeliest_tokens(is_greedy):
    """And is else made as the flags say; the others are sampled."""
    asked, mask = [], torch.ones(1, 3, dtype=torch.bool)

    def generate(batch, options, **how):
        asked.append(options)
        return SimpleNamespace(response_mask=mask)

    flops = SimpleNamespace(of_generation=lambda *_: 0)
    engine = SimpleNamespace(module=SimpleNamespace(flops=flops))
    hybrid = SimpleNamespace(engine=engine, generation_mode=None, generate=generate)
    sampling = SamplingOptions(max_new_tokens=4, stop_token_id=0, pad_token_id=0, top_k=7, temperature=0.5)
    batch = PromptBatch(mask.long(), mask, torch.arange(2))
    Actor(hybrid, sampling, is_packed=False).generate(batch, is_greedy=is_greedy)
    assert asked == [replace(sampling, top_k=1) if is_greedy else sampling]


@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize("teacher", [False, True])
@pytest.mark.parametrize("flag", ["", "offload_reference_model", "offload_reward_model"])
@pytest.mark.usefixtures("process_group")
def test_a_flag_offloads_the_model_that_it_names(
    flag, teacher, zero_stage, tiny_model_folder, tiny_tokenizer, reward_export
):
    args = PPOArguments(
        actor_model_name_or_path=tiny_model_folder("llama"),
        critic_model_name_or_path=reward_export,
        teacher_model_name_or_path=tiny_model_folder("gpt2") if teacher else "",
        reward=[f"model:{reward_export}"],
        dtype="fp32",
        actor_zero_stage=zero_stage,
        critic_zero_stage=zero_stage,
        **({flag: True} if flag else {}),
    )
    roles = build_roles(args, tiny_tokenizer, parse_rewards(args.reward), 9, has_critic=False)
    found = (roles.reference, roles.rewards["model"])
    expected = [flag == "offload_reference_model", flag == "offload_reward_model"]
    if zero_stage == 3:  # DeepSpeed's
        assert [role.model.zero_offload_param() is not None for role in found] == expected
    assert [role.is_offloaded for role in found] == [x and zero_stage < 3 for x in expected]


def test_the_page_names_what_a_rollout_batch_holds():
    """docs/ppo_step.md: DeepSpeed-Chat's names beside ours."""
    page = (Path(__file__).resolve().parents[2] / "docs/ppo_step.md").read_text()
    table = page.partition("| DeepSpeed-Chat | here | |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", cell) for line in table.splitlines()[2:] for cell in line.split("|")[1:3]]
    theirs, ours = set(itertools.chain(*rows[::2])), set(itertools.chain(*rows[1::2]))
    article = {"prompts", "logprobs", "ref_logprobs", "value", "rewards", "input_ids", "attention_mask"}
    assert theirs >= article
    batch = build().collect(EndlessPrompts(), version=0)
    with_numbers = add_ppo_advantages(batch, fill_defaults(PPOArguments(), ALGORITHMS["ppo"]), 0.1)
    assert ours and ours <= set(with_numbers.data)


def test_old_logprobs_are_the_trainers_where_they_are_recomputed_or_not_trained_on():
    batch = build(source="recompute").collect(EndlessPrompts(), 0)
    assert batch.data["old_logprobs"].eq(-0.625).all() and batch.data["rollout_logprobs"].eq(-0.5).all()
    rollout, prompts = build(source="rollout"), EndlessPrompts()
    answers, texts = rollout.sample([*next(prompts), *next(prompts)], 0, 2, 0)
    assert len(answers) == 12 and rollout.roles.actor.num_switches == 1, "weights move once for all batches"
    held_out = rollout.score(answers, texts, is_trained_on=False)
    assert held_out.data["old_logprobs"].eq(-0.625).all() and "old_values" not in held_out.data


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_groups_of_one_score_are_replaced_by_groups_of_further_prompts(num_ranks, monkeypatch):
    """The share is of the rows of all ranks."""
    ranks = vars(distributed) | {"world_size": lambda: num_ranks}
    monkeypatch.setattr("step3_ppo.rollout.distributed", SimpleNamespace(**ranks))
    # Prompts 0 and 2 have one score; of the next draw prompt 3 has one too, 4 and 5 have not.
    scores = {0: 1, 1: 1, 2: 0, 3: 1, 4: 2, 5: 2, 6: 7, 7: 7, 8: 0, 9: 1, 10: 5, 11: 6}
    rollout, prompts = build(scores.__getitem__, rounds=3), EndlessPrompts()
    batch = rollout.collect(prompts, 0)
    assert batch.ids == (2, 3, 8, 9, 10, 11) and prompts.num_steps == 2
    assert rollout.refilled_fraction == pytest.approx(4 / 6 / num_ranks)


def test_a_group_whose_other_answer_has_no_score_is_replaced():
    """Its stand-in is no second score: there is nothing to learn from."""
    rollout = build(lambda sample: math.nan if sample == 2 else sample, rounds=1, on_error="mask")
    batch = rollout.collect(EndlessPrompts(), 0)
    assert batch.ids == (0, 1, 4, 5, 6, 7) and rollout.refilled_fraction == pytest.approx(2 / 6)


def test_after_the_last_round_a_group_of_one_score_stays():
    rollout, prompts = build(lambda sample: 1.0 if sample < 12 else sample, rounds=1), EndlessPrompts()
    batch = rollout.collect(prompts, 0)
    assert batch.ids == tuple(range(6)) and prompts.num_steps == 2 and rollout.refilled_fraction == 0


def test_texts_and_row_fields_reach_the_rewards_that_read_them():
    seen = []

    class Text:
        is_on_device = False

        def score(self, answers):
            seen.append(answers)
            return [row["answer"] * 10.0 for row in answers.rows]

    batch = build(texts=Text()).collect(EndlessPrompts(), 0)
    assert batch.numbers("score/function_f").tolist() == [0, 0, 10, 10, 20, 20]
    assert batch.numbers("scores").tolist() == [0, 1, 7, 8, 14, 15]  # sample + half of the function's
    (answers,) = seen
    by_prompt = sorted(zip(answers.prompts, answers.responses, strict=True))
    assert by_prompt == sorted((f"prompt {i}", f"<{k}>") for i in range(3) for k in (1, 2))


def test_a_failing_reward_is_told_on_every_rank(monkeypatch):
    of_other = (None, (False, "reward function_f gave nothing"))
    monkeypatch.setattr("common.ranks.distributed.gather_objects", lambda mine, group=None: [mine, of_other])
    text = SimpleNamespace(score=lambda answers: [0.0] * len(answers), is_on_device=False)
    rollout = build(texts=text)
    batches = [make_rollout_batch([0, 1], [1, 1], [2, 1], num_samples=2)]
    with pytest.raises(StepSkipped, match="gave nothing"):
        rollout.scores.start(batches, {0: ("p", {})}).wait(rollout.roles.rewards)


def test_the_sampling_mask_of_each_token_is_packed_beside_it():
    batch = make_rollout_batch([4, 7], [1, 2], [2, 1])
    mask = SamplingMask(torch.tensor([5, 6, 9, 1, 2, 3]), torch.tensor([2, 1, 3]))
    found = add_sampling_mask(batch, mask)
    found.check()
    assert found.data["support_counts"].tolist() == [2, 1, 3]
    assert found.lengths["support_ids"].tolist() == [3, 3]
    assert found.select([1]).data["support_ids"].tolist() == [1, 2, 3]
    assert isinstance(found, PackedBatch) and found.ids == batch.ids


def test_the_sampler_is_trusted_as_long_as_it_agrees():
    auto = build(source="auto")
    assert auto.recomputes and auto.check_logprob_gap(1e-7) is None and not auto.recomputes
    assert auto.check_logprob_gap(1e-3) is None and not auto.recomputes, "it is met and not exceeded"
    assert "recomputed from here on" in auto.check_logprob_gap(0.01) and auto.recomputes
    assert auto.check_logprob_gap(0.01) is None and auto.recomputes
    rollout = build(source="rollout")
    assert not rollout.recomputes and "--old_logprobs recompute" in rollout.check_logprob_gap(0.01)
    assert not rollout.recomputes and rollout.max_gap == math.inf
    strict = build(source="strict")
    assert not strict.recomputes and strict.max_gap == 1e-3, "an update above it is refused"
    gaps = [build(source="strict", dtype="bf16", trusted_logprob_gap=gap).max_gap for gap in (None, 0.01)]
    assert gaps == [0.05, 0.01], "16 bits round apart"
    recompute = build(source="recompute")
    assert recompute.recomputes and recompute.check_logprob_gap(1e-9) is None and recompute.recomputes
    replayed = build(source="auto", replay_sampling_support=True)  # the sampler's are of other probabilities
    assert replayed.recomputes and replayed.check_logprob_gap(1e-9) is None and replayed.recomputes
    stale = build(source="auto", rollout_staleness=1)
    assert stale.check_logprob_gap(1e-9) is None and stale.recomputes


@pytest.mark.usefixtures("process_group")
def test_a_moving_reference_is_an_average_of_the_actor(tiny_model_folder):
    """R63: ref <- 0.75 ref + 0.25 actor; the actor's own weights are back after the scores."""
    model = load_causal_lm(ModelOptions(tiny_model_folder("llama"), dropout=0.0), 320)
    engine = build_engine(PolicyModel(model, num_valid_tokens=320), build_config(), SFTArguments(), 9)
    reference, batch = MovingReference(engine, 0.75, is_packed=False), make_rollout_batch([0], [3], [4])
    actor = Reference(engine, is_packed=False)
    (before,) = actor.score([batch])
    assert reference.score([batch])[0].equal(before)
    beginning = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    with torch.no_grad():
        for p in engine.module.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())), alpha=0.1)
    (moved,) = actor.score([batch])
    assert reference.score([batch])[0].equal(before) and actor.score([batch])[0].equal(moved)
    reference.average.update()
    (averaged,) = reference.score([batch])
    with torch.no_grad():
        for name, p in engine.module.named_parameters():
            p.copy_(0.75 * beginning[name] + 0.25 * p)
    torch.testing.assert_close(averaged, actor.score([batch])[0], rtol=0, atol=1e-5)
    assert (averaged - before).abs().max() > 1e-3 and (averaged - moved).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("only_lora", "is_new"), [(False, True), (True, True), (True, False), (False, False)]
)
@pytest.mark.usefixtures("process_group")
def test_the_reference_stays_what_the_actor_was(only_lora, is_new, tiny_model_folder):
    """With LoRA the reference is the actor, a new adapter off, and one that it began with as it was."""
    model = load_causal_lm(ModelOptions(tiny_model_folder("llama"), dropout=0.0), 320)
    model = add_lora(model, LoraOptions(4, only_optimize_lora=only_lora))
    for weight in trained_weights(model).values() if not is_new else ():
        if weight.lora_b is not None:
            torch.nn.init.normal_(weight.lora_b, std=0.1)
    policy = PolicyModel(model, num_valid_tokens=320)
    flags = SFTArguments(learning_rate=1e-2, lora_learning_rate=1e-2, lr_scheduler_type="constant")
    engine = build_engine(policy, build_config(), flags, 9)
    reference = LoraReference(engine, has_new_adapters=is_new, is_packed=False)
    batch = make_rollout_batch([0, 1], [3, 2], [4, 2])
    (before,) = reference.score([batch])
    engine.eval()
    with torch.no_grad():
        assert reference.compute_logprobs(batch)[0].equal(before)

    def sums(batch):
        return -reference.compute_logprobs(batch)[0].sum(), {}

    for _ in range(3):
        take_steps([compute_gradients(engine, [LossTerm("x", [batch], sums, lambda batch: 6.0)])])
    (after,) = reference.score([batch])
    engine.eval()
    with torch.no_grad():
        moved, _ = reference.compute_logprobs(batch)
    assert after.equal(before)
    assert (moved - before).abs().max() > 0.1


@pytest.mark.parametrize("family", ["gptj", "gpt2"])  # gptj's positions are a buffer, gpt2's head is tied
def test_offloaded_weights_cross_to_the_gpu_and_nothing_comes_back(family, tiny_model_folder):
    model, layers = make_frozen(family, tiny_model_folder)
    batch = make_rollout_batch([0, 1, 2], [3, 5, 2], [4, 1, 5])
    (expected,) = Reference(model, is_packed=False).score([batch])
    tensors = [*model.parameters(), *model.buffers()]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    with pretended_gpu() as gpu:
        reference = Reference(model, is_packed=False, is_offloaded=True)
        for _ in range(2):
            gpu.clear()
            found = reference.score([batch, batch])
            copies = {name: sum(c.num_bytes for c in gpu.copies if c.name == name) for name in DIRECTIONS}
            assert num_bytes <= copies["copy to the device"] < 1.01 * num_bytes
            assert copies["copy to the host"] < 0.01 * num_bytes
            places = ("roles.py", "offloaded_weights.py")
            assert not [wait for wait in gpu.waits if wait.where.startswith(places)]
            assert not any(tensor.is_cuda for tensor in tensors) and gpu.allocated < 0.01 * num_bytes
            assert all(scores.cpu().equal(expected) for scores in found)
    head = model.causal_lm.get_output_embeddings().weight
    assert (head is model.causal_lm.get_input_embeddings().weight) == (family == "gpt2")
    assert layers[1].ln_1.weight is layers[0].ln_1.weight and not layers[0]._forward_pre_hooks


def test_a_layer_waits_for_its_own_weights_alone(tiny_model_folder):
    model, layers = make_frozen("gptj", tiny_model_folder)
    arrived, weights = [], [layer.mlp.fc_in.weight for layer in layers]

    def can_be_read(tensor):
        with contextlib.suppress(RuntimeError):  # another stream may not have written it yet
            return tensor.sum() is not None
        return False

    with pretended_gpu():
        reference = Reference(model, is_packed=False, is_offloaded=True)
        for layer in layers:
            layer.register_forward_hook(lambda *_: arrived.append([can_be_read(w) for w in weights]))
        reference.score([make_rollout_batch([0], [3], [4])] * 2)
        assert arrived == [[True, False], [True, True]] + 2 * [[True, True]]
        with pytest.raises(KeyboardInterrupt), OffloadedWeights(model).on_device():  # and no layer has waited
            on_device = [weight.data for weight in weights]
            assert not any(map(can_be_read, on_device))
            raise KeyboardInterrupt
        assert all(map(can_be_read, on_device)), "their memory goes to the next tensor while they are copied"
        assert not any(weight.is_cuda for weight in weights)


def make_frozen(family, tiny_model_folder):
    """Return a frozen policy and its layers, two of which have a weight in common."""
    options = ModelOptions(tiny_model_folder(family), dropout=0.0)
    model = PolicyModel(load_causal_lm(options, 320), num_valid_tokens=320).requires_grad_(False)
    layers = model.causal_lm.transformer.h
    layers[1].ln_1.weight = layers[0].ln_1.weight
    return model, layers
