"""The arena over HTTP: blind pairs, judgements, follow-ups, and everything that can go wrong with them."""

import json
import random
import threading
from pathlib import Path

import pytest
from arena_fakes import FakeModel, make_arena, make_client

from serving.answering import read_prompts
from serving.arena_app import NewPair

FORMS = {"left": "plain text", "right": "plain text"}


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "arena.sqlite3"


@pytest.fixture
def arena(path):
    return make_arena(path)


@pytest.fixture
def client(arena):
    return make_client(arena)


def ask(client, **body) -> list[dict]:
    answer = client.post("/api/pairs", json=body)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def judge(client, pair: str, choice: str):
    return client.post("/api/judgements", json={"pair": pair, "choice": choice})


def refusal(answer, status: int = 422) -> str:
    assert answer.status_code == status, answer.text
    return answer.json()["detail"]


# ---- the usual way


def test_answers_come_in_pieces_and_names_with_the_judgement_and_only_then(client):
    events = ask(client, text=" Hi ")
    assert events[0]["event"] == "pair" and events[0]["prompt"] == [{"role": "user", "content": "Hi"}]
    assert "models" not in events[0] and events[-1] == {"event": "done", "is_answered": True}
    for side in "ab":
        of_side = [event for event in events if event.get("side") == side]
        pieces = [event["text"] for event in of_side if event["event"] == "text"]
        assert of_side[-1] == {"event": "end", "side": side, "text": "".join(pieces), "finish": "stop"}
        assert len(pieces) > 5 and pieces[0] in "lr"
    sides = [event["side"] for event in events[1:-1]]
    assert sides == sorted(sides), "one after the other"
    address = f"/api/pairs/{events[0]['id']}"
    assert "models" not in client.get(address).json()
    judged = judge(client, events[0]["id"], "a").json()
    assert sorted(judged["models"].values()) == ["left", "right"] and judged["choice"] == "a"
    for side in "ab":
        assert judged["answers"][side] == f"{judged['models'][side]} heard Hi"
    assert client.get(address).json() == judged


def test_sides_are_shuffled_and_those_meet_that_have_met_least(client, arena, tmp_path):
    first = [arena.store.get(ask(client, text="Hi")[0]["id"]).model_a for _ in range(24)]
    assert 5 <= first.count("left") <= 19
    three = make_arena(tmp_path / "three", **{name: FakeModel(name) for name in "xyz"})
    for _ in range(9):
        ask(make_client(three), text="Hi")
    assert sorted(three.store.num_answered_by_models().values()) == [3, 3, 3]


def test_a_follow_up_goes_on_from_the_preferred_answer_with_the_same_models(client, arena):
    first = ask(client, text="Hi")[0]["id"]
    follow_up = {"text": "And?", "follows": first}
    assert "preferred" in refusal(client.post("/api/pairs", json=follow_up)), "not judged"
    judged = judge(client, first, "b").json()
    events = ask(client, **follow_up)
    said = [message["content"] for message in events[0]["prompt"]]
    assert said == ["Hi", judged["answers"]["b"], "And?"]
    second = arena.store.get(events[0]["id"])
    assert {second.model_a, second.model_b} == {"left", "right"} and second.source == "follow-up"
    judge(client, second.id, "both_bad")
    answer = client.post("/api/pairs", json={"text": "x", "follows": second.id})
    assert "start a new conversation" in refusal(answer)


