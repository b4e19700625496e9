"""The commands of ``node``, one file a family; :mod:`node.cli` lists them all.

A command checks what it was given and calls what does the work, which it imports inside: nothing
heavy is loaded for ``--help``.
"""
