"""The notebooks execute, have the same cells as their scripts, and keep to sizes that make them readable."""

import ast
import functools
import hashlib
import inspect
import json
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
DEEPER = [path for path in NOTEBOOKS if path.stem[2] == "x"]  # for specialists, in sections that can be read alone
MAIN = [path for path in NOTEBOOKS if path not in DEEPER]
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
long_if_deeper = pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[pytest.mark.long] * (path in DEEPER), id=path.stem) for path in NOTEBOOKS]
)
each_of_the_main_line = pytest.mark.parametrize("path", MAIN, ids=lambda path: path.stem)


def test_there_are_eleven_with_a_script_each_and_those_that_go_deeper():
    assert {p.stem for p in DEEPER} <= {"01x_deeper", "02x_deeper", "03x_deeper", "04x_deeper"}
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


# --- what a reader writes without the workbook --------------------------------------------------------------


def first_kernel():
    """The kernel in which a reader of 02a writes an index, a barrier and a launch, and the page's own answer."""
    cells = script("02a_fa2_cuda_first_kernels")
    (text,) = (c.source.split("index = ")[0] for c in cells if c.source.startswith("DIFFERENCES = "))
    (task,) = (c for c in cells if "a barrier, a launch" in c.source)
    page = {}
    exec(text + re.search(r"```python\n(.*?)```", task.source, re.S)[1], page)
    return page["DIFFERENCES"], {name: page[name] for name in ("index", "barrier", "grid", "shared_bytes")}


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_the_first_kernel_of_02a_is_checked(capsys):
    kernel, answer = first_kernel()

    def says(**changed):
        n02a_first_kernels.try_differences(kernel, **answer | changed)
        return capsys.readouterr().out

    assert says() == "threads forward: right\nthreads reverse: right\n"
    assert says(grid=...) == "still blank: grid\n"
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


@pytest.mark.long
def test_a_warp_goes_on_while_an_mma_runs(executions):
    """The machine code of fwd_5 has exponentials between independent products, and 02d does not deny it."""
    text = printed("02x_deeper", executions)
    if "there is no nvdisasm here" in text:
        pytest.skip("needs nvdisasm, which Triton's package brings for Linux")
    exponentials, between = re.search(r"HMMA and (\d+) MUFU.EX2; (\d+) of them have HMMAs", text).groups()
    assert int(between) > int(exponentials) / 2
    assert "whose warp waits for the result" not in source("02d_fa2_cuda_hopper")


def test_03a_counts_all_products_of_the_backward():
    from steps.course.workbook import show

    products = {name: show("bwd_0_fused", name).count("tl.dot(") for name in ("visit_queries", "visit_keys")}
    assert products == {"visit_queries": 4, "visit_keys": 3}
    text = source("03a_triton_kernels").replace("\n# ", " ")
    assert "S, dP, dV, dK: 4 |" in text and "S, dP, dQ: 3 |" in text and "seven products instead of five" in text


def seen_by(stem, mistakes, executions):
    """{mistake: what the notebook's table says of it}."""
    text = printed(stem, executions)
    return {mistake: re.search(rf"^{re.escape(mistake)}  +(.+)$", text, re.M)[1] for mistake in mistakes}


def test_03a_says_which_mistakes_die_and_where(executions):
    from steps.course.figures import n03a_triton_kernels as figures

    seen = seen_by("03a_triton_kernels", ["as it is", *figures.MISTAKES], executions)
    assert [mistake for mistake, how in seen.items() if how == "lives"] == ["as it is", "offsets in 32 bits"]
    assert seen["key head h % Hk"] == "grouped heads: as in 'heads interleaved'"
    text = printed("03a_triton_kernels", executions)
    assert text.count("InterpreterError") == 1 and text.count("no complaint; 0 atomic") == 1


def test_03b_says_which_result_sees_which_mistake(executions):
    from steps.course.figures import n03b_triton_features as figures

    seen = seen_by("03b_triton_features", figures.MISTAKES, executions)
    assert seen["ALiBi of the key alone"] == "lse" and seen["keys counted from the tile"] == "out, dq, dk, dv"
    assert seen["soft-cap without derivative"] == seen["dP not scaled"] == "dq, dk"
    assert "lse" in seen["window one key too wide"] and "dmask" in seen["mask transposed"]
    assert {how for mistake, how in seen.items() if "the same" in mistake} == {"lives"}


