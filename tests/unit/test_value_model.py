"""Values per token and the score of a sequence, on models that transformers also knows."""

import pytest
import torch
import transformers
from tiny_configs import FAMILIES

from common.models.loading import ModelOptions, plain_model
from common.models.lora import LoraOptions
from common.models.model_inputs import build_model_inputs
from common.models.value_model import compute_scores, has_saved_head, load_value_model, saved_pooling

IDS = torch.tensor([[5, 6, 7, 8, 9], [11, 12, 13, 14, 15]])


def load(folder: str, **options):
    return load_value_model(ModelOptions(folder, dropout=0.0), 320, seed=1, **options).eval()


def save_classifier(folder, config_class, **options) -> str:
    config = config_class(vocab_size=320, num_hidden_layers=1, hidden_size=16, **options)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return str(folder)


def values_of(model, rows):
    """The values of all tokens, laid end to end, in one pass."""
    return model(
        build_model_inputs(torch.cat(list(rows)), torch.tensor([len(row) for row in rows]), is_packed=False)
    )


def test_a_score_is_the_value_at_the_last_real_token(tiny_model_folder):
    model = load(tiny_model_folder("llama"))
    rows = [IDS[0], IDS[1, :2], IDS[0, :1]]
    inputs = build_model_inputs(torch.cat(rows), torch.tensor([5, 2, 1]), is_packed=False)
    assert inputs.last_slots.tolist() == [4, 6, 10]
    scores = model(inputs, inputs.last_slots)
    alone = torch.stack([values_of(model, [row])[-1] for row in rows])
    torch.testing.assert_close(scores, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
def test_a_mean_is_over_the_response_alone(is_packed, tiny_model_folder):
    """Against a plain loop in float64; 0 is EOS and PAD, and stands in prompts too."""
    model = load(tiny_model_folder("llama"), pooling="mean")
    prompts = [[5, 6, 0, 7], [5, 6, 0, 7], [8], [9, 10, 11, 12, 13, 0]]
    responses = [[21, 22, 0], [21, 23, 24, 25, 0], [26, 27, 28, 0], [0]]
    rows = [torch.tensor(prompt + response) for prompt, response in zip(prompts, responses, strict=True)]
    expected = []
    for row, response in zip(rows, responses, strict=True):
        values = values_of(model, [row]).double().tolist()
        expected.append(sum(values[-len(response) :]) / len(response))
    lengths = torch.tensor(list(map(len, rows)))
    parts = [[False] * len(p) + [True] * len(r) for p, r in zip(prompts, responses, strict=True)]
    inputs = build_model_inputs(
        torch.cat(rows), lengths, is_packed=is_packed, group_sizes=torch.tensor([2, 1, 1])
    )
    scores = compute_scores(model, inputs, lengths, torch.tensor(sum(parts, [])))
    torch.testing.assert_close(scores.double(), torch.tensor(expected).double(), atol=1e-6, rtol=1e-5)
    last = model(inputs, inputs.last_slots)
    assert (scores - last)[:3].abs().min() > 1e-3 and scores[3].isclose(last[3], atol=1e-6)


def test_a_folder_says_how_it_scores_and_no_other_way_is_known(tiny_model_folder, tmp_path):
    folder = tiny_model_folder("llama")
    assert load(folder).pooling == saved_pooling(folder) == "last"
    load(folder, pooling="mean").classifier.save_pretrained(tmp_path)
    assert load(str(tmp_path)).pooling == saved_pooling(str(tmp_path)) == "mean"
    assert load(str(tmp_path), pooling="last").pooling == "last"
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"mean"', '"median"'))
    with pytest.raises(ValueError, match="reward_pooling 'median'; known: last, mean"):
        load(str(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_and_what_it_holds_change_no_value(family, tiny_model_folder):
    model = load(tiny_model_folder(family))
    rows = [IDS[0, :2], IDS[1], IDS[0, :3]]
    alone = torch.cat([values_of(model, [row]) for row in rows])
    assert alone.shape == (10,) and alone.std() > 1e-3
    inputs = build_model_inputs(torch.cat(rows), torch.tensor([2, 5, 3]), is_packed=False)
    is_padding = ~torch.isin(torch.arange(inputs.input_ids.numel()), inputs.token_slots)
    for pad in (0, 77):
        inputs.input_ids.view(-1)[is_padding] = pad
        torch.testing.assert_close(model(inputs), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_model_gives_its_trunk_and_the_head_is_linear_on_its_last_states(family, tiny_model_folder):
    folder = tiny_model_folder(family)
    model = load(folder)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    states = base(IDS, output_hidden_states=True).hidden_states[-1]
    head = plain_model(model.classifier).score.weight
    torch.testing.assert_close(values_of(model, IDS), (states @ head.T).flatten())


def test_the_head_trains_beside_the_adapters(tiny_model_folder):
    model = load(tiny_model_folder("llama"), lora=LoraOptions(dim=2))
    trained = {n for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n}
    assert len(trained) == 1 and trained.pop().endswith("score.weight")


def test_a_family_without_a_score_head_is_named(tmp_path):
    options = {"num_attention_heads": 2, "intermediate_size": 16, "num_labels": 1}
    folder = save_classifier(tmp_path / "bert", transformers.BertConfig, **options)
    with pytest.raises(ValueError, match="BertForSequenceClassification has no linear `score` head"):
        load(folder)


def test_two_labels_are_no_score(tmp_path):
    options = {"num_attention_heads": 2, "intermediate_size": 16, "num_labels": 2}
    assert not has_saved_head(save_classifier(tmp_path / "m", transformers.LlamaConfig, **options))
