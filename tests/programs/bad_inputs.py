"""What the table of bad inputs puts in place of good ones: damaged files, other models, stopped runs."""

import gzip
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tiny_inputs
import torch
from forked_runs import ForkServer
from safetensors.torch import load_file, save_file

KILLED = -9
TRAIN_STEP = {
    1: "step1_sft.sft_trainer:SFTTrainer.train_step",
    2: "step2_reward.reward_trainer:RewardTrainer.train_step",
    3: "step3_ppo.ppo_trainer:PPOTrainer.train_step",
}
MODEL_FLAG = {1: "model_name_or_path", 2: "model_name_or_path", 3: "actor_model_name_or_path"}


class RunsCode:
    """An object whose unpickling makes a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.proof),)


@dataclass
class Place:
    """A folder of a test's own, the tiny inputs, and runs that were stopped."""

    folder: Path
    tiny: SimpleNamespace
    forks: ForkServer
    shared: Path  # for stopped runs that several tests copy
    listening: list[socket.socket] = field(default_factory=list)

    @property
    def output(self) -> Path:
        """Return the folder of --output_dir."""
        return self.folder / "output"

    def flags(self, step: int, **changes: Any) -> dict[str, Any]:
        """Return what makes a good command line for a step, with changes; None leaves a flag out."""
        good: dict[str, Any] = {"data_path": self.tiny.rows, "data_output_path": self.tiny.cache}
        good |= {"data_split": "1,1,1", "output_dir": self.output, "save_interval": 1, "max_train_steps": 3}
        if step == 3:
            good |= {
                "actor_model_name_or_path": self.tiny.base,
                "critic_model_name_or_path": self.tiny.reward,
            }
            good |= {"per_device_generation_batch_size": 2, "per_device_training_batch_size": 2}
            good |= {"max_prompt_seq_len": 24, "max_answer_seq_len": 6}
        else:
            good |= {"model_name_or_path": self.tiny.base, "max_seq_len": 48}
            good |= {"per_device_train_batch_size": 2, "eval_iters": 1}
        return {name: value for name, value in (good | changes).items() if value is not None}

    # ---- files

    def rows(self, content: str | bytes, name: str = "rows.jsonl") -> dict[str, Any]:
        """Return the flag of a data file with this content."""
        data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        (self.folder / name).write_bytes(data)
        return {"data_path": self.folder / name}

    def file(self, flag: str, content: str, name: str = "file") -> dict[str, Any]:
        """Return a flag with the path of a file with this content."""
        (self.folder / name).write_text(content)
        return {flag: self.folder / name}

    def module(self, content: str, name: str = "mine") -> None:
        """Write a module that a run finds in its working folder."""
        (self.folder / f"{name}.py").write_text(content)

    # ---- models

    def model(self, *, of: Path | None = None, **config: Any) -> Path:
        """Return the folder of a model of its own, whose config.json says something else."""
        folder = self.folder / "model"
        shutil.copytree(of or self.tiny.base, folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return folder

    def pickled(self, of: Path, content: Any) -> Path:
        """Return a model's folder whose weights are a pickle."""
        folder = self.model(of=of)
        (folder / "model.safetensors").unlink()
        torch.save(content, folder / "pytorch_model.bin")
        return folder

    # ---- runs

    def stopped(self, step: int, **changes: Any) -> Path:
        """Put a run that was killed after its second checkpoint into the output folder, and return that."""
        template = self.shared / f"{step}-{'-'.join(f'{k}={v}' for k, v in sorted(changes.items()))}".replace(
            "/", "_"
        )
        if not template.exists():
            self._kill(step, **changes, output_dir=template)
        shutil.copytree(template, self.output)
        return self.output

    def stopped_here(self, step: int, **changes: Any) -> Path:
        """Kill a run in the output folder itself: its data or models are in this place."""
        self._kill(step, **changes)
        return self.output

    def finished(self, step: int) -> Path:
        """Put a run that has finished into the output folder, and return that."""
        template = self.shared / f"finished-{step}"
        if not template.exists():
            done = self.forks.run(step, self.flags(step, output_dir=template))
            assert done.code == 0, done.text()
        shutil.copytree(template, self.output)
        return self.output

    def _kill(self, step: int, **changes: Any) -> None:
        hook = {"at": TRAIN_STEP[step], "call": 3, "do": "kill"}
        done = self.forks.run(step, self.flags(step, **changes), hooks=[hook])
        assert done.code == KILLED, done.text()

    @property
    def newest(self) -> Path:
        """Return the newest checkpoint of the output folder."""
        return max((self.output / "checkpoints").iterdir())

    def for_all_checkpoints(self, damage: Any) -> None:
        """Damage every checkpoint of the output folder."""
        for folder in (self.output / "checkpoints").iterdir():
            damage(folder)

    # ---- surroundings

    def used_port(self) -> str:
        """Return a port that somebody listens on until the end of the test."""
        self.listening.append(socket.create_server(("127.0.0.1", 0)))
        return str(self.listening[-1].getsockname()[1])


@contextmanager
def open_place(folder: Path, tiny: SimpleNamespace, forks: ForkServer, shared: Path) -> Iterator[Place]:
    """Give a place, and free its ports afterwards."""
    place = Place(folder, tiny, forks, shared)
    try:
        yield place
    finally:
        for listener in place.listening:
            listener.close()


# ---- damages: each takes a file, or a checkpoint's folder


def cut(path: Path, num_bytes: int = 500) -> None:
    """Leave the first bytes of a file."""
    path.write_bytes(path.read_bytes()[:num_bytes])


def flip_bit(path: Path, place: int = -5) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def weights_file(checkpoint: Path) -> Path:
    """Return the file of a checkpoint that holds the weights of its (first) model."""
    return next(path for path in sorted(checkpoint.glob("*.safetensors")) if path.name[0] in "am")


def change_meta(checkpoint: Path, **changes: Any) -> None:
    """Write a meta.json that says something else and is whole."""
    import hashlib

    path = checkpoint / "meta.json"
    text = json.dumps(json.loads(json.loads(path.read_text())["content"]) | changes)
    outer = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text}
    path.write_text(json.dumps(outer))


def drop_half(model: Path) -> None:
    """Leave every second weight of a model out of its file."""
    weights = load_file(model / "model.safetensors")
    kept = {name: weights[name] for name in sorted(weights)[::2]}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})


def good_rows(count: int = 50, **more: Any) -> str:
    """Return lines of rows that serve every step."""
    return "".join(json.dumps(row | more) + "\n" for row in tiny_inputs.make_rows(count))


def torn_gzip() -> bytes:
    """Return the first half of a compressed file."""
    return gzip.compress(good_rows().encode())[:100]
