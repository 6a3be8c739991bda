"""The report on runs. `LAYOUT` is report.toml: the metrics it shows, their wording, and its diagnostics."""

import tomllib
from pathlib import Path
from typing import Any

LAYOUT: dict[str, Any] = tomllib.loads(Path(__file__).with_name("report.toml").read_text(encoding="utf-8"))
