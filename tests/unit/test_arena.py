"""The arena over HTTP: blind pairs, judgements, follow-ups, and everything that can go wrong with them."""

import json
import random
import threading
from pathlib import Path

import pytest
from arena_fakes import FakeModel, make_arena, make_client

from common.data.registry import load_source
from serving.blind_pairs import draw_prompts


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "arena.sqlite3"


@pytest.fixture
def arena(path):
    return make_arena(path)


@pytest.fixture
def client(arena):
    return make_client(arena)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A client for what leaves no trace: a database takes longer to make than such a request."""
    return make_client(make_arena(tmp_path_factory.mktemp("shared") / "arena.sqlite3"))


def ask(client, **body) -> list[dict]:
    answer = client.post("/api/pairs", json=body)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def judge(client, pair: str, choice: str):
    return client.post("/api/judgements", json={"pair": pair, "choice": choice})


# ---- the usual way


def test_both_answers_come_in_pieces_and_without_names(client):
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


def test_names_are_told_by_the_judgement_and_only_then(client, arena):
    events = ask(client, text="Hi")
    pair_id = events[0]["id"]
    before = client.get(f"/api/pairs/{pair_id}").json()
    assert "models" not in before and before["choice"] is None
    judged = judge(client, pair_id, "a").json()
    assert sorted(judged["models"].values()) == ["left", "right"] and judged["choice"] == "a"
    for side in "ab":
        assert judged["answers"][side] == f"{judged['models'][side]} heard Hi"
    assert client.get(f"/api/pairs/{pair_id}").json() == judged


def test_sides_are_shuffled(client, arena):
    first = [arena.store.get(ask(client, text="Hi")[0]["id"]).model_a for _ in range(24)]
    assert 5 <= first.count("left") <= 19


def test_of_three_models_those_meet_that_have_met_least(path):
    arena = make_arena(path, **{name: FakeModel(name) for name in "xyz"})
    client = make_client(arena)
    for _ in range(9):
        ask(client, text="Hi")
    assert sorted(arena.store.num_answered_by_models().values()) == [3, 3, 3]


def test_a_follow_up_goes_on_from_the_preferred_answer_with_the_same_models(client, arena):
    first = ask(client, text="Hi")[0]["id"]
    assert client.post("/api/pairs", json={"text": "And?", "follows": first}).status_code == 422, "not judged"
    judged = judge(client, first, "b").json()
    events = ask(client, text="And?", follows=first)
    said = [message["content"] for message in events[0]["prompt"]]
    assert said == ["Hi", judged["answers"]["b"], "And?"]
    second = arena.store.get(events[0]["id"])
    assert {second.model_a, second.model_b} == {"left", "right"} and second.source == "follow-up"
    judge(client, second.id, "both_bad")
    answer = client.post("/api/pairs", json={"text": "x", "follows": second.id})
    assert answer.status_code == 422 and "begin a new one" in answer.json()["detail"]


def test_prompts_of_a_data_set_are_drawn_once_each(path, tmp_path):
    rows = [{"prompt": f"question {i}"} for i in range(5)] + [{"text": "no prompt"}, {"prompt": 3}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = draw_prompts(load_source(str(tmp_path / "rows.jsonl")), random.Random(1))
    client = make_client(arena := make_arena(path, prompts))
    assert client.get("/api/state").json() == {"has_prompts": True, "num_models": 2}
    pairs = [arena.store.get(ask(client, draw=True)[0]["id"]) for _ in range(5)]
    assert {pair.prompt[0].content for pair in pairs} == {f"question {i}" for i in range(5)}
    assert all(pair.source.startswith("rows.jsonl:") for pair in pairs)
    ask(client, draw=True)


def test_results_count_every_judgement(client, arena):
    for choice in ("left", "left", "left", "right", "tie", "both_bad"):
        pair = arena.store.get(ask(client, text="Hi")[0]["id"])
        side = {pair.model_a: "a", pair.model_b: "b"}.get(choice, choice)
        assert judge(client, pair.id, side).status_code == 200
    ask(client, text="never judged")
    results = client.get("/api/results").json()
    assert results["num_judgements"] == 6 and results["choices"]["tie"] == 1
    [duel] = results["duels"]
    assert (duel["first"], duel["first_wins"], duel["second_wins"], duel["ties"]) == ("left", 3, 1, 2)
    assert duel["first_rate"]["value"] == 0.75
    assert [row["model"] for row in results["ratings"]] == ["left", "right"]
    assert results["ratings"][0]["low"] < results["ratings"][0]["rating"]


def test_an_arena_without_judgements_has_results(shared):
    empty = {"num_judgements": 0, "choices": {}, "ratings": [], "duels": []}
    assert shared.get("/api/results").json() == empty


# ---- judgements that come twice, late, or from two people


def test_a_judgement_sent_twice_counts_once(client):
    pair_id = ask(client, text="Hi")[0]["id"]
    first, again = judge(client, pair_id, "a"), judge(client, pair_id, "a")
    assert first.status_code == again.status_code == 200 and first.json() == again.json()
    other = judge(client, pair_id, "b")
    assert other.status_code == 409 and "which stays" in other.json()["detail"]
    assert client.get("/api/results").json()["num_judgements"] == 1


def test_a_page_left_open_over_a_restart_is_judged(client, arena, path):
    pair_id = ask(client, text="Hi")[0]["id"]
    arena.store.close()
    restarted = make_client(make_arena(path, other=FakeModel("other"), another=FakeModel("another")))
    judged = judge(restarted, pair_id, "b")
    assert judged.status_code == 200 and sorted(judged.json()["models"].values()) == ["left", "right"]
    answer = restarted.post("/api/pairs", json={"text": "And?", "follows": pair_id})
    assert answer.status_code == 422 and "is not served any more" in answer.json()["detail"]


def test_a_pair_whose_answers_were_lost_in_a_restart_is_said(client, arena):
    pair = arena.store.add_pair((), "typed", "left", "right", {})
    answer = judge(client, pair.id, "a")
    assert answer.status_code == 409 and "ask again" in answer.json()["detail"]
    assert judge(client, "0" * 32, "a").status_code == 404
    assert client.get("/api/pairs/nothing").status_code == 404


# ---- what goes wrong


def fail(text: str) -> str:
    raise RuntimeError("right has no memory\nmore lines")


def test_a_model_that_fails_is_said_without_its_name_and_the_other_answer_is_kept(path, capsys):
    arena = make_arena(path, left=FakeModel("left"), right=FakeModel("right", fail))
    client = make_client(arena)
    events = ask(client, text="Hi")
    [error] = [event for event in events if event["event"] == "error"]
    assert error["message"] == "RuntimeError: the model has no memory"
    assert events[-1] == {"event": "done", "is_answered": False}
    pair = arena.store.get(events[0]["id"])
    kept = {pair.model_a: (pair.answer_a, pair.error_a), pair.model_b: (pair.answer_b, pair.error_b)}
    assert kept["left"] == ("left heard Hi", None)
    assert kept["right"] == (None, "RuntimeError: right has no memory")
    assert judge(client, pair.id, "a").status_code == 409
    assert "right gave no answer" in capsys.readouterr().err


def test_a_disk_that_takes_nothing_is_said_and_the_judgement_can_be_sent_again(client, arena):
    pair_id = ask(client, text="Hi")[0]["id"]
    arena.store._connection.execute("PRAGMA query_only = ON")
    answer = judge(client, pair_id, "a")
    assert answer.status_code == 507 and "make room and try again" in answer.json()["detail"]
    assert client.post("/api/pairs", json={"text": "Hi"}).status_code == 507
    arena.store._connection.execute("PRAGMA query_only = OFF")
    assert judge(client, pair_id, "a").status_code == 200


def test_a_disk_that_fills_up_during_an_answer_is_said(client, arena):
    arena.models["left"].say = lambda text: arena.store._connection.execute("PRAGMA query_only = ON") and "x"
    events = ask(client, text="Hi")
    assert events[-1]["event"] == "failed" and "not written" in events[-1]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"text": "x" * 200}, "the prompt has 200 tokens, but prompt and answer together may have 200"),
        ({"text": " \n"}, "the prompt is empty"),
        ({}, "the prompt is empty"),
        ({"text": "refuse me"}, "the chat template refuses this dialogue"),
        ({"draw": True}, "without --data_path"),
    ],
)
def test_prompts_that_cannot_be_asked(client, arena, body, words):
    answer = client.post("/api/pairs", json=body)
    assert answer.status_code == 422 and words in answer.json()["detail"]
    assert "left" not in answer.text and "right" not in answer.text
    assert arena.store.num_answered_by_models() == {}


def test_half_a_character_is_refused(shared):
    content = '{"text": "\\ud800"}'
    answer = shared.post("/api/pairs", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 422 and "lone surrogate" in answer.json()["detail"]


@pytest.mark.parametrize(
    "body", [{"pair": "x", "choice": "c"}, {"pair": 3, "choice": "a"}, {"choice": "a"}, [], "text", None]
)
def test_malformed_judgements_are_told_in_one_line(shared, body):
    answer = shared.post("/api/judgements", json=body)
    assert answer.status_code == 422 and "\n" not in answer.json()["detail"] and len(answer.text) < 300


def test_one_model_alone_cannot_be_compared(path):
    client = make_client(make_arena(path, left=FakeModel("left")))
    answer = client.post("/api/pairs", json={"text": "Hi"})
    assert answer.status_code == 422 and "one model only" in answer.json()["detail"]


def test_who_leaves_during_an_answer_ends_it_and_it_is_not_kept(arena):
    seen, gone = [], threading.Event()

    def emit(event: dict) -> None:
        seen.append(event)
        if len(seen) == 4:
            gone.set()

    pair = arena.ask("Hi")
    arena.answer(pair, emit, gone)
    assert len(seen) == 4 and arena.store.get(pair.id).answer_a is None
    assert len(arena.models[pair.model_b].asked) == 0


# ---- other people's pages, and what is in a text


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"Host": "evil.example"}, "the host 'evil.example' is none of this server's names"),
        ({"Host": "localhost.evil.example"}, "the host"),
        ({"Host": "["}, "the host"),
        ({"Origin": "http://evil.example"}, "the origin 'http://evil.example' is another site"),
        ({"Origin": "null"}, "the origin 'null'"),
        ({"Origin": "http://localhost:9999"}, "another site"),
        ({"Sec-Fetch-Site": "cross-site"}, "another site's page"),
    ],
)
@pytest.mark.parametrize("address", ["/api/pairs", "/v1/chat/completions"])
def test_requests_of_other_sites_are_refused(shared, headers, words, address):
    answer = shared.post(address, json={"text": "Hi"}, headers=headers)
    assert answer.status_code == 403
    body = answer.json()
    assert words in (body["error"]["message"] if address.startswith("/v1") else body["detail"])


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1", "127.0.0.1:8080", "[::1]:8080", "LOCALHOST"])
def test_the_servers_own_page_may_ask_by_each_of_its_names(shared, host):
    headers = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    assert shared.get("/api/state", headers=headers).status_code == 200


@pytest.mark.parametrize("address", ["/", "/api/state", "/nowhere"])
def test_every_answer_forbids_scripts_of_others_and_frames(shared, address):
    headers = shared.get(address).headers
    policy = headers["content-security-policy"]
    for part in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "form-action 'none'"):
        assert part in policy
    assert "unsafe" not in policy and headers["x-content-type-options"] == "nosniff"


def test_the_page_has_nothing_inline_and_nothing_from_elsewhere(shared):
    page, script, style = (shared.get(path).text for path in ("/", "/page.js", "/style.css"))
    for text in (page, script, style):
        assert "http://" not in text and "https://" not in text
    assert "<script src=" in page and page.count("<script") == 1 and "onclick" not in page
    assert "style=" not in page
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in script, "texts are shown, never read as markup"


def test_with_a_token_the_page_is_open_and_nothing_else(arena):
    client = make_client(arena, token="s3cret")
    for path in ("/", "/page.js", "/style.css"):
        assert client.get(path).status_code == 200
    for path in ("/api/state", "/api/results", "/v1/models", "/nowhere"):
        assert client.get(path).status_code == 401
        allowed = client.get(path, headers={"Authorization": "Bearer s3cret"})
        assert allowed.status_code == (404 if path == "/nowhere" else 200)
    assert client.get("/v1/models").json()["error"]["type"] == "authentication_error"


def test_what_is_not_there_is_told_in_json(shared):
    assert shared.get("/nowhere").json() == {"detail": "there is nothing at /nowhere"}
    assert shared.get("/api/pairs").json() == {"detail": "GET is not answered at /api/pairs"}
    assert shared.get("/v1/nowhere").json()["error"]["message"] == "there is nothing at /v1/nowhere"
