"""train.py: which script or program runs a step, what is handed over, and what is refused."""

import os
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

import train
from common.flags.args import Problems, parse_args
from tools.step_flags import PlanArguments, parse_step_args
from training_scripts.launch_table import ROWS, step_flags


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def checked(*words):
    problems = Problems()
    args = parse_args(train.TrainArguments, list(words), problems=problems)
    train.check(args, problems)
    return args


def launches(*words):
    args = checked(*words)
    return [train.build_launch(args, step) for step in args.step]


def test_scripts_of_known_models_and_the_hand_over(tmp_path):
    sft, reward, ppo = launches("--actor_model", "1.3b", "--reward_model", "350m", "--output_dir", "out")
    assert [launch.words for launch in (sft, reward, ppo)] == [
        ["bash", f"training_scripts/{name}.sh"]
        for name in (
            "step1_sft/opt/single_gpu/run_1.3b",
            "step2_reward/opt/single_gpu/run_350m",
            "step3_ppo/opt/single_gpu/run_1.3b",
        )
    ]
    out = tmp_path / "out"
    assert sft.variables == {"OUTPUT_DIR": str(out / "step1_sft")}
    assert ppo.variables == {
        "OUTPUT_DIR": str(out / "step3_ppo"),
        "ACTOR_MODEL": str(out / "step1_sft/export"),
        "CRITIC_MODEL": str(out / "step2_reward/export"),
    }
    for step in ("step1_sft", "step2_reward"):  # step 3 alone takes what is there
        (out / step / "export").mkdir(parents=True)
        (out / step / "export/config.json").write_text("{}")
    assert launches("--actor_model", "1.3b", "--output_dir", "out", "--step", "3") == [ppo]


def reward_model_of(*words):
    return checked(*words).reward_model


def test_the_reward_model_fits_the_actor(tmp_path, tiny_model_folder, make_tokenizer, capsys):
    """Two vocabularies are refused before the first step trains anything."""
    actor = tiny_model_folder("llama")
    assert reward_model_of() == reward_model_of("--actor_model", "6.7b") == "facebook/opt-350m"
    assert reward_model_of("--actor_model", actor) == actor
    assert reward_model_of("--actor_model", "owner/name") == "owner/name"
    shutil.copytree(actor, tmp_path / "same"), make_tokenizer(300).save_pretrained(tmp_path / "other")
    assert reward_model_of("--actor_model", actor, "--reward_model", "same").endswith("/same")
    words = ("--actor_model", actor, "--reward_model", "other")
    with pytest.raises(SystemExit) as left:
        reward_model_of(*words)
    assert (
        left.value.code == 2 and "other has another vocabulary than --actor_model" in capsys.readouterr().err
    )
    assert reward_model_of(*words, "--step", "1", "2").endswith("/other")


@pytest.mark.parametrize(
    ("code", "said"), [(2, "fix the problem in its message, then"), (137, "to resume, rerun")]
)
def test_what_to_do_after_a_step_that_failed(code, said, monkeypatch, capsys):
    failing = train.Launch(["bash", "-c", "kill -9 $$" if code == 137 else f"exit {code}"], {})
    monkeypatch.setattr(train, "build_launch", lambda *_: failing)
    monkeypatch.setattr(sys, "argv", ["train.py", "--step", "1"])
    with pytest.raises(SystemExit) as left:
        train.main()
    assert left.value.code == code and said in capsys.readouterr().err


def test_flags_stand_last(tmp_path):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/README.md").write_text("---\nconfigs: []\n---\n")
    (tmp_path / "rows.jsonl").write_text("")
    sft, reward, ppo = launches(
        "--actor_model", "facebook/opt-13b", "--deployment_type", "single_node", "--num_gpus", "4",
        "--data_path", "rows.jsonl", "Dahoas/rm-static", "copy:main",
        "--actor_zero_stage", "3", "--reward_zero_stage", "1",
        "--sft_flags", "--lora_dim 8 --eot_token '<a b>'", "--ppo_flags", "--seed 7",
    )  # fmt: skip
    data = ["--data_path", str(tmp_path / "rows.jsonl"), "Dahoas/rm-static", f"{tmp_path}/copy:main"]
    assert sft.words[1] == "training_scripts/step1_sft/opt/single_node/run_13b.sh"
    assert sft.words[2:] == [*data, "--zero_stage", "3", "--lora_dim", "8", "--eot_token", "<a b>"]
    assert reward.words[2:] == [*data, "--zero_stage", "1"]
    assert ppo.words[2:] == [*data, "--actor_zero_stage", "3", "--critic_zero_stage", "1", "--seed", "7"]
    assert {launch.variables["NUM_GPUS"] for launch in (sft, reward, ppo)} == {"4"}


def test_a_model_without_a_script_is_run_by_run_sh(tmp_path):
    (tmp_path / "my model").mkdir()
    sft, _, ppo = launches("--actor_model", "my model", "--deployment_type", "single_node")
    assert sft.words == ["bash", train.RUN, "sft", str(tmp_path / "my model"), "single_node"]
    assert ppo.words[2] == "ppo" and ppo.variables["CRITIC_MODEL"].endswith("step2_reward/export")
    assert f"'{tmp_path / 'my model'}'" in str(sft)


