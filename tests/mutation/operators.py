"""Mutants of a Python source: one small, wrong change each, as mutmut and cosmic-ray make them."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_CALLS = {"max": "min", "min": "max", "any": "all", "all": "any"}
_NOT_CODE = {"annotation", "returns", "decorator_list", "type_params"}


@dataclass(frozen=True)
class Mutant:
    """A changed source.

    Parameters
    ----------
    lines
        First and last line of the changed statement in the original.
    change
        What was changed, in a few words.
    source
        The whole changed source.
    at_import
        Whether the statement stands outside of every function.
    """

    lines: tuple[int, int]
    change: str
    source: str
    at_import: bool


def mutants(source: str, count: int | None = None) -> list[Mutant]:
    """Make mutants of a source, `count` of them spread evenly over all possible ones.

    Examples
    --------
    >>> [(mutant.lines, mutant.change) for mutant in mutants("def f(x):\\n    return x + 1 < 2")]
    [((2, 2), '< to <='), ((2, 2), '+ to -'), ((2, 2), '1 to 2'), ((2, 2), '2 to 3')]
    """
    tree = ast.parse(source)
    sites = list(_sites(tree, (1, 1)))
    bodies = [
        range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ]
    if count is not None and len(sites) > count:
        sites = [sites[i * len(sites) // count] for i in range(count)]
    made = []
    for lines, change, apply, undo in sites:
        apply()
        at_import = not any(lines[0] in body for body in bodies)
        made.append(Mutant(lines, change, ast.unparse(tree), at_import))
        undo()
    return made


_Site = tuple[tuple[int, int], str, Callable[[], None], Callable[[], None]]


def _sites(node: ast.AST, lines: tuple[int, int]) -> Iterator[_Site]:
    """Every place that can be changed, in the order of the source; nothing is changed yet."""
    for name, value in ast.iter_fields(node):
        if name in _NOT_CODE or isinstance(node, ast.JoinedStr | ast.Raise):
            continue
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            if not isinstance(child, ast.AST):
                continue
            within = _lines_of(child) if isinstance(child, ast.stmt) else lines
            holder = value if isinstance(value, list) else None
            for change, replacement in _replacements(child):
                apply, undo = _swap(node, name, holder, index, child, replacement)
                yield within, change, apply, undo
            yield from _sites(child, within)


def _lines_of(statement: ast.stmt) -> tuple[int, int]:
    """The lines of a simple statement; of a compound one those of its head."""
    last = statement.end_lineno or statement.lineno
    body = getattr(statement, "body", None)
    if body:
        last = max(statement.lineno, body[0].lineno - 1)
    return statement.lineno, last


def _swap(
    node: ast.AST,
    name: str,
    holder: list[ast.AST] | None,
    index: int,
    old: ast.AST,
    new: ast.AST,
) -> tuple[Callable[[], None], Callable[[], None]]:
    def put(child: ast.AST) -> None:
        if holder is None:
            setattr(node, name, child)
        else:
            holder[index] = child

    return lambda: put(new), lambda: put(old)


def _replacements(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What may stand in a node's place, with a description."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        other = _COMPARISONS[type(node.ops[0])]()
        changed = ast.Compare(node.left, [other, *node.ops[1:]], node.comparators)
        yield f"{_symbol(node.ops[0])} to {_symbol(other)}", changed
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        operator = _ARITHMETIC[type(node.op)]()
        if not isinstance(node.left, ast.Constant | ast.JoinedStr) or not isinstance(
            node.left.value if isinstance(node.left, ast.Constant) else "", str
        ):
            changed_operation = ast.BinOp(node.left, operator, node.right)
            yield f"{_symbol(node.op)} to {_symbol(operator)}", changed_operation
    elif isinstance(node, ast.BoolOp):
        joined = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield (
            f"{_symbol(node.op)} to {_symbol(joined)}",
            ast.BoolOp(joined, node.values),
        )
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield f"{_symbol(node.op)} removed", node.operand
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield f"{node.value} to {not node.value}", ast.Constant(not node.value)
        elif isinstance(node.value, int | float):
            yield f"{node.value} to {node.value + 1}", ast.Constant(node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield "conditional: always the second", node.orelse
    elif isinstance(node, ast.If):
        never = ast.If(ast.Constant(False), node.body, node.orelse)
        yield "branch never taken", never
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        other_name = _CALLS[node.func.id]
        call = ast.Call(ast.Name(other_name, ast.Load()), node.args, node.keywords)
        yield f"{node.func.id} to {other_name}", call
    elif _is_deletable(node):
        yield "statement deleted", ast.Pass()


def _is_deletable(node: ast.AST) -> bool:
    """Whether a statement without which the code still runs: a call, an update, a raise."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    return isinstance(node, ast.AugAssign | ast.Raise)


_SYMBOLS = {
    "Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">=", "Eq": "==", "NotEq": "!=", "Is": "is",
    "IsNot": "is not", "In": "in", "NotIn": "not in", "Add": "+", "Sub": "-", "Mult": "*",
    "Div": "/", "FloorDiv": "//", "Mod": "%", "Pow": "**", "BitAnd": "&", "BitOr": "|",
    "And": "and", "Or": "or", "Not": "not", "USub": "-",
}  # fmt: skip


def _symbol(node: ast.AST) -> str:
    return _SYMBOLS[type(node).__name__]
