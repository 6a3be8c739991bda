"""A tool's own flags combined with those of the step in --stage. Does not import torch."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.flags.args import REQUIRED, Problems, flag, parse_args
from common.ranks.devices import DEVICES
from step1_sft.arguments import SFTArguments
from step2_reward.arguments import RewardArguments
from step3_ppo.arguments import PPOArguments

STEPS: dict[int, type] = {1: SFTArguments, 2: RewardArguments, 3: PPOArguments}
THIS_MACHINE = "here"
LEAVING = ("-h", "--help", "--help_all", "--version")
STEP_NAMES = {1: "step 1, SFT", 2: "step 2, reward model", 3: "step 3, PPO"}
MEAN_LENGTHS = {  # and the steps' flags that they stand for
    "mean_seq_len": "max_seq_len",
    "mean_prompt_seq_len": "max_prompt_seq_len",
    "mean_answer_seq_len": "max_answer_seq_len",
}


@dataclass
class StageArguments:
    """The step."""

    stage: int = flag(
        REQUIRED, "the step: 1 SFT, 2 reward model, 3 PPO; all of its flags are taken too", choices=(1, 2, 3)
    )


@dataclass
class PlanArguments(StageArguments):
    """Machines."""

    gpu: str = flag(
        "h100-80g",
        "device type; here: this machine's, and a run that cannot be planned starts anyway",
        choices=(*DEVICES, THIS_MACHINE),
    )
    num_gpus: int = flag(1, "GPUs, or CPU processes, per machine", low=1)
    num_nodes: int = flag(1, "machines", low=1)
    gpu_memory_gib: float = flag(0.0, "memory of a GPU; 0: that of --gpu", low=0)
    cpu_memory_gib: float = flag(0.0, "CPU memory of a machine; 0: not known, so not checked", low=0)
    num_rows: int = flag(0, "training rows, for the hours of the run; 0: not known", low=0)
    mean_seq_len: float = flag(
        0.0, "mean tokens of a row's sequence in steps 1 and 2, for the seconds alone; 0: full rows", low=0
    )
    mean_prompt_seq_len: float = flag(0.0, "mean tokens of a prompt in step 3, in the same way", low=0)
    mean_answer_seq_len: float = flag(0.0, "mean tokens of a response in step 3, in the same way", low=0)
    measure: bool = flag(
        False,
        "measure this machine in at most a minute, for the seconds of later plans with --gpu here or cpu; "
        "needs no --stage",
    )
    run: str = flag(
        "",
        "folder of a run: plan for its flags, machine and mean lengths, print what it has reached beside, "
        "write its plan.json; needs no --stage",
    )
    json: str = flag("", "file for the plan's seconds and memory; with --run, in place of plan.json")


def with_step_flags(cls: type, stage: int) -> type:
    """The dataclass `cls` with the flags of a step added."""
    return dataclasses.make_dataclass(cls.__name__, [], bases=(cls, STEPS[stage]))


def parse_step_args(
    cls: type, argv: Sequence[str] | None = None, *, description: str = "", problems: Problems
) -> Any:
    """The flags of `cls` and of the step that --stage names; exits if it names none.

    Flags of the step that the tool does not use are accepted, so that a run's whole command line works.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--stage", nargs="?")
    stage = finder.parse_known_args(words)[0].stage or ""
    is_known = stage in map(str, STEPS)
    needs_none = {word.partition("=")[0] for word in words} & {"--measure", "--run"}
    if needs_none and not stage and hasattr(cls, "measure"):
        cls = dataclasses.make_dataclass(cls.__name__, [("stage", int, flag(0, "none"))], bases=(cls,))
    elif is_known:
        cls = with_step_flags(cls, int(stage))
    else:  # without a step the other arguments cannot be parsed
        words = [word for word in words if word in LEAVING] + ["--stage", stage]
    args = parse_args(cls, words, description=description, problems=problems)
    if not is_known:
        problems.exit_if_any()
    return args
