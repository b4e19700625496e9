"""What travels between peers: identities, messages, codecs and the transports that carry them.

This package knows nothing of training. Everything above it speaks through
:mod:`protocols.transport` and the message classes of :mod:`protocols.messages`.
"""
