"""Fixtures that several test files use."""

import functools
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when a library is imported; a look-up by mistake fails at once
os.environ["NO_PLAN"] = "1"  # a memory plan, made by a process of its own, takes longer than a tiny run
# bitsandbytes alone would compile, and loads the compiler wherever it is imported: a second for each process.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that wait for work leave the core to another test

import pytest
from tiny_configs import tiny_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# A shell starts what runs behind it (`run.sh &`) deaf to Ctrl-C, and so would be every program of a test.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

FAKES = Path(__file__).with_name("fakes")
SENTENCES = [
    "\n\nHuman: How are you today?\n\nAssistant: I am fine, thank you. And you?",
    "\n\nHuman: What is the weather like?\n\nAssistant: It is a sunny day, and rather warm.",
    "The quick brown fox jumps over the lazy dog while the cat looks on.",
]


def pytest_collection_finish() -> None:
    """Exempt what the imports made from garbage collection: ZeRO 3 collects for each engine."""
    gc.collect()
    gc.freeze()


def train_tiny_tokenizer(vocab_size: int = 320, eos: str | None = "<|endoftext|>") -> PreTrainedTokenizerFast:
    """A byte-level BPE of SENTENCES with eos (if any), without pad and bos."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eos] if eos else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos)


@pytest.fixture(autouse=True)
def _no_gpu_stays() -> Iterator[None]:
    """What `monkeypatch` puts back after a pretended GPU has gone would be the GPU's."""
    yield
    if "pretended_gpu" in sys.modules and not sys.modules["pretended_tensors"].gpus:
        import torch
        from deepspeed.accelerator import real_accelerator

        kept = [type(real_accelerator.ds_accelerator)]
        kept += [value for module in (torch.cuda, torch.distributed) for value in vars(module).values()]
        found = [value for value in kept if str(getattr(value, "__module__", "")).startswith("pretended_")]
        assert not found, f"{found}: patched within pretended_gpu(); use mock.patch there, not monkeypatch"


@pytest.fixture(autouse=True)
def _phases_are_not_told(monkeypatch) -> None:
    """A program run in this process lets its phases be told, and so would the next test's."""
    if "common.ranks.watchdog" in sys.modules:
        monkeypatch.setattr(sys.modules["common.ranks.watchdog"], "_printed_phases", None)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Shared by all tests of a session: do not add tokens to it."""
    return train_tiny_tokenizer()


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """`train_tiny_tokenizer`, for a test that needs one of its own."""
    return train_tiny_tokenizer


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory, tiny_tokenizer) -> Callable[[str], str]:
    """A folder with a saved random model of the family and the tiny tokenizer, whose PAD is its EOS."""
    import torch
    from transformers import AutoModelForCausalLM

    @functools.cache
    def make(family: str) -> str:
        folder = tmp_path_factory.mktemp(family)
        torch.manual_seed(0)
        config = tiny_config(family, len(tiny_tokenizer))
        config.initializer_range = config.init_std = 0.2  # logits that differ, unlike those of std 0.02
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        return str(folder)

    return make


@pytest.fixture(scope="session")
def reward_export(tiny_model_folder, tmp_path_factory) -> str:
    """An export of step 2 with a random score head, whose PAD is not its EOS."""
    import torch

    from common.data.tokenizer import load_tokenizer
    from common.models.loading import ModelOptions
    from common.models.value_model import load_value_model
    from common.runs.export import save_export

    name = tiny_model_folder("llama")
    model = load_value_model(ModelOptions(name, dropout=0.0), 320, seed=3)
    torch.nn.init.normal_(model.classifier.score.weight)
    folder = tmp_path_factory.mktemp("reward") / "export"
    metadata = {"step": "reward", "template": "human_assistant"}
    save_export(folder, model.classifier, load_tokenizer(name), metadata=metadata, needs_own_pad=True)
    return str(folder)


@pytest.fixture
def install_flash_attn(monkeypatch) -> Iterator[Callable[..., None]]:
    """Called under a pretended GPU it installs tests/fakes/flash_attn, as of the distributions given."""
    from transformers import modeling_flash_attention_utils as flash
    from transformers.utils import import_utils

    checks = [getattr(flash, f"is_flash_attn_{n}_available") for n in (2, 3, 4)]
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    for family in ("falcon", "gptj", "gpt_neo"):  # they import it where the package was there from the start
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        forward = flash._flash_attention_forward
        monkeypatch.setattr(module, "_flash_attention_forward", forward, raising=False)

    def install(*distributions: str) -> None:
        names = {"flash_attn": [*(distributions or ["flash-attn"])]}
        for module in (flash, import_utils):
            monkeypatch.setattr(module, "_package_distribution_mapping", lambda: names)
        monkeypatch.syspath_prepend(str(FAKES))
        for check in (*checks, import_utils.is_torch_cuda_available):
            check.cache_clear()

    yield install
    monkeypatch.undo()
    sys.modules.pop("flash_attn", None)
    for check in (*checks, import_utils.is_torch_cuda_available):
        check.cache_clear()


@pytest.fixture(scope="session")
def process_group() -> None:
    """A world of one rank, for what needs a DeepSpeed engine."""
    from common.programs import startup
    from common.ranks import distributed

    startup.quiet_libraries()
    distributed.start()
