"""Verbs (InfiniBand, RoCE): queue pairs built by pyverbs, work requests posted and polled by compiled code.

`words` says what travels and what a link remembers; `post`, `arrive` and `send` are its compiled halves; `table` is what
the engine calls. `provider` finds the functions of the card's user-space driver; `channels` puts a rank's end together.
"""
