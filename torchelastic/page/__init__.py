"""The live page: a run in a browser, served by an agent; see docs/observing.md. Imports no torch."""
