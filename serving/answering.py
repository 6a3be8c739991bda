"""A saved model that responds to conversations, for chat.py, prompt_eval.py and the arena.

# N responses to a prompt, T tokens, V vocabulary, H hidden size
"""

import dataclasses
import functools
import itertools
import random
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from common.data.chat_template import build_template
from common.data.dialogue import Segment, Template
from common.data.example import BadRow, Message, Turn
from common.data.registry import load_source
from common.data.tokenizer import num_token_ids
from common.flags.args import Problems
from common.generation.decode import SamplingOptions
from common.generation.decode_probe import why_not_generated
from common.generation.inference_module import share_weights
from common.generation.request_loop import Request, SharedGenerator, device_turn
from common.models.loading import ModelOptions, compute_hidden, length_limit, load_causal_lm
from common.models.lora import trained_weights
from common.models.model_inputs import build_model_inputs
from common.models.output_head import read_logit_transform
from common.models.saved_adapters import ADAPTER_WEIGHTS, base_of, read_adapter_config
from common.programs import conversation_form, model_checks, startup
from common.ranks import distributed
from common.ranks.failures import first_line
from serving.arguments import AnsweringArguments
from serving.text_stream import Answer, TextStream

_MIN_PROMPT_TOKENS = 8  # reserved for the prompt, whatever the response limit
_ENDLESS_POSITIONS = 4096  # length limit of a model without one (ALiBi); enough for a terminal
_MAX_CHARACTERS = 32  # maximum mean per token; a longer text is rejected before it is tokenised
_SAMPLE_ID_BITS = 48
_POSITIONS_AT_A_TIME = 128  # whose logits are in memory at once


@dataclass(frozen=True)
class Sampling:
    """Sampling options of a response."""

    max_new_tokens: int  # 0: no response, only scores of the prompt
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()  # a response ends before the first of these texts
    seed: int | None = None  # equal seeds give equal responses; None: new random numbers
    num_answers: int = 1


class TokenScore(NamedTuple):
    """Text and log-probability of a token; `top`: those of the likeliest tokens at its position."""

    text: str
    logprob: float | None  # None, as is `top`, for the first token
    top: list[tuple[str, float]] | None


TextCallback = Callable[[int, str], None]  # receives (index of a response, its next text)


