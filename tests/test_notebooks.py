"""The notebooks execute, have the same cells as their scripts, and keep to sizes that make them readable."""

import ast
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext", reason="Jupyter is not installed")
nbformat = pytest.importorskip("nbformat", reason="Jupyter is not installed")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_eight_with_a_script_each():
    assert [p.stem for p in NOTEBOOKS] == [
        "00_naive", "01_fa1_numba", "02a_fa2_cuda_first_kernels", "02b_fa2_cuda_tensor_cores", "02c_fa2_cuda_backward",
        "02d_fa2_cuda_hopper", "03_triton", "04_ring",
    ]  # fmt: skip
    assert [p.stem for p in sorted((ROOT / "notebooks" / "src").glob("*.py"))] == [p.stem for p in NOTEBOOKS]


@pytest.fixture(scope="module")
def executions(tmp_path_factory):
    """{stem: future of (exit code, output)}: runs every notebook's script in a Jupyter kernel, two at a time."""
    folder = tmp_path_factory.mktemp("executed")

    def execute(path):
        command = [sys.executable, "-m", "jupytext", "--quiet", "--to", "ipynb", "--execute", "--set-kernel", "python3"]
        command += ["--run-path", "notebooks", "--output", str(folder / path.name), f"notebooks/src/{path.stem}.py"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stderr

    with ThreadPoolExecutor(2) as pool:
        yield {path.stem: pool.submit(execute, path) for path in NOTEBOOKS}


@each_notebook
def test_executes(path, executions):
    code, output = executions[path.stem].result()
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
