"""The contract between the parts: imports, purity, length of code.

The checks read syntax trees, so nothing is imported and the whole file takes about a second. Each
check is a function from sources to offences, tried first on code that breaks the rule.
"""

import ast
import graphlib
import importlib.metadata
import itertools
import operator
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 60
MAX_CHAIN_LINES = 1200
"""Most lines of a class together with all of our classes that it inherits from, which its reader
must know."""
MAX_CHAIN = 3
"""Most classes of ours in an inheritance chain. Only implementations count, neither interfaces nor
errors."""
MAX_FOLDER_FILES = 25
FRAGMENT_LINES = 40
"""A shorter file must have two importers, or it belongs into another file."""

# Part -> the other parts that it may import. A part is swarm.X, or peers as a whole.
BASE = frozenset(
    {"swarm.canonical", "swarm.config", "swarm.errors", "swarm.experts", "swarm.version"}
)
DURABLE = frozenset({"swarm.durable"})
# Threads and tasks: for all impure code.
BACKGROUND = frozenset({"swarm.background"})
PROTOCOL = BASE | {"swarm.codings", "swarm.protocol"}
MAY_IMPORT = {
    "swarm.background": frozenset({"swarm.errors", "swarm.protocol"}),
    "swarm.canonical": frozenset[str](),
    "swarm.config": BASE,
    "swarm.durable": frozenset[str](),
    "swarm.errors": frozenset[str](),
    "swarm.progress": frozenset[str](),
    "swarm.experts": BASE,
    "swarm.run_files": BASE,
    "swarm.version": frozenset[str](),
    "swarm.protocol": BASE | {"swarm.codings"},
    "swarm.codecs": BASE,
    "swarm.codings": BASE,
    "swarm.deltas": BASE | {"swarm.codecs", "swarm.codings"},
    "swarm.model": BASE | DURABLE | {"swarm.codings"},
    "swarm.data": BASE | DURABLE | BACKGROUND | {"swarm.progress"},
    "swarm.evaluation": PROTOCOL | DURABLE | {"swarm.model", "swarm.data"},
    "swarm.train": BASE | DURABLE | BACKGROUND | {"swarm.model", "swarm.data"},
    "swarm.network": PROTOCOL | DURABLE | BACKGROUND | {"swarm.codecs", "swarm.deltas"},
    "swarm.monitor": PROTOCOL | BACKGROUND,
    "swarm.emulation": PROTOCOL | BACKGROUND,
}
MAY_IMPORT["swarm.peer"] = frozenset(MAY_IMPORT) - {"swarm.emulation"}
MAY_IMPORT["swarm.export"] = frozenset(MAY_IMPORT) - {"swarm.emulation"}
MAY_IMPORT["swarm.api"] = frozenset(MAY_IMPORT) - {"swarm.emulation"}
MAY_IMPORT["peers"] = frozenset(MAY_IMPORT) - {"swarm.api"}
# Runs the peer as a whole in virtual time, so it stands above all parts of it.
LONGEVITY = "swarm.emulation.longevity"
MAY_IMPORT[LONGEVITY] = frozenset(MAY_IMPORT) - {"swarm.api", "peers"}
# The package's own file re-exports the names of swarm.api on first use: a script gets them by
# `import swarm`, and an import of one part of the library loads that part only.
FACADE = ("swarm.api", "swarm.version")

# Outside package -> the only parts that may import it.
RESERVED = {
    "hivemind": frozenset({"swarm.network"}),
    "greenlet": frozenset({LONGEVITY}),
    "click": frozenset({"peers"}),
    # The page and its metrics: nothing else needs a server.
    "starlette": frozenset({"swarm.monitor"}),
    "uvicorn": frozenset({"swarm.monitor"}),
    "prometheus_client": frozenset({"swarm.monitor"}),
    "tensorboardX": frozenset({"peers"}),
    "pickle": frozenset[str](),
    "cPickle": frozenset[str](),
    "cloudpickle": frozenset[str](),
    "dill": frozenset[str](),
    "marshal": frozenset[str](),
    "shelve": frozenset[str](),
}

