"""Exports of every kind that the judges read, made by the programs themselves from tiny models in seconds.

Three bases: a Llama with a chat template and two tokens that stop, a Llama without a template whose tokenizer
begins a text with <s>, and a Gemma 3 with an image part. Of each: SFT, a reward model, DPO and PPO, full and
with LoRA.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from forked_runs import ForkServer
from safetensors.torch import load_file, save_file
from tiny_configs import LLAMA3_ROPE, tiny_config, tiny_gemma3_config
from tiny_inputs import write_rows
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Gemma3ForConditionalGeneration, LlamaForCausalLM, LlamaTokenizer, PreTrainedModel

from common.runs.export import _edit
from common.runs.older_readers import add_older_names

TEMPLATES = Path(__file__).parents[1] / "unit/chat_templates"
TALK = {
    "How are you?": ("I am fine, thank you.", "What?"),
    "What is the weather like?": ("It is a sunny day.", "The dog."),
    "Who jumps over the dog?": ("The quick brown fox.", "I am fine. And you?"),
    "Who looks on?": ("The cat.", "It is a sunny day, and rather warm."),
}
# As templates of models with images take a content: a text, or a list of parts.
PARTS = "(m.content if m.content is string else m.content | map(attribute='text') | join)"
IMAGE_TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image>"}
IMAGES = {"image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor"}
LONG = ("Who looks on?", "The cat.", "What is the weather like?", "It is a sunny day.")  # two turns
KINDS = ("sft", "reward", "dpo", "ppo")


@dataclass(frozen=True)
class Export:
    """An export and, with LoRA, its adapter."""

    base: str
    kind: str
    folder: Path
    adapter: Path | None

    @property
    def name(self) -> str:
        return f"{self.base} {self.kind}{' lora' * bool(self.adapter)}"


def build_llama_tokenizer() -> LlamaTokenizer:
    """A tokenizer of Llama 2's kind: pieces, single bytes for the rest, <s> before a text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=60, show_progress=False)
    core.train_from_iterator([text for row in TALK.items() for text in (row[0], *row[1])], trainer)
    learnt = json.loads(core.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = LlamaTokenizer(
        vocab=vocab, merges=[tuple(pair) for pair in learnt["merges"]], add_bos_token=True
    )
    tokenizer.model_max_length = 128
    return tokenizer


def build_chat_tokenizer(name: str, make_tokenizer: Callable[[], Any], **tokens: Any) -> Any:
    """A tokenizer with these special tokens and a chat template of tests/unit."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"unk_token": tokenizer.eos_token, **tokens})
    template = (TEMPLATES / f"{name}.jinja").read_text()
    tokenizer.chat_template = template.replace("(m.content | trim)", f"({PARTS} | trim)")
    return tokenizer


def save_bases(folder: Path, make_tokenizer: Callable[[], Any]) -> dict[str, Path]:
    """Folders of the three bases, by name."""
    turn = ["<|im_start|>", "<|im_end|>"]
    tokens = {"bos_token": "<|endoftext|>", "additional_special_tokens": turn}
    of_chat = build_chat_tokenizer("chatml", make_tokenizer, **tokens)
    turn = ["<start_of_turn>", "<end_of_turn>", *IMAGE_TOKENS.values()]
    tokens = {"bos_token": "<bos>", "additional_special_tokens": turn}
    of_image = build_chat_tokenizer("gemma_3", make_tokenizer, **tokens)
    of_bare = build_llama_tokenizer()
    torch.manual_seed(0)
    chat, bare = (tiny_config("llama", len(tokenizer)) for tokenizer in (of_chat, of_bare))
    chat.rope_parameters = LLAMA3_ROPE
    bare.update({"bos_token_id": 1, "eos_token_id": 2})
    model = LlamaForCausalLM(chat)
    model.generation_config.eos_token_id = [0, 5]
    image = Gemma3ForConditionalGeneration(tiny_gemma3_config(len(of_image)))
    return {
        "chat": _save(folder / "chat", model, of_chat),
        "bare": _save(folder / "bare", LlamaForCausalLM(bare), of_bare),
        "image": _save(folder / "image", image, of_image),
    }


def _save(folder: Path, model: PreTrainedModel, tokenizer: Any) -> Path:
    """Save a base as it was published, before transformers 5."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _edit(folder / "config.json", add_older_names)
    if hasattr(model.config, "vision_config"):
        weights = load_file(folder / "model.safetensors")
        older = {name.replace("vision_tower", "vision_tower.vision_model"): w for name, w in weights.items()}
        save_file(older, folder / "model.safetensors", {"format": "pt"})
        (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES))
        (folder / "processor_config.json").write_text('{"processor_class": "Gemma3Processor"}')
        tokens = {"extra_special_tokens": IMAGE_TOKENS}
        _edit(folder / "tokenizer_config.json", lambda content: content.update(tokens))
    return folder


