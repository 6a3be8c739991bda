"""OpenAI's protocol: its own client against our application, what is honoured and what is refused."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch
from arena_fakes import END, FakeModel, make_arena, make_client, real_server

from common.data.dialogue import Template
from common.flags.args import Problems
from serving.answering import Answerer, Sampling, load_answerer, load_template
from serving.arguments import AnsweringArguments
from serving.openai_api import MAX_WAITING
from serving.text_stream import Answer

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def models() -> dict[str, FakeModel]:
    return {name: FakeModel(name) for name in ("left", "right")}


@pytest.fixture
def client(tmp_path, models):
    return make_client(make_arena(tmp_path / "a.sqlite3", **models), raise_server_exceptions=False)


@pytest.fixture
def ours(client) -> openai.OpenAI:
    """OpenAI's own client, whose requests go to our application without a network."""
    return openai.OpenAI(
        base_url="http://localhost:8080/v1", api_key="any", http_client=client, max_retries=0
    )


def post(client, path="chat/completions", **body):
    body = {"model": "left"} | ({"messages": HI} if path == "chat/completions" else {}) | body
    headers = {"content-type": "application/json"}
    return client.post(f"/v1/{path}", content=json.dumps(body), headers=headers)  # half characters too


# ---- OpenAI's own client


def test_models_are_listed(ours):
    assert [model.id for model in ours.models.list()] == ["left", "right"]
    assert ours.models.retrieve("right").object == "model"
    with pytest.raises(openai.NotFoundError, match="unknown model 'third'; this server has left, right"):
        ours.models.retrieve("third")


def test_a_conversation_is_answered(ours, models):
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "are you?"}]},
    ]
    answer = ours.chat.completions.create(
        model="left", messages=messages, temperature=0.2, top_p=0.9, max_tokens=40, seed=7, n=2, user="me"
    )
    assert [choice.message.content for choice in answer.choices] == ["left heard How are you?"] * 2
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].finish_reason == "stop" and answer.object == "chat.completion"
    sampling = models["left"].asked[-1]
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.2, 0.9, 40)
    assert (sampling.seed, sampling.num_answers) == (7, 2) and not models["left"].keeps_space
    prompt, new = len("Be kind.|How are you?"), 2 * len("left heard How are you?") + 2
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, new)
    assert answer.usage.total_tokens == prompt + new


def test_limits_and_stops_end_an_answer(ours):
    for reason, more in (("length", {"max_completion_tokens": 4}), ("stop", {"stop": ["zzz", " heard"]})):
        [choice] = ours.chat.completions.create(model="left", messages=HI, **more).choices
        assert (choice.message.content, choice.finish_reason) == ("left", reason)


def test_more_tokens_than_the_server_allows(ours, models):
    ours.chat.completions.create(model="left", messages=HI, max_tokens=1024)
    assert models["left"].asked[-1].max_new_tokens == 60


def test_health_needs_no_token(tmp_path, models):
    client = make_client(make_arena(tmp_path / "a.sqlite3", **models), token="secret")
    assert client.get("/health").json() == {"models": ["left", "right"]}


def test_a_streamed_answer_put_together_is_the_answer(ours):
    stream = ours.chat.completions.create(
        model="right", messages=HI, stream=True, n=2, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts, ends = {0: "", 1: ""}, {}
    for chunk in chunks[:-1]:
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] = choice.finish_reason
    assert set(texts.values()) == {"right heard Hi"} and ends == {0: "stop", 1: "stop"}
    assert chunks[0].choices[0].delta.role == "assistant" and len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage.completion_tokens == 30 and chunks[-1].choices == []


