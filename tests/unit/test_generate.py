"""Generation agrees with transformers and with the training forward, whatever the batch; the slots' schedule;
what CUDA graphs ask of a decode step, without a GPU.
"""

import pytest
import torch
from plain_logits import compute_logits, plain_logprobs
from tiny_configs import CONFIGS, tiny_config
from transformers import AutoModelForCausalLM, Llama4TextConfig

from common.data.packed_batch import pad_sequences
from common.generation.decode import DecodeGraphs, DecodeStep, SamplingOptions
from common.generation.generate import Generator, PromptBatch, SlotSchedule
from common.generation.inference_module import share_weights
from common.models.sampling import counter_uniform, sample_tokens
from common.ranks import distributed, passes
from common.ranks.passes import PassProgress


def generate(model, ids, mask, sample_ids, chosen, limits=None):
    return Generator(model).generate(PromptBatch(ids, mask, sample_ids, limits), chosen)


LENGTHS = (3, 7, 5, 12)
ROUNDINGS_IN_BF16 = 4 * 2**-6  # four, of logits between 4 and 8


def make_prompts(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded prompts of LENGTHS, and their mask as numbers."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, vocab_size, (length,), generator=generator) for length in LENGTHS]
    ids, mask = pad_sequences(torch.cat(rows), torch.tensor(LENGTHS), on_left=True)
    return ids, mask.long()


def load(folder: str):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def load_prompted(folder: str) -> tuple:
    model = load(folder)
    return model, *make_prompts(model.config.vocab_size)


def options(**changes) -> SamplingOptions:
    return SamplingOptions(**({"max_new_tokens": 12, "stop_token_id": 0, "pad_token_id": 0} | changes))


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_text_of_left_padded_prompts_is_that_of_transformers_one_by_one(family, tiny_model_folder):
    model, ids, mask = load_prompted(tiny_model_folder(family))
    # The stop token is one that greedy decoding meets in the middle of some row, and it is the pad token too.
    free = generate(model, ids, mask, torch.arange(4), options(do_sample=False, stop_token_id=-1))
    stop = int(free.response_ids[1, 4])
    ours = generate(
        model, ids, mask, torch.arange(4), options(do_sample=False, stop_token_id=stop, pad_token_id=stop)
    )
    for row, length in enumerate(LENGTHS):
        prompt = ids[row : row + 1, -length:]
        expected = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False,
            eos_token_id=stop, pad_token_id=stop,
        )[0, length:]  # fmt: skip
        assert ours.response_ids[row][ours.response_mask[row]].tolist() == expected.tolist()
        assert bool(ours.is_finished[row]) == (int(expected[-1]) == stop)
    assert ours.is_finished.any()
    check_logprobs(model, ids, mask, ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linears_multiply_by_onednn_with_whatever_weights_are_attached(dtype, tiny_model_folder):
    model = load(tiny_model_folder("opt")).to(dtype)  # has biases
    shared = share_weights(model)
    trained, inference = (m.get_decoder().layers[0].fc1 for m in (model, shared))
    torch.nn.init.normal_(trained.bias)
    hidden = torch.randn(3, 2, trained.in_features, dtype=dtype)
    with torch.profiler.profile() as profile:
        output = inference(hidden)
    names = {event.name for event in profile.events()}
    assert ("mkldnn::_linear_pointwise" in names) == distributed.is_for_onednn(dtype)
    expected = hidden.double() @ trained.weight.double().T + trained.bias.double()
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def check_logprobs(model, ids, mask, out, vocabulary=None, *, atol=1e-5, **chosen) -> torch.Tensor:
    """The log-probabilities are those of one training forward, of which this returns the logits."""
    whole_mask = torch.cat([mask, out.response_mask.long()], dim=1)
    whole, num_last = torch.cat([ids, out.response_ids], dim=1), out.response_ids.shape[1] + 1
    logits = compute_logits(model, whole, whole_mask, num_last=num_last)[:, :-1, :vocabulary].float()
    expected = torch.where(out.response_mask, plain_logprobs(logits, out.response_ids, **chosen), 0.0)
    torch.testing.assert_close(out.logprobs, expected, atol=atol, rtol=0)
    assert (out.logprobs[out.response_mask] < 0).all()
    return logits


@pytest.mark.parametrize("family", ["opt", "gpt_neox", "falcon_new", "mistral_window", "gemma2"])
def test_a_text_does_not_depend_on_its_batch(family, tiny_model_folder):
    model, ids, mask = load_prompted(tiny_model_folder(family))
    together = generate(model, ids, mask, torch.arange(4), options(seed=3))
    order = torch.tensor([2, 0, 3, 1])
    shuffled = generate(model, ids[order], mask[order], order, options(seed=3))
    for index, row in enumerate(order.tolist()):
        alone = generate(
            model, ids[row : row + 1, -LENGTHS[row] :], mask[row : row + 1, -LENGTHS[row] :],
            torch.tensor([row]), options(seed=3),
        )  # fmt: skip
        text = together.response_ids[row][together.response_mask[row]].tolist()
        assert shuffled.response_ids[index][shuffled.response_mask[index]].tolist() == text
        assert alone.response_ids[0][alone.response_mask[0]].tolist() == text
    other_seed = generate(model, ids, mask, torch.arange(4), options(seed=4))
    assert other_seed.response_ids.tolist() != together.response_ids.tolist()


def test_vocabulary_padding_is_never_sampled_and_has_no_probability(tiny_model_folder):
    model = load(tiny_model_folder("llama"))
    ids, mask = make_prompts(50)
    out = generate(model, ids, mask, torch.arange(4), options(num_valid_tokens=50, temperature=5.0))
    assert int(out.response_ids.max()) < 50
    check_logprobs(model, ids, mask, out, 50, temperature=5.0)


@pytest.mark.parametrize(("family", "num_slots"), [("bloom", 2), ("gemma2", 3), ("llama", 64)])
def test_slots_change_no_text(family, num_slots, tiny_model_folder):
    model, ids, mask = load_prompted(tiny_model_folder(family))
    chosen = options(seed=3, top_k=40, top_p=0.9, temperature=1.2)
    # The two longest end together, so that the other two, of two lengths, move into their slots at once.
    limits = torch.tensor([12, 2, 5, 2])
    batch = PromptBatch(ids, mask, torch.arange(4), limits)
    expected = Generator(model, num_slots=1).generate(batch, chosen)
    # Behind a generation that had room for fewer tokens of a response, or for shorter prompts.
    for max_length, width, num_tokens in ((24, 12, 2), (0, 1, 12)):
        told = [[] for _ in range(4)]
        generator = Generator(model, num_slots=num_slots, max_length=max_length)
        generator.generate(
            PromptBatch(ids[:, -width:], mask[:, -width:], torch.arange(4)),
            options(max_new_tokens=num_tokens),
        )
        found = generator.generate(
            batch, chosen, on_tokens=lambda sample, token_ids, told=told: told[sample].extend(token_ids)
        )
        assert told == [ids[mask].tolist() for ids, mask in zip(*found[:2], strict=True)]
        assert found.response_ids.equal(expected.response_ids)
        assert found.response_mask.equal(expected.response_mask)
        assert found.is_finished.equal(expected.is_finished)
        assert (found.response_mask.sum(1) <= limits).all()
        torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "opt", "qwen2"])
