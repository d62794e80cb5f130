"""The notebooks execute, have the same cells as their scripts, and keep to sizes that make them readable."""

import ast
import contextlib
import functools
import hashlib
import inspect
import io
import json
import math
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

from steps import catalogue
from steps.course.bench import cost
from steps.course.figures import n02a_first_kernels
from support import preloaded_kernel

# Jupyter takes seconds to import, in each process that collects the tests. So the functions that need it import it.
no_jupyter = not all(map(find_spec, ("jupytext", "nbclient", "nbformat")))
pytestmark = pytest.mark.skipif(no_jupyter, reason="Jupyter is not installed")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# For specialists, in sections that can be read alone:
DEEPER = [path for path in NOTEBOOKS if path.stem.endswith("_deeper")]
MAIN = [path for path in NOTEBOOKS if path not in DEEPER]
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
long_if_deeper = pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[pytest.mark.long] * (path in DEEPER), id=path.stem) for path in NOTEBOOKS]
)
each_of_the_main_line = pytest.mark.parametrize("path", MAIN, ids=lambda path: path.stem)


def test_there_are_eleven_with_a_script_each_and_those_that_go_deeper():
    assert [p.stem.removesuffix("_deeper") for p in DEEPER] == ["01x", "02x", "02y", "03x", "03y", "04x"]
    assert [p.stem for p in MAIN] == [
        "00_naive", "01_fa1_numba", "02a_fa2_cuda_first_kernels", "02b_fa2_cuda_tensor_cores", "02c_fa2_cuda_backward",
        "02d_fa2_cuda_hopper", "02e_fa2_cuda_hopper_backward", "03a_triton_kernels", "03b_triton_features",
        "04a_ring", "04b_strategies",
    ]  # fmt: skip
    assert [p.stem for p in sorted((ROOT / "notebooks" / "src").glob("*.py"))] == [p.stem for p in NOTEBOOKS]


def source(stem):
    return (ROOT / "notebooks" / "src" / f"{stem}.py").read_text()


@functools.cache
def script(stem):
    """The cells of a notebook's script."""
    import jupytext

    return jupytext.reads(source(stem), "py:percent").cells


@functools.cache
def saved(path):
    """The cells of a notebook."""
    import nbformat

    return nbformat.read(path, as_version=4).cells


