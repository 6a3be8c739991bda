"""Divergence of a student's next-token distribution from a teacher's, computed from the hidden states of
both.

PURE: imports torch and pure files. As in output_head.py logits exist for one chunk of tokens at a time, here
those of both models. The student's gradient is computed with them: of tensors with the vocabulary's size,
only the weight's gradient is kept for the backward pass.

# N tokens, H hidden size of the student, V its vocabulary, n tokens of a chunk
"""

import math

import torch
import torch.nn.functional as F

from common.models.output_head import HeadGradients, LogitOptions, OutputHead, SummedOverTokens

FORWARD_KL, REVERSE_KL = 0.0, 1.0  # values of `beta`
# Logits, log-probabilities and probabilities of both models, their mixture and the slope exist at once.
TENSORS_OF_A_CHUNK = 4  # relative to the scores of one model
_LOWEST = -1e30  # replaces -inf: 0 * -inf would be NaN


def divergence(
    student: torch.Tensor, teacher: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """JSD(beta) (n,), and its gradient (n, V) with respect to the student's logits.

    student, teacher: log-probabilities (n, V), finite. With q the student's and p the teacher's distribution
    and m = beta p + (1 - beta) q it is beta KL(p || m) + (1 - beta) KL(q || m): GKD, arXiv:2306.13649. At
    beta 0 and 1, where this is 0, the limits of JSD / beta and JSD / (1 - beta) are used, as in TRL:
    KL(p || q) for FORWARD_KL, KL(q || p) for REVERSE_KL.
    """
    q = student.exp()
    p = teacher.exp()
    if beta == FORWARD_KL:
        return (p * (teacher - student)).sum(-1), q - p
    if beta == REVERSE_KL:
        mixture = teacher
        share = 1.0
    else:
        mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
        share = 1 - beta
    # The terms through m cancel: d JSD / d q_j = (1 - beta) (log q_j - log m_j) + a constant.
    slope = share * (student - mixture)
    mean = (q * slope).sum(-1, keepdim=True)
    of_teacher = beta * (p * (teacher - mixture)).sum(-1)
    return mean[:, 0] + of_teacher, q * (slope - mean)


def summed_divergence(
    student: OutputHead, teacher: OutputHead, beta: float, token_weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over tokens of token weight x divergence, a scalar; and the divergences (N,), without gradient;
    both fp32, in nats.

    Hidden size and vocabulary padding of both may differ; only the student gets gradients. token_weights
    (N,), None: 1 each. Each model's softmax follows its own options.
    """
    if token_weights is None:
        token_weights = torch.ones(len(student.hidden), device=student.hidden.device)
    return _SummedDivergence.of(student, teacher, beta, token_weights)


def scores_and_divergence(
    student: OutputHead,
    token_ids: torch.Tensor,
    *,
    teacher: OutputHead,
    beta: float,
    token_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Log-probabilities and entropies of the tokens, then the results of `summed_divergence`, from one
    forward pass.
    """
    scores = student.logprobs(token_ids, with_entropy=True)
    return *scores, *summed_divergence(student, teacher, beta, token_weights)


def _logprobs(logits: torch.Tensor, options: LogitOptions) -> torch.Tensor:
    """Log-probabilities (n, valid tokens) in fp32, or float64 for float64, for logits (n, V)."""
    valid = logits[:, : options.num_valid_tokens]
    scaled = valid.to(torch.promote_types(valid.dtype, torch.float32)) / options.temperature
    return scaled.log_softmax(-1).clamp_(min=_LOWEST)


class _SummedDivergence(SummedOverTokens):
    @staticmethod
    def forward(ctx, hidden, weight, bias, options, *request):
        student = OutputHead(hidden, weight, bias, options)
        teacher, beta, token_weights = request
        of_tokens = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        gradients = HeadGradients(student, ctx.needs_input_grad) if any(ctx.needs_input_grad[:3]) else None
        for rows in student.chunks(at_once=TENSORS_OF_A_CHUNK, num_tokens=len(teacher.weight)):
            raw, logits = student.differentiable_logits(rows)
            log_q = _logprobs(logits.detach(), options)
            log_p = _logprobs(teacher.options.transform(teacher.raw_logits(rows)), teacher.options)
            of_tokens[rows], slopes = divergence(log_q, log_p, beta)
            if gradients:
                slopes.mul_(token_weights[rows, None] / options.temperature)
                padding = logits.shape[1] - slopes.shape[1]
                gradients.add(rows, raw, logits, F.pad(slopes.to(logits.dtype), (0, padding)))
        ctx.mark_non_differentiable(of_tokens)
        _SummedDivergence.keep(ctx, gradients, hidden.dtype)
        return (of_tokens.double() * token_weights).sum().float(), of_tokens
