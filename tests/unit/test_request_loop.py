"""Requests of several threads that are generated together: each has the responses that it has alone, and what
one of them does, or what becomes of it, is nothing to the others.
"""

import dataclasses
import functools
import itertools
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from arena_fakes import make_arena, make_client, real_server
from pretended_gpu import pretended_gpu
from test_answering import load
from test_decode_graphs import make_generator

from common.generation import request_loop
from common.generation.decode import DecodeStep, SamplingOptions
from common.generation.generate import Generator, PromptBatch
from common.generation.request_loop import Request, SharedGenerator, _RequestLoop, device_turn
from serving.answering import Answerer, Sampling
from serving.text_stream import Answer

PROMPTS = [[40 + i, *range(60, 60 + 7 * i % 23)] for i in range(8)]
SAMPLINGS = [
    Sampling(12, 0.9, seed=1),
    Sampling(24, 0.0),
    Sampling(5, 1.2, top_k=7, seed=2, num_answers=3),
    Sampling(24, 0.7, top_p=0.8, seed=-3, num_answers=2),
    Sampling(9, 0.9, seed=2**62, stop=("e",)),
    Sampling(1, 1.5, seed=5),
    Sampling(24, 0.9, top_k=3, top_p=0.7, seed=1, num_answers=5),
    Sampling(20, 0.0, stop=("zzz", "a")),
]


def load_shared(folder: str, max_slots: int, **more) -> Answerer:
    answerer = load(folder, seed=7, **{"max_new_tokens": 24} | more)
    answerer._shared.max_slots = max_slots
    return answerer


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list]:
    """Start a thread; the list gets what `work` returns or raises."""
    results: list = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def queued(answerer: Answerer, work: Callable[[], object]) -> tuple[threading.Thread, list]:
    """Start a thread and wait until its request waits in the queue."""
    before = len(answerer._shared._queue)
    started = in_thread(work)
    for _ in range(10_000):
        if len(answerer._shared._queue) > before:
            return started
        time.sleep(0.001)
    raise AssertionError("no request was queued")


def finish(threads: list[tuple[threading.Thread, list]]) -> list:
    for thread, _ in threads:
        thread.join(60)
    return [result for _, [result] in threads]


def respond_in_turn(answerer: Answerer, per_token: int) -> list[list[Answer]]:
    """The answers to all prompts; `per_token` requests join with each text of the first one."""
    joined = []
    waiting = list(zip(PROMPTS, SAMPLINGS, strict=True))

    def join(*_: object) -> None:
        for _ in range(per_token):
            if waiting:
                prompt, sampling = waiting.pop(0)
                joined.append(queued(answerer, functools.partial(answerer.respond, prompt, sampling)))

    prompt, sampling = waiting.pop(1)  # the longest
    first = in_thread(lambda: answerer.respond(prompt, sampling, on_text=join))
    first[0].join(60)
    assert not waiting
    answers = finish([first, *joined])
    return [answers[1], answers[0], *answers[2:]]


@pytest.fixture
def rows_of_passes(monkeypatch) -> list[int]:
    """How many sequences each decoding pass had."""
    rows: list[int] = []
    run = DecodeStep.run
    monkeypatch.setattr(DecodeStep, "run", lambda step, n, upto: rows.append(n) or run(step, n, upto))
    return rows


def test_alone_they_are_those_of_one_generation(tiny_model_folder):
    answerer = load_shared(tiny_model_folder("llama"), 1)
    generator = Generator(answerer._shared.generator.model)
    for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True):
        options = SamplingOptions(
            sampling.max_new_tokens, stop_token_id=0, pad_token_id=0, temperature=sampling.temperature or 1.0,
            top_k=sampling.top_k, top_p=sampling.top_p, do_sample=sampling.temperature > 0,
            seed=7 if sampling.seed is None else sampling.seed, num_valid_tokens=answerer.num_token_ids,
        )  # fmt: skip
        ids = torch.tensor([prompt])
        batch = PromptBatch(ids, ids >= 0, torch.arange(sampling.num_answers))
        found = generator.generate(batch, options)
        expected = [
            row[mask].tolist() for row, mask in zip(found.response_ids, found.response_mask, strict=True)
        ]
        answers = answerer.respond(prompt, dataclasses.replace(sampling, stop=()))
        assert [answer.token_ids for answer in answers] == expected