def chat(*texts: str) -> list[dict[str, str]]:
    """Messages of a user and an assistant in turn."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def build_jobs(base: Path, folder: Path, rows: Path, lora: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Jobs of the four programs on a base, the later ones on the exports of the earlier."""
    flags = {"data_path": rows, "data_output_path": folder / "cache", "eval_fraction": 0.0}
    flags |= {"save_interval": 0, "lr_scheduler_type": "constant"}
    ranked = flags | {"max_seq_len": 96, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    ranked |= {"lora_dim": lora, "lora_learning_rate": 1e-2}
    sft, reward = (folder / kind / "export" for kind in KINDS[:2])
    sft_rows = {"data_split": "1,0,0", "sft_only_data_path": rows.with_name("long.jsonl")}
    sft_rows |= {"per_device_train_batch_size": 5}
    yield 1, ranked | sft_rows | {"model_name_or_path": base, "num_train_epochs": 100}
    yield 2, ranked | {"model_name_or_path": base, "data_split": "0,1,0", "num_train_epochs": 8}
    dpo = {"loss": "dpo", "model_name_or_path": sft, "data_split": "0,1,0", "num_train_epochs": 2}
    yield 2, ranked | dpo | {"learning_rate": 1e-4, "lora_learning_rate": 1e-4}
    ppo = {"actor_model_name_or_path": sft, "critic_model_name_or_path": reward, "data_split": "0,0,1"}
    ppo |= {"per_device_generation_batch_size": 4, "per_device_training_batch_size": 4}
    ppo |= {"max_prompt_seq_len": 48, "max_answer_seq_len": 16, "actor_learning_rate": 1e-4}
    yield 3, flags | ppo | {"actor_lora_dim": lora, "actor_lora_learning_rate": 1e-4}


def make_exports(folder: Path, make_tokenizer: Callable[[], Any], forks: ForkServer) -> list[Export]:
    """All exports."""
    talk = [{"prompt": q, "chosen": good, "rejected": bad} for q, (good, bad) in TALK.items()]
    rows = write_rows(folder / "rows.jsonl", talk)
    write_rows(folder / "long.jsonl", [{"messages": chat(*LONG)}])
    exports = []
    for name, base in save_bases(folder / "bases", make_tokenizer).items():
        for lora in (0, 16):
            output = folder / f"{name}{'-lora' * bool(lora)}"
            jobs = zip(KINDS, build_jobs(base, output, rows, lora), strict=True)
            done = forks.run_all([(n, flags | {"output_dir": output / kind}) for kind, (n, flags) in jobs])
            assert done.code == 0, done.text()
            for kind in KINDS:
                adapter = output / kind / "adapter"
                made = Export(name, kind, output / kind / "export", adapter if adapter.is_dir() else None)
                assert bool(made.adapter) == bool(lora) and made.folder.is_dir(), done.text()
                exports.append(made)
    return exports
