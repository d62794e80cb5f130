"""The folder for the kernels hub: loaded as the hub does, its functions agree with the reference without the course."""

import ast
import base64
import hashlib
import importlib.util
import json
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from reference import error
from steps import catalogue, engine
from steps.course import hub
from steps.course.bench import rows

VARIANT = "torch-cuda" if torch.version.cuda else "torch-cpu"  # which one `kernels` chooses

if reason := catalogue.unavailable("03"):
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    hub.write(folder, "somebody/attention")
    return folder


def load(folder):
    """The package, by `kernels` if that is installed, and otherwise in the same way."""
    if importlib.util.find_spec("kernels"):
        from kernels import get_local_kernel

        return get_local_kernel(folder)
    variant = folder / "build" / VARIANT
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def kernel(folder, monkeypatch):
    """The package, while an import of the course is an error."""
    for name in [name for name in sys.modules if name.split(".")[0] == "steps"]:
        monkeypatch.setitem(sys.modules, name, None)
    yield load(folder)
    for name in [name for name in sys.modules if name.startswith("_flash_attention_course")]:
        monkeypatch.delitem(sys.modules, name)


def inputs(Nq=19, Nk=37, H=4, Hk=2, D=32):
    torch.manual_seed(0)
    shapes = (1, H, Nq, D), (1, Hk, Nk, D), (1, Hk, Nk, D), (1, H, Nq, D)
    return [torch.randn(shape, device=engine.device) for shape in shapes]


@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(7, 2), softcap=5.0), dict(scale=0.3)])
def test_attention_and_its_gradients_agree_with_the_reference(kernel, options):
    q, k, v, dout = inputs()
    want = error.expected(q, k, v, dout, **options)
    out, lse = kernel.forward(q, k, v, **options)
    gradients = kernel.backward(dout, q, k, v, out, lse, **options)
    assert not error.failures(dict(zip(("dq", "dk", "dv"), gradients, strict=True)) | {"out": out, "lse": lse}, want)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = kernel.attention(*leaves, **options)
    out.backward(dout)
    got = {"out": out.detach()} | {f"d{name}": x.grad for name, x in zip("qkv", leaves, strict=True)}
    assert not error.failures(got, want)


def test_decode_agrees_with_the_reference(kernel):
    q, k, v, dout = inputs(Nq=1)
    out, lse = kernel.decode(q, k, v, causal=True)
    assert not error.failures({"out": out, "lse": lse}, error.expected(q, k, v, dout, causal=True))


def test_attention_loses_no_gradient_silently(kernel):
    q, k, v, _ = inputs()
    sinks = torch.zeros(4, device=engine.device, requires_grad=True)
    with pytest.raises(RuntimeError, match="gives sinks no gradient"):
        kernel.attention(q, k, v, sinks=sinks)
    with torch.no_grad():
        kernel.attention(q, k, v, sinks=sinks)
    assert kernel.__all__ == ["attention", "forward", "backward", "decode"]
    assert all(getattr(kernel, name).__doc__ for name in kernel.__all__)


def test_the_files_are_the_course_s_own_and_import_torch_triton_and_python_only(folder):
    package = folder / "torch-ext" / "flash_attention_course"
    files = {str(file.relative_to(package)): file for file in package.rglob("*") if file.is_file()}
    assert {*files} == {*hub.files(), "__init__.py"} and len(files) == 8
    assert all(files[place].read_bytes() == file.read_bytes() for place, file in hub.files().items())
    for file in files.values():
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert {name.split(".")[0] for name in names} <= {"torch", "triton", *sys.stdlib_module_names}, file


def test_the_builds_have_the_same_files_and_metadata(folder):
    package = folder / "torch-ext" / "flash_attention_course"
    for backend in ("cpu", "cuda"):
        variant = folder / "build" / f"torch-{backend}"
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["backend"] == {"type": backend} and metadata["name"] == "flash-attention-course"
        assert metadata["id"].isidentifier() and metadata["version"] == 1 and metadata["license"] == "MIT"
        for place, digest in metadata["digest"]["files"].items():
            content = (variant / place).read_bytes()
            assert base64.b64encode(hashlib.sha256(content).digest()).decode() == digest
            assert content == (package / place).read_bytes()
        assert len(metadata["digest"]["files"]) == 8


def test_the_build_file_and_the_card(folder):
    build = tomllib.loads((folder / "build.toml").read_text())
    general = build["general"]
    assert (general["name"], general["version"], general["backends"]) == ("flash-attention-course", 1, ["cpu", "cuda"])
    assert general["hub"] == {"repo-id": "somebody/attention"} and build["torch-noarch"] == {}
    card = (folder / "README.md").read_text()
    assert card == (folder / "build" / "CARD.md").read_text()
    _, head, text = card.split("---\n", 2)
    assert {"license: mit", "library_name: kernels", "- kernel"} <= {*head.splitlines()}
    project = tomllib.loads((Path(hub.ROOT) / "pyproject.toml").read_text())["project"]
    assert f"edition {project['version']}" in text
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    head, _, *lines = table or [[], []]  # no table where both kernels have changed since they were measured
    found = [dict(zip(head, line, strict=True)) for line in lines]
    fields = {"GPU": "gpu", "kernel": "kernel", "pass": "pass", "B": "B", "queries": "N", "keys": "Nk", "D": "D"}
    fresh = rows.fresh(row for row in rows.read() if row["kernel"] in ("flash", "decode"))
    measured = {(*(str(row[name]) for name in fields.values()), f"{row['ms_median']:.3g}") for row in fresh}
    assert all(tuple(line[name] for name in (*fields, "ms")) in measured for line in found)
    assert {line["GPU"] for line in found} == {row["gpu"] for row in fresh if row["options"].get("feature") == "causal"}
    assert {line["kernel"] for line in found} == {row["kernel"] for row in fresh}


def test_the_command_writes_into_an_empty_folder_only(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(SystemExit, match="is not empty"):
        hub.main(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]
