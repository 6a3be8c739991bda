"""Every launch script is sound and starts its program with flags that the program accepts.

The scripts run for real, with a fake `deepspeed` first on PATH that writes down its arguments.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from common.data.registry import ADAPTERS
from common.flags.args import Problems, parse_args
from common.flags.problems import no_effect_notes
from common.ranks.devices import DEVICES
from tools.memory_plan import MemoryPlan
from tools.planned_run import read_run
from tools.step_flags import STEPS as STEP_FLAGS
from tools.step_flags import PlanArguments, parse_step_args
from training_scripts.launch_table import (
    FOLDER_OF_STEP,
    ROWS,
    STEPS,
    TABLE,
    find_row,
    script_flags,
    step_flags,
)
from training_scripts.plan_memory import planned_gib, with_figures

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "training_scripts"
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SCRIPTS = sorted(path for step in STEPS for path in (FOLDER / step).rglob("*.sh"))
RUN = FOLDER / "run.sh"
FAKE_DEEPSPEED = """#!/usr/bin/env bash
echo "a line of output"
echo "a line of complaint" >&2
pwd > "$RECORD/cwd"
printf '%s\\0' "$@" > "$RECORD/arguments"
echo "${NO_PLAN:-}" > "$RECORD/no_plan"
exit "${FAKE_EXIT_CODE:-0}"
"""
# nvidia-smi says that there is a GPU; a plan is written down and judges as it is told.
FAKE_GPU = {
    "nvidia-smi": "#!/usr/bin/env bash\n",
    "python": f"""#!/usr/bin/env bash
[[ "$2" == tools.plan ]] || exec {sys.executable} "$@"
printf '%s ' "$@" > "$RECORD/plan"
exit "$PLAN_EXIT_CODE"
""",
}
FAKE_SLURM = {
    "srun": '#!/usr/bin/env bash\nexec "$@"\n',
    "scontrol": "#!/usr/bin/env bash\necho first\necho second\n",
}


def launch(script: Path, folder: Path, *extra: str, **variables: str) -> SimpleNamespace:
    """Run `script` from another folder, all it makes in `folder`; return what it did."""
    fakes = {"deepspeed": FAKE_DEEPSPEED, "torchrun": FAKE_DEEPSPEED, **FAKE_SLURM}
    for name, text in (fakes | (FAKE_GPU if "PLAN_EXIT_CODE" in variables else {})).items():
        fake = folder / "bin" / name
        fake.parent.mkdir(exist_ok=True)
        fake.write_text(text)
        fake.chmod(0o755)
    hostfile = folder / "hosts"
    hostfile.write_text("first slots=8\nsecond slots=8\n")
    output_dir = folder / "out put"  # a space, for missing quotes
    env = {"PATH": f"{fake.parent}:{os.environ['PATH']}", "RECORD": str(folder), "CDPATH": str(folder)}
    env |= {"OUTPUT_DIR": str(output_dir), "HOSTFILE": str(hostfile)} | variables
    done = subprocess.run(
        [str(script), *extra], env=env, cwd=folder, capture_output=True, text=True, timeout=60
    )
    if "PLAN_EXIT_CODE" in variables and done.returncode:
        return SimpleNamespace(exit_code=done.returncode)
    assert (folder / "arguments").exists(), f"{script.name} did not reach deepspeed: {done.stderr}"
    words = (folder / "arguments").read_text().split("\0")[:-1]
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    of_words = {"launcher_words": words[:at], "program": words[at], "program_words": words[at + 1 :]}
    cwd = Path((folder / "cwd").read_text().strip())
    return SimpleNamespace(exit_code=done.returncode, cwd=cwd, output_dir=output_dir, **of_words)


def script_id(script: Path) -> str:
    return str(script.relative_to(FOLDER))


def test_every_script_is_in_the_table_and_every_row_has_a_script():
    linked = set(re.findall(r"\]\((step\d_\w+/[^)]+\.sh)\)", (FOLDER / "README.md").read_text()))
    assert linked == {script_id(script) for script in SCRIPTS}


def check_flags(step: str, words: list[str]) -> Any:
    """The arguments that a step's program makes of these words; none twice, none without effect."""
    problems = Problems()
    args = parse_args(STEP_FLAGS[STEPS.index(step) + 1], words, problems=problems)
    assert problems.messages == []
    assert args.data_path and set(args.data_path) <= ADAPTERS.keys()
    flags = [word for word in words if word.startswith("--")]
    assert len(flags) == len(set(flags)), "a flag is given twice"
    assert no_effect_notes(args, words) == []
    return args


