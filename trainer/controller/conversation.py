"""Conversations as prompts: messages with roles, and the tokenizer's chat template."""

import json
import re
from collections.abc import Sequence
from typing import Any

from trainer.config import ConfigError, DataConfig
from trainer.controller.sources import Row, RowError, value_at

PLAIN = DataConfig().template  # the prompt column alone
Turn = dict[str, Any]  # a message, as chat templates take it: role, content, and what else is not null
_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content)["']""")  # messages that are written as text


def conversation(row: Row, config: DataConfig) -> tuple[Turn, ...]:
    """The messages that the prompt column holds, as a list or its JSON; empty if it holds something else."""
    try:
        value = value_at(row.columns, config.prompt_column)
    except RowError:
        return ()
    column = f"the conversation in {config.prompt_column!r}"
    if isinstance(value, str) and _AS_TEXT.match(value):
        try:
            value = json.loads(value)
        except ValueError as e:
            raise RowError(f"{column} is text, but no JSON ({e}); expected a list of messages") from e
    if not (isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value)):
        return ()
    if config.template != PLAIN:
        raise RowError(
            f"{column} is a prompt as it is: set data.template to '{PLAIN}', its default, or "
            "data.prompt_column to a column of text"
        )
    for turn in value:
        if not (isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)):
            expected = '{"role": ..., "content": ...}, both text'
            raise RowError(f"{column} has {str(turn)[:60]}; expected {expected}")
    if value[-1]["role"] == "assistant":
        raise RowError(f"{column} ends with the assistant's turn; expected the user's: remove the answer")
    if config.system and value[0]["role"] == "system":
        raise RowError(f"{column} has a system prompt of its own; remove data.system, or that turn")
    return tuple({key: item for key, item in turn.items() if item is not None} for turn in value)


def text_of(turns: tuple[Turn, ...]) -> str:
    """The conversation as text: a single user's turn as it is, else a paragraph a turn with its role and,
    as JSON, its further keys."""
    if len(turns) == 1 and turns[0]["role"] == "user" and len(turns[0]) == 2:
        return str(turns[0]["content"])
    return "\n\n".join(map(_paragraph, turns))


def _paragraph(turn: Turn) -> str:
    more = {key: value for key, value in turn.items() if key not in ("role", "content")}
    return f"{turn['role']}: {turn['content']}" + (f" {json.dumps(more)}" if more else "")


def token_ids(row: Row, text: str, config: DataConfig, tokenizer: Any) -> tuple[int, ...]:
    """The prompt's tokens: of the text, or with a chat template of the turns (data.chat: of a user's)."""
    if turns := chat_turns(row.columns, text, config):
        if not getattr(tokenizer, "chat_template", None):
            key = "data.chat is on" if config.chat else f"{row.place} holds a conversation"
            expected = "text and data.chat off, or a model with one (chat_template.jinja in its folder)"
            raise ConfigError(f"{key}, but this tokenizer has no chat template; expected {expected}")
        try:
            written = wrapped(tokenizer, turns, config)
        except Exception as e:  # the template's own, such as jinja2's; its text is the user's clue
            raise RowError(f"the chat template refuses: {' '.join(str(e).split())}") from e
        ids = tokenizer.encode(written, add_special_tokens=False)  # the template contains them
    elif config.system or config.chat_options:
        key = "data.system" if config.system else "data.chat_options"
        raise ConfigError(f"{key} has no effect on a prompt without a chat template; set data.chat true")
    else:
        ids = tokenizer.encode(text)
    if len(ids) > config.max_prompt_tokens:
        most = f"data.max_prompt_tokens is {config.max_prompt_tokens}; raise it or remove the row"
        raise RowError(f"the prompt has {len(ids)} tokens, {most}")
    return tuple(int(i) for i in ids)


def chat_turns(columns: dict[str, Any], text: str, config: DataConfig) -> tuple[Turn, ...]:
    """The conversation that the chat template is applied to; empty for a prompt of plain text."""
    turns = conversation(Row("", columns), config)
    turns = turns or (({"role": "user", "content": text},) if config.chat else ())
    system: Turn = {"role": "system", "content": config.system}
    return (system, *turns) if turns and config.system else turns


def wrapped(tokenizer: Any, turns: Sequence[Turn], config: DataConfig, tools: Sequence[Any] = ()) -> str:
    """The chat template's text, up to where the assistant begins to speak."""
    options = config.chat_options | ({"tools": list(tools)} if tools else {})
    write = tokenizer.apply_chat_template
    return str(write(list(turns), tokenize=False, add_generation_prompt=True, **options))
