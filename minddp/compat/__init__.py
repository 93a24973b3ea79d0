"""The private surface of torch's class, for frameworks; `install` replaces torch's class by minddp's."""