@pytest.mark.parametrize("script", SCRIPTS, ids=script_id)
def test_a_script_has_its_form_and_the_program_accepts_its_flags(script: Path, tmp_path: Path):
    header = script.read_text().partition("set -euo pipefail")[0]
    assert all(f"# {what}: " in header for what in ("Hardware", "Time"))
    step = script_id(script).split("/")[0]
    run = launch(script, tmp_path)
    assert (run.exit_code, run.cwd, run.program) == (0, ROOT, f"{step}/main.py")
    assert ("--hostfile" in run.launcher_words) == ("multi_node" in script.parts)
    assert run.launcher_words[:2] == ["--num_gpus", "1" if "single_gpu" in script.parts else "8"]
    assert check_flags(step, run.program_words).output_dir == str(run.output_dir)
    flags = script_flags(script, {"OUTPUT_DIR": str(run.output_dir)})
    assert flags == run.program_words or "sweep" in script.parts  # which train.py never chooses
    log = (run.output_dir / "train.log").read_text()
    assert "a line of output" in log and "a line of complaint" in log


@pytest.mark.parametrize("script", [s for s in SCRIPTS if "sweep" not in s.parts], ids=script_id)
def test_script_takes_the_positions_of_deepspeed_chat(script: Path, tmp_path: Path):
    step = script_id(script).split("/")[0]
    (tmp_path / "here").mkdir()
    stages = ["1", "2"] if step == "step3_ppo" else ["1"]
    models = ["here", "hub/critic"] if step == "step3_ppo" else []
    output = str(tmp_path / "by position")
    words = [*models, *stages, output] if models else [output, *stages]
    run = launch(script, tmp_path, *words, "--seed", "7", OUTPUT_DIR="")
    given = parse_args(STEP_FLAGS[STEPS.index(step) + 1], run.program_words, problems=Problems())
    assert (given.output_dir, given.seed) == (output, 7) and Path(output, "train.log").exists()
    if models:
        assert given.actor_model_name_or_path == str(tmp_path / "here")
        assert given.critic_model_name_or_path == "hub/critic"
        assert (given.actor_zero_stage, given.critic_zero_stage) == (1, 2)
    else:
        assert given.zero_stage == 1
    default = launch(script, tmp_path, *[""] * len(words), "--seed", "7").program_words
    assert [
        word for word in default if word not in script_flags(script, {"OUTPUT_DIR": str(run.output_dir)})
    ] == ["--seed", "7"]


# ---- run.sh and its table


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.model}-{row.machine}")
def test_the_programs_accept_the_flags_of_every_row(row):
    for step, folder in FOLDER_OF_STEP.items():
        models = ["--actor_model_name_or_path", "a", "--critic_model_name_or_path", "c"]
        models = models if step == "ppo" else ["--model_name_or_path", "m"]
        args = check_flags(folder, [*models, *step_flags(step, row)])
        assert step != "dpo" or args.loss == "dpo"


TORCHRUN = {"LAUNCHER": "torchrun", "NODE_RANK": "1", "MASTER_ADDR": "first", "NUM_NODES": "2"}
SLURM = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "f,s", "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "--num_gpus 8 --hostfile"),
        (TORCHRUN, "--nnodes 2 --nproc_per_node 8 --node_rank 1 --master_addr first"),
        (SLURM, "--nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint first:29500"),
    ],
    ids=["deepspeed", "torchrun", "slurm"],
)
def test_run_sh_starts_by_each_launcher(variables: dict, words: str, tmp_path: Path):
    run = launch(RUN, tmp_path, "ppo", "a/b", "multi_node", "--seed", "7", **variables)
    assert (run.exit_code, run.cwd, run.program) == (0, ROOT, "step3_ppo/main.py")
    assert " ".join(run.launcher_words).startswith(words)
    exports = [f"output/{step}/b/multi_node/export" for step in ("step1_sft", "step2_reward")]
    assert run.program_words[1:4:2] == exports and run.program_words[-2:] == ["--seed", "7"]
    [log] = [file.read_text() for file in run.output_dir.glob("train*.log")]
    assert "a line of complaint" in log


@pytest.mark.parametrize("launcher", [{}, TORCHRUN, SLURM], ids=["deepspeed", "torchrun", "slurm"])
@pytest.mark.parametrize(("plan_code", "code"), [("0", 0), ("1", 0), ("2", 2), ("130", 130)])
def test_run_sh_starts_what_is_not_planned_to_fail(launcher, plan_code: str, code: int, tmp_path: Path):
    words = ("dpo", "a/b", "multi_node", "--seed", "7")
    run = launch(RUN, tmp_path, *words, PLAN_EXIT_CODE=plan_code, **launcher)
    machines = "--gpu here --num_gpus 8 --num_nodes 2 --stage 2 --model_name_or_path a/b "
    assert run.exit_code == code and f"-m tools.plan {machines}" in (tmp_path / "plan").read_text()
    assert (tmp_path / "arguments").exists() == (code == 0)
    if code == 0:
        assert " ".join(run.program_words) in (tmp_path / "plan").read_text()
        assert (tmp_path / "no_plan").read_text() == "1\n", "the program would plan again"
    elif not launcher:
        assert launch(RUN, tmp_path, *words, PLAN_EXIT_CODE="2", NO_PLAN="1").exit_code == 0


