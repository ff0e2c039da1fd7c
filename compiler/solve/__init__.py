"""The smallest engine whose measured divergence keeps a budget.

sensitivity.py  what each matrix's error costs     candidates.py  its formats, bytes and KL
search.py       one format for every matrix        rounds.py      build, measure, tighten, repeat
pareto.py       the points as pareto.json
"""

from __future__ import annotations
