"""Verbs (InfiniBand, RoCE): queue pairs built by pyverbs, work requests posted and polled by compiled code.

`words` says what travels and what a link remembers; `post`, `arrive` and `send` are the compiled halves of a link, and
`table` is what the engine calls.
"""