def code_cells(path):
    return [cell for cell in saved(path) if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def executions(request, tmp_path_factory):
    """{stem: future of (notebook, error or "")}: runs each notebook's script in a Jupyter kernel, two at a time.

    Those that go deeper are run in a long run only.
    """
    import jupytext
    import nbclient

    def execute(path, kernel):
        notebook = jupytext.reads(source(path.stem), "py:percent")
        where = {"metadata": {"path": str(ROOT / "notebooks")}}
        try:
            nbclient.NotebookClient(notebook, timeout=300, kernel_name=kernel, resources=where).execute()
        except nbclient.exceptions.CellExecutionError as error:
            return notebook, str(error)
        return notebook, ""

    folder = tmp_path_factory.mktemp("jupyter")
    with preloaded_kernel.specification(folder) as kernel, ThreadPoolExecutor(2) as pool:
        run = NOTEBOOKS if request.config.getoption("--long") else MAIN
        yield {path.stem: pool.submit(execute, path, kernel) for path in run}


@long_if_deeper
def test_executes(path, executions):
    _, error = executions[path.stem].result()
    assert not error, error[-3000:]


@pytest.mark.parametrize("path", DEEPER, ids=lambda path: path.stem)
def test_what_a_page_calls_is_there_and_takes_these_arguments(path):
    """Of the notebooks that a short run does not execute, only their cell of imports."""
    first, *others = code_cells(path)
    page = {}
    exec(first.source, page)
    for cell in others:
        for call in filter(lambda node: isinstance(node, ast.Call), ast.walk(ast.parse(cell.source))):
            name, *attributes = ast.unparse(call.func).split(".")
            if name not in page or not all(map(str.isidentifier, attributes)):
                continue  # Python's own, or defined in a cell
            function = functools.reduce(getattr, attributes, page[name])
            names = {keyword.arg: None for keyword in call.keywords}
            are_listed = None not in names and not any(isinstance(argument, ast.Starred) for argument in call.args)
            if inspect.isfunction(function) and are_listed:
                inspect.signature(function).bind(*call.args, **names)


@each_notebook
def test_notebook_and_script_are_in_step(path):
    def shown(cell):
        return cell.cell_type, cell.source, cell.metadata.get("slideshow"), cell.metadata.get("jupyter")

    assert [shown(c) for c in saved(path)] == [shown(c) for c in script(path.stem)]


@each_notebook
def test_outputs_are_saved_and_free_of_errors(path):
    outputs = [o for c in code_cells(path) for o in c.outputs]
    assert outputs and not [o for o in outputs if o.output_type == "error"]
    assert not [c for c in code_cells(path) if "execution" in c.metadata], "when it ran would differ in every run"
    assert path.stat().st_size < 300_000
    text = json.dumps(outputs)
    # A viewer that does not trust a notebook does not show these.
    assert not re.search(r'"image/svg|<script|application/vnd\.jupyter\.widget', text)
    assert not re.search(r"/home/|/root/|/tmp/|site-packages", text)


@each_notebook
def test_cells_are_short_and_pictures_have_words(path):
    for cell in code_cells(path):
        assert ast.parse(cell.source).body  # There are no magics and no empty cells, so the script runs as it is.
        lines = cell.source.splitlines()
        # A line of code fits into a cell without scrolling. Comments may be longer.
        assert max(len(re.sub(r"(^|  )#.*", "", line)) for line in lines) <= 92, cell.source[:80]
        pictures = [o for o in cell.outputs if o.get("data", {}).keys() & {"image/png", "image/gif"}]
        assert all(alt_text(o) for o in pictures), f"no alt text: {cell.source[:80]}"


def alt_text(output):
    """Whether a picture has a description for those who do not see it."""
    of_image = [m.get("alt") for m in output.get("metadata", {}).values() if isinstance(m, dict)]
    return any(of_image) or 'alt="' in output.data.get("text/html", "")


# --- the page holds the lesson ------------------------------------------------------------------------------

MACHINERY = {"subprocess", "json", "re", "importlib", "tempfile", "Path", "plt", "patch"}


def imports(cell):
    return [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Import | ast.ImportFrom)]


@each_notebook
def test_one_short_cell_imports_and_none_draws_or_converts(path):
    code = code_cells(path)
    (opening,) = [cell for cell in code if imports(cell)]
    assert opening is code[0] and len(opening.source.splitlines()) <= 8
    for cell in code:
        names = {node.id for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Name)}
        assert not names & MACHINERY, cell.source


@each_notebook
def test_a_page_is_read_in_one_sitting(path):
    """Text and code of a lesson; of "going deeper" only the cells. One cell holds the smallest kernel, 45 lines."""
    lengths = sorted(len(cell.source.splitlines()) for cell in code_cells(path))
    assert lengths[-1] <= 45 and lengths[-2] <= 15
    text = [cell.source for cell in script(path.stem) if cell.cell_type == "markdown"]
    if path in MAIN:
        assert sum(lengths) <= 160 and len(script(path.stem)) <= 40
        assert sum(bool(re.search(r"\w", word)) for word in " ".join(text).split()) <= 1900
        questions = "\n".join(text).split("**Ask yourself**\n\n")[1]
        assert re.findall(r"^(\d)\. ", questions, re.M)[:5] == list("12345")
        assert questions.count("<details>") >= 5, "a question has no answer"
        return
    for section in re.split(r"^## ", "\n".join(text), flags=re.M)[1:]:
        assert len(section.split()) <= 600, section[:60]


# What these give is shown only as the value of the cell's last line.
SHOWN = {"show", "diff", "check", "hint", "solution"}


