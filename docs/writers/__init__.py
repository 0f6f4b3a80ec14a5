"""One file for each page of the reference; `markdown` has what they share."""
