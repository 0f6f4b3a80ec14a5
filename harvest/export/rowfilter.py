"""The filter of `--rows`: a comparison of columns of the token table, read as an expression and never evaluated.

    position >= 1 and not special            token in [5, 6]            0 < position <= 16 or span == "answer"

A token outside all spans has the span "".
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harvest.errors import RequestError

COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}
ALLOWED = "comparisons (== != < <= > >= in, not in) of columns with constants, and, or, not, parentheses"
MAX_LENGTH = 10_000
"""Characters. Python's own parser wants memory in proportion, and gives up on deep nesting."""


def row_filter(text: str, schema: pa.Schema) -> pc.Expression:
    """The filter as an expression over the token table. Raises RequestError naming the part that cannot be."""
    if len(text) > MAX_LENGTH:
        raise RequestError(f"--rows of {len(text)} characters: allowed are {MAX_LENGTH}")
    try:
        found = _Reader(text, schema).truth(ast.parse(text.strip(), mode="eval").body)
        schema.empty_table().filter(found)
    except RequestError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        raise RequestError(f"--rows = {text!r:.200}: no filter; allowed are {ALLOWED}") from None
    except (pa.ArrowException, TypeError) as error:
        raise RequestError(f"--rows = {text!r:.200}: {' '.join(str(error).split())[:200]}") from None
    return found


class _Reader:
    """From Python's syntax tree to an expression; what is not listed here is refused."""

    def __init__(self, text: str, schema: pa.Schema) -> None:
        self._text, self._schema = text, schema

    def truth(self, node: ast.expr) -> pc.Expression:
        """A part that is true or false for a row."""
        if isinstance(node, ast.BoolOp):
            first, *others = [self.truth(value) for value in node.values]
            for other in others:
                first = first & other if isinstance(node.op, ast.And) else first | other
            return first
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~self.truth(node.operand)
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        if isinstance(node, ast.Name) and pa.types.is_boolean(self._field(node).type):
            return pc.field(node.id)
        raise self._refusal(node)

    def _comparison(self, node: ast.Compare) -> pc.Expression:
        """`0 < position <= 16` holds where each of its comparisons does."""
        sides, found = [node.left, *node.comparators], []
        for left, operator, right in zip(sides, node.ops, sides[1:]):
            if isinstance(operator, ast.In | ast.NotIn):
                held = self._value(left).isin(_values(self._list(right), self._column_type(left)))
                found.append(held if isinstance(operator, ast.In) else ~held)
            elif type(operator) in COMPARISONS:
                found.append(COMPARISONS[type(operator)](self._value(left), self._value(right)))
            else:
                raise self._refusal(node)
        whole = found[0]
        for part in found[1:]:
            whole = whole & part
        return whole

    def _value(self, node: ast.expr) -> pc.Expression:
        if isinstance(node, ast.Name):
            kind = self._field(node).type
            field = pc.field(node.id)
            if pa.types.is_dictionary(kind):  # a span: without this a row outside all would be neither equal nor not
                return pc.coalesce(field.cast(kind.value_type), pc.scalar(""))
            return field
        return pc.scalar(self._constant(node))

    def _list(self, node: ast.expr) -> Sequence[Any]:
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self._constant(item) for item in node.elts]
        raise self._refusal(node)

    def _column_type(self, node: ast.expr) -> pa.DataType:
        if not isinstance(node, ast.Name):
            raise self._refusal(node)
        kind = self._field(node).type
        return kind.value_type if pa.types.is_dictionary(kind) else kind

    def _constant(self, node: ast.expr) -> int | float | str | bool:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._constant(node.operand)
            if not isinstance(value, str):
                return -value
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str):
            return node.value
        raise self._refusal(node)

    def _field(self, node: ast.Name) -> pa.Field:
        if node.id not in self._schema.names:
            raise RequestError(
                f"--rows = {self._text!r:.200}: {node.id!r} is not in the token table: {', '.join(self._schema.names)}"
            )
        return self._schema.field(node.id)

    def _refusal(self, node: ast.AST) -> RequestError:
        part = ast.get_source_segment(self._text.strip(), node) or self._text
        return RequestError(f"--rows = {self._text!r:.200}: {part!r:.80} is not allowed; allowed are {ALLOWED}")


def _values(constants: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Those that a column of whole numbers can hold; no row has the others."""
    if pa.types.is_integer(kind):
        least, most = (getattr(np.iinfo(kind.to_pandas_dtype()), end) for end in ("min", "max"))
        constants = [c for c in constants if isinstance(c, str) or (least <= c <= most and c == int(c))]
    return pa.array(constants, kind)
