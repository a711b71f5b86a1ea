"""Teams: the members of the `seq` axis that share a document, for each window of rows; set by `sequence.groups`."""