# Imports from outside for the protocol: no clock, randomness, logging, tensors or I/O.
PURE_MODULES = frozenset(
    {
        "__future__",
        "abc",
        "base64",
        "bisect",
        "blake3",
        "collections",
        "copy",
        "dataclasses",
        "enum",
        "fractions",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "json",
        "math",
        "msgpack",
        "operator",
        "pydantic",
        "re",
        "string",
        "struct",
        "types",
        "typing",
    }
)
IMPURE_CALLS = frozenset({"open", "print", "input", "breakpoint"})
UNSAFE_CALLS = frozenset({"eval", "exec", "torch.load", "__import__", "importlib.import_module"})
# At its top level a module may only define names. These kinds of statements act at import.
ACTS_AT_IMPORT = (ast.For, ast.While, ast.With, ast.Delete, ast.Raise, ast.Assert)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
MIN_REASON_WORDS = 3
STANDARD_SINCE_3_14 = frozenset({"compression"})


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return _parse(self.text)

    @property
    def part(self) -> str:
        return part_of(self.name)

    @property
    def package(self) -> str:
        """The package that relative imports in this file start from."""
        return self.name if self.path.endswith("__init__.py") else self.name.rpartition(".")[0]


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def module_at(path: str, text: str) -> Module:
    parts = Path(path).with_suffix("").parts
    return Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path, text)


def part_of(name: str) -> str:
    if name.startswith(LONGEVITY):
        return LONGEVITY
    return "peers" if name.split(".")[0] == "peers" else ".".join(name.split(".")[:2])


@cache
def modules() -> tuple[Module, ...]:
    paths = sorted([*ROOT.glob("swarm/**/*.py"), *ROOT.glob("peers/**/*.py")])
    return tuple(module_at(str(p.relative_to(ROOT)), p.read_text(encoding="utf-8")) for p in paths)


def imports_of(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import. `from a import b` gives a.b, which may be a module."""
    return ((line, name) for line, name, _ in bindings_of(module))


def bindings_of(module: Module) -> Iterator[tuple[int, str, str]]:
    """As `imports_of`, with the local name of each import. For `import a.b` this is a.b."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (
                (node.lineno, alias.name, alias.asname or alias.name) for alias in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.package.split(".")
                base = ".".join(above[: len(above) - node.level + 1] + ([base] if base else []))
            yield from (
                (node.lineno, f"{base}.{alias.name}", alias.asname or alias.name)
                for alias in node.names
            )


def is_ours(name: str) -> bool:
    return name.split(".")[0] in ("swarm", "peers")


def direction_offences(sources: tuple[Module, ...]) -> list[str]:
    offences = []
    for module in sources:
        if module.name == "swarm":
            found = ((line, name) for line, name in imports_of(module) if is_ours(name))
            offences += [
                f"{module.path}:{k} imports {n}" for k, n in found if part_of(n) not in FACADE
            ]
            continue
        if module.part not in MAY_IMPORT:
            offences.append(f"{module.path}: {module.part} has no place in MAY_IMPORT")
            continue
        allowed = MAY_IMPORT[module.part] | {module.part}
        offences += [
            f"{module.path}:{line} imports {name}"
            for line, name in imports_of(module)
            if is_ours(name) and part_of(name) not in allowed
        ]
    return offences


def reserved_offences(sources: tuple[Module, ...]) -> list[str]:
    return [
        f"{module.path}:{line} imports {name}"
        for module in sources
        for line, name in imports_of(module)
        if module.part not in RESERVED.get(name.split(".")[0], {module.part})
    ]


def called_name(node: ast.AST) -> str:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def call_offences(sources: tuple[Module, ...], forbidden: frozenset[str]) -> list[str]:
    return [
        f"{module.path}:{node.lineno} calls {called_name(node)}"
        for module in sources
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and called_name(node) in forbidden
    ]


def impurities(sources: tuple[Module, ...]) -> list[str]:
    """Impure statements of swarm.protocol, and of our modules that it imports."""
    protocol = tuple(m for m in sources if m.part == "swarm.protocol")
    offences = [
        f"{module.path}:{line} imports {name}"
        for module in protocol
        for line, name in imports_of(module)
        if not is_ours(name) and name.split(".")[0] not in PURE_MODULES
    ]
    pulled_in = tuple(m for m in sources if m.part in MAY_IMPORT["swarm.protocol"])
    offences += [
        f"{module.path}:{line} imports {name}, and the protocol imports that module"
        for module in pulled_in
        for line, name in imports_of(module)
        if name.split(".")[0] in ("torch", "numpy", "logging", "time", "random", "socket")
    ]
    return offences + call_offences(protocol + pulled_in, IMPURE_CALLS)


def modules_imported(sources: tuple[Module, ...]) -> Iterator[tuple[Module, Module]]:
    """Pairs of a module and another one that it imports, once each."""
    named = {module.name: module for module in sources}
    for module in sources:
        found = {n if n in named else n.rpartition(".")[0] for _, n in imports_of(module)}
        yield from ((module, named[name]) for name in found & named.keys() - {module.name})


def cycles(sources: tuple[Module, ...]) -> list[str]:
    graph: dict[str, set[str]] = {}
    for module, target in modules_imported(sources):
        graph.setdefault(module.name, set()).add(target.name)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" <- ".join(error.args[1])]
    return []


