"""Tests of minddp/tools/launch: jobs as a user starts them."""
