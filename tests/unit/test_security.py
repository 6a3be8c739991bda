"""What SECURITY.md promises of files that others made: what is in them is read, and never run."""

import ast
import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny_configs import tiny_config

from common.data import hub_data
from common.data.chat_template import build_template
from common.data.registry import load_source
from common.data.tokenizer import load_tokenizer
from common.flags.args import Problems
from common.models.loading import ModelOptions, load_causal_lm
from common.models.value_model import has_saved_head, load_value_model
from common.programs import model_checks
from common.runs.saved_state import TensorReader
from step1_sft.arguments import SFTArguments
from step3_ppo.arguments import PPOArguments
from step3_ppo.rewards.classifier_reward import ClassifierReward

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = {"tests", ".venv", "output"}


# ---- our own source


NEVER = re.compile(
    r"allow_pickle=(?!False)|trust_remote_code=True|weights_only=(?!True)|torch\.load\((?!.*weights_only=True)"
)
FROM_FILES = {"from_pretrained", "pipeline", "get_class_from_dynamic_module"}


def findings(source: str) -> list[str]:
    """Return what could run something that a file says, beside what ruff finds (S rules of pyproject.toml).

    That is what NEVER is in a call, and a load of a model's files that leaves it to the library whether code
    that comes with them is run: one that says nothing of it, or that is handed over as a function.
    """
    found, tree = [], ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found += [f"{node.lineno}: {ast.unparse(node)}" for node in calls if NEVER.search(ast.unparse(node))]
    careful = {
        id(node.func) for node in calls if {k.arg for k in node.keywords} & {"trust_remote_code", None}
    }
    for node in ast.walk(tree):
        name = getattr(node, "attr", getattr(node, "id", ""))
        owner = ast.unparse(node.value).rpartition(".")[2] if isinstance(node, ast.Attribute) else ""
        is_one_class = owner[:1].isupper() and not owner.startswith("Auto")  # of transformers' own
        if name in FROM_FILES and not is_one_class and id(node) not in careful:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_no_source_of_ours_runs_what_a_file_says():
    paths = [path for path in ROOT.rglob("*.py") if not NOT_OURS & {*path.relative_to(ROOT).parts}]
    found = {str(path): findings(path.read_text()) for path in paths}
    assert len(found) > 150 and {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    ["torch.load(f)", "torch.load(f, weights_only=x)", "np.load(f, allow_pickle=True)",
     "Auto.from_pretrained(p, trust_remote_code=True)", "AutoModel.from_pretrained(p)",
     "map(AutoTokenizer.from_pretrained, paths)", "kind.from_pretrained(p)", "pipeline('t', model=p)",
     "partial(Auto.from_pretrained, dtype=x)", "transformers.AutoConfig.from_pretrained(p)"],
)  # fmt: skip
def test_the_search_finds(line):
    assert len(findings(line)) == 1
    good = "torch.load(f, weights_only=True); AutoModel.from_pretrained(p, trust_remote_code=args.trust)"
    good += "; Llama.from_pretrained(p)"
    assert findings(good) == []


# ---- pickles that would run something