def hidden_import_offences(sources: tuple[Module, ...]) -> list[str]:
    """Imports inside functions without a reason on their line.

    A linter's directive is no reason.
    """
    offences = []
    for module in sources:
        lines = module.text.splitlines()
        functions = (n for n in ast.walk(module.tree) if isinstance(n, FUNCTION))
        inside = itertools.chain.from_iterable(ast.walk(function) for function in functions)
        for node in inside:
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            comment = " ".join(lines[node.lineno - 1 : node.end_lineno]).partition("#")[2]
            reason = comment.partition("noqa")[0].partition("type: ignore")[0]
            if len(reason.split()) < MIN_REASON_WORDS:
                offences.append(f"{module.path}:{node.lineno} {lines[node.lineno - 1].strip()}")
    return sorted(set(offences))


def import_time_offences(sources: tuple[Module, ...]) -> list[str]:
    return [
        f"{module.path}:{node.lineno} {ast.unparse(node).splitlines()[0]}"
        for module in sources
        for node in module.tree.body
        if isinstance(node, ACTS_AT_IMPORT)
        or (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant))
    ]


def long_files(sources: tuple[Module, ...]) -> list[str]:
    counts = ((module.text.count("\n") + 1, module.path) for module in sources)
    return [f"{path}: {count} lines" for count, path in counts if count > MAX_FILE_LINES]


def long_functions(sources: tuple[Module, ...]) -> list[str]:
    return [
        f"{module.path}:{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for module in sources
        for node in ast.walk(module.tree)
        if isinstance(node, FUNCTION) and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


@dataclass(frozen=True)
class Family:
    """A class and its bases among our classes."""

    node: ast.ClassDef
    bases: tuple[str, ...]

    @property
    def is_interface(self) -> bool:
        """Whether it is a protocol, or has only methods with nothing but a docstring."""
        if any(ast.unparse(base).startswith("Protocol") for base in self.node.bases):
            return True
        methods = [each for each in self.node.body if isinstance(each, FUNCTION)]
        lines = itertools.chain(self.node.body, *(method.body for method in methods))
        rest = [line for line in lines if line not in methods]
        return bool(methods) and all(
            isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) for line in rest
        )


def families(sources: tuple[Module, ...]) -> dict[str, Family]:
    """Every class by its full name. Names of bases are resolved through imports and packages."""
    classes = [
        (module, node)
        for module in sources
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    ]
    own = {f"{module.name}.{node.name}" for module, node in classes}
    bound = {
        f"{module.name}.{local}": name
        for module in sources
        for _, name, local in bindings_of(module)
    }

    def resolved(name: str) -> str | None:
        holder, _, attribute = name.rpartition(".")
        if name in own:
            return name
        if bound.get(name, name) != name:
            return resolved(bound[name])
        return resolved(f"{bound[holder]}.{attribute}") if holder in bound else None

    def base_of(module: Module, base: ast.expr) -> str | None:
        named = base.value if isinstance(base, ast.Subscript) else base
        return resolved(f"{module.name}.{ast.unparse(named)}")

    return {
        f"{module.name}.{node.name}": Family(
            node, tuple(found for base in node.bases if (found := base_of(module, base)))
        )
        for module, node in classes
    }


def long_ancestries(sources: tuple[Module, ...]) -> list[str]:
    """Classes that are too long together with all our classes that they inherit from."""
    of = families(sources)

    def ancestry(name: str) -> set[str]:
        return {name}.union(*map(ancestry, of[name].bases))

    def lines(name: str) -> int:
        node = of[name].node
        return (node.end_lineno or 0) - node.lineno + 1

    totals = {name: sum(map(lines, ancestry(name))) for name in of}
    return [f"{name}: {total} lines" for name, total in totals.items() if total > MAX_CHAIN_LINES]


