"""Conversations as prompts: the text equals what transformers renders from the same template, messages and tools."""

import dataclasses
import enum

import numpy as np
import pytest
from transformers import AutoTokenizer

from lamella.errors import RequestError
from lamella.model_executor.text.chat import ChatRenderer
from tests.helpers.tiny_gemma import save_tiny_tokenizer

MESSAGES = [
    {"role": "system", "content": " You \u4f60 help."},
    {"role": "user", "content": " Hi <b>\n"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "f", "arguments": {"a": [1, 2.5, None, True], "b": "\u00e9\"<>&'"}},
            }
        ],
    },
    {"role": "tool", "name": "f", "content": "42"},
    {"role": "assistant", "content": "<think>x</think>The answer", "reasoning": "because"},
    {"role": "user", "content": "?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d <x>",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
    }
]
TEMPLATES = [
    "{{ messages|tojson }}",
    "{{ tools|tojson(indent=2) }}",
    "{{ messages[2].tool_calls[0].function.arguments | tojson(separators=(',',':'), sort_keys=true) }}",
    (
        "{%- for m in messages %}{% if loop.first %}A{% elif loop.last %}Z{% endif %}{{ loop.index0 }}"
        "{{ m.role|upper }}:{{ m.content|trim if m.content is string else '-' }}{{ '\n' if not loop.last }"
        "}{% endfor %}"
    ),
    (
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{% if loop.index > 4 %}"
        "{% break %}{% endif %}[{{ m['role'] }}]{% endfor %}"
    ),
    (
        "{% set ns = namespace(last=-1, seen=[]) %}{% for m in messages[::-1] %}"
        "{% if m.role == 'user' and ns.last < 0 %}{% set ns.last = messages|length - 1 - loop.index0 %}"
        "{% endif %}{% set ns.seen = ns.seen + [m.role] %}{% endfor %}{{ ns.last }}{{ ns.seen }}"
        "{{ ns.seen|join(', ') }}"
    ),
    (
        "{% macro show(x, n=1) %}<{{ x }}{{ caller() if caller is defined }}>{% endmacro %}"
        "{% call show('a') %}body{% endcall %}{{ show(1) ~ show([1,'a']) }}"
    ),
    ("{{ 'a' ~ 1 ~ none ~ [1] }}{{ 'x%s-%d' % ('a', 3) }}{{ '{:>5}|{a!r}'.format('q', a='z') }}{{ '%s'|format(5) }}"),
    (
        "{{ messages|selectattr('role','equalto','user')|map(attribute='content')|list }}"
        "{{ messages|map(attribute='role')|unique|list }}{{ messages|groupby('role')|list|length }}"
    ),
    (
        "{% for m in messages if m.role != 'system' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}none{% endfor %}"
    ),
    (
        "{{ 'a,b,c'.split(',') }}{{ 'abc'[1:] }}{{ messages[0].content.strip().split()[0] }}"
        "{{ 'x'.join(['a','b']) }}{{ 'abc'|replace('b','d') }}{{ 'a\nb'|indent(2, true) }}{{ 'a'|center(5) }}"
    ),
    (
        "{{ {'a': 1, 'b': [1,2]}.items()|list }}{{ dict(a=1) }}{{ (1,2) }}{{ {'a':1}|dictsort }}"
        "{{ [3,1,2]|sort|reverse|list }}{{ 2**10 }}{{ 7//2 }}{{ 7%3 }}{{ -5|abs }}{{ 3.567|round(1) }}"
    ),
    (
        "{{ 'a' in messages[1].content }}{{ 'x' not in ['x'] }}{{ 1 < 2 <= 2 }}"
        "{{ messages[0] == messages[0] }}{{ not true }}{{ 1 if false }}"
    ),
    (
        "{% set x %}block {{ 1 }}{% endset %}{{ x }}{% filter upper %}hi{% endfilter %}"
        "{% if x is string and x is not mapping %}s{% endif %}{{ x|e }}{{ '<a>'|safe ~ '<b>' }}"
        "{{ '<a>'|escape }}"
    ),
    (
        "{{ bos_token }}{{ add_generation_prompt }}{{ documents }}{{ undefined_thing }}"
        "{{ undefined_thing is defined }}{{ messages[9] is undefined }}{{ eos_token }}{{ enable_thinking }}"
    ),
    "{{ messages[4].reasoning_content }}{{ messages[4].thinking }}{{ 'content' in messages[2] }}",
    (
        "{% for a, b in {'x':1,'y':2}.items() %}{{ a }}={{ b }};{% endfor %}{% for i in range(3) %}{{ i }"
        "}{% endfor %}{{ range(5)|list|last }}{{ [1,2,3]|sum }}{{ [[1],[2]]|sum(start=[]) }}"
        "{{ 'ab'|list|batch(1)|list }}{{ [1,2,3]|slice(2)|list }}"
    ),
    (
        "{% for x in [1,[2,[3]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}"
        "{% endif %}{% endfor %}"
    ),
    (
        "{{ 'hello world foo'|wordwrap(5) }}{{ 'hello world'|title }}{{ 'a b'|wordcount }}"
        "{{ 'hello world foo bar'|truncate(12) }}{{ 'x'|default('y') }}{{ nope|default('y') }}"
        "{{ '5'|int + 1 }}{{ 'f'|int(3, 16) }}{{ '2.5'|float }}{{ [1,2]|first }}{{ {'a':1}|length }}"
        "{{ 'a b&'|urlencode }}{{ 12345678|filesizeformat }}{{ [1,2]|min }}"
        "{{ ['b','A']|sort(case_sensitive=true) }}{{ 'x'|string }}{{ [1,'a']|pprint }}{{ {'a':'b'}"
        "|xmlattr }}{{ '<b>x</b>'|striptags }}{{ 'http://a.b'|urlize }}{{ 'aXb'|lower|capitalize }}"
    ),
    "  {% if true %}\n    indented\n  {% endif %}\n{# comment #}\n  text\n",
    (
        "{{ strftime_now('%Y') | length }}{{ dict.fromkeys([1,2]) }}{{ cycler('a','b').next() }}"
        "{% set j = joiner('|') %}{{ j() }}{{ j() }}"
    ),
    (
        "{{ 'tab\tx'.expandtabs(4) }}{{ 'abc'.find('c') }}{{ 'a'.zfill(3) }}{{ 'a-b'.partition('-') }}"
        "{{ 'A'.lower().startswith('a') }}{{ [1,2,1].count(1) }}{{ 'aXa'.replace('a','b',1) }}{{ '{a}"
        "'.format_map({'a': 3}) }}{{ 'x'.rjust(3,'.') }}"
    ),
    (
        "{{ messages|map('string')|map('length')|list }}{{ ['a','B']|map('upper')|join }}"
        "{{ [1,2,3]|select('odd')|list }}{{ [1,2]|reject('equalto',1)|list }}"
        "{{ messages|rejectattr('role','in',['user','tool'])|list|length }}"
    ),
    "{{ none }}{{ true }}{{ 1.0 }}{{ 10**20 }}{{ +3 }}{{ 'a' * 3 }}{{ [1]*2 }}{{ (1,)+(2,) }}",
]
CHAT = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ m.role }}\n{{ m.content | trim }}</turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
KEEPING = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
THINKING = "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}|{{ m.content }}[end]{% endfor %}"
PARTS = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "({{ part['text'] }}){% endfor %}{% endif %};{% endfor %}"
)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def renderer():
    return ChatRenderer()


