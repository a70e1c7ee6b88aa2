"""The xgrammar constraint keeps core's contract."""

from __future__ import annotations

import pytest

pytest.importorskip("deepinfer_recipe")

import deepinfer_recipe
from deepinfer_core.testing.contracts.constraint import ConstraintContract


class TestXgrammar(ConstraintContract):
    component = "xgrammar"
    plugins = (deepinfer_recipe,)
