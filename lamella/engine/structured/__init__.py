"""Outputs that follow a JSON schema, a regular expression, a list of choices, a grammar, or tags in free text.

    params ──▶ compiler ──▶ output_grammar: one state a sample, a mask of tokens a step
                  │
                  ├──▶ guidance_backend ──▶ grammar_text, vocabulary
                  └──▶ xgrammar_backend ──▶ xgrammar_forms

A backend's library parses grammars and computes masks. docs/structured_outputs.md has the rules.
"""
