"""Grammars through llguidance, the compiler `llguidance` of `openinfer.grammar_compilers`; the extra `structured`.

    submit ─► known? ─► a copy of its matcher, at once
                └─ no ─► worker thread: guard process translates and tries it ─► LLMatcher ─► first mask ─► kept

Nothing of a grammar that a client sent is seen by this process before the guard has survived it.
"""
