"""Steps that were refused: counted, their batches written down, and the end of a run that has too many."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.data.packed_batch import ROW_IDS, PackedBatch
from common.ranks import distributed
from common.ranks.failures import StepRefused, TooManyBadSteps
from common.runs.durable_files import json_line
from common.runs.run_logger import RunLogger
from common.runs.saved_state import Stateful, TensorReader

FOLDER = "bad_batches"


class BadSteps(Stateful):
    """How many steps were refused, over the whole run: a part of a checkpoint."""

    def __init__(self, output_dir: str, max_bad_steps: int, logger: RunLogger) -> None:
        self.folder = Path(output_dir) / FOLDER if output_dir else None
        self.max_bad_steps, self.logger, self.count = max_bad_steps, logger, 0

    def refuse(self, step: int, error: StepRefused) -> None:
        """Count a refused step and keep its batch. Every rank must call this, for the same step.

        Raises TooManyBadSteps, with the error as its cause.
        """
        self.count += 1
        where = self._write(step, error) if self.folder else ""
        self.logger.note(f"step {step} refused: {error}{where}")
        self.logger.log_event(step, {"perf/bad_steps": self.count})
        if self.count > self.max_bad_steps:
            raise TooManyBadSteps(
                f"{error}\nskipped {self.count} steps, --max_bad_steps allows {self.max_bad_steps}"
            ) from error

    def _write(self, step: int, error: StepRefused) -> str:
        """Write this rank's batches as JSON lines, null for NaN and infinity; return where they are."""
        path = self.folder / f"step-{step:06d}-{self.count:03d}-rank-{distributed.rank():05d}.jsonl"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(json_line({"step": step, "reason": str(error)}))
                file.writelines(json_line(row) for batch in error.batches for row in _rows(batch))
        except OSError as failure:
            return f"; its batch could not be written to {path} ({failure.strerror})"
        return f"; its batch is in {path}"

    def json_state(self) -> dict[str, Any]:
        """Return the count."""
        return {"count": self.count}

    def load(self, reader: TensorReader, state: dict[str, Any]) -> None:
        """Resume counting."""
        self.count = state["count"]


def _rows(batch: PackedBatch) -> Iterator[dict[str, Any]]:
    """Give a batch item by item."""
    columns = {key: [sequence.tolist() for sequence in batch.sequences(key)] for key in batch.data}
    if ROW_IDS in columns:
        columns[ROW_IDS] = batch.texts(ROW_IDS)
    for index, item_id in enumerate(batch.ids):
        yield {"id": str(item_id)} | {key: of_items[index] for key, of_items in columns.items()}
