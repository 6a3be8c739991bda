#!/usr/bin/env python
"""Runs the whole pipeline: SFT, reward model and PPO, each on the exports of earlier steps.

    python train.py --actor-model facebook/opt-1.3b --deployment-type single_node
    python train.py --actor-model Qwen/Qwen2.5-0.5B --data_path pairs.jsonl --output-dir output/mine

A step is run by the launch script of its model, or by training_scripts/run.sh if there is none. Rerun the
same command to resume. At the end report.html has curves and samples of all steps. Flags may be written with
- or _.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.flags.args import Problems, flag, parse_args
from common.flags.groups import AUTO_FLAGS
from common.flags.problems import has_hub_form
from common.flags.streams import run_tool
from common.runs.run_files import REPORT, STOPPED
from tools import step_flags
from training_scripts.launch_table import DEPLOYMENTS, STEPS, find_script, run_flags, script_flags, without

ROOT = Path(__file__).resolve().parent
# Exit code of the programs for rejected flags.
BAD_INPUT = 2
# DeepSpeed-Chat's model names are sizes of OPT.
SIZES = {s: f"facebook/opt-{s}" for s in ("125m", "350m", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b")}
RUN = "training_scripts/run.sh"  # for a model without its own script
# Flags of a script that --auto replaces, and the models, which run.sh sets.
NOT_WITH_AUTO = {*AUTO_FLAGS, "model_name_or_path", "actor_model_name_or_path", "critic_model_name_or_path"}
NAMES = {1: "sft", 2: "reward", 3: "ppo"}  # of the steps, in run.sh and our flags
PARTS = {NAMES[step]: flags for step, flags in step_flags.STEPS.items()}  # of a --config file


@dataclass
class TrainArguments:
    """The three steps one after the other."""

    actor_model: str = flag(
        "1.3b", "base of the chat model: a hub name, a folder, or a size of OPT such as 1.3b"
    )
    reward_model: str = flag(
        "",
        "base of the reward model and critic; empty: the one in the actor's script, else --actor_model",
    )
    deployment_type: str = flag("single_gpu", "machines to train on", choices=DEPLOYMENTS)
    step: list[int] = flag([1, 2, 3], "steps to run", low=1, high=3)
    output_dir: str = flag(
        "./output", "output folder; the steps write to step1_sft/, step2_reward/ and step3_ppo/ in it"
    )
    actor_zero_stage: str = flag(
        "", "ZeRO stage of the actor; empty: the one in the script", choices=("", *"0123")
    )
    reward_zero_stage: str = flag(
        "", "ZeRO stage of the reward model and critic; empty: the one in the script", choices=("", *"0123")
    )
    num_gpus: int = flag(0, "GPUs per machine; 0: the number in the script, else 1 or 8", low=0)
    hostfile: str = flag("hostfile", "multi_node: file with a line 'hostname slots=8' per machine")
    data_path: list[str] = flag([], "data sets of all steps; empty: those in the scripts")
    sft_flags: str = flag("", "additional flags for step 1, as in --sft-flags='--lora_dim 8 --packed'")
    reward_flags: str = flag("", "additional flags for step 2")
    ppo_flags: str = flag("", "additional flags for step 3")
    auto: bool = flag(
        False,
        "choose each step's flags of memory and speed by the plan, in place of the script's; see --auto of "
        "the steps",
    )
    no_plan: bool = flag(
        False, "skip the memory plan and start even if the models would not fit this machine's GPUs"
    )
    dry_run: bool = flag(False, "print the commands without running them")


class Launch(NamedTuple):
    """Command of a step."""

    words: list[str]
    variables: dict[str, str]

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*variables, shlex.join(self.words)])


def step_folder(args: TrainArguments, step: int) -> Path:
    """Output folder of a step; its model goes to export/ there."""
    return Path(args.output_dir).absolute() / STEPS[step - 1]


def more_flags(args: TrainArguments) -> dict[str, str]:
    """Additional flags of each step, by its name."""
    return {"sft": args.sft_flags, "reward": args.reward_flags, "ppo": args.ppo_flags}


def check(args: TrainArguments, problems: Problems) -> None:
    """Resolve the models' names; add problems."""
    args.actor_model = SIZES.get(args.actor_model.lower(), args.actor_model)
    if not args.reward_model:
        script = find_script(3, args.deployment_type, args.actor_model)
        is_opt = args.actor_model in SIZES.values()
        args.reward_model = SIZES["350m"] if script and is_opt else args.actor_model  # the script's critic
    args.reward_model = SIZES.get(args.reward_model.lower(), args.reward_model)
    for name in ("actor_model", "reward_model"):
        model = getattr(args, name)
        if Path(model).is_dir():
            setattr(args, name, str(Path(model).absolute()))
        elif not has_hub_form(model):
            problems.add(f"--{name} {model}: no such folder; give a hub name, a folder, or a size of OPT")
    args.step = sorted(set(args.step))
    problems.add_if(not args.step, "--step without a number: the steps are 1, 2 and 3")
    for step in (1, 2) if 3 in args.step else ():
        export = step_folder(args, step) / "export"
        if step not in args.step and not (export / "config.json").exists():
            problems.add(f"--step 3 needs {export}, which step {step} writes; add {step}")
    if args.deployment_type == "multi_node" and not Path(args.hostfile).is_file():
        problems.add(
            f"--hostfile {args.hostfile}: no such file; it has a line 'hostname slots=8' per machine"
        )
    for name, words in more_flags(args).items():
        try:
            shlex.split(words)
        except ValueError as error:
            problems.add(f"--{name}_flags {words}: {error}")
    if not problems.messages:
        check_vocabularies(args, problems)
    folders = [
        d for d in args.data_path if Path(d.rpartition(":")[0], "README.md").is_file()
    ]  # FOLDER:CONFIGURATION
    args.data_path = [
        str(Path(d).absolute()) if Path(d).exists() or d in folders else d for d in args.data_path
    ]
    problems.exit_if_any()


