"""Loading: vocabulary growth, LoRA targets, dropout, positions."""

import pytest
import torch
from plain_logits import compute_logits
from tiny_configs import CONFIGS, NOISY, tiny_config
from transformers import AutoModelForCausalLM, DbrxConfig, PreTrainedConfig

from common.engine.ds_config import build_optimizer
from common.models.loading import ModelOptions, build_position_ids, init_weight, load_causal_lm, set_dropout
from common.models.lora import LoraOptions, add_lora, linear_module_names, lora_targets
from common.models.model_inputs import build_model_inputs
from common.models.value_model import ScoreHead, has_saved_head, load_value_model

NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]


@pytest.mark.parametrize(  # tied and untied embeddings
    ("family", "num_tokens", "multiple", "rows"),
    [("gpt2", 300, 1, 320), ("llama", 323, 1, 323), ("gpt2", 323, 8, 328), ("llama", 320, 96, 384)],
)
def test_the_vocabulary_only_grows_and_new_tokens_begin_as_the_mean(
    family, num_tokens, multiple, rows, tiny_model_folder
):
    folder = tiny_model_folder(family)
    plain = load_causal_lm(ModelOptions(folder), 320)
    old = (plain.get_input_embeddings().weight, plain.get_output_embeddings().weight)
    model = load_causal_lm(ModelOptions(folder, pad_vocab_multiple=multiple), num_tokens)
    for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert embedding.weight.shape[0] == rows
        assert embedding.weight[:320].equal(old[embedding is model.get_output_embeddings()])
        for new in embedding.weight[320:]:
            torch.testing.assert_close(new, embedding.weight[:320].mean(0))
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert is_tied == (family == "gpt2")
    assert model.num_exported_rows == max(320, num_tokens)


def make_noisy(config) -> None:
    """Give every number of a configuration that is a dropout or its like the value 0.5."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            make_noisy(value)
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.5)


def two_passes(model) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(1, 17).view(2, 8)
    return tuple(compute_logits(model.train(), ids, torch.ones_like(ids)) for _ in range(2))


@pytest.mark.parametrize("family", CONFIGS | NOISY)
def test_dropout_is_set_everywhere(family, tmp_path):
    torch.manual_seed(0)
    config = tiny_config(family, 64)
    make_noisy(config)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for dropout, are_equal in [(0.0, True), (0.5, False), (None, False)]:
        first, second = two_passes(load_causal_lm(ModelOptions(str(tmp_path), dropout=dropout), 64))
        assert first.equal(second) == are_equal, f"two passes in training with dropout {dropout}"


def test_dropout_of_a_part_is_set_and_other_noise_only_turned_off():
    for dropout in (0.3, 0.0):
        config = DbrxConfig(ffn_config={"moe_jitter_eps": 0.2})
        set_dropout(config, dropout)
        assert (config.resid_pdrop, config.attn_config.attn_pdrop) == (dropout, dropout)
        assert config.ffn_config.moe_jitter_eps == (0.2 if dropout else 0.0)


def test_the_embedding_of_pad_is_trained_where_a_row_has_it(tmp_path):
    config = tiny_config("llama", 64)
    config.pad_token_id = 5
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_causal_lm(ModelOptions(str(tmp_path)), 64)
    model(input_ids=torch.tensor([[3, 5, 7]])).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad[5].abs().max() > 0


def test_a_dropout_that_no_configuration_names_is_set_too(tiny_model_folder, monkeypatch):
    """Remote code may have a number of its own, in a module or for torch's function."""

    class Noisy(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.drop, self.drop_rate = torch.nn.Dropout(0.5), 0.5

        def forward(self, hidden):
            return torch.nn.functional.dropout(self.drop(hidden), self.drop_rate, self.training)

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP", Noisy)
    monkeypatch.setattr("common.models.loading.load_weights", from_config)
    models = [load_causal_lm(ModelOptions(tiny_model_folder("llama"), dropout=p), 320) for p in (0.0, None)]
    (first, second), (third, fourth) = map(two_passes, models)
    assert first.equal(second) and not third.equal(fourth)


@pytest.mark.parametrize(
    ("family", "dropout"), [("llama", None), ("gpt2", 0.0), ("gpt2", None), ("opt", 0.5)]
)
def test_layers_keep_no_random_state_for_their_second_pass_without_dropout(
    family, dropout, tiny_model_folder, monkeypatch
):
    kept, get_state = [], torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: kept.append(1) or get_state())
    found = []
    for checkpointing in (False, True):
        options = ModelOptions(
            tiny_model_folder(family), dropout=dropout, gradient_checkpointing=checkpointing
        )
        model = load_causal_lm(options, 320).train()
        torch.manual_seed(1)
        kept.clear()
        model(torch.arange(1, 17).view(2, 8)).logits.square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))
    assert bool(kept) == bool(dropout is None and family == "gpt2" or dropout)


def from_config(auto_class, name_or_path, *, config, **more):
    return auto_class.from_config(config)


def test_lora_targets_are_chosen_by_a_part_of_their_names():
    assert lora_targets(NAMES, "auto") == NAMES
    assert lora_targets(NAMES, "layers.1.") == NAMES[2:] and lora_targets(NAMES, "q_proj") == NAMES[:1]
    assert lora_targets(NAMES, r"layers\.[1-9]") == NAMES[2:]  # no part of a name: an expression
    candidates = "model.layers., q_proj, up_proj"
    with pytest.raises(ValueError, match=f"--lora_module_name 'decoder.' matches no .* {candidates}"):
        lora_targets(NAMES, "decoder.")
    with pytest.raises(ValueError, match="matches no linear layer"):
        lora_targets(NAMES, "proj(")  # no expression either