def long_chains(sources: tuple[Module, ...]) -> list[str]:
    """Classes with too many base classes. Any number of interfaces and errors is allowed."""
    of = families(sources)

    def depth(name: str) -> int:
        above = max(map(depth, of[name].bases), default=0)
        return above + (not of[name].is_interface and not name.startswith("swarm.errors."))

    return [name for name in of if depth(name) > MAX_CHAIN]


def folder_circles(sources: tuple[Module, ...]) -> list[str]:
    """Imports between folders, at the depth where their paths part, that lead back.

    The files of a folder count as one more folder inside it. Each file of `swarm` itself
    is a part of its own, see MAY_IMPORT.
    """
    graph: dict[str, set[str]] = {}
    for module, target in modules_imported(sources):
        way, there = path_of(module), path_of(target)
        shared = sum(itertools.accumulate(map(operator.eq, way, there), operator.and_))
        start, end = ("/".join(each[: shared + 1]) for each in (way, there))
        if start != end:
            graph.setdefault(start, set()).add(end)
    reached = {folder: reachable(graph, folder) for folder in graph}
    return [
        f"{start} -> {end}"
        for start, ends in sorted(graph.items())
        for end in sorted(ends)
        if start in reached.get(end, ())
    ]


def path_of(module: Module) -> list[str]:
    parts = module.path.split("/")
    return parts if parts[:-1] == ["swarm"] else parts[:-1]


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found, new = set[str](), {start}
    while new := set[str]().union(*(graph.get(each, set()) for each in new)) - found:
        found |= new
    return found


def is_package(module: Module) -> bool:
    return module.path.endswith("__init__.py")


def crowded_folders(sources: tuple[Module, ...]) -> list[str]:
    counts = Counter(m.path.rpartition("/")[0] for m in sources if not is_package(m))
    return [folder for folder, count in counts.items() if count > MAX_FOLDER_FILES]


def namesakes(sources: tuple[Module, ...]) -> list[str]:
    """File names that occur in several folders."""
    counts = Counter(m.path.rpartition("/")[2] for m in sources if not is_package(m))
    return [name for name, count in counts.items() if count > 1]


def fragments(sources: tuple[Module, ...]) -> list[str]:
    importers = Counter(target.name for _, target in modules_imported(sources))
    return [
        module.path
        for module in sources
        if module.text.count("\n") < FRAGMENT_LINES
        if not is_package(module) and importers[module.name] < 2
    ]


Law = Callable[[tuple[Module, ...]], list[str]]

# Present violations of a law. The lists only become shorter.
OFFENDERS: dict[Law, frozenset[str]] = {
    # The engines of several GPUs, which PyTorch's own parts are to replace.
    long_chains: frozenset(
        {
            "swarm.train.parallel.pipeline.HeadsStageEngine",
            "swarm.train.parallel.pipeline.ShardedStageEngine",
        }
    ),
    folder_circles: frozenset(),
    crowded_folders: frozenset(),
    namesakes: frozenset(),
    fragments: frozenset(),
}

BREAKS = {
    "facade": (direction_offences, "swarm/__init__.py", "from swarm.peer.session import Peer"),
    "upward": (direction_offences, "swarm/protocol/a.py", "from swarm.network import node"),
    "sideways": (direction_offences, "swarm/train/a.py", "import swarm.network.node.node"),
    "relative": (direction_offences, "swarm/train/a.py", "from ..network import node"),
    "unplaced": (direction_offences, "swarm/helpers.py", ""),
    "hivemind": (reserved_offences, "swarm/monitor/a.py", "from hivemind.dht import node"),
    "click": (reserved_offences, "swarm/monitor/a.py", "import click"),
    "pickle": (reserved_offences, "peers/peer.py", "import pickle"),
    "clock": (impurities, "swarm/protocol/a.py", "import time"),
    "tensors below": (impurities, "swarm/experts.py", "import torch"),
    "file": (impurities, "swarm/protocol/a.py", "def f():\n    return open('x')"),
    "hidden": (hidden_import_offences, "peers/a.py", "def f():\n    import rich  # noqa: X123"),
    "acts": (import_time_offences, "swarm/model/a.py", "torch.set_num_threads(1)"),
    "long file": (long_files, "swarm/model/a.py", "\n" * MAX_FILE_LINES),
    "long function": (
        long_functions,
        "swarm/model/a.py",
        "def f():\n" + "    g()\n" * MAX_FUNCTION_LINES,
    ),
    "long ancestry": (
        long_ancestries,
        "swarm/model/a.py",
        "class A:\n" + "    x = 1\n" * (MAX_CHAIN_LINES - 2) + "class B(A):\n    y = 1\n",
    ),
    "long chain": (
        long_chains,
        "swarm/model/a.py",
        "".join(f"class {x}:\n    y = 1\n" for x in ("A", "B(A)", "C(B)", "D(C)")),
    ),
    "fragment": (fragments, "swarm/model/a.py", "\n" * (FRAGMENT_LINES - 1)),
}


