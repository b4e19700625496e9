"""How islands agree: who is there, rounds and their certificates, the all-reduce, catching up.

Islands that meet in pairs, without rounds that are agreed on, are here too (docs/gossip.md). What
decides is sans-IO, events and ``now`` in, instructions out; thin drivers do the IO. Begin with
:mod:`gossip.rounds.agreement`, then :mod:`gossip.rounds.round`; docs/architecture.md follows a
round through the files, docs/protocol.md says it in words.
"""
