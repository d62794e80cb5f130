"""The notebooks execute, have the same cells as their scripts, and keep to sizes that make them readable."""

import ast
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from steps import catalogue
from steps.bench import cost, rows

jupytext = pytest.importorskip("jupytext", reason="Jupyter is not installed")
nbformat = pytest.importorskip("nbformat", reason="Jupyter is not installed")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_nine_with_a_script_each():
    assert [p.stem for p in NOTEBOOKS] == [
        "00_naive", "01_fa1_numba", "02a_fa2_cuda_first_kernels", "02b_fa2_cuda_tensor_cores", "02c_fa2_cuda_backward",
        "02d_fa2_cuda_hopper", "03a_triton_kernels", "03b_triton_features", "04_ring",
    ]  # fmt: skip
    assert [p.stem for p in sorted((ROOT / "notebooks" / "src").glob("*.py"))] == [p.stem for p in NOTEBOOKS]


@pytest.fixture(scope="module")
def executions(tmp_path_factory):
    """{stem: future of (folder, exit code, output)}: runs each notebook's script in a Jupyter kernel, two at a time."""
    folder = tmp_path_factory.mktemp("executed")

    def execute(path):
        command = [sys.executable, "-m", "jupytext", "--quiet", "--to", "ipynb", "--execute", "--set-kernel", "python3"]
        command += ["--run-path", "notebooks", "--output", str(folder / path.name), f"notebooks/src/{path.stem}.py"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        return folder, done.returncode, done.stderr

    with ThreadPoolExecutor(2) as pool:
        yield {path.stem: pool.submit(execute, path) for path in NOTEBOOKS}


@each_notebook
def test_executes(path, executions):
    _, code, output = executions[path.stem].result()
    assert code == 0, output[-3000:]


@each_notebook
def test_notebook_and_script_are_in_step(path):
    script = jupytext.read(ROOT / "notebooks" / "src" / f"{path.stem}.py")
    notebook = nbformat.read(path, as_version=4)
    assert [(c.cell_type, c.source) for c in notebook.cells] == [(c.cell_type, c.source) for c in script.cells]


@each_notebook
def test_outputs_are_saved_and_free_of_errors(path):
    code = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    outputs = [o for c in code for o in c.outputs]
    assert outputs and not [o for o in outputs if o.output_type == "error"]
    assert path.stat().st_size < 300_000
    text = json.dumps(outputs)
    # A viewer that does not trust a notebook does not show these.
    assert not re.search(r'"image/svg|<script|application/vnd\.jupyter\.widget', text)
    assert not re.search(r"/home/|/root/|/tmp/|site-packages", text)


@each_notebook
def test_cells_are_short_and_pictures_have_words(path):
    cells = nbformat.read(path, as_version=4).cells
    for cell in cells:
        if cell.cell_type == "code":
            assert len(cell.source.splitlines()) <= 25, cell.source[:80]
            pictures = [o for o in cell.outputs if o.get("data", {}).keys() & {"image/png", "image/gif"}]
            assert all(alt_text(o) for o in pictures), f"no alt text: {cell.source[:80]}"
    headings = re.findall(r"^## \d", "\n".join(c.source for c in cells if c.cell_type == "markdown"), re.M)
    assert len(headings) >= 7


@each_notebook
def test_lines_of_code_are_short(path):
    """A line of code fits into a cell without scrolling. Comments may be longer."""
    for cell in jupytext.read(ROOT / "notebooks" / "src" / f"{path.stem}.py").cells:
        if cell.cell_type == "code":
            code = [re.sub(r"(^|  )#.*", "", line) for line in cell.source.splitlines()]
            assert not [line for line in code if len(line) > 92]


def alt_text(output):
    """Whether a picture has a description for those who do not see it."""
    of_image = [m.get("alt") for m in output.get("metadata", {}).values() if isinstance(m, dict)]
    return any(of_image) or 'alt="' in output.data.get("text/html", "")


@each_notebook
def test_code_cells_are_python(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert ast.parse(cell.source).body  # There are no magics and no empty cells, so the script runs as it is.


# --- what the notebooks say is true -------------------------------------------------------------------------


def source(stem):
    return (ROOT / "notebooks" / "src" / f"{stem}.py").read_text()


def minutes(stem):
    """(minutes to read, minutes more with the exercises), as the notebook's header says them."""
    header = r"\*\*Time:\*\* about (an hour|45 minutes) to read, (an|two) hours? more with the exercises?\."
    read, more = re.search(header, source(stem)).groups()
    return {"an hour": 60, "45 minutes": 45}[read], {"an": 60, "two": 120}[more]


@pytest.mark.parametrize("number", catalogue.STAGES)
def test_minutes_of_the_headers_are_those_of_the_stage_and_of_readme(number):
    if catalogue.unavailable(number):
        pytest.skip(catalogue.unavailable(number))
    supports = catalogue.stage(number).SUPPORTS
    assert supports["minutes"] == sum(minutes(stem)[0] for stem in supports["notebooks"])
    row = re.search(rf"^\| {number} .*\| (\d+) \| [^|]*\|$", (ROOT / "README.md").read_text(), re.M)
    assert int(row[1]) == supports["minutes"]


def test_minutes_of_readmes_paths_are_sums_of_the_headers():
    found = re.findall(r"(\d+) minutes to read, (\d+) more\s+with the exercises", (ROOT / "README.md").read_text())
    stems = [path.stem for path in NOTEBOOKS]
    paths = ["00_naive", "01_fa1_numba"], stems  # an evening, the whole course
    expected = [tuple(map(sum, zip(*map(minutes, path), strict=True))) for path in paths]
    assert [(int(read), int(more)) for read, more in found] == expected


def printed(stem, executions):
    """All that the notebook's cells print when they are executed."""
    folder, code, output = executions[stem].result()
    assert code == 0, output[-3000:]
    cells = nbformat.read(folder / f"{stem}.ipynb", as_version=4).cells
    return "".join(o.get("text", "") for c in cells if c.cell_type == "code" for o in c.outputs)


def test_a_warp_goes_on_while_an_mma_runs(executions):
    """The machine code of fwd_5 has exponentials between independent products, and 02d does not deny it."""
    text = printed("02b_fa2_cuda_tensor_cores", executions)
    if "there is no nvdisasm here" in text:
        pytest.skip("needs nvdisasm, which Triton's package brings for Linux")
    exponentials, between = re.search(r"HMMA and (\d+) MUFU.EX2; (\d+) of them have HMMAs", text).groups()
    assert int(between) > int(exponentials) / 2
    assert "whose warp waits for the result" not in source("02d_fa2_cuda_hopper")


def test_units_that_work_at_once_are_as_slow_as_the_slowest(executions):
    line = r"tensor (\d+), exp (\d+), fp32 (\d+)\. Tensor cores busy (\d+)% one after the other, (\d+)% if all three"
    found = re.findall(line, printed("02d_fa2_cuda_hopper", executions))
    assert len(found) == 3  # head_dims
    for tensor, exp, fp32, after, at_once in (map(int, numbers) for numbers in found):
        assert after == round(100 * tensor / (tensor + exp + fp32))
        assert at_once == round(100 * tensor / max(tensor, exp, fp32))


def test_no_clocks_without_a_product_are_claimed_where_their_end_is_not_recorded(executions):
    """With OVERLAP a timeline does not show when products end. The third column is the share without any."""
    text = printed("02d_fa2_cuda_hopper", executions)
    lines = re.findall(r"^OVERLAP = (\d), PINGPONG = \d +\d+ +\d+% +(\S+)", text, re.M)
    if not lines:
        pytest.skip("the recorded timeline is of another version of the kernel")
    assert {overlap: share != "-" for overlap, share in lines} == {"0": True, "1": False}


@pytest.mark.parametrize("kernel", ["fwd_0_fused", "bwd_0_fused"])
def test_triton_is_compared_within_one_run(kernel, executions):
    text = printed("03a_triton_kernels", executions)
    if "no rows yet" in text:
        pytest.skip("the rows are of another version of the kernels")
    shown = next(d for d in map(ast.literal_eval, re.findall(r"TFLOP/s: (\{.*\})", text)) if kernel in d)
    runs = {}
    for row in rows.read():
        runs.setdefault(row["run"], set()).add((row["kernel"] or row["peer"], round(row["tflops"])))
    assert any(set(shown.items()) <= measured for measured in runs.values())


def test_break_even_is_computed_with_links_as_they_were_measured(executions):
    text = printed("04_ring", executions)
    for name, rate in (("copy engine, 370 GB/s", 370e9), ("NCCL, 155 GB/s", 155e9)):
        tokens = 2 * 1e12 * cost.GPUS["NVIDIA H200"].half_tflops / rate  # forward, Hk = H
        assert re.search(rf"{name} +fwd +{tokens:,.0f} ", text)


def test_02d_holds_a_roof_if_02c_says_so():
    says = re.search(r"roof[^.]* in 02d", source("02c_fa2_cuda_backward"))
    assert not says or "roof" in source("02d_fa2_cuda_hopper")


def test_nothing_stands_beside_flashattention_4():
    """It is no peer of our runs, so its numbers would come from another run."""
    pages = [ROOT / "README.md", *(ROOT / "papers").glob("*.md"), *(ROOT / "notebooks" / "src").glob("*.py")]
    assert not [page.name for page in pages if re.search(r"FlashAttention-4|FA4", page.read_text())]
