"""Model families of the core, written against the op table.

A family is offered through the ``model`` hook like any plugin's; ``decoder`` is one parameterised
decoder for the Llama, Mistral, Qwen and SmolLM lines.
"""
