"""docs/compatibility.md names tests that exist, and leaves none out."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "compatibility.md"


def names_of_tests(*patterns: str) -> set[str]:
    return {
        name
        for pattern in patterns
        for path in HERE.glob(pattern)
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }


def test_names_in_the_page_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text()))
    assert len(named) > 80
    known = names_of_tests(
        "test_compat_*.py",
        "test_wrap*.py",
        "test_use_cache.py",
        "test_first_real_step.py",
    )
    assert named - known == set()


def test_every_test_is_in_the_page() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text()))
    ours = {"test_names_in_the_page_exist", "test_every_test_is_in_the_page"}
    assert names_of_tests("test_compat_*.py", "test_wrap*.py") - named - ours == set()
