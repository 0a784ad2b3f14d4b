"""The certificate of a rule and a drafter. ``certify`` runs the stages, and is where to begin.

The modules, in the order in which one is made of those before it: ``records`` (what a certificate
says), ``subjects`` (settings, and small models), ``forcing`` (all drafts of a round, and their
probabilities), ``rounds`` (all outcomes of a round against plain decoding), ``loop`` (the compiled
loop against plain decoding), ``states`` (what a drafter keeps and learns), ``certify``.
"""
