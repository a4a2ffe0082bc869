"""Links, rules, files, names, programs and tests that documents refer to exist.

Each check is a function from texts to offences, tried first on a text that breaks the rule.
"""

import ast
import importlib
import io
import re
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from swarm.emulation.simulator.mutants.extended_mutants import ALL_MUTANTS

ROOT = Path(__file__).parents[1]
MAP = "swarm/README.md"
SAFETY = "swarm/protocol/SAFETY.md"
POLICIES = "swarm/protocol/POLICIES.md"
MAX_README_LINES = 170
MAX_MAP_LINES = 250
MAX_RULE_WORDS = 60
FOLDERS = ("swarm", "peers", "scripts", "tests")
DOCUMENTS = ("*.md", "configs/*.md", *(f"{folder}/**/*.md" for folder in FOLDERS))

BRACKETED = re.compile(r"\[([A-Z]{1,2}\d+[a-z]?(?:(?:, |-)[^\]\[]{1,30})*)\]")
BARE = re.compile(r"(?<![\w\[.:/-])([A-Z]\d{1,2}[a-z]?)(?![\w:.]*\w)")
NO_RULES = frozenset({"F32", "U8", "K2"})
"""Types of safetensors, and a term of an attack, which only look like rules."""
LINK = re.compile(r"\]\(([^)\s]+)\)")
QUOTED = re.compile(r"`([^`\n]+)`")
OUR_FILE = re.compile(r"[\w./-]+\.(?:py|toml|md)")
IN_PROSE = re.compile(r"\b(?:swarm|peers|scripts|configs|tests)/[\w./-]*\w\.(?:py|toml|md)\b")
IN_FILE = re.compile(r"`([\w/]+\.py)`\s+`([A-Za-z_][\w.]*)")
PROGRAM = re.compile(r"(?<![\w/.-])swarm-([a-z]+)(?![\w/-])")
OTHERS_PACKAGE = re.compile(r"pip install '?swarm\[|swarm with its\b extra")
"""On the package index the name swarm belongs to others. Ours is moe-swarm."""
SCRIPT = re.compile(
    r"(?<![\w/-])(?:\./)?(scripts/(?:benchmarks/)?[a-z_]+(?:\.[a-z]+)?)(?![\w/*.-])"
)


@dataclass(frozen=True)
class Text:
    """A document, or the comments and strings of a source file.

    Attributes:
        path: within the repository.
        text: all of it.
    """

    path: str
    text: str

    @property
    def is_document(self) -> bool:
        return self.path.endswith(".md")

    def lines(self) -> Iterator[tuple[str, str]]:
        """Place and text of each line."""
        for number, line in enumerate(self.text.splitlines(), 1):
            yield f"{self.path}:{number}", line


def words_of(source: str) -> str:
    """Comments and strings of Python, with their line numbers."""
    lines = [""] * (source.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            for offset, line in enumerate(token.string.split("\n")):
                lines[token.start[0] - 1 + offset] += line
    return "\n".join(lines)


@cache
def documents() -> tuple[Text, ...]:
    paths = sorted({path for pattern in DOCUMENTS for path in ROOT.glob(pattern)})
    return tuple(Text(str(p.relative_to(ROOT)), p.read_text(encoding="utf-8")) for p in paths)


@cache
def sources() -> tuple[Text, ...]:
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("**/*.py"))
    paths.remove(Path(__file__))
    return tuple(
        Text(str(p.relative_to(ROOT)), words_of(p.read_text(encoding="utf-8"))) for p in paths
    )


@dataclass(frozen=True)
class Rule:
    """A safety rule, and what shows that it is needed.

    Attributes:
        statement: the rule.
        invariants: of the simulator, that break without it.
        mutants: the code without it.
        tests: files, or file::test.
    """

    statement: str
    invariants: list[str]
    mutants: list[str]
    tests: list[str]


RULE = re.compile(
    r"^\*\*([A-Z]+\d*) ([^*]+\*\*.*?)\sInvariants?\s(.*?);\smutants?\s(.*?);\stests?\s(.*?)\.\n\n",
    flags=re.MULTILINE | re.DOTALL,
)


@cache
def safety_rules() -> dict[str, Rule]:
    """Rules by number: each is a paragraph of its page."""
    text = (ROOT / SAFETY).read_text(encoding="utf-8")
    found = {}
    for number, statement, *shown in RULE.findall(text):
        lists = (re.sub(r"[`\s]", "", names).split(",") for names in shown)
        found[number] = Rule(statement, *lists)
    return found


