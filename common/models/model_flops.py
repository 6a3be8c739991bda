"""FLOPs of forward and backward passes, and the peak FLOP/s of devices."""

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from common.models.attention import narrowed_modules
from common.models.four_bit import whole_shape
from common.models.loading import DTYPES, plain_model
from common.models.lora import trained_weights
from common.models.model_inputs import ModelInputs
from common.ranks import distributed
from common.ranks.devices import DEVICES, kind_of
from common.ranks.step_costs import COSTS

MEASURED_SECONDS = 0.25
# Rows, inputs, outputs of a linear layer. The fastest shape depends on the number of threads.
CPU_PRODUCTS = ((512, 512, 512), (1024, 1024, 1024), (2048, 512, 2048))
GPU_PRODUCTS = ((4096, 4096, 4096),)


class ModelFlops:
    """FLOPs of passes through a transformers model, counted from its shapes: matrices and attention.

    A token is multiplied by every matrix of the body once, and a scored token by the output head: 2 FLOPs per
    parameter. Only the experts that a token is routed to count, and their adapters. Attention counts every
    pair of tokens of a sequence in both directions, as is usual, even under a window; tokens shared by
    sequences count once. Not counted: rows of the last layer that are neither used nor computed, padding,
    recomputed activations and recomputed logits.
    """

    def __init__(self, model: nn.Module, head: nn.Module) -> None:
        """`model` is a transformers model or its PEFT wrapper; `head` its linear head."""
        plain = plain_model(model)
        text = plain.config.get_text_config()
        embeddings = {id(m.weight) for m in plain.modules() if isinstance(m, nn.Embedding)}
        narrowed = [m for parent in plain.modules() for m in narrowed_modules(parent)]
        of_narrowed = {id(parameter) for module in narrowed for parameter in module.parameters()}
        # GPU kernels compute the last layer's attention in full.
        self.narrowed_layers = bool(narrowed) and not distributed.has_gpu()
        self.num_layers = text.num_hidden_layers
        self.body = self.trained_body = self.narrowed = self.trained_narrowed = 0.0
        factors = {id(p): w.num_stacked for w in trained_weights(model).values() for p in w.tensors()[1:]}
        for parameter in model.parameters():
            shape = whole_shape(parameter)
            if len(shape) < 2 or id(parameter) in embeddings or parameter is head.weight:
                continue
            stacked = shape[0] if len(shape) == 3 else factors.get(id(parameter), 1)
            experts = getattr(text, "num_experts_per_tok", None) if stacked > 1 else None
            numel = shape.numel() * (experts / stacked if experts else 1)
            self.body += numel
            self.trained_body += numel * parameter.requires_grad
            if id(parameter) in of_narrowed:
                self.narrowed += numel
                self.trained_narrowed += numel * parameter.requires_grad
        self.head = whole_shape(head.weight).numel()
        self.trained_head = self.head * head.weight.requires_grad
        self.is_trained = any(p.requires_grad for p in model.parameters())
        layers = text.per_layer_config if text.is_heterogeneous else [text] * text.num_hidden_layers
        self.attention = 2 * sum(map(_attention_width, layers))  # two products: scores, weighted values

    def count(self, inputs: ModelInputs, num_scored: int) -> None:
        """Add a pass over these inputs to the running clock; inputs that need a gradient are trained.

        Its tokens are those of the sequences, however many of them are computed.
        """
        used = inputs.packing.used_slots if inputs.packing else None
        flops = self.of_pass(
            inputs.num_tokens,
            inputs.num_pairs - inputs.num_unused_pairs * self.narrowed_layers / self.num_layers,
            num_scored,
            num_unused=0 if used is None else inputs.num_tokens - len(used),
            is_training=torch.is_grad_enabled(),
        )
        COSTS.count(len(inputs.token_slots), flops)

    def of_pass(
        self, num_tokens: int, num_pairs: float, num_scored: int, *, is_training: bool, num_unused: int = 0
    ) -> float:
        """FLOPs of a forward pass; if `is_training`, with the backward pass that follows.

        `num_pairs` is the sum over sequences of their squared lengths, or over segments of tokens times keys;
        `num_unused` the tokens that the last layer skips. The backward pass makes all products again for the
        gradient of their inputs (of the first layer too, which needs none under LoRA), and once more for the
        gradient of trained matrices.
        """
        body = num_tokens * self.body - num_unused * self.narrowed
        head = num_scored * self.head
        attention = num_pairs * self.attention
        forward = 2 * (body + head + attention)
        if not (is_training and self.is_trained):
            return forward
        of_matrices = num_tokens * self.trained_body - num_unused * self.trained_narrowed
        of_matrices += num_scored * self.trained_head
        return 2 * forward + 2 * attention + 2 * of_matrices

    def of_generation(
        self, prompt_lengths: torch.Tensor, response_lengths: torch.Tensor, num_samples: int
    ) -> float:
        """FLOPs of sampling `num_samples` responses (B x num_samples,) to each prompt (B,).

        A prompt is computed once for all of its responses; each sampled token but the last is computed too,
        and attends to all before it.
        """
        prompts = prompt_lengths.double()
        responses = response_lengths.double()
        before = prompts.repeat_interleave(num_samples)
        read = responses - 1
        pairs = prompts.square().sum() + (read * before + read * (read + 1) / 2).sum()
        body = (prompts.sum() + read.sum()) * self.body
        return float(2 * (body + responses.sum() * self.head + pairs * self.attention))


