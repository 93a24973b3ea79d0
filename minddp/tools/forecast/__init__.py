"""Predictions: the cost of a message, the length of a step by a plan, and the plan that exposes the least.

Small buckets leave early, but each pays a latency; large ones pay it seldom, but nothing hides the transfer of the
last. The optimum depends on model, machine and network, so `bucket_cap_mb="auto"` observes some steps
(`auto_buckets.py`) and computes it (`planner.py`). The same model predicts steps elsewhere (`step_model.py`).
"""
