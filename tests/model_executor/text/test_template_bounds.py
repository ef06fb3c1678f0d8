"""Templates that ask for too much memory or time are refused, at a cost that is counted in units, not in seconds."""

import tracemalloc

import pytest

from lamella.errors import RequestError
from lamella.model_executor.text.chat import ChatRenderer
from lamella.model_executor.text.template_budget import BASE_UNITS, ITEM_UNITS, size_units

SMALL_UNITS = BASE_UNITS // 32  # so that a loop of cheap rounds ends soon under a memory tracer
MEMORY_BYTES = 5 * SMALL_UNITS  # four bytes for a character, and what Python itself needs

MESSAGES = [{"role": "user", "content": "hello world"}]
GROWN = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(100) %}{% set ns.x = [GROW] %}{% endfor %}{{ ns.x }}"
NESTED = "{% set ns = namespace(x=[1]) %}{% for i in range(100) %}{% set ns.x = [GROW] %}{% endfor %}"
SPUN = "{% set a = 'a' * 10**5 %}{% for i in range(99999) %}{% set x = [WORK] %}{% endfor %}"

GROWTHS = (
    "ns.x + ns.x",
    "ns.x ~ ns.x",
    "ns.x * 2",
    "[ns.x, ns.x]|join",
    "''.join([ns.x, ns.x])",
    "'{}{}'.format(ns.x, ns.x)",
    "'{a}{a}'.format_map({'a': ns.x})",
    "'%s%s' % (ns.x, ns.x)",
    "'%s%s'|format(ns.x, ns.x)",
    "ns.x|replace('a', 'aa')",
    "ns.x.replace('a', 'aa')",
    "(ns.x|safe).replace('a', 'aa')",
    "(ns.x|list + ns.x|list)|join",
    "ns.x.translate({97: 'aa'})",
    "ns.x|center(2 * ns.x|length)",
)
NESTINGS = (
    "[ns.x, ns.x][END]{{ ns.x }}",
    "[ns.x, ns.x][END]{{ ns.x == [ns.x] }}",
    "dict(a=ns.x, b=ns.x)[END]{{ ns.x|tojson }}",
    "namespace(a=ns.x, b=ns.x)[END]{{ ns.x }}",
    "(ns.x, ns.x)[END]{{ {ns.x: 1} }}",
    "ns[END]{{ ns }}",
)
ONCE = (
    "'a' * 10**9",
    "10**9 * 'a'",
    "([0] * 10**9)|length",
    "'a'|center(10**9)",
    "'a'.center(10**9)",
    "'a'.ljust(10**9)",
    "'a'.rjust(10**9)",
    "'a'.zfill(10**9)",
    "('\t' * 1000).expandtabs(10**7)",
    "('a\n' * 10000)|indent(10**6)",
    "('a\n' * 10000)|indent('a' * 10**5)",
    "'%1000000000d' % 1",
    "'%*d' % (10**9, 1)",
    "'%1000000000d'|format(1)",
    "'{:1000000000}'.format(1)",
    "'{:{w}}'.format(1, w=10**9)",
    "'{a:99999999999}'.format_map({'a': 1})",
    "3 ** (10**9)",
    "('f' * 10**6)|int(0, 16) > 0",
    "3|round(10**9, 'floor')",
    "messages|tojson(indent=10**9)",
    "[1, 2, 3]|tojson(separators=('a' * 10**7, 'b' * 10**7))",
    "[1]|batch(10**9, 0)|list|length",
    "[1]|slice(10**9)|list|length",
    "('a' * 10**6)|wordwrap(1, true, 'b' * 10**6)|length",
    "('<!--' * 10**6)|striptags|length",
    "('www.a.' * 10**5)|urlize|length",
    "('\u20ac' * 10**7)|urlencode|length",
    "(1).to_bytes(10**9, 'big')|length",
    "'a'.encode().center(10**9)|length",
    "('a' * 10**5).translate({97: 'b' * 10**5})|length",
    "('b' * 10**5).join('a' * 10**5)|length",
    "('a' * 10**5)|join('b' * 10**5)|length",
    "([[1] * 1000] * 10000)|sum(start=[])|length",
    "('\u20ac' * 6 * 10**7)|list|length",
    "('\u20ac ' * 3 * 10**7).split()|length",
    "strftime_now('%c' * 10**7)|length",
    "lipsum(n=100000)",
    "range(10**9)|list",
)
SPINS = (
    "range(99999)|map('upper')|list",
    "range(99999)|select('odd')|list",
    "range(99999)|reject('integer')|first",
    "range(99999)|sum",
    "range(99999)|min",
    "range(99999).count('a')",
    "'x' in range(99999)",
    "a == 'a' * 10**5",
    "a is lower",
    "'b' in a",
    "a[1:]",
    "a.upper()",
    "a|reverse",
    "a|list|first",
    "dict.fromkeys(range(99999), 1)",
)
LOOPS = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "nested": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "condition": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "macro": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "macro_twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}",
    "recursive": "{% for x in [1, 2] recursive %}{% if loop.depth0 < 40 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    "endless": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "own_text": "{% macro f() %}{% for i in range(99999) %}"
    + "x" * 100000
    + "{% endfor %}{% endmacro %}{{ f()|length }}",
    "own_text_in_set": "{% set y %}{% for i in range(99999) %}" + "x" * 100000 + "{% endfor %}{% endset %}",
    "caller": "{% macro f() %}{% for i in range(99999) %}{{ caller() }}{% endfor %}{% endmacro %}"
    "{% call f() %}" + "x" * 100000 + "{% endcall %}",
    "generation": "{% for i in range(99999) %}{% for j in range(99999) %}{% generation %}x{% endgeneration %}"
    "{% endfor %}{% endfor %}",
    "joiner": "{% set c = joiner('a' * 10**7) %}{% for i in range(99999) %}{{ c() }}{% endfor %}",
    "big_integer": "{% set ns = namespace(x=3) %}{% for i in range(100) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "deep_indent": "{% set ns = namespace(x=[1] * 2000) %}{% for i in range(300) %}{% set ns.x = [ns.x] %}{% endfor %}"
    "{{ ns.x|tojson(indent=1000)|length }}",
}


