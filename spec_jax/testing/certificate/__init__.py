"""The certificate of a rule and a drafter. ``certify`` runs the stages, and is where to begin.

The modules, in the order in which one is made of those before it: ``records`` (what a certificate
says), ``subjects`` (settings, and small models), ``forcing`` and ``reported`` (all drafts of a
round, and their probabilities), ``verdicts`` (all outcomes of given drafts), ``rounds`` (a round
against plain decoding), ``loop`` and ``texts`` (the compiled loop against plain decoding),
``states`` (what a drafter keeps), ``memory`` (what it learns), ``certify``.
"""
