"""The ``engine`` command without a process of its own, which is most of what a short command takes."""

from __future__ import annotations

import pytest

from engine.cli.app import run


@pytest.fixture
def here(capsys, monkeypatch):
    """``here("serve", "--help", env={…})`` -> exit code, standard output, standard error; in this process."""

    def call(*arguments, env=None):
        capsys.readouterr()
        with monkeypatch.context() as patch:
            for name, value in {"NO_COLOR": "1", "COLUMNS": "200", **(env or {})}.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                run(arguments)
        return (ended.value.code or 0, *capsys.readouterr())

    return call
