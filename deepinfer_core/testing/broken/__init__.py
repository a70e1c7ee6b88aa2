"""Deliberately wrong components, one module per slot, each to be caught by a named test.

Every module has ``CORRECT``, a factory of a component that passes the whole contract, and
``BROKEN``: name -> (factory, name of a test that must fail). They keep the contracts honest: a law
that nothing can break is no law.
"""