@pytest.mark.parametrize("rule", sorted(BREAKS))
def test_each_rule_catches_what_breaks_it(rule: str) -> None:
    check, path, text = BREAKS[rule]
    assert check((module_at(path, text),))


def test_a_cycle_of_modules_is_caught() -> None:
    first = module_at("swarm/model/a.py", "from swarm.model.b import f")
    second = module_at("swarm/model/b.py", "from swarm.model import a")
    assert cycles((first, second))
    assert not cycles((first,))


CHAIN = tuple(
    module_at(f"swarm/model/{name}.py", f"{text}:\n    def f(self) -> None:\n        g()\n")
    for name, text in {
        "a": "class A",
        "b": "import swarm.model.a\nclass B(swarm.model.a.A)",
        "c": "from swarm.model import b\nclass C(b.B)",
        "d": "from swarm.model.c import C as Base\nclass D(Base)",
    }.items()
)


def test_a_chain_of_classes_is_followed_through_modules() -> None:
    assert long_chains(CHAIN) == ["swarm.model.d.D"]
    assert not long_chains(CHAIN[1:])


@pytest.mark.parametrize(
    "text",
    [
        "class A(Protocol):\n    x: int\n",
        "class A:\n    def f(self) -> None:\n        'Its purpose.'\n",
    ],
)
def test_an_interface_is_no_link_of_a_chain(text: str) -> None:
    assert not long_chains((module_at("swarm/model/a.py", text), *CHAIN[1:]))


def test_an_error_is_no_link_of_a_chain() -> None:
    text = "from swarm.errors import C\nclass D(C):\n    x = 1\n"
    errors = "".join(f"class {x}:\n    x = 1\n" for x in ("A", "B(A)", "C(B)"))
    tree = (module_at("swarm/errors.py", errors), module_at("swarm/train/a.py", text))
    assert not long_chains(tree)


def imports(*edges: tuple[str, str]) -> tuple[Module, ...]:
    """Modules that import each other."""
    paths = {path for edge in edges for path in edge}
    texts = {
        path: "".join(f"import {module_at(b, '').name}\n" for a, b in edges if a == path)
        for path in paths
    }
    return tuple(module_at(path, text) for path, text in sorted(texts.items()))


def test_folders_that_import_each_other_are_caught_at_every_depth() -> None:
    inner, outer = ("swarm/a/x/f.py", "swarm/a/y/g.py"), ("swarm/a/y/h.py", "swarm/a/x/k.py")
    assert folder_circles(imports(inner, outer)) == [
        "swarm/a/x -> swarm/a/y",
        "swarm/a/y -> swarm/a/x",
    ]
    assert not folder_circles(imports(inner, ("swarm/b/f.py", "swarm/a/x/f.py")))
    # No two folders below import each other, but their packages do.
    assert folder_circles(imports(("swarm/a/x/f.py", "swarm/b/f.py"), ("swarm/b/g.py", outer[0])))


def test_a_folder_and_one_within_it_do_not_import_each_other() -> None:
    down, up = ("swarm/a/f.py", "swarm/a/x/g.py"), ("swarm/a/x/h.py", "swarm/a/k.py")
    assert folder_circles(imports(down, up)) == ["swarm/a -> swarm/a/x", "swarm/a/x -> swarm/a"]
    assert not folder_circles(imports(down))
    # A file of the library's own folder is a part by itself, so packages form no circle with all of
    # them.
    assert not folder_circles(
        imports(("swarm/f.py", "swarm/a/g.py"), ("swarm/a/h.py", "swarm/k.py"))
    )


