"""Inputs that the tests of whole programs share, and a process group of one for runs in this process."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_inputs
import torch
from forked_runs import ForkServer, fork_server
from transformers import AutoTokenizer
from transformers.utils import logging


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, tiny_tokenizer) -> SimpleNamespace:
    """Folders of tiny models, files of tiny data, and a token cache; nobody writes to any but the cache."""
    logging.disable_progress_bar()
    return tiny_inputs.save_inputs(tmp_path_factory.mktemp("tiny"), tiny_tokenizer)


@pytest.fixture(scope="session")
def more_inputs(tiny, tiny_tokenizer) -> dict[str, str]:
    """Paths of tiny's models and files, and of rows of every other form, by name."""
    folder = tiny.folder / "more"
    folder.mkdir()
    rows = tiny_inputs.make_rows(45, seed=3)
    answers = [
        {"prompt": r["prompt"], "response": r[kind], "helpfulness": n, "quality": 1 - n}
        for r in rows
        for n, kind in enumerate(("chosen", "rejected"))
    ]
    ranked = [{"prompt": r["prompt"], "responses": [r["chosen"], "so so", r["rejected"]]} for r in rows]
    files = {
        "few": rows[:24],
        "margins": [row | {"margin": n % 3} for n, row in enumerate(rows)],
        "scored": answers,
        "ranked": [row | {"ranks": [1, 2, 3]} for row in ranked],
    }
    paths = {name: tiny_inputs.write_rows(folder / f"{name}.jsonl", made) for name, made in files.items()}
    chatty = shutil.copytree(tiny.base, folder / "chatty")
    tokenizer = AutoTokenizer.from_pretrained(chatty)
    tokenizer.chat_template = (
        "{{ brief }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    )
    tokenizer.save_pretrained(chatty)
    paths["chatty"] = chatty
    paths["reward2"] = tiny_inputs.save_reward_model(folder / "reward2", tiny_tokenizer, seed=2)
    return {name: str(path) for name, path in (vars(tiny) | paths).items()}


@pytest.fixture(scope="session")
def lone_process() -> Iterator[None]:
    """This process as a group of one, for all runs in it: it is not started a second time."""
    from common.programs import startup
    from common.ranks import distributed

    before, num_threads = dict(os.environ), torch.get_num_threads()
    torch.set_num_threads(1)
    startup.quiet_libraries()
    distributed.start()
    yield
    distributed.stop()
    torch.set_num_threads(num_threads)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def forks(tmp_path_factory) -> Iterator[ForkServer]:
    """What runs whole programs, each in processes of its own, without their imports."""
    with fork_server(tmp_path_factory.mktemp("forks")) as server:
        yield server


@pytest.fixture(scope="module")
def no_pictures() -> Iterator[None]:
    """Leave report.html out: drawing takes longer than a tiny run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.runs.run_logger.draw_run", lambda *_: None)
        yield


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Return a folder that is not there yet."""
    return tmp_path / "output"