def lost(source):
    """The calls in a cell whose listing nobody would see: statements of their own before the last line."""
    body = ast.parse(source).body
    alone = [node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Expr)]
    return [ast.unparse(node) for node in alone if node is not body[-1] and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func).split(".")[-1] in SHOWN]  # fmt: skip


@each_notebook
def test_no_cell_loses_a_listing(path):
    assert not [(call, cell.source) for cell in code_cells(path) for call in lost(cell.source)]


def test_a_lost_listing_is_noticed():
    assert lost("x = 1\nshow('a')\nfigures.show('b')") == ["show('a')"]
    assert lost("for x in 'ab':\n    show(x)") == ["show(x)"] and not lost("text = show('a') + 'b'\nprint(diff(1, 2))")


@each_notebook
def test_printed_lines_fit_on_a_page(path):
    """Source that `show` and `diff` print is as wide as its file."""
    for cell in code_cells(path):
        if not re.search(r"\b(show|diff)\(", cell.source):
            lines = [line for out in cell.outputs for line in out.get("text", "").splitlines()]
            assert max(map(len, lines), default=0) <= 88, cell.source[:80]


@pytest.mark.parametrize("stem", ["00_naive", "01_fa1_numba", "02a_fa2_cuda_first_kernels", "04a_ring"])
def test_numbers_that_the_prose_quotes_are_printed(stem):
    """Those with two decimals, such as the six tokens' results."""
    printed = "".join(o.get("text", "") for c in code_cells(ROOT / f"notebooks/{stem}.ipynb") for o in c.outputs)
    text = " ".join(cell.source for cell in script(stem) if cell.cell_type == "markdown")
    quoted = set(re.findall(r"\b\d+\.\d\d\b", re.sub(r"papers/\S+", "", text)))
    assert {"6.83", "1.34"} <= quoted and [number for number in sorted(quoted) if number not in printed] == []


# --- what a reader sees first -------------------------------------------------------------------------------

# Names that a cell uses when it draws, and attributes that it uses when it makes a table of measured rows or of JSON.
DRAWING = {"plt", "picture", "plots"}
CONVERTING = {("rows", "read"), ("rows", "latest"), ("json", "load"), ("json", "loads")}


def folded_because(source):
    """Why a cell's code should be folded: "imports", "draws", "converts", or None if it is there to be read."""
    body = ast.parse(source).body
    if 2 * sum(isinstance(statement, ast.Import | ast.ImportFrom) for statement in body) >= len(body):
        return "imports"
    nodes = [node for statement in body for node in ast.walk(statement)]
    if DRAWING & {node.id for node in nodes if isinstance(node, ast.Name)}:
        return "draws"
    found = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    return "converts" if CONVERTING & {(node.value.id, node.attr) for node in found} else None


def is_folded(cell):
    return cell.metadata.get("jupyter", {}).get("source_hidden", False)


@each_notebook
def test_code_that_imports_draws_or_converts_is_folded(path):
    code = code_cells(path)
    reasons = [(folded_because(c.source), c) for c in code]
    unfolded = [f"{why}: {c.source[:60]!r}" for why, c in reasons if why and not is_folded(c)]
    assert not unfolded, "\n".join(unfolded)
    assert not [c.source for c in code if is_folded(c) and re.search(r"^(check|show|diff)\(", c.source, re.M)]


@each_of_the_main_line
def test_the_first_screen_is_a_question_and_a_picture(path):
    question = saved(path)[0]
    assert re.match(r"# .+\n\n(## 1\. The question\n\n)?\*[^*]+\?\*\n\n!\[", question.source)
    assert len(question.source.splitlines()) <= 20, "The question and its picture no longer fit on one screen."
    alt, picture = re.search(r"!\[([^]]+)\]\((.+?)\)$", question.source, re.S | re.M).groups()
    assert len(alt) > 40
    # The path leads to the picture from notebooks/ and from my/, where readers have their copies.
    file = (ROOT / "my" / picture).resolve()  # my/ need not be there yet
    assert picture.startswith("../notebooks/figures/") and file.exists()
    with Image.open(file) as image:
        drawn_by = (ROOT / "notebooks" / "figures" / "questions.py").read_bytes()
        assert image.text["Description"] == hashlib.sha256(drawn_by).hexdigest(), "Run questions.py again."