def test_a_crowded_folder_and_names_that_stand_twice_are_caught() -> None:
    many = [module_at(f"swarm/a/f{number}.py", "") for number in range(MAX_FOLDER_FILES + 1)]
    package, again = module_at("swarm/a/__init__.py", ""), module_at("swarm/b/f0.py", "")
    assert crowded_folders((*many, package)) == ["swarm/a"]
    assert not crowded_folders((*many[1:], package))
    assert namesakes((*many, package, again)) == ["f0.py"]


def test_a_short_file_with_two_importers_is_no_fragment() -> None:
    first, second = (("swarm/a/f.py", "swarm/a/g.py"), ("swarm/a/h.py", "swarm/a/g.py"))
    assert "swarm/a/g.py" in fragments(imports(first))
    assert "swarm/a/g.py" not in fragments(imports(first, second))


def test_a_class_counts_with_what_it_inherits_from_other_modules() -> None:
    half = "    x = 1\n" * (MAX_CHAIN_LINES // 2)
    first = module_at("swarm/model/a.py", "class A(Generic[T]):\n" + half)
    again = module_at("swarm/model/__init__.py", "from swarm.model.a import A")
    for text in (
        "from swarm.model.a import A\nclass B(A[int]):\n",
        "from swarm.model import a\nclass B(a.A):\n",
        "from swarm.model import A\nclass B(Protocol, A):\n",
    ):
        second = module_at("swarm/model/b.py", text + half)
        found = long_ancestries((first, again, second))
        assert found == [f"swarm.model.b.B: {MAX_CHAIN_LINES + 2} lines"]
        assert not long_ancestries((second,))


def test_a_hidden_import_with_its_reason_is_accepted() -> None:
    text = "def f():\n    import rich  # optional: only the live view draws"
    assert not hidden_import_offences((module_at("peers/a.py", text),))


def test_there_is_code_to_check() -> None:
    assert {module.name for module in modules()} >= {"swarm", "peers", "swarm.config"}


def hold(offences: list[str]) -> None:
    assert not offences, "\n" + "\n".join(offences)


def test_imports_go_in_one_direction() -> None:
    hold(direction_offences(modules()))


def test_reserved_packages_stay_where_they_belong() -> None:
    hold(reserved_offences(modules()))


def test_every_outside_package_is_declared_by_us_and_not_only_by_others() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    installed = importlib.metadata.packages_distributions()
    standard = sys.stdlib_module_names | STANDARD_SINCE_3_14

    def providers(name: str) -> set[str]:
        """For an extra that is not installed here, the package has the module's name."""
        return {canonicalize_name(package) for package in installed.get(name, [name])}

    hold(
        [
            f"{module.path}:{line} imports {name}"
            for module in modules()
            for line, name in imports_of(module)
            if not is_ours(name) and name.split(".")[0] not in standard
            if declared.isdisjoint(providers(name.split(".")[0]))
        ]
    )


def test_the_protocol_only_computes() -> None:
    hold(impurities(modules()))


def test_no_module_imports_itself_through_others() -> None:
    hold(cycles(modules()))


def test_no_import_hides_in_a_function_without_a_reason() -> None:
    hold(hidden_import_offences(modules()))


def test_nothing_evaluates_or_unpickles_bytes() -> None:
    hold(call_offences(modules(), UNSAFE_CALLS))


def test_importing_a_module_does_nothing() -> None:
    hold(import_time_offences(modules()))


def test_importing_the_library_loads_nothing_heavy_until_a_name_is_used() -> None:
    code = (
        "import sys, swarm; from swarm import __version__, durable; dir(swarm); "
        "heavy = {'torch', 'hivemind', 'numpy', 'swarm.api'}; assert not heavy & set(sys.modules); "
        "swarm.load_run; assert heavy <= set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=300, check=True)


def test_no_file_is_too_long() -> None:
    hold(long_files(modules()))


def test_no_class_is_too_long_with_all_that_it_inherits() -> None:
    hold(long_ancestries(modules()))


@pytest.mark.parametrize("law", OFFENDERS, ids=lambda law: law.__name__)
def test_those_that_offend_against_a_law_become_fewer(law: Law) -> None:
    found, listed = set(law(modules())), OFFENDERS[law]
    hold([f"offends: {each}" for each in sorted(found - listed)])
    hold([f"offends no longer, off the list: {each}" for each in sorted(listed - found)])


def test_no_function_is_too_long() -> None:
    hold(long_functions(modules()))