def test_several_machines_have_a_hostfile(tmp_path):
    (tmp_path / "hostfile").write_text("first slots=8\n")
    sft, *_ = launches("--deployment_type", "multi_node", "--actor_model", "66b")
    assert sft.words[1].endswith("opt/multi_node/run_66b.sh")
    assert sft.variables["HOSTFILE"] == str(tmp_path / "hostfile")


def test_what_does_not_fit_is_not_started(monkeypatch, capsys):
    """All steps are planned before the first, with the flags that they will have."""
    calls = []

    def run(words, **more):
        calls.append(words)
        assert "tools.plan" in words or more["env"]["NO_PLAN"] == "1"
        return (2 if "3" in words else 1 if "2" in words else 0), False  # a plan that fails is no verdict

    monkeypatch.setattr(train, "run_group", run)
    monkeypatch.delenv("NO_PLAN", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: name == "nvidia-smi")
    flags = ["--actor_model", "1.3b", "--deployment_type", "single_node", "--reward_flags", "--seed 7"]
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])
    with pytest.raises(SystemExit) as left:
        train.main()
    assert left.value.code == 2 and capsys.readouterr().out == ""
    assert [words[1:5] for words in calls] == [["-m", "tools.plan", "--stage", step] for step in "123"]
    machines = ["--gpu", "here", "--num_gpus", "8", "--num_nodes", "1"]
    problems, (sft, reward, ppo) = Problems(), (words[5:] for words in calls)
    assert sft[:6] == machines and reward[-2:] == ["--seed", "7"] and "$" not in "".join(sft + reward + ppo)
    found = parse_step_args(PlanArguments, ["--stage", "3", *ppo], problems=problems)
    assert not problems.messages and found.actor_zero_stage == 2 and found.critic_zero_stage == 2
    assert found.actor_model_name_or_path == "facebook/opt-1.3b"
    assert found.critic_model_name_or_path == "facebook/opt-350m"
    monkeypatch.setattr(sys, "argv", ["train.py", *flags, "--no_plan", "--step", "1"])
    calls.clear()
    train.main()
    assert [words[0] for words in calls] == ["bash"]


def test_run_shs_models_are_planned_by_its_table(tmp_path):
    (tmp_path / "hosts").write_text("first slots=4\nsecond slots=4\n")
    words = ["--actor_model", "a/b", "--deployment_type", "multi_node", "--hostfile", "hosts"]
    args = checked(*words, "--num_gpus", "4", "--ppo_flags", "--seed 7")
    [row] = [row for row in ROWS if (row.model, row.machine) == ("*", "multi_node")]
    models = ["--actor_model_name_or_path", "a/b", "--critic_model_name_or_path", "a/b"]
    machines = ["--gpu", "here", "--num_gpus", "4", "--num_nodes", "2"]
    planned = ["--stage", "3", *machines, *models, *step_flags("ppo", row), "--seed", "7"]
    assert train.plan_words(args, 3) == planned


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--actor_model", "./nowhere"], "--actor_model ./nowhere: no such folder"),
        (["--deployment_type", "multi_node"], "--hostfile hostfile: no such file; it has a line"),
        (["--step", "3"], "step1_sft/export, which step 1 writes; add 1"),
        (["--ppo_flags", "'"], "--ppo_flags ': No closing quotation"),
        (["--deployment_type", "cloud"], "--deployment_type cloud: choose from single_gpu, single_node"),
    ],
    ids=str,
)
def test_bad_input(words, message, capsys):
    with pytest.raises(SystemExit) as left:
        launches(*words)
    assert left.value.code == 2 and message in capsys.readouterr().err


def test_what_still_saves_is_waited_for(tmp_path):
    """As under a launcher: Bash dies by the signal, and the program that it started takes its time."""
    saving = "trap 'sleep 0.5; touch SAVED; exit' TERM; echo; while true; do sleep 0.05; done"
    code = "import sys; from train import run_group; sys.exit(not run_group(sys.argv[1:])[1])"
    command = [sys.executable, "-c", code, "bash", "-c", 'bash -c "$0"; exit 1', saving]
    env = os.environ | {"PYTHONPATH": str(train.ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout.readline() == "\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0 and (tmp_path / "SAVED").exists()


def test_dry_run_prints_commands_that_a_shell_takes(tmp_path, monkeypatch, capsys):
    """Dashes are as good as underscores, in names only."""
    words = ["--actor-model", "1.3b", "--output-dir=my-out put", "--step", "1", "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    train.main()
    [line] = capsys.readouterr().out.splitlines()
    words = shlex.split(line.removeprefix("---- step 1: "))
    assert words[0] == f"OUTPUT_DIR={tmp_path / 'my-out put' / 'step1_sft'}" and words[1] == "bash"
    assert list(tmp_path.iterdir()) == []
