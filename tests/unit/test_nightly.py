"""The nightly profile of the property tests."""

from __future__ import annotations

import textwrap

import pytest

pytest_plugins = ["pytester"]


def test_nightly_asks_for_more_examples_once_for_each_property(
    pytester: pytest.Pytester, pytestconfig: pytest.Config
) -> None:
    """The cases of a parametrized property share its settings: ten cases were 10^10 examples."""
    conftest = (pytestconfig.rootpath / "tests" / "conftest.py").read_text()
    pytester.makeconftest(conftest)
    pytester.makepyfile(
        textwrap.dedent(
            """
            import pytest
            from hypothesis import given, settings, strategies as st

            count = 0

            @pytest.mark.parametrize("case", range(3))
            @settings(max_examples=5, database=None)
            @given(st.integers())
            def test_property(case, value):
                global count
                count += 1

            def test_count():
                assert count == 3 * 3 * 5
            """
        )
    )
    done = pytester.runpytest_subprocess("-q", "--hypothesis-profile=nightly")
    done.assert_outcomes(passed=4)