def both(theirs, renderer, messages, template, variables=None, **arguments):
    wanted = theirs.apply_chat_template(
        messages, chat_template=template, tokenize=False, **arguments, **(variables or {})
    )
    given = {**theirs.special_tokens_map, **(variables or {})}
    return renderer.render(template, messages, variables=given, **arguments), wanted


@pytest.mark.parametrize("template", TEMPLATES)
def test_text_equals_transformers(theirs, renderer, template):
    ours, wanted = both(
        theirs, renderer, MESSAGES, template, {"enable_thinking": False}, tools=TOOLS, add_generation_prompt=True
    )
    assert ours == wanted


def get_weather(city: str, days: int = 3) -> str:
    """The weather of a city.

    Args:
        city: Its name.
        days: How many.
    """
    return f"{city} {days}"


def test_functions_are_tools(theirs, renderer):
    ours, wanted = both(theirs, renderer, MESSAGES, "{{ tools | tojson(indent=1) }}", tools=[get_weather, TOOLS[0]])
    assert ours == wanted
    assert "How many." in ours


def test_documents_reach_the_template(theirs, renderer):
    ours, wanted = both(theirs, renderer, MESSAGES, "{{ documents }}", documents=[{"title": "a", "text": "b"}])
    assert ours == wanted == "[{'title': 'a', 'text': 'b'}]"