@cache
def invariants() -> frozenset[str]:
    """First cells of the tables of invariants."""
    text = (ROOT / SAFETY).read_text(encoding="utf-8")
    return frozenset(re.findall(r"^\| ([IEN]\d+) \|", text, flags=re.MULTILINE))


@cache
def policies() -> frozenset[str]:
    """Names in bold that begin a paragraph of their page, with their files behind them."""
    text = (ROOT / POLICIES).read_text(encoding="utf-8")
    return frozenset(re.findall(r"^\*\*([a-z -]+)\*\* \(`", text, flags=re.MULTILINE))


@cache
def rules() -> frozenset[str]:
    """What may stand in brackets."""
    return safety_rules().keys() | invariants()


def rule_offences(texts: Iterable[Text]) -> list[str]:
    found = []
    for text in texts:
        for place, line in text.lines():
            named = [name for group in BRACKETED.findall(line) for name in re.split(", |-", group)]
            named += [name for name in BARE.findall(line) if name not in NO_RULES]
            found += [f"{place}: no rule {name}" for name in named if name not in rules()]
    return found


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as made by GitHub."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def link_offences(texts: Iterable[Text]) -> list[str]:
    found = []
    for text in texts:
        for place, line in text.lines():
            for target in LINK.findall(line):
                if re.match("[a-z]+:", target):
                    continue
                path, _, anchor = target.partition("#")
                file = (ROOT / text.path).parent / path if path else ROOT / text.path
                if not file.exists():
                    found.append(f"{place}: {target} is not there")
                elif anchor:
                    there = text.text if not path else file.read_text(encoding="utf-8")
                    if anchor not in anchors(there):
                        found.append(f"{place}: {target} has no such heading")
    return found


@cache
def files() -> frozenset[str]:
    kept = (*FOLDERS, "configs")
    inside = (path for folder in kept for path in (ROOT / folder).glob("**/*"))
    return frozenset(str(p.relative_to(ROOT)) for p in (*inside, *ROOT.iterdir()))


def is_a_file(name: str) -> bool:
    """Whether a file's path is this, or ends with it, because texts shorten paths."""
    end = name.removeprefix("./").replace("../", "")
    is_there = (ROOT / end).is_file()  # swarm/configs is a link, which globs do not follow
    return is_there or any(path == end or path.endswith("/" + end) for path in files())


def file_offences(texts: Iterable[Text]) -> list[str]:
    found = []
    for text in texts:
        for place, line in text.lines():
            names = [name for quoted in QUOTED.findall(line) for name in OUR_FILE.findall(quoted)]
            names = names if text.is_document else []
            names += IN_PROSE.findall(line)
            found += [f"{place}: no file {name}" for name in names if not is_a_file(name)]
    return found


def symbol_offences(texts: Iterable[Text]) -> list[str]:
    """A file followed by a name, as in a journey, where the file lacks the name."""
    found = []
    for text in texts:
        for name, symbol in IN_FILE.findall(text.text) if text.is_document else ():
            there = [ROOT / path for path in files() if f"/{path}".endswith(f"/{name}")]
            last = re.compile(rf"\b{symbol.rpartition('.')[2]}\b")
            if not any(last.search(path.read_text(encoding="utf-8")) for path in there):
                found.append(f"{text.path}: no {symbol} in {name}")
    return found


@cache
def programs() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return dict(project["scripts"])


def program_offences(texts: Iterable[Text]) -> list[str]:
    found = []
    for text in texts:
        for place, line in text.lines():
            names = [f"swarm-{name}" for name in PROGRAM.findall(line)]
            found += [f"{place}: no program {n}" for n in names if n not in programs()]
            scripts = SCRIPT.findall(line) if text.is_document else []
            found += [f"{place}: no {name}" for name in scripts if not (ROOT / name).exists()]
    return found