def check_vocabularies(args: TrainArguments, problems: Problems) -> None:
    """Add a problem if step 3 would reject the two models after steps 1 and 2 have trained them.

    Models that cannot be loaded here are left to the steps, which say why.
    """
    actor, reward = args.actor_model, args.reward_model
    if 3 not in args.step or actor == reward or {actor, reward} <= set(SIZES.values()):
        return
    from transformers import AutoTokenizer  # slow to import, rarely needed

    from common.data.tokenizer import vocabulary_difference

    with contextlib.suppress(Exception):  # OSError, ValueError, KeyError, ...
        tokenizers = [AutoTokenizer.from_pretrained(m, trust_remote_code=False) for m in (actor, reward)]
        difference = vocabulary_difference(*tokenizers)
        problems.add_if(
            difference is not None,
            f"--reward_model {reward} has another vocabulary than --actor_model {actor} ({difference}), "
            "and step 3 gives the same token ids to both; give one of the actor's family, or leave it out",
        )


def build_launch(args: TrainArguments, step: int) -> Launch:
    """Command of a step: its model's script, or run.sh, which has settings for all."""
    model = args.reward_model if step == 2 else args.actor_model
    script = find_script(step, args.deployment_type, model)
    words = [str(script.relative_to(ROOT))] if script else [RUN, NAMES[step], model, args.deployment_type]
    variables = {"OUTPUT_DIR": str(step_folder(args, step))}
    if args.num_gpus:
        variables["NUM_GPUS"] = str(args.num_gpus)
    if args.deployment_type == "multi_node":
        variables["HOSTFILE"] = str(Path(args.hostfile).absolute())
    actor_stage = args.actor_zero_stage
    reward_stage = args.reward_zero_stage
    stages = {"--zero_stage": reward_stage if step == 2 else actor_stage}
    if step == 3:
        variables["ACTOR_MODEL"] = str(step_folder(args, 1) / "export")
        variables["CRITIC_MODEL"] = str(step_folder(args, 2) / "export")
        stages = {"--actor_zero_stage": actor_stage, "--critic_zero_stage": reward_stage}
    if args.auto:
        words = [RUN, NAMES[step], model, args.deployment_type, "--auto"]
        words += without(script_flags(script, variables), NOT_WITH_AUTO) if script else []
    # The user's flags come last and take precedence.
    words += ["--data_path", *args.data_path] if args.data_path else []
    words += [word for flag_name, stage in stages.items() if stage for word in (flag_name, stage)]
    words += shlex.split(more_flags(args)[NAMES[step]])
    return Launch(["bash", *words], variables)


