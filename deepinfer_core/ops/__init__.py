"""The table of named ops: what models are written against.

``reference`` holds each op in plain torch, which is also its specification; ``table`` binds one
provider to each op once, before the first step.
"""
