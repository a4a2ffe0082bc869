"""The page and the table of the round machine match its sources."""

import ast
import re
from dataclasses import fields
from pathlib import Path
from typing import cast

import swarm.protocol.rounds
from swarm.protocol.rounds import Parts

FOLDER = Path(swarm.protocol.rounds.__file__).parent
RECORDS = {
    "standing": "Standing",
    "life": "Life",
    "contacts": "Contacts",
    "blobs": "Blobs",
    "work": "Work",
    "succession": "Succession",
    "withholding": "Withholding",
}
ROLES = {each.name for each in fields(Parts)} - RECORDS.keys()
CHANGES = {"add", "append", "clear", "discard", "pop", "setdefault"}
"""Methods of containers that change them."""

Classes = dict[str, ast.ClassDef]
Sets = dict[str, set[str]]


def classes() -> Classes:
    trees = (ast.parse(path.read_text()) for path in FOLDER.glob("*.py"))
    return {n.name: n for tree in trees for n in tree.body if isinstance(n, ast.ClassDef)}


def aliases(function: ast.AST) -> dict[str, str]:
    """Local name -> the attribute behind it, as in `work, life = self.work, self.life`."""
    found = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            target, value = node.targets[-1], node.value
            pairs = (
                zip(target.elts, value.elts, strict=True)
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                else [(target, value)]
            )
            found |= {ast.unparse(name): ast.unparse(of) for name, of in pairs}
    return found


def touched(function: ast.FunctionDef) -> tuple[set[str], set[str]]:
    """Attributes that a function changes, and those that it calls: dotted, from `self` on."""
    names = aliases(function)

    def dotted(node: ast.expr) -> str:
        text = ast.unparse(node)
        head, dot, rest = text.partition(".")
        return names.get(head, head) + dot + rest

    changed, called = set(), set()
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            changed.add(dotted(node))
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            changed.add(dotted(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called.add(dotted(node.func))
            if node.func.attr in CHANGES:
                changed.add(dotted(node.func.value))
    return changed, called


def changing_methods(record: ast.ClassDef) -> set[str]:
    """Methods of a record that change it, directly or through its other methods."""
    parts = {f.name: touched(f) for f in record.body if isinstance(f, ast.FunctionDef)}
    found = {name for name, (changed, _) in parts.items() if any("self." in c for c in changed)}
    while True:
        more = {n for n, (_, called) in parts.items() if called & {f"self.{m}" for m in found}}
        if more <= found:
            return found
        found |= more


def used_by(role: ast.ClassDef, every: Classes) -> tuple[set[str], set[str], set[str]]:
    """The records that a role only reads, those that it writes, and the roles that it calls."""
    given = {node.target.id for node in role.body if isinstance(node, ast.AnnAssign)} | {"standing"}
    written = set()
    for function in role.body:
        if isinstance(function, ast.FunctionDef):
            changed, called = touched(function)
            for name in given & RECORDS.keys() & {n for n in RECORDS if RECORDS[n] in every}:
                changes = {f"self.{name}.{m}" for m in changing_methods(every[RECORDS[name]])}
                if called & changes or any(c.startswith(f"self.{name}.") for c in changed):
                    written.add(name)
    asked = {name for name in given if name in ROLES}
    return (given & RECORDS.keys()) - written - {"standing"}, written, asked


def rows(role: str, every: Classes) -> tuple[str, str]:
    """A role's rows in the table of records and, if it asks other roles, in the table of these."""
    reads, writes, asks = used_by(every["".join(map(str.capitalize, role.split("_")))], every)
    records = [
        ", ".join(f"`{RECORDS[each]}`" for each in RECORDS if each in s) for s in (reads, writes)
    ]
    asked = f"| {role} | {', '.join(sorted(asks))} |" if asks else ""
    return f"| {role} | {records[0]} | {records[1]} |", asked


def test_the_page_says_which_records_and_roles_each_role_uses() -> None:
    every, page = classes(), (FOLDER / "README.md").read_text()
    records, asked = zip(*(rows(role, every) for role in ROLES), strict=True)
    for heading, expected in (("| role | reads |", records), ("| role | asks |", asked)):
        table = page[page.index(heading) :].partition("\n\n")[0].splitlines()[2:]
        assert sorted(table) == sorted(filter(None, expected))


def test_the_table_of_rules_names_methods_that_there_are() -> None:
    every = classes()
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", swarm.protocol.rounds.__doc__ or "")
    assert len(named) >= 40
    for name, method in named:
        assert method in {f.name for f in every[name].body if isinstance(f, ast.FunctionDef)}, (
            method
        )


def test_a_role_that_changes_a_record_in_whatever_way_is_found_out() -> None:
    record = (
        "class Life:\n def go(self): self.x = 1\n def on(self): self.go()\n def see(self): pass"
    )
    every = {"Life": cast(ast.ClassDef, ast.parse(record).body[0])}
    for line, is_written in {
        "self.life.x = 1": True,
        "self.life.x[2] = 1": True,
        "self.life.x.add(1)": True,
        "self.life.on()": True,
        "life, me = self.life, self.me; life.x += 1": True,
        "return self.life.see(), self.life.x.get(1)": False,
    }.items():
        text = f"class A:\n life: Life\n def f(self): {line}"
        reads, writes, _ = used_by(cast(ast.ClassDef, ast.parse(text).body[0]), every)
        assert (writes, reads) == (({"life"}, set()) if is_written else (set(), {"life"})), line
