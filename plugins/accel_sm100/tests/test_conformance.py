"""``deepinfer conformance`` finds contracts that know where these components run."""

from __future__ import annotations

import pytest
import torch

from deepinfer_core.components import Slot
from deepinfer_core.testing.contracts import contract_of
from deepinfer_core.testing.contracts.base import failures, find_component

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to check on")


@pytest.mark.parametrize("slot", [Slot.KERNELS, Slot.ATTENTION])
def test_components_name_their_contract(slot: Slot) -> None:
    component = find_component(slot, "sm100")
    contract = contract_of(str(slot), component.conformance)
    assert contract.device_type == "cpu"  # type: ignore[attr-defined]
    law = {
        Slot.KERNELS: "test_providers_are_well_formed",
        Slot.ATTENTION: "test_softcap_bounds_the_scores",
    }[slot]
    assert failures(contract, "sm100", only=(law,)) == {}