def plan_words(args: TrainArguments, step: int) -> list[str]:
    """Arguments of tools.plan, which checks whether a step fits this machine's GPUs.

    Models that earlier steps will train are planned with the size of their bases.
    """
    launch = build_launch(args, step)
    _, script, *words = launch.words
    actor, reward = args.actor_model, args.reward_model
    models = {"MODEL": reward if step == 2 else actor, "ACTOR_MODEL": actor, "CRITIC_MODEL": reward}
    if script == RUN:
        flags = without(run_flags(*words[:3], models), AUTO_FLAGS if args.auto else ())
        words = words[3:]
    else:
        flags = script_flags(ROOT / script, launch.variables | models)
    is_multi = args.deployment_type == "multi_node"
    num_nodes = Path(args.hostfile).read_text().count("slots=") if is_multi else 1
    num_gpus = args.num_gpus or (1 if args.deployment_type == "single_gpu" else 8)
    machines = ["--gpu", "here", "--num_gpus", str(num_gpus), "--num_nodes", str(num_nodes)]
    return ["--stage", str(step), *machines, *flags, *words]


def run_group(command: Sequence[str], **options: Any) -> tuple[int, bool]:
    """Exit code of a command, and whether a signal asked it to stop; `options` are subprocess.Popen's.

    The command runs in a separate process group: Ctrl-C reaches it once, through this process, which forwards
    signals and waits for the whole group.
    """
    signals: list[int] = []
    group = 0

    def pass_on(number: int, _: Any) -> None:
        signals.append(number)
        if group:
            with contextlib.suppress(ProcessLookupError):  # the group has just ended
                os.killpg(group, number)

    handlers = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        child = subprocess.Popen(command, start_new_session=True, **options)
        group = child.pid
        if signals:  # received before the group existed
            os.killpg(group, signals[0])
        while child.poll() is None:  # polling, because a signal may go to another thread
            time.sleep(0.1)
        # Bash and DeepSpeed's runner exit on the signal at once, while the programs are still saving.
        with contextlib.suppress(ProcessLookupError):
            while signals:
                os.killpg(group, 0)
                time.sleep(0.1)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    code = child.returncode
    if code < 0:  # killed by a signal: use the shell's exit code
        code = 128 - code
    return code, bool(signals)


def report(args: TrainArguments) -> None:
    """Print the paths of the steps' exports, and write one report on all steps."""
    from tools.report.page import write_report  # matplotlib is slow to import

    exports = [step_folder(args, step) / "export" for step in (1, 2, 3)]
    exports = [export for export in exports if export.exists()]
    page = Path(args.output_dir).absolute() / REPORT
    print("\n" + "\n".join(f"export: {export}" for export in exports))
    try:
        write_report([export.parent for export in exports], page)
        print(f"curves, samples, configuration: {page}")
    except OSError as error:
        print(f"note: {page} cannot be written: {error.strerror}", file=sys.stderr)
    if 3 in args.step:
        print(f"talk to it: python chat.py {step_folder(args, 3) / 'export'}")


def main(argv: Sequence[str] | None = None) -> None:
    """Check, run the requested steps, report. `argv` defaults to sys.argv[1:]."""
    problems = Problems()
    words = [_with_underscores(word) for word in (sys.argv[1:] if argv is None else argv)]
    args = parse_args(
        TrainArguments, words, description=__doc__.splitlines()[0], problems=problems, parts=PARTS
    )
    check(args, problems)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    env = os.environ | {"PATH": path, "NO_PLAN": "1"}  # for run.sh: all steps are planned here
    has_gpu = shutil.which("nvidia-smi") or shutil.which("rocm-smi")
    for step in args.step if has_gpu and not args.no_plan and not args.dry_run else ():
        code, was_asked = run_group([sys.executable, "-m", "tools.plan", *plan_words(args, step)], cwd=ROOT)
        if was_asked or code == BAD_INPUT:
            raise SystemExit(STOPPED if was_asked else code)
    for step in args.step:
        launch = build_launch(args, step)
        print(f"---- step {step}: {launch}", flush=True)
        if args.dry_run:
            continue
        code, was_asked = run_group(launch.words, cwd=ROOT, env=env | launch.variables)
        if code:
            code = STOPPED if was_asked else code
            outcome = "was stopped" if code == STOPPED else f"ended with exit code {code}"
            log = step_folder(args, step) / "train.log"
            then = "fix the problem in its message, then rerun" if code == BAD_INPUT else "to resume, rerun"
            print(f"step {step} {outcome}; its output is in {log}; {then} the same command", file=sys.stderr)
            raise SystemExit(code)
    if not args.dry_run:
        report(args)


def _with_underscores(word: str) -> str:
    """A flag's name with underscores; DeepSpeed-Chat's program of this name has dashes."""
    match = re.fullmatch(r"--([\w-]+)(=.*)?", word, re.DOTALL)
    return f"--{match[1].replace('-', '_')}{match[2] or ''}" if match else word


if __name__ == "__main__":
    run_tool(main)
