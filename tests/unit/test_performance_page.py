"""docs/performance.md, and the README, say what the committed baselines say."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/performance.md").read_text()
BASELINES = {
    path.name: json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks/baselines").glob("*.json"))
}


def rates_of(baseline: dict) -> list[list[str]]:
    """The rows, as the page writes them, of whatever has a median."""
    decimals = int(baseline["name"].endswith("_step"))  # seconds, not tokens a second
    tables = [baseline.get("rates", {}), *(s.get("rates", {}) for s in baseline.get("sections", {}).values())]
    return [
        [name, *(f"{row[key]:,.{decimals}f}" for key in ("median", "low", "high"))]
        for table in tables
        for name, row in table.items()
        if "median" in row
    ]


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_is_told_with_its_command_commit_and_ratio(name):
    baseline = BASELINES[name]
    assert f"```bash\n{baseline['command']}\n```" in PAGE
    assert f"[{name}](../benchmarks/baselines/{name}), commit {baseline['commit']}" in PAGE
    assert f"{baseline['ratio']:.2f}" in PAGE
    for row in rates_of(baseline):
        assert f"| {' | '.join(row)} |" in PAGE


def test_the_readme_says_the_same():
    readme = (ROOT / "README.md").read_text()
    ppo, memory = BASELINES["ppo_step.cpu.json"], BASELINES["memory.cpu.json"]["sizes"]
    assert f"on a CPU, a PPO step in {ppo['ours']:.1f} seconds where TRL takes {ppo['peer']:.1f}" in readme
    [size] = [s for s in memory if (s["length"], s["vocabulary"]) == (1024, 32000)]
    assert f"an SFT step's memory {size['trl'] / size['ours']:.1f} times smaller" in readme
    ratio = BASELINES["generate.cpu.json"]["ratio"]
    assert f"{ratio:.1f} times transformers' `generate` on chat lengths, on a CPU" in readme
