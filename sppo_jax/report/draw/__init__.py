"""Pictures and tables of any kind: charts, timelines, columns of text, the look of a page."""
