"""Short runs of step 1 that save after every step, and one of them in which nothing goes wrong."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forked_runs import ForkedRun, ForkServer

STEPS = 4
SAVE = "common.runs.run:save_checkpoint"
TRAIN_STEP = "step1_sft.sft_trainer:SFTTrainer.train_step"


def from_words(text: str) -> dict[str, str]:
    """Return the flags of a command line, by name."""
    words = text.split()
    return {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}


def hook(at: str, call: int, do: str, **more: Any) -> dict[str, Any]:
    """Return a hook that strikes before a call."""
    return {"at": at, "call": call, "do": do} | more


class ShortSFT:
    """Runs of the same steps on one rank or on two."""

    def __init__(self, forks: ForkServer, tiny: SimpleNamespace, folder: Path) -> None:
        self.forks, self.folder = forks, folder
        self.flags = {"model_name_or_path": tiny.gpt2, "data_path": tiny.rows, "data_output_path": tiny.cache}
        self.flags |= from_words(
            "--data_split 4,4,2 --max_seq_len 64 --gradient_accumulation_steps 2 --eval_fraction 0.2 "
            f"--dropout 0.1 --num_train_epochs 9 --max_train_steps {STEPS} --save_interval 1"
        )
        self._undisturbed: dict[int, Path] = {}

    def run(
        self, output_dir: Path, ranks: int = 1, hooks: Sequence[dict[str, Any]] = (), **flags: Any
    ) -> ForkedRun:
        """Return what became of a run with these flags more."""
        of_ranks = {"per_device_train_batch_size": 2 // ranks, "zero_stage": 2 if ranks > 1 else 0}
        return self.forks.run(
            1, self.flags | of_ranks | flags | {"output_dir": output_dir}, ranks=ranks, hooks=list(hooks)
        )

    def undisturbed(self, ranks: int = 1) -> Path:
        """Return the folder of a run in which nothing went wrong."""
        if ranks not in self._undisturbed:
            folder = self.folder / f"undisturbed on {ranks}"
            done = self.run(folder, ranks)
            assert done.codes == [0] * ranks, done.text()
            self._undisturbed[ranks] = folder
        return self._undisturbed[ranks]
