"""Chat templates: the conventions of Hugging Face, in a sandbox."""

from __future__ import annotations

import datetime

import pytest

from shared.errors import BadRequest, Misconfigured
from shared.models.chat_template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, str]] | None = None, **variables: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(
        USER if messages is None else messages, **variables
    )


def test_special_tokens_and_generation_prompt() -> None:
    source = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
    assert render(source + "{% if add_generation_prompt %}>{% endif %}") == "<s>[user]hi</s>>"
    assert render("{% if add_generation_prompt %}>{% endif %}", add_generation_prompt=False) == ""
    assert render("{{ enable_thinking is defined and enable_thinking }}", enable_thinking=True) == "True"
    assert render("{{ tools is defined }}") == "False"


def test_blocks_leave_no_blank_lines() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_conventions() -> None:
    assert render("{{ {'a': 'é<&>'} | tojson }}") == '{"a": "é<&>"}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}") == "1"
    assert render("{% generation %}x{% endgeneration %}") == "x"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert (
        render("{% set ns = namespace(n=0) %}{% for m in [1, 2] %}{% set ns.n = ns.n + m %}{% endfor %}{{ ns.n }}")
        == "3"
    )


def test_refusals_are_the_callers_fault_and_say_why() -> None:
    with pytest.raises(BadRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadRequest):
        render("{{ messages[7].content + 1 }}")
    with pytest.raises(BadRequest):
        render("{{ messages[0].content + 1 }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ range(10 ** 9) | list | length }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(BadRequest):
        render(source)


def test_messages_cannot_inject_template_code() -> None:
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "{{ 7 * 7 }}"}]) == "{{ 7 * 7 }}"


def test_template_that_does_not_parse() -> None:
    with pytest.raises(Misconfigured, match="does not parse"):
        ChatTemplate("{% for %}", {})
