"""Ctrl-C and SIGTERM while arena.py responds: it ends at once, with one line."""

import signal
import sys
import threading
import time

import httpx
import pytest
from program_runs import free_port, start

pytestmark = pytest.mark.slow
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_a_response_ends_the_server(tiny, tmp_path, number, code):
    port, log = free_port(), tmp_path / "log"
    words = [f"m={tiny.base}", "--port", str(port), "--max_new_tokens", "100", "--db", str(tmp_path / "db")]
    server = start([sys.executable, "arena.py", *words, "--dtype", "auto"], log)
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        if server.poll() is not None or log.read_text().count("judgements are saved"):
            break
        time.sleep(0.1)
    assert server.poll() is None, log.read_text()
    assert "--dtype auto is" in log.read_text(), "with both figures"
    assert httpx.get(f"{url}/health", timeout=20).json() == {"models": ["m"]}

    def ask() -> None:
        with pytest.raises(httpx.TransportError):
            while True:
                body = {"model": "m", "messages": MESSAGES, "n": 16}
                httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for asker in askers:
        asker.start()
    time.sleep(1.0)
    server.send_signal(number)
    assert server.wait(timeout=20) == code, log.read_text()
    for asker in askers:
        asker.join(20)
    text = log.read_text()
    assert text.endswith(f"stopped by {signal.Signals(number).name}\n") and "Traceback" not in text, text
