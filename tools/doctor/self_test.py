"""A training step under DeepSpeed and a short text, in a process of their own: a crash or a hang is a line.

`check` starts the process and reads it; run as a module, this file is the process. It prints a line before
and after its imports, and then its results.
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.findings import Finding

ROOT = Path(__file__).resolve().parents[2]
NAME = "self-test"
BEGUN, READY, DONE = "triptych-begun", "triptych-ready", "triptych-done"
ZERO_STAGE = 2
NEW_TOKENS = 8
# A launcher's variables would make the process wait for others.
NOT_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check(seconds: float, import_seconds: float, missing: Sequence[str] = ()) -> Iterator[Finding]:
    """Train and generate; `seconds` are for that alone, `import_seconds` for what comes before."""
    if not seconds:
        yield Finding(NAME, "not asked for")
        return
    if missing:
        yield Finding(NAME, f"cannot be made without {', '.join(missing)}")
        return
    command = [sys.executable, "-m", "tools.doctor.self_test"]
    yield from watch(command, seconds, import_seconds)


def watch(command: Sequence[str], seconds: float, import_seconds: float) -> Iterator[Finding]:
    """Run the command and tell what it says; it is ended when a part takes longer than it may."""
    environment = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            started = time.monotonic()
            lines = _lines_of(process)
            if _wait_for(READY, lines, import_seconds) is None:
                yield _failure(process, errors, "the imports", import_seconds)
                return
            imported = time.monotonic() - started
            result = _wait_for(DONE, lines, seconds)
            if result is None:
                yield _failure(process, errors, "a step of training and a text", seconds)
                return
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
    yield from judge(json.loads(result), imported)


def judge(result: dict[str, Any], import_seconds: float) -> Iterator[Finding]:
    """Say what the process found."""
    losses = result["losses"]
    text = (
        f"loss {losses[0]:.3f}, after a step {losses[1]:.3f}, on {result['device']} in {result['dtype']}: "
        f"{result['train_seconds']:.1f} s (imports {import_seconds:.0f} s)"
    )
    learns = losses[1] < losses[0]
    cure = "" if learns else "a step of AdamW must lower the loss of the batch that it was made on"
    yield Finding(f"{NAME}: ZeRO {ZERO_STAGE}", text, learns, cure)
    is_whole = result["num_tokens"] == NEW_TOKENS
    text = f"{result['num_tokens']} tokens in {result['generate_seconds']:.1f} s"
    yield Finding(f"{NAME}: text", text, is_whole, "" if is_whole else f"{NEW_TOKENS} were asked for")


def _lines_of(process: subprocess.Popen) -> "queue.Queue[str | None]":
    """Return a queue of the process's lines, read by a thread: a wait for a line can have a limit."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _wait_for(mark: str, lines: "queue.Queue[str | None]", seconds: float) -> str | None:
    """Return what stands behind the mark; None when the process ends before it, or time does."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            line = lines.get(timeout=max(deadline - time.monotonic(), 0.01))
        except queue.Empty:
            return None
        if line is None:
            return None
        if line.startswith(mark):
            return line.removeprefix(mark).strip()


def _failure(process: subprocess.Popen, errors: Any, what: str, seconds: float) -> Finding:
    try:
        code = process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        cure = "the machine is busy, or something hangs; --self_test_seconds gives it longer"
        return Finding(NAME, f"{what} took longer than {seconds:g} s", False, cure)
    errors.seek(0)
    told = [line.strip() for line in errors.read().splitlines() if line.strip()]
    reason = told[-1] if told else "it said nothing"
    return Finding(NAME, f"{what} ended with code {code}: {reason}", False, "see the lines above")


def run() -> dict[str, Any]:
    """Train a random model for a step and let it write; return losses, seconds and where it was."""
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from common.engine.ds_config import EngineOptions, build_train_config
    from common.engine.optim import build_optimizer
    from common.generation.decode import SamplingOptions
    from common.generation.generate import Generator
    from common.programs import startup
    from common.ranks import distributed

    startup.quiet_libraries()
    print(READY, flush=True)
    started = time.monotonic()
    distributed.start()
    distributed.seed_everything(0)
    dtype = distributed.default_dtype_name()
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config).to(distributed.device())
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=build_optimizer(model, learning_rate=1e-2),
        config=build_train_config(EngineOptions(zero_stage=ZERO_STAGE, dtype=dtype, micro_batch_size=4)),
    )
    ids = torch.randint(0, 128, (4, 16), device=distributed.device())
    losses = []
    for _ in range(2):
        loss = engine(input_ids=ids, labels=ids).loss
        losses.append(float(loss))
        engine.backward(loss)
        engine.step()
    trained = time.monotonic()
    options = SamplingOptions(NEW_TOKENS, stop_token_id=-1, pad_token_id=0)
    found = Generator(engine.module.eval()).generate(
        ids[:1, :4],
        torch.ones_like(ids[:1, :4]),
        torch.zeros(1, dtype=torch.long, device=ids.device),
        options,
    )
    return {
        "losses": losses,
        "num_tokens": int(found.response_mask.sum()),
        "device": str(distributed.device()),
        "dtype": dtype,
        "train_seconds": trained - started,
        "generate_seconds": time.monotonic() - trained,
    }


if __name__ == "__main__":
    print(BEGUN, flush=True)
    print(DONE, json.dumps(run()), flush=True)
    os._exit(0)  # nothing is left to do, and destructors of a broken installation may hang
