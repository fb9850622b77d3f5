# SPDX-License-Identifier: Apache-2.0
"""The mutants of a module: its text with one fault on one of its lines.

A statement is deleted, a condition negated, an operand of `and` or `or` dropped, a
comparison, `continue` or an operator exchanged, an integer off by one, a truth value
turned. Messages, annotations, decorators, docstrings and imports stay as they are.
"""

import ast
import copy
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

_SHOWN = 72
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.LShift: ast.RShift,
    ast.BitAnd: ast.BitOr,
}
_DELETED = (
    ast.Expr,
    ast.Assign,
    ast.AugAssign,
    ast.Return,
    ast.Raise,
    ast.Assert,
    ast.Delete,
    ast.Continue,
    ast.Break,
)
_LEFT_ALONE = (
    ast.Import,
    ast.ImportFrom,
    ast.Global,
    ast.Nonlocal,
    ast.JoinedStr,
    ast.Raise,
    ast.Assert,
)
"""What is visited no further; the last two only say why."""
_UNSAID = {"annotation", "returns", "decorator_list", "type_params", "bases"}
_LOG = {"logger", "logging", "warnings"}


@dataclass(frozen=True, order=True)
class Mutant:
    """A fault: its line, counted from 1, and what stands there; what becomes of it; and
    the whole text of the module with it."""

    line: int
    code: str
    what: str
    source: str


def mutants(source: str, lines: Collection[int]) -> list[Mutant]:
    """The mutants of a module on the given lines, in their order, each valid Python.

    Raises:
        SyntaxError: the module is none.
    """
    tree = ast.parse(source)
    data, texts = source.encode(), source.splitlines()
    found = set()
    for edit in _edits(tree, source):
        if edit.line in lines:
            text = (data[: edit.start] + edit.new.encode() + data[edit.end :]).decode()
            if _is_valid(text):
                code = texts[edit.line - 1].strip()
                found.add(Mutant(edit.line, code, edit.what, text))
    return sorted(found)


class _Edit(NamedTuple):
    """The line to blame, what is said of it, the bytes that go, what takes their
    place."""

    line: int
    what: str
    start: int
    end: int
    new: str


def _is_valid(source: str) -> bool:
    """Whether it is Python: a `break` outside of a loop is none."""
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _short(node: ast.AST) -> str:
    line = " ".join(ast.unparse(node).split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}..."


def _edits(tree: ast.Module, source: str) -> Iterator[_Edit]:
    starts = [0]
    for text in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(text))

    def edit(
        node: ast.stmt | ast.expr, new: str, what: str, line: int | None = None
    ) -> _Edit:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        return _Edit(line or node.lineno, what, start, end, new)

    def visit(node: ast.AST, bound: Counter[str]) -> Iterator[_Edit]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            bound = Counter(
                each.id
                for each in ast.walk(node)
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            )
        if isinstance(node, ast.stmt) and _may_go(node, bound):
            yield edit(node, "pass", f"deleted: {_short(node)}")
        if isinstance(node, ast.Continue):
            yield edit(node, "break", "continue -> break")
        if isinstance(node, ast.expr):
            for new, what, line in _expressions(node):
                yield edit(node, f"({ast.unparse(new)})", what, line)
        if isinstance(node, ast.If | ast.While | ast.IfExp) and _is_negated(node.test):
            test = ast.unparse(node.test)
            yield edit(node.test, f"(not ({test}))", f"negated: {_short(node.test)}")
        if isinstance(node, _LEFT_ALONE) or _is_message(node):
            return
        for name, value in ast.iter_fields(node):
            if name not in _UNSAID:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from visit(child, bound)

    yield from visit(tree, Counter())


def _may_go(node: ast.stmt, bound: Counter[str]) -> bool:
    """Whether the module without this statement fails otherwise than by a NameError at
    the next line that reads a name."""
    if not isinstance(node, _DELETED) or _is_message(node):
        return False
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom)
    if isinstance(node, ast.Assign):
        names = [
            each.id
            for target in node.targets
            for each in ast.walk(target)
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        ]
        return all(bound[name] > 1 for name in names)
    return True


def _is_message(node: ast.AST) -> bool:
    """Whether a statement or call only says something, to a log or as a docstring."""
    if isinstance(node, ast.Expr):
        node = node.value
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    owner = node.func.value
    return isinstance(owner, ast.Name) and owner.id in _LOG


def _is_negated(test: ast.expr) -> bool:
    """Whether the negation is no mutant of a part of the condition as well."""
    if isinstance(test, ast.Compare):
        return len(test.ops) == 1 and isinstance(test.ops[0], _ORDERED)
    if isinstance(test, ast.Name):
        return test.id != "TYPE_CHECKING"
    return not isinstance(test, ast.BoolOp | ast.Constant)


def _expressions(node: ast.expr) -> Iterator[tuple[ast.expr, str, int]]:
    """What takes the place of an expression, what is said of it, and its line."""

    def turned(old: ast.expr, new: ast.expr, line: int) -> tuple[ast.expr, str, int]:
        return new, f"{_short(old)} -> {_short(new)}", line

    match node:
        case ast.BoolOp(op=op, values=values):
            for index, operand in enumerate(values):
                rest = values[:index] + values[index + 1 :]
                new = ast.BoolOp(op, rest) if len(rest) > 1 else rest[0]
                yield new, f"dropped: {_short(operand)}", operand.lineno
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                other = copy.deepcopy(node)
                other.ops[index] = _COMPARISONS[type(operator)]()
                yield turned(node, other, node.comparators[index].lineno)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            if not any(
                isinstance(x, ast.JoinedStr) or _is_message(x) for x in (left, right)
            ):
                new = ast.BinOp(left, _OPERATORS[type(op)](), right)
                yield turned(node, new, node.lineno)
        case ast.Constant(value=bool(value)):
            yield turned(node, ast.Constant(not value), node.lineno)
        case ast.Constant(value=int(value)):
            yield turned(node, ast.Constant(value + 1), node.lineno)
