"""A token of the environment reaches the reward server, and nothing else that a run says or writes."""

import pytest
from reward_http_server import running_server
from tiny_inputs import from_words, step_flags

pytestmark = pytest.mark.slow

TOKEN = "t0ken-that-nobody-may-see"


@pytest.mark.parametrize(("fails_at", "kind"), [(0, "reward"), (2, "reward"), (2, "judge")])
def test_nothing_but_the_server_sees_the_token(tiny, forks, output, fails_at, kind):
    """Not args.json, metrics, checkpoints, exports, refused batches, nor what is printed of a failure."""
    words = "--max_train_steps 3 --save_interval 1 --max_bad_steps 0 --print_answers true"
    with running_server() as server:
        answers = 8 if kind == "judge" else 1  # that are asked about on their own, in a step
        server.behaviours = ["works"] * answers + [(403, "out of order") if fails_at else "works"]
        reward = server.url if kind == "reward" else f"judge:{server.judge_url}:tiny"
        flags = step_flags(tiny, 3, reward=reward, output_dir=output, **from_words(words))
        done = forks.run(3, flags, env={f"TRIPTYCH_{kind.upper()}_TOKEN": TOKEN})
    assert done.code == (3 if fails_at else 0), done.text()
    assert {headers["authorization"] for headers in server.headers} == {f"Bearer {TOKEN}"}
    assert kind == "judge" or len(server.headers) == (fails_at or 3)
    assert not fails_at or f"set TRIPTYCH_{kind.upper()}_TOKEN" in done.text()
    assert TOKEN not in done.text()
    written = [path for path in output.rglob("*") if path.is_file()]
    assert len(written) > 5 and [path for path in written if TOKEN.encode() in path.read_bytes()] == []