@pytest.mark.parametrize(
    ("template", "messages", "field"),
    [
        (CHAT, [*MESSAGES[:2], {"role": "assistant", "content": "Well, "}], True),
        (KEEPING, [{"role": "assistant", "content": "Well, "}], True),
        (KEEPING, [{"role": "assistant", "content": "Well, "}], "content"),
        (THINKING, [{"role": "assistant", "content": "c", "reasoning": "so "}], "reasoning_content"),
        (THINKING, [{"role": "assistant", "content": "c", "thinking": "so "}], "thinking"),
        (
            PARTS,
            [{"role": "assistant", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b "}]}],
            True,
        ),
    ],
)
def test_final_message_is_left_open_as_in_transformers(theirs, renderer, template, messages, field):
    ours, wanted = both(theirs, renderer, messages, template, continue_final_message=field)
    assert ours == wanted
    assert not ours.endswith(("[end]", "</turn>\n", ";"))


@pytest.mark.parametrize(
    ("template", "message", "reason"),
    [
        (KEEPING, {"role": "assistant", "tool_calls": []}, "no 'content' to continue"),
        ("fixed", {"role": "assistant", "content": "a"}, "does not use 'content'"),
        ("{# content #}fixed", {"role": "assistant", "content": "a"}, "leaves out or changes"),
        (PARTS, {"role": "assistant", "content": []}, "no text to continue"),
    ],
)
def test_final_message_that_cannot_be_continued(renderer, template, message, reason):
    with pytest.raises(RequestError, match=reason):
        renderer.render(template, [message], continue_final_message=True, variables={})


@dataclasses.dataclass
class Message:
    role: str
    content: str


class Role(enum.StrEnum):
    USER = "user"


class Model:
    def __init__(self, **fields):
        self.fields = fields

    def model_dump(self):
        return self.fields


def test_objects_become_plain_data_as_in_transformers(theirs, renderer):
    template = "{{ messages }}{{ x }}{{ y }}{{ x.__class__ }}"
    messages = [
        Message("user", "a"),
        Model(
            role="assistant",
            content="b",
            tool_calls=None,
            call=Model(n=np.int64(3), f=np.float32(0.5), b=np.bool_(False)),
        ),
        {"role": Role.USER, "content": "c", "image": np.zeros(3), "pair": (1, "x")},
    ]
    ours, wanted = both(theirs, renderer, messages, template, {"x": Role.USER, "y": np.zeros(2)})
    assert ours == wanted
    assert "<ndarray>" in ours


def test_the_callers_messages_are_left_alone(renderer):
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}], "reasoning": "r"}]
    renderer.render(PARTS, messages, continue_final_message=True, variables={})
    assert messages == [{"role": "assistant", "content": [{"type": "text", "text": "a"}], "reasoning": "r"}]


# Content in parts.

TEXT_PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
TAKES_TEXT = (
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m['content'] | trim }}{% endfor %}",
    "{% for m in messages %}{% set content = m.content %}{{ content }}{% endfor %}",
    "{% macro show(x) %}{{ x }}{% endmacro %}{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    "{% for call in messages[0].tool_calls or [] %}{{ call }}{% endfor %}{{ messages[0].content }}",
    "{% for m in messages %}{% if m.content[0] == 'o' %}{{ m.content }}{% endif %}{% endfor %}",
)
TAKES_PARTS = (
    "{% for m in messages %}{% for part in m.content %}({{ part.text }}){% endfor %}{% endfor %}",
    "{% for m in messages %}{% for part in m['content'] %}({{ part['text'] }}){% endfor %}{% endfor %}",
    "{% for m in messages %}{% set c = m.content %}{% for part in c %}({{ part.text }}){% endfor %}{% endfor %}",
    "{% for m in messages %}{% for part in m.content | selectattr('type', 'equalto', 'text') %}({{ part.text }})"
    "{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for part in m.get('content') or [] %}({{ part.text }}){% endfor %}{% endfor %}",
    "{% macro show(x, y=0) %}{% for part in x %}({{ part.text }}){% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    "{% macro show(y, x=0) %}{% for part in x %}({{ part.text }}){% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(1, x=m.content) }}{% endfor %}",
    "{% set first = messages[0]['content'] %}({{ first[0]['text'] }})({{ first[1].text }})",
    "{% for m in messages %}{% for part in ([] if m.content is string else m.content) %}({{ part.text }}){% endfor %}"
    "{% endfor %}",
)


