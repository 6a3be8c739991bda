"""Any sequence classifier as a reward: a decoder without PAD, an encoder, RoBERTa's shifted positions."""

import pytest
import torch
import transformers
from tiny_configs import tiny_config
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from step3_ppo.arguments import PPOArguments
from step3_ppo.rewards.classifier_reward import ClassifierReward
from step3_ppo.rewards.text_rewards import Answers

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *"abcdefghijklmnopqrstuvwxyz", " "]
# RoBERTa's positions begin behind PAD: one fewer than the table has.
ENCODERS = {"bert": (transformers.BertConfig, 24), "roberta": (transformers.RobertaConfig, 25)}
ENCODER = {"vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER |= {"intermediate_size": 64, "initializer_range": 0.5, "pad_token_id": 0}
ANSWERS = Answers(["hello there", "a", "", "how are"], [" you", "bc", "x", " you all today"], [{}] * 4)


def encoder_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, between [CLS] and [SEP]; without EOS, as BERT's."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


def save(folder, config, tokenizer, **labels) -> str:
    torch.manual_seed(0)
    for name, value in labels.items():
        setattr(config, name, value)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def folder_of(tmp_path, tiny_tokenizer):
    def make(family: str, **labels) -> str:
        folder = tmp_path / family
        if family in ENCODERS:
            config_class, num_positions = ENCODERS[family]
            config = config_class(**ENCODER, max_position_embeddings=num_positions)
            return save(folder, config, encoder_tokenizer(), **labels)
        config = tiny_config(family, len(tiny_tokenizer))
        config.initializer_range = 0.5
        return save(folder, config, tiny_tokenizer, **labels)

    return make


def reward_of(target: str, *, dtype: str = "fp32", **flags) -> ClassifierReward:
    return ClassifierReward(target, PPOArguments(dtype=dtype, **flags))


def logits_alone(folder: str, text: str, max_tokens: int | None = None) -> torch.Tensor:
    """Return what transformers says to one text by itself, cut on its left."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, truncation_side="left")
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    inputs = tokenizer(text, return_tensors="pt", truncation=bool(max_tokens), max_length=max_tokens)
    with torch.no_grad():
        return model(**inputs).logits[0]


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "roberta"])
def test_padding_changes_no_score(family, folder_of):
    folder = folder_of(family, num_labels=3)
    texts = [prompt + response for prompt, response in zip(ANSWERS.prompts, ANSWERS.responses, strict=True)]
    expected = torch.stack([logits_alone(folder, text) for text in texts])[:, -1]
    assert expected.std() > 1e-2
    for batch_size in (1, 2, 4):
        reward = reward_of(folder, reward_batch_size=batch_size)
        torch.testing.assert_close(torch.tensor(reward.score(ANSWERS)), expected, atol=1e-5, rtol=1e-5)


def test_a_reward_model_of_another_pooling_is_refused(folder_of):
    with pytest.raises(ValueError, match="of --reward_pooling mean.*; give --reward model:"):
        reward_of(folder_of("llama", num_labels=1, reward_pooling="mean"))


def test_an_eos_that_ends_a_text_is_read(folder_of, tiny_tokenizer):
    """PAD = EOS would make transformers read the token before it."""
    folder = folder_of("llama", num_labels=1)
    answers = Answers(["hello", "how are you"], [tiny_tokenizer.eos_token, ""], [{}] * 2)
    texts = ["hello" + tiny_tokenizer.eos_token, "how are you"]
    expected = [float(logits_alone(folder, text)) for text in texts]
    assert reward_of(folder).score(answers) == pytest.approx(expected, abs=1e-5)
    assert abs(expected[0] - float(logits_alone(folder, "hello"))) > 1e-2
    assert reward_of(folder, dtype="bf16").model.dtype == torch.bfloat16


@pytest.mark.parametrize(("family", "limit"), [("llama", 128), ("bert", 24), ("roberta", 24)])
def test_a_long_text_loses_its_beginning(family, limit, folder_of):
    folder = folder_of(family, num_labels=1)
    reward = reward_of(folder)
    assert reward.max_tokens == limit
    long = "".join("abcdefghijklmnopqrstuvwxyz"[i * i % 26] for i in range(400))
    (score, other_beginning, other_end) = reward.score(
        Answers([long, "zzz" + long, long], ["the end", "the end", "another end"], [{}] * 3)
    )
    assert score == pytest.approx(float(logits_alone(folder, long + "the end", limit)), abs=1e-5)
    assert other_beginning == pytest.approx(score, abs=1e-5)
    assert abs(other_end - score) > 1e-3


def test_a_label_is_found_by_name_and_by_number(folder_of):
    names = {0: "negative", 1: "neutral", 2: "positive"}
    folder = folder_of("bert", num_labels=3, id2label=names, label2id={v: k for k, v in names.items()})
    expected = logits_alone(folder, "abc").tolist()
    one = Answers(["a"], ["bc"], [{}])
    for label, index in (("negative", 0), ("1", 1), (None, 2)):
        target = folder if label is None else f"{folder}:{label}"
        assert reward_of(target).score(one) == pytest.approx([expected[index]], abs=1e-5)
    for label in ("glad", "3"):
        with pytest.raises(ValueError) as error:
            reward_of(f"{folder}:{label}")
        assert f"no label {label!r}; choose from 0 negative, 1 neutral, 2 positive" in str(error.value)
