"""Small faults in a function, made on its syntax tree: each operator changes one node. Pure."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "minddp"
Function = ast.FunctionDef | ast.AsyncFunctionDef

OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {
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
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}


@dataclass(frozen=True)
class Mutant:
    """One change of minddp/`file`: of the node that a walk through the function meets as number `node`."""

    file: str
    function: str
    node: int
    operator: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"minddp/{self.file}:{self.line}: {self.operator}: {self.text}"

    def applied_to(self, source: str) -> ast.Module:
        """The tree of the changed source."""
        tree = ast.parse(source)
        target = list(ast.walk(dict(_functions(tree))[self.function]))[self.node]
        changed = dict(changes(target))[self.operator]

        class Replace(ast.NodeTransformer):
            def visit(self, node: ast.AST) -> ast.AST:
                return ast.copy_location(changed, node) if node is target else self.generic_visit(node)

        return ast.fix_missing_locations(Replace().visit(tree))


@cache
def mutants_of(file: str) -> tuple[Mutant, ...]:
    """All mutants of the functions and methods in minddp/`file`."""
    tree = ast.parse((PACKAGE / file).read_text())
    found = []
    for name, function in _functions(tree):
        skipped = set(_not_mutated(function))
        for index, node in enumerate(ast.walk(function)):
            if node not in skipped:
                for operator, _ in changes(node):
                    text = ast.unparse(node).split("\n")[0]
                    found.append(
                        Mutant(file, name, index, operator, getattr(node, "lineno", function.lineno), text)
                    )
    return tuple(found)


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What each operator that applies to the node makes of it, by the operator's name."""
    match node:
        case ast.If() | ast.While() | ast.IfExp():
            yield "negate the condition", _with(node, test=ast.UnaryOp(ast.Not(), node.test))
        case ast.comprehension(ifs=[_, *_]):
            yield "drop the filter", _with(node, ifs=[])
        case ast.Compare(ops=[op]) if type(op) in OPPOSITE:
            yield "compare otherwise", _with(node, ops=[OPPOSITE[type(op)]()])
        case ast.BoolOp():
            yield "swap and, or", _with(node, op=OPPOSITE[type(node.op)]())
        case ast.UnaryOp(op=ast.Not()):
            yield "drop not", node.operand
        case ast.BinOp() | ast.AugAssign() if type(node.op) in OPPOSITE:
            yield "calculate otherwise", _with(node, op=OPPOSITE[type(node.op)]())
        case ast.Constant(value=bool(value)):
            yield "swap True, False", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "add 1", ast.Constant(value + 1)
        case ast.Expr(value=ast.Call()):
            yield "leave out the call", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "leave out the assignment", ast.Pass()
        case ast.Raise():
            yield "leave out the error", ast.Pass()
        case ast.With(items=[ast.withitem(optional_vars=None)]):
            yield "leave out the context", ast.If(ast.Constant(True), node.body, [])
        case ast.Try(finalbody=[_, *_]):
            yield "leave out finally", _with(node, finalbody=[ast.Pass()])


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """Functions and methods by qualified name. A function within a function belongs to it."""

    def within(node: ast.AST, path: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                yield path + child.name, child
            elif isinstance(child, ast.ClassDef):
                yield from within(child, f"{path}{child.name}.")

    yield from within(tree, "")


def _not_mutated(function: Function) -> Iterator[ast.AST]:
    """Signature and decorators, which are not its code; and texts for people: errors, logs, f-strings."""
    outside = [*function.decorator_list, function.args, *([function.returns] if function.returns else [])]
    for node in ast.walk(function):
        match node:
            case ast.Raise():
                outside += list(ast.iter_child_nodes(node))
            case ast.JoinedStr():
                outside.append(node)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="_log")))):
                outside.append(node)
            case ast.AnnAssign():
                outside.append(node.annotation)
    for root in outside:
        yield from ast.walk(root)
