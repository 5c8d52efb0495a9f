"""Chat templates: what they get, what they may do, and what becomes of their complaints."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.errors import InvalidRequest
from engine.core.models.chat import ChatTemplate, normalise

PLAIN = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def render(template: str, messages: list[dict[str, Any]], **extra: Any) -> str:
    return ChatTemplate(template, {"bos_token": "<s>"}).render(messages, **extra)


def test_turns_without_content_are_kept() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}, {"role": "user"}]
    assert render(PLAIN, messages) == "[user:a][assistant:][user:]>"


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(PLAIN, [{"role": "user", "content": parts}]) == "[user:ab]>"
    picture = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(InvalidRequest, match=r"messages: message 0 has a part of type 'image_url'"):
        render(PLAIN, [{"role": "user", "content": picture}])


def test_empty_tool_calls_are_as_good_as_none() -> None:
    template = "{% for m in messages %}{% if m.tool_calls is defined %}T{% else %}-{% endif %}{% endfor %}"
    calls = [{"function": {"name": "f"}}]
    assert (
        render(template, [{"role": "a", "tool_calls": []}, {"role": "a", "tool_calls": calls}, {"role": "a"}]) == "-T-"
    )


@pytest.mark.parametrize(
    "messages",
    [[], "hi", None, [{}], [{"role": 1}], ["x"], [{"role": "user", "content": 5}], [{"role": "u", "content": [5]}]],
)
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(PLAIN, messages)
    assert caught.value.field == "messages"


def test_messages_are_not_changed() -> None:
    original = [{"role": "user", "content": None, "tool_calls": []}]
    assert normalise(original) == [{"role": "user", "content": ""}]
    assert original == [{"role": "user", "content": None, "tool_calls": []}]


def test_what_a_template_refuses_comes_back_in_its_own_words() -> None:
    with pytest.raises(InvalidRequest) as caught:
        render("{{ raise_exception('roles must alternate') }}", [{"role": "user", "content": "x"}])
    assert caught.value.message == "roles must alternate"


def test_errors_inside_a_template_are_the_messages_fault() -> None:
    with pytest.raises(InvalidRequest, match="messages: the model's chat template cannot render"):
        render("{{ messages[0].content + 1 }}", [{"role": "user", "content": "x"}])


def test_templates_are_in_a_sandbox() -> None:
    with pytest.raises(InvalidRequest, match="unsafe"):
        render("{{ messages.__class__.__mro__ }}", [{"role": "user", "content": "x"}])
    with pytest.raises(InvalidRequest):
        render("{{ messages.append(1) }}", [{"role": "user", "content": "x"}])


def test_globals_filters_and_blocks_of_hugging_face_templates() -> None:
    message = [{"role": "user", "content": "<é>"}]
    assert render("{{ bos_token }}{{ messages[0] | tojson }}", message) == '<s>{"role": "user", "content": "<é>"}'
    assert render("{% for n in [1, 2] %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}", message) == "1"
    assert render("{% generation %}{{ messages[0].role }}{% endgeneration %}", message) == "user"
    assert len(render("{{ strftime_now('%Y') }}", message)) == 4
    assert render("{{ tools[0] }}", message, tools=["t"]) == "t"
