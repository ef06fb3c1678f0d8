"""Outputs that follow a JSON schema, a regular expression, a list of choices, a grammar, or tags in free text.

    params ──▶ grammar_text ──▶ compiler ──▶ output_grammar: one state a sample, a mask of tokens a step
                                   ▲
                     vocabulary ───┘  the tokenizer's tokens as bytes, made when first needed

llguidance parses grammars and computes masks. docs/structured_outputs.md has the rules.
"""