class Answerer:
    """A model, its dialogue template, and its default sampling options.

    The key/value cache is kept between calls, and so is the count of responses, which seeds their random
    numbers: with the same `seed` the same sequence of calls gives the same responses, and a repeated question
    gets a new one. `max_length` limits the tokens of prompt and response together. Several threads may call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        template: Template,
        sampling: Sampling,
        *,
        seed: int | None = None,
        max_length: int = 0,
        max_slots: int = 0,
        use_cuda_graphs: bool = True,
    ) -> None:
        """Without `seed`, every Answerer has different random numbers. At most `max_slots` responses are
        generated at once; 0: those of one request. `max_length` 0: as long as the model allows.
        """
        self.model = model
        self.template = template
        self.tokenizer = template.tokenizer
        self.num_token_ids = num_token_ids(self.tokenizer)
        limit, _ = length_limit(model.config, _ENDLESS_POSITIONS)
        self.max_length = min(limit, max_length or limit)
        num_new = max(min(sampling.max_new_tokens, self.max_length - _MIN_PROMPT_TOKENS), 1)
        self.sampling = dataclasses.replace(sampling, max_new_tokens=num_new)
        self.max_prompt_tokens = self.max_length - num_new
        self._seed = seed or 0
        self._sample_ids = itertools.count(secrets.randbits(_SAMPLE_ID_BITS) if seed is None else 0)
        self._shared = SharedGenerator(
            share_weights(model),
            max_slots=max_slots or sampling.num_answers,
            max_length=self.max_length,
            max_new_tokens=num_new,
            use_cuda_graphs=use_cuda_graphs,
        )

    def answer(
        self,
        messages: Sequence[Message],
        *,
        on_text: TextCallback | None = None,
        is_gone: Callable[[], bool] = bool,
    ) -> list[str]:
        """N responses to a conversation.

        A prompt that is too long is shortened (see `Template.shorten`) or truncated. A response has fewer
        than max_new_tokens tokens if the model has too few positions. `on_text`, `is_gone`: see `respond`.
        """
        limit = self.max_prompt_tokens
        segments = self._segments(self.template.shorten(tuple(messages), limit))
        prompt_ids = self.template.encode(segments, limit).input_ids
        return [answer.text for answer in self.respond(prompt_ids, on_text=on_text, is_gone=is_gone)]

    def respond(
        self,
        prompt_ids: list[int],
        sampling: Sampling | None = None,
        *,
        keeps_space: bool = False,
        on_text: TextCallback | None = None,
        is_gone: Callable[[], bool] = bool,
    ) -> list[Answer]:
        """N responses to a prompt, which must leave room for one token (see `why_too_long`).

        White space around a response is stripped unless `keeps_space`. `on_text` receives the texts in chunks
        that add up to the responses; `is_gone` is asked at each token whether to end them. Requests of
        several threads are generated together; each gets the responses that it would get alone.
        """
        sampling = sampling or self.sampling
        streams = [
            TextStream(
                self.tokenizer,
                stop=sampling.stop,
                keeps_space=keeps_space,
                on_text=on_text and functools.partial(on_text, number),
                is_gone=is_gone,
            )
            for number in range(sampling.num_answers)
        ]
        if sampling.max_new_tokens and not is_gone():
            self._generate(prompt_ids, sampling, streams)
        return [stream.finish() for stream in streams]

    def _generate(self, prompt_ids: list[int], sampling: Sampling, streams: list[TextStream]) -> None:
        options = SamplingOptions(
            min(sampling.max_new_tokens, self.sampling.max_new_tokens, self.max_length - len(prompt_ids)),
            stop_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            num_valid_tokens=self.num_token_ids,
            temperature=sampling.temperature or 1.0,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            do_sample=sampling.temperature > 0,
            seed=self._seed if sampling.seed is None else sampling.seed,
        )
        sample_ids = range(len(streams))
        if sampling.seed is None:
            sample_ids = itertools.islice(self._sample_ids, len(streams))
        request = Request(
            prompt_ids,
            list(sample_ids),
            options,
            on_token=lambda index, token_id: streams[index].add([token_id]),
            num_open=len(streams),
        )
        self._shared.run(request)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a whole conversation, up to the start of the response, or to the end of a last message
        of the assistant, which the response continues.

        Raises ValueError if it has too many characters to fit, or if the template cannot render it.
        """
        self._check_characters([message.content for message in messages])
        if self.template.keeps_headers:  # white space unchanged, as other programs render it
            messages = [Turn(*message) for message in messages]
        if messages[-1].role == "assistant":
            segments = self.template.continued(messages)
        else:
            segments = self._segments(messages)
        text = "".join(segment.text for segment in segments)
        for message in messages:
            if message.role == "system" and message.content.strip() not in text:
                raise ValueError(f"the chat template omits a system message: {message.content[:40]!r}")
        return self.template.encode(segments, sys.maxsize).input_ids

    def _segments(self, messages: Sequence[Message]) -> list[Segment]:
        """A conversation whose earlier replies end as in the export's chat template."""
        ends_replies = not self.template.keeps_headers  # a chat template ends them itself
        return self.template.segments(tuple(messages), None, learn_all_turns=ends_replies)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a plain text, as at the start of a row of the plain template.

        Raises ValueError if it has too many characters to fit.
        """
        self._check_characters([text])
        plain = build_template("plain", self.tokenizer)
        return plain.encode([Segment(text, True)], sys.maxsize).input_ids

    def _check_characters(self, texts: Sequence[str]) -> None:
        """Raise ValueError if texts, each with the markers of a turn, have too many characters to fit."""
        num_characters = sum(len(text) + _MAX_CHARACTERS for text in texts)
        if num_characters > (limit := _MAX_CHARACTERS * (self.max_length + 1)):
            raise ValueError(
                f"the prompt has {num_characters} characters, but prompt and answer together may have "
                f"{self.max_length} tokens, about {limit} characters; shorten it"
            )

    def why_too_long(self, prompt_ids: list[int]) -> str:
        """Why a prompt leaves no room for a response; "" if there is room."""
        if len(prompt_ids) < self.max_length:
            return ""
        return (
            f"the prompt has {len(prompt_ids)} tokens, but prompt and answer together may have "
            f"{self.max_length}; shorten it"
        )

    @torch.inference_mode()
    def score(self, token_ids: list[int], num_top: int) -> list[TokenScore]:
        """T scores in fp32 at temperature 1, each with the `num_top` (below V) likeliest tokens.

        Computes between two passes of other requests.
        """
        decode = self.tokenizer.decode
        ids = torch.tensor(token_ids)
        inputs = build_model_inputs(ids, torch.tensor([len(ids)]), is_packed=False)
        logits_of = read_logit_transform(self.model.config).transform
        head = self.model.get_output_embeddings()
        numbers: list[tuple[float, list[float], list[int]]] = []  # logprob, top logprobs, top ids
        with device_turn():  # copies too: another request may be capturing its passes
            inputs, slots = inputs.to(self.model.device, torch.arange(len(ids) - 1))
            hidden = compute_hidden(self.model, inputs)[slots].split(_POSITIONS_AT_A_TIME)  # (T - 1, H)
            for states, expected in zip(hidden, ids[1:, None].split(_POSITIONS_AT_A_TIME), strict=True):
                logprobs = logits_of(head(states).float())[:, : self.num_token_ids].log_softmax(-1).cpu()
                columns = logprobs.gather(1, expected)[:, 0], *logprobs.topk(num_top)
                numbers += zip(*(column.tolist() for column in columns), strict=True)
        # Tokens are decoded outside the turn, so that other requests can use the device.
        scores = [TokenScore(decode(token_ids[:1]), None, None)]
        for token_id, (logprob, values, likeliest) in zip(token_ids[1:], numbers, strict=True):
            top = [(decode([i]), value) for i, value in zip(likeliest, values, strict=True)]
            scores.append(TokenScore(decode([token_id]), logprob, top))
        return scores


def read_prompts(
    data_path: str, generator: random.Random | None = None
) -> Iterator[tuple[Sequence[Message], str]]:
    """Yield the prompts of a data set with their row ids; a row without a prompt is skipped.

    With a `generator` they come endlessly in random order, each once before any is repeated. Raises
    ValueError if --data_path is not a data set, or has no prompt.
    """
    source = load_source(data_path)
    rows = source.train
    while True:
        num_prompts = 0
        order = generator.sample(range(len(rows)), len(rows)) if generator else range(len(rows))
        for index in order:
            try:
                row = rows[index]
                examples = source.adapter.to_examples(row)
            except BadRow:
                continue
            if prompt := next((example.prompt for example in examples if example.prompt), None):
                num_prompts += 1
                yield prompt, rows.row_id(index, row)
        if not num_prompts:
            raise ValueError(f"--data_path {source.name} has no prompts; use a data set of questions")
        if generator is None:
            return


def load_template(
    flag_name: str,
    path: str,
    args: AnsweringArguments,
    problems: Problems,
    *,
    trained_path: str = "",
    is_ranker: bool = False,
) -> Template | None:
    """The template of the model at `path`; None after adding the problem if the model cannot respond (a
    ranker: score).

    It is --template, or else that with which the model at `trained_path` (empty: at `path`) was trained.
    """
    config = model_checks.check_model(flag_name, path, args, problems, takes_adapter=True)
    if config is None:
        return None
    num_problems = len(problems.messages)
    model_checks.check_family(flag_name, config, args, problems, is_ranker=is_ranker)
    probe = functools.partial(why_not_generated, config, trusts_code=args.trust_remote_code)
    if not is_ranker and len(problems.messages) == num_problems and (reason := probe()):
        own_cure = f"use transformers' own `generate`: `transformers chat {path}`"
        cure = "use a model of another family" if probe(by_transformers=True) else own_cure
        problems.add(f"{flag_name} {path}: {reason}; {cure}")
    tokenizer = model_checks.check_tokenizer(flag_name, path, args, problems)
    startup.print_note(*model_checks.check_new_tokens(flag_name, config, tokenizer, args, problems))
    args_copy = dataclasses.replace(args)  # find_template changes it; each model has its own template
    template, notes = conversation_form.find_template(
        flag_name, trained_path or path, args_copy, tokenizer, problems
    )
    startup.print_note(*notes)
    return template


def load_answerer(
    path: str, template: Template, args: AnsweringArguments, sampling: Sampling, **limits: int | None
) -> Answerer:
    """The model at `path`, ready to respond; `limits`: those of Answerer, and its `seed`.

    Raises ValueError if its weights cannot be loaded.
    """
    startup.print_note(*startup.resolve_dtype(args))
    base = base_of(path)
    options = ModelOptions(
        base,
        dtype=distributed.dtype_name(args.dtype),
        dropout=0.0,
        trust_remote_code=args.trust_remote_code,
    )
    model = load_causal_lm(options, num_token_ids(template.tokenizer))
    if base != path:
        model = merge_adapter(model, path)
    uses_graphs = not args.no_cuda_graphs
    return Answerer(model.to(distributed.device()), template, sampling, use_cuda_graphs=uses_graphs, **limits)


def merge_adapter(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """The model with a LoRA adapter merged into its weights; pickled adapters are not supported.

    Raises ValueError if `path` is not a LoRA adapter, or not one of this model.
    """
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict  # a second, for adapters only

    config = read_adapter_config(path)
    try:
        adapted = get_peft_model(model, LoraConfig(**config), autocast_adapter_dtype=False)
        loaded = set_peft_model_state_dict(adapted, load_file(Path(path) / ADAPTER_WEIGHTS))
    except (OSError, SafetensorError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: the adapter cannot be loaded: {first_line(error)}") from error
    missing = [name for name in loaded.missing_keys if "lora_" in name]
    if missing or loaded.unexpected_keys:
        names = [*missing, *loaded.unexpected_keys]
        raise ValueError(f"{path} is not an adapter of its base model: {len(names)} weights do not match")
    with torch.no_grad():  # in the same way as in exports, so that the bits are equal
        for weight in trained_weights(adapted).values():
            if weight.lora_a is not None:
                weight.parameter.copy_(weight.merged())
                weight.lora_b.zero_()
    return adapted.merge_and_unload()  # also the parts that we never train: DoRA magnitudes, embeddings
