"""Opt-in, reversible ways for other packages' calls to come here. Importing one changes nothing; ``enable`` does."""