def test_prompts_of_a_data_set_are_drawn_once_each(path, tmp_path):
    rows = [{"prompt": f"question {i}"} for i in range(5)] + [{"text": "no prompt"}, {"prompt": 3}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = read_prompts(str(tmp_path / "rows.jsonl"), random.Random(1))
    client = make_client(arena := make_arena(path, prompts))
    assert client.get("/api/state").json() == {"has_prompts": True, "forms": FORMS}
    pairs = [arena.store.get(ask(client, draw=True)[0]["id"]) for _ in range(10)]
    for five in (pairs[:5], pairs[5:]):
        assert {pair.prompt[0].content for pair in five} == {f"question {i}" for i in range(5)}
    assert all(pair.source.startswith("rows.jsonl:") for pair in pairs)


def test_results_count_every_judgement(client, arena):
    empty = {"choices": {}, "models": [], "duels": []}
    assert client.get("/api/results").json() == empty
    for choice in ("left", "left", "left", "right", "tie", "both_bad"):
        pair = arena.store.get(ask(client, text="Hi")[0]["id"])
        side = {pair.model_a: "a", pair.model_b: "b"}.get(choice, choice)
        assert judge(client, pair.id, side).status_code == 200
    ask(client, text="never judged")
    results = client.get("/api/results").json()
    assert sum(results["choices"].values()) == 6 and results["choices"]["tie"] == 1
    [duel] = results["duels"]
    assert duel.pop("rate")["value"] == 0.75
    assert duel == {"name": "left against right", "won": 3, "lost": 1, "neither": 2}
    assert [row["name"] for row in results["models"]] == ["left", "right"]


# ---- what goes wrong


def test_a_judgement_sent_twice_counts_once(client):
    pair_id = ask(client, text="Hi")[0]["id"]
    assert judge(client, pair_id, "a").json() == judge(client, pair_id, "a").json()
    assert "is kept" in refusal(judge(client, pair_id, "b"), 409)
    assert client.get("/api/results").json()["models"][0]["won"] == 1


def test_a_page_left_open_over_a_restart_is_judged(client, arena, path):
    pair_id = ask(client, text="Hi")[0]["id"]
    lost = arena.store.add_pair((), "typed", "left", "right", {})
    restarted = make_client(make_arena(path, other=FakeModel("other"), another=FakeModel("another")))
    judged = judge(restarted, pair_id, "b").json()
    assert sorted(judged["models"].values()) == ["left", "right"]
    answer = restarted.post("/api/pairs", json={"text": "And?", "follows": pair_id})
    assert "is no longer served" in refusal(answer)
    assert "ask again" in refusal(judge(restarted, lost.id, "a"), 409)


def test_a_model_that_fails_is_said_without_its_name_and_the_other_answer_is_kept(path, capsys):
    def fail(text: str) -> str:
        raise RuntimeError("right has no memory\nmore lines")

    arena = make_arena(path, left=FakeModel("left"), right=FakeModel("right", fail))
    events = ask(make_client(arena), text="Hi")
    [error] = [event for event in events if event["event"] == "error"]
    assert error["message"] == "RuntimeError: the model has no memory"
    assert events[-1] == {"event": "done", "is_answered": False}
    pair = arena.store.get(events[0]["id"])
    kept = {pair.model_a: (pair.answer_a, pair.error_a), pair.model_b: (pair.answer_b, pair.error_b)}
    assert kept == {"left": ("left heard Hi", None), "right": (None, "RuntimeError: right has no memory")}
    assert "right gave no answer" in capsys.readouterr().err


def test_a_disk_that_takes_nothing_is_said_and_the_judgement_can_be_sent_again(client, arena):
    pair_id = ask(client, text="Hi")[0]["id"]
    run = arena.store._connection.execute
    run("PRAGMA query_only = ON")
    assert "make room and try again" in refusal(judge(client, pair_id, "a"), 507)
    assert client.post("/api/pairs", json={"text": "Hi"}).status_code == 507
    run("PRAGMA query_only = OFF")
    assert judge(client, pair_id, "a").status_code == 200
    arena.models["left"].say = lambda text: run("PRAGMA query_only = ON") and "x"
    events = ask(client, text="Hi")
    assert events[-1]["event"] == "failed" and "nothing was written" in events[-1]["message"], (
        "during an answer"
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"text": "x" * 200}, "the prompt has 200 tokens, but prompt and answer together may have 200"),
        ({"text": "refuse me"}, "the chat template rejects this dialogue"),
        ({"text": "\ud800"}, "unable to parse raw data as a unicode string"),
        ({"draw": True}, "without --data_path"),
        ({"text": "Hi", "follows": "\ud800"}, "unable to parse raw data as a unicode string"),
        ({"text": 3}, "body.text 3: Input should be a valid string"),
    ],
)
def test_prompts_that_cannot_be_asked(client, body, words):
    headers = {"content-type": "application/json"}
    answer = client.post("/api/pairs", content=json.dumps(body), headers=headers)
    assert words in refusal(answer) and "left" not in answer.text and "right" not in answer.text


def test_who_leaves_during_an_answer_ends_it_and_it_is_not_kept(arena):
    seen, gone = [], threading.Event()

    def emit(event: dict) -> None:
        seen.append(event)
        if len(seen) == 4:
            gone.set()

    pair = arena.ask(NewPair("Hi"))
    arena.answer(pair, emit, gone)
    assert len(seen) == 4 and arena.store.get(pair.id).answer_a is None
    assert len(arena.models[pair.model_b].asked) == 0


# ---- other people's pages, and what is in a text


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        (
            {"Host": "localhost.evil.example"},
            "the host 'localhost.evil.example' is not a name of this server",
        ),
        ({"Host": "["}, "the host"),
        ({"Origin": "null"}, "the origin 'null' is another site"),
        ({"Origin": "http://localhost:9999"}, "another site"),
        ({"Sec-Fetch-Site": "cross-site"}, "another site's page"),
    ],
)
def test_requests_of_other_sites_are_refused(client, headers, words):
    assert words in refusal(client.post("/api/pairs", json={"text": "Hi"}, headers=headers), 403)
    answer = client.post("/v1/chat/completions", json={}, headers=headers)
    assert answer.status_code == 403 and words in answer.json()["error"]["message"]


def test_the_servers_own_page_may_ask_by_each_of_its_names(client):
    for host in ("127.0.0.1", "[::1]:8080", "LOCALHOST"):
        headers = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
        assert client.get("/api/state", headers=headers).status_code == 200


def test_the_page_and_its_policy_run_nothing_else(client):
    for address in ("/", "/nowhere"):
        headers = client.get(address).headers
        policy = headers["content-security-policy"]
        for part in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"):
            assert part in policy
        assert "unsafe" not in policy and headers["x-content-type-options"] == "nosniff"
    page, script, style = (client.get(path).text for path in ("/", "/page.js", "/style.css"))
    assert "http" not in page + script + style
    assert "<script src=" in page and page.count("<script") == 1
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in script, "texts are shown, never read as markup"


def test_with_a_token_the_page_is_open_and_nothing_else(arena):
    client = make_client(arena, token="s3cret")
    bearer = {"Authorization": "Bearer s3cret"}
    statuses = {"/": 200, "/page.js": 200, "/api/results": 401, "/v1/models": 401, "/no": 401}
    for path, allowed in statuses.items():
        assert client.get(path).status_code == allowed
        assert client.get(path, headers=bearer).status_code == (404 if path == "/no" else 200)
    assert client.get("/v1/models").json()["error"]["type"] == "authentication_error"
