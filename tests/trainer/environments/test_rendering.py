"""Promises of the rendering: a turn adds what the chat template writes, behind the model's exact ids."""

from typing import Any

import pytest
from chat_templates import CHATML, FORGETS, INST, LLAMA, tokenizer

from trainer.config import ConfigError, DataConfig
from trainer.controller.conversation import chat_turns, wrapped
from trainer.controller.process import encoder
from trainer.environments.pool import EnvironmentFailure, Step
from trainer.environments.rendering import ChatRendering, TextRendering


def rendering(template: str, config: DataConfig | None = None) -> tuple[ChatRendering, Any]:
    made, config = tokenizer(template), config or DataConfig(chat=True, system="Be brief.")
    turns = chat_turns({"question": "2+2?"}, "2+2?", config)

    def encode(text: str) -> list[int]:
        return list(made.encode(text, add_special_tokens=False))

    first = tuple(encode(wrapped(made, turns, config))[:1])
    return ChatRendering(lambda m, tools: wrapped(made, m, config, tools), encode, turns, first), made


def user(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


@pytest.mark.parametrize("said_end", [True, False])  # or was cut at its limit
@pytest.mark.parametrize("template", [CHATML, LLAMA, INST])
def test_turn_by_turn_is_what_the_template_writes_of_the_whole_conversation(
    template: str, said_end: bool
) -> None:
    chat, made = rendering(template)
    end = [made.eos_token_id] if said_end else []
    answers = [(" " if template == INST else "") + text for text in ("four?", "yes, 4")]
    ids = [*chat.prompt_ids, *chat.first(Step((user("Think."),)))]
    for answer, reply in zip(answers, ("Sure?", "Really?"), strict=True):
        turn = [*chat.encode(answer), *end]
        ids += [*turn, *chat.more(turn, [user(reply)])]
    replies = [user("Sure?"), user("Really?")]
    turns = [user("Be brief.", "system"), user("2+2?"), user("Think.")]
    for answer, message in zip(answers, replies, strict=True):
        turns += [user(answer.strip(), "assistant"), message]
    whole = made.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert ids == made.encode(whole, add_special_tokens=False)


def test_thinking_stays_where_the_template_would_forget_it() -> None:
    chat, made = rendering(FORGETS)
    turn = [*chat.encode("hm</think>4"), made.eos_token_id]
    assert made.decode([*turn, *chat.more(turn, [user("Sure?", "tool")])]) == (
        "hm</think>4<|im_end|>\n<|im_start|>tool\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_are_in_the_first_tokens() -> None:
    schema = {"type": "function", "function": {"name": "search"}}
    chat, made = rendering(CHATML)
    text = made.decode([*chat.prompt_ids, *chat.first(Step((), tools=(schema,)))])
    assert text.startswith('<|im_start|>tools [{"type": "function"') and text.endswith("assistant\n")


def test_tools_that_the_template_does_not_show_are_refused() -> None:
    with pytest.raises(EnvironmentFailure, match="does not show start's tools"):
        rendering(LLAMA)[0].first(Step((), tools=({"name": "search"},)))


def test_a_turn_is_a_message_with_its_thinking_and_its_tool_calls() -> None:
    chat, _ = rendering(CHATML)
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": </tool_call>'
    message = chat.message(f"<think>\nwell\n</think>\n{call}")
    assert message == {
        "role": "assistant", "content": call, "reasoning_content": "well",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    }  # fmt: skip
    assert "tool_calls" not in chat.message(f"<think>perhaps {call}")
    opening, _ = rendering(CHATML.replace("assistant\n", "assistant\n<think>\n"))
    assert "tool_calls" not in opening.message(f"perhaps {call}")
    assert "tool_calls" in opening.message(f"well</think>{call}") and "tool_calls" in chat.message(call)
    assert "\ud83d" not in str(chat.message('<tool_call>{"name": "\\ud83d"}</tool_call>'))
    assert chat.message("plain") == {"role": "assistant", "content": "plain"}


def test_plain_text_is_the_contents_of_the_messages() -> None:
    text = TextRendering(lambda text: list(map(ord, text)))
    assert text.first(Step((user("a"), user("b")))) == (97, 98)
    with pytest.raises(EnvironmentFailure, match="start returned tools; expected none"):
        text.first(Step((), tools=({},)))
    assert text.more([1, 2], [user("c")]) == (99,) and text.message("x")["content"] == "x"


def test_a_template_that_cannot_be_continued_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not write the assistant's turns as they are"):
        rendering("<s>{{ messages[-1].content }}")[0].more([], [user("a")])
    with pytest.raises(EnvironmentFailure, match="the chat template refuses: no"):
        rendering(CHATML.replace("{{ m.content }}", "{{ raise_exception('no') if m.role == 'tool' }}"))[
            0
        ].more([], [user("a", "tool")])


def test_texts_are_encoded_as_by_the_tokenizer_whatever_it_was_set_to() -> None:
    made = tokenizer(CHATML, letters="ab")
    texts = ["<|im_start|>user\nabba<|im_end|>", "", "a" * 9]
    expected = [made.encode(text, add_special_tokens=False) for text in texts]
    made.backend_tokenizer.enable_truncation(3)
    assert [encoder(made)(text) for text in texts] == expected