def test_in_bf16_other_slots_round_otherwise_and_the_same_ones_do_not(family, tiny_model_folder):
    """The shape of a pass decides its last bits: texts may part, and log-probabilities differ before they do,
    from those of other slots and from the trainer's, by a few roundings of a logit.
    """
    model, ids, mask = load_prompted(tiny_model_folder(family))
    model, ids, mask, sample_ids = model.bfloat16(), ids.repeat(8, 1), mask.repeat(8, 1), torch.arange(32)
    chosen = options(seed=3, stop_token_id=-1, max_new_tokens=24)
    four, again, sixteen = (
        Generator(model, num_slots=n).generate(PromptBatch(ids, mask, sample_ids), chosen) for n in (4, 4, 16)
    )
    assert again.response_ids.equal(four.response_ids) and again.logprobs.equal(four.logprobs)
    is_alike = (four.response_ids == sixteen.response_ids).long().cumprod(dim=1).bool()
    assert (four.logprobs - sixteen.logprobs).abs()[is_alike].max() < ROUNDINGS_IN_BF16
    assert is_alike.float().mean() > 0.5
    check_logprobs(model, ids, mask, sixteen, atol=ROUNDINGS_IN_BF16)


@pytest.mark.parametrize("num_slots", [2, 64])
def test_samples_of_a_prompt_share_its_prefill(num_slots, tiny_model_folder, monkeypatch):
    model, ids, mask = load_prompted(tiny_model_folder("qwen2"))
    each, sample_ids = 3, torch.arange(12)
    apart = generate(
        model, ids.repeat_interleave(each, 0), mask.repeat_interleave(each, 0), sample_ids, options(seed=9)
    )
    num_read, read = [], DecodeStep.prefill
    monkeypatch.setattr(
        DecodeStep,
        "prefill",
        lambda step, ids, *more: num_read.append(len(ids)) or read(step, ids, *more),
    )
    together = Generator(model, num_slots=num_slots).generate(
        PromptBatch(ids, mask, sample_ids), options(seed=9)
    )
    assert together.response_ids.equal(apart.response_ids)
    torch.testing.assert_close(together.logprobs, apart.logprobs, atol=1e-5, rtol=0)
    # Every prompt once, unless its last running sample had left before the next could enter.
    assert sum(num_read) == 4 if num_slots == 64 else sum(num_read) <= 12
    assert len({tuple(row) for row in together.response_ids.tolist()}) > 4, "samples of a prompt differ"