@pytest.mark.parametrize("family", ["opt", "gpt2", "gpt_neox", "bloom", "llama", "qwen2"])
def test_lora_adapts_every_linear_layer_but_the_head(family, tiny_model_folder):
    model = load_causal_lm(ModelOptions(tiny_model_folder(family)), 320)
    names = linear_module_names(model)
    assert len(names) >= 8 and not any("lm_head" in n or "embed_out" in n for n in names)
    adapted = add_lora(model, LoraOptions(dim=2))
    trained = [n for n, p in adapted.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * len(names) and all("lora_" in n for n in trained)
    model = load_causal_lm(ModelOptions(tiny_model_folder(family)), 320)
    adapted = add_lora(model, LoraOptions(dim=2, only_optimize_lora=False))
    frozen = [n for n, p in adapted.named_parameters() if not p.requires_grad]
    assert len(frozen) >= len(names) and all(".base_layer." in n for n in frozen)


@pytest.mark.parametrize(("alpha", "scaling"), [(0.0, 1.0), (6.0, 3.0)])
@pytest.mark.parametrize("family", ["gpt2", "llama"])  # whose matrices lie the other way round
def test_an_adapted_model_is_one_with_alpha_by_dim_times_the_factors_added(
    family, alpha, scaling, tiny_model_folder
):
    plain, model = (load_causal_lm(ModelOptions(tiny_model_folder(family), dropout=0.0), 320) for _ in "ab")
    adapted = add_lora(model, LoraOptions(dim=2, alpha=alpha))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, module in adapted.get_base_model().named_modules():
            if hasattr(module, "lora_B"):
                a, b = module.lora_A["default"].weight, module.lora_B["default"].weight.normal_(std=0.1)
                delta = scaling * b @ a
                plain.get_submodule(name).weight += delta.T if family == "gpt2" else delta
    ids = torch.arange(1, 9).view(1, 8)
    found, expected = (compute_logits(m.eval(), ids, torch.ones_like(ids)) for m in (adapted, plain))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_lora_begins_as_no_change_and_does_not_depend_on_what_was_sampled_before(tiny_model_folder):
    ids = torch.arange(1, 9).view(1, 8)
    logits, factors = [], []
    for draws in (0, 5):
        torch.manual_seed(0)
        torch.rand(draws)
        model = load_causal_lm(ModelOptions(tiny_model_folder("llama"), dropout=0.0), 320).eval()
        adapted = add_lora(model, LoraOptions(dim=2), seed=7).eval()
        logits.append(compute_logits(adapted, ids, torch.ones_like(ids)))
        factors.append([p for n, p in adapted.named_parameters() if "lora_A" in n][0])
    plain = load_causal_lm(ModelOptions(tiny_model_folder("llama"), dropout=0.0), 320).eval()
    assert logits[0].equal(compute_logits(plain, ids, torch.ones_like(ids)))
    assert factors[0].equal(factors[1]) and factors[0].std() > 0


def test_a_new_weight_depends_on_seed_and_name_alone():
    weights = [torch.nn.Parameter(torch.zeros(3, 4)) for _ in range(4)]
    for weight, (name, seed) in zip(weights, [("a", 1), ("a", 1), ("b", 1), ("a", 2)], strict=True):
        init_weight(weight, name, std=1.0, seed=seed)
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2]) and not weights[0].equal(weights[3])


def test_positions_count_real_tokens_from_either_side():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    assert build_position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]


def test_a_new_score_head_is_seeded_and_a_saved_one_is_kept(tiny_model_folder, tmp_path):
    folder = tiny_model_folder("llama")
    heads = [load_value_model(ModelOptions(folder), 320, seed=s).classifier.score for s in (1, 1, 2)]
    assert heads[0].weight.equal(heads[1].weight) and not heads[0].weight.equal(heads[2].weight)
    assert isinstance(heads[0], ScoreHead) and not has_saved_head(folder)
    model = load_value_model(ModelOptions(folder), 320, seed=1)
    model.classifier.save_pretrained(tmp_path)
    assert has_saved_head(str(tmp_path))
    assert load_value_model(ModelOptions(str(tmp_path)), 320, seed=9).classifier.score.weight.equal(
        heads[0].weight
    )


def test_values_are_fp32_from_bf16_weights(tiny_model_folder):
    model = load_value_model(ModelOptions(tiny_model_folder("llama"), dtype="bf16"), 320)
    values = model(build_model_inputs(torch.tensor([3, 4, 5]), torch.tensor([3]), is_packed=False))
    assert values.dtype == torch.float32 and values.shape == (3,)
    assert not values.equal(values.bfloat16().float()), "a score rounded to bf16 has lost its digits"


@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom", "gpt_neox"])
def test_matrices_decay_biases_and_norms_do_not_and_adapters_have_their_own_rate(family, tiny_model_folder):
    model = load_causal_lm(ModelOptions(tiny_model_folder(family)), 320)
    model = add_lora(model, LoraOptions(dim=2, only_optimize_lora=False))
    optimizer = build_optimizer(model, learning_rate=1e-3, lora_learning_rate=2e-3, weight_decay=0.1)
    assert all(group["betas"] == (0.9, 0.95) for group in optimizer.param_groups)
    found = {p: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    trained = {p: name for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == trained.keys()
    for parameter, name in trained.items():
        expected = (2e-3 if "lora_" in name else 1e-3, 0.1 if parameter.dim() == 2 else 0.0)
        assert found[parameter] == expected, name
    assert {p.dim() for p in trained} == {1, 2}