# ---- what the scripts have in common


@pytest.mark.parametrize("script", [s for s in SCRIPTS if "step3_ppo" in s.parts], ids=script_id)
def test_default_models_of_step_3_are_what_a_script_exports(script: Path):
    models = re.findall(r"_MODEL:-(output/.*)/export}", script.read_text())
    assert [Path(model).parts[1] for model in models] == ["step1_sft", "step2_reward"]
    assert "opt" not in script.parts or Path(models[1]).name.startswith(("run_350m", "run_single"))
    for model in models:
        producer = FOLDER / f"{model.removeprefix('output/')}.sh"
        assert f"OUTPUT_DIR=${{OUTPUT_DIR:-{model}}}" in producer.read_text()


EXAMPLE = "step1_sft/opt/single_gpu/run_1.3b.sh"


def test_knobs_flags_and_exit_code_pass_through_a_symbolic_link(tmp_path: Path):
    link = tmp_path / "mine.sh"
    link.symlink_to(FOLDER / EXAMPLE)
    variables = {"NUM_GPUS": "3", "MODEL": "my model", "FAKE_EXIT_CODE": "3"}
    run = launch(link, tmp_path, "--seed", "7", "--data_path", "my data.jsonl", **variables)
    assert (run.cwd, run.exit_code) == (ROOT, 3)  # tee must not swallow it
    assert run.launcher_words == ["--num_gpus", "3"] and "my model" in run.program_words
    assert run.program_words[-4:] == ["--seed", "7", "--data_path", "my data.jsonl"]


