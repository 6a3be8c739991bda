"""Every causal family of the installed transformers, tried in small: `python tests/family_sweep.py`
writes docs/families.md.

A family is tried by its class's own default configuration, cut to two layers and made narrow: losses and
gradients of padded and packed rows, both ways to generate, values, and what an export gives when it is read.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run as a script: import from the repository root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from common.generation.decode_probe import why_not_generated
from common.models.attention import takes_packed
from common.models.family_probe import plain_logits, probe_family, small_model
from common.models.loading import keep_composite
from common.runs.export import save_export

PAGE = Path(__file__).resolve().parents[1] / "docs" / "families.md"
FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SAMPLE = FAMILIES[::8]  # what the fast tests try
_GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_NARROW = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96} | _GROUPED
_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
_INDEXER = {"indexer_budget": 64, "indexer_compress_ratio": 4, "indexer_n_heads": 2}
_INDEXER |= {"indexer_kv_heads": 1, "indexer_head_dim": 256}
# Families whose defaults make no model, or none that can be narrowed.
OWN: dict[str, dict[str, Any]] = {
    "codegen": {"n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 8, "vocab_size": 96}
    | {"n_positions": 64, "bos_token_id": 0, "eos_token_id": 1},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    | {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 8},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}
    | {"n_group": 1, "topk_group": 1},
    "falcon_h1": _NARROW | {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"is_decoder": True, "attn_layers": ["local", "lsh"], "hash_seed": 0, "num_buckets": 2}
    | {"lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4, "axial_pos_embds": False}
    | {"max_position_embeddings": 64},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "zamba": _NARROW
    | {"layers_block_type": ["hybrid", "hybrid"], "num_key_value_heads": 4, "mamba_dt_rank": 4}
    | {"attention_head_dim": 32, "attention_hidden_size": 128},
    "zamba2": _NARROW
    | {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "num_key_value_heads": 4}
    | {"mamba_headdim": 16, "n_mamba_heads": 8, "mamba_ngroups": 1, "mamba_d_state": 16, "chunk_size": 8}
    | {"attention_head_dim": 32, "attention_hidden_size": 128},
}
CAUSES = {
    "head is more": "head",
    "attend to the padding": "padding is seen",
    "changes its weights": "weights change",
    "changes the logits": "other logits",
    "noise of its routers": "noise counts",
}
HEADER = """\
# Families

What becomes of every causal family of transformers {version}, as `python tests/family_sweep.py` finds and
writes it: each is built from its default configuration with two layers and random weights, and what our
passes compute is compared with the class's own `forward`. The same is measured before each load, on a
small replica of the model that is given, in 0.05 to 0.5 seconds: this page is a picture, the
measurement decides.

- **steps 1, 3 and DPO**: *packed*, rows stand end to end; *padded*, they do not; *refused*, what is computed
  would not be the model's; *not tried*, the default configuration gives no small model: rows are padded, and
  a line says that nothing was compared.
- **value model**: reward models and critics; *none*, transformers has no classifier of the family.
- **hybrid engine**: `--enable_hybrid_engine`, chat.py and the arena; *state*, the family keeps a state from
  token to token, and our decoder keys and values alone. **generate**: step 3 without that flag.
- **export**: what plain transformers reads of it gives the same logits.

{counts}

| family | steps 1, 3 and DPO | value model | hybrid engine | generate | export |
|---|---|---|---|---|---|
"""


class Row(NamedTuple):
    """What became of a family."""

    family: str
    policy: str
    value: str = "-"
    hybrid: str = "-"
    generate: str = "-"
    export: str = "-"

    def line(self) -> str:
        return f"| {' | '.join(self)} |"


def sweep(family: str) -> Row:
    """Try a family in every way."""
    how = OWN.get(family, {})
    try:
        config = AutoConfig.for_model(family, **how)
        probe = probe_family(AutoModelForCausalLM, config)
    except Exception as error:  # a default configuration that its own class refuses
        return Row(family, f"not tried ({type(error).__name__})")
    value = probe_family(AutoModelForSequenceClassification, config)
    of_value = "none" if "no classifier" in value.refusal else "refused" if value.refusal else "yes"
    of_value = "not tried" if value.note.endswith("transformers") else of_value
    if "encoder" in probe.refusal:
        return Row(family, "refused (encoder)", of_value)
    if probe.refusal:
        why = probe.refusal.split("random model: ")[1].split(";")[0]
        cause = next((cause for words, cause in CAUSES.items() if words in why), "fails")
        return Row(family, f"refused ({cause})", of_value)
    if probe.note and "could not be tried" in probe.note:
        return Row(family, f"not tried ({probe.note.split('(')[1].split(':')[0]})", of_value)
    slots, plainly = (why_not_generated(config, by_transformers=way) for way in (False, True))
    with torch.no_grad():
        config = AutoConfig.for_model(family, **how)
        model, rows = small_model(AutoModelForCausalLM, config, False)
        keep_composite(model, config, AutoModelForCausalLM)
        of_policy = "packed" if probe.packs and takes_packed(model) else "padded"
        return Row(
            family,
            of_policy,
            of_value,
            "state" if "keeps a state" in slots else "no" if slots else "yes",
            "no" if plainly else "yes",
            export_of(model, rows),
        )


def export_of(model: Any, rows: list[list[int]]) -> str:
    """Whether what plain transformers reads of an export gives the model's logits."""
    expected = [plain_logits(model, row) for row in rows]
    model.num_exported_rows = model.config.get_text_config().vocab_size
    tokenizer = few_tokens()
    with tempfile.TemporaryDirectory() as folder:
        try:
            save_export(Path(folder) / "export", model, tokenizer)
            how = {"attn_implementation": model.config._attn_implementation}
            read = AutoModelForCausalLM.from_pretrained(
                Path(folder) / "export", dtype=torch.float32, **how
            ).eval()
            gaps = [(plain_logits(read, row) - x).abs().max() for row, x in zip(rows, expected, strict=True)]
        except Exception as error:
            return f"fails ({type(error).__name__})"
    return "yes" if max(gaps) < 1e-4 * max(float(x.abs().max()) for x in expected) else "differs"


def few_tokens() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of fewer tokens than a narrow model has."""
    core = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="a"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>")


def build_page(rows: Sequence[Row]) -> str:
    """The text of docs/families.md."""
    kinds = [row.policy.split(" (")[0] for row in rows]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("packed", "padded", "refused", "not tried"))
    ways = {"value models": "value", "by the hybrid engine": "hybrid", "by `generate`": "generate"}
    more = [f"{sum(getattr(row, name) == 'yes' for row in rows)} {words}" for words, name in ways.items()]
    text = f"Of {len(rows)} families: {counts}; {', '.join(more)}."
    page = HEADER.format(version=transformers.__version__, counts=text)
    return page + "".join(f"{row.line()}\n" for row in rows)


def main() -> None:
    """Write the page."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = []
    for family in FAMILIES:
        rows.append(sweep(family))
        print(rows[-1].line(), flush=True)
    PAGE.write_text(build_page(rows))


if __name__ == "__main__":
    main()
