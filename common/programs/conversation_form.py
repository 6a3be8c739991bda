"""Conversation format of a run or a saved model: from flags, its triptych.json, or its tokenizer."""

from typing import Any

from transformers import PreTrainedTokenizerFast

from common.data.chat_template import ChatTemplate, OtherEndOfTurn, build_template
from common.data.dialogue import Template
from common.data.tokenizer import set_end_of_turn
from common.flags.args import Problems
from common.runs.export import read_metadata

DEFAULT_TEMPLATE = "human_assistant"  # for a model whose tokenizer has no chat template
READS_CLOSING = "reads_closing"  # metadata key of a reward model that reads everything its template renders


def find_template(
    flag: str, name_or_path: str, args: Any, tokenizer: PreTrainedTokenizerFast | None, problems: Problems
) -> tuple[Template | None, list[str]]:
    """The template of a run that starts from this model, and notes; None after adding a problem.

    It is --template, else that in the model's triptych.json, else the tokenizer's chat template, else
    human_assistant; `args` gets its name and variables. If the chat template ends turns with another token of
    the vocabulary than EOS, that token becomes the tokenizer's EOS, unless --eot_token is given.
    """
    if tokenizer is None:
        return None, []
    record = read_metadata(name_or_path)
    given = getattr(args, "template", "")
    recorded = record.get("template", "")
    is_default = not given and not recorded
    args.template = given or recorded or (ChatTemplate.name if tokenizer.chat_template else DEFAULT_TEMPLATE)
    if args.template == recorded:
        args.chat_template_kwargs = args.chat_template_kwargs or record.get("chat_template_kwargs", "")
    template, notes = None, []
    with problems.catch(f"{flag} {name_or_path}: "):
        try:
            template = build_template(args.template, tokenizer, args.chat_template_kwargs)
        except OtherEndOfTurn as error:
            if args.eot_token or not (error.token and set_end_of_turn(tokenizer, error.token)):
                raise
            template = build_template(args.template, tokenizer, args.chat_template_kwargs)
            notes.append(f"{flag} {name_or_path}: turns end with {error.token!r}, as in its chat template")
    if recorded and recorded != args.template:
        notes.append(
            f"--template {given}: {name_or_path} was trained with --template {recorded}; leave the flag out "
            "to keep that"
        )
    if is_default and args.template == ChatTemplate.name:
        notes.append(
            f"{flag} {name_or_path} has a chat template, which is used; --template {DEFAULT_TEMPLATE} uses "
            "Human:/Assistant: text"
        )
    return template, notes


def describe_form(args: Any) -> dict[str, Any]:
    """Conversation format for an export's metadata, which `find_template` reads."""
    form = {"template": args.template}
    if args.chat_template_kwargs:
        form["chat_template_kwargs"] = args.chat_template_kwargs
    if getattr(args, "is_scored", False):
        form[READS_CLOSING] = True
    return form


def closing_of(path: str, template: Template) -> list[int]:
    """Token ids after the end of turn. A reward model reads its score at the last one, as other programs do
    with its chat template. Empty for a model that an earlier version of step 2 trained at the end of turn.
    """
    metadata = read_metadata(path)
    return template.closing_ids if not metadata or metadata.get(READS_CLOSING) else []