@each_notebook
def test_links_lead_somewhere_from_the_notebook_and_from_its_copy(path):
    for cell in saved(path):
        if cell.cell_type == "markdown":
            prose = re.sub(r"`[^`]*`", "", cell.source)
            for target in re.findall(r"\]\(([^)#\s]+?)(?:#[^)]*)?\)", prose):
                if not target.startswith("http"):
                    assert (path.parent / target).is_file(), f"JupyterLab opens no folder: {target}"
                    assert target.startswith("../") or target.endswith(".ipynb"), f"not there beside a copy: {target}"


# --- what a page runs in two orders of the threads ----------------------------------------------------------


def first_kernel():
    """The kernel of 02a that an order of the threads lets pass without its barrier, and how it is launched."""
    cells = script("02a_fa2_cuda_first_kernels")
    (text,) = (c.source.split("for barrier in")[0] for c in cells if c.source.startswith("DIFFERENCES = "))
    page = {}
    exec(text, page)
    return page["DIFFERENCES"], page["launch"] | {"barrier": "__syncthreads();"}


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_the_first_kernel_of_02a_is_checked(capsys):
    kernel, launch = first_kernel()

    def says(**changed):
        n02a_first_kernels.try_differences(kernel, **launch | changed)
        return capsys.readouterr().out

    assert says() == "threads forward: right\nthreads reverse: right\n"
    assert "threads forward: y is wrong at" in says(index="threadIdx.x")
    assert "nan at [16, 17, 18, 19]" in says(grid=2)
    assert says(barrier="").startswith("threads forward: right\nthreads reverse: y is wrong at")
    assert "wants 32 bytes of shared memory" in says(shared_bytes=4 * 4)


# --- what the notebooks say is true -------------------------------------------------------------------------


def minutes(stem):
    """(minutes to read, minutes more with the exercises), as the notebook's header says them."""
    time = r"(an hour|two hours|\d+ minutes)"
    header = rf"\*\*Time:\*\* about {time} to read, {time} more with the exercises?\."
    words = {"an hour": 60, "two hours": 120}
    return tuple(words.get(word) or int(word.split()[0]) for word in re.search(header, source(stem)).groups())


@pytest.mark.parametrize("number", catalogue.STAGES)
def test_minutes_of_the_headers_are_those_of_the_stage_and_of_readme(number):
    if catalogue.unavailable(number):
        pytest.skip(catalogue.unavailable(number))
    supports = catalogue.stage(number).SUPPORTS
    assert supports["minutes"] == sum(minutes(stem)[0] for stem in supports["notebooks"])
    row = re.search(rf"^\|{number} .*\|(\d+)\|$", (ROOT / "README.md").read_text(), re.M)
    assert int(row[1]) == supports["minutes"]


def test_minutes_of_readmes_paths_are_sums_of_the_headers():
    found = re.findall(r"(\d+) minutes to read, (\d+) more\s+with the exercises", (ROOT / "README.md").read_text())
    stems = [path.stem for path in MAIN]
    paths = ["00_naive", "01_fa1_numba"], stems  # an evening, the whole course
    expected = [tuple(map(sum, zip(*map(minutes, path), strict=True))) for path in paths]
    assert [(int(read), int(more)) for read, more in found] == expected


def printed(stem, executions):
    """All that the notebook's cells print when they are executed."""
    notebook, error = executions[stem].result()
    assert not error, error[-3000:]
    return "".join(o.get("text", "") for c in notebook.cells if c.cell_type == "code" for o in c.outputs)


def numbers(pattern, holds):
    """The pattern, and whether what it finds holds, as numbers."""
    return pattern, lambda found: holds(*(list(map(float, each)) for each in found))