@cache
def named_tests() -> str:
    """Names of all tests, one a line."""
    trees = (ast.parse(p.read_text(encoding="utf-8")) for p in ROOT.glob("tests/**/test_*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    names = (n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return "\n".join(sorted(names))


def named_test_offences(texts: Iterable[Text]) -> list[str]:
    """Names of four words or more in quotes must be names of tests, perhaps without their end."""
    return [
        f"{place}: no test {name}"
        for text in texts
        if text.path in ("swarm/train/README.md", "swarm/model/README.md")
        for place, line in text.lines()
        for name in re.findall(r"`([a-z0-9]+(?:_[a-z0-9]+){4,})(?:\.\.\.|\[[\w ]+\])?`", line)
        if name not in named_tests()
    ]


def package_offences(texts: Iterable[Text]) -> list[str]:
    """Hints that would install another project's package."""
    return [
        f"{place}: the package is called moe-swarm"
        for text in texts
        for place, line in text.lines()
        if OTHERS_PACKAGE.search(line)
    ]


BREAKS = {
    "a rule": (rule_offences, Text("a.md", "it promises first [A1, Z9]")),
    "a rule of a docstring": (rule_offences, Text("swarm/a.py", '"""By rule Z9."""')),
    "a link": (link_offences, Text("swarm/a.md", "[there](../nowhere.md)")),
    "a heading": (link_offences, Text("swarm/a.md", "[there](README.md#nowhere)")),
    "a heading here": (link_offences, Text("swarm/a.md", "# Here\n[there](#nowhere)")),
    "a file": (file_offences, Text("a.md", "`protocol/nowhere.py` decides")),
    "a file of a docstring": (file_offences, Text("swarm/a.py", "as scripts/nowhere.py does")),
    "a name in a file": (
        symbol_offences,
        Text("a.md", "`protocol/chain/trust.py`\n`nowhere` decides"),
    ),
    "a program": (program_offences, Text("a.md", "`swarm-nothing --help`")),
    "a script": (program_offences, Text("a.md", "./scripts/nothing --fast")),
    "a package": (package_offences, Text("swarm/a.py", "pip install 'swarm[hf]'")),
    "a test": (
        named_test_offences,
        Text("swarm/train/README.md", "`nothing_is_tested_by_this_name...`"),
    ),
}


@pytest.mark.parametrize("what", sorted(BREAKS))
def test_each_check_finds_what_is_not_there(what):
    check, text = BREAKS[what]
    assert check([text]), what


def test_what_is_there_is_no_offence():
    text = Text(
        "swarm/a.md",
        "`protocol/values/manifest.py` `Manifest.seed` "
        "[rules](protocol/SAFETY.md#who-has-a-vote) `rounds/` `protocol/chain/trust.py` "
        "[A1, L1-L2] F32 "
        "`swarm-peer`, swarm-peer's, ./scripts/test, scripts/benchmarks/bench_join.py; "
        "pip install 'moe-swarm[hf]'",
    )
    checks = (
        rule_offences,
        link_offences,
        file_offences,
        symbol_offences,
        program_offences,
        package_offences,
    )
    assert [check([text]) for check in checks] == [[]] * len(checks)


def hold(offences: list[str]) -> None:
    assert not offences, "\n" + "\n".join(offences)


def test_there_are_documents_and_rules_to_check():
    assert {text.path for text in documents()} >= {"README.md", MAP, "peers/README.md"}
    text = (ROOT / SAFETY).read_text(encoding="utf-8")
    assert list(safety_rules()) == re.findall(r"^\*\*([A-Z]+\d*) ", text, flags=re.MULTILINE)
    assert rules() >= {"P1", "P2", "A4", "GC", "I12", "E6", "N4"}
    assert not safety_rules().keys() & invariants()
    assert policies() >= {"roster deadline", "slow-link exclusion", "takeover"}


@pytest.mark.parametrize(("page", "limit"), [("README.md", MAX_README_LINES), (MAP, MAX_MAP_LINES)])
def test_the_front_page_and_the_map_are_short(page, limit):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count("\n") <= limit


def test_the_map_is_an_index_of_all_pages():
    text = (ROOT / MAP).read_text(encoding="utf-8")
    linked = {(ROOT / MAP).parent / link.partition("#")[0] for link in LINK.findall(text)}
    pages = {ROOT / page.path for page in documents()} - {ROOT / MAP}
    assert pages <= {path.resolve() for path in linked}


def test_rules_that_are_named_exist():
    hold(rule_offences((*documents(), *sources())))


@pytest.mark.parametrize("rule", safety_rules())
def test_a_safety_rule_names_what_shows_that_it_is_needed(rule: str):
    found = safety_rules()[rule]
    lacking = set(found.invariants) - invariants()
    lacking |= set(found.mutants) - ALL_MUTANTS.keys()
    for test in found.tests:
        path, _, name = test.partition("::")
        source = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
        lacking |= set() if f"def {name}" in source else {test}
    assert not lacking
    assert len(found.statement.split()) <= MAX_RULE_WORDS


def test_violations_have_the_numbers_of_invariants():
    """Every number of the simulator's violations is on the page, and all of these are checked."""
    folder = ROOT / "swarm" / "emulation" / "simulator"
    sources = [path.read_text(encoding="utf-8") for path in folder.glob("**/*.py")]
    raised = {name for text in sources for name in re.findall(r'[(\s]"([A-Z]\d+)",', text)}
    assert raised == invariants()


def test_mutants_remove_a_rule_or_a_policy():
    """What is before the colon of a mutant's description is a number or a name of the pages."""
    known = rules() | policies()
    unknown = {
        name: mutant.rule
        for name, mutant in ALL_MUTANTS.items()
        if ":" in mutant.rule and not known.issuperset(mutant.rule.split(":")[0].split(", "))
    }
    assert not unknown


def test_policies_that_are_named_exist():
    """A line "Policy: ..." of a docstring names policies."""
    offences = [
        f"{place}: no policy {name}"
        for text in sources()
        for place, line in text.lines()
        for names in re.findall(r"^\s*Polic(?:y|ies): ([a-z, -]+)\.$", line)
        for name in names.split(", ")
        if name not in policies()
    ]
    hold(offences)


def test_links_lead_somewhere():
    hold(link_offences(documents()))


def test_files_that_are_named_exist():
    # Tests name files that they only pretend to have.
    ours = [text for text in sources() if not text.path.startswith("tests/")]
    hold(file_offences((*documents(), *ours)))


def test_names_in_files_exist():
    hold(symbol_offences(documents()))


def test_programs_and_scripts_that_are_named_exist():
    hold(program_offences(documents()))


def test_the_package_that_is_to_be_installed_is_ours():
    hold(package_offences((*documents(), *sources())))


def test_tests_that_are_named_exist():
    hold(named_test_offences(documents()))


RECORDED = re.compile(r"`[0-9a-f]{7}`[^|]*,\s20\d\d-\d\d-\d\d")


def undated(text: str) -> list[str]:
    """Chapters with a table of figures that name no commit with its date.

    A row of a table with a column "recorded", or "command, commit, date", has its own.
    """
    found = []
    for chapter in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        rows = re.findall(r"^\|.*$", chapter, flags=re.MULTILINE)
        if not any(re.search(r"\d", row) for row in rows[2:]):
            continue
        if re.search("recorded|commit", rows[0]):
            found += [row for row in rows[2:] if not RECORDED.search(row)]
        elif not RECORDED.search(chapter):
            found.append(chapter.splitlines()[0])
    return found


@pytest.mark.parametrize("page", ["README.md", "scripts/README.md"])
def test_figures_have_their_commit_and_date(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert undated(text) == []
    assert undated(RECORDED.sub("", text))


def undated_items(text: str) -> list[str]:
    """Items with figures that name no commit with its date, where the text before them has none."""
    found = []
    for chapter in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        before, *items = re.split(r"^(?=- \*\*)", chapter, flags=re.MULTILINE)
        if not RECORDED.search(before):
            items = [" ".join(item.partition("\n\n")[0].split()) for item in items]
            found += [i for i in items if re.search(r"\b\d", i) and not RECORDED.search(i)]
    return found


def test_items_of_measurements_have_their_commit_and_date():
    text = (ROOT / "scripts" / "README.md").read_text(encoding="utf-8")
    assert undated_items(text) == []
    assert undated_items(RECORDED.sub("", text))


def test_every_measuring_script_is_on_the_page_of_measurements():
    page = (ROOT / "scripts" / "README.md").read_text(encoding="utf-8")
    scripts = {path.name for path in (ROOT / "scripts" / "benchmarks").glob("bench_*.py")}
    assert {name for name in scripts if name not in page} == set()


@cache
def options_of(program: str) -> frozenset[str]:
    """Flags of a program and of its commands."""
    place = "peers.peer:main" if program == "swarm-peer" else programs()[program]
    path, _, name = place.partition(":")
    command = getattr(importlib.import_module(path), name)
    below = getattr(command, "commands", {}).values()
    parameters = [parameter for each in (command, *below) for parameter in each.params]
    flags = {flag for p in parameters for flag in (*p.opts, *p.secondary_opts)}
    return frozenset({*flags, "--help", "--version", "--log-format", "--log-level"})


COMMAND = re.compile(r"(?<![\w/.-])(swarm-[a-z]+) ([^`|]*)")


def option_offences(texts: Iterable[Text]) -> list[str]:
    """Commands, in quotes or in blocks, with options that their programs lack."""
    found = []
    for text in texts:
        quoted = re.findall(r"`(swarm-[^`]*)`", text.text)
        blocks = re.findall(r"^```.*?\n(.*?)^```", text.text, flags=re.MULTILINE | re.DOTALL)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        commands = (named for line in (*quoted, *lines) for named in COMMAND.findall(line))
        for program, rest in commands:
            unknown = {*re.findall(r"(?<!\S)--[a-z-]+", rest)} - options_of(program)
            found += [f"{text.path}: {program} has no {flag}" for flag in sorted(unknown)]
    return found


def test_options_that_are_named_exist():
    assert option_offences([Text("a.md", "`swarm-peer --nothing`")])
    assert option_offences([Text("a.md", "```\nswarm-plan \\\n  --run a --nothing\n```\n")])
    hold(option_offences(documents()))


def test_every_program_has_a_row():
    page = (ROOT / "peers" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(swarm-[a-z]+)` \|", page, flags=re.MULTILINE)
    assert sorted(rows) == sorted(programs())


def test_every_exit_code_of_an_error_has_its_row():
    errors = importlib.import_module("swarm.errors")
    kinds = [kind for kind in vars(errors).values() if hasattr(kind, "exit_code")]
    page = (ROOT / "peers" / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE))
    assert {str(kind.exit_code) for kind in kinds} <= listed


TELLTALE = (
    "besides?", "what it", "told", "goes on", "whoever", "anew", "gone", "of which", "in vain"
)  # fmt: skip
"""Words that mark a sentence which has to be read twice."""
MOST_PER_10_000 = 1.0
MOST_PLACES = 10
CODE = re.compile(r"```.*?```|`[^`]*`|\{[^{}]*\}", flags=re.DOTALL)
"""What is no prose: names in backticks, drawings, and expressions in strings."""


def prose_of(path: str, source: str) -> str:
    """Docstrings, comments and messages of Python, in lines of their own numbers.

    A message is a string with a space. Of tests only docstrings and comments are for readers.
    """
    lines = [""] * (source.count("\n") + 2)
    alone = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_comment = token.type == tokenize.COMMENT
        is_message = not path.startswith("tests/") and " " in token.string
        if is_comment or (token.type == tokenize.STRING and (alone or is_message)):
            for offset, line in enumerate(CODE.sub(_blank, token.string).split("\n")):
                lines[token.start[0] - 1 + offset] += line
        if token.type in {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}:
            alone = True
        elif not is_comment and token.type != tokenize.NL:
            alone = False
    return "\n".join(lines)


def _blank(code: re.Match[str]) -> str:
    """As many lines without words."""
    return "\n" * code[0].count("\n")


@cache
def prose() -> tuple[Text, ...]:
    """All that people read: pages, comments of run files, and the prose of Python."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("**/*.py"))
    paths.remove(Path(__file__))
    texts = [Text(each.path, CODE.sub(_blank, each.text)) for each in documents()]
    texts += [
        Text(name, prose_of(name, path.read_text(encoding="utf-8")))
        for path in paths
        for name in [str(path.relative_to(ROOT))]
    ]
    for path in sorted((ROOT / "configs").glob("**/*.toml")):
        comments = re.sub(r"^[^#\n]*", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        texts.append(Text(str(path.relative_to(ROOT)), comments))
    return tuple(texts)


def places_of(word: str, texts: Iterable[Text]) -> list[str]:
    found = re.compile(rf"\b(?:{word})\b", flags=re.IGNORECASE)
    return [
        f"{place}: {line.strip()[:90]}"
        for text in texts
        for place, line in text.lines()
        for _ in found.findall(line)
    ]


def test_telltale_words_are_found_in_prose_alone():
    source = 'def gone():\n    """It is gone."""\n    told = "told"\n    return "has told {gone}"\n'
    text = Text("swarm/a.py", prose_of("swarm/a.py", source))
    assert places_of("gone", [text]) == ['swarm/a.py:2: """It is gone."""']
    assert places_of("told", [text]) == ['swarm/a.py:4: "has told "']
    assert not places_of("told", [Text("a.md", CODE.sub(_blank, "`told`"))])


@pytest.mark.parametrize("word", TELLTALE)
def test_a_telltale_word_is_rare(word: str):
    places = places_of(word, prose())
    total = sum(len(re.findall(r"[A-Za-z][A-Za-z'-]*", text.text)) for text in prose())
    rate = 1e4 * len(places) / total
    shown = "\n".join(places[:MOST_PLACES])
    assert rate <= MOST_PER_10_000, f"{word}: {rate:.2f} per 10,000 words, as in\n{shown}"
