"""Which launch scripts there are, what they train, and where they begin from."""

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
STEPS = ("step1_sft", "step2_reward", "step3_ppo")
DEPLOYMENTS = ("single_gpu", "single_node", "multi_node")
VARIANTS = ("_dpo", "_slurm", "_torchrun")  # ends of the names of scripts that do the same in another way


def all_scripts() -> list[Path]:
    """Return every launch script of every step."""
    return sorted(path for step in STEPS for path in (FOLDER / step).rglob("run_*.sh"))


def hub_name(model: str) -> str:
    """Return the model that a script begins from: its own, or that of the script whose export it takes."""
    while model.startswith("output/"):
        producer = FOLDER / (model.removeprefix("output/").removesuffix("/export") + ".sh")
        model = default_of("MODEL", producer)
    return model


def default_of(variable: str, script: Path) -> str:
    """Return a variable's default in a script, "" where it has none."""
    found = re.search(rf"^{variable}=\$\{{{variable}:-(.+)\}}", script.read_text(), re.MULTILINE)
    return found[1] if found else ""


def find_script(step: int, deployment: str, model: str, critic: str = "") -> Path | None:
    """Return the script of a step (1, 2, 3) for a model by its hub name, None where there is none.

    In step 3 one for the same critic comes first. Scripts that train all weights come before those with LoRA.
    """
    variable = "ACTOR_MODEL" if step == 3 else "MODEL"
    found = [
        script
        for script in (FOLDER / STEPS[step - 1]).glob(f"*/{deployment}/run_*.sh")
        if not script.stem.endswith(VARIANTS)
        and hub_name(default_of(variable, script)).lower() == model.lower()
    ]

    def order(script: Path) -> tuple[bool, bool, str]:
        other = bool(critic) and hub_name(default_of("CRITIC_MODEL", script)).lower() != critic.lower()
        return other, "lora" in script.stem or "mixz" in script.stem, script.stem

    return min(found, key=order, default=None)
