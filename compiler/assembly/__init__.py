"""Puts the parts of an engine together; `driver.py` calls these in order.

request.py  what a build is asked to do      progress.py  how it tells what it is doing
pipeline.py passes for this build            weights.py   constants -> rank0.weights
tokenizer.py tokenizer.json, compacted         calibration.py text to observe values on
precision.py the table of certificates       feedback.py  matrices quantised to their inputs
calibrate.py importances of a checkpoint       weighting.py importances for a build
settings.py config.json and provenance       evidence.py  golden gate -> evidence.json
"""
