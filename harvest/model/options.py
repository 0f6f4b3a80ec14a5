"""Which `model.options` a kind of model takes, told by transformers' own source before it is imported.

What is not told plainly (code of the checkpoint's own, a kind without a file of its name) is left to loading.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from harvest.errors import RequestError
from harvest.settings.base import nearest
from harvest.settings.model import NO_OPTIONS, OF_OURS, ModelSettings

LOADERS = (("modeling_utils.py", "PreTrainedModel"), ("models/auto/auto_factory.py", "_BaseAutoModelClass"))
"""File and class of each `from_pretrained` that options pass through, one after the other."""


def refuse_options(settings: ModelSettings, kind: str) -> None:
    """Raises RequestError for the first of `model.options` that this `kind` (model_type) of model does not take."""
    if not settings.options or settings.trust_remote_code:
        return
    taken = options_of(kind)
    for key in settings.options:
        if taken is not None and key not in taken:
            known = sorted(taken - {*OF_OURS, *NO_OPTIONS, "token"})
            meant = nearest(key, known)
            hint = f"did you mean {meant[0]}? " if meant else ""
            raise RequestError(f"model.options.{key}: no such option; {hint}this model takes {', '.join(known)}")


def options_of(kind: str) -> frozenset[str] | None:
    """Keyword arguments of `from_pretrained`, and of the classes of this kind, to which it passes on the rest; None
    where they are not told."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    folder, word = Path(spec.origin).parent, kind.replace("-", "_")
    try:
        loaders = [_class(folder / file, name) for file, name in LOADERS]
        own = ast.parse((folder / "models" / word / f"modeling_{word}.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, StopIteration):
        return None
    inits = [_method(node, "__init__") for node in own.body if isinstance(node, ast.ClassDef) and _is_model(node)]
    models = [init for init in inits if init is not None]
    if any(init.args.kwarg is not None for init in models):
        return None
    taken = {name for init in models for name in _arguments(init)}
    for loader in loaders:
        method = _method(loader, "from_pretrained")
        if method is None:
            return None
        taken |= {*_arguments(method), *_taken_out(method)}
    return frozenset(name for name in taken if not name.startswith("_"))


def _class(path: Path, name: str) -> ast.ClassDef:
    """Raises OSError or StopIteration where it is not there."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)


def _is_model(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id.endswith("PreTrainedModel") for base in node.bases)


def _method(of: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((node for node in of.body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def _arguments(method: ast.FunctionDef) -> Iterator[str]:
    """Those that may be given by name, but for what it is called on, where from and with which config."""
    for argument in [*method.args.args, *method.args.kwonlyargs]:
        if argument.arg not in ("self", "cls", "config", "pretrained_model_name_or_path"):
            yield argument.arg


def _taken_out(method: ast.FunctionDef) -> Iterator[str]:
    """What the body looks for in its `kwargs`: `pop` and `get`, `in`, and lists of names that it goes through."""
    for node in ast.walk(method):
        sought: list[ast.expr] = list(node.elts) if isinstance(node, ast.List) else []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_kwargs(node.func.value):
            sought = node.args[:1]
        elif isinstance(node, ast.Compare) and _is_kwargs(node.comparators[0]):
            sought = [node.left]
        yield from (name.value for name in sought if isinstance(name, ast.Constant) and isinstance(name.value, str))


def _is_kwargs(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id.endswith("kwargs")
