"""What the table of bad inputs puts in place of good ones: damaged files, other models, stopped runs."""

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import tiny_inputs
import torch
from safetensors.torch import load_file, save_file

DONE, BAD, CANNOT_CONTINUE, KILLED = 0, 2, 3, -9
TRAIN_STEP = {
    1: "step1_sft.sft_trainer:SFTTrainer.train_step",
    2: "step2_reward.reward_trainer:RewardTrainer.train_step",
    3: "step3_ppo.ppo_trainer:PPOTrainer.train_step",
}
MODEL_FLAG = {1: "model_name_or_path", 2: "model_name_or_path", 3: "actor_model_name_or_path"}


def good_flags(tiny, output: Path, step: int, **changes: Any) -> dict[str, Any]:
    """Return what makes a good command line for a step, with changes; None leaves a flag out."""
    good: dict[str, Any] = {"data_path": tiny.rows, "data_output_path": tiny.cache, "output_dir": output}
    good |= {"data_split": "1,1,1", "save_interval": 1, "max_train_steps": 3}
    if step == 3:
        good |= {"actor_model_name_or_path": tiny.base, "critic_model_name_or_path": tiny.reward}
        good |= {"per_device_generation_batch_size": 2, "per_device_training_batch_size": 2}
        good |= {"max_prompt_seq_len": 24, "max_answer_seq_len": 6}
    else:
        good |= {"model_name_or_path": tiny.base, "max_seq_len": 48, "per_device_train_batch_size": 2}
        good |= {"eval_iters": 1}
    return {name: value for name, value in (good | changes).items() if value is not None}


class RunsCode:
    """An object whose unpickling makes a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.proof),)


class Place:
    """A folder of a test's own, the tiny inputs, and runs that were stopped: kept in `shared` for several."""

    def __init__(self, folder: Path, tiny, forks, shared: Path, make_tokenizer) -> None:
        self.folder, self.tiny, self.forks, self.shared = folder, tiny, forks, shared
        self.make_tokenizer = make_tokenizer
        self.output = folder / "output"
        self.listening: list[socket.socket] = []

    def flags(self, step: int, **changes: Any) -> dict[str, Any]:
        return good_flags(self.tiny, self.output, step, **changes)

    def file(self, flag: str, content: str | bytes, name: str = "file") -> dict[str, Any]:
        """Return a flag with the path of a file with this content."""
        data = content.encode() if isinstance(content, str) else content
        (self.folder / name).write_bytes(data)
        return {flag: self.folder / name}

    def model(self, *, of: Path | None = None, **config: Any) -> Path:
        """Return the folder of a model of its own, whose config.json says something else."""
        folder = self.folder / "model"
        shutil.copytree(of or self.tiny.base, folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return folder

    def pickled(self, of: Path) -> Path:
        """Return a model's folder whose weights are a pickle that runs code."""
        folder = self.model(of=of)
        (folder / "model.safetensors").unlink()
        torch.save(RunsCode(self.folder / "proof"), folder / "pytorch_model.bin")
        return folder

    def stopped(self, step: int, **changes: Any) -> Path:
        """Put a run that was killed after its second checkpoint into the output folder, and return that."""
        template = self.shared / str(step)
        if changes or not template.exists():
            place = self.output if changes else template
            hook = {"at": TRAIN_STEP[step], "call": 3, "do": "kill"}
            flags = good_flags(self.tiny, place, step, **changes)
            done = self.forks.run(step, flags, hooks=[hook])
            assert done.code == KILLED, done.text()
        if not changes:
            shutil.copytree(template, self.output)
        return self.output

    def finished(self, step: int) -> Path:
        """Put a run that has finished into the output folder, and return that."""
        template = self.shared / f"finished-{step}"
        if not template.exists():
            done = self.forks.run(step, good_flags(self.tiny, template, step))
            assert done.code == DONE, done.text()
        shutil.copytree(template, self.output)
        return self.output

    def used_port(self) -> str:
        """Return a port that somebody listens on until the end of the test."""
        self.listening.append(socket.create_server(("127.0.0.1", 0)))
        return str(self.listening[-1].getsockname()[1])


# ---- damages


def cut(path: Path, num_bytes: int = 500) -> None:
    """Leave the first bytes of a file."""
    path.write_bytes(path.read_bytes()[:num_bytes])


def flip_bit(path: Path) -> None:
    """Change one bit near the end of a file."""
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def weights_file(checkpoint: Path) -> Path:
    """Return the file of a checkpoint that holds the weights of its (first) model."""
    return next(path for path in sorted(checkpoint.glob("*.safetensors")) if path.name[0] in "am")


def change_format(checkpoint: Path) -> None:
    """Write a meta.json of another format that is whole."""
    path = checkpoint / "meta.json"
    text = json.dumps(json.loads(json.loads(path.read_text())["content"]) | {"format": 99})
    path.write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text}))


def drop_half(model: Path) -> None:
    """Leave every second weight of a model out of its file."""
    weights = load_file(model / "model.safetensors")
    kept = {name: weights[name] for name in sorted(weights)[::2]}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})


def good_rows(count: int = 50) -> str:
    """Return lines of rows that serve every step."""
    return "".join(json.dumps(row) + "\n" for row in tiny_inputs.make_rows(count))


# ---- the table

Prepare = Callable[[Place], dict[str, Any] | None]


class Row(NamedTuple):
    """A bad input; `prepare` puts it there and returns the flags that a good command line has otherwise."""

    name: str
    step: int
    prepare: Prepare
    words: list[str]
    code: int = BAD
    count: int = 1  # of problems
    env: Callable[[Place], dict[str, str]] = lambda place: {}
    hooks: tuple = ()
    may_write: bool = False  # what was there stays all the same
    module: str = "main"


def flag(**changes: Any) -> Prepare:
    """Return what changes flags alone."""
    return lambda place: changes


def rows(content: str | bytes, name: str = "rows.jsonl", **more: Any) -> Prepare:
    """Return what gives a data file of its own."""
    return lambda place: place.file("data_path", content, name) | more


def model(step: int, damage: Callable[[Path], Any] = lambda folder: None, **config: Any) -> Prepare:
    """Return what gives a damaged model, or one with another config.json."""

    def prepare(place: Place) -> dict[str, Any]:
        folder = place.model(**config)
        damage(folder)
        return {MODEL_FLAG[step]: folder}

    return prepare


def resume(step: int, damage: Callable[[Path], Any] = lambda folder: None, **changes: Any) -> Prepare:
    """Return what resumes a stopped run, each of whose checkpoints is damaged."""

    def prepare(place: Place) -> dict[str, Any]:
        for folder in (place.stopped(step) / "checkpoints").iterdir():
            damage(folder)
        return changes

    return prepare


def module(content: str, **flags: Any) -> Prepare:
    """Return what puts a module called mine into the working folder."""
    return lambda place: place.file("", content, "mine.py") and flags


def without_head(place: Place) -> dict[str, Any]:
    words = {"model_name_or_path": place.tiny.base, "data_path": place.tiny.rows}
    return dict.fromkeys(place.flags(2)) | words


def no_eos(place: Place) -> dict[str, Any]:
    folder = place.folder / "endless"
    tiny_inputs.save_causal_lm(folder, place.make_tokenizer(eos=None))
    return {"model_name_or_path": folder}


def other_vocabulary(place: Place) -> dict[str, Any]:
    tiny_inputs.save_reward_model(place.folder / "other", place.make_tokenizer(290))
    return {"critic_model_name_or_path": place.folder / "other"}
