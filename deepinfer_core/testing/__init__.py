"""The conformance kit: what a component of each slot must do, as tests that anybody can run.

    from deepinfer_core.testing.contracts import CacheContract

    class TestAcmeCache(CacheContract):
        component = "acme"

Imported by tests only. Needs the extra ``testing`` (pytest, hypothesis).
"""