def test_03b_says_how_much_faster_a_window_is():
    from steps.course.figures import n03b_triton_features as figures

    rows_of_tiles = range(1, 256 + 1)  # of 64 queries; a window of an eighth is 32 tiles and a part of one
    factor = sum(rows_of_tiles) / sum(min(n, 32 + 1) for n in rows_of_tiles)
    assert f"a factor of {factor:.1f}." in source("03b_triton_features")
    times = {(D, which): figures.milliseconds(D, which) for D in (64, 128) for which in ("fwd", "bwd")}
    for of, ms in times.items():  # what it says of FlashAttention-4
        both = {feature for feature, who in ms if who == "fa4" and (feature, "ours") in ms}
        behind = {feature for feature in both if ms[feature, "fa4"] < ms[feature, "ours"]}
        ahead = {"soft-cap", "packed"} if of == (128, "fwd") else {"soft-cap"}
        assert (both & {"causal", "sinks", "window", "packed"}) - ahead <= behind and not ahead & behind, of
    measured = {of: ms for of, ms in times.items() if ("window", "ours") in ms}
    shares = {of: f"{ms['causal', 'ours'] / ms['window', 'ours']:.1f}" for of, ms in measured.items()}
    text = source("03b_triton_features").replace("\n#    ", " ").replace("\n# ", " ")
    if len(shares) == len(times):
        words = " to ".join(sorted({shares[64, "bwd"], shares[128, "bwd"]}))
        assert f"The backward was measured as {words}, " in text
        assert f"The forward has {shares[64, 'fwd']} at head_dim 64 and {shares[128, 'fwd']} at 128" in text
        pair = "soft-cap + window"
        slower = {of: 100 * (ms[pair, "ours"] / ms[pair, "fa4"] - 1) for of, ms in times.items()}
        percent = slower.pop((128, "bwd"))
        assert f"There it is also faster by {percent:.0f} % in the backward with a soft-cap and a window." in text
        assert all(other < 0 for other in slower.values())


def test_03b_says_how_near_decoding_is_to_cudnn(capsys):
    from steps.course.figures import n03b_triton_features as figures

    figures.decoding()
    ours, cudnn = ([*map(float, line.split()[1:])] for line in capsys.readouterr().out.splitlines()[1:3])
    assert all(abs(a / b - 1) < 0.0125 for a, b in zip(ours, cudnn, strict=True)), "the page says within 1 %"


def test_03b_orders_features_by_their_cost():
    from steps.course.figures import n03b_triton_features as figures

    times = figures.milliseconds(128, "fwd")
    order = "dropout", "additive mask", "soft-cap", "ALiBi"
    spent = [times[feature, "ours"] for feature in order if times]
    assert spent == sorted(spent, reverse=True)


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


@pytest.mark.long
def test_02x_says_what_the_compiler_makes_of_cooperative_groups(executions):
    text = printed("02x_deeper", executions)
    if "CUDA's headers are not here" in text:
        pytest.skip("needs the headers of CUDA, which the pinned packages bring for Linux")
    made = dict(re.findall(r"^(ours|eight_lanes|warp_of_int) +(.+)$", text, re.M))
    each = {"ours": "shfl max", "eight_lanes": "and shl shfl setp selp"}
    assert made == {kernel: " ".join(3 * [words]) for kernel, words in each.items()} | {"warp_of_int": "redux"}
    assert "made anew: 16 times attention's own operations" in text


def test_00_is_a_classifier_and_03b_asks_the_checker(executions):
    assert "P has its class probabilities: True; likeliest for q5: trout" in printed("00_naive", executions)
    found = re.findall(r"^(.+?)  +computed by (our|torch)", printed("03b_triton_features", executions), re.M)
    assert found[0] == ("a mask and dropout", "our")
    assert found[1:] == [(call, "torch") for call in ("a mask, and is_causal", "float64", "head_dim 512")]


@pytest.mark.long
def test_03x_says_what_compilers_make_of_roles_and_of_the_formula(executions):
    text = printed("03x_deeper", executions)
    assert re.findall(r"begins at row i \+ (\d+)", text) == ["64", "128"]
    integers = [int(n) for n in re.findall(r"addresses, comparisons (\d+)", text)]
    assert integers[1] < 0.4 * integers[0] and len(set(re.findall(r"products (\d+)", text))) == 1
    speeds = [tuple(map(float, line)) for line in re.findall(r"compiled (\d+), sdpa-cudnn (\d+)", text)]
    if speeds:  # the rows are of the peers as they are
        (full, cudnn), (causal, cudnn_causal) = speeds
        assert full > 0.9 * cudnn and causal < cudnn_causal / 4


def test_02d_says_which_mistake_lives_and_in_which_schedule(executions):
    text = printed("02d_fa2_cuda_hopper", executions)
    lines = text[text.index("the consumer begins with") :].splitlines()[:5]
    (lives,) = [line for line in lines if "lives" in line]
    assert re.match("K released before its products end +lives +spoils .* spoils", lives)


def test_02e_counts_the_roof_that_02c_promises(executions):
    assert re.search(r"roof is counted in 02e", source("02c_fa2_cuda_backward"))
    text = printed("02e_fa2_cuda_hopper_backward", executions)
    found = re.findall(r"products (\d+), shared memory (\d+) clocks a\s+step; roof (\d+)", text)
    assert len(found) == 6  # rungs fa2, wgmma and hopper, two head_dims
    for products, shared, roof in (map(int, numbers) for numbers in found):
        assert roof == round(cost.GPUS["NVIDIA H200"].half_tflops * products / max(products, shared))


def test_each_mistake_in_the_backward_is_seen_by_a_schedule(executions):
    """In 02e: as it is the kernel lives in all three schedules, and each of the six mistakes is seen in one of them."""
    text = printed("02e_fa2_cuda_hopper_backward", executions)
    table = text[text.index("wgmma as it is") :].splitlines()[:7]
    assert table[0].split()[4:] == ["lives"] * 3
    assert all(re.search(r"spoils|refused", line) for line in table[1:])
    assert [line for line in table[1:] if "lives" in line] == [line for line in table if line.startswith("no barrier")]