@pytest.mark.parametrize("template", TAKES_TEXT)
def test_text_parts_are_joined_for_templates_that_take_a_text(renderer, template):
    assert renderer.render(template, TEXT_PARTS, variables={}) == "one\ntwo"


@pytest.mark.parametrize("template", TAKES_PARTS)
def test_parts_reach_templates_that_go_through_them(theirs, renderer, template):
    ours, wanted = both(theirs, renderer, TEXT_PARTS, template)
    assert ours == wanted == "(one)(two)"


@pytest.mark.parametrize("template", [TAKES_TEXT[0], TAKES_PARTS[0]])
@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, {"type": "text", "text": 5}]
)
def test_parts_that_are_no_text_are_refused_by_name(renderer, template, part):
    messages = [TEXT_PARTS[0], {"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    with pytest.raises(RequestError, match=r'messages\[1\]\["content"\]\[1\] is .*takes text alone'):
        renderer.render(template, messages, variables={})


def test_parts_without_a_type_are_the_templates_affair(theirs, renderer):
    template = "{% for m in messages %}{% for part in m.content %}{{ part.output }}{% endfor %}{% endfor %}"
    messages = [{"role": "tool", "content": [{"name": "f", "output": "42"}]}]
    ours, wanted = both(theirs, renderer, messages, template)
    assert ours == wanted == "42"
    with pytest.raises(RequestError, match=r'messages\[0\]\["content"\]\[0\]'):
        renderer.render(TAKES_TEXT[0], messages, variables={})


def test_bare_texts_among_parts(renderer):
    messages = [{"role": "user", "content": ["one", {"type": "input_text", "text": "two"}]}]
    assert renderer.render(TAKES_TEXT[0], messages, variables={}) == "one\ntwo"


# What a message must be.


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one message"),
        ("hello", "messages is str"),
        ({"role": "user"}, "messages is dict"),
        (["hello"], r"messages\[0\] is 'hello'.*\"role\""),
        ([{"content": "a"}], r'messages\[0\].*"role"'),
        ([MESSAGES[0], {"role": None, "content": "a"}], r'messages\[1\].*"role"'),
        ([{"role": "user"}], r"messages\[0\].*says nothing"),
        ([{"role": "user", "content": "\ud800"}], "not valid Unicode"),
    ],
)
def test_unusable_messages_are_named(renderer, messages, reason):
    with pytest.raises(RequestError, match=reason):
        renderer.render(KEEPING, messages, variables={})


def test_tool_calls_need_no_content(theirs, renderer):
    template = "{% for m in messages %}{{ m.role }}{{ m.tool_calls[0].function.name if m.tool_calls }};{% endfor %}"
    messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
    ours, wanted = both(theirs, renderer, messages, template)
    assert ours == wanted == "assistantf;"


def test_messages_nested_without_end_are_refused(renderer):
    deep = []
    deep.append(deep)
    with pytest.raises(RequestError, match="nested too deep"):
        renderer.render(KEEPING, [{"role": "user", "content": "a", "extra": deep}], variables={})


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"tools": "f"}, "tools is str"),
        ({"tools": [5]}, r"tools\[0\] is int"),
        ({"tools": [lambda x: x]}, r"tools\[0\] cannot be described"),
        ({"documents": 5}, "documents is int"),
        ({"documents": ["a"]}, r"documents\[0\] is str"),
        ({"variables": {"messages": []}}, "'messages' cannot be a variable"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt=False"),
    ],
)
def test_unusable_arguments_are_named(renderer, arguments, reason):
    with pytest.raises(RequestError, match=reason):
        renderer.render(KEEPING, MESSAGES, **{"variables": {}, **arguments})


def test_templates_given_with_requests_are_not_kept_for_ever(renderer):
    for index in range(40):
        assert renderer.render(f"{index}{{{{ messages[0].role }}}}", MESSAGES, variables={}) == f"{index}system"
    assert len(renderer._compiled) <= 16