PRINTED = [  # a notebook, what is looked for in all that it prints, and what is then found, or holds of it
    ("00_naive", *numbers(
        r"alone: exp\((\S+) - (\S+)\) = (\S+)", lambda found: f"{math.exp(found[0] - found[1]):.3f}" == f"{found[2]}")),
    ("02d_fa2_cuda_hopper", r"^(.+?)  .*\blives(.*)$", [
        ("wgmma as it is", ""), ("hopper as it is", ""), ("roles as it is", ""),
        ("K released before its products end", "   spoils out, lse   spoils out, lse")]),
    ("02e_fa2_cuda_hopper_backward", r"^(.+?)  .*\blives", ["wgmma as it is", "no barrier after dS^T is stored"]),
    ("02e_fa2_cuda_hopper_backward", r"^(.+?)  +lives +lives +lives$", ["wgmma as it is"]),
    ("02e_fa2_cuda_hopper_backward", r"^(.+?)  .*(?:spoils|refused)", lambda found: len(found) == 6),
    ("02e_fa2_cuda_hopper_backward", *numbers(
        r"products (\d+), shared memory (\d+) clocks a\s+step; roof (\d+)", lambda *found: len(found) == 6 and all(
            roof == round(cost.GPUS["NVIDIA H200"].half_tflops * products / max(products, shared))
            for products, shared, roof in found))),
    ("02x_deeper", r"__launch_bounds__\(Br, (\d+)\).* spilled +0 bytes", ["6"]),
    ("02x_deeper", r"(\w+) +does not see it", lambda found: "scores_200" in found),
    ("02x_deeper", *numbers(
        r"HMMA and (\d+) MUFU.EX2; (\d+) of them have HMMAs", lambda found: found[1] > found[0] / 2)),
    ("02x_deeper", r"^(ours|eight_lanes|warp_of_int) +(.+)$", [
        ("ours", "shfl max shfl max shfl max"),
        ("eight_lanes", " ".join(3 * ["and shl shfl setp selp"])), ("warp_of_int", "redux")]),
    ("02x_deeper", r"made anew: (\d+) times attention's own operations", ["16"]),
    ("02y_deeper", r": (?:busy )?(\d+)%$", ["94", "100", "77", "100"]),
    ("02y_deeper", r"(\d+) steps of waiting", ["120", "0"]),
    ("02y_deeper", r"of the steps, O is rescaled in (\d+)%", ["0", "3", "33"]),
    ("02y_deeper", r"degree 3: error \S+; (0\.\d+)% of P", lambda found: len(found) == 1),
    ("03a_triton_kernels", r"^(.+?)  +lives$", ["as it is", "offsets in 32 bits"]),
    ("03a_triton_kernels", r"^key head h % Hk  +(.+)$", ["grouped heads: as in 'heads interleaved'"]),
    ("03a_triton_kernels", "InterpreterError|no complaint; 0 atomic", ["InterpreterError", "no complaint; 0 atomic"]),
    ("03b_triton_features", r"^(.+?)  +((?:out|lse|d\w+)(?:, \w+)*|lives)$", [
        ("window one key too wide", "out, lse, dq, dk, dv"), ("mask transposed", "out, lse, dq, dk, dv, dmask"),
        ("the same, symmetric mask", "lives"), ("soft-cap without derivative", "dq, dk"),
        ("ALiBi of the key alone", "lse"), ("keys counted from the tile", "out, dq, dk, dv"),
        ("dP not scaled", "dq, dk")]),
    ("03b_triton_features", r"^(.+?)  +computed by (our|torch)", [
        ("a mask and dropout", "our"), ("a mask, and is_causal", "torch"), ("float64", "torch"),
        ("head_dim 512", "torch")]),
    ("03x_deeper", r"begins at row i \+ (\d+)", ["64", "128"]),
    ("03x_deeper", *numbers(
        r"products (\d+), .*addresses, comparisons (\d+)",
        lambda pointers, maps: pointers[0] == maps[0] and maps[1] < 0.4 * pointers[1])),
    ("03x_deeper", *numbers(  # full and causal, if the rows are of the kernels as they are
        r"compiled (\d+), sdpa-cudnn (\d+)",
        lambda *found: not found or found[0][0] > 0.9 * found[0][1] and found[1][0] < found[1][1] / 4)),
    ("03y_deeper", r"alternate = \d: ([\d.]+)", ["0.68", "0.68", "0.63", "0.97", "0.80", "0.97"]),
    ("03y_deeper", r"taken: \((\d+), (\d)\)", [("16", "1")]),
    ("03y_deeper", r"^row (\d+): row (\d+) of the tensor, (read|beyond)", [
        ("0", "700", "read"), ("299", "999", "read"), ("300", "1000", "beyond")]),
]  # fmt: skip