def test_a_missing_hostfile_is_an_error_and_not_a_run_on_one_machine(tmp_path: Path):
    script = FOLDER / "step3_ppo/opt/multi_node/run_66b.sh"
    env = os.environ | {"HOSTFILE": str(tmp_path / "nowhere"), "OUTPUT_DIR": str(tmp_path / "out")}
    done = subprocess.run([str(script)], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "HOSTFILE=" in done.stderr and "slots=8" in done.stderr
    assert not (tmp_path / "out").exists()


# ---- memory


def usable_gib(size: str) -> float:
    """What torch can use of the smallest card that is sold with so many GB."""
    return min(device.memory_gib for kind, device in DEVICES.items() if kind.endswith(f"-{size}g"))


@pytest.mark.parametrize("row", [row for row in ROWS if row.model != "*"], ids=lambda row: row.model)
def test_a_row_fits_every_card_of_its_size(row):
    planned = max(float(getattr(row, f"{step}_gib")) for step in FOLDER_OF_STEP)
    assert planned <= usable_gib(row.gpus.split("x")[-1].removesuffix("GB"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [s for s in SCRIPTS if re.match(r"step3.*run_\d", script_id(s))], ids=script_id
)
def test_a_script_is_planned_to_fit_its_hardware(script: Path):
    form = r"# Hardware: (\w+)(?: machines of (\w+))? GPUs? of (\d+) GB"
    first, second, size = re.search(form, script.read_text()).groups()
    numbers = {"one": "1", "two": "2", "eight": "8"}
    nodes, gpus = (numbers[first], numbers[second]) if second else ("1", numbers[first])
    is_llama = "llama2" in script.parts
    model = "meta-llama/Llama-2-7b-hf" if is_llama else f"facebook/opt-{script.stem.split('_')[1]}"
    models = {
        "MODEL": model,
        "ACTOR_MODEL": model,
        "CRITIC_MODEL": model if is_llama else "facebook/opt-350m",
    }
    words = ["--stage", "3", *script_flags(script, models), "--num_gpus", gpus, "--num_nodes", nodes]
    args = parse_step_args(PlanArguments, words, problems=(problems := Problems()))
    assert MemoryPlan(read_run(args, problems)).peak.total < usable_gib(size) * 2**30


PAGE = (ROOT / "docs/several_machines.md").read_text()
CARDS = re.findall(r"^\| (.*?) \| ([\d.]+) \| (.*) \|$", PAGE, re.MULTILINE)
CELLS = sorted({(i, cell) for *_, cells in CARDS for i, cell in enumerate(cells.split(" | "))})


def test_the_pages_cards_have_room_for_what_they_are_said_to_fit():
    memory = {device.memory_gib for device in DEVICES.values()}
    for name, gib, cells in CARDS:
        assert float(gib) in memory and all(
            float(cell.split()[1]) < float(gib) for cell in cells.split(" | ")
        ), name
    assert len(CELLS) == 17


ONE_BASE = FOLDER / "one_base.sh"


def one_base_words(tmp_path: Path, *flags: str, **variables: str) -> dict[str, list[str]]:
    """Return the words of each step's program that the script starts."""
    words = {}
    for step in ("sft", "reward", "ppo"):
        run = launch(ONE_BASE, tmp_path, *flags, STEPS=step, **variables)
        assert run.exit_code == 0 and run.launcher_words == ["--num_gpus", "1"]
        words[step] = run.program_words
    return words


@pytest.mark.parametrize(
    ("flags", "card", "gib"),
    [((), "a10-24g", (21.0, 21.0, 20.0)), (("--load_in_4bit",), "t4-16g", (11.4, 11.5, 10.4))],
)
def test_three_steps_of_an_8b_fit_one_card(flags, card, gib, tmp_path):
    """PPO's critic, reference and reward model included: all are adapters of one base."""
    outputs = tmp_path / "output"
    words = one_base_words(tmp_path, *flags, OUTPUT_DIR=str(outputs))
    for step in ("sft", "reward"):  # what steps 1 and 2 leave
        folder = outputs / step / "adapter"
        folder.mkdir(parents=True)
        config = {"peft_type": "LORA", "r": 64, "lora_alpha": 64, "target_modules": ADAPTED}
        config["base_model_name_or_path"] = "meta-llama/Llama-3.1-8B"
        (folder / "adapter_config.json").write_text(json.dumps(config))
        factors = {"score.weight": torch.zeros(1, 4096)} if step == "reward" else {"x": torch.zeros(1)}
        save_file(factors, folder / "adapter_model.safetensors")
    planned = []
    for number, step in enumerate(words, 1):
        own = ["--stage", str(number), "--gpu", card, "--dtype", "bf16"]
        args = parse_step_args(PlanArguments, [*own, *words[step]], problems=(problems := Problems()))
        memory = MemoryPlan(read_run(args, problems))
        assert memory.fits
        planned.append(round(memory.peak.total / 2**30, 1))
    assert tuple(planned) == gib
    roles = {role.name for role in read_run(args, problems).roles}
    assert roles == {"actor", "reference", "critic", "reward"}


def test_a_step_that_there_is_not_is_named(tmp_path):
    done = subprocess.run(
        ["bash", ONE_BASE], env=os.environ | {"STEPS": "dpo"}, capture_output=True, text=True
    )
    assert done.returncode == 2 and "STEPS: dpo must be one of sft, reward, ppo" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("column", "cell"), CELLS)
def test_the_page_of_cards_states_the_planned_memory(column: int, cell: str):
    name, gib = cell.split()
    [model] = {row.model for row in ROWS if row.model.split("/")[-1].removesuffix("-Base") == name}
    row = find_row("*", "single_gpu")._replace(model=model, lora="64" if column % 2 else "-")
    assert planned_gib("ppo" if column > 1 else "sft", row) == float(gib)


@pytest.mark.slow
def test_the_table_states_the_planned_memory():
    text = TABLE.read_text()
    assert with_figures(text) == text


# ---- sweeps

POINT = """#!/usr/bin/env bash
# LORA_DIM is one of its knobs
mkdir -p "$OUTPUT_DIR"
printf '%s\\n' "$*" > "$OUTPUT_DIR/words"
[[ "$ZERO_STAGE" != 1 ]] || exit 3
echo '{"step": 1, "perf/step_seconds": 1.5, "perf/peak_memory_gib": 2.25}' > "$OUTPUT_DIR/metrics.jsonl"
echo '{"step": 2, "perf/step_seconds": 2.5, "perf/peak_memory_gib": 1.25}' >> "$OUTPUT_DIR/metrics.jsonl"
"""


def test_a_sweep_runs_every_point_and_names_the_one_that_failed(tmp_path: Path):
    script = tmp_path / "run_point.sh"
    script.write_text(POINT)
    env = os.environ | {"SWEEP_DIR": str(tmp_path / "sweep"), "ZERO_STAGES": "0 1"}
    env |= {"OFFLOADS": "none all", "LORA_DIMS": "0 8"}
    words = ["bash", str(FOLDER / "sweep.sh"), str(script), "--seed", "7"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    rows = [line.split("\t") for line in (tmp_path / "sweep" / "sweep.tsv").read_text().splitlines()[1:]]
    good, bad = ["0", "2", "2.00", "2.2"], ["3", "0", "-", "-"]
    assert rows == [
        ["0", "none", "0", *good], ["0", "none", "8", *good],
        *(["1", offload, lora, *bad] for offload in ("none", "all") for lora in ("0", "8")),
    ]  # fmt: skip
    assert done.returncode == 1 and "4 points failed" in done.stderr
    assert (tmp_path / "sweep/zero0_offload-none_lora8/words").read_text() == "--seed 7\n"
