"""Adapters, one file for each family of data sets; importing this package registers them all."""

from common.data.adapters import (
    chitchat,
    comparisons,
    human_assistant,
    known_forms,
    local_files,
    passages,
    ported_class,
    question_answers,
)

__all__ = [
    "chitchat",
    "comparisons",
    "human_assistant",
    "known_forms",
    "local_files",
    "passages",
    "ported_class",
    "question_answers",
]
