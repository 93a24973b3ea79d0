"""Tasks that `minddp train` has built in, each a function that returns a `minddp.tools.train.task.Task`."""
