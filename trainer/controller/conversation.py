"""Conversations as prompts: messages with roles, and the tokenizer's chat template."""

from typing import Any, TypedDict

from trainer.config import ConfigError, DataConfig
from trainer.controller.sources import Row

PLAIN = DataConfig().template  # the prompt column alone


class Turn(TypedDict):
    """A message, as chat templates take it."""

    role: str
    content: str


def conversation(row: Row, config: DataConfig) -> tuple[Turn, ...]:
    """The messages that the prompt column holds; empty if it holds something else."""
    value = row.columns.get(config.prompt_column)
    if not (isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value)):
        return ()
    column = f"{row.place}: the conversation in {config.prompt_column!r}"
    if config.template != PLAIN:
        raise ConfigError(f"{column} is a prompt as it is; remove data.template, or give a column of text")
    for turn in value:
        if not (isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)):
            raise ConfigError(
                f'{column} has {str(turn)[:60]}; expected {{"role": ..., "content": ...}}, both text'
            )
    if value[-1]["role"] == "assistant":
        raise ConfigError(f"{column} ends with the assistant's turn; expected the user's: remove the answer")
    if config.system and value[0]["role"] == "system":
        raise ConfigError(f"{column} has a system prompt of its own; remove data.system, or that turn")
    return tuple(Turn(role=turn["role"], content=turn["content"]) for turn in value)


def text_of(turns: tuple[Turn, ...]) -> str:
    """The conversation as text: a single user's turn as it is, else a paragraph a turn with its role."""
    if len(turns) == 1 and turns[0]["role"] == "user":
        return turns[0]["content"]
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)


def token_ids(
    row: Row, turns: tuple[Turn, ...], text: str, config: DataConfig, tokenizer: Any
) -> tuple[int, ...]:
    """The prompt's tokens: of the text, or with a chat template of the turns (data.chat: of a user's)."""
    if turns or config.chat:
        turns = turns or (Turn(role="user", content=text),)
        wrapped = _wrapped(row, turns, config, tokenizer)
        ids = tokenizer.encode(wrapped, add_special_tokens=False)  # the template contains them
    elif config.system or config.chat_options:
        key = "data.system" if config.system else "data.chat_options"
        raise ConfigError(f"{key} has no effect on a prompt without a chat template; set data.chat true")
    else:
        ids = tokenizer.encode(text)
    if len(ids) > config.max_prompt_tokens:
        raise ConfigError(
            f"{row.place}: the prompt has {len(ids)} tokens, data.max_prompt_tokens is "
            f"{config.max_prompt_tokens}; raise it or remove the row"
        )
    return tuple(int(i) for i in ids)


def _wrapped(row: Row, turns: tuple[Turn, ...], config: DataConfig, tokenizer: Any) -> str:
    """The chat template's text, up to where the assistant begins to speak."""
    if not getattr(tokenizer, "chat_template", None):
        key = "data.chat is on" if config.chat else f"{row.place} holds a conversation"
        raise ConfigError(f"{key}, but this tokenizer has no chat template; expected text and data.chat off")
    if config.system:
        turns = (Turn(role="system", content=config.system), *turns)
    try:
        wrapped: str = tokenizer.apply_chat_template(
            list(turns), tokenize=False, add_generation_prompt=True, **config.chat_options
        )
    except Exception as e:  # the template's own, such as jinja2's; its text is the user's clue
        raise ConfigError(f"{row.place}: the chat template refuses: {' '.join(str(e).split())}") from e
    return wrapped
