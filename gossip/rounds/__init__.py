"""How the members of a round agree, whoever dies on the way. Sans-IO; begin with agreement.py."""