@pytest.mark.parametrize("family", ["llama", "bloom", "mistral_window"])
@pytest.mark.parametrize(("max_slots", "per_token"), [(32, 7), (5, 2), (3, 1)])
def test_requests_have_the_answers_that_they_have_alone(
    family, max_slots, per_token, tiny_model_folder, rows_of_passes
):
    folder = tiny_model_folder(family)
    alone, together = (load_shared(folder, num) for num in (1, max_slots))
    rows_of_passes.clear()
    expected = [alone.respond(p, s) for p, s in zip(PROMPTS, SAMPLINGS, strict=True)]
    assert max(rows_of_passes) == 1
    num_alone = len(rows_of_passes)
    together.respond([50] * 30, SAMPLINGS[0])  # a cache that is large enough for all
    rows_of_passes.clear()
    found = respond_in_turn(together, per_token)
    assert found == expected
    assert max(rows_of_passes) >= min(max_slots, 13) and len(rows_of_passes) < num_alone / 2


def test_equal_neighbours_are_sampled_together(tiny_model_folder, monkeypatch):
    answerer = load_shared(tiny_model_folder("llama"), 8)
    sampled = []
    sample = request_loop.SamplingOptions.sample
    monkeypatch.setattr(
        request_loop.SamplingOptions, "sample",
        lambda self, logits, uniforms: sampled.append(len(logits)) or sample(self, logits, uniforms),
    )  # fmt: skip
    join = [Sampling(3, 0.5, seed=seed, num_answers=2) for seed in range(3)]
    joined = []

    def listen(*_: object) -> None:
        while join:
            joined.append(queued(answerer, functools.partial(answerer.respond, PROMPTS[0], join.pop())))

    answerer.respond(PROMPTS[1], Sampling(8, 0.9, seed=1), on_text=listen)
    finish(joined)
    assert sampled[-1] == 1 and sampled.count(6) == 3 and max(sampled) == 6


def test_who_is_gone_leaves_the_slot_at_the_next_token(tiny_model_folder):
    answerer = load_shared(tiny_model_folder("llama"), 1)
    long = Sampling(24, 0.9, seed=3)
    [whole] = answerer.respond(PROMPTS[3], long)
    is_gone, others = threading.Event(), []

    def listen(_: int, text: str) -> None:
        if not others:
            others.append(queued(answerer, lambda: answerer.respond(PROMPTS[3], long)))
            [early] = answerer.respond(PROMPTS[0], long, is_gone=lambda: True)
            assert early == Answer("", [], "cancelled"), "without a slot"
            is_gone.set()

    [cut] = answerer.respond(PROMPTS[3], long, on_text=listen, is_gone=is_gone.is_set)
    assert cut.finish_reason == "cancelled" and whole.token_ids[: len(cut.token_ids)] == cut.token_ids
    assert len(cut.token_ids) < 5
    [again] = finish(others[:1])[0]
    assert again == whole


def test_an_error_in_one_request_ends_its_responses_and_no_others(tiny_model_folder):
    def fail(number: int, text: str) -> None:
        raise ValueError(f"no more of {number}")

    answerer = load_shared(tiny_model_folder("llama"), 4)
    sampling = Sampling(24, 0.9, seed=3, num_answers=2)
    expected = answerer.respond(PROMPTS[3], sampling)
    joined = []

    def listen(*_: object) -> None:
        if not joined:
            joined.append(queued(answerer, lambda: answerer.respond(PROMPTS[2], sampling, on_text=fail)))

    assert answerer.respond(PROMPTS[3], sampling, on_text=listen) == expected
    [error] = finish(joined)
    assert isinstance(error, ValueError) and str(error).startswith("no more of ")
    assert answerer.respond(PROMPTS[3], sampling) == expected