def _attention_width(layer: Any) -> int:
    """Width of a token's queries in a layer's configuration; 0 if the layer has a recurrent state
    instead of attention.
    """
    num_heads = getattr(layer, "num_attention_heads", None) or 0
    head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // max(num_heads, 1)
    return num_heads * head_dim


def own_peak_flops(dtype: torch.dtype) -> float:
    """Peak FLOP/s of this process's device in `dtype`.

    For a GPU in DEVICES the data sheet's figure; any other device is measured by matrix products, as is a
    part of a GPU (MIG): on a CPU with this process's threads, while all its other ranks do the same.
    """
    kind = kind_of(torch.cuda.get_device_name()) if distributed.has_gpu() else None
    if kind:
        device = DEVICES[kind]
        return 1e12 * (device.tflops_fp32 if dtype == torch.float32 else device.tflops_16bit)
    return measure_flops(dtype)


def faster_dtype() -> tuple[str, str]:
    """fp32 or bf16, whichever has the faster products here, and both figures."""
    measured = {name: measure_flops(DTYPES[name]) for name in ("fp32", "bf16")}
    figures = ", ".join(f"{name} {flops / 1e9:.1f} GFLOP/s" for name, flops in measured.items())
    return max(measured, key=measured.__getitem__), figures


def measure_flops(dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of several matrix products, taken in turn."""
    where = {"dtype": dtype, "device": distributed.device()}
    products = [
        (
            2 * rows * inner * columns,
            partial(
                nn.functional.linear, torch.ones(rows, inner, **where), torch.ones(columns, inner, **where)
            ),
        )
        for rows, inner, columns in (GPU_PRODUCTS if distributed.has_gpu() else CPU_PRODUCTS)
    ]
    return fastest_rate(products, MEASURED_SECONDS)


def fastest_rate(
    runs: Sequence[tuple[float, Callable[[], Any]]], seconds: float, min_calls: int = 1
) -> float:
    """Work per second of the fastest call: other programs slow down the rest.

    `runs` are (work, function), called in turn for this time, and at least `min_calls` times.
    """
    wait = torch.cuda.synchronize if distributed.has_gpu() else lambda: None
    wait()
    rates: list[float] = []
    end = time.perf_counter() + seconds
    for work, run in itertools.cycle(runs):
        started = time.perf_counter()
        run()
        wait()
        now = time.perf_counter()
        rates.append(work / (now - started))
        if now >= end and len(rates) >= min_calls:
            break
    return max(rates)