def test_texts_are_gone_on_from(ours, models):
    answer = ours.completions.create(model="left", prompt=["one", "two"], n=2, max_tokens=20)
    texts = ["left heard one"] * 2 + ["left heard two"] * 2
    assert [choice.text for choice in answer.choices] == texts and models["left"].keeps_space
    assert answer.usage.prompt_tokens == len("one") + len("two")
    told = dict.fromkeys(range(4), "")
    for piece in ours.completions.create(model="left", prompt=["one", "two"], n=2, stream=True):
        told[piece.choices[0].index] += piece.choices[0].text
    assert list(told.values()) == texts
    # Each behind its own prompt, and with the log-probabilities of it.
    asked = {"prompt": ["one", "other"], "n": 2, "echo": True, "logprobs": 1}
    choices = ours.completions.create(model="left", max_tokens=20, **asked).choices
    expected = ["oneleft heard one"] * 2 + ["otherleft heard other"] * 2
    assert [choice.text for choice in choices] == expected
    assert ["".join(c.logprobs.tokens).rstrip(chr(END)) for c in choices] == expected
    ids = ours.completions.create(model="left", prompt=[104, 105], max_tokens=4, echo=True)
    assert ids.choices[0].text == "hileft" and ids.usage.prompt_tokens == 2
    pieces = ours.completions.create(model="left", prompt="x", stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == "left heard x"


def test_log_probabilities_of_a_prompt_alone(ours):
    answer = ours.completions.create(model="left", prompt="abc", max_tokens=0, echo=True, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "abc" and logprobs.tokens == ["a", "b", "c"]
    assert logprobs.token_logprobs == [None, -0.98, -0.99] and logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs == [None, {"b": -0.5}, {"c": -0.5}]


def test_log_probabilities_of_an_answer_have_its_end(ours):
    answer = ours.chat.completions.create(model="left", messages=HI, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == "left heard Hi" + chr(END)
    assert content[0].logprob == -1.08 and len(content[0].top_logprobs) == 2
    assert ours.completions.create(model="left", prompt="x", logprobs=0).choices[0].logprobs.tokens[0] == "l"


# ---- refusals, in OpenAI's form


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": [0x110000]}, "prompt", "1114112 is not one of the model's 1114112 tokens"),
        ({"prompt": [-1]}, "prompt", "body.prompt"),
        ({"prompt": "x", "max_tokens": 0}, None, "max_tokens: 0 needs echo"),
        ({"prompt": "x", "stream": True, "echo": True}, None, "not supported together with stream"),
        ({"tools": [{"type": "function"}]}, "tools", "tools [{'type': 'function'}]: Extra inputs"),
        ({"temperature": -1}, "temperature", "temperature -1: Input should be greater than or equal to 0"),
        ({"stream": True, "logprobs": True}, None, "together with stream"),
        ({"top_logprobs": 1}, None, "top_logprobs needs logprobs: true"),
        ({"messages": [*HI, {"role": "system", "content": "x"}]}, "messages", "must be from the user"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages.0.content.0.type", "text"),
        ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages", "template rejects"),
        ({"prompt": []}, "prompt", "body.prompt"),
        ({"prompt": [[]]}, "prompt", "body.prompt"),
        ({"prompt": ["x"] * 257}, "prompt", "body.prompt"),
        ({"prompt": [[1]] * 257}, "prompt", "body.prompt"),
        ({"temperature": "hot"}, "temperature", "Input should be a valid number"),
        ({"temperature": 101}, "temperature", "Input should be less than or equal to 10"),
        ({"top_p": 0}, "top_p", "Input should be greater than 0"),
        ({"top_p": 1.5}, "top_p", "Input should be less than or equal to 1"),
        ({"n": 0}, "n", "Input should be greater than or equal to"),
        ({"n": 17}, "n", "Input should be less than or equal to 16"),
        ({"n": True}, "n", "Input should be a valid integer"),
        ({"seed": 9223372036854775808}, "seed", "Input should be less than 92233720368547"),
        ({"max_tokens": 0}, "max_tokens", "Input should be greater than or equal to"),
        ({"max_tokens": 1.5}, "max_tokens", "Input should be a valid integer"),
        ({"prompt": "x", "logprobs": 21}, "logprobs", "Input should be less than or equal to 20"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "Input should be less than or equal to 20"),
        ({"stream": "yes"}, "stream", "Input should be a valid boolean"),
        ({"stream_options": {"x": 1}}, "stream_options.x", "Extra inputs are not permitted"),
        ({"messages": []}, "messages", "the last message must be from the user"),
        ({"messages": "hi"}, "messages", "Input should be a valid list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "Input should be"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "Field required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "a valid list"),
        ({"prompt": 5}, "prompt", "Input should be a valid string"),
        ({"prompt": [1.5]}, "prompt", "Input should be a valid string"),
        ({"prompt": [["a"]]}, "prompt", "Input should be a valid string"),
        ({"prompt": [True]}, "prompt", "Input should be a valid string"),
        ({"stop": [1]}, "stop.0", "Input should be a valid string"),
        ({"response_format": {"type": "json_object"}}, "response_format", "Extra inputs"),
        ({"tool_choice": "required"}, "tool_choice", "Extra inputs are not permitted"),
        ({"frequency_penalty": 1}, "frequency_penalty", "Extra inputs are not permitted"),
        ({"prompt": "x", "best_of": 2}, "best_of", "Extra inputs are not permitted"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "Extra inputs are not permitted"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "Extra inputs"),
        ({"model": 5}, "model", "Input should be a valid string"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages", "must be from the user"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "Input should be greater than or equal to"),
        ({"stop": "x" * 257}, "stop.0", "at most 256 characters"),
        ({"stop": ["a", ""]}, "stop.1", "at least 1 character"),
        ({"stop": ["a"] * 5}, "stop", "at most 4 items"),
        ({"stop": "\ud83d"}, "stop.0", "unable to parse raw data as a unicode string"),
        ({"prompt": "\ud83d"}, "prompt", "unable to parse raw data as a unicode string"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "messages.0.content.0.text", "unicode"),
        ({"messages": [{"role": "\ud83d", "content": ""}]}, "messages.0.role", "unable to parse"),
        ({"\ud83d": 1}, None, "body"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_refused_by_its_name(client, models, body, param, words):
    answer = post(client, "completions" if "prompt" in body else "chat/completions", **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and words in error["message"]
    assert error["type"] == "invalid_request_error" and models["left"].asked == []


def test_neutral_values_of_fields_that_we_do_not_have_are_taken(client):
    neutral = {"frequency_penalty": 0, "logit_bias": {}, "tools": None, "n": 1, "stop": "zzz"}
    neutral |= {"response_format": {"type": "text"}, "user": "me", "metadata": {"a": 1}}
    assert post(client, **neutral).status_code == 200


def test_errors_of_the_server_have_openais_form_too(client, models):
    def fail(text: str) -> str:
        raise RuntimeError("no memory\nat all")

    models["left"].say = fail
    answer = post(client)
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "no memory", "type": "server_error", "param": None, "code": None
    }  # fmt: skip
    models["left"].say = str
    lines = [line for line in post(client, stream=True).text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    models["left"].say = fail
    streamed = post(client, stream=True).text
    assert '"message": "no memory"' in streamed and "[DONE]" not in streamed
    assert post(client, model="third").status_code == 404
    assert client.post("/v1/chat/completions", content="{").json()["error"]["message"].startswith("body")
    too_long = post(client, messages=[{"role": "user", "content": "x" * 200}]).json()["error"]
    assert (
        too_long["code"] == "context_length_exceeded" and "the prompt has 200 tokens" in too_long["message"]
    )
    too_large = post(client, messages=[{"role": "user", "content": "x" * 5000}])
    assert too_large.status_code == 413 and "--max_request_bytes" in too_large.json()["error"]["message"]
    assert client.post("/v1/chat/completions", content="[]").status_code == 400


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        ("", {}),
        ("", {"content-type": "application/json"}),
        ('{"model": "left"}', {}),
        ("[]", {}),
        ("null", {}),
    ],
)
def test_a_body_that_is_no_json_object_says_so(client, content, headers):
    response = client.post("/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == 400
    if not content or content == "[]":
        message = "body: it is not a JSON object; send one, with Content-Type: application/json"
        assert response.json()["error"]["message"] == message
    assert response.json()["error"]["message"].startswith("body")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404), ("POST", "/v1/nothing", 404), ("POST", "/nothing", 404),
        ("DELETE", "/", 405), ("POST", "/page.js", 405), ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405), ("GET", "/api/judgements", 405), ("GET", "/", 200),
        ("HEAD", "/style.css", 200), ("GET", "/../arena.py", 404), ("GET", "/health", 200),
    ],
)  # fmt: skip
def test_an_unknown_path_is_404_and_another_method_405(client, method, path, status):
    response = client.request(method, path)
    assert response.status_code == status
    if status == 404 and path.startswith("/v1/"):
        assert response.json()["error"]["message"] == f"{method} {path}: Not Found"


def test_a_prefilled_reply_is_continued_with_its_space(client, models):
    reply = {"role": "assistant", "content": "It is"}
    models["left"].say = lambda text: " warm."
    assert post(client, messages=[*HI, reply]).json()["choices"][0]["message"]["content"] == " warm."
    assert models["left"].keeps_space
    post(client)
    assert not models["left"].keeps_space


def test_state_and_votes_are_answered_while_all_answers_are_waited_for(tmp_path):
    go_on = threading.Event()
    slow = FakeModel("slow", lambda text: go_on.wait(60) and "done")
    arena = make_arena(tmp_path / "a.sqlite3", slow=slow, fast=FakeModel("fast"))
    app = make_client(arena).app
    body = {"model": "slow", "messages": HI}
    with real_server(app) as port, ThreadPoolExecutor(60) as threads:
        url = f"http://localhost:{port}"
        waiting = [
            threads.submit(httpx.post, f"{url}/v1/chat/completions", json=body, timeout=60) for _ in range(60)
        ]
        try:
            while not slow.asked:
                pass
            assert httpx.get(f"{url}/api/state", timeout=5).status_code == 200
            assert httpx.get(f"{url}/v1/models", timeout=5).status_code == 200
            judged = httpx.post(f"{url}/api/judgements", json={"pair": "none", "choice": "a"}, timeout=5)
            assert judged.status_code == 404 and len(slow.asked) == MAX_WAITING < 40
        finally:
            go_on.set()
        assert {answer.result().status_code for answer in waiting} == {200}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_disconnects_ends_its_answer(is_streamed, tmp_path):
    class Endless(FakeModel):
        def respond(self, prompt_ids, sampling=None, *, is_gone, on_text=None, **more):
            self.asked.append(sampling)
            while not is_gone():
                time.sleep(0.01)
            ended.set()
            return [Answer("", [], "cancelled")]

    ended = threading.Event()
    model = Endless("endless")
    app = make_client(make_arena(tmp_path / "a.sqlite3", endless=model)).app
    body = {"model": "endless", "messages": HI, "stream": is_streamed}
    with real_server(app) as port:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"http://localhost:{port}/v1/chat/completions", json=body, timeout=0.5)
        assert ended.wait(10) and len(model.asked) == 1


# ---- a real model


def load(folder: str) -> Answerer:
    args = AnsweringArguments()
    template = load_template("--models", folder, args, Problems())
    return load_answerer(folder, template, args, Sampling(60))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "x" * 5000}),
        ("completions", {"prompt": ["ok", "x" * 5000]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 5000}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}] * 200}),
    ],
)
def test_a_text_that_cannot_fit_is_not_tokenised(path, body, tiny_model_folder, tmp_path, monkeypatch):
    answerer = load(tiny_model_folder("llama"))
    arena = make_arena(tmp_path / "a.sqlite3", tiny=answerer)
    encode, lengths = Template.encode, []

    def spy(self, segments, *more):
        lengths.append(sum(len(segment.text) for segment in segments))
        return encode(self, segments, *more)

    monkeypatch.setattr(Template, "encode", spy)
    client = make_client(arena, max_request_bytes=10**6)
    error = post(client, path, model="tiny", **body)
    assert error.status_code == 400 and "characters, but prompt and answer together" in error.text
    assert max(lengths, default=0) < 5000


