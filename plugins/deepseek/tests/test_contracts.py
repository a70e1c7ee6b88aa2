"""The plugin's components keep the laws of their slots."""

from __future__ import annotations

import deepinfer_deepseek
from deepinfer_core.testing.contracts import contract_of
from deepinfer_deepseek.testing import conformance

PLUGINS = (deepinfer_deepseek,)


class TestV41(conformance.V41Contract):
    component = "deepseek-v41"
    plugins = PLUGINS


class TestV4(conformance.V4Contract):
    component = "deepseek-v4"
    plugins = PLUGINS


class TestV3(conformance.V3Contract):
    component = "deepseek-v3"
    plugins = PLUGINS


class TestFiles(conformance.FilesContract):
    component = "deepseek"
    plugins = PLUGINS


class TestLatent(conformance.LatentContract):
    component = "latent"
    plugins = PLUGINS


def test_every_component_names_its_contract() -> None:
    """What ``deepinfer conformance --plugin`` runs is what runs here."""
    hooks = ("checkpoints", "models", "attentions")
    offers = [
        offer for hook in hooks for offer in getattr(deepinfer_deepseek, f"deepinfer_{hook}")()
    ]
    for contract in (TestV41, TestV4, TestV3, TestFiles, TestLatent):
        (offer,) = (offer for offer in offers if offer.name == contract.component)
        assert contract.__base__ is contract_of(contract.slot, offer.conformance)
    assert len(offers) == 5
