"""The command `triptych`: this package's programs and tools by short names, from any folder.

triptych sft --model_name_or_path MODEL --data_path DATA --output_dir OUT
deepspeed "$(triptych path sft)" --model_name_or_path MODEL ...     (several GPUs)
"""

import difflib
import importlib.metadata
import runpy
import sys
from pathlib import Path

# The folder of the other packages: this one in an installed wheel, the repository in a checkout.
ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "common").is_dir())
COMMANDS = {
    "sft": ("step1_sft/main.py", "step 1: supervised fine-tuning"),
    "reward": ("step2_reward/main.py", "step 2: reward model, DPO, KTO"),
    "ppo": ("step3_ppo/main.py", "step 3: PPO, GRPO and other algorithms"),
    "train": ("train.py", "all three steps"),
    "export": ("export.py", "export a checkpoint, upload it to the hub"),
    "chat": ("chat.py", "chat with a model in the terminal"),
    "arena": ("arena.py", "chat with models in the browser, or by OpenAI's protocol"),
    "report": ("tools/report/__main__.py", "charts and diagnostics of runs"),
    "replay": ("tools/replay.py", "make steps of a run again and compare them"),
    "plan": ("tools/plan.py", "memory and time of a run before it starts"),
    "doctor": ("tools/doctor.py", "check the installation, or whether a run can learn"),
    "check-data": ("tools/check_data.py", "show the rows of a data set as the steps read them"),
    "check-model": ("tools/check_model.py", "check whether a model is supported"),
    "translate": ("tools/translate.py", "commands of TRL, OpenRLHF and LLaMA-Factory as ours"),
    "evaluate-reward": ("step2_reward/rw_eval.py", "accuracy of a reward model"),
    "serve-reward": ("serving/reward_server.py", "serve a reward model over HTTP"),
}


def main() -> None:
    """Run the program that the first argument names; `path NAME` prints its file for a launcher."""
    name, *words = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        print("usage: triptych COMMAND --flags    (COMMAND --help: its flags; path COMMAND: its file)\n")
        print("\n".join(f"  {command:<16} {text}" for command, (_, text) in COMMANDS.items()))
        return
    if name == "--version":
        print(f"triptych {importlib.metadata.version('triptych')}")
        return
    prints_path = name == "path"
    if prints_path:
        name = "".join(words)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        cure = f"did you mean {near[0]}?" if near else f"choose from {', '.join(COMMANDS)}"
        print(f"error: there is no command {name!r}; {cure}", file=sys.stderr)
        raise SystemExit(2)
    file = ROOT / COMMANDS[name][0]
    if prints_path:
        print(file)
        return
    sys.argv = [str(file), *words]
    sys.path.insert(0, str(ROOT))
    runpy.run_path(str(file), run_name="__main__")