def test_a_real_model_honours_the_seed_and_scores_its_own_words(tiny_model_folder, tmp_path):
    arena = make_arena(tmp_path / "a.sqlite3", tiny=load(tiny_model_folder("llama")))
    client = openai.OpenAI(base_url="http://localhost:8080/v1", api_key="x", http_client=make_client(arena))

    def ask(**more):
        return client.chat.completions.create(model="tiny", messages=HI, max_tokens=12, **more).choices

    [first], [again], [other], [free] = ask(seed=5), ask(seed=5), ask(seed=6), ask()
    assert first.message.content == again.message.content
    assert len({first.message.content, other.message.content, free.message.content}) == 3
    pieces = client.chat.completions.create(model="tiny", messages=HI, max_tokens=12, seed=5, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == first.message.content
    [greedy] = ask(temperature=0, logprobs=True, top_logprobs=1)
    for entry in greedy.logprobs.content:
        assert entry.logprob == entry.top_logprobs[0].logprob and entry.token == entry.top_logprobs[0].token


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_scores_are_those_of_transformers(family, tiny_model_folder):
    answerer = load(tiny_model_folder(family))
    ids = torch.randint(0, 300, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logprobs = answerer.model(ids).logits[0, :-1, :320].float().log_softmax(-1)
    first, *scores = answerer.score(ids[0].tolist(), 3)
    decode = answerer.tokenizer.decode
    expected = logprobs.gather(1, ids[0, 1:, None]).squeeze(1)
    own = torch.tensor([score.logprob for score in scores])
    torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)
    likeliest = [[decode([i]) for i in row] for row in logprobs.topk(3).indices.tolist()]
    assert [[text for text, _ in score.top] for score in scores] == likeliest
    assert first == answerer.score([5], 1)[0]._replace(text=first.text) and first.logprob is None