def test_truncation_keeps_both_log_probabilities(tiny_model_folder):
    model, ids, mask = load_prompted(tiny_model_folder("llama"))
    out = generate(model, ids, mask, torch.arange(4), options(top_k=5, stop_token_id=-1))
    logits = check_logprobs(model, ids, mask, out)
    kept = logits.masked_fill(logits < logits.topk(5).values[..., -1:], -torch.inf)
    expected = plain_logprobs(kept, out.response_ids)
    torch.testing.assert_close(out.truncated_logprobs, expected, atol=1e-5, rtol=0)
    assert (out.truncated_logprobs > out.logprobs).all()
    whole_out = generate(model, ids, mask, torch.arange(4), options())
    assert whole_out.truncated_logprobs.equal(whole_out.logprobs)


def test_a_token_is_that_of_the_sampler_at_its_sample_and_position(tiny_model_folder):
    model, ids, mask = load_prompted(tiny_model_folder("llama"))
    chosen = {"temperature": 0.7, "top_k": 12, "top_p": 0.8}
    out = generate(model, ids, mask, torch.tensor([5, 2, 9, 0]), options(seed=3, stop_token_id=-1, **chosen))
    logits = check_logprobs(model, ids, mask, out, temperature=0.7)
    for position in range(12):
        uniforms = counter_uniform(3, torch.tensor([5, 2, 9, 0]), torch.full((4,), position))
        expected = sample_tokens(logits[:, position], uniforms, **chosen).token_ids
        assert out.response_ids[:, position].equal(expected)


