"""Plugins that are broken on purpose: where they are read from, and what is asked of each."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path


def load(name):
    """A module of such plugins, beside this one. Other processes cannot import it by its name: it is on no path."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def breaks(suite, rule, words):
    """A rule of that name is broken, and told in those words; others may be, too."""
    found = {}
    for law in suite.laws():
        try:
            law.check()
        except Exception as error:
            found[law.name] = str(error)
    assert any(re.search(rule, law) and re.search(words, said) for law, said in found.items()), found