@pytest.mark.parametrize("error", [RuntimeError("a kernel failed\nhere"), torch.OutOfMemoryError("no GiB")])
def test_a_pass_that_fails_ends_the_requests_in_flight_and_the_next_ones_are_answered(
    error, tiny_model_folder, monkeypatch, capfd
):
    answerer = load_shared(tiny_model_folder("llama"), 2)
    sampling = Sampling(24, 0.9, seed=3)
    expected = answerer.respond(PROMPTS[3], sampling)
    run, joined = DecodeStep.run, []

    def fail(step: DecodeStep, num_rows: int, upto: int) -> None:
        if num_rows == 2:
            monkeypatch.setattr(DecodeStep, "run", run)
            raise error
        run(step, num_rows, upto)

    def listen(*_: object) -> None:
        while len(joined) < 3:
            joined.append(queued(answerer, lambda: answerer.respond(PROMPTS[3], sampling)))

    monkeypatch.setattr(DecodeStep, "run", fail)
    is_memory = isinstance(error, torch.OutOfMemoryError)
    words = f"generation failed for {{}} request\\(s\\): {str(error).splitlines()[0]}"
    words += "; ask again: at most 1 responses" if is_memory else "$"
    with pytest.raises(RuntimeError, match=words.format("[24]")):
        answerer.respond(PROMPTS[3], sampling, on_text=listen)
    results = finish(joined)
    failed = [result for result in results if isinstance(result, RuntimeError)]
    assert all(result == expected for result in results if result not in failed)
    assert answerer._shared.max_slots == (1 if is_memory else 2)
    assert answerer.respond(PROMPTS[3], sampling) == expected
    assert capfd.readouterr().err.count("error: generation failed") == 1


def test_requests_enter_in_their_order_also_where_one_needs_a_larger_cache(tiny_model_folder, monkeypatch):
    answerer = load_shared(tiny_model_folder("llama"), 2)
    monkeypatch.setattr(request_loop, "_MAX_REQUESTS", 4)
    entered, add, joined = [], _RequestLoop.add, []
    monkeypatch.setattr(
        _RequestLoop, "add", lambda loop, r: entered.append((len(r.prompt_ids), loop)) or add(loop, r)
    )
    lengths = [3, 5, 90, 4, 6, 7, 8, 9]

    def listen(*_: object) -> None:
        while len(joined) < len(lengths):
            prompt = [50] * lengths[len(joined)]
            joined.append(queued(answerer, lambda p=prompt: answerer.respond(p, Sampling(5, 0.9))))

    answerer.respond([50] * 2, Sampling(8, 0.9), on_text=listen)
    assert all(isinstance(result, list) for result in finish(joined))
    assert [length for length, _ in entered] == [2, *lengths]
    loops = [loop for _, loop in entered]
    assert [loops.count(loop) for loop in dict.fromkeys(loops)] == [3, 4, 2], "a new cache, then a full loop"
    assert answerer._shared.generator._step.cache.max_length == 128


def test_who_waits_for_the_device_comes_before_who_returns():
    def wait_for_turn() -> None:
        with device_turn():
            order.append("waits")

    order: list[str] = []
    for _ in range(20):
        with device_turn():
            thread, _ = in_thread(wait_for_turn)
            time.sleep(0.02)
        with device_turn():
            order.append("returns")
        thread.join(10)
    assert order == ["waits", "returns"] * 20


