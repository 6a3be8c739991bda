"""Responses of several turns: keys and values that stay give the texts of a prefix that is computed anew."""

import pytest
import torch
from hybrid_engines import build
from plain_logits import compute_logits, plain_logprobs
from test_generate import LENGTHS, PlainPasses, check_logprobs, load_prompted, options

from common.generation.generate import Generator, PromptBatch
from common.models.sampling import counter_uniform, sample_tokens

ROOM, TURNS = 24, 4
VOCABULARY = 8  # tokens that can be sampled: so few that rows meet the stop token
FAMILIES = ["llama", "bloom", "mistral_window"]  # rotary, ALiBi, a window


def turn_options(stop: int = 3, **changes):
    return options(stop_token_id=stop, max_new_tokens=ROOM, num_valid_tokens=VOCABULARY, **changes)


def greedy_options(model, *prompts):
    """With the stop token that most greedy texts meet."""
    chosen = turn_options(-1, do_sample=False)
    rows = (
        Generator(model)
        .generate(PromptBatch(*prompts, torch.arange(4)), chosen)
        .response_ids[:, : ROOM // 2]
        .tolist()
    )
    stop = max(range(VOCABULARY), key=lambda token: sum(token in row for row in rows))
    return turn_options(stop, do_sample=False, pad_token_id=stop)


class Partner:
    """Says tokens that depend on the turn, the stop token among them, and is silent after TURNS turns."""

    def __init__(self, stop: int = 3) -> None:
        self.stop, self.heard = stop, {}

    def say(self, sample: int, ids: list[int]) -> list[int] | None:
        turns = self.heard.setdefault(sample, [])
        turns.append(ids)
        said = [sample % VOCABULARY, self.stop, *[3 + len(turns)] * len(turns)]
        return said if len(turns) < TURNS else None

    def __call__(self, ended: list) -> list:
        return [self.say(sample, ids) for sample, ids in ended]


def recompute(model, prompt: list[int], sample: int, stop: int) -> tuple[list[int], list[bool], bool]:
    """The plain way, greedy: the whole prefix for each token. (Response, is sampled, is finished)"""
    partner, response, sampled = Partner(stop), [], []
    while len(response) < ROOM:
        whole = torch.tensor([prompt + response])
        logits = compute_logits(model, whole, torch.ones_like(whole))[0, -1, :VOCABULARY]
        response.append(int(logits.argmax()))
        sampled.append(True)
        if response[-1] == stop:
            said = partner.say(sample, list(response))
            if said is None or len(response) + len(said) >= ROOM:
                return response, sampled, said is None
            response, sampled = response + said, sampled + [False] * len(said)
    return response, sampled, False


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_keys_and_values_give_the_texts_of_a_prefix_that_is_computed_anew(family, tiny_model_folder):
    model, ids, mask = load_prompted(tiny_model_folder(family))
    chosen = greedy_options(model, ids, mask)
    stop = chosen.stop_token_id
    with torch.no_grad():
        expected = [recompute(model, ids[i, -n:].tolist(), i, stop) for i, n in enumerate(LENGTHS)]
    assert not all(all(sampled) for _, sampled, _ in expected), "some must go on"
    for num_slots, is_rounded in [(1, False), (3, True), (64, False)]:
        generator = Generator(model, num_slots=num_slots)
        generator.generate(
            PromptBatch(ids, mask, torch.arange(4)), chosen
        )  # what is left of it must not matter
        if is_rounded:  # late looks: an ended sequence goes through further passes before it goes on
            generator._step._graphs, generator._step.passes_per_check = PlainPasses(model), 4
        out = generator.generate(PromptBatch(ids, mask, torch.arange(4)), chosen, on_turns=Partner(stop))
        for row, (text, sampled, is_finished) in enumerate(expected):
            of_text = out.response_mask[row]
            assert out.response_ids[row][of_text].tolist() == text
            assert out.sampled_mask[row][of_text].tolist() == sampled
            assert bool(out.is_finished[row]) == is_finished
        assert not (out.sampled_mask & ~out.response_mask).any()
        check_turn_logprobs(model, ids, mask, out)


def check_turn_logprobs(model, ids, mask, out, **chosen) -> torch.Tensor:
    """Sampled tokens have the training pass's log-probabilities, others 0; returns its logits."""
    whole = torch.cat([ids, out.response_ids], dim=1)
    whole_mask = torch.cat([mask, out.response_mask.long()], dim=1)
    with torch.no_grad():
        logits = compute_logits(model, whole, whole_mask, num_last=out.response_ids.shape[1] + 1)[
            :, :-1, :VOCABULARY
        ]
    expected = torch.where(out.sampled_mask, plain_logprobs(logits, out.response_ids, **chosen), 0.0)
    torch.testing.assert_close(out.logprobs, expected, atol=1e-5, rtol=0)
    return logits


def test_texts_depend_on_sample_and_position_alone(tiny_model_folder):
    """Not on slots; a token is that of the sampler at its place in the response, said tokens counted."""
    model, ids, mask = load_prompted(tiny_model_folder("llama"))
    chosen = turn_options(seed=3, top_k=5, temperature=0.8)
    samples = torch.tensor([5, 2, 9, 0])
    expected = Generator(model).generate(PromptBatch(ids, mask, samples), chosen, on_turns=Partner())
    assert (expected.response_mask & ~expected.sampled_mask).any(1).sum() > 1, "several must go on"
    logits = check_turn_logprobs(model, ids, mask, expected, temperature=0.8)
    for position in range(expected.response_ids.shape[1]):
        uniforms = counter_uniform(3, samples, torch.full((4,), position))
        wanted = sample_tokens(logits[:, position], uniforms, temperature=0.8, top_k=5).token_ids
        is_sampled = expected.sampled_mask[:, position]
        assert expected.response_ids[is_sampled, position].equal(wanted[is_sampled])
    for num_slots in (1, 2):
        found = Generator(model, num_slots=num_slots).generate(
            PromptBatch(ids, mask, samples), chosen, on_turns=Partner()
        )
        for field in ("response_ids", "response_mask", "sampled_mask", "is_finished"):
            assert getattr(found, field).equal(getattr(expected, field)), field
    gain = expected.truncated_logprobs - expected.logprobs
    assert (gain[expected.sampled_mask] > 0).any() and gain[~expected.sampled_mask].eq(0).all()


def test_a_partner_hears_each_turn_once_and_whole(tiny_model_folder):
    model, ids, mask = load_prompted(tiny_model_folder("llama"))
    chosen = greedy_options(model, ids, mask)
    partner = Partner(chosen.stop_token_id)
    out = Generator(model).generate(PromptBatch(ids, mask, torch.arange(4)), chosen, on_turns=partner)
    for sample, turns in partner.heard.items():
        text = out.response_ids[sample][out.response_mask[sample]].tolist()
        ends = [len(turn) for turn in turns]
        assert ends == sorted(set(ends)) and all(text[: len(turn)] == turn for turn in turns)
        sampled = out.sampled_mask[sample].tolist()
        stops = [i + 1 for i, t in enumerate(text) if t == chosen.stop_token_id and sampled[i]]
        assert stops == ends, "each stop token that was sampled ended a turn, and those that were said none"
    inputs = (PromptBatch(ids, mask, torch.arange(4)), chosen)
    silent = Generator(model).generate(*inputs, on_turns=lambda ended: [None] * len(ended))
    plain = Generator(model).generate(*inputs)
    assert all(a.equal(b) for a, b in zip(silent, plain, strict=True)), "nobody speaks: as without a partner"
    assert plain.sampled_mask.equal(plain.response_mask)
    check_logprobs(model, ids, mask, plain, VOCABULARY)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "options_of_engine",
    [
        {"enable_hybrid_engine": False},
        {"unpin_actor_parameters": True, "generation_slots": 3},
        {"generation_slots": 2},
    ],
)
def test_every_way_of_generating_takes_turns(options_of_engine, tiny_model_folder):
    folder = tiny_model_folder("llama")
    model, ids, mask = load_prompted(folder)
    chosen = greedy_options(model, ids, mask)
    stop = chosen.stop_token_id
    expected = Generator(model).generate(
        PromptBatch(ids, mask, torch.arange(4)), chosen, on_turns=Partner(stop)
    )
    hybrid = build(folder, 3, **options_of_engine)
    with hybrid.generation_mode():
        found = hybrid.generate(PromptBatch(ids, mask, torch.arange(4)), chosen, on_turns=Partner(stop))
    for field in ("response_ids", "response_mask", "sampled_mask", "is_finished"):
        assert getattr(found, field).equal(getattr(expected, field)), field
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)
