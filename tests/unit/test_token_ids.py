"""A vocabulary that leaves ids out: what bounds an id is the highest one, never the number of tokens."""

import json

import pytest
import torch
from tiny_configs import tiny_config
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from common.data.chat_template import build_template
from common.data.tokenizer import num_token_ids
from common.models.loading import ModelOptions
from common.programs.training_loop import load_causal_lm
from common.runs.export import save_export
from serving.answering import Answerer, Sampling
from step3_ppo.arguments import PPOArguments
from step3_ppo.build_roles import sampling_options

EOS_ID = 400


@pytest.fixture(scope="module")
def gapped(tiny_tokenizer) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with an end of turn far behind its last token."""
    core = json.loads(tiny_tokenizer.backend_tokenizer.to_str())
    core["model"]["vocab"]["<|turn|>"] = EOS_ID
    token = {"content": "<|turn|>", "special": True, "normalized": False}
    core["added_tokens"].append(
        {"id": EOS_ID, "single_word": False, "lstrip": False, "rstrip": False} | token
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(core)), eos_token="<|turn|>"
    )
    made.pad_token = made.eos_token
    assert len(made) < made.eos_token_id == EOS_ID
    return made


def test_num_token_ids_is_set_by_the_highest_id(gapped, tiny_tokenizer):
    assert num_token_ids(gapped) == EOS_ID + 1
    assert num_token_ids(tiny_tokenizer) == len(tiny_tokenizer)


def test_every_id_can_be_sampled_scored_and_exported(gapped, tmp_path):
    AutoModelForCausalLM.from_config(tiny_config("llama", len(gapped))).save_pretrained(tmp_path / "base")
    model = load_causal_lm(ModelOptions(str(tmp_path / "base")), num_token_ids(gapped))
    assert model.get_output_embeddings().weight.shape[0] == EOS_ID + 1
    args = PPOArguments(actor_model_name_or_path="a", data_path=["a"])
    assert sampling_options(args, gapped).num_valid_tokens == EOS_ID + 1

    answerer = Answerer(model.eval(), build_template("plain", gapped), Sampling(2), seed=1)
    scores = answerer.score([5, EOS_ID, 6], 1)
    assert scores[0].logprob is None and all(score.logprob > -1e4 for score in scores[1:])

    model.num_exported_rows = len(gapped)  # of a model whose vocabulary was not grown by us
    save_export(tmp_path / "export", model, gapped)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert exported.config.vocab_size == EOS_ID + 1
    torch.testing.assert_close(exported.lm_head.weight, model.lm_head.weight)