@pytest.fixture(scope="module")
def renderer():
    renderer = ChatRenderer(SMALL_UNITS)
    renderer.render("{{ messages }}", MESSAGES, variables={})  # what is imported is no template's memory
    return renderer


def refused_bytes(renderer, template):
    """Peak memory until `template` is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="the chat template refuses"):
            renderer.render(template, MESSAGES, variables={})
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("growth", GROWTHS)
def test_doubling_ends_at_the_budget(renderer, growth):
    assert refused_bytes(renderer, GROWN.replace("[GROW]", growth)) < MEMORY_BYTES


@pytest.mark.parametrize("nesting", NESTINGS)
def test_what_is_reached_often_is_charged_as_often(renderer, nesting):
    value, _, use = nesting.partition("[END]")
    template = NESTED.replace("[GROW]", value) + use
    assert refused_bytes(renderer, template) < MEMORY_BYTES


@pytest.mark.parametrize("expression", ONCE)
def test_one_step_too_large_is_not_taken(renderer, expression):
    assert refused_bytes(renderer, "{{ " + expression + " }}") < MEMORY_BYTES


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_only_spins_is_stopped(renderer, name):
    assert refused_bytes(renderer, LOOPS[name]) < MEMORY_BYTES


@pytest.mark.parametrize("work", SPINS)
def test_work_that_makes_no_text_is_charged(renderer, work):
    with pytest.raises(RequestError, match="units of work"):
        renderer.render(SPUN.replace("[WORK]", work), MESSAGES, variables={})


def test_budget_grows_with_the_input(renderer):
    """A template that copies every message ten times works on any conversation."""
    template = "{% for m in messages %}{% for i in range(10) %}{{ m.content }}{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": "x" * 200_000}] * 100
    assert renderer.render(template, messages, variables={}) == "x" * 200_000_000


def test_long_conversations_are_no_attack():
    template = (
        "{% set ns = namespace(last=-1) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% if loop.index0 == ns.last %}*{% endif %}"
        "{% if messages | selectattr('role', 'equalto', 'tool') | list | length %}t{% endif %}{% endfor %}"
    )
    messages = [{"role": ("user", "assistant")[i % 2], "content": f" {i} "} for i in range(400)]
    expected = "".join(f"<{message['role']}>{index}{'*' * (index == 398)}" for index, message in enumerate(messages))
    assert ChatRenderer().render(template, messages, variables={}) == expected


@pytest.mark.parametrize(
    ("value", "units"),
    [
        ("abc", 3),
        ([], ITEM_UNITS),
        (["ab", ["c"]], 3 * ITEM_UNITS + 2 * ITEM_UNITS + 3),
        ({"a": "bc"}, 3 * ITEM_UNITS + 3),
        (range(10), 11 * ITEM_UNITS),
    ],
)
def test_size_counts_every_item_and_character(value, units):
    assert size_units(value, 10**9) == units


def test_size_of_a_cycle_stops_at_the_limit():
    cycle = []
    cycle.append(cycle)
    assert 1000 < size_units(cycle, 1000) < 1000 + 3 * ITEM_UNITS


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ messages[0]['x']['y'] }}",
        "{{ 1 + 'a' }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(_x=1) }}",
        "{% include 'x' %}",
        "{% extends 'x' %}",
        "{% import 'x' as y %}",
        "{% if %}",
        "{{ 1 | nope }}",
        "{{ '\\ud800' }}",
        "{{ 10 ** 5000 }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% for a in messages %}" * 120 + "{% endfor %}" * 120,
        "{{ raise_exception(messages * 3) }}",
        "{{ messages | tojson(indent='a', nope=1) }}",
        "{{ '%d' % 'a' }}",
        "{{ '{0.__class__}'.format(1) | length + none }}",
        "x" * (1 << 20) + "y",
    ],
)
def test_whatever_a_template_raises_is_a_request_error(renderer, template):
    with pytest.raises(RequestError, match="chat template") as refused:
        renderer.render(template, MESSAGES, variables={})
    assert len(str(refused.value)) < 1000


def test_another_request_goes_on_after_a_refusal(renderer):
    with pytest.raises(RequestError):
        renderer.render("{{ 'a' * 10**9 }}", MESSAGES, variables={})
    assert renderer.render("{{ messages[0].content }}", MESSAGES, variables={}) == "hello world"