_LLAMA4 = {"intermediate_size_mlp": 64, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
_LLAMA4 |= {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
_LLAMA4 |= {
    "vocab_size": 64,
    "num_key_value_heads": 2,
    "layer_types": ["chunked_attention", "full_attention"],
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (tiny_config("gpt_neo", 64), "local layers are exact up to 8"),
        (Llama4TextConfig(**_LLAMA4, floor_scale=9), "layers without rotary positions are exact up to 8"),
    ],
    ids=["gpt_neo", "llama4"],
)
def test_layers_that_count_tokens_of_their_own_are_refused_beyond_a_limit(config, words):
    config.window_size = 8
    generator = Generator(share_weights(AutoModelForCausalLM.from_config(config).eval()))
    ids = torch.randint(3, 64, (1, 4))
    inputs = PromptBatch(ids, torch.ones(1, 4).bool(), torch.zeros(1, dtype=torch.int64))
    found = generator.generate(inputs, options(max_new_tokens=4, stop_token_id=-1))
    assert found.response_ids.shape == (1, 4)
    with pytest.raises(ValueError, match=f"{words} .* may have 9.* leave out"):
        generator.generate(inputs, options(max_new_tokens=5))


# ---- schedule of slots ------------------------------------------------------------------------------------


def test_samples_of_a_prompt_share_one_pass_and_late_ones_copy_from_a_sibling_that_still_runs():
    whole = SlotSchedule([5, 9, 7], num_samples=2, num_slots=6, max_tokens_per_pass=4096).admit()
    assert (whole.prompts, whole.samples) == ([1, 2, 0], [2, 3, 4, 5, 0, 1])
    assert (whole.prompt_slots, whole.copies) == ([0, 2, 4], [(0, 1), (2, 3), (4, 5)])
    schedule = SlotSchedule([6], num_samples=3, num_slots=2, max_tokens_per_pass=64)
    assert schedule.admit().prompts == [0]
    assert schedule.has_waiting_sibling(0) and not schedule.should_admit()
    schedule.retire([0])
    assert schedule.slots == [1] and schedule.should_admit()
    late = schedule.admit()
    assert late.prompts == [] and late.copies == [(0, 1)] and late.samples == [2]
    assert not schedule.has_waiting_sibling(0)


@pytest.mark.parametrize(
    ("lengths", "cap", "expected"),
    [
        ([50, 3, 48, 4, 49, 2], 4096, [[0, 4, 2], [3, 1, 5]]),  # those of like length together
        ([10] * 5, 25, [[0, 1], [2, 3], [4]]),
        ([100], 25, [[0]]),  # one prompt is always read
    ],
)
def test_prompts_are_read_with_those_of_like_length_within_the_cap(lengths, cap, expected):
    schedule = SlotSchedule(lengths, num_samples=1, num_slots=6, max_tokens_per_pass=cap)
    assert [schedule.admit().prompts for _ in expected] == expected and not schedule.waiting


def test_a_slot_is_refilled_without_waiting_for_the_batch():
    schedule = SlotSchedule([4] * 40, num_samples=1, num_slots=16, max_tokens_per_pass=4096)
    schedule.admit()
    schedule.retire([3])
    assert not schedule.should_admit(), "one free slot of sixteen is not worth a pass"
    schedule.retire([0])
    assert schedule.should_admit()


# ---- captured decode steps --------------------------------------------------------------------------------


class PlainPasses(DecodeGraphs):
    """Runs the passes themselves in the shapes of their graphs."""

    def run(self, rows, upto, run_pass, state):
        self.graphs.setdefault((rows, upto), 0)
        run_pass(rows, upto)


@pytest.mark.parametrize(("family", "num_slots"), [("llama", 3), ("bloom", 4), ("mistral_window", 3)])
def test_rounded_shapes_and_late_looks_change_no_text(family, num_slots, tiny_model_folder):
    model, ids, mask = load_prompted(tiny_model_folder(family))
    free = Generator(model).generate(
        PromptBatch(ids, mask, torch.arange(4)), options(seed=5, stop_token_id=-1)
    )
    stop = int(free.response_ids[2, 3])  # ends some row early, between two looks
    chosen = options(seed=5, stop_token_id=stop)
    generator = Generator(model, num_slots=num_slots, max_length=300)
    expected = generator.generate(PromptBatch(ids, mask, torch.arange(4)), chosen)
    step = generator._step
    step._graphs, step.passes_per_check = PlainPasses(model), 4
    found = generator.generate(PromptBatch(ids, mask, torch.arange(4)), chosen)
    assert generator._step is step
    assert {(num_slots, 128)} <= step._graphs.graphs.keys() <= {(n, 128) for n in (1, 2, num_slots)}
    assert found.response_mask.equal(expected.response_mask)
    assert found.response_ids.equal(expected.response_ids)
    assert found.is_finished.equal(expected.is_finished) and found.is_finished.any()
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("gathers", [False, True], ids=["alone", "with other ranks"])
def test_a_request_to_stop_ends_a_batch_between_two_tokens(gathers, tiny_model_folder, monkeypatch):
    """A rank that gathers no weights leaves alone, and all agree once; else it goes on until all leave."""
    model, ids, mask = load_prompted(tiny_model_folder("llama"))
    sample_ids = torch.arange(len(ids))
    batch = PromptBatch(ids, mask, sample_ids)
    passes_made, agreed, has_work = [], [], []

    def agree_any(has_own: bool) -> float:
        has_work.append(has_own)
        return float(has_own or len(has_work) < 9)  # another rank is asked later

    monkeypatch.setattr(passes, "is_asked", lambda: len(passes_made) >= 5)
    monkeypatch.setattr(passes, "must_stop", lambda: agreed.append(len(passes_made)) or passes.is_asked())
    run = DecodeStep.run
    monkeypatch.setattr(DecodeStep, "run", lambda *args: passes_made.append(1) or run(*args))
    generator = Generator(model, agree_any=agree_any if gathers else None)
    with pytest.raises(passes.Interrupted):
        generator.generate(batch, options(max_new_tokens=60))
    made = 7 if gathers else 5 + generator._step.passes_per_check - 1
    assert 5 <= len(passes_made) <= made and agreed == [len(passes_made)]
    assert has_work == ([True] * 6 + [False] * 3 if gathers else [])
    monkeypatch.setattr(passes, "is_asked", bool)
    generator.agree_any = None
    again = generator.generate(batch, options(max_new_tokens=6))
    expected = Generator(model).generate(batch, options(max_new_tokens=6))
    assert all(map(torch.equal, again, expected)), "nothing is left of the batch"


def test_a_rank_with_a_slice_of_a_model_stays_until_its_batch_ends(tiny_model_folder, monkeypatch):
    """Alone, it would leave the others of its group waiting in a pass."""
    model, ids, mask = load_prompted(tiny_model_folder("llama"))
    answers = iter([True])
    monkeypatch.setattr(passes, "is_asked", lambda: True)
    monkeypatch.setattr(passes, "must_stop", lambda: next(answers))
    progress = []
    monkeypatch.setattr(PassProgress, "show", lambda self, done: progress.append(done))
    generator = Generator(model, tp_group=object(), use_cuda_graphs=False)
    with pytest.raises(passes.Interrupted):
        generator.generate(PromptBatch(ids, mask, torch.arange(len(ids))), options())
    assert progress[-1] == len(ids) and next(answers, None) is None