@pytest.mark.parametrize("stem, pattern, wants", [
    pytest.param(*row, marks=[pytest.mark.long] * row[0].endswith("_deeper"), id=f"{row[0]}: {row[1][:40]}")
    for row in PRINTED
])  # fmt: skip
def test_a_page_prints_what_its_prose_says(stem, pattern, wants, executions):
    text = printed(stem, executions)
    if missing := re.search("there is no nvdisasm here|CUDA's headers are not here", text):
        pytest.skip(missing[0])
    found = re.findall(pattern, text, re.M)
    assert wants(found) if callable(wants) else found == wants, found


READ_ROWS = {"rung", "rungs", "shares", "beside", "parts_left_out"}  # functions of steps/course/figures


def called(node):
    """The names of the functions that a piece of code calls, without those of modules before them."""
    calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
    return {ast.unparse(function).split(".")[-1] for function in calls}


@each_notebook
def test_recorded_speeds_on_a_page_are_those_of_todays_rows(path):
    """A page that was not executed again after a new measurement would contradict the others."""
    opening, *cells = code_cells(path)
    statements = [(cell, node) for cell in cells for node in ast.parse(cell.source).body]
    printing = [(cell, node) for cell, node in statements if {"print"} < called(node) <= READ_ROWS | {"print"}]
    page = {}
    if printing:
        exec("\n".join(map(ast.unparse, imports(opening))), page)
    for cell, node in printing:
        with contextlib.redirect_stdout(io.StringIO()) as today:
            exec(ast.unparse(node), page)
        assert today.getvalue() in "".join(o.get("text", "") for o in cell.outputs), ast.unparse(node)


def test_each_way_to_print_recorded_speeds_is_on_some_page():
    texts = [node for path in NOTEBOOKS for cell in code_cells(path) for node in ast.parse(cell.source).body]
    assert READ_ROWS - {"parts_left_out"} <= set().union(*map(called, texts))


@pytest.mark.compile
def test_03a_says_what_the_compiler_makes_of_one_text_for_two_gpus(capsys):
    from steps.course.figures import n03a_triton_kernels as figures
    from steps.step03_triton import fwd_0_fused

    figures.instructions()
    a100, h100 = capsys.readouterr().out.splitlines()
    assert re.match(r"sm_80: mma.sync [1-9]\d*, wgmma.mma_async 0, cp.async.cg [1-9]", a100)
    assert re.match(r"sm_90: mma.sync 0, wgmma.mma_async [1-9]\d*, cp.async.cg [1-9]", h100)
    Br, Bc, _, stages = fwd_0_fused.TILES["16 bits, Hopper"][64]
    assert f"; {2 * 64 * (Br + 2 * stages * Bc):,} bytes" in h100, "Q, and a K and a V for each stage"


@pytest.mark.compile
def test_the_whole_forward_of_03a_is_compiled_as_it_stands_on_the_page():
    from steps.course.figures.triton_compiler import compiled

    (page,) = [c.source for c in script("03a_triton_kernels") if "def attention_kernel" in c.source]
    head = "import torch, triton\nimport triton.language as tl\nfrom steps.step03_triton import fwd_0_fused\n"
    launch = "import page\nx = torch.zeros(1, 2, 70, 64).bfloat16()\npage.attend(x, x, x, True, 64, 64)"
    (found,) = compiled(launch, {"page": head + page})
    assert "wgmma" in found["ptx"] and "refused" not in found