def test_two_models_and_scores_take_turns_on_the_device(tiny_model_folder, monkeypatch):
    answerers = [load_shared(tiny_model_folder(f), 2, max_new_tokens=100) for f in ("llama", "gpt2")]
    passes, run = [], DecodeStep.run

    def run_slowly(step: DecodeStep, num_rows: int, upto: int) -> None:
        passes.append(step)
        end = time.perf_counter() + 0.004
        while time.perf_counter() < end:  # another thread that runs Python code rarely gets its turn
            pass
        run(step, num_rows, upto)

    monkeypatch.setattr(DecodeStep, "run", run_slowly)
    ready, scored = threading.Barrier(3), []

    def score() -> None:
        ready.wait()
        for _ in range(3):
            answerers[0].score([5, 6, 7], 1)
            scored.append(len(passes))

    def respond(answerer: Answerer) -> None:
        ready.wait()
        answerer.respond(PROMPTS[0], Sampling(100, 0.9, num_answers=2))

    finish([in_thread(score), *(in_thread(functools.partial(respond, answerer)) for answerer in answerers)])
    groups = [len(list(group)) for _, group in itertools.groupby(passes, id)]
    both = groups[1:-1]  # between the start of the second model and the end of the first
    assert sum(both) > 60 and max(both) <= 8 and scored[-1] < len(passes) / 2, "nobody is passed over"


def test_on_a_gpu_a_pass_is_a_graph_whatever_the_options_and_the_host_waits_once(monkeypatch):
    def answer_all() -> list:
        shared = SharedGenerator(make_generator().model, max_slots=8, max_length=64, max_new_tokens=16)
        captured.clear()
        told = []
        for number in range(3):
            tokens: list[int] = []
            options = SamplingOptions(
                16,
                stop_token_id=-1,
                pad_token_id=0,
                temperature=0.5 + number,
                top_k=9,
                top_p=0.9,
                seed=number,
            )

            def listen(index: int, token_id: int, tokens: list = tokens) -> bool:
                tokens.append((index, token_id))
                captured.append(len(shared.generator._graphs.graphs) if shared.generator._graphs else 0)
                return False

            request = Request([7, 8, 9], [4, 5], options, listen, 2)
            mixed = Request([11, 12], [6], dataclasses.replace(options, do_sample=False), listen, 1)
            shared._queue.append(mixed)
            shared.run(request)
            told.append(sorted(tokens))
        return told

    captured: list[int] = []
    expected = answer_all()
    with pretended_gpu() as gpu:
        waits = []
        for name in ("_decode", "_finished_slots"):
            method = getattr(_RequestLoop, name)

            def watched(loop: _RequestLoop, method: Callable = method, name: str = name) -> object:
                gpu.clear()
                result = method(loop)
                waits.append((name, len(gpu.waits)))
                return result

            monkeypatch.setattr(_RequestLoop, name, watched)
        assert answer_all() == expected and gpu.graphs
        assert captured[len(captured) // 3] == captured[-1] > 0, "other options: the same graphs"
        assert {w for w in waits[10:] if w[0] == "_decode"} == {("_decode", 0)}
        assert {w for w in waits if w[0] == "_finished_slots"} == {("_finished_slots", 1)}


def test_clients_that_ask_together_get_the_answers_that_they_get_alone(tiny_model_folder, tmp_path):
    answerer = load_shared(tiny_model_folder("llama"), 8)
    app = make_client(make_arena(tmp_path / "a.sqlite3", tiny=answerer)).app
    hi = [{"role": "user", "content": "Hi"}]
    kinds = [
        {"temperature": 0}, {"temperature": 1.5, "n": 3}, {"top_p": 0.5}, {"stop": ["e", " a"]},
        {"stream": True}, {"logprobs": True, "top_logprobs": 2},
        {"messages": [*hi, {"role": "assistant", "content": "It is"}]},
    ]  # fmt: skip
    bodies = [
        {"model": "tiny", "messages": hi, "max_tokens": 5 + seed, "seed": seed} | kinds[seed % len(kinds)]
        for seed in range(21)
    ]

    def ask(body: dict) -> object:
        with httpx.Client(trust_env=False, timeout=60) as client:
            response = client.post(f"{url}/chat/completions", json=body)
        assert response.status_code == 200, response.text
        if body.get("stream"):
            events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line[6:7] == "{"]
            return [event["choices"] for event in events]
        return response.json()["choices"], response.json()["usage"]

    with real_server(app) as port, ThreadPoolExecutor(21) as threads:
        url = f"http://localhost:{port}/v1"
        alone = [ask(body) for body in bodies]
        together = list(threads.map(ask, bodies))
    assert together == alone
