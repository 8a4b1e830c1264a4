"""The rules of the house that a machine can hold."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pickle
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import farfield
from farfield import cost, ops
from farfield._operators import FACTS
from farfield.cli.machine import distribution_name
from farfield.cost import formulas
from farfield.cost.formulas import FORMULAS
from slow import PARTS, REST

ROOT = Path(__file__).parents[1]
SOURCE, PAPERS_SOURCE = ROOT / "src" / "farfield", ROOT / "papers" / "src" / "farfield_papers"
SOURCES, PAPERS_SOURCES = (sorted(folder.rglob("*.py")) for folder in (SOURCE, PAPERS_SOURCE))
FOLDERS = (".ci", ".devcontainer", ".github", "src", "papers", "tests", "docs", "conda", "examples", "benchmarks")
PAPERS = ("KAN", "SAN", "FA")


def relative(path: Path) -> str:
    return str(path.relative_to(SOURCE if path.is_relative_to(SOURCE) else PAPERS_SOURCE))


def read(path: Path | str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def tree(path: Path) -> ast.Module:
    return ast.parse(read(path))


def tracked_files() -> list[Path]:
    """The files of the project, without asking git, which a machine may lack."""
    found = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # a file in a worktree of git
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [path for path in found if not {"__pycache__", "_build"} & set(path.parts) and path.suffix != ".pyc"]


# ---- the ladder ------------------------------------------------------------------------------------------------------
def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    script = "import sys; sys.path[:0] = ['src', 'papers/src']; "
    script += "from importlinter.cli import lint_imports as run; sys.exit(run())"
    return subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False)


def test_imports_go_one_way() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("ops/grid.py", "from farfield.nn import GridAttention"),
        ("nn/attention.py", "import farfield.cost"),
        ("maps/__init__.py", "import farfield_papers.theory"),
        ("cli/__init__.py", "import farfield_papers"),
        ("insertion/_places.py", "from farfield import maps"),
        ("volumes/volume.py", "from farfield.streaming.plan import StreamingPlan"),
        ("insertion/_places.py", "import torchvision"),
        ("insertion/_replace/modules.py", "import timm"),
        ("insertion/_replace/masks.py", "import transformers"),
        ("insertion/_replace/hugging_face.py", "import lightning"),
        ("papers/models/compact.py", "import lightning"),
        ("papers/models/compact.py", "import torchvision"),
        ("papers/nn/blocks.py", "import timm"),
        ("papers/tasks/classify.py", "from farfield_papers.data import classify"),
    ],
)
def test_the_ladder_can_fail(tmp_path: Path, file: str, line: str) -> None:
    for source in (SOURCE, PAPERS_SOURCE):
        shutil.copytree(source, tmp_path / source.relative_to(ROOT), ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = PAPERS_SOURCE / file.removeprefix("papers/") if file.startswith("papers/") else SOURCE / file
    copied = tmp_path / path.relative_to(ROOT)
    copied.write_text(f"{read(path)}\n{line}\n", encoding="utf-8")
    result = lint_imports(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "BROKEN" in result.stdout


# Package -> where it may be imported: files, or folders with a slash.
HOMES = {
    "lightning": (),
    "torchvision": (),
    "timm": ("cli/linearize.py",),
    "transformers": ("cli/linearize.py", "insertion/_replace/hugging_face.py"),
    "torchmetrics": (),
    "jsonargparse": (),
    "sklearn": (),
    "skimage": (),
    "pycocotools": (),
    "tifffile": ("volumes/",),
    "zarr": ("volumes/",),
    "matplotlib": ("streaming/seam_report.py", "insertion/_linearize/report.py"),
    "rich": (),
}
PAPERS_HOMES = {
    "lightning": ("tasks/", "data/", "cli/"),
    "torchvision": (
        "data/",
        "tasks/writers/detections.py",
        "models/deeplab.py",
        "models/detector.py",
        "models/video.py",
    ),
    "timm": ("models/catalog.py",),
    "transformers": ("data/",),
    "torchmetrics": ("tasks/",),
    "jsonargparse": ("cli/",),
    "sklearn": ("data/", "cli/"),
    "skimage": ("data/", "cli/", "tasks/"),
    "tifffile": ("data/", "tasks/"),
    "pycocotools": ("data/", "tasks/"),
    "zarr": ("tasks/",),
    "matplotlib": ("cli/",),
    "rich": ("cli/", "tasks/"),
}


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}: imports are absolute"
            yield node.module or ""


def strangers(path: Path) -> list[str]:
    """What a file must not import."""
    offenders, allowed = [], HOMES if path.is_relative_to(SOURCE) else PAPERS_HOMES
    for name in imported(path):
        package = name.split(".")[0]
        homes = allowed.get("lightning" if package == "pytorch_lightning" else package)
        if homes is not None and not relative(path).startswith(homes):
            offenders.append(f"{relative(path)} imports {name}")
    return offenders


def test_heavy_packages_are_imported_only_where_they_belong() -> None:
    assert [each for path in (*SOURCES, *PAPERS_SOURCES) for each in strangers(path)] == []


def test_ops_import_torch_jaxtyping_and_checks_only() -> None:
    packages = {"torch", "jaxtyping", "triton"} | sys.stdlib_module_names
    offenders = [
        f"{relative(path)} imports {name}"
        for path in SOURCES
        if relative(path).startswith("ops/")
        for name in imported(path)
        if not name.startswith(("farfield._checks", "farfield._refusals", "farfield.ops"))
        and name.split(".")[0] not in packages
    ]
    assert offenders == []


# Extras that are for work on farfield itself.
FOR_DEVELOPERS = ("benchmarks", "dev", "docs")


def packages_of_users(project_file: str) -> set[str]:
    """The packages that the core and the extras for users list themselves, not through another package."""
    project = tomllib.loads(read(project_file))["project"]
    listed = list(project["dependencies"])
    for extra, names in project["optional-dependencies"].items():
        listed += [] if extra in FOR_DEVELOPERS else names
    return {canonicalize_name(Requirement(each).name) for each in listed}


def without_extra(modules: Iterable[str], packages: set[str]) -> set[str]:
    """The modules of others whose package no extra for users lists."""
    own = {name.split(".")[0] for name in modules} - sys.stdlib_module_names - {"farfield", "farfield_papers"}
    return {name for name in own if canonicalize_name(distribution_name(name)) not in packages}


def test_every_import_has_its_extra() -> None:
    library, papers = packages_of_users("pyproject.toml"), packages_of_users("papers/pyproject.toml")
    assert without_extra((name for path in SOURCES for name in imported(path)), library) == set()
    # The papers need the library, with what its volumes need.
    both = library | papers
    assert without_extra((name for path in PAPERS_SOURCES for name in imported(path)), both) == set()
    named = ["torch.nn", "json", "PIL.Image", "pandas", "beartype"]
    assert without_extra(named, library) == {"pandas", "beartype"}


def test_the_two_distributions_have_one_version() -> None:
    [version] = re.findall(r'^__version__ = "(.+)"$', read(PAPERS_SOURCE / "__init__.py"), re.MULTILINE)
    assert version == farfield.__version__


# ---- light import ----------------------------------------------------------------------------------------------------
HEAVY = ("lightning", "pytorch_lightning", "torchvision", "transformers", "timm", "matplotlib", "sklearn", "skimage")
HEAVY += ("rich", "gradio", "tensorboard", "torchmetrics", "jsonargparse", "peft", "tifffile", "zarr", "pycocotools")


def loaded_by(statement: str) -> set[str]:
    """The heavy packages that a fresh Python has loaded after a statement."""
    script = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout)) & set(HEAVY)


@pytest.mark.long
@pytest.mark.parametrize(
    "statement",
    [
        "import farfield",
        "from farfield import ShapeError, ops, nn, cost, maps, pad_grids",
        "from farfield import insert, remove, replace_attention; from farfield.insertion import register_transformers",
        "import farfield.cli",
    ],
)
def test_import_is_light(statement: str) -> None:
    assert loaded_by(statement) == set()


def test_light_import_can_fail() -> None:
    assert loaded_by("import farfield, rich, sklearn") == {"rich", "sklearn"}


@pytest.mark.long
def test_measuring_operators_loads_nothing_of_networks() -> None:
    command = "measure --operator softmax --operator siamese --size 4,4 --channels 4 --batch 1 --repeats 1"
    script = f"import sys\nfrom farfield.cli import main\nmain({command!r}.split())\n"
    script += "print({'streaming', 'volumes', 'models', 'insertion'} & {name[9:] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "set()"


@pytest.mark.long
def test_import_farfield_does_not_even_load_torch() -> None:
    script = "import sys, farfield; assert 'torch' not in sys.modules; farfield.ops; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_public_name_resolves() -> None:
    for name in farfield.__all__:
        assert getattr(farfield, name) is not None
        assert name in dir(farfield)
    with pytest.raises(AttributeError, match="module 'farfield' has no attribute 'opps'; it has ShapeError, "):
        farfield.opps  # noqa: B018
    with pytest.raises(AttributeError, match=r"'GridAttention'; fix: from farfield\.nn import GridAttention\.$"):
        farfield.GridAttention  # noqa: B018


# ---- every row -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", ops.OPERATORS)
def test_every_row_has_its_whole(row: str) -> None:
    parameters = inspect.signature(getattr(ops, f"{row}_attention")).parameters
    expected = ["query", "key", "value", "heads", "mask", "query_mask", "key_weight"]
    expected += ["scale"] * ops.OPERATORS[row].has_scale + [*ops.OPERATORS[row].parameter_shapes(8, 2)]
    assert sorted(parameters) == sorted(expected)
    positional = [name for name, parameter in parameters.items() if parameter.kind is not parameter.KEYWORD_ONLY]
    assert positional == ["query", "key", "value"]
    assert parameters["heads"].default == 1
    assert parameters["mask"].default is parameters["query_mask"].default is None


def functions(operator: ops.Operator) -> list[object]:
    """What a row is made of; a partial function, which equals nothing but itself, as its parts."""
    parts = (
        operator.coefficients,
        operator.basis,
        operator.per,
        operator.score,
        *operator.keys_from,
        *operator.queries_from,
    )
    return [(part.func, part.args, part.keywords) if isinstance(part, partial) else part for part in parts]


@pytest.mark.parametrize("row", ops.OPERATORS)
def test_every_row_pickles(row: str) -> None:
    operator = ops.OPERATORS[row]
    assert functions(pickle.loads(pickle.dumps(operator))) == functions(operator)
    assert "<lambda>" not in repr(operator)


@pytest.mark.parametrize("row", ops.OPERATORS)
def test_every_row_has_a_cost_formula(row: str) -> None:
    small, large = (cost.predict(row, channels=16, size=(side, side)) for side in (14, 28))
    assert 0 < small.macs < large.macs
    of_papers = re.match(r"KAN|SAN|FA\b", FACTS[row].source) is not None
    assert any(row in paper.rows for paper in formulas.PAPERS.values()) == of_papers


def table_rows(page: str) -> dict[str, list[str]]:
    """First entry, without its backticks -> the other entries, of every row of a table whose first entry is code."""
    found = re.findall(r"^\| *`([^`]+)` *\|(.+)\|$", read(page), flags=re.MULTILINE)
    return {name: [entry.strip() for entry in rest.split("|")] for name, rest in found}


# ---- facts about the operators ---------------------------------------------------------------------------------------
def in_text(names: Iterable[str], text: str, before: str, after: str) -> list[str]:
    """The names between `before` and `after`, in the order of the text, without what stands there besides."""
    return [found for found in re.findall(f"{before}([a-z_]+){after}", text) if found in names]


def test_operators_have_one_order() -> None:
    """That of their facts: in the table of operators, the formulas, and each page that has all of them."""
    names, guide = list(FACTS), "docs/guide/operators.md"
    assert list(ops.OPERATORS) == names == list(FORMULAS)
    assert in_text(names, read(guide), r"\n\| `", "`") == names == in_text(names, read(guide), "\n### ", "\n")


def test_facts_need_no_torch() -> None:
    script = "import sys, farfield._operators, farfield.cli.tables; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("row", FACTS)
def test_the_table_of_the_documentation_has_the_facts(row: str) -> None:
    facts, (_, *entries) = FACTS[row], table_rows("docs/guide/operators.md")[row]
    assert entries == [facts.source.replace("-", "–"), facts.slots, facts.merging, facts.macs]


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("row", FACTS)
def test_stated_macs_are_those_of_the_papers(row: str, heads: int) -> None:
    formula = FACTS[row].macs.replace("²", "**2").replace("^", "**").replace("·", "*")
    sizes = {"N": 14 * 12, "S": 14 + 12, "dims": 2, "c": 16, "h": heads, "s": 64}
    # Those of other papers are what runs here; SAN does not divide by heads.
    of_papers = any(row in paper.rows for paper in formulas.PAPERS.values()) and (row, heads > 1) != ("averaged", True)
    options = {"heads": heads, "project": "", "convention": "paper" if of_papers else "farfield"}
    assert eval(formula, sizes) == cost.predict(row, channels=16, size=(14, 12), **options).macs


@pytest.mark.parametrize("row", [row for row, facts in FACTS.items() if facts.linear])
def test_an_equal_operator_of_linear_cost_is_equal(row: str) -> None:
    linear = ops.OPERATORS[FACTS[row].linear]
    assert linear.has_orders
    assert linear.in_quadratic_order() == ops.OPERATORS[row]


@pytest.mark.parametrize("row", FACTS)
def test_the_function_of_an_operator_cites_its_source(row: str) -> None:
    source = re.sub(r"(\bKAN|\bSAN|\bFA|,) (?=\d)", r"\1 Eq. ", FACTS[row].source)
    (reference,) = REFERENCE.findall(inspect.getdoc(getattr(ops, f"{row}_attention")) or "")
    assert citations(source) <= citations(reference)


# ---- docstrings and the equation map ---------------------------------------------------------------------------------
CITATION = re.compile(
    r"\b(?P<paper>KAN|SAN|FA)\b(?: (?P<bare>\d\.\d))?"
    r"|(?P<kind>Eqs?\.|Tables?|Theorem|Definition|Figures?|§) ?(?P<first>\d+(?:\.\d)?)(?:[–-](?P<last>\d+))?"
    r"|(?P<appendix>Appendix)|(?P<other>\b[A-Z]\w+ et al\. \d{4})"
)
KINDS = {"Eqs.": "Eq.", "Tables": "Table", "Figures": "Figure"}


def citations(text: str) -> set[str]:
    """`KAN Eq. 4–5, Theorem 1` as {KAN Eq. 4, KAN Eq. 5, KAN Theorem 1}; what stands in parentheses explains."""
    paper, found = "", set()
    for match in CITATION.finditer(re.sub(r"\(.*?\)", "", text, flags=re.DOTALL)):
        paper, kind, first = match["paper"] or paper, match["kind"], match["first"]
        if match["other"]:
            found.add(match["other"])
        elif match["appendix"]:
            found.add(f"{paper} Appendix")
        elif match["bare"] or kind == "§":
            found.add(f"{paper} §{match['bare'] or first}")
        elif kind:
            numbers = range(int(first), int(match["last"] or first) + 1)
            found |= {f"{paper} {KINDS.get(kind, kind)} {number}" for number in numbers}
    return found


def equation_map() -> dict[str, str]:
    """Citation -> the rest of its row in papers/docs/equations.md."""
    rows: dict[str, str] = {}
    for first, rest in re.findall(r"^\| *([^|`]+?) *\|(.+)\|$", read("papers/docs/equations.md"), re.MULTILINE):
        rows |= {citation: rows.get(citation, "") + rest for citation in citations(first)}
    return rows


REFERENCE = re.compile(r"^ *References?:\s*(.+?)(?:\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


def references() -> list[tuple[str, str, str]]:
    """(file, name, text) of every `Reference:` in a docstring."""
    found = []
    for path in (*SOURCES, *PAPERS_SOURCES):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                texts = REFERENCE.findall(ast.get_docstring(node) or "")
                found += [(relative(path), getattr(node, "name", path.stem), text) for text in texts]
    return found


@pytest.mark.long
def test_citations_are_read() -> None:
    assert citations("KAN Eq. 4–5, Theorem 1; FA Eq. 3.") == {"KAN Eq. 4", "KAN Eq. 5", "KAN Theorem 1", "FA Eq. 3"}
    assert citations("KAN Eq. 18 (Eq. 17 swaps the lengths).") == {"KAN Eq. 18"}
    assert citations("KAN §4.1, SAN 3.2 and Appendix; Sun et al. 2012") == {
        *("KAN §4.1", "SAN §3.2", "SAN Appendix", "Sun et al. 2012")
    }
    assert len(references()) > 10


def test_every_reference_is_on_the_equation_map() -> None:
    rows, offenders = equation_map(), []
    for file, name, text in references():
        cited = citations(text)
        if not cited:
            offenders.append(f"{file}: {name} cites no equation, table or figure of {', '.join(PAPERS)}: {text!r}")
        offenders += [
            f"papers/docs/equations.md: {citation} does not name {name} ({file})"
            for citation in sorted(cited)
            if not re.search(rf"[.`]{name}`", rows.get(citation, ""))
        ]
    assert offenders == []


def test_every_function_of_the_equation_map_exists() -> None:
    names = set(re.findall(r"`(farfield\.[\w.]+)`", " ".join(equation_map().values())))
    assert len(names) > 15
    for name in names:
        module, _, attribute = name.rpartition(".")
        found = hasattr(importlib.import_module(module), attribute)
        assert found, f"papers/docs/equations.md: no {name}"


def test_every_numbered_equation_is_on_the_map() -> None:
    numbers = {"KAN": 18, "SAN": 6, "FA": 9}
    expected = {f"{paper} Eq. {number}" for paper, last in numbers.items() for number in range(1, last + 1)}
    assert sorted(expected - set(equation_map())) == []


def test_every_table_and_figure_is_on_the_map() -> None:
    last = {"KAN": (6, 4), "SAN": (10, 2), "FA": (12, 17)}
    expected = {f"{paper} Table {number}" for paper, (tables, _) in last.items() for number in range(1, tables + 1)}
    expected |= {f"{paper} Figure {number}" for paper, (_, figures) in last.items() for number in range(1, figures + 1)}
    assert sorted(expected - set(equation_map())) == []


SECTIONS = ("Args", "Returns", "Cost", "Reference", "Example")
PUBLIC_FUNCTIONS = sorted(name for name in getattr(ops, "__all__", dir(ops)) if inspect.isfunction(getattr(ops, name)))
# Of no paper.
WITHOUT_PAPER = {"pad_grids"}


def test_every_function_of_ops_is_documented_in_the_order_of_the_house() -> None:
    offenders = []
    for name in PUBLIC_FUNCTIONS:
        text = inspect.getdoc(getattr(ops, name)) or ""
        wanted = [section for section in SECTIONS if section != "Reference" or name not in WITHOUT_PAPER]
        places = [text.find(f"\n{section}:") for section in wanted]
        if -1 in places or places != sorted(places) or ">>> " not in text[places[-1] :]:
            offenders.append(f"ops.{name} needs {wanted} in this order, with an example that runs")
        if f":: farfield.ops.{name}\n" not in read("docs/api/ops.md"):
            offenders.append(f"docs/api/ops.md: no {name}")
    assert offenders == []


# ---- nothing of one machine ------------------------------------------------------------------------------------------
# Put together here, so that this file passes its own test.
MACHINE_PATH = re.compile("(?<![\\w.])/" + "(?:work|home|root|Users|mnt|tmp)" + "/" + r"|\b[A-Z]:\\")
ADDRESS = re.compile("https?:" + r"//([\w.-]+)(\S*)")
# Hosts of documents, not of downloads.
HOSTS = {"www.apache.org", "keepachangelog.com", "semver.org", "doi.org", "arxiv.org", "www.w3.org"}
HOSTS |= {"docs.python.org", "docs.pytorch.org", "pytorch.org", "numpy.org"}


def test_no_machine_paths_and_no_download_addresses() -> None:
    offenders = []
    for path in tracked_files():
        try:
            text = read(path)
        except UnicodeDecodeError:
            continue
        name = path.relative_to(ROOT).as_posix()
        found = MACHINE_PATH.findall(text)
        found += [address.group() for address in ADDRESS.finditer(text) if address[1] not in HOSTS]
        offenders += [f"{name}: {each}" for each in found]
    assert offenders == []


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_steps_of_the_workflows_name_what_is_there() -> None:
    """Targets of the Makefile, files, and the parts of the slow tests."""
    targets, slow_parts = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE)), {*PARTS, REST}
    assert len(WORKFLOWS) == 3
    for path in WORKFLOWS:
        jobs = yaml.safe_load(read(path))["jobs"].values()
        commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
        assert len(commands) >= 3
        for command in commands:
            assert set(re.findall(r"\bmake ([a-z-]+)", command)) <= targets
            assert all((ROOT / name).exists() for name in re.findall(r"(?<!\S)(?:tests|\.ci)/[\w/.]+", command)), (
                command
            )
        for job in jobs:
            assert set(job.get("strategy", {}).get("matrix", {}).get("part", slow_parts)) == slow_parts


# ---- what tests share ------------------------------------------------------------------------------------------------
def test_the_page_of_the_tests_has_each_helper() -> None:
    page = set(re.findall(r"`(\w+\.py)`", read("tests/README.md")))
    folders = (ROOT / "tests" / "helpers", ROOT / "papers" / "tests" / "papers_helpers")
    files = {path.name for folder in folders for path in folder.glob("*.py")} - {"__init__.py"}
    assert page - {"conftest.py", "slow.py", "everywhere.py"} == files
