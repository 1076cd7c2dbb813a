"""The experiments of five papers: one module a paper, one function a table or figure."""