class RunsCode:
    """An object whose unpickling makes a folder."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.proof),)


@pytest.fixture
def proof(tmp_path) -> Path:
    """Return the folder that is there once something was run; here it is proved that a pickle does."""
    weapon = pickle.dumps(RunsCode(tmp_path / "tried"))
    pickle.loads(weapon)
    assert (tmp_path / "tried").is_dir()
    return tmp_path / "proof"


@pytest.fixture
def model_folder(tmp_path, tiny_tokenizer) -> Callable[..., Path]:
    """Make a model's folder whose weights are this pickle, or that of an adapter."""

    def make(content: Any, *, is_classifier: bool = False, form: str = "pytorch_model.bin") -> Path:
        config = tiny_config("llama", len(tiny_tokenizer))
        kind = transformers.AutoModelForCausalLM
        if is_classifier:
            config.num_labels, kind = 1, transformers.AutoModelForSequenceClassification
        folder = tmp_path / f"model-{is_classifier}-{form}"
        kind.from_config(config).save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        content = load_file(folder / "model.safetensors") if content is None else content
        if form == "adapter_model.bin":
            adapter = {"peft_type": "LORA", "base_model_name_or_path": str(folder), "r": 2, "lora_alpha": 2}
            adapter |= {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
            (folder / "adapter_config.json").write_text(json.dumps(adapter))
        else:
            (folder / "model.safetensors").unlink()
        torch.save(content, folder / form)
        return folder

    return make


LOADERS = {
    "actor": (False, lambda folder: load_causal_lm(ModelOptions(str(folder)), 320)),
    "reward model": (True, lambda folder: load_value_model(ModelOptions(str(folder)), 320)),
    "critic of a language model": (False, lambda folder: load_value_model(ModelOptions(str(folder)), 320)),
    "classifier": (True, lambda folder: ClassifierReward(str(folder), PPOArguments())),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_pickle_that_runs_code_is_refused_and_not_run(model_folder, proof, loader):
    is_classifier, load = LOADERS[loader]
    folder = model_folder(RunsCode(proof), is_classifier=is_classifier)
    with pytest.raises(
        ValueError, match="a pickle with more than tensors.*not loaded; give a model saved as safetensors"
    ):
        load(folder)
    assert not proof.exists()


def test_other_pickles_are_refused_and_not_run(model_folder, proof, tmp_path):
    """Not torch's archive, but the plain pickle that old programs wrote; an adapter that lies beside a model,
    which transformers loads by itself; a checkpoint's file.
    """
    old = model_folder(None)
    (old / "pytorch_model.bin").write_bytes(pickle.dumps(RunsCode(proof)))
    for folder in (old, model_folder(RunsCode(proof), form="adapter_model.bin")):
        with pytest.raises(ValueError, match=str(folder)):
            load_causal_lm(ModelOptions(str(folder)), 320)
    torch.save(RunsCode(proof), tmp_path / "model-rank-00000.safetensors")
    with pytest.raises(SafetensorError):
        TensorReader([tmp_path / "model-rank-00000.safetensors"])
    assert not proof.exists()


def test_a_pickle_of_tensors_alone_is_read(model_folder):
    """Many older models of the hub are one."""
    folder = model_folder(None)
    model = load_causal_lm(ModelOptions(str(folder)), 320)
    saved = torch.load(folder / "pytorch_model.bin", weights_only=True)
    assert torch.equal(model.state_dict()["model.norm.weight"], saved["model.norm.weight"])


# ---- code that comes with models and data


def code_that_proves(proof: Path) -> str:
    return f"import os\nos.mkdir({str(proof)!r})\nclass Mine: pass\n"


def test_code_that_comes_with_a_model_is_off_unless_asked(tmp_path, proof, model_folder):
    folder = model_folder(None, is_classifier=True)
    (folder / "mine.py").write_text(code_that_proves(proof))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}, "tokenizer_class": "Mine"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))

    args, problems = SFTArguments(model_name_or_path=str(folder)), Problems()
    assert args.trust_remote_code is False
    assert model_checks.check_model("--model_name_or_path", str(folder), args, problems) is None
    assert "--model_name_or_path" in problems.messages[0] and "custom code" in problems.messages[0]
    assert has_saved_head(str(folder)) is True, "from the plain file"
    try:  # what the folder's own tokenizer is not needed for may be read
        load_tokenizer(str(folder))
    except ValueError as error:
        assert "no tokenizer could be loaded" in str(error)
    for load in (load_causal_lm, load_value_model):
        with pytest.raises(ValueError, match="custom code"):
            load(ModelOptions(str(folder)), 320)
    assert not proof.exists()


def test_code_that_comes_with_data_is_not_run(tmp_path, proof):
    """datasets has no loading scripts any more, and a folder's modules are not looked at."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/data.py").write_text(code_that_proves(proof))
    for name in (tmp_path / "data", tmp_path / "data/data.py"):
        with pytest.raises(ValueError, match="--data_path"):
            hub_data.load_hub(str(name))
    (tmp_path / "data/train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    assert len(load_source(str(tmp_path / "data")).train) == 1
    assert not proof.exists()


def test_a_chat_template_has_no_way_out(make_tokenizer, proof):
    """It comes with a tokenizer and is a program, in a language that reaches nothing outside."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = f"{{{{ cycler.__init__.__globals__.os.mkdir({str(proof)!r}) }}}}"
    with pytest.raises(ValueError, match="chat template rejects"):
        build_template("chat", tokenizer)
    assert not proof.exists()
