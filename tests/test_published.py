"""The page steps/course/verify/README.md: its table is what `verify` finds in these versions of the packages."""

from importlib import metadata

import pytest

from support import published


def test_the_page_lists_each_function_with_the_version_that_is_installed():
    page = published.PAGE.read_text()
    versions = dict(each.split("==") for each in published.PACKAGES)
    for _, name, package, lacks in published.FUNCTIONS:
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {name}")]
        assert package in ("", "torch") or f"<br>{package} {versions[package]} |" in line
        assert all(each in line.split("|")[-2] for each in lacks)


@pytest.mark.long
def test_the_table_is_what_verify_finds(tmp_path):
    page = published.PAGE.read_text()
    if f"torch {metadata.version('torch').split('+')[0]} |" not in page:
        pytest.skip("the page is about another version of torch")
    try:
        rows = published.judged(tmp_path)
    except OSError as problem:
        pytest.skip(f"the packages cannot be installed: {problem}")
    assert published.filled(page, rows) == page
