"""X-ray: see the work of data parallelism in every step, on every rank.

    with minddp.xray(ddp) as x:
        train_step()
    x.explain()            # in the terminal: where the time goes, and the changes that would make a step shorter
    x.save("step.html")    # a page that needs no network; .json to load again

| question | file |
|---|---|
| how is it used? | `xray.py`, `result.py`; in a shell: `wrappers.py`, after `launch/run.py` |
| what is recorded, and at what cost? | `record.py`, from `sources.py` |
| how are the ranks' recordings gathered? | `peers.py` |
| what is a recording, and a step? | `recording.py`; from its events `reading.py` makes the steps of `timeline.py` |
| which change would make a step shorter? | `analysis.py` tries some, `model.py` predicts |
| how is it shown? | in the terminal: `words.py`; `page/`; in Perfetto: `chrome_trace.py` |
"""
