"""Passes: one file each, its name the pass's name; see base.py for what a pass is.

pipeline.py  the order         manager.py  contract, sweep, verify, reports
match.py     patterns as data  rewrite.py  replacing values  probe.py  understanding by running
validate.py  the graph's results before and after each pass
"""
