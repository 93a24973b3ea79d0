"""The built-in tasks of `minddp train`: functions that return a `minddp.tools.train.task.Task`."""
