"""Make the value of a last expression visible, as a notebook would, by rewriting the text before it runs.

The rewriting is a scan over tokens, never a parse: untrusted text can make a parser slow or crash it, and the sandbox's
grammar is not the one of the Python that runs the trainer. Where the scan is not sure, the code runs unchanged.
"""

from __future__ import annotations

import io
import keyword
import tokenize

_STATEMENTS = frozenset(keyword.kwlist) - {"None", "True", "False", "not", "lambda", "await"}
_IGNORED = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER})


def show_last_expression(code: str, name: str, shown: str) -> str:
    """``code`` with its last statement, if that is an expression, bound to ``name``, followed by the expression ``shown``.

    Otherwise ``code`` followed by ``None``, so that the whole never has a value of its own.
    """
    span = _last_expression(code)
    if span is None:
        return code + ("\n)" if code.endswith("\\") else "\nNone")  # a continuation with nothing after it stays an error
    start, end = span
    return f"{code[:start]}{name} = ({code[start:end]}){code[end:]}\n{shown}"


def _last_expression(code: str) -> tuple[int, int] | None:
    """Character range of the last top-level statement if it can only be an expression."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(code).readline))
    except (tokenize.TokenError, SyntaxError, ValueError):
        return None
    depth = indent = 0
    statement: list[tokenize.TokenInfo] = []
    last: list[tokenize.TokenInfo] = []
    for token in tokens:
        if token.type == tokenize.ERRORTOKEN:
            return None
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
        indent += (token.type == tokenize.INDENT) - (token.type == tokenize.DEDENT)
        ends_statement = token.type == tokenize.NEWLINE or (token.string == ";" and depth == 0)
        if not ends_statement and token.type not in _IGNORED:
            statement.append(token)
        elif ends_statement and statement:
            last, statement, last_indent = statement, [], indent
    if statement or not last or last_indent or not _is_expression(last):
        return None
    return _offset(code, last[0].start), _offset(code, last[-1].end)


def _is_expression(tokens: list[tokenize.TokenInfo]) -> bool:
    """No statement keyword in front, and no ``=``, ``+=``, ``:`` outside brackets and lambdas."""
    if tokens[0].string in _STATEMENTS or tokens[0].string == "@":
        return False
    depth = 0
    for token in tokens:
        if token.type != tokenize.OP:
            continue
        depth += (token.string in "([{") - (token.string in ")]}")
        assigns = token.string.endswith("=") and token.string not in ("==", "!=", "<=", ">=")
        if depth == 0 and (assigns or (token.string == ":" and not any(other.string == "lambda" for other in tokens))):
            return False
    first, second = tokens[0].string, tokens[1] if len(tokens) > 1 else None
    return not (first in ("type", "match", "case") and second is not None and second.type == tokenize.NAME)


def _offset(code: str, position: tuple[int, int]) -> int:
    """Index into ``code`` of tokenize's (line from 1, column)."""
    lines = io.StringIO(code).readlines()
    return sum(len(line) for line in lines[: position[0] - 1]) + position[1]
