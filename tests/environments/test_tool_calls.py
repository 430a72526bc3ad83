import pytest

from headrace.environments.tool_calls import MalformedToolCall, ToolCall, parse_tool_calls, read_tool_calls


def test_json_between_tags_is_a_call():
    text = 'I compute.\n<tool_call>\n{"name": "python", "arguments": {"code": "1 + 1"}}\n</tool_call>'
    assert parse_tool_calls(text) == [ToolCall("python", {"code": "1 + 1"})]


def test_several_calls_keep_their_order():
    text = '<tool_call>{"name": "a", "arguments": {}}</tool_call> and <tool_call>{"name": "b", "arguments": {"n": 2}}</tool_call>'
    assert parse_tool_calls(text) == [ToolCall("a", {}), ToolCall("b", {"n": 2})]


def test_tagged_parameters_are_a_call_and_lose_only_the_format_s_line_breaks():
    code = "<parameter=code>\n\nif x:\n    print(1)\n\n</parameter>"
    text = f"<tool_call>\n<function=python>\n{code}\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
    assert parse_tool_calls(text) == [ToolCall("python", {"code": "\nif x:\n    print(1)\n", "n": "3"})]


def test_a_bare_function_tag_is_a_call():
    assert parse_tool_calls("<function=look></function>") == [ToolCall("look", {})]


def test_a_reply_that_is_one_json_object_with_parameters_is_a_call():
    assert parse_tool_calls(' {"name": "python", "parameters": {"code": "2"}} ') == [ToolCall("python", {"code": "2"})]


@pytest.mark.parametrize("text", ["", "go to desk 1", "{}", '{"answer": 3}', "{x} and {y}", "```python\n1\n```"])
def test_a_reply_without_a_call_has_none(text):
    assert read_tool_calls(text) == []


def test_line_breaks_inside_json_strings_and_arguments_written_as_a_string_are_accepted():
    assert parse_tool_calls('<tool_call>{"name": "p", "arguments": {"code": "a\nb"}}</tool_call>') == [ToolCall("p", {"code": "a\nb"})]
    assert parse_tool_calls('<tool_call>{"name": "p", "arguments": "{\\"n\\": 1}"}</tool_call>') == [ToolCall("p", {"n": 1})]


def test_an_unclosed_call_at_the_end_is_read():
    assert parse_tool_calls('<tool_call>{"name": "p", "arguments": {}}') == [ToolCall("p", {})]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("{name: p}", "not valid JSON"),
        ("[1, 2]", '"name" and "arguments"'),
        ('{"name": 3, "arguments": {}}', '"name" and "arguments"'),
        ('{"name": "p", "arguments": [1]}', "must be a JSON object"),
        ('{"name": "p", "arguments": "oops"}', "must be a JSON object"),
        ("<function=>", "function's name is missing"),
    ],
)
def test_a_malformed_call_says_what_is_wrong_and_is_not_run(body, problem):
    (call,) = read_tool_calls(f"<tool_call>{body}</tool_call>")
    assert isinstance(call, MalformedToolCall)
    assert problem in call.problem
    assert parse_tool_calls(f"<tool_call>{body}</tool_call>") == []
