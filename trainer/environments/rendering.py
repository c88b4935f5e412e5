"""The tokens that an environment's messages add to an episode, and the model's turns as messages.

An episode is one sequence of tokens, and a token that is there never changes: what a turn adds is appended
behind the exact ids of the model's. Without a chat template it is the messages' contents, one after the
other. With one it is what the template writes behind an assistant's turn: the text after a marker in its
place. So the model's own words, thinking included, stay as they were sampled, even where the template would
leave them out of a later prompt.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config import ConfigError
from trainer.environments.pool import EnvironmentFailure, Message, Step
from trainer.verifiers.text import opened_thinking

_USER_MESSAGE = {"role": "user", "content": "-"}
_MARKER = "MARKEROFTHEASSISTANTSTURN"
# Hermes' format: Qwen and others.
_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
Encode = Callable[[str], Sequence[int]]  # without special tokens of its own


@dataclass(frozen=True, slots=True)
class TextRendering:
    """Plain text: the contents of the messages."""

    encode: Encode

    def first(self, start: Step) -> tuple[int, ...]:
        """The tokens after the prompt's and before the model's first turn."""
        if start.tools:
            expected = "none, or data.chat true, whose template shows them"
            raise EnvironmentFailure(f"environment: start returned tools; expected {expected}")
        return self.more((), start.messages)

    def message(self, text: str) -> Message:
        """The model's turn as a message."""
        return {"role": "assistant", "content": text}

    def more(self, turn: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens between a turn of the model (its ids) and the next."""
        return tuple(self.encode("".join(message["content"] for message in messages)))


@dataclass(frozen=True, slots=True)
class ChatRendering:
    """The tokenizer's chat template. The prompt is the first token of the conversation: the rest depends on
    what the environment adds, such as tools."""

    template: Callable[..., str]  # (messages, tools) -> text up to where the assistant begins to speak
    encode: Encode
    conversation: tuple[Message, ...]  # of the data's row
    prompt_ids: tuple[int, ...]

    def first(self, start: Step) -> tuple[int, ...]:
        turns = [*self.conversation, *start.messages]
        text = self._write(turns, list(start.tools))
        if start.tools and text == self._write(turns, []):
            expected = "none: say in a message what the tools are"
            raise EnvironmentFailure(f"this chat template does not show start's tools; expected {expected}")
        ids = self.encode(text)
        if tuple(ids[: len(self.prompt_ids)]) != self.prompt_ids:
            problem = "begins another text once the environment's messages or tools are in it"
            raise ConfigError(f"data.chat: this chat template {problem}; expected a constant first token")
        return tuple(ids[len(self.prompt_ids) :])

    def message(self, text: str) -> Message:
        reasoning, closed, content = text.rpartition("</think>")
        message: Message = {"role": "assistant", "content": content.strip() if closed else text.strip()}
        if closed:
            message["reasoning_content"] = reasoning.removeprefix("<think>").strip()
        calls = list(filter(None, map(_tool_call, _TOOL_CALL.findall(message["content"]))))
        # A call that is only considered is none.
        if calls and (closed or "<think>" not in opened_thinking(self._write([_USER_MESSAGE], [])) + text):
            message["tool_calls"] = calls
        return message

    def more(self, turn: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        marked = [_USER_MESSAGE, {"role": "assistant", "content": _MARKER}]
        _, marker, text = self._write([*marked, *messages], []).rpartition(_MARKER)
        if not marker:
            raise ConfigError(
                "data.chat: this chat template does not write the assistant's turns as they are"
            )
        ids = tuple(self.encode(text))  # begins with the end of the turn, which the model may have said
        return ids[1:] if turn and ids and turn[-1] == ids[0] else ids

    def _write(self, messages: list[Message], tools: list[Any]) -> str:
        try:
            return self.template(messages, tools)
        except Exception as e:  # the template's own, such as jinja2's; its text is the user's clue
            raise EnvironmentFailure(f"the chat template refuses: {' '.join(str(e).split())}") from e


Rendering = TextRendering | ChatRendering


def _tool_call(text: str) -> dict[str, Any] | None:
    """A call in OpenAI's form, with its arguments as JSON text; None if it is none."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], json.dumps(call.get("arguments", {}))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    name = str(name).encode(errors="replace").decode()  # half a surrogate pair is no text
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
