"""Reads the package's source for test_house.py: what a file imports, openly or not, which classes it checks, how large
its parts are. It judges nothing: rules and exceptions are tables of test_house.py.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

#: a string that names a module of the house
_MODULE = re.compile(r"pario(\.\w+)+")
#: what imports, or runs, code that it is told by a string
_LOADERS = {"import_module", "__import__", "spec_from_file_location", "run_module", "run_path", "exec", "eval"}
#: attributes of sys that change where imports look
_SEARCH = {"path", "meta_path", "path_hooks", "path_importer_cache"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPILED = {"kernel", "inner"}


@dataclass(frozen=True)
class File:
    """One file of the house: its path below pario/, and its text."""

    name: str
    text: str

    @property
    def room(self) -> str:
        return Path(self.name).parts[0].removesuffix(".py")

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.name)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @functools.cached_property
    def code_lines(self) -> int:
        """Lines that are not empty, nor a comment, nor part of a docstring."""
        told: set[int] = set()
        for node in self.nodes:
            if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) and ast.get_docstring(node, False) is not None:
                told.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        lines = enumerate(map(str.strip, self.text.splitlines()), 1)
        return sum(bool(line) and line[0] != "#" and number not in told for number, line in lines)


class House:
    """All files below a folder, the package `pario` or another one."""

    def __init__(self, files: Mapping[str, str], top: str = "pario") -> None:
        self.top = top
        self.files = {name: File(name, text) for name, text in sorted(files.items())}

    @classmethod
    def at(cls, folder: Path) -> House:
        files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}
        return cls(files, folder.name)

    def file_of(self, module: str) -> str | None:
        """pario.format.page -> format/page.py, pario.format -> format/__init__.py; None if there is no such file."""
        path = "/".join(module.split(".")[1:])
        for name in (f"{path}.py", f"{path}/__init__.py".lstrip("/")):
            if name in self.files:
                return name
        return None

    def imported(self, file: File) -> Iterator[tuple[str, str | None]]:
        """(file of the house or None, what `file` says) for every import of its modules, lazy ones too."""
        for module, taken in imports(file):
            if module.split(".")[0] == self.top:
                found = (self.file_of(f"{module}.{taken}") if taken else None) or self.file_of(module)
                yield found, f"{module}, {taken}" if taken else module
        for module in named_modules(file) if self.top == "pario" else ():
            found = self.file_of(module)
            # A string like this need not be a module; and a file's own package is always there before it.
            if found is not None and found != f"{Path(file.name).parent}/__init__.py":
                yield found, module


def imports(file: File) -> Iterator[tuple[str, str | None]]:
    """(module, name taken from it) of every import, also those inside functions and below TYPE_CHECKING, and of
    import_module("literal")."""
    for node in file.nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (("." * node.level + (node.module or ""), alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and _name(node.func) == "import_module" and _literal(node):
            yield _literal(node), None


def named_modules(file: File) -> Iterator[str]:
    """Modules of the house that stand as strings in the code: tables of lazy imports, keys of sys.modules."""
    for node in file.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _MODULE.fullmatch(node.value):
            yield node.value


def hidden_imports(file: File) -> Iterator[str]:
    """Imports that cannot be read from the source, and changes of where imports look.

    import_module is readable if its argument is a literal or was taken, in the same function, out of a dict of the
    module whose values are literals.
    """
    readable = {id(call.func) for call in _readable_calls(file)}
    for node in file.nodes:
        if isinstance(node, (ast.Name, ast.Attribute)) and _name(node) in _LOADERS and id(node) not in readable:
            yield f"{file.name}:{node.lineno} uses {ast.unparse(node)}"
        elif isinstance(node, ast.Attribute) and node.attr in _SEARCH and _name(node.value) == "sys":
            yield f"{file.name}:{node.lineno} uses sys.{node.attr}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and alias.name.split(".")[0] in ("sys", "importlib", "runpy", "builtins"):
                    yield f"{file.name}:{node.lineno} gives {alias.name} another name"
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (node.module == "sys" and alias.name in _SEARCH) or (alias.name in _LOADERS and alias.asname):
                    yield f"{file.name}:{node.lineno} takes {alias.name} from {node.module}"


def _readable_calls(file: File) -> Iterator[ast.Call]:
    tables = {
        target.id
        for node in file.tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict)
        if all(isinstance(value, ast.Constant) or _same_for_all(value) for value in node.value.values)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }

    def looked_up(value: ast.AST) -> bool:
        """TABLE[...] or TABLE.get(...)"""
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "get":
            return _name(value.func.value) in tables and len(value.args) == 1
        return isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name) and value.value.id in tables

    for function in (node for node in file.nodes if isinstance(node, Function)):
        inside = list(ast.walk(function))
        taken = {  # the targets of `name = TABLE[...]`
            id(node.targets[0])
            for node in inside
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and looked_up(node.value)
        }
        stores: dict[str, list[bool]] = {argument.arg: [False] for argument in _arguments(function)}
        for node in inside:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                stores.setdefault(node.id, []).append(id(node) in taken)
        for node in inside:
            if isinstance(node, ast.Call) and _name(node.func) == "import_module" and len(node.args) == 1:
                argument = node.args[0]
                known = isinstance(argument, ast.Name) and all(stores.get(argument.id, [False]))
                if _literal(node) or known or looked_up(argument):
                    yield node
    yield from (
        node
        for node in file.nodes
        if isinstance(node, ast.Call) and _name(node.func) == "import_module" and _literal(node)
    )


def _same_for_all(value: ast.AST) -> bool:
    """dict.fromkeys(..., "literal")"""
    return (
        isinstance(value, ast.Call)
        and ast.unparse(value.func) == "dict.fromkeys"
        and len(value.args) == 2
        and isinstance(value.args[1], ast.Constant)
    )


def class_checks(house: House, file: File) -> Iterator[tuple[int, str, str]]:
    """(line, file, class) of every isinstance, issubclass, `type(x) is` and `case Class():` that asks for a class of
    another room."""
    classes: dict[str, str] = {}  # name here -> file of the house
    modules: dict[str, str] = {}
    for module, taken in imports(file):
        if module.split(".")[0] == "pario" and taken:
            submodule = house.file_of(f"{module}.{taken}")
            if submodule:
                modules[taken] = submodule
            elif whole := house.file_of(module):
                classes[taken] = whole

    def asked(node: ast.AST | None) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.Name) and node.id in classes:
            yield classes[node.id], node.id
        elif isinstance(node, ast.Attribute) and _name(node.value) in modules:
            yield modules[_name(node.value)], node.attr
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            for element in node.elts:
                yield from asked(element)
        elif isinstance(node, ast.BinOp):
            yield from asked(node.left)
            yield from asked(node.right)

    for node in file.nodes:
        wanted: list[ast.AST] = []
        if isinstance(node, ast.Call) and _name(node.func) in ("isinstance", "issubclass") and len(node.args) == 2:
            wanted = [node.args[1]]
        elif isinstance(node, ast.Compare) and any(_is_type_of(one) for one in (node.left, *node.comparators)):
            wanted = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchClass):
            wanted = [node.cls]
        for one in wanted:
            for where, name in asked(one):
                if house.files[where].room != file.room:
                    yield node.lineno, where, name  # type: ignore[attr-defined]


def _is_type_of(node: ast.AST) -> bool:
    """type(x) or x.__class__"""
    return (isinstance(node, ast.Call) and _name(node.func) == "type" and len(node.args) == 1) or (
        isinstance(node, ast.Attribute) and node.attr == "__class__"
    )


def functions(file: File) -> Iterator[tuple[str, Function]]:
    """(qualified name, function) of all functions and methods, nested ones too."""

    def inside(node: ast.AST, path: tuple[str, ...]) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                yield ".".join((*path, child.name)), child
            named = isinstance(child, (*Function.__args__, ast.ClassDef))
            yield from inside(child, (*path, child.name) if named else path)  # type: ignore[attr-defined]

    yield from inside(file.tree, ())


def classes(file: File) -> Iterator[tuple[str, int]]:
    """(name, number of methods, properties among them)"""
    for node in file.nodes:
        if isinstance(node, ast.ClassDef):
            yield node.name, sum(isinstance(one, Function) for one in node.body)


def _arguments(function: Function) -> list[ast.arg]:
    given = function.args
    return [
        *given.posonlyargs,
        *given.args,
        *given.kwonlyargs,
        *(one for one in (given.vararg, given.kwarg) if one),
    ]


def arguments(function: Function) -> tuple[int, int]:
    """(all, of which may be given by position), without self and cls."""
    names = [one.arg for one in _arguments(function)]
    mine = int(names[:1] in (["self"], ["cls"]))
    return len(names) - mine, len(function.args.posonlyargs) + len(function.args.args) - mine


def is_kernel(function: Function) -> bool:
    return any(_name(one.func if isinstance(one, ast.Call) else one) in _COMPILED for one in function.decorator_list)


def names(file: File) -> Iterator[tuple[int, str]]:
    """(line, name) of what the file gives a name to: variables, arguments, functions, classes, attributes."""
    for node in file.nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, (*Function.__args__, ast.ClassDef)):
            yield node.lineno, node.name  # type: ignore[attr-defined]


def _name(node: ast.AST) -> str:
    """The last part of a dotted name, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _literal(call: ast.Call) -> str:
    first = call.args[0] if call.args else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
