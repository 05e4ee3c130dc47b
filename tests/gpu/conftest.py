"""The tests in this folder need a Hopper GPU and the extension; anywhere else they are skipped with the reason.

A test that hangs ends the whole run after a minute and a half: a GPU that waits for a barrier cannot be interrupted.
"""

import faulthandler
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))

import harness  # noqa: E402

SECONDS_UNTIL_HUNG = 90
_stderr = [sys.__stderr__]


def pytest_configure() -> None:
    _stderr[0] = os.fdopen(os.dup(2), "w")  # capturing is suspended here; later fd 2 is pytest's temporary file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = harness.why_not()
    if reason:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def watchdog():
    faulthandler.dump_traceback_later(SECONDS_UNTIL_HUNG, exit=True, file=_stderr[0])
    yield
    faulthandler.cancel_dump_traceback_later()
